"""The GRPO example takes turns with two real vLLM servers. It is killed in turns, and no ticket is
lost.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.chaos import GrpoRun
from examples.copy_task import write_model_folder
from holdfast.utils.metrics import read_stats
from tests.limits import stretched
from tests.live_vllm.live_server import LiveServer
from tests.recover.cli.commands import answer, holdfast

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

STEPS = 12
SETTINGS = (
    f"total_steps={STEPS}",
    "n_prompts=60",
    "batch_size=2",
    "n_samples=2",
    "trackers=[]",
    "colocate=true",
)
KILLS = [
    ("offload", "driver"),  # all of them are away
    ("POST /wake_up", "driver"),  # one server has its weights, the other may have
    ("publish", "trainer"),  # a version that no server has loaded
    ("POST /collective_rpc", "driver"),  # one server has loaded it, the other may have
    ("POST /inference/v1/generate", "driver"),  # the check of the new version: servers are awake
    ("POST /sleep", "driver"),  # one server sleeps, the other may be awake
    ("onload", "trainer"),
    ("train_step", "driver"),  # a step without a snapshot
]
"""Calls of a turn after which a process is killed, and whose. Each start of the job trains a step
before.
"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[LiveServer]]:
    """Two servers with the model of the example."""
    model = write_model_folder(tmp_path / "model", hidden=128, for_vllm=True)
    options = (
        "--logprobs-mode",
        "processed_logprobs",
        "--max-model-len",
        "64",
        "--max-num-batched-tokens",
        "4096",
    )
    servers = [LiveServer(model, tmp_path, *options) for _ in range(2)]
    try:
        for server in servers:
            server.start()
        with ThreadPoolExecutor() as pool:
            list(pool.map(LiveServer.wait_until_ready, servers))
        yield servers
    finally:
        for server in servers:
            server.kill()


def test_a_job_that_is_killed_in_turns_trains_each_ticket_once(
    servers: list[LiveServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = tmp_path / "kills.json"
    kills.write_text(json.dumps(KILLS))
    monkeypatch.setenv("HOLDFAST_KILLS", str(kills))
    script, urls = (
        Path(__file__).with_name("doomed_turns.py"),
        f"servers=[{servers[0].url},{servers[1].url}]",
    )
    settings = (*SETTINGS, urls, "recover.freq_steps=1")
    run = GrpoRun(tmp_path / "run", *settings, script=script, experiment="grpo_servers")
    try:
        for _ in range(1 + [victim for _, victim in KILLS].count("driver")):
            run.start()
            code = run.wait(stretched(300))
            assert code in (0, -9), run.log_tail()
    finally:
        run.stop()
    assert code == 0 and json.loads(kills.read_text()) == [], run.log_tail()
    output = (run.fileroot / "output.log").read_text()
    assert f"tickets 0 to {2 * STEPS - 1} were trained, each once and in its step" in output
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    assert [entry["step"] for entry in stats] == list(range(STEPS))
    assert max(entry["rollouts/staleness_max"] for entry in stats) <= 1
    assert all(server.sleeps() for server in servers) and {
        entry["servers_asleep"] for entry in stats
    } == {2}
    spent = answer("top", run.trial_root)["spent_s"]
    assert all(
        spent[phase] > 0 for phase in ("waking", "publishing", "sampling", "sleeping", "training")
    )
    assert "2 asleep" in holdfast("top", run.trial_root, "--once")[1]
