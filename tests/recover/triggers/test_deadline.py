"""``recover.must_save_by``: durations, times, and the end of SLURM's job."""

import os
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from holdfast.recover import RecoverConfig
from holdfast.recover.deadline import end_of_slurm_job, parse_deadline
from holdfast.recover.triggers import StopRequests
from holdfast.utils.config import load_config
from holdfast.utils.errors import ConfigError, Preempted
from holdfast.utils.processes import process_started_at
from tests.helpers import run_ranks
from tests.recover.runs import Tiny, make_handler, names, step_info

HOUR = 3600


@pytest.mark.parametrize(
    ("text", "length_s"),
    [
        ("5400s", 5400),
        ("90m", 5400),
        ("3h30m", 3.5 * HOUR),
        ("2d", 48 * HOUR),
        ("1d2h3m4s", 26 * HOUR + 184),
        ("100h", 100 * HOUR),
        (" 90m\n", 5400),
    ],
)
def test_durations_count_from_the_start_of_the_process(text: str, length_s: float) -> None:
    assert parse_deadline(text, process_started_at() + 60) == process_started_at() + length_s


def test_times_are_local_unless_they_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        noon_utc = datetime(2031, 1, 1, 12, tzinfo=timezone.utc)  # noqa: UP017
        before = (noon_utc - timedelta(days=30)).timestamp()
        for text in (
            "2031-01-01T07:00",
            "2031-01-01 07:00:00",
            "2031-01-01T13:00+01:00",
            "2031-01-01T12:00:00Z",
        ):
            assert parse_deadline(text, before) == noon_utc.timestamp()
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "5400",
        "5400.5",
        "179000000",
        "17900000000",
        "Slurm",
        "3:30:00",
        "3:30",
        "3:60:00",
        "1:2:3:4:5",
        "1:00:30:00",
        "90 m",
        "1.5h",
        "30m3h",
        "-5",
        "1e4",
        "inf",
        "nan",
        "2031-01-01",
        "2031-13-01T00:00",
        "18:00",
        "2031-01-01T18:00 tomorrow",
        "m",
        "\u0663m",
    ],
)
def test_an_invalid_deadline_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StopRequests([], text)
    assert f"'recover.must_save_by' is {text!r}; expected" in str(caught.value)
    assert "'3h30m'" in str(caught.value) and "'2026-11-20T18:00'" in str(caught.value)
    assert "'slurm'" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["0s", "0h0m", "1577836800", "2020-01-01T00:00", "2020-01-01T00:00+00:00"]
)
def test_a_deadline_that_is_over_is_refused_before_anything_starts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"which was over at \d{4}-\d\d-\d\dT"):
        StopRequests([], text)


@pytest.mark.parametrize("value", ["1924999200", "1924999200.5", 1924999200, 1924999200.5])
def test_unix_times_are_numbers_or_strings_of_digits(value: str | float) -> None:
    assert parse_deadline(value, 0.0) == float(value)


def test_a_file_and_an_override_may_give_a_unix_time(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("must_save_by: 1924999200\n")
    from_file = load_config(RecoverConfig, tmp_path / "run.yaml")
    overridden = load_config(RecoverConfig, None, ["must_save_by=1924999300"])
    for config, expected in ((from_file, 1924999200), (overridden, 1924999300)):
        stops = StopRequests([], config.must_save_by)
        assert stops.deadline == expected


SQUEUE = """#!{python}
import os, sys
with open({calls!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
assert os.environ["SLURM_TIME_FORMAT"] == "%s"
{answer}
"""


def _fake_squeue(folder: Path, answer: str) -> Path:
    """Put a squeue first on PATH, and return the file to which it writes its arguments."""
    calls = folder / "calls"
    command = folder / "squeue"
    command.write_text(SQUEUE.format(python=sys.executable, calls=str(calls), answer=answer))
    command.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.environ["SLURM_JOB_ID"] = "4711"
    os.environ.pop("SLURM_JOB_END_TIME", None)
    return calls


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the environment after the test."""
    for name in ("PATH", "SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        if not os.environ[name]:
            del os.environ[name]


@pytest.mark.usefixtures("own_environment")
def test_newer_slurm_tells_the_end_of_the_job_without_squeue(tmp_path: Path) -> None:
    calls = _fake_squeue(tmp_path, "print(1)")
    os.environ["SLURM_JOB_END_TIME"] = "1924999200"
    assert end_of_slurm_job() == 1924999200 and not calls.exists()


@pytest.mark.usefixtures("own_environment")
def test_a_task_of_an_array_asks_for_its_own_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = int(time.time()) + 60
    calls = _fake_squeue(tmp_path, f"print({end})")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert end_of_slurm_job() == end
    assert calls.read_text() == "-h -j 4711_2 -o %e\n"


@pytest.mark.usefixtures("own_environment")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("print('N/A')", "gives 'N/A', which is no time to come"),
        ("print()", "gives '', which is no time to come"),
        ("print(1577836800)", "gives '1577836800', which is no time to come"),
        ("sys.exit('slurm_load_jobs error: Invalid job id specified')", "failed: slurm_load_jobs"),
    ],
)
def test_a_job_whose_end_squeue_does_not_tell_is_refused(
    answer: str, why: str, tmp_path: Path
) -> None:
    _fake_squeue(tmp_path, answer)
    with pytest.raises(ConfigError, match=f"'squeue -h -j 4711 -o %e' .*{why}|%e {why}"):
        end_of_slurm_job()


@pytest.mark.usefixtures("own_environment")
def test_without_squeue_the_error_names_it(tmp_path: Path) -> None:
    _fake_squeue(tmp_path, "")
    os.environ["PATH"] = str(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"squeue .* failed: .*No such file.* give a duration"):
        end_of_slurm_job()


def test_outside_of_slurm_the_configuration_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="in no job of SLURM"):
        make_handler(tmp_path, must_save_by="slurm")


def _stop_before_the_end(rank: int, world_size: int, folder: Path) -> tuple[str, list[str], str]:
    calls = _fake_squeue(folder / "bin", f"print({int(time.time())} + 12)")
    handler, tiny = make_handler(folder / "runs", freq_steps=1000, must_save_by="slurm"), Tiny()
    handler.load(tiny.state)
    reason = ""
    try:
        for step in range(1000):
            tiny.step()
            time.sleep(0.1)
            handler.dump(tiny.state, step_info(step))
    except Preempted as stop:
        reason = str(stop)
    return reason, names(folder / "runs"), calls.read_text()


@pytest.mark.slow
def test_a_job_of_slurm_stops_before_its_end_and_asks_once_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    first, second = run_ranks(_stop_before_the_end, 2, tmp_path)
    assert first == second
    reason, generations, calls = first
    assert "recover.must_save_by 'slurm', which is 20" in reason
    assert len(generations) == 1 and calls == "-h -j 4711 -o %e\n"


def _fail_together(rank: int, world_size: int, folder: Path) -> str:
    _fake_squeue(folder / "bin", "sys.exit('no controller')")
    handler = make_handler(folder / "runs", must_save_by="slurm")
    with pytest.raises(ConfigError) as caught:
        handler.load(Tiny().state)
    return str(caught.value)


def test_all_ranks_end_if_slurm_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    outcomes = run_ranks(_fail_together, 2, tmp_path)
    assert all("no controller" in outcome for outcome in outcomes)
    assert not (tmp_path / "runs").exists()
