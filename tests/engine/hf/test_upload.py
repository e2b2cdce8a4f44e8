"""Exports to URLs: the bytes of one to a folder, over S3 and another backend; what is refused, cut and removed."""

import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from holdfast.engine.dcp.checkpoint import load_dcp, save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf import shard_ranges, upload
from holdfast.engine.hf import stream as hf_stream
from holdfast.engine.hf.export import save_hf
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.name_mapping import stored_tensors
from holdfast.engine.hf.safetensors_layout import WeightFile
from holdfast.engine.hf.shard_ranges import plan_tensors
from holdfast.engine.hf.stream_steps import deal_files
from holdfast.engine.staging.staged_model import staged_model
from holdfast.engine.staging.staged_state import Staging
from holdfast.utils.errors import CheckpointExistsError, CheckpointWriteError, ConfigError
from holdfast.utils.remote import RemoteStream
from tests.engine.hf.test_export import _contents as contents
from tests.engine.hf.test_export import _file_size_limited as file_size_limited
from tests.engine.hf.test_export import _raised as raised
from tests.engine.hf.test_name_mapping import CONVERSIONS
from tests.engine.hf.test_shard_ranges import SHARDINGS
from tests.engine.hf.test_shard_ranges import _large_model as large_model
from tests.engine.hf_models import sharded, tiny_model
from tests.engine.memory import CAN_MEASURE, peak_growth_bytes
from tests.engine.models import tiny_qwen3
from tests.engine.shelf import shelf_url
from tests.helpers import run_ranks
from tests.recover.mirrors import BUCKET, S3Server, listing, storage
from tests.tiers import slow_but

SPLIT: dict[str, Any] = {"max_shard_size_bytes": 8000}
VARIANTS: dict[str, dict[str, Any]] = {"plain": {}, "split": SPLIT, "bf16": {"dtype": torch.bfloat16}}
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
    return f"s3://{BUCKET}/{tmp_path.name}"


def medium_model(tied: bool) -> PreTrainedModel:
    """16 MB in its largest tensor: enough for S3's parts."""
    return AutoModelForCausalLM.from_config(tiny_qwen3(tied, vocab_size=8000, hidden_size=512, layers=1))


def stored(url: str) -> dict[str, bytes]:
    fs, root = storage(url)
    return {name: fs.cat_file(f"{root}/{name}") for name in listing(url)}


def _to_s3(rank: int, world_size: int, environment: dict[str, str], root: Path, url: str) -> None:
    os.environ.update(environment)
    upload._PART_BYTES = 5 << 20  # the least that S3 takes
    models = {"split": sharded(tiny_model("qwen3_moe")), "bf16": sharded(medium_model(tied=True))}
    for variant, model in models.items():
        hf_stream.BLOCK_BYTES = 5000 if variant == "split" else 1 << 20
        save_hf(model, root / variant, base_model_path=root / "base", **VARIANTS[variant])
        save_hf(model, f"{url}/{variant}", base_model_path=root / "base", **VARIANTS[variant])


def test_an_export_to_s3_has_the_bytes_of_one_to_a_folder(server: S3Server, s3_url: str, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "LICENSE").write_text("as you like")
    run_ranks(_to_s3, 2, server.environment, tmp_path, s3_url)
    puts = [put.removeprefix(f"{tmp_path.name}/") for put in server.keys_put()]
    for variant in ("split", "bf16"):
        found = stored(f"{s3_url}/{variant}")
        assert found == contents(tmp_path / variant) and found["LICENSE"] == b"as you like"
        keys = [put.split("/")[-1] for put in puts if put.startswith(f"{variant}/")]
        assert keys[0] == upload.MARKER_NAME and keys[-1] == "config.json"
        assert set(keys) == {*found, upload.MARKER_NAME}
        assert variant == "split" or keys.count("model.safetensors") > 1, "in parts"


