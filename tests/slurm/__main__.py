"""Run the tests of this folder on a SLURM of their own: ``python -m tests.slurm [ARGUMENTS]``.

The arguments are those of pytest.
As root on Linux. Missing programs are installed with apt-get. Where the tests cannot run, one line
says why, and the exit code is 0.

SLURM and pytest run in new namespaces for processes, network, mounts and the host name. So no port
of this machine is used, no file of it is changed, and the kernel ends every process of the
namespaces when pytest ends, however that happens.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from holdfast.utils.processes import die_with_parent

PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
}
"""Programs and the packages of Debian and Ubuntu that they are in."""
NAMESPACES = ["unshare", "--fork", "--kill-child", "--pid", "--mount-proc", "--net", "--uts"]
FOLDER = "HOLDFAST_SLURM_FOLDER"
"""Environment variable with the folder of SLURM's files."""
PROBE = "ip link add probe type veth peer name eborp"
# bash is the first process of the namespace, and therefore has to wait for orphans.
INIT = '"$@"; exit $?'


def main(arguments: list[str]) -> int:
    """Return the exit code of pytest, or 0 if the tests cannot run here."""
    reason = why_not()
    if reason is not None:
        print(f"The tests with SLURM are skipped: {reason}")
        return 0

    tests = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        pytest = [sys.executable, "-m", "pytest", "-m", "slurm", tests]
        pytest += [f"--basetemp={folder}/runs", *arguments]
        process = subprocess.Popen(
            [*NAMESPACES, "bash", "-c", INIT, "init", *pytest],
            env={**os.environ, FOLDER: folder},
            preexec_fn=die_with_parent,
        )
        try:
            code = process.wait()
        except KeyboardInterrupt:  # pytest has got it, too
            code = process.wait()
        finally:
            process.kill()
            remove_cgroups()
    return code


def why_not() -> str | None:
    """Install what is missing. Return why the tests cannot run here, or None."""
    if os.geteuid() != 0:
        return "SLURM's daemons and namespaces need root"
    missing = sorted({PACKAGES[name] for name in PACKAGES if shutil.which(name) is None})
    if missing:
        packages = " ".join(missing)
        if shutil.which("apt-get") is None:
            return f"install these packages of your distribution: {packages}"
        if not install(missing):
            return f"apt-get install {packages} failed"
    probe = subprocess.run([*NAMESPACES, "sh", "-c", PROBE], capture_output=True, text=True)
    if probe.returncode:
        return f"no namespaces with a network can be made here: {probe.stderr.strip()}"
    return None


def install(packages: list[str]) -> bool:
    """Install packages of the distribution, without starting their services."""
    print(f"Installing {' '.join(packages)} ...", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "--yes", "--quiet=2", "--no-install-recommends", *packages]
    for attempt in (["apt-get", "update", "--quiet=2"], command):
        if subprocess.run(attempt, env=environment, stdout=subprocess.DEVNULL).returncode:
            return False
    return True


def remove_cgroups() -> None:
    """Remove the empty control groups that the nodes leave behind."""
    for top in Path("/sys/fs/cgroup").glob("*/slurm_holdfast[0-9]"):
        folders = [Path(path) for path, _, _ in os.walk(top, topdown=False)]
        for folder in folders:
            # Another run of these tests may use it.
            with contextlib.suppress(OSError):
                folder.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
