"""Exports to URLs, at S3 and other backends: the same bytes as in a folder. Failures and
removals.
"""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import boto3
import pytest
import s3fs
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from holdfast.engine.api import HFExportOptions
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf import save, upload
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.safetensors_layout import WeightFile
from holdfast.engine.hf.save import deal_files, plan_export, save_hf
from holdfast.engine.staging.staged_model import staged_model
from holdfast.engine.staging.staged_state import Staging
from holdfast.utils.errors import CheckpointExistsError, CheckpointWriteError, ConfigError
from holdfast.utils.remote import RemoteFolder
from tests.engine.hf.test_export import _contents as contents
from tests.engine.hf.test_export import _file_size_limited as file_size_limited
from tests.engine.hf.test_export import _raised as raised
from tests.engine.hf.test_name_mapping import CONVERSIONS
from tests.engine.hf.test_shard_ranges import SHARDINGS
from tests.engine.hf.test_shard_ranges import _large_model as large_model
from tests.engine.hf_models import sharded, tiny_model
from tests.engine.models import tiny_qwen3
from tests.engine.peak_memory import CAN_MEASURE, peak_growth_bytes
from tests.engine.shelf import shelf_url
from tests.helpers import run_ranks, unique_name
from tests.recover.mirrors import BUCKET, S3Server, listing, storage

SPLIT: dict[str, Any] = {"max_shard_size_bytes": 8000}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "split": SPLIT,
    "bf16": {"dtype": torch.bfloat16},
}
KINDS = SHARDINGS | {"transposed on every rank": ("llama", lambda model: model)}


@pytest.fixture(scope="module")
def module_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def server(module_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in module_server.environment.items():
        monkeypatch.setenv(name, value)
    module_server.clear()
    return module_server


@pytest.fixture
def s3_url(server: S3Server, tmp_path: Path) -> str:
    return f"s3://{BUCKET}/{unique_name(tmp_path)}"


def medium_model(tied: bool) -> PreTrainedModel:
    """16 MB in its largest tensor: enough for S3's parts."""
    return AutoModelForCausalLM.from_config(
        tiny_qwen3(tied, vocab_size=8000, hidden_size=512, layers=1)
    )


def stored(url: str) -> dict[str, bytes]:
    fs, root = storage(url)
    return {name: fs.cat_file(f"{root}/{name}") for name in listing(url)}


def _to_s3(rank: int, world_size: int, environment: dict[str, str], root: Path, url: str) -> None:
    os.environ.update(environment)
    models = {"split": sharded(tiny_model("qwen3_moe")), "bf16": sharded(medium_model(tied=True))}
    for variant, model in models.items():
        save_hf(model, root / variant, base_model_path=root / "base", **VARIANTS[variant])
        save_hf(
            model,
            f"{url}/{variant}",
            base_model_path=root / "base",
            staging_folder=root / "scratch",
            **VARIANTS[variant],
        )


@pytest.mark.slow
def test_an_export_to_s3_has_the_bytes_of_one_to_a_folder(
    server: S3Server, s3_url: str, tmp_path: Path
) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "LICENSE").write_text("as you like")
    run_ranks(_to_s3, 2, server.environment, tmp_path, s3_url)
    puts = [put.removeprefix(f"{unique_name(tmp_path)}/") for put in server.keys_put()]
    for variant in ("split", "bf16"):
        found = stored(f"{s3_url}/{variant}")
        assert found == contents(tmp_path / variant) and found["LICENSE"] == b"as you like"
        keys = [put.split("/")[-1] for put in puts if put.startswith(f"{variant}/")]
        assert keys[0] == upload.MARKER_NAME and keys[-1] == "config.json"
        assert sorted(keys) == sorted([*found, upload.MARKER_NAME])
    assert list((tmp_path / "scratch").iterdir()) == []


