"""The job that `benchmarks.goodput` strikes: examples/grpo_servers.py.

    python -m benchmarks.goodput_job fileroot=runs keeps_rollouts=false

The folders of the examples and of a server must be in ``PYTHONPATH``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from examples.copy_task import write_model_folder
from examples.grpo_job import exit_with, read_config, run_job
from examples.grpo_servers import GRPOServersConfig, open_servers, train
from holdfast.recover import RecoverHandler
from holdfast.recover.supervisor import Supervisor


@dataclass
class JobConfig(GRPOServersConfig):
    """Options of the job, in addition to those of the example."""

    keeps_rollouts: bool = True
    """Whether snapshots have the ledger of prompts. Without it the position in the data is saved as
    it is, which is ahead of training: prompts that were handed out and not trained are skipped
    after a kill. AReaL 4aef98d does the same.
    """


class WithoutRollouts(RecoverHandler):
    """A handler that saves no objects of the driver."""

    def register(self, name: str, thing: Any) -> None:
        """Leave the object out of every generation."""


def supervise(config: JobConfig, supervisor: Supervisor) -> None:
    """Run the job under a supervisor, next to its servers."""
    # Servers outlive the attempts of the supervisor, and end with the driver.
    handler_class = RecoverHandler if config.keeps_rollouts else WithoutRollouts
    with open_servers(config) as servers:
        supervisor.run(partial(train, config, servers, handler_class=handler_class))


def main(argv: list[str]) -> int:
    """Run the job."""
    # The stand-in has the widths that vLLM needs on CPUs.
    config = read_config(JobConfig, "grpo_servers.yaml", __doc__, argv)
    return run_job(config, partial(write_model_folder, hidden=128, for_vllm=True), supervise)


if __name__ == "__main__":
    exit_with(main)
