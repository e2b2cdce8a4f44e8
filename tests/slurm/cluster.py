"""A SLURM of two nodes on this machine, without systemd.

munged, slurmctld and the nodes run in the namespaces that `tests.slurm.__main__` has made. A node
is a set of namespaces of its own for processes, network, mounts and the host name, with one slurmd.
So a node has an address and all ports, and what belongs to a machine (``/dev/shm``, ``/tmp/ray``)
is not shared. All other files are shared, like those on a file server.
"""

import os
import secrets
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.limits import stretched

NODES = {"holdfast1": "10.17.0.11", "holdfast2": "10.17.0.12"}
"""Addresses by host name."""
CONTROLLER = ("holdfast0", "10.17.0.10")
REPLACED = ("hosts", "resolv.conf")
"""Files of /etc that are replaced in the namespaces."""
MEMORY_CGROUP = Path("/sys/fs/cgroup/memory/cgroup.procs")
"""File that exists where SLURM can limit memory with version 1 of control groups."""

# The first process of a node. It waits for orphans, like the one of any machine.
NODE = """
hostname "$1"
mkdir -p /tmp/ray
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs tmpfs /dev/shm
until ip address add "$2/24" dev eth0 2>/dev/null; do sleep 0.1; done
ip link set lo up
ip link set eth0 up
ip route add default via "$3"
touch "$4"
sleep infinity
"""

CONF = """
ClusterName=holdfast
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{task}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
# nodes with more cores than the machine has
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=60
# as some sites have it, against the default
KillOnBadExit=1
SlurmdTimeout=15
# seconds for which finished jobs are remembered
MinJobAge=7200
ReturnToService=1
DefMemPerCPU=1000
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


class Cluster:
    """The daemons, with their files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.limits_memory = MEMORY_CGROUP.exists()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: dict[str, int] = {}

    def start(self) -> None:
        """Start everything, and wait until both nodes are idle. Commands of SLURM in this process
        use this cluster from then on.
        """
        self._write_files()
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        for name in REPLACED:
            _run("mount", "--bind", self.folder / name, f"/etc/{name}")
        self._connect_controller()
        self._start_munge()
        self._daemon("slurmctld", "-D")
        for name in NODES:
            self._start_node(name)
            self.start_slurmd(name)
        until(lambda: self.states() == dict.fromkeys(NODES, "idle"), "idle nodes", self.logs)

    def states(self) -> dict[str, str]:
        """State of each node. ``idle*`` stands for one that does not answer."""
        lines = ask("sinfo", "-h", "-N", "-p", "low", "-o", "%n %t").splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def start_slurmd(self, node: str) -> None:
        """Start the slurmd of a node."""
        conf = self.folder / "slurm.conf"
        _run(*self._inside(node), "slurmd", "-N", node, "-f", conf)

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL the slurmd of a node. The processes of its jobs live on."""
        pid = (self.folder / f"{node}.pid").read_text().strip()
        _run(*self._inside(node), "kill", "-KILL", pid)

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        tails = []
        for path in sorted(self.folder.glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-15:]
            tails.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(tails)

    def stop(self) -> None:
        """End the daemons, and the nodes with all that runs on them."""
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        for name in REPLACED:
            subprocess.run(["umount", f"/etc/{name}"])

    def _write_files(self) -> None:
        (self.folder / "state").mkdir()
        (self.folder / "key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "key").chmod(0o600)
        names = [("localhost", "127.0.0.1"), CONTROLLER, *NODES.items()]
        hosts = "".join(f"{address} {name}\n" for name, address in names)
        (self.folder / "hosts").write_text(hosts)
        # The names above are all that there are: a question to nobody is answered at once.
        (self.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        conf = CONF.format(
            folder=self.folder,
            controller=CONTROLLER[0],
            address=CONTROLLER[1],
            tracking="cgroup" if self.limits_memory else "linuxproc",
            task="cgroup" if self.limits_memory else "none",
        )
        for name, address in NODES.items():
            conf += f"NodeName={name} NodeAddr={address} CPUs=4 RealMemory=7000 State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(conf)
        if self.limits_memory:
            cgroup = "CgroupPlugin=cgroup/v1\nConstrainRAMSpace=yes\nConstrainSwapSpace=no\n"
            (self.folder / "cgroup.conf").write_text(cgroup)
        for name in NODES:
            (self.folder / name).mkdir()

    def _connect_controller(self) -> None:
        _run("hostname", CONTROLLER[0])
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "address", "add", f"{CONTROLLER[1]}/24", "dev", "bridge")
        _run("ip", "link", "set", "bridge", "up")

    def _start_munge(self) -> None:
        socket = self.folder / "munge"
        # The folder is below one that others may write to, which munged refuses without --force.
        files = [f"--key-file={self.folder}/key", f"--socket={socket}"]
        files += [f"--{kind}-file={self.folder}/munged.{kind}" for kind in ("pid", "seed", "log")]
        self._daemon("munged", "--foreground", "--force", *files)
        until(socket.exists, "munged", self.logs)

    def _start_node(self, name: str) -> None:
        ready = self.folder / f"{name}.ready"
        namespaces = ["--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts"]
        script = ["bash", "-c", NODE, "node", name, NODES[name], CONTROLLER[1], str(ready)]
        unshare = self._daemon("unshare", *namespaces, *script)

        # A cable between the bridge and the node.
        children = Path(f"/proc/{unshare.pid}/task/{unshare.pid}/children")
        until(children.read_text, f"the first process of {name}", self.logs)
        self._pids[name] = int(children.read_text())
        cable = ["type", "veth", "peer", "name", "eth0", "netns", str(self._pids[name])]
        _run("ip", "link", "add", name, *cable)
        _run("ip", "link", "set", name, "master", "bridge", "up")
        until(ready.exists, f"the network of {name}", self.logs)

    def _inside(self, node: str) -> list[str]:
        kinds = ["--pid", "--mount", "--net", "--uts"]
        return ["nsenter", "--target", str(self._pids[node]), *kinds]

    def _daemon(self, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{command[0]}.out.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest
            )
        self._processes.append(process)
        return process


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, timeout=stretched(30))


def ask(*command: str) -> str:
    """Return what a command of SLURM prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60))
    return done.stdout.strip()


def until(
    condition: Callable[[], object],
    what: str,
    describe: Callable[[], str],
    timeout_s: float = 120,
) -> None:
    """Wait until ``condition`` is true.

    Raises:
        AssertionError: it is not in time. The message has ``what`` and the text of ``describe``.
    """
    deadline = time.monotonic() + stretched(timeout_s)
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s} s for {what}\n{describe()}")
        time.sleep(0.1)
