"""Traces of chosen steps on chosen ranks: real traces of real steps."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from holdfast.engine import FinetuneSpec, ProfileConfig, StepInfo, TrainEngineConfig
from holdfast.engine.training.profiling import StepProfiler
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.test_fsdp_engine import loss_tokens, make_batch, make_engine, nll, rows
from tests.helpers import run_ranks
from tests.limits import stretched

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


@pytest.mark.slow
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


def _profiler(out: Path, *steps: int) -> StepProfiler:
    return StepProfiler(ProfileConfig(list(steps), str(out)), 0, torch.device("cpu"))


def _beside_other_profilers(rank: int, world_size: int, out: str) -> list[str]:
    """Let profilers meet in every way. Names of the traces that were written."""
    folder = Path(out)
    own = _profiler(folder / "own", 0)
    own.at(0)

    # A second engine, in this thread and in another one.
    second = _profiler(folder / "second", 0)
    second.at(0)
    in_thread = Thread(target=_profiler(folder / "third", 0).at, args=[0])
    in_thread.start()
    in_thread.join()
    torch.ones(2).add(1)
    second.close()
    own.close()

    # A profiler of the user, before ours and in the middle of ours.
    with profile(activities=[ProfilerActivity.CPU]) as users:
        second.at(1)
        _profiler(folder / "users", 0).at(0)
        torch.ones(2).add(1)
    users.export_chrome_trace(str(folder / "of_user.json"))
    ended = _profiler(folder / "ended", 0)
    ended.at(0)
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(2).add(1)
    ended.close()

    # A profiler that ends in another thread than it began.
    moved = _profiler(folder / "moved", 0)
    moved.at(0)
    ending = Thread(target=moved.close)
    ending.start()
    ending.join()
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.json"))


def test_a_second_profiler_of_a_process_ends_no_run(tmp_path: Path) -> None:
    (written,) = run_ranks(_beside_other_profilers, 1, str(tmp_path))
    assert written == ["of_user.json", "own/step_0_rank_0.json"]


def test_a_relative_folder_of_traces_stays_the_same_if_the_program_leaves_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profiler = _profiler(Path("traces"), 0)
    profiler.at(0)
    monkeypatch.chdir(tmp_path.parent)
    profiler.close()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["step_0_rank_0.json"]


def test_steps_that_never_came_are_named_but_not_those_before_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed = _profiler(tmp_path, 1, 4, 6)
    for step in (4, 5, 6):
        resumed.at(step)
    resumed.close()
    assert "no traces" not in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {
        "step_4_rank_0.json",
        "step_6_rank_0.json",
    }
    without_versions = _profiler(tmp_path, 2, 3)
    without_versions.at(0)
    without_versions.close()
    expected = "no traces of steps [2, 3]: the last step of this engine was 0, by its set_version"
    assert expected in caplog.text


@pytest.mark.slow
def test_a_process_that_ends_in_the_middle_of_a_trace_writes_it(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from holdfast.engine import ProfileConfig\n"
        "from holdfast.engine.training.profiling import StepProfiler\n"
        f"config = ProfileConfig([3], {str(tmp_path)!r})\n"
        "StepProfiler(config, 0, torch.device('cpu')).at(3)\n"
        "torch.ones(2).add(1)\n"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=stretched(60))
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "step_3_rank_0.json").exists()
