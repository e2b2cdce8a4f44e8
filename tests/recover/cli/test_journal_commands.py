"""``why`` and ``top``, and the journal they read, for runs that were killed, stopped or failed."""

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.cli.attempts import AttemptRecord, last_attempt, list_attempts
from holdfast.recover.cli.in_use import use_of
from holdfast.recover.storage.journal import Journal
from holdfast.utils.errors import CheckpointCorruptError, ConfigError, Preempted
from holdfast.utils.metrics import StatsLogger
from tests.helpers import PRELOAD
from tests.limits import stretched
from tests.once import make_once
from tests.recover.cli.commands import answer, flip_byte, holdfast
from tests.recover.runs import Tiny, make_handler, step_info

pytestmark = pytest.mark.timeout(120)


def _train_on(root: str, until: int, end: str) -> None:
    """Train to a step and end there: by a ``kill``, ``stop`` or ``error``, by ``close``, or
    ``wait`` to be killed.
    """
    handler, tiny = make_handler(root, freq_steps=2), Tiny()
    info = handler.load(tiny.state)
    for step in range(info.last_step_info.next().global_step if info else 0, until + 1):
        if end == "stop" and step == until:
            os.kill(os.getpid(), signal.SIGTERM)
        tiny.step()
        handler.dump(tiny.state, step_info(step))
    if end == "wait":
        time.sleep(stretched(60))
    if end == "kill":
        handler.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    with handler:
        if end == "error":
            raise ValueError("the reward model is gone")


def _run(root: Path, until: int, end: str) -> None:
    process = _start(root, until, end)
    process.join(stretched(60))
    assert process.exitcode is not None


