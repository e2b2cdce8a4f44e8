"""Traces of chosen steps on chosen ranks: real traces of real steps."""

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine import FinetuneSpec, ProfileConfig, StepInfo, TrainEngineConfig
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import loss_tokens, make_batch, make_engine, nll, rows
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(120)

N_STEPS = 5


def _train(rank: int, world_size: int, folder: str, out: str) -> bool:
    """Train five steps, of which 1 and 4 are traced on rank 1. Whether this rank has a profiler."""
    profile = ProfileConfig(steps=[1, 4], path=f"{out}/traces", ranks=[1])
    engine: Any = make_engine(folder, profile=profile)
    spec = FinetuneSpec(1, 8 * N_STEPS, 8)
    config = RecoverConfig("e", "t", fileroot=out, freq_steps=2)
    batch = rows(make_batch(), slice(rank * 4, rank * 4 + 4))
    with RecoverHandler(config, spec) as handler:
        handler.load(engine)
        for step in range(N_STEPS):
            engine.forward_batch(batch)
            engine.train_batch(batch, nll, loss_tokens)
            engine.set_version(step + 1)
            handler.dump(engine, StepInfo.at(step, N_STEPS))
    has_profiler = engine.profiler is not None
    engine.destroy()
    return has_profiler


def _phases(trace: Path) -> list[str]:
    """The named phases of a trace, in their order."""
    events = json.loads(trace.read_text())["traceEvents"]
    phases = [event for event in events if event.get("cat") == "user_annotation"]
    phases.sort(key=lambda event: event["ts"])
    names = [event["name"] for event in phases]
    assert any(event.get("cat") == "cpu_op" for event in events), "operators are in the trace"
    return [name for name in names if name in ("forward", "update", "snapshot", "publish")]


def test_chosen_steps_of_a_chosen_rank_are_traced_with_their_phases(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    found = run_ranks(_train, 2, str(tmp_path / "model"), str(tmp_path))
    assert found == [False, True]
    traces = sorted((tmp_path / "traces").iterdir())
    assert [path.name for path in traces] == ["step_1_rank_1.json", "step_4_rank_1.json"]

    # Every second step has a snapshot, which comes after the version has changed.
    assert _phases(traces[0]) == ["forward", "update", "snapshot"]
    assert _phases(traces[1]) == ["forward", "update"]


def test_a_profile_is_read_from_a_file_and_without_steps_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("profile: {steps: [10, 12], path: /traces}\n")
    config = load_config(TrainEngineConfig, file)
    assert config.profile == ProfileConfig([10, 12], "/traces", [0])
    file.write_text("profile: {path: /traces}\n")
    with pytest.raises(ConfigError, match=r"'profile.steps' is \[\]; expected one or more numbers"):
        load_config(TrainEngineConfig, file)
    with pytest.raises(ConfigError, match=r"'profile.ranks' is \[-1\]"):
        ProfileConfig([1], ranks=[-1])
