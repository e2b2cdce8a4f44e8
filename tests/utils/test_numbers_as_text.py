"""Numbers that a YAML reader gave as text, and other values of a wrong type, are refused in
words.
"""

import subprocess
import sys
from dataclasses import fields
from types import NoneType
from typing import Any, get_args

import pytest

from holdfast.engine import FinetuneSpec, OptimizerConfig, TrainEngineConfig
from holdfast.engine.config import FSDPConfig, MicroBatchSpec
from holdfast.engine.parallel_strategy import ParallelStrategy
from holdfast.engine.rl.config import NormConfig, PPOActorConfig
from holdfast.engine.rl.off_policy import RejectionSamplingConfig
from holdfast.engine.rollouts.config import RolloutConfig
from holdfast.engine.servers import GenerationHyperparameters, ModelRequest
from holdfast.recover import RecoverConfig
from holdfast.utils.errors import ConfigError

pytestmark = pytest.mark.timeout(60)

CONFIGS: list[tuple[type[Any], dict[str, Any]]] = [
    (OptimizerConfig, {}),
    (MicroBatchSpec, {}),
    (FSDPConfig, {}),
    (TrainEngineConfig, {"path": "x"}),
    (PPOActorConfig, {"path": "x"}),
    (NormConfig, {}),
    (RejectionSamplingConfig, {}),
    (RolloutConfig, {}),
    (GenerationHyperparameters, {}),
    (RecoverConfig, {}),
    (ParallelStrategy, {}),
    (FinetuneSpec, {"total_train_epochs": 1, "dataset_size": 8, "train_batch_size": 4}),
]


def fields_of(kinds: set[type]) -> list[Any]:
    """All fields that take nothing but ``kinds``."""
    return [
        pytest.param(cls, given, field.name, id=f"{cls.__name__}.{field.name}")
        for cls, given in CONFIGS
        for field in fields(cls)
        if set(get_args(field.type) or [field.type]) <= kinds
    ]


NUMBERS = fields_of({int, float, NoneType})
WHOLE_NUMBERS = fields_of({int, NoneType})


@pytest.mark.parametrize(("cls", "given", "name"), NUMBERS)
def test_a_number_that_is_a_text_is_refused_with_key_value_and_fix(
    cls: Any, given: dict[str, Any], name: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"{name}' is '1e-5', a text; expected a number.*1\.0e-5"
    ):
        cls(**given | {name: "1e-5"})


@pytest.mark.parametrize(("cls", "given", "name"), WHOLE_NUMBERS)
def test_a_whole_number_with_a_point_is_refused_with_its_key(
    cls: Any, given: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{name}' is 2\.5; expected a whole number"):
        cls(**given | {name: 2.5})


def test_requests_to_servers_are_public() -> None:
    assert ModelRequest.__name__ == "ModelRequest" and GenerationHyperparameters.__name__


def test_a_single_rank_is_not_enough_for_context_parallelism_and_the_message_says_how_many() -> (
    None
):
    with pytest.raises(
        ConfigError,
        match=r"3 ranks have the same data.*only 1 rank\(s\) have joined; start 3 ranks",
    ):
        ParallelStrategy(context_parallel_size=3).for_world(1)


@pytest.mark.parametrize("module", ["holdfast.engine.worker_group", "holdfast.recover.supervisor"])
def test_without_ray_the_error_says_what_to_install(module: str) -> None:
    hide = "import sys; from importlib.machinery import PathFinder as P; f = P.find_spec\n"
    hide += (
        "P.find_spec = classmethod(lambda c, name, *a: None if name == 'ray' else f(name, *a))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}import {module}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "need the package ray: pip install 'holdfast[ray]'" in done.stderr.splitlines()[-1]
