"""The tracker `ray_metrics` with a real Ray, whose node exports what a driver and a worker log."""

import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from holdfast.utils.errors import ConfigError
from holdfast.utils.metrics import StatsLogger
from tests.limits import wait_until
from tests.ray_helpers import start_ray

pytestmark = pytest.mark.timeout(120)


def exported(address: str) -> dict[tuple[str, str], float]:
    """Map the name and run of each Holdfast gauge to its value. Empty while nobody answers."""
    time.sleep(0.2)  # between two scrapes
    try:
        text = urlopen(f"http://{address}/metrics", timeout=10).read().decode()
    except OSError:
        return {}
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    own = [sample for sample in samples if sample.name.startswith("ray_holdfast_")]
    return {(sample.name, sample.labels["run"]): sample.value for sample in own}


@ray.remote
def log_in_a_worker(folder: str) -> None:
    stats = StatsLogger(folder, ["ray_metrics"], name="worker")
    stats.log(0, {"loss": 0.5})


def test_a_process_outside_ray_is_told_to_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    outside = StatsLogger(tmp_path, ["ray_metrics"])
    for _ in range(2):
        with pytest.raises(ConfigError, match="this process is not connected to Ray"):
            outside.log(0, {"loss": 1.0})
    assert (tmp_path / "stats.jsonl").read_text() == ""


@pytest.mark.slow
def test_a_node_of_ray_exports_the_last_values_of_a_driver_and_of_a_worker(tmp_path: Path) -> None:
    ray.shutdown()  # the Ray that the modules share
    start_ray(_system_config={"metrics_report_interval_ms": 1000})
    try:
        node = ray.nodes()[0]
        address = f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        stats = StatsLogger(tmp_path / "driver", ["ray_metrics"], name="driver")
        stats.log(0, {"rollouts/finished": 3.0})
        stats.close()
        stats.log(1, {"rollouts/finished": 7.0})  # opens the tracker again
        ray.get(log_in_a_worker.remote(str(tmp_path / "worker")))
        expected = {
            ("ray_holdfast_step", "driver"): 1.0,
            ("ray_holdfast_rollouts_finished", "driver"): 7.0,
            ("ray_holdfast_step", "worker"): 0.0,
            ("ray_holdfast_loss", "worker"): 0.5,
        }
        wait_until(lambda: exported(address).items() >= expected.items(), 60)
    finally:
        ray.shutdown()