def _start(root: Path, until: int, end: str) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_train_on, args=(str(root), until, end))
    process.start()
    return process


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five attempts."""

    def make(root: Path) -> Path:
        for until, end in ((4, "kill"), (6, "stop"), (8, "error"), (9, "kill"), (10, "close")):
            _run(root, until, end)
        return root / "e" / "t"

    return make_once(tmp_path_factory, "troubled", make)


def test_why_tells_what_ended_each_attempt_and_the_steps_that_were_trained_again(
    troubled: Path,
) -> None:
    found = answer("why", troubled)
    verdicts = [attempt["verdict"] for attempt in found["attempts"]]
    assert verdicts[0] == verdicts[3] == "killed, or its machine was lost: nothing was noted"
    assert "SIGTERM" in verdicts[1] and verdicts[1].startswith("stopped as asked")
    assert (
        verdicts[2] == "ValueError: the reward model is gone"
        and verdicts[4] == "the handler was closed"
    )
    assert [attempt["resumed"] for attempt in found["attempts"]] == [None, 3, 6, 7, 9]
    assert [(attempt["first"], attempt["last"]) for attempt in found["attempts"]] == [
        (0, 4),
        (4, 6),
        (7, 8),
        (8, 9),
        (10, 10),
    ]
    assert [attempt["redone"] for attempt in found["attempts"]] == [0, 1, 0, 1, 0] and found[
        "redone"
    ] == 2
    assert all(attempt["gone_s"] > attempt["load_s"] > 0 for attempt in found["attempts"][1:])


def test_an_attempt_without_steps_hides_no_repeated_steps() -> None:
    def start(resumed: int | None) -> dict[str, Any]:
        return {"event": "start", "time": 0.0, "step": resumed}

    def steps(first: int, last: int) -> list[dict[str, Any]]:
        return [{"event": "step", "time": 1.0, "step": step} for step in range(first, last + 1)]

    events = [start(None), *steps(0, 9), start(6), start(6), *steps(7, 8), start(6), *steps(7, 11)]
    assert [one.redone for one in list_attempts(events)] == [0, 0, 2, 3]


def test_the_picture_shows_what_was_trained_again(troubled: Path) -> None:
    code, out, _ = holdfast("why", troubled)
    assert code == 0
    lines = [
        line
        for line in out.splitlines()
        if set(line[4:]) <= set(" ▒█") and ("█" in line or "▒" in line)
    ]
    assert [line[4:] for line in lines] == [
        "█████",
        "    ▒██",
        "       ██",
        "        ▒█",
        "          █",
    ]
    assert "5 attempts, 11 steps; 2 were trained again" in out


def _picture_of(tmp_path: Path, *attempts: tuple[int, int]) -> list[str]:
    """The lines that ``why`` draws for attempts from a first to a last step."""
    journal = tmp_path / "e" / "t" / "journal.jsonl"
    (journal.parent / "recover").mkdir(parents=True)
    with open(journal, "w") as file:
        for first, last in attempts:
            resumed = None if first == 0 else first - 1
            print(json.dumps({"event": "start", "time": 1e9, "step": resumed}), file=file)
            for step in range(first, last + 1):
                print(json.dumps({"event": "step", "time": 1e9 + step, "step": step}), file=file)
    code, out, _ = holdfast("why", journal.parent)
    assert code == 0
    return [
        line[4:]
        for line in out.splitlines()
        if set(line[4:]) <= set(" ▒█") and ("█" in line or "▒" in line)
    ]


@pytest.mark.parametrize("resumed", [101, 102, 110])
def test_the_picture_of_a_long_run_shows_a_single_step_that_was_trained_again(
    tmp_path: Path, resumed: int
) -> None:
    first, second = _picture_of(tmp_path, (0, resumed), (resumed, 159))
    assert set(first) == {"█"} and second.count("▒") == 1 and second.strip(" ").startswith("▒█")
    assert 64 <= len(second) <= 65


def test_the_picture_of_a_long_run_shows_a_single_new_step(tmp_path: Path) -> None:
    for last in (102, 103, 104):
        _, second, _ = _picture_of(
            tmp_path / str(last), (0, last - 1), (last - 1, last), (last, 159)
        )
        assert second.count("▒") >= 1 and second.endswith("█")


def test_an_attempt_that_goes_on_is_not_called_killed(tmp_path: Path) -> None:
    process, trial = _start(tmp_path, 3, "wait"), tmp_path / "e" / "t"
    try:
        deadline = time.monotonic() + stretched(60)
        while not (trial / "journal.jsonl").exists() or answer("top", trial)["step"] != 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [attempt["verdict"] for attempt in answer("why", trial)["attempts"]] == ["goes on"]
        seen = answer("top", trial)
        assert seen["in_use"] and seen["failed_in_a_row"] == 0 and seen["blocked_s"] > 0
        assert answer("ls", trial)["generations"][-1]["step"] == 1
        assert holdfast("verify", trial)[0] == 0
    finally:
        process.kill()
        process.join()
    assert answer("why", trial)["attempts"][0]["verdict"].startswith("killed")
    assert answer("top", trial)["in_use"] is False


def test_top_shows_the_reward_and_where_the_seconds_went_from_the_files_that_are_there(
    troubled: Path, tmp_path: Path
) -> None:
    logger = StatsLogger(tmp_path)
    logger.resume_after(None)
    for step in range(4):
        servers = {"servers_serving": 2.0, "servers_behind": 0.0, "servers_asleep": 1.0}
        logger.log(
            step, {"reward": 0.1 * step, "sampling_s": 2.0, "training_s": 1.0 + step, **servers}
        )
    logger.close()
    found = answer("top", troubled, "--stats", tmp_path / "stats.jsonl")
    assert found["step"] == 10 and found["generation"]["step"] == 9
    assert found["spent_s"] == {"sampling": 2.0, "training": 2.5}
    assert found["stats"]["reward"] == pytest.approx(0.3)
    code, out, _ = holdfast("top", troubled, "--stats", tmp_path / "stats.jsonl")
    assert code == 0 and "sampling" in out and "reward" in out and "newest generation" in out
    assert "2 serving, 1 asleep" in out


def test_top_reads_the_last_attempt_once_a_look(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []

    def noted(trial_root: Path) -> AttemptRecord | None:
        looks.append(trial_root)
        return last_attempt(trial_root)

    for module in ("top", "in_use"):
        monkeypatch.setattr(f"holdfast.recover.cli.{module}.last_attempt", noted)
    assert answer("top", finished)["ended"] == "closed" and looks == [finished]


def test_a_torn_line_of_a_journal_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"event": "step", "time": 1.0, "step": 0}\n{"event": "st')
    journal = Journal(tmp_path)
    journal.open()
    journal.note("step", step=1)
    journal.close()
    whole = [json.loads(line) for line in path.read_bytes().split(b"\n") if line.endswith(b"}")]
    assert [entry["step"] for entry in whole] == [0, 1]


_DAMAGED = (
    '{"event": "step"}',
    '{"event": "step", "time": "noon", "step": 4}',
    '{"event": "step", "time": 1e300, "step": 4}',
    '{"event": "step", "time": 1790000000.0, "step": "4"}',
    '{"event": "save", "time": 1790000000.0, "step": 4}',
    '{"event": "start", "time": 1790000000.0, "step": 1, "world_size": [1], "host": 7, '
    '"keep": {"last": "x"}}',
    '{"event": "start", "time": 1790000000.0, "process_started": null, "load_s": "soon"}',
    '{"event": "end", "time": NaN, "how": 1}',
    '{"event": "failed", "time": 1790000000.0, "error": {}}',
    '{"event": ' + "[" * 100_000,
)


@pytest.mark.parametrize("line", _DAMAGED, ids=range(len(_DAMAGED)))
def test_a_damaged_line_of_a_journal_is_left_out_by_every_command(
    finished: Path, tmp_path: Path, line: str
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "t"))
    before = answer("why", run)["attempts"]
    with open(run / "journal.jsonl", "a") as file:
        file.write(line + "\n")
    assert answer("why", run)["attempts"] == before
    top = answer("top", run)
    assert (top["step"], top["ended"]) == (7, "closed")
    assert [one["kept"] for one in answer("ls", run)["generations"]] == [
        one["kept"] for one in answer("ls", finished)["generations"]
    ]


def test_a_journal_that_is_a_pipe_blocks_neither_the_run_nor_a_command(tmp_path: Path) -> None:
    (tmp_path / "e" / "t").mkdir(parents=True)
    os.mkfifo(tmp_path / "e" / "t" / "journal.jsonl")
    with make_handler(tmp_path, freq_steps=1) as handler:
        tiny = Tiny()
        handler.load(tiny.state)
        tiny.step()
        assert handler.dump(tiny.state, step_info(0))
    assert holdfast("ls", tmp_path / "e" / "t")[0] == 0


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_journal_that_cannot_be_read_is_not_taken_for_an_empty_one(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "recover").mkdir()
    make(tmp_path / "journal.jsonl")
    for command in ("why", "goodput", "top", "status"):
        code, _, err = holdfast(command, tmp_path)
        assert code == 2 and "journal.jsonl" in err
    assert use_of(tmp_path).known is None


def test_a_journal_that_cannot_be_written_costs_the_run_nothing(tmp_path: Path) -> None:
    (tmp_path / "e" / "t" / "journal.jsonl").mkdir(parents=True)
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    tiny.step()
    assert handler.dump(tiny.state, step_info(0))
    handler.close()
    assert answer("ls", tmp_path / "e" / "t")["generations"][0]["step"] == 0


def test_a_stop_is_noted_with_its_reason(tmp_path: Path) -> None:
    handler, tiny = make_handler(tmp_path, freq_steps=1), Tiny()
    handler.load(tiny.state)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(Preempted):
        handler.dump(tiny.state, step_info(0))
    assert "SIGUSR1" in answer("why", tmp_path / "e" / "t")["attempts"][0]["verdict"]


def test_a_run_without_a_journal_and_one_at_a_url_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "recover").mkdir()
    for command in ("why", "top", "goodput"):
        code, _, err = holdfast(command, tmp_path)
        assert code == 2 and "journal.jsonl" in err
        code, _, err = holdfast(command, "s3://bucket/e/t")
        assert code == 2 and "needs the run's folder" in err


def test_why_and_top_tell_what_ended_an_attempt_that_could_not_load(tmp_path: Path) -> None:
    _run(tmp_path, 4, "kill")
    trial = tmp_path / "e" / "t"
    for shard in (trial / "recover").glob("global_step_*/*/*.distcp"):
        flip_byte(shard)
    with pytest.raises(CheckpointCorruptError), make_handler(tmp_path, freq_steps=2) as handler:
        handler.load(Tiny().state)
    with pytest.raises(
        ConfigError, match="no transformers model"
    ):  # without a `with` statement, as in many scripts
        make_handler(tmp_path, hf_freq_steps=1).load(Tiny().state)
    found = answer("why", trial)["attempts"]
    assert [attempt["loaded"] for attempt in found] == [True, False, False]
    assert found[1]["verdict"].startswith("before it had loaded: CheckpointCorruptError: ")
    assert found[2]["verdict"].startswith(
        "before it had loaded: ConfigError: engine 'default' has a Linear"
    )
    assert answer("top", trial)["ended"].startswith("ConfigError")
    journal = Journal(trial)
    journal.open()
    journal.begin()
    assert answer("top", trial)["ended"] is None, "an attempt begins"
    journal.note("returned")
    journal.close()
    assert answer("top", trial)["ended"].startswith("ConfigError"), "it was none of training"
    code, out, _ = holdfast("why", trial)
    assert code == 0 and "3 attempts, 5 steps; 0 were trained again" in out and "ConfigError" in out


def test_attempts_that_end_before_a_load_are_distinguished_from_replaced_workers() -> None:
    began, returned = {"event": "attempt", "time": 0.0}, {"event": "returned", "time": 9.0}
    start, lost = (
        {"event": "start", "time": 2.0, "step": None},
        {"event": "loss", "time": 1.0, "cause": "died"},
    )
    end = {"event": "end", "time": 3.0, "how": "closed", "error": "WorkerLost: trainer"}
    spent = {"event": "failed", "time": 4.0, "error": "RetriesExhausted: too many"}

    def verdicts(*events: dict[str, Any], in_use: bool = False) -> list[str]:
        found = list_attempts(events)
        return [one.verdict(one is found[-1], in_use) for one in found]

    assert verdicts(began, began, start, end, lost, began, lost, spent) == [
        "WorkerLost: trainer",
        "before it had loaded: worker group None lost rank(s) None: died; given up: "
        "RetriesExhausted: too many",
    ]
    assert verdicts(began, lost, start, in_use=True) == ["goes on"], (
        "one group was started again, and it came up"
    )
    assert verdicts(began, in_use=True) == ["begins: its workers start, or it loads"]
    assert verdicts(began) == [
        "before it had loaded: killed, or its machine was lost: nothing was noted"
    ]
    assert verdicts(began, returned) == [] == verdicts(returned)
    assert verdicts(start, end, spent) == [
        "WorkerLost: trainer; given up: RetriesExhausted: too many"
    ]
