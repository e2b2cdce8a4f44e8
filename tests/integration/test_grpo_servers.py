"""The GRPO example with inference servers: a server, a trainer and the driver die, and every ticket is accounted for.

The servers are fakes of vLLM that sample from the published model; `make serve-demo` does the same with real ones.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.chaos import GRPO, GrpoRun
from holdfast.utils.metrics import read_stats
from tests.engine.servers.fakes import FakeServer
from tests.limits import stretched

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STEPS = 16
SETTINGS = (f"total_steps={STEPS}", "n_prompts=60", "batch_size=4", "n_samples=4", "trackers=[]")
PATIENCE_S = stretched(240.0)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[FakeServer]]:
    """Two, each with a model of its own."""
    with FakeServer("vllm", tmp_path, dtype="float32") as one, FakeServer("vllm", tmp_path, dtype="float32") as other:
        yield [one, other]


@pytest.fixture
def run(tmp_path: Path, servers: list[FakeServer]) -> Iterator[GrpoRun]:
    urls = ",".join(server.url for server in servers)
    script = GRPO.with_name("grpo_servers.py")
    settings = (*SETTINGS, f"servers=[{urls}]", "recover.freq_steps=3")
    run = GrpoRun(tmp_path / "run", *settings, script=script, experiment="grpo_servers")
    yield run
    run.stop()


def stats(run: GrpoRun) -> list[dict[str, float]]:
    return read_stats(run.trial_root / "stats" / "stats.jsonl")


def train_until(run: GrpoRun, step: int) -> None:
    run.wait_until(lambda: run.last_step() >= step or run.exit_code() is not None, PATIENCE_S)
    assert run.exit_code() is None, run.log_tail()


def test_a_server_a_trainer_and_the_driver_die_and_no_ticket_is_lost(run: GrpoRun, servers: list[FakeServer]) -> None:
    run.start()
    train_until(run, 2)
    servers[0].kill()
    train_until(run, run.last_step() + 2)
    assert stats(run)[-1]["servers_serving"] == 1
    servers[0].restart()
    run.wait_until(lambda: stats(run)[-1]["servers_serving"] == 2 or run.exit_code() is not None, PATIENCE_S)
    assert run.exit_code() is None, run.log_tail()
    assert run.kill("trainer", 1)
    attempts = len(run.attempts())
    run.wait_until(lambda: len(run.attempts()) > attempts, PATIENCE_S)
    run.kill("driver")
    run.start()
    assert run.wait(PATIENCE_S) == 0, run.log_tail()
    assert f"tickets 0 to {4 * STEPS - 1} were trained, each once and in its step" in run.log_tail()
    assert [entry["step"] for entry in stats(run)] == list(range(STEPS))
    assert max(entry["rollouts/staleness_max"] for entry in stats(run)) == 1  # sampled ahead, and no further
    assert not any(token["mixed"] for server in servers for token in server.tokens())


def test_servers_that_do_not_answer_end_the_job_before_it_trains(run: GrpoRun, servers: list[FakeServer]) -> None:
    for server in servers:
        server.kill()
    run._command.append("server_start_s=1")
    run.start()
    assert run.wait(PATIENCE_S) == 1
    assert re.search(r"error: http://127.0.0.1:\d+.* found no server there", run.log_tail())
    assert run.last_step() == -1
