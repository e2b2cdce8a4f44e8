"""Faults of a device end a job with an error that names them, and leave the committed generation as
it was.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.recover import RecoverConfig, RecoverHandler
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.recover.runs import (
    SPEC,
    digest,
    make_batch,
    make_engine,
    names,
    square_loss,
    step_info,
    token_count,
)
from tests.simulated_cuda import device

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(150)]

WHEN = ("load", "step", "snapshot")
FAULTY = 1
"""Rank with the fault."""


def _train(engine: Any, step: int) -> None:
    engine.train_batch(make_batch([step, step + 1]), square_loss, token_count)


def _handler(engine: Any, root: str) -> RecoverHandler:
    config = RecoverConfig("e", "t", fileroot=root, freq_steps=1, stop_signals=[])
    return RecoverHandler(config, SPEC, group=engine.control_group)


def _first_step(rank: int, world_size: int, model: str, root: str) -> str:
    """Commit step 0. Returns the digest of its state."""
    engine = make_engine(model)
    with _handler(engine, root) as handler:
        handler.load(engine)
        _train(engine, 0)
        handler.dump(engine, step_info(0))
        handler.wait()
        found = digest({"default": engine.dcp_state()})
    engine.destroy()
    return found


def _resume_with_a_fault(
    rank: int, world_size: int, model: str, root: str, fault: str, nth: int, when: str
) -> str:
    """Resume, and let one call of a rank fail. Returns this rank's error."""
    engine = make_engine(model)

    def fail_from_here(now: str) -> None:
        if now == when and rank == FAULTY:
            device.inject(fault, nth)

    try:
        with _handler(engine, root) as handler:
            fail_from_here("load")
            handler.load(engine)
            fail_from_here("step")
            _train(engine, 1)
            fail_from_here("snapshot")
            handler.dump(engine, step_info(1))
            handler.wait()
            _train(engine, 2)
            torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _resume(rank: int, world_size: int, model: str, root: str) -> tuple[int, str]:
    engine = make_engine(model)
    with _handler(engine, root) as handler:
        info = handler.load(engine)
        assert info is not None
        found = digest({"default": engine.dcp_state()})
    engine.destroy()
    return info.last_step_info.global_step, found


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, str]:
    """A model, a run with step 0, and the digest of that step."""
    folder = tmp_path_factory.mktemp("committed")
    write_model_folder(folder / "model", tiny_qwen3())
    first, second = run_ranks(_first_step, 2, str(folder / "model"), str(folder / "run"))
    assert first == second
    return str(folder / "model"), folder / "run", first


@pytest.mark.parametrize(
    ("fault", "nth", "when", "message"),
    [
        ("host_register", 1, "load", "CUDA cannot pin"),
        ("allocation", 3, "load", "CUDA out of memory"),
        ("copy", 2, "load", "unspecified launch failure"),
        ("allocation", 10, "step", "CUDA out of memory"),
        ("copy", 1, "snapshot", "unspecified launch failure"),
    ],
)
def test_a_fault_is_one_error_and_the_committed_step_is_resumed(
    committed: tuple[str, Path, str], fault: str, nth: int, when: str, message: str
) -> None:
    model, run, expected = committed
    before = names(run)
    errors = run_ranks(_resume_with_a_fault, 2, model, str(run), fault, nth, when)
    assert message in errors[FAULTY], errors
    assert (message in errors[1 - FAULTY]) != (when == "step"), (
        errors
    )  # in a step only the connection breaks
    assert names(run) == before == ["global_step_0"]
    assert run_ranks(_resume, 2, model, str(run)) == [(0, expected)] * 2
