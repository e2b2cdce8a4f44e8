"""``holdfast goodput``: what the wall time of a run was spent on."""

import errno
import json
import multiprocessing
import os
import random
import signal
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from holdfast.recover.storage import journal as journal_module
from holdfast.recover.storage.journal import JOURNAL_NAME, Journal
from holdfast.recover.storage.wall_time import RunningTime, TimeAccount, WallTime
from holdfast.utils.json_lines import read_lines
from holdfast.utils.metrics import StatsLogger
from tests.helpers import PRELOAD, run_ranks
from tests.limits import stretched
from tests.recover.cli.commands import answer, holdfast
from tests.recover.runs import Tiny, make_handler, step_info

pytestmark = pytest.mark.timeout(120)

N_STEPS = 40
KILLS = 8
STEP_S = 0.02


def _process_began() -> float:
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def _train(root: str, kill_at: int) -> None:
    """Train to the end, or until a kill in the middle of a step."""
    handler, tiny = make_handler(root, freq_steps=3), Tiny()
    first = handler.first_step(handler.load(tiny.state)).global_step
    with Path(root, "began").open("a") as file:
        file.write(f"{_process_began()}\n")
    stats = StatsLogger(root)
    stats.resume_after(first - 1 if first else None)
    for step in range(first, N_STEPS):
        begin = time.monotonic()
        tiny.step()
        time.sleep(STEP_S)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        others = {"server_start_s": 9.0, "rollouts/log_lag_s": 1.0, **handler.goodput()}
        stats.log(step, {"training_s": time.monotonic() - begin, **others})
        with Path(root, "trained").open("a") as file:
            file.write(f"{step}\n")
        handler.dump(tiny.state, step_info(step))
    handler.close()


