"""What the commands tell of the records of unfinished episodes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.utils.record_log import join_payload, log_files
from tests.engine.rollouts.lives import Chat, Lasting
from tests.engine.rollouts.servers import make_executor, make_loader
from tests.limits import wait_until
from tests.recover.cli.commands import answer, flip_byte, holdfast
from tests.recover.runs import Diary, Meter, Tiny, make_handler, step_info

pytestmark = pytest.mark.timeout(60)


def record(root: Path, n_answers: int, n_calls: int) -> Path:
    """A run that was killed after step 0 with records of unfinished episodes. Returns its
    folder.
    """
    handler = make_handler(root, freq_steps=1)
    diary = Diary()
    handler.register("rollouts", diary)
    tiny = Tiny()
    handler.load(tiny.state)
    if not handler.store.generations():
        diary.note("before the generation")
        handler.dump(tiny.state, step_info(0))
    assert diary.log is not None
    for n in range(n_answers):
        head = {"ticket": n, "key": "k", "nth": 0, "kind": "answer", "tokens": 512}
        diary.log.append(join_payload(head, bytes(100)))
    for n in range(n_calls):
        diary.log.append(join_payload({"ticket": n, "key": "c", "nth": 0, "kind": "call"}, b"1"))
    handler.close(wait=False)
    return root / "e" / "t"


@pytest.fixture
def trial(tmp_path: Path) -> Path:
    """A run with 20 answers and 3 calls since step 0."""
    return record(tmp_path, 20, 3)


def test_ls_tells_what_was_recorded_since_the_newest_generation(trial: Path) -> None:
    (log,) = answer("ls", trial)["logs"]
    assert (log["name"], log["since"], log["files"]) == ("rollouts", 0, 1)
    assert (log["answers"], log["tokens"], log["calls"]) == (20, 20 * 512, 3)
    code, out, _ = holdfast("ls", trial)
    assert code == 0
    assert "episodes/rollouts: 1 file, " in out
    assert "20 answers (10.2k tokens) and 3 calls since step 0, the last " in out


def test_ls_of_a_run_without_a_generation_counts_from_the_start(tmp_path: Path) -> None:
    trial = record(tmp_path, 1, 0)
    for generation in (trial / "recover").glob("global_step_*"):
        generation.rename(tmp_path / "elsewhere")
    (log,) = answer("ls", trial)["logs"]
    assert (log["since"], log["answers"]) == (None, 1)
    assert " since the start" in holdfast("ls", trial)[1]


def test_ls_of_a_run_without_a_log_tells_nothing_of_it(finished: Path) -> None:
    assert answer("ls", finished)["logs"] == []
    assert "episodes" not in holdfast("ls", finished)[1]


def test_show_counts_the_recorded_answers_of_unfinished_tickets(tmp_path: Path) -> None:
    # Two tickets of step 0, whose third answers never come.
    server = Lasting(limit=4)
    loader = make_loader(2)
    tiny = Tiny()
    with (
        make_executor([server], Chat(turns=3), loader, max_head_offpolicyness=0) as executor,
        make_handler(tmp_path, freq_steps=1) as handler,
    ):
        handler.register("rollouts", executor)
        handler.register("unlogged", Meter())
        handler.load(tiny.state, loader)
        executor.set_version(0)
        wait_until(lambda: server.taken == 4)
        handler.dump(tiny.state, step_info(0), loader)
    generation = f"{tmp_path}/e/t@0"
    expected = ["rollouts (4 recorded answers of unfinished tickets)", "unlogged"]
    assert answer("show", generation)["processes"]["rank_00000"]["objects"] == expected
    code, out, _ = holdfast("show", generation)
    assert code == 0 and expected[0] in " ".join(out.split())


def test_verify_counts_damaged_records_and_torn_ends(trial: Path) -> None:
    code, out, _ = holdfast("verify", trial)
    assert code == 0 and "episodes/rollouts" in out

    # A torn end is what a kill leaves.
    newest = log_files(trial / "recover" / "episodes" / "rollouts")[-1].path
    os.truncate(newest, newest.stat().st_size - 1)
    code, out, _ = holdfast("verify", trial)
    assert code == 0 and "sound, 1 torn end" in out

    flip_byte(newest, at=60)
    code, out, _ = holdfast("verify", trial)
    assert code == 1
    assert "1 damaged record (their requests will be asked again)" in " ".join(out.split())
    (report,) = (
        report
        for report in answer("verify", trial, code=1)["folders"]
        if report["where"].endswith("episodes/rollouts")
    )
    assert report["torn"] == 1 and len(report["problems"]) == 1


def test_verify_names_a_file_that_cannot_be_read(trial: Path) -> None:
    name = "00000099-aaaaaaaa-00000000.log"
    os.mkfifo(trial / "recover" / "episodes" / "rollouts" / name)
    code, out, _ = holdfast("verify", trial)
    assert code == 1 and name in out


def test_why_tells_how_many_records_each_attempt_has_read(trial: Path) -> None:
    record(trial.parents[1], 2, 0)
    record(trial.parents[1], 0, 0)
    found = answer("why", trial)["attempts"]
    assert [attempt["recorded"] for attempt in found] == [0, 23, 25]
    assert "recorded" in holdfast("why", trial)[1]


def test_commands_need_no_torch_for_records(trial: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from holdfast.recover.cli.episodes import newest_logs, whole_logs\n"
        "from holdfast.recover.storage.generations import GenerationStore\n"
        "store = GenerationStore(Path(sys.argv[1]))\n"
        "print(newest_logs(store)[0].answers, whole_logs(store)[0].answers)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(trial / "recover")], capture_output=True, text=True
    )
    assert done.stdout.split() == ["20", "20"], done.stderr


def test_the_generation_names_its_log(trial: Path) -> None:
    info = json.loads((trial / "recover" / "global_step_0" / "recover_info.json").read_text())
    newest = log_files(trial / "recover" / "episodes" / "rollouts")[-1]
    assert info["logs"] == {"rollouts": newest.id}