def _of_every_kind(rank: int, world_size: int, root: Path) -> None:
    hf_stream.BLOCK_BYTES, hf_stream.TURN_BYTES, shard_ranges.BLOCK_BYTES = 5000, 2000, 1000
    hf_stream._PIECE_BYTES = 200
    url = shelf_url(root / "shelf")
    for case, (name, shard) in KINDS.items():
        if (conversion := case.partition(" ")[0]) in CONVERSIONS:
            register_checkpoint_conversion_mapping("llama", [CONVERSIONS[conversion]], overwrite=True)
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
    """Of a copy, over a group of its own, while the model changes and the default group is somebody else's."""
    model = sharded(tiny_model("qwen3_moe"))
    own: Any = dist.new_group()
    save_hf(model, root / "local" / "staged", **SPLIT)
    staged = staged_model(model, Staging(model).stage(DCPState(model))["model"])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_gather_object", "broadcast_object_list"):
            collective = getattr(dist, name)

            def call(*args: Any, collective: Callable[..., Any] = collective, group: Any = None, **others: Any) -> None:
                assert group is own
                collective(*args, group=group, **others)

            patch.setattr(dist, name, call)
        save_hf(staged, f"{url}/staged", group=own, gather_group=own, **SPLIT)


@pytest.mark.parametrize("world_size", slow_but([2], [2, 3]))
def test_shards_of_every_kind_and_gathered_tensors_come_out_the_same(tmp_path: Path, world_size: int) -> None:
    run_ranks(_of_every_kind, world_size, tmp_path)
    cases = [f"{case}/{variant}" for case in KINDS for variant in ("plain", "split")]
    for case in [*cases, "one_row", "staged"]:
        assert contents(tmp_path / "shelf" / case) == contents(tmp_path / "local" / case), case