def _of_every_kind(rank: int, world_size: int, root: Path) -> None:
    url = shelf_url(root / "shelf")
    for case, (name, shard) in KINDS.items():
        if (conversion := case.partition(" ")[0]) in CONVERSIONS:
            register_checkpoint_conversion_mapping(
                "llama", [CONVERSIONS[conversion]], overwrite=True
            )
        model = shard(tiny_model(name))
        for variant in ("plain", "split"):
            save_hf(model, root / "local" / case / variant, **VARIANTS[variant])
            save_hf(model, f"{url}/{case}/{variant}", **VARIANTS[variant])
        register_checkpoint_conversion_mapping("llama", [], overwrite=True)
    _from_staged_values(root, url)
    model = sharded(AutoModelForCausalLM.from_config(tiny_qwen3(vocab_size=1)))
    save_hf(model, root / "local" / "one_row")
    save_hf(model, f"{url}/one_row")


def _from_staged_values(root: Path, url: str) -> None:
    """Export a host copy over a separate group while the model changes and the default group is in
    use.
    """
    model = sharded(tiny_model("qwen3_moe"))
    own: Any = dist.new_group()
    save_hf(model, root / "local" / "staged", **SPLIT)
    staged = staged_model(model, Staging(model).stage(DCPState(model))["model"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather_object", "broadcast", "broadcast_object_list"):
            collective = getattr(dist, name)

            def call(
                *args: Any,
                collective: Callable[..., Any] = collective,
                group: Any = None,
                **others: Any,
            ) -> None:
                assert group is own
                collective(*args, group=group, **others)

            patch.setattr(dist, name, call)
        save_hf(staged, f"{url}/staged", group=own, **SPLIT)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_shards_of_every_kind_and_gathered_tensors_come_out_the_same(
    tmp_path: Path, world_size: int
) -> None:
    run_ranks(_of_every_kind, world_size, tmp_path)
    cases = [f"{case}/{variant}" for case in KINDS for variant in ("plain", "split")]
    for case in [*cases, "one_row", "staged"]:
        assert contents(tmp_path / "shelf" / case) == contents(tmp_path / "local" / case), case


def test_an_export_needs_no_torch_distributed_and_file_urls_are_folders(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    save_hf(model, tmp_path / "out", **SPLIT)
    save_hf(model, f"memory://{unique_name(tmp_path)}/out", **SPLIT)
    save_hf(model, f"file://{tmp_path}/by_url", **SPLIT)
    assert (
        stored(f"memory://{unique_name(tmp_path)}/out")
        == contents(tmp_path / "out")
        == contents(tmp_path / "by_url")
    )
    fresh = tiny_model("qwen3_moe", seed=1)
    load_hf(fresh, f"file://{tmp_path}/by_url")
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))


def test_files_are_dealt_by_their_bytes_to_ranks_that_are_far_apart() -> None:
    files = [WeightFile(str(number), b"", size, {}) for number, size in enumerate([5, 3, 3, 2, 1])]
    assert [[file.name for file in owned] for owned in deal_files(files, 2)] == [
        ["0", "3"],
        ["1", "2", "4"],
    ]
    owners = [rank for rank, owned in enumerate(deal_files(files, 20)) if owned]
    assert owners == [0, 4, 8, 12, 16]


def test_files_are_as_large_as_a_share_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, model = [], tiny_model("llama")
    monkeypatch.setattr(save, "plan_layout", lambda tensors, limit, _: limits.append(limit))

    def limit(share_bytes: int, **options: Any) -> int:
        plan_export(model, HFExportOptions(**options), range(4), share_bytes=share_bytes)
        return limits.pop()

    total_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert limit(500_000_000) == 500_000_000 and limit(500_000_000, max_shard_size_bytes=7) == 7
    assert limit(1000) == -(-total_bytes // 4)
    assert limit(1000, dtype=torch.bfloat16) == -(-total_bytes // 8)
    monkeypatch.setattr(save, "_MAX_SHARE_BYTES", 2000)
    assert limit(1000) == 2000


@pytest.mark.slow
def test_a_model_at_the_url_is_not_written_over(server: S3Server, s3_url: str) -> None:
    save_hf(tiny_model("llama"), s3_url)
    before = stored(s3_url)
    server.clear()
    with pytest.raises(
        CheckpointExistsError, match=rf"{s3_url} has a config\.json, so there is a model"
    ):
        save_hf(tiny_model("llama", seed=1), s3_url)
    assert server.puts() == [] and stored(s3_url) == before


def test_files_of_no_export_are_neither_removed_nor_overwritten(tmp_path: Path) -> None:
    url = f"memory://{unique_name(tmp_path)}/out"
    fs, root = storage(url)
    fs.pipe_file(f"{root}/model-00001-of-00001.safetensors", b"mine")
    with pytest.raises(
        CheckpointExistsError,
        match=r"\['model-00001-of-00001.safetensors'\], which an export would",
    ):
        save_hf(tiny_model("llama"), url)
    assert stored(url) == {"model-00001-of-00001.safetensors": b"mine"}
    fs.mv(f"{root}/model-00001-of-00001.safetensors", f"{root}/step_8/config.json")
    fs.pipe_file(f"{root}/generation_config.json", b"mine")
    with pytest.raises(
        CheckpointExistsError, match=r"\['generation_config.json'\], which an export would"
    ):
        save_hf(tiny_model("llama"), url)
    fs.rm_file(f"{root}/generation_config.json")
    save_hf(tiny_model("llama"), url)
    found = stored(url)
    assert found.pop("step_8/config.json") == b"mine"
    assert set(found) == {"config.json", "generation_config.json", "model.safetensors"}


def _killed(
    rank: int, world_size: int, victim: int, url: str, staging: Path, environment: dict[str, str]
) -> str:
    """Kill one rank after it has uploaded its first file."""
    os.environ.update(environment)

    def putting(
        remote: RemoteFolder, *args: Any, put: Callable[..., None] = RemoteFolder.put_file
    ) -> None:
        put(remote, *args)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    # permanently, because this process does nothing else
    pytest.MonkeyPatch().setattr(RemoteFolder, "put_file", putting)
    model = sharded(tiny_model("llama"))
    return raised(lambda: save_hf(model, url, max_shard_size_bytes=4000, staging_folder=staging))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_export_does_not_count_and_a_repetition_completes_it(
    server: S3Server, s3_url: str, tmp_path: Path, victim: int
) -> None:
    with pytest.raises(AssertionError, match="the process died without a word"):
        run_ranks(_killed, 2, victim, s3_url, tmp_path / "scratch", server.environment)
    left, scratch = listing(s3_url), tmp_path / "scratch"
    assert upload.MARKER_NAME in left and "config.json" not in left
    assert any(name.endswith(".safetensors") for name in left)
    staged = list(scratch.glob(".staging-holdfast-export-*"))
    assert victim == 1 or (len(staged) == 1 and staged[0].stat().st_mode & 0o777 == 0o700)
    split: dict[str, Any] = {"max_shard_size_bytes": 4000}
    with pytest.raises(CheckpointExistsError, match="be mixed with"):
        save_hf(tiny_model("llama"), s3_url, staging_folder=scratch)
    save_hf(tiny_model("llama"), s3_url, staging_folder=scratch, **split)
    save_hf(tiny_model("llama"), tmp_path / "out", **split)
    assert stored(s3_url) == contents(tmp_path / "out")
    assert list(scratch.iterdir()) == []


def _refused(
    rank: int, world_size: int, root: Path, environment: dict[str, str], s3_url: str
) -> dict[str, str]:
    os.environ.update(environment)
    save.RemoteFolder = partial(RemoteFolder, first_wait_s=0.01)
    model, url, messages = sharded(tiny_model("llama")), shelf_url(root / "shelf"), {}
    for kind, export in (
        ("rows", model),
        ("columns", SHARDINGS["columns"][1](tiny_model("llama"))),
    ):
        for failing in range(world_size):
            limit = 3000 if rank == failing else resource.RLIM_INFINITY
            messages[f"{kind} {failing}"] = file_size_limited(
                lambda export=export: save_hf(
                    export, f"{url}/out", staging_folder=root / "scratch", **SPLIT
                ),
                limit,
            )
    messages["bucket"] = raised(lambda: save_hf(model, "s3://nosuchbucket/out", **SPLIT))
    messages["url"] = raised(lambda: save_hf(model, "nosuch://me:secret@there/out"))
    messages["base"] = raised(
        lambda: save_hf(model, f"{url}/out", base_model_path=root / "nowhere")
    )
    messages["put"] = raised(
        lambda: save_hf(model, s3_url, staging_folder=root / "scratch", **SPLIT)
    )
    return messages


@pytest.mark.slow
def test_a_store_that_refuses_fails_every_rank_and_a_repetition_completes_it(
    server: S3Server, s3_url: str, tmp_path: Path
) -> None:
    server.refuse("model-00002-of")
    reports = run_ranks(_refused, 2, tmp_path, server.environment, s3_url)
    for rank, report in enumerate(reports):
        for failing in range(2):
            for message in (report[f"rows {failing}"], report[f"columns {failing}"]):
                kind = "CheckpointWriteError: " if rank == failing else "PeerError: "
                assert (
                    message.startswith(kind)
                    and f"cannot write {tmp_path}/scratch/.staging-" in message
                )
                assert "File too large" in message
        assert (
            "cannot write s3://nosuchbucket/out: " in report["bucket"]
            and "bucket does not exist" in report["bucket"]
        )
        assert report["url"].startswith("ConfigError: path ('nosuch://there/out') cannot be used")
        assert (
            "secret" not in report["url"]
            and "CheckpointNotFoundError: base_model_path" in report["base"]
        )
        assert f"{s3_url}/model-00002-of" in report["put"] and "failed 5 times" in report["put"]
    assert sorted(report["put"].partition(":")[0] for report in reports) == [
        "CheckpointWriteError",
        "PeerError",
    ]
    assert list((tmp_path / "shelf").rglob("*")) in ([], [tmp_path / "shelf" / "out"])
    assert list((tmp_path / "scratch").iterdir()) == []
    server.clear()
    assert "config.json" not in listing(s3_url) and upload.MARKER_NAME in listing(s3_url)
    save_hf(tiny_model("llama"), s3_url, staging_folder=tmp_path / "scratch", **SPLIT)
    save_hf(tiny_model("llama"), tmp_path / "out", **SPLIT)
    assert stored(s3_url) == contents(tmp_path / "out")


def test_parts_of_a_large_file_that_the_store_refused_are_given_up(
    server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "RemoteFolder", partial(RemoteFolder, first_wait_s=0.01))
    monkeypatch.setattr(
        s3fs.S3FileSystem,
        "_put_file",
        partialmethod(s3fs.S3FileSystem._put_file, chunksize=5 << 20),
    )
    server.refuse("model.safetensors")
    with pytest.raises(CheckpointWriteError, match=rf"{s3_url}/model\.safetensors failed 5 times"):
        save_hf(medium_model(tied=True), s3_url, staging_folder=tmp_path)
    server.clear()
    assert "model.safetensors" not in listing(s3_url) and "config.json" not in listing(s3_url)
    client = boto3.client("s3", endpoint_url=server.environment["AWS_ENDPOINT_URL"])
    assert client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_an_export_without_room_to_stage_it_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, usage = f"memory://{unique_name(tmp_path)}/out", os.statvfs(tmp_path)
    full = os.statvfs_result((*usage[:4], 1, *usage[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    message = (
        rf"{tmp_path} needs \d+ bytes, its file system has {usage.f_frsize} free; .* with a "
        r"staging_folder that"
    )
    with pytest.raises(CheckpointWriteError, match=message):
        save_hf(tiny_model("llama"), url, staging_folder=tmp_path)
    assert listing(url) == [] and list(tmp_path.iterdir()) == []


def _of_two_nodes(rank: int, world_size: int, root: Path) -> str:
    """Each rank sees another folder at the same path, like on nodes without a shared disk."""
    (root / f"node_{rank}" / "scratch").mkdir(parents=True)
    os.chdir(root / f"node_{rank}")
    url, model = shelf_url(root / "shelf"), sharded(tiny_model("llama"))
    return raised(lambda: save_hf(model, f"{url}/out", staging_folder="/proc/self/cwd/scratch"))


def test_ranks_that_share_no_staging_folder_say_so(tmp_path: Path) -> None:
    reports = run_ranks(_of_two_nodes, 2, tmp_path)
    for report, kind in zip(reports, ("PeerError", "ConfigError"), strict=True):
        assert (
            report.startswith(f"{kind}: ")
            and "which rank 0 made to stage the export to shelf://" in report
        )
        assert (
            "is not there on" in report
            and "staging_folder must be a folder that all ranks see" in report
        )
    assert not list(tmp_path.glob("node_*/scratch/*")) and not list(
        tmp_path.glob("node_*/scratch/.*")
    )
    assert not (tmp_path / "shelf").exists()


def test_lost_or_truncated_files_are_found_before_the_export_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{unique_name(tmp_path)}/out"

    put = RemoteFolder.put_file

    def losing(remote: RemoteFolder, source: Path, path: str) -> None:
        put(remote, source, path)
        fs, root = storage(url)
        fs.pipe_file(f"{root}/model.safetensors", b"short")

    monkeypatch.setattr(RemoteFolder, "put_file", losing)
    with pytest.raises(
        CheckpointWriteError, match=r"model\.safetensors was put with \d+ bytes, the store says 5"
    ):
        save_hf(tiny_model("llama"), url)
    assert "config.json" not in listing(url)


def test_an_error_of_the_store_that_passes_is_tried_again(
    server: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.fail(1)
    save_hf(tiny_model("llama"), s3_url)
    save_hf(tiny_model("llama"), tmp_path / "out")
    assert stored(s3_url) == contents(tmp_path / "out")


def test_a_url_where_a_folder_is_needed_is_refused_with_advice() -> None:
    model = tiny_model("llama")
    state = DCPState(model)
    actions: list[Callable[[], object]] = [
        lambda: load_hf(model, "s3://me:secret@bucket/out"),
        lambda: load_dcp("s3://me:secret@bucket/out", state),
    ]
    for action in actions:
        with pytest.raises(
            ConfigError, match=r"path is s3://bucket/out; loading needs a folder .*: fetch it there"
        ):
            action()
    with pytest.raises(
        ConfigError, match=r"path is s3://bucket/out; a DCP checkpoint needs .*recover\.mirror_url"
    ):
        save_dcp("s3://bucket/out", state)


def test_a_url_that_became_a_path_makes_no_folder_so_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"path is s3:/bucket/out: a URL that has lost a slash"):
        save_hf(tiny_model("llama"), Path("s3://me:secret@bucket/out"))
    assert list(tmp_path.iterdir()) == []


def test_a_password_the_backend_takes_for_path_is_refused_unshown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = r"path \('s3://bucket/out'\) cannot be used: its backend takes no password"
    with pytest.raises(ConfigError, match=expected) as error:
        save_hf(tiny_model("llama"), "s3://me:secret@bucket/out")
    assert "secret" not in str(error.value) + caplog.text


def _memory(rank: int, world_size: int, root: Path) -> list[tuple[str, int]]:
    model, url, peaks = large_model(sharded), shelf_url(root), []
    for dtype in (torch.float32, torch.bfloat16):
        export = f"{url}/{dtype}"
        peak = peak_growth_bytes(
            lambda export=export, dtype=dtype: save_hf(
                model, export, dtype=dtype, max_shard_size_bytes=70_000_000
            )
        )
        peaks.append((str(dtype), peak))
    return peaks


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MEASURE, reason="the peak cannot be reset here")
def test_memory_beside_the_model_is_a_few_blocks(tmp_path: Path) -> None:
    for report in run_ranks(_memory, 2, tmp_path):
        for dtype, peak in report:  # for a model of 190 MB, half on each rank
            assert peak < 40e6, (dtype, peak)
    assert (
        sum(path.stat().st_size for path in (tmp_path / "torch.float32").glob("*.safetensors"))
        > 180e6
    )