def _live(root: Path, kill_at: int) -> int | None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    process = context.Process(target=_train, args=(str(root), kill_at))
    process.start()
    process.join(stretched(60))
    return process.exitcode


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed eight times on its way."""
    root = tmp_path_factory.mktemp("killed")
    moments = sorted(random.Random(7).sample(range(2, N_STEPS), KILLS))
    codes = [_live(root, moment) for moment in [*moments, -1]]
    assert codes == [-signal.SIGKILL] * KILLS + [0]
    return root


@pytest.mark.slow
def test_the_parts_add_up_to_the_wall_time_of_a_run_that_was_killed_eight_times(
    killed: Path,
) -> None:
    trial = killed / "e" / "t"
    found = answer("goodput", trial)
    lines = (trial / "journal.jsonl").read_text().splitlines()
    began = float((killed / "began").read_text().split()[0])
    wall_s = json.loads(lines[-1])["time"] - began
    assert sum(found["seconds"].values()) == pytest.approx(wall_s, rel=0.01)
    assert found["total_s"] == pytest.approx(wall_s, rel=0.01)

    # The run itself has noted each step before its `dump`.
    trained = [int(step) for step in (killed / "trained").read_text().split()]
    assert found["n_attempts"] == KILLS + 1
    assert (found["n_steps"], found["n_again"]) == (N_STEPS, len(trained) - N_STEPS)
    assert found["n_again"] > 0
    assert found["seconds"]["steps"] >= N_STEPS * STEP_S
    assert found["seconds"]["again"] >= found["n_again"] * STEP_S
    assert found["seconds"]["down"] >= KILLS * STEP_S, "the steps that the kills cut off"
    assert found["goodput"] == pytest.approx(found["seconds"]["steps"] / wall_s, rel=0.01)


def test_the_table_has_phases_and_a_line_in_words(killed: Path) -> None:
    code, out, _ = holdfast("goodput", killed / "e" / "t", "--stats", killed / "stats.jsonl")
    assert code == 0
    assert "steps that were trained again" in out and "down, or a step that was cut off" in out
    assert "  training" in out
    assert f"{N_STEPS} steps count" in out and "starts and kills cost" in out
    phases = answer("goodput", killed / "e" / "t", "--stats", killed / "stats.jsonl")["phases"]
    lines = (killed / "stats.jsonl").read_text().splitlines()
    logged = [json.loads(line)["training_s"] for line in lines]
    assert len(logged) == N_STEPS and phases == {"training": pytest.approx(sum(logged), abs=0.01)}


def test_each_step_logs_the_goodput_and_the_lost_seconds_of_all_attempts_so_far(
    killed: Path,
) -> None:
    found = answer("goodput", killed / "e" / "t")
    logged = [json.loads(line) for line in (killed / "stats.jsonl").read_text().splitlines()]
    assert all(0 < line["goodput"] < 1 for line in logged)
    lost_s = [line["lost_s"] for line in logged]
    assert lost_s == sorted(lost_s), "an attempt knows what the earlier ones have lost"
    assert len(set(lost_s)) > 1

    # The last attempt has lost nothing after its last step.
    assert lost_s[-1] == pytest.approx(found["lost_s"], abs=0.01)
    until_last_step_s = found["total_s"] - found["seconds"]["ending"]
    assert logged[-1]["goodput"] == pytest.approx(
        found["seconds"]["steps"] / until_last_step_s, rel=0.02
    )


def test_top_shows_the_goodput_of_all_attempts(killed: Path) -> None:
    found = answer("goodput", killed / "e" / "t")
    top = answer("top", killed / "e" / "t")
    assert (top["goodput"], top["lost_s"]) == (found["goodput"], found["lost_s"])
    code, out, _ = holdfast("top", killed / "e" / "t", "--stats", killed / "stats.jsonl")
    assert code == 0 and f"{found['goodput']:.1%}, starts and kills cost" in out


def test_a_look_at_a_running_run_reads_only_new_lines_of_its_journal(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL_NAME
    spent = RunningTime(tmp_path)
    assert spent.read().total_s == 0, "there is no journal yet"
    journal = Journal(tmp_path)
    journal.open()
    journal.start(step=None, load_s=0.5)
    for step in range(20):
        journal.note("step", step=step)
    assert spent.read().n_steps == 20

    # Lines that were read are not read again. Only new lines count.
    whole = path.read_bytes()
    path.write_bytes(b"\n" * len(whole))
    journal.note("step", step=20)
    found = spent.read()
    assert found.n_steps == 21 and spent.read().n_steps == 21
    added = path.read_bytes()[len(whole) :]
    events = [json.loads(line) for line in (whole + added).splitlines()]
    assert found == measure(events)

    # A step that counts until now is not in the journal yet.
    time.sleep(0.05)
    with_step = spent.with_step()
    assert with_step.seconds["steps"] >= found.seconds["steps"] + 0.05
    assert spent.read() == found
    journal.close()


def test_half_a_line_and_lines_that_cannot_be_read_count_later_and_a_new_journal_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / JOURNAL_NAME
    spent = RunningTime(tmp_path)
    lines = [json.dumps(event) + "\n" for event in [_start(10, None), *_steps(11, 15)]]
    path.write_text("".join(lines[:2]) + lines[2][:20])
    assert spent.read().n_steps == 1
    path.write_text("".join(lines[:3]))
    assert spent.read().n_steps == 2

    # An error after one of two lines.
    def failing(*args: Any, **kwargs: Any) -> Any:
        yield from islice(read_lines(*args, **kwargs), 1)
        raise OSError(errno.EIO, "Input/output error")

    path.write_text("".join(lines))
    with monkeypatch.context() as broken:
        broken.setattr(journal_module, "read_lines", failing)
        spent.read()
    assert spent.read().n_steps == 4

    path.write_text("".join(lines[:3]))
    assert spent.read().n_steps == 2


def _steps(first: int, last: int) -> list[dict[str, Any]]:
    return [_event(time, "step", step=time - first) for time in range(first, last)]


def _goodput_of_rank(rank: int, world_size: int, root: str) -> dict[str, float]:
    handler, tiny = make_handler(root, freq_steps=1), Tiny()
    assert handler.goodput() == {}, "nothing is known before `load`"
    handler.load(tiny.state)
    tiny.step()
    found = handler.goodput()
    handler.dump(tiny.state, step_info(0))
    handler.close()
    return found


def test_only_the_leader_has_figures_and_a_run_without_recovery_has_none(tmp_path: Path) -> None:
    leader, other = run_ranks(_goodput_of_rank, 2, str(tmp_path))
    assert leader.keys() == {"goodput", "lost_s"} and other == {}
    handler = make_handler(tmp_path / "off", mode="off")
    handler.load(Tiny().state)
    assert handler.goodput() == {}


def measure(events: list[dict[str, Any]]) -> WallTime:
    account = TimeAccount()
    for event in events:
        account.add(event)
    return account.spent


def _seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    return {kind: seconds for kind, seconds in measure(events).seconds.items() if seconds}


def _event(time: float, event: str, **facts: Any) -> dict[str, Any]:
    return {"event": event, "time": time, **facts}


def _start(time: float, step: int | None, load_s: float = 1.0, process: float = 0) -> Any:
    return _event(time, "start", step=step, load_s=load_s, process_started=process or time - 5)


def test_a_supervised_run_waits_for_resources_and_loses_what_its_kill_cut_off() -> None:
    events = [
        _event(100, "attempt", supervised=True),
        _event(118, "attempt"),
        _start(120, None, process=110),
        _event(130, "step", step=0),
        _event(131, "save", blocked_s=1.0),
        _event(141, "step", step=1),
        _event(151, "step", step=2),
        _event(155, "loss", group="trainer"),
        _event(156, "attempt", supervised=True),
        _start(165, 0, load_s=2.0, process=160),
        _event(175, "step", step=1),
        _event(178, "end", how="closed"),
    ]
    spent = measure(events)
    assert (spent.n_steps, spent.n_again, spent.n_attempts) == (2, 2, 2)
    assert _seconds(events) == {
        "steps": 10 + 10,
        "again": 20,
        "blocked": 1,
        "resources": 10 + 4,
        "processes": 9 + 3,
        "load": 1 + 2,
        "ending": 3,
        "down": 4 + 1,
    }
    assert spent.total_s == 78
    assert spent.lost_s == 20 + 14 + 12 + 3 + 5


def test_an_attempt_that_never_loads_and_lost_lines_leave_no_time_out() -> None:
    events = [
        _start(110, None, process=100),
        _event(120, "step", step=0),
        _event(121, "attempt"),  # the process had been killed, and its successor cannot load
        _event(130, "failed", error="x"),
        _event(150, "step", step=1),  # the line of the start is lost
        _event(160, "end", how="exited"),
    ]
    assert _seconds(events) == {
        "down": 1,
        "processes": 9 + 9,
        "load": 1,
        "steps": 10 + 20,
        "ending": 10,
    }


def test_a_clock_that_is_set_back_costs_the_interval_in_which_it_was() -> None:
    events = [_start(1000, None), *(_event(1000 + 10 * n, "step", step=n) for n in range(1, 4))]
    events += [_event(500 + 10 * n, "step", step=3 + n) for n in range(1, 4)]
    assert _seconds(events) == {"processes": 4, "load": 1, "steps": 30 + 20}
