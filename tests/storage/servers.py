"""Real storage servers on 127.0.0.1 that tests can kill, suspend and start again.

They end with the process that started them, in whatever way that ends.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import boto3
import botocore.exceptions
import psutil

from holdfast.utils.guard import end_guarded, start_guarded
from tests.limits import stretched
from tests.storage.install import CLASSPATH, HDFS, WEED

BUCKET = "runs"
_START_S = 120
_HADOOP = "org.apache.hadoop"
_MAIN_CLASSES = {
    "namenode": f"{_HADOOP}.hdfs.server.namenode.NameNode",
    "datanode": f"{_HADOOP}.hdfs.server.datanode.DataNode",
    "dfs": f"{_HADOOP}.fs.FsShell",
    "dfsadmin": f"{_HADOOP}.hdfs.tools.DFSAdmin",
}


class Server:
    """One program with its log. After `kill`, `start` starts it with the same ports and data."""

    def __init__(self, name: str, folder: Path, command: Sequence[str | Path]) -> None:
        self.log = folder / f"{name}.log"
        self._command = command
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._guard = start_guarded(self._command, log, stop_timeout_s=2.0)

    def _program(self) -> psutil.Process:
        assert self._guard is not None
        guard = psutil.Process(self._guard.pid)
        wait_until(lambda: bool(guard.children()), f"start of {self._command[0]}", self.log)
        return guard.children()[0]

    def kill(self) -> None:
        """End it like a crash."""
        self._program().kill()
        assert self._guard is not None
        self._guard.wait(stretched(30))

    def suspend(self) -> None:
        """Stop it from answering. Its connections stay."""
        self._program().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._program().send_signal(signal.SIGCONT)

    def end(self) -> None:
        if self._guard is not None:
            end_guarded(self._guard)


class HDFSCluster:
    """A NameNode and a DataNode.

    Attributes:
        datanode: keeps the bytes.
        url: ``hdfs://`` and address.
        web_url: ``webhdfs://`` and address.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rpc = f"127.0.0.1:{_lasting_port()}"
        self._http = f"127.0.0.1:{_lasting_port()}"
        self.url = f"hdfs://{self._rpc}"
        self.web_url = f"webhdfs://root@{self._http}"
        self._configure()
        for name in ("namenode", "datanode"):
            log_option = f"-Dhadoop.log.dir={folder}"
            command = self._java("-Xmx256m", log_option, _MAIN_CLASSES[name])
            setattr(self, name, Server(name, folder, command))

    namenode: Server
    datanode: Server

    def start(self) -> None:
        """Format the disk, start both servers and wait for them."""
        format_it = self._java(_MAIN_CLASSES["namenode"], "-format", "-nonInteractive")
        subprocess.run(format_it, check=True, capture_output=True, timeout=stretched(60))
        self.namenode.start()
        self.datanode.start()
        self.wait()

    def wait(self) -> None:
        """Wait until it takes files."""
        wait_until(self._is_ready, "HDFS", self.namenode.log, self.datanode.log)

    def admin(self, *args: str) -> str:
        """Run ``hdfs dfs`` or ``hdfs dfsadmin``."""
        tool, *rest = args
        command = self._java("-Xmx128m", _MAIN_CLASSES[tool], *rest)
        done = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60))
        assert done.returncode == 0, done.stderr
        return done.stdout

    def end(self) -> None:
        self.datanode.end()
        self.namenode.end()

    def _java(self, *args: str) -> list[str]:
        classpath = ":".join(map(str, (self._folder / "conf", *CLASSPATH)))
        return ["java", "-cp", classpath, *args]

    def _is_ready(self) -> bool:
        query = f"http://{self._http}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        with urllib.request.urlopen(query, timeout=stretched(2)) as reply:
            state = json.load(reply)["beans"][0]
        return state["NumLiveDataNodes"] >= 1 and state["FSState"] == "Operational"

    def _configure(self) -> None:
        conf = self._folder / "conf"
        # WebHDFS asks for web applications, which the jars do not have. Empty ones are enough.
        for name in ("hdfs", "datanode"):
            application = conf / "webapps" / name / "WEB-INF"
            application.mkdir(parents=True)
            (application / "web.xml").write_text("<web-app/>")
        (conf / "webapps" / "static").mkdir()

        core = {
            "fs.defaultFS": self.url,
            "hadoop.tmp.dir": self._folder / "data",
            "hadoop.http.staticuser.user": "root",
        }
        hdfs = {
            "dfs.replication": 1,
            "dfs.namenode.rpc-address": self._rpc,
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.http-address": self._http,
            "dfs.datanode.address": f"127.0.0.1:{_lasting_port()}",
            "dfs.datanode.http.address": f"127.0.0.1:{_lasting_port()}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{_lasting_port()}",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            # Small, so that a file of the tests has several blocks.
            "dfs.blocksize": 4 << 20,
            "dfs.namenode.fs-limits.min-block-size": 1 << 20,
            "dfs.namenode.heartbeat.recheck-interval": 5000,
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.safemode.extension": 0,
            "dfs.permissions.superusergroup": "root",
        }
        for name, values in (("core-site.xml", core), ("hdfs-site.xml", hdfs)):
            lines = [
                f"<property><name>{key}</name><value>{value}</value></property>"
                for key, value in values.items()
            ]
            (conf / name).write_text(f"<configuration>{''.join(lines)}</configuration>")
        (conf / "log4j.properties").write_text(
            "log4j.rootLogger=INFO,A\n"
            "log4j.appender.A=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.A.target=System.err\n"
            "log4j.appender.A.layout=org.apache.log4j.SimpleLayout\n"
        )


