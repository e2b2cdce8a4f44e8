"""A model by its folder, which every rank needs, or by its name on the hub, with one commit for all
ranks.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from holdfast.engine import SaveLoadMeta, TrainEngineConfig, WeightUpdateMeta
from holdfast.engine.model_folder import find_model_folder
from holdfast.utils.errors import ConfigError
from tests.engine.hf_models import tiny_model
from tests.engine.hub import Hub, serve_hub
from tests.engine.model.test_initial_model import start
from tests.helpers import free_port, run_ranks
from tests.limits import stretched
from tests.once import make_once

RANK = """
import json, sys
from tests.engine.test_model_folder import report
print("REPORT" + json.dumps(report(json.loads(sys.argv[1]))))
"""


def report(wanted: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Start an engine for each configuration in a rank, and report the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcomes: dict[str, Any] = {}
    for case, changes in wanted.items():
        changes = dict(changes)
        try:
            engine = start(changes.pop("path"), **changes)
        except Exception as error:
            outcomes[case] = f"{type(error).__name__}: {error}"
            continue
        root = os.environ["ROOT"]
        engine.save(
            SaveLoadMeta(f"{root}/{case}", "hf", False, base_model_path=str(engine.model_folder))
        )
        engine.update_weights(WeightUpdateMeta("disk", path=f"{root}/{case} published", version=1))
        outcomes[case] = str(engine.model_folder)
        engine.destroy()
    return outcomes


def reports(
    root: Path, wanted: Mapping[str, dict[str, Any]], **environment: str
) -> list[dict[str, Any]]:
    """`report` of two ranks in separate processes, because huggingface_hub reads its environment at
    import.
    """
    root.mkdir()
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", RANK, json.dumps(wanted)]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **shared,
                **environment,
                "ROOT": str(root),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=stretched(120))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(output.split("REPORT")[1]) for output in outputs]


def _folder(root: Path, seed: int) -> Path:
    """A repository's folder: a model, a tokenizer, and many files that need no download."""
    folder = root / f"seed {seed}"
    tiny_model("llama", seed=seed).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "original").mkdir()
    for name in (
        "pytorch_model.bin",
        "evil.py",
        "original/consolidated.00.pth",
        "original/params.json",
    ):
        (folder / name).write_bytes(b"not wanted")
    return folder


def _serve(hub: Hub, root: Path) -> None:
    one, two = _folder(root, 1), _folder(root, 2)
    hub.add("org/model", main=one, other=two)
    moving = hub.add("org/moving", main=one, other=two)
    moving.revisions["main"] += moving.revisions["other"]  # pushed to after the first request
    hub.add("org/broken", main=one).broken = "model.safetensors"
    hub.add("org/slow", main=one).slow = "model.safetensors"
    hub.add("org/config", main=one)


ONLINE = {
    "model": {"path": "org/model"},
    "branch": {"path": "org/model", "revision": "other"},
    "moving": {"path": "org/moving"},
    "slow": {"path": "org/slow", "timeout_s": 3.0},
    "scratch": {"path": "org/config", "init_from_scratch": True},
    "broken": {"path": "org/broken"},
    "unknown": {"path": "org/nothing"},
    "unknown branch": {"path": "org/model", "revision": "no-such-branch"},
}
OFFLINE = {
    "model": {"path": "org/model"},
    "branch": {"path": "org/model", "revision": "other"},
    "incomplete": {"path": "org/config"},
    "unknown": {"path": "org/nothing"},
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Hub, list[dict], list[dict]]:
    """The runs' folder, the hub, and the reports of two ranks: first with the hub, then from the
    cache without it.
    """

    def make(root: Path) -> tuple[Path, Hub, list[dict], list[dict]]:
        with serve_hub() as hub:
            _serve(hub, root)
            online = reports(root / "online", ONLINE, HF_HOME=f"{root}/cache", HF_ENDPOINT=hub.url)
        offline = reports(
            root / "offline",
            OFFLINE,
            HF_HOME=f"{root}/cache",
            HF_ENDPOINT=hub.url,
            HF_HUB_OFFLINE="1",
        )
        return root, hub, online, offline

    return make_once(tmp_path_factory, "hub", make)


