"""The example of an agent with a database, killed twice between its snapshots."""

import json
import re
import sqlite3
import subprocess
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from examples.agent_grpo import make_shop, price_of, query
from tests.integration.sft_runs import kill_tree
from tests.limits import stretched
from tests.minimal import ROOT, TORCHRUN, served_model

EXAMPLE = ROOT / "examples" / "agent_grpo.py"
OPTIONS = ("epochs=4", "freq_steps=4", "n_samples=4", "max_new_tokens=2")
STEP = re.compile(r"^step (\d+): reward [\d.]+, (\d+) answers from records$", re.MULTILINE)


def requests(folder: Path) -> Counter[str]:
    """How often each request reached the server, in its own record."""
    found: Counter[str] = Counter()
    for file in (folder / "server").glob("*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            body = line.get("body", "")
            rid = json.loads(body).get("request_id", "") if body.startswith("{") else ""
            if rid.startswith("ticket-"):
                found[rid] += 1
    return found


def live(command: list[str], log: Path, kill_after: int | None) -> list[tuple[int, int]]:
    """Run a job to its end, or kill it when it has printed a step. Returns its steps and the
    answers that it took from records.
    """

    def printed() -> list[tuple[int, int]]:
        return [(int(step), int(n)) for step, n in STEP.findall(log.read_text())]

    end = time.monotonic() + stretched(150)
    with log.open("w") as output:
        job: Any = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        while job.poll() is None and time.monotonic() < end:
            if kill_after in [step for step, _ in printed()]:
                return printed()
            time.sleep(0.05)
        assert job.returncode == 0, log.read_text()[-3000:]
        return printed()
    finally:
        if job.poll() is None:
            kill_tree(job)


def test_a_digit_of_another_script_is_no_item_of_the_database(tmp_path: Path) -> None:
    shop = str(tmp_path / "shop.sqlite")
    make_shop(shop)
    assert query(shop, "3=") == f"={price_of(3)}+"
    assert query(shop, "\N{ARABIC-INDIC DIGIT THREE}=") == "="


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_agent_that_is_killed_twice_orders_once_and_samples_little_again(tmp_path: Path) -> None:
    with served_model(tmp_path) as arguments:
        command = [*TORCHRUN, str(EXAMPLE), *arguments, *OPTIONS]
        live(command, tmp_path / "0.txt", kill_after=2)
        second = live(command, tmp_path / "1.txt", kill_after=6)
        third = live(command, tmp_path / "2.txt", kill_after=None)
    assert second[0][0] == 0 and second[-1][1] > 0, "before the first snapshot"
    assert third[0][0] == 4 and third[-1][0] == 7 and third[-1][1] > 0

    # 8 steps of 5 prompts with 4 conversations of 3 answers.
    found = requests(tmp_path)
    assert len(found) >= 8 * 5 * 4 * 3
    assert found.total() <= 1.25 * len(found)
    with closing(sqlite3.connect(tmp_path / "runs" / "shop.sqlite")) as shop:
        orders = Counter(name for (name,) in shop.execute("SELECT name FROM orders"))
    assert orders and set(orders.values()) == {1}