class SeaweedFS:
    """An S3 server with the bucket `BUCKET`. The user ``owner`` may do everything there, ``reader``
    may read.
    """

    def __init__(self, folder: Path) -> None:
        ports = {}
        for part in ("master", "volume", "filer", "s3"):
            ports[f"-{part}.port"] = _lasting_port()
            ports[f"-{part}.port.grpc"] = _lasting_port()
        self._ports = ports
        identities = folder / "identities.json"
        owner = ["Admin", "Read", "List", "Tagging", "Write"]
        reader = [f"Read:{BUCKET}", f"List:{BUCKET}"]
        identities.write_text(
            json.dumps({"identities": [_identity("owner", owner), _identity("reader", reader)]})
        )
        (folder / "data").mkdir()
        command = [
            *(WEED, "server", "-s3", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"{name}={port}" for name, port in ports.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
            *(f"-dir={folder / 'data'}", f"-s3.config={identities}"),
            *("-master.volumeSizeLimitMB=256", "-volume.max=20"),
        ]
        self.server = Server("weed", folder, command)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['-s3.port']}"

    def environment(self, user: str = "owner") -> dict[str, str]:
        """The environment variables that a user would set."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": user,
            "AWS_SECRET_ACCESS_KEY": f"secret-of-{user}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # one layer of retries less
        }

    def start(self) -> None:
        self.server.start()
        self.wait()
        self.shell(f"s3.bucket.create -name {BUCKET}")

    def wait(self) -> None:
        """Wait until it takes objects."""
        wait_until(self._is_ready, "SeaweedFS", self.server.log)

    def shell(self, command: str) -> str:
        """Run a command of its administrator."""
        master = f"127.0.0.1:{self._ports['-master.port']}.{self._ports['-master.port.grpc']}"
        filer = f"127.0.0.1:{self._ports['-filer.port']}.{self._ports['-filer.port.grpc']}"
        done = subprocess.run(
            [WEED, "shell", f"-master={master}", f"-filer={filer}"],
            input=f"{command}\n",
            capture_output=True,
            text=True,
            timeout=stretched(60),
        )
        assert done.returncode == 0 and "error" not in done.stderr, done.stdout + done.stderr
        return done.stdout

    def grant(self, user: str) -> None:
        """Give a user a key, with which it may do everything in the bucket."""
        keys = f"-access_key={user} -secret_key=secret-of-{user}"
        actions = "Read,Write,List,Tagging,Admin"
        self.shell(f"s3.configure -user={user} {keys} -buckets={BUCKET} -actions={actions} -apply")
        self.wait_for_key(user, works=True)

    def wait_for_key(self, user: str, *, works: bool) -> None:
        """Wait until the server knows that this user's key works, or works no longer."""
        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=user,
            aws_secret_access_key=f"secret-of-{user}",
            region_name="us-east-1",
        )

        def is_so() -> bool:
            try:
                client.list_objects_v2(Bucket=BUCKET, MaxKeys=1)
            except botocore.exceptions.ClientError:
                return not works
            return works

        wait_until(is_so, f"the change of {user}'s key", self.server.log)

    def end(self) -> None:
        self.server.end()

    def _is_ready(self) -> bool:
        # All its parts must answer, the filer and the volume server behind S3 too.
        port = self._ports["-filer.port"]
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/ready/probe", data=os.urandom(8), method="PUT"
        )
        with urllib.request.urlopen(request, timeout=stretched(2)):
            pass
        try:
            with urllib.request.urlopen(self.endpoint, timeout=stretched(2)):
                return True
        except urllib.error.HTTPError as error:
            return error.code in (403, 404)


def _identity(name: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": name, "secretKey": f"secret-of-{name}"}]
    return {"name": name, "credentials": credentials, "actions": actions}


def _lasting_port() -> int:
    """A free port that stays free while a server is down: below those that the system gives to
    outgoing connections.
    """
    range_of_system = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first_of_system = 32768
    if range_of_system.exists():
        first_of_system = int(range_of_system.read_text().split()[0])
    while True:
        port = random.randrange(first_of_system // 2, first_of_system)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def wait_until(is_so: Callable[[], bool], what: str, *logs: Path, every_s: float = 0.2) -> None:
    """Wait for a server. Raises AssertionError with the ends of its logs if it takes too long."""
    deadline = time.monotonic() + stretched(_START_S)
    while True:
        try:
            if is_so():
                return
        except (OSError, IndexError):
            pass  # it does not listen yet, or does not know its state
        ends = "\n".join(log.read_text(errors="replace")[-3000:] for log in logs if log.exists())
        assert time.monotonic() < deadline, f"{what} did not come up\n{ends}"
        time.sleep(every_s)


def missing(kind: str) -> str | None:
    """Why the servers of this kind cannot run here. None if they can."""
    installed = {
        "hdfs": (HDFS / "classpath").is_dir() and shutil.which("java") is not None,
        "s3": WEED.exists(),
    }
    if installed[kind]:
        return None
    return f"no server of {kind} is installed: make test-storage does it, or says why it cannot"
