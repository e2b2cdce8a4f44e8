"""The GRPO example asks Ray for the GPUs that its keys name, and for none by default."""

from typing import Any

import pytest

from examples.grpo import copy_digits, start_workers
from examples.grpo_job import GRPOConfig
from holdfast.engine.workers.placement import WorkerResources
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError


class NoAttempt:
    """Records the requests to start workers."""

    def __init__(self) -> None:
        self.asked: dict[str, WorkerResources | None] = {}

    def worker_group(
        self, *args: Any, name: str, resources: WorkerResources | None = None, **options: Any
    ) -> str:
        self.asked[name] = resources
        return name


@pytest.mark.parametrize(
    ("overrides", "trainer", "rollout"),
    [
        ([], WorkerResources(), WorkerResources()),
        (
            ["gpus_per_trainer=1", "gpus_per_rollout=0.5"],
            WorkerResources(gpus=1),
            WorkerResources(gpus=0.5),
        ),
    ],
)
def test_trainers_and_the_rollout_worker_get_the_gpus_that_their_keys_name(
    overrides: list[str], trainer: WorkerResources, rollout: WorkerResources
) -> None:
    attempt: Any = NoAttempt()
    config = load_config(GRPOConfig, "examples/grpo_copy.yaml", overrides)
    start_workers(config, copy_digits(config), attempt)
    assert attempt.asked == {"trainer": trainer, "rollout": rollout}


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("gpus_per_trainer=-1", "gpus_per_trainer"),
        ("gpus_per_rollout=-0.5", "gpus_per_rollout"),
        ("actor.device=cuda", "'actor.device' is 'cuda', but 'gpus_per_trainer' is 0"),
    ],
)
def test_gpus_that_cannot_be_had_are_refused_before_anything_starts(
    override: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        load_config(GRPOConfig, "examples/grpo_copy.yaml", [override])