def _holds(folder: Path, seed: int) -> bool:
    weights, expected = (
        load_file(folder / "model.safetensors"),
        tiny_model("llama", seed=seed).state_dict(),
    )
    return weights.keys() == expected.keys() and all(
        torch.equal(weights[key], expected[key]) for key in expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", ["model", "branch", "slow", "scratch", "moving"])
def test_all_ranks_start_from_one_commit_of_a_model_on_the_hub(case: str, hub: Any) -> None:
    root, server, online, _ = hub
    first, second = (Path(report[case]) for report in online)
    assert first == second
    repository = server.repositories[ONLINE[case]["path"]]
    branch = ONLINE[case].get("revision", "main")
    assert repository.commits[first.name] == root / ("seed 2" if branch == "other" else "seed 1")
    if case != "scratch":
        assert _holds(root / "online" / case, 2 if branch == "other" else 1)


@pytest.mark.slow
def test_one_rank_of_a_node_downloads_what_is_needed_and_nothing_else(hub: Any) -> None:
    _, server, online, _ = hub
    wanted = ["config.json", "generation_config.json", "tokenizer.json"]
    for name, files in {"slow": [*wanted, "model.safetensors"], "config": wanted}.items():
        fetched = [file for file in server.fetched if file.startswith(f"org/{name}/")]
        assert sorted(fetched) == sorted(f"org/{name}/{file}" for file in files)
    assert {path.name for path in Path(online[0]["model"]).iterdir()} == {
        *wanted,
        "model.safetensors",
    }


@pytest.mark.slow
def test_exports_and_published_versions_take_the_files_from_the_hub(hub: Any) -> None:
    root, *_ = hub
    for folder in ("online/model", "online/model published/v00000001", "offline/model"):
        assert (root / folder / "tokenizer.json").read_text() == "{}", folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["model", "branch"])
def test_the_cache_serves_offline_what_was_downloaded(case: str, hub: Any) -> None:
    root, _, online, offline = hub
    assert [report[case] for report in offline] == [report[case] for report in online]
    assert _holds(root / "offline" / case, 2 if case == "branch" else 1)


@pytest.mark.slow
def test_the_cache_serves_what_was_downloaded_when_the_hub_cannot_be_reached(hub: Any) -> None:
    root, server, online, _ = hub  # the server has ended by now
    again = reports(
        root / "unreachable",
        {"model": ONLINE["model"]},
        HF_HOME=f"{root}/cache",
        HF_ENDPOINT=server.url,
    )
    assert [report["model"] for report in again] == [report["model"] for report in online]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "unknown",
            (
                "ConfigError: config key 'path' is 'org/nothing': there is no such folder, and no "
                "such model could be"
            ),
        ),
        (
            "unknown branch",
            (
                "ConfigError: config key 'path' is 'org/model' (revision no-such-branch): there "
                "is no such fo"
            ),
        ),
        ("broken", "ConfigError: config key 'path' is 'org/broken'"),
    ],
)
def test_a_model_missing_on_the_hub_is_an_error_on_every_rank(
    case: str, message: str, hub: Any
) -> None:
    _, server, online, offline = hub
    first, second = (report[case] for report in online)
    assert first.startswith(message)
    assert server.url in first
    assert second.startswith(
        (message, f"PeerError: downloading org/broken failed on rank 0: {message}")
    )
    if case in OFFLINE:
        assert all(report[case].startswith(message) for report in offline)


@pytest.mark.slow
def test_a_cache_without_the_weights_is_no_model_offline(hub: Any) -> None:
    *_, offline = hub
    assert offline[0]["incomplete"].startswith("ConfigError: config key 'path' is 'org/config'")
    assert "PeerError" in offline[1]["incomplete"] or "ConfigError" in offline[1]["incomplete"]


def _find(rank: int, world_size: int, root: Path, each: bool) -> str:
    folder = root / f"rank {rank}"
    if each or rank == 0:
        tiny_model("llama").config.save_pretrained(folder)
    dist.barrier()
    began = time.monotonic()
    try:
        find_model_folder(TrainEngineConfig(path=str(folder)))
    except Exception as error:
        assert time.monotonic() - began < stretched(5), "it waited"
        return f"{type(error).__name__}: {error}"
    return "found"


def test_a_folder_that_one_rank_lacks_is_an_error_on_all(tmp_path: Path) -> None:
    assert run_ranks(_find, 2, tmp_path / "both", True) == ["found"] * 2
    first, second = run_ranks(_find, 2, tmp_path / "one", False)
    assert (
        first.startswith("PeerError: finding the model")
        and "rank 1: ConfigError: config key 'path' is" in first
    )
    assert second.startswith(
        f"ConfigError: config key 'path' is '{tmp_path}/one/rank 1'; expected a folder with the"
    )


def test_a_revision_of_a_local_folder_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="config key 'revision' is 'main', but 'path' is a local folder"
    ):
        find_model_folder(TrainEngineConfig(path=str(tmp_path), revision="main"))


@pytest.mark.parametrize(
    "path", ["", "/no/such/folder", "no/such/folder", "-", "a//b", "a" * 300, "a\0b"]
)
def test_neither_folder_nor_model_name_is_refused_without_asking_the_hub(path: str) -> None:
    with pytest.raises(
        ConfigError, match=r"config key 'path' is .*; expected a folder with the config\.json"
    ):
        find_model_folder(TrainEngineConfig(path=path))
