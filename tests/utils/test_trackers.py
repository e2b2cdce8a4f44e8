"""Trackers next to ``stats.jsonl``: the real libraries, offline. A run keeps its id, and each step
appears once.
"""

import json
import os
import re
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.utils import trackers
from holdfast.utils.errors import ConfigError
from holdfast.utils.metrics import RUN_ID_NAME, STATS_NAME, StatsLogger, read_stats
from tests.helpers import free_port
from tests.limits import stretched

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
LIFE = """
import os, signal, sys
from pathlib import Path
from holdfast.utils.metrics import StatsLogger
stats = StatsLogger(sys.argv[1], sys.argv[2].split(","), project="project", name="run")
after, until, end = sys.argv[3:]
stats.resume_after(None if after == "none" else int(after))
for step in range(0 if after == "none" else int(after) + 1, int(until)):
    stats.log(step, {"loss": step / 4, "a/b": 1.0})
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
stats.close()
"""


def live(folder: Path, names: str, after: str, until: int, end: str = "closed") -> None:
    """One life of a run in a separate process: resume after a step and log up to another."""
    env = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", LIFE, str(folder), names, after, str(until), end]
    result = subprocess.run(
        command, env=os.environ | env, timeout=stretched(60), capture_output=True, text=True
    )
    assert result.returncode == (-signal.SIGKILL if end == "killed" else 0), result.stderr


def dashboard_metrics() -> list[str]:
    """Metrics in the queries of examples/grafana.json."""
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found = [re.fullmatch(r'(holdfast_\w+)\{run="\$run"\}', query) for query in queries]
    assert all(found), queries
    return [match[1] for match in found if match]


def wandb_records(path: Path) -> Iterator[bytes]:
    """Parse the records of a ``.wandb`` file: the log format of LevelDB, after a header of 7
    bytes.
    """
    data, start, record = path.read_bytes(), 7, b""
    while start + 7 <= len(data):
        if (room := 32768 - start % 32768) < 7:
            start += room  # the rest of a block is too short for a header
            continue
        _, size, kind = struct.unpack_from("<IHB", data, start)
        record += data[start + 7 : start + 7 + size]
        start += 7 + size
        if kind in (1, 4):  # the whole record, or its last part
            yield record
            record = b""


def wandb_rows(folder: Path) -> list[tuple[str, int, float]]:
    """Id, step and loss of every row, in the order of the lives."""
    wandb_internal_pb2 = import_module("wandb.proto.wandb_internal_pb2")
    rows = []
    for path in sorted(
        folder.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime
    ):
        for data in wandb_records(path):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.HasField("history"):
                row = {
                    item.key or item.nested_key[0]: json.loads(item.value_json)
                    for item in record.history.item
                }
                rows.append((path.stem.removeprefix("run-"), record.history.step.num, row["loss"]))
    return rows


def trackio_rows(folder: Path) -> list[tuple[str, int, float]]:
    """Name of the run, step and loss of every row."""
    (path,) = (path for path in (folder / "trackio").glob("*.db"))
    with sqlite3.connect(path) as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY step"
        ).fetchall()
    return [(name, step, json.loads(metrics)["loss"]) for name, step, metrics in rows]


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_its_wandb_id_and_has_each_step_once(tmp_path: Path) -> None:
    live(tmp_path, "wandb", "none", 6)
    live(tmp_path, "wandb", "3", 9)  # steps 4 and 5 are repeated
    run_id = (tmp_path / RUN_ID_NAME).read_text()
    assert wandb_rows(tmp_path) == [(run_id, step, step / 4) for step in range(9)]


@pytest.mark.slow
def test_a_run_that_is_resumed_keeps_its_trackio_name_and_lacks_no_step_after_a_kill(
    tmp_path: Path,
) -> None:
    live(tmp_path, "trackio", "none", 6, "killed")  # the missing rows come from stats.jsonl
    live(tmp_path, "trackio", "3", 9)
    name = f"run-{(tmp_path / RUN_ID_NAME).read_text()}"
    assert trackio_rows(tmp_path) == [(name, step, step / 4) for step in range(9)]


@pytest.mark.slow
def test_a_fresh_start_is_another_run_to_the_trackers(tmp_path: Path) -> None:
    live(tmp_path, "wandb", "none", 3)
    first = (tmp_path / RUN_ID_NAME).read_text()
    live(tmp_path, "wandb", "none", 2)
    second = (tmp_path / RUN_ID_NAME).read_text()
    assert first != second
    assert wandb_rows(tmp_path) == [
        *((first, step, step / 4) for step in range(3)),
        (second, 0, 0.0),
        (second, 1, 0.25),
    ]
    assert [line["step"] for line in read_stats(tmp_path / STATS_NAME)] == [0, 1]


@pytest.mark.slow
def test_a_tracker_that_is_added_later_gets_the_steps_before(tmp_path: Path) -> None:
    live(tmp_path, "tensorboard", "none", 3)
    live(tmp_path, "tensorboard,wandb", "2", 5)
    assert [step for _, step, _ in wandb_rows(tmp_path)] == [0, 1, 2, 3, 4]


def scrape(address: str) -> dict[str, float]:
    text = urlopen(f"http://{address}/metrics", timeout=stretched(20)).read().decode()
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {"run"}
    return {sample.name: sample.value for sample in samples}


def test_prometheus_scrapes_the_last_step_of_a_run_and_of_its_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv(trackers.PROMETHEUS_ADDRESS, address)
    live(tmp_path, "prometheus", "none", 4, "killed")
    stats = StatsLogger(tmp_path, ["prometheus"], name="run")
    stats.resume_after(1)
    stats.log(2, {"loss": 0.125, "a/b": 3.0, "a_b": 4.0})
    assert scrape(address) == {"holdfast_step": 2, "holdfast_loss": 0.125, "holdfast_a_b": 4}
    other = StatsLogger(tmp_path / "other", ["prometheus"])
    with pytest.raises(ConfigError, match=f"no server for Prometheus can be started at {address}"):
        other.log(0, {"loss": 1.0})
    stats.close()
    other.log(0, {"loss": 1.0})  # the port is free again
    other.close()
    with pytest.raises(URLError):
        scrape(address)
    monkeypatch.setenv(trackers.PROMETHEUS_ADDRESS, "9464")
    with pytest.raises(ConfigError, match="HOLDFAST_PROMETHEUS is '9464'; expected host:port"):
        StatsLogger(tmp_path / "third", ["prometheus"]).log(0, {"loss": 1.0})


def test_the_dashboard_shows_each_metric_of_the_chosen_run_once() -> None:
    board = json.loads(DASHBOARD.read_text())
    names = dashboard_metrics()
    assert len(names) == len(set(names)) and {"holdfast_goodput", "holdfast_mfu"} <= set(names)
    places = {tuple(panel["gridPos"].values()) for panel in board["panels"]}
    assert len(places) == len(board["panels"]), "panels do not overlap"


def test_unknown_and_missing_trackers_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "stats"
    with pytest.raises(
        ConfigError, match="names 'mlflow'; expected some of 'tensorboard', 'wandb', 'trackio'"
    ):
        StatsLogger(folder, ["tensorboard", "mlflow"])
    with pytest.raises(ConfigError, match="expected each once"):
        StatsLogger(folder, ["wandb", "wandb"])
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"'wandb', which is not installed; run pip install 'holdfast\[wandb\]'"
    ):
        StatsLogger(folder, ["wandb"])
    assert not folder.exists()
