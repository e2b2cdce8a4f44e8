"""A driver that starts servers on Ray and waits to be killed: ``python -m ... ADDRESS FOLDER``.

It prints the process ids of the servers once they answer, or as soon as they start if the folder
has a file ``starting``.
"""

import sys
import time
from pathlib import Path

import ray

from holdfast.engine.launch import RayServers
from tests.engine.launch.stand_in import quick_limits, stand_in_spec
from tests.limits import stretched, wait_until
from tests.ray_helpers import start_ray, worker_environment


def main(address: str, folder: Path) -> None:
    """Run until it is killed."""
    if address == "local":
        start_ray(num_cpus=2, num_gpus=2)
    else:
        ray.init(address=address, log_to_driver=False, runtime_env=worker_environment())
    spec = stand_in_spec(folder)
    if (folder / "starting").exists():
        spec = stand_in_spec(folder, environment={"FAKE_VLLM_SLOW": "600"})
    with RayServers(spec, 2, folder / "servers", limits=quick_limits()) as servers:
        if not (folder / "starting").exists():
            servers.wait_until_up(stretched(60))
        wait_until(lambda: len(servers.pids()) == 2, 60)
        print(*servers.pids().values(), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