def test_without_torch_distributed_an_export_streams_and_file_urls_are_folders(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    save_hf(model, tmp_path / "out", **SPLIT)
    save_hf(model, f"memory://{tmp_path.name}/out", **SPLIT)
    save_hf(model, f"file://{tmp_path}/by_url", **SPLIT)
    assert stored(f"memory://{tmp_path.name}/out") == contents(tmp_path / "out") == contents(tmp_path / "by_url")
    fresh = tiny_model("qwen3_moe", seed=1)
    load_hf(fresh, f"file://{tmp_path}/by_url")
    assert all(map(torch.equal, fresh.state_dict().values(), model.state_dict().values()))


def test_files_are_dealt_by_their_bytes_to_ranks_that_are_far_apart() -> None:
    files = [WeightFile(str(number), b"", size, {}) for number, size in enumerate([5, 3, 3, 2, 1])]
    assert [[file.name for file in owned] for owned in deal_files(files, 2)] == [["0", "3"], ["1", "2", "4"]]
    owners = [rank for rank, owned in enumerate(deal_files(files, 20)) if owned]
    assert owners == [0, 4, 8, 12, 16]


def test_files_are_as_large_as_a_share_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    plan = plan_tensors(model, stored_tensors(model)[0], 0, 1)
    total_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert upload._share_bytes(plan, 4) == 500_000_000
    monkeypatch.setattr(upload, "_LEAST_FILE_BYTES", 1000)
    assert upload._share_bytes(plan, 4) == -(-total_bytes // 4)
    monkeypatch.setattr(upload, "_MOST_FILE_BYTES", 2000)
    assert upload._share_bytes(plan, 4) == 2000


def test_a_model_at_the_url_is_not_written_over(server: S3Server, s3_url: str) -> None:
    save_hf(tiny_model("llama"), s3_url)
    before = stored(s3_url)
    server.clear()
    with pytest.raises(CheckpointExistsError, match=rf"{s3_url} has a config\.json, so there is a model"):
        save_hf(tiny_model("llama", seed=1), s3_url)
    assert server.puts() == [] and stored(s3_url) == before


def test_what_no_export_left_is_neither_removed_nor_written_over(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/out"
    fs, root = storage(url)
    fs.pipe_file(f"{root}/model-00001-of-00001.safetensors", b"mine")
    with pytest.raises(CheckpointExistsError, match=r"\['model-00001-of-00001.safetensors'\], which no unfinished"):
        save_hf(tiny_model("llama"), url)
    assert stored(url) == {"model-00001-of-00001.safetensors": b"mine"}
    fs.mv(f"{root}/model-00001-of-00001.safetensors", f"{root}/step_8/config.json")
    fs.pipe_file(f"{root}/{upload.MARKER_NAME}", b'{"files": ["../mine", "/mine", "notes", 7]}')
    fs.pipe_file(f"{root}/../mine", b"mine")
    fs.pipe_file(f"{root}/notes", b"left")
    save_hf(tiny_model("llama"), url)
    found = stored(url)
    assert found.pop("step_8/config.json") == b"mine" and found.pop("../mine") == b"mine"
    assert set(found) == {"config.json", "generation_config.json", "model.safetensors"}


def test_of_two_exports_to_one_url_the_later_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, commit = f"memory://{tmp_path.name}/out", upload._Export.commit
    save_hf(tiny_model("llama", seed=1), tmp_path / "second")

    def overtaken(export: Any) -> None:
        monkeypatch.setattr(upload._Export, "commit", commit)
        save_hf(tiny_model("llama", seed=1), url)
        commit(export)

    monkeypatch.setattr(upload._Export, "commit", overtaken)
    with pytest.raises(CheckpointWriteError, match=rf"another export to memory:///{tmp_path.name}/out has begun"):
        save_hf(tiny_model("llama"), url)
    assert stored(url) == contents(tmp_path / "second")


def _killed(rank: int, world_size: int, victim: int, url: str, environment: dict[str, str]) -> str:
    """Kill one rank when its first file is complete and the second has begun."""
    os.environ.update(environment)
    write, close, closed = RemoteStream.write, RemoteStream.close, []

    def writing(stream: RemoteStream, data: bytes | memoryview) -> None:
        write(stream, data)
        if closed and rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    def closing(stream: RemoteStream) -> None:
        close(stream)
        closed.append(stream)

    patch = pytest.MonkeyPatch()  # for good: this process does nothing else
    patch.setattr(RemoteStream, "write", writing)
    patch.setattr(RemoteStream, "close", closing)
    return raised(lambda: save_hf(sharded(tiny_model("llama")), url, max_shard_size_bytes=4000))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_export_does_not_count_and_the_next_removes_it(
    server: S3Server, s3_url: str, tmp_path: Path, victim: int
) -> None:
    with pytest.raises(AssertionError, match="the process died without a word"):
        run_ranks(_killed, 2, victim, s3_url, server.environment)
    left = listing(s3_url)
    assert upload.MARKER_NAME in left and "config.json" not in left
    assert victim == 1 or any(name.endswith(".safetensors") for name in left)
    save_hf(tiny_model("llama"), s3_url)
    save_hf(tiny_model("llama"), tmp_path / "out")
    assert stored(s3_url) == contents(tmp_path / "out")


def _refused(rank: int, world_size: int, root: Path, environment: dict[str, str], s3_url: str) -> dict[str, str]:
    os.environ.update(environment)
    model, url, messages = sharded(tiny_model("llama")), shelf_url(root / "shelf"), {}
    for kind, export in (("rows", model), ("columns", SHARDINGS["columns"][1](tiny_model("llama")))):
        for failing in range(world_size):
            limit = 3000 if rank == failing else resource.RLIM_INFINITY
            messages[f"{kind} {failing}"] = file_size_limited(
                lambda export=export: save_hf(export, f"{url}/out", **SPLIT), limit
            )
    messages["bucket"] = raised(lambda: save_hf(model, "s3://nosuchbucket/out", **SPLIT))
    messages["url"] = raised(lambda: save_hf(model, "nosuch://me:secret@there/out"))
    messages["base"] = raised(lambda: save_hf(model, f"{url}/out", base_model_path=root / "nowhere"))
    upload._PART_BYTES = 5 << 20
    medium = sharded(medium_model(tied=False))
    messages["part"] = raised(lambda: save_hf(medium, s3_url, max_shard_size_bytes=17_000_000))
    return messages


def test_a_store_that_refuses_fails_every_rank_and_nothing_is_left(
    server: S3Server, s3_url: str, tmp_path: Path
) -> None:
    server.refuse("model-00002-of")
    reports = run_ranks(_refused, 2, tmp_path, server.environment, s3_url)
    for rank, report in enumerate(reports):
        for failing in range(2):
            for message in (report[f"rows {failing}"], report[f"columns {failing}"]):
                kind = "CheckpointWriteError: " if rank == failing else "PeerError: "
                assert message.startswith(kind) and f"shelf://{tmp_path}/shelf/out/model-0000" in message
                assert "OSError: [Errno 27] File too large" in message
        assert (
            "cannot write s3://nosuchbucket/out: " in report["bucket"] and "bucket does not exist" in report["bucket"]
        )
        assert report["url"].startswith("ConfigError: path ('nosuch://there/out') cannot be used")
        assert "secret" not in report["url"] and "CheckpointNotFoundError: base_model_path" in report["base"]
        assert f"{s3_url}/model-00002-of" in report["part"] and "CheckpointWriteError: " in report["part"]
    assert list((tmp_path / "shelf").rglob("*")) in ([], [tmp_path / "shelf" / "out"])
    server.clear()
    assert listing(s3_url) == []
    client = boto3.client("s3", endpoint_url=server.environment["AWS_ENDPOINT_URL"])
    assert client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []


def test_what_the_store_lost_or_cut_is_found_before_the_export_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}/out"
    close = RemoteStream.close

    def losing(stream: RemoteStream) -> None:
        close(stream)
        fs, root = storage(url)
        fs.pipe_file(f"{root}/model.safetensors", b"short")

    monkeypatch.setattr(RemoteStream, "close", losing)
    with pytest.raises(CheckpointWriteError, match=r"model\.safetensors was put with \d+ bytes, the store says 5"):
        save_hf(tiny_model("llama"), url)
    assert listing(url) == []


def test_an_export_that_counts_is_not_removed_by_what_goes_wrong_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{tmp_path.name}/out"

    def interrupted(export: Any, commit: Callable[[Any], None] = upload._Export.commit) -> None:
        commit(export)
        raise KeyboardInterrupt

    monkeypatch.setattr(upload._Export, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_hf(tiny_model("llama"), url)
    assert listing(url) == ["config.json", "generation_config.json", "model.safetensors"]


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
        with pytest.raises(ConfigError, match=r"path is s3://bucket/out; loading needs a folder .*: fetch it there"):
            action()
    with pytest.raises(ConfigError, match=r"path is s3://bucket/out; a DCP checkpoint needs .*recover\.mirror_url"):
        save_dcp("s3://bucket/out", state)


def test_a_url_that_became_a_path_makes_no_folder_so_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    shard_ranges.BLOCK_BYTES = 4 << 20
    model, url, peaks = large_model(sharded), shelf_url(root), []
    for dtype in (torch.float32, torch.bfloat16):
        export = f"{url}/{dtype}"
        peak = peak_growth_bytes(
            lambda export=export, dtype=dtype: save_hf(model, export, dtype=dtype, max_shard_size_bytes=70_000_000)
        )
        peaks.append((str(dtype), peak))
    return peaks


@pytest.mark.skipif(not CAN_MEASURE, reason="the peak cannot be reset here")
def test_memory_beside_the_model_is_a_few_blocks(tmp_path: Path) -> None:
    for report in run_ranks(_memory, 2, tmp_path):
        for dtype, peak in report:  # of a model of 190 MB, half of it on each rank
            assert peak < 40e6, (dtype, peak)
    assert sum(path.stat().st_size for path in (tmp_path / "torch.float32").glob("*.safetensors")) > 180e6
