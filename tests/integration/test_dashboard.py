"""The dashboard of the examples: every query is answered by what a job exports."""

from pathlib import Path

import pytest

from holdfast.engine.servers.api import server_stats
from holdfast.utils import trackers
from holdfast.utils.metrics import StatsLogger
from holdfast.utils.timing import PhaseTimes
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.rl.test_actor import global_batch, make_actor
from tests.engine.rollouts.servers import Server, make_executor
from tests.helpers import free_port
from tests.recover.runs import Tiny, make_handler
from tests.utils.test_trackers import dashboard_metrics, scrape

pytestmark = pytest.mark.timeout(120)


def test_the_parts_of_a_job_export_every_metric_of_the_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(trackers.PROMETHEUS_ADDRESS, address)
    write_model_folder(tmp_path / "model", tiny_qwen3())

    # What examples/grpo_servers.py joins in a step, of real parts.
    actor = make_actor(str(tmp_path / "model"), entropy_coeff=0.02)
    batch = global_batch()
    batch["logprobs"] = actor.compute_logp(batch)
    stats = actor.ppo_update(actor.compute_advantages(batch))
    with make_executor([Server()]) as executor:
        stats |= executor.stats()
    stats |= server_stats([])
    stats |= PhaseTimes("publishing", "sampling", "training").take()
    with make_handler(tmp_path / "run") as handler:
        handler.load(Tiny().state)
        stats |= handler.goodput()

    logger = StatsLogger(tmp_path / "stats", ["prometheus"], name="run")
    logger.log(0, stats)
    exported = scrape(address)
    logger.close()
    missing = set(dashboard_metrics()) - exported.keys()
    assert missing == {"holdfast_mfu"}, "only a GPU has it"
    actor.engine.destroy()  # type: ignore[attr-defined]
