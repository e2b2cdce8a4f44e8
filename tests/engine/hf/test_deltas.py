"""Versions that hold only changes: the files made from them are byte for byte those of full
versions.
"""

import logging
import math
import os
import resource
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from holdfast_weights.errors import FolderError
from safetensors.numpy import load_file
from safetensors.torch import load_file as load
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from holdfast.engine import OptimizerConfig, PublishedCopy, WeightUpdateMeta
from holdfast.engine.hf import deltas
from holdfast.engine.hf.delta_file import DeltaFile, encode_places
from holdfast.engine.hf.versions import (
    WrittenVersion,
    delete_old,
    holds_delta_alone,
    published_file,
    published_versions,
    version_path,
    write_version,
)
from holdfast.engine.memory.tensors import bytes_of, local_tensor
from holdfast.utils.errors import (
    CheckpointMismatchError,
    CheckpointWriteError,
    ConfigError,
    PeerError,
)
from holdfast.utils.manifest import (
    DELTA_NAME,
    check_listing,
    file_entries,
    read_manifest,
    verify_folder,
)
from holdfast.utils.pieces import Piece
from tests.engine.hf.mirrored import decode_places, files_of_version
from tests.engine.hf_models import sharded, tiny_model
from tests.engine.meshes import Mesh, engine_on, own_rows
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.servers.folders import adapted_model
from tests.engine.test_fsdp_engine import loss_tokens, make_batch, make_engine, nll
from tests.helpers import run_ranks
from tests.tiers import slow_but

PROBE = "weights_probe.json"


@pytest.mark.parametrize("density", [0.0001, 0.003, 0.02, 0.2, 0.9])
@pytest.mark.parametrize("contiguous", [True, False])
def test_places_come_back_from_the_shortest_code(density: float, contiguous: bool) -> None:
    drawn = np.random.default_rng(int(1e6 * density))
    for _ in range(20):
        mask = drawn.random(drawn.integers(1, 200_000)) < density
        mask[drawn.integers(len(mask))] = True
        places = np.flatnonzero(mask)
        code, codes = encode_places(places, mask if contiguous else None)
        assert np.array_equal(decode_places(code, codes), places)
        gaps = np.diff(places, prepend=-1) - 1
        sizes = {"gap8": (1 + gaps // 255).sum(), "gap16": 2 * (1 + gaps // 65535).sum()}
        sizes |= {"bits": math.ceil(len(mask) / 8)} if contiguous else {}
        assert codes.nbytes == sizes[code] == min(sizes.values())


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 200_000])
@pytest.mark.parametrize("n_more", [0, 400])
def test_gaps_at_the_limits_of_a_code_come_back(gap: int, n_more: int) -> None:
    """Many short gaps beside it let the code of bytes win, a single one the other."""
    places = np.array([gap, *range(gap + 1, gap + 1 + n_more), 2 * gap + n_more + 1])
    code, codes = encode_places(places, None)
    assert np.array_equal(decode_places(code, codes), places)


def test_the_file_of_changes_is_read_by_safetensors_and_is_missing_without_changes(
    tmp_path: Path,
) -> None:
    values = np.arange(12, dtype="<u2")
    file = DeltaFile(tmp_path / "delta", "rank_00000.safetensors")
    file.add("a", 0, Piece(100, 24, 0, 1), np.zeros(12, bool), values)
    assert file.close() == [] and not (tmp_path / "delta").exists()

    mask = np.arange(12) % 5 == 1
    file.add("a", 0, Piece(100, 24, 0, 1), mask, values)
    file.add(
        'b"\u00e9', 40, Piece(180, 6, 20, 4), mask, values
    )  # columns 0 to 2 of a matrix of ten columns
    (entry,) = file.close()
    assert [entry] == file_entries(
        tmp_path / "delta", ["rank_00000.safetensors"]
    ) and file.changed == 6
    found = load_file(tmp_path / "delta" / "rank_00000.safetensors")
    assert found.keys() == {"a@0.bits", "a@0.values", 'b"\u00e9@40.gap8', 'b"\u00e9@40.values'}
    assert found["a@0.values"].tolist() == found['b"\u00e9@40.values'].tolist() == [1, 6, 11]
    assert found["a@0.bits"].tolist() == [0b01000010, 0b1000]
    assert decode_places("gap8", found['b"\u00e9@40.gap8']).tolist() == [1, 20, 32]
    assert os.listdir(tmp_path / "delta") == ["rank_00000.safetensors"]


def test_changes_larger_than_memory_wait_in_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.engine.hf.delta_file._IN_MEMORY_BYTES", 100)
    file, mask, values = DeltaFile(tmp_path, "f"), np.ones(50, bool), np.arange(50, dtype="<u4")
    for first in range(5):
        file.add("a", first, Piece(0, 200, 0, 1), mask, values)
    file.close()
    assert np.array_equal(load_file(tmp_path / "f")["a@4.values"], values) and os.listdir(
        tmp_path
    ) == ["f"]


def change(model: torch.nn.Module, fraction: float, seed: int) -> None:
    """Change this fraction of this rank's elements, always the first and the last, to NaN, -0.0 and
    other values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            local = local_tensor(param)
            if not local.numel():
                continue
            chosen = torch.rand(local.shape, generator=generator) < fraction
            if fraction:
                chosen.view(-1)[[0, -1]] = True
            drawn = torch.randn(local.shape, generator=generator)
            special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e-40])
            some = special[torch.randint(0, 5, local.shape, generator=generator)]
            drawn = torch.where(torch.rand(local.shape, generator=generator) < 0.3, some, drawn)
            local.copy_(torch.where(chosen, drawn.to(local.dtype), local))


def _differing(base: Path, folder: Path) -> int:
    """Number of elements with other bits."""
    count = 0
    for path in folder.glob("*.safetensors"):
        before = load(base / path.name)
        for name, tensor in load(path).items():
            differ = bytes_of(tensor) != bytes_of(before[name])
            count += int(differ.view(-1, tensor.dtype.itemsize).any(1).sum())
    return count


class Publisher:
    """Publishes a model twice: as deltas where possible, and in full. Compares both."""

    def __init__(self, model: Any, root: Path, group: Any = None, **meta: Any) -> None:
        self.model, self.root, self.group, self.copy = model, root, group, PublishedCopy()
        self.meta = {"anchor_interval": 0, **meta}

    def publish(self, version: int, probe: bytes = b"{}", **meta: Any) -> WrittenVersion:
        options = {**self.meta, **meta}
        written = write_version(
            self.model,
            WeightUpdateMeta("disk", str(self.root), delta=True, **options),
            version,
            self.group,
            extra_files={PROBE: probe},
            copy=self.copy,
        )
        full = f"{self.root}.full"
        write_version(
            self.model,
            WeightUpdateMeta("disk", full, dtype=options.get("dtype")),
            version,
            self.group,
            extra_files={PROBE: probe},
        )
        dist.barrier()
        folder, reference = version_path(self.root, version), version_path(full, version)
        assert (folder / "manifest.json").read_bytes() == (reference / "manifest.json").read_bytes()
        expected = {
            name: (reference / name).read_bytes() for name in verify_folder(reference)["files"]
        }
        assert files_of_version(self.root, version) == expected
        if (folder / DELTA_NAME).is_dir():
            assert (
                holds_delta_alone(folder)
                or files_of_version(self.root, version, through_deltas=True) == expected
            )
            facts = read_manifest(folder / DELTA_NAME)
            assert facts["changed"] == _differing(
                version_path(full, facts["base"]["version"]), reference
            )
        assert published_file(folder, PROBE).read_bytes() == probe
        assert published_file(folder, "config.json").read_bytes() == expected["config.json"]
        assert written.figures["delta"] == holds_delta_alone(folder)
        dist.barrier()
        return written


def _interleaved() -> None:
    from tests.engine.hf.test_name_mapping import CONVERSIONS

    register_checkpoint_conversion_mapping("llama", [CONVERSIONS["interleaved"]], overwrite=True)


def _models(world_size: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    yield "tied", sharded(tiny_model("qwen3_tied")), {"dtype": "bfloat16"}
    yield "transposed", sharded(tiny_model("gpt2")), {}
    yield "experts", sharded(tiny_model("qwen3_moe")), {"dtype": "bfloat16"}
    yield "replicated", tiny_model("llama"), {"dtype": "float16"}
    yield "adapters", sharded(adapted_model()), {}
    _interleaved()
    yield "gathered", sharded(tiny_model("llama")), {}


FEW = ("tied",)
ALL = (*FEW, "transposed", "experts", "replicated", "adapters", "gathered")


def _allow_any_size() -> None:
    """Deltas of tiny tensors consist of names."""
    deltas._MOST_OF_FULL = 1000.0  # in this process alone


def _chains(rank: int, world_size: int, root: str, names: Sequence[str]) -> None:
    _allow_any_size()
    for name, model, meta in _models(world_size):
        if name not in names:
            continue
        publisher = Publisher(model, Path(root) / name, **meta)
        kinds = []
        for version, fraction in enumerate((1.0, 0.0, 0.001, 0.02, 0.3, 0.0)):
            seed = 100 * version + (0 if name == "replicated" else rank)
            change(model, fraction, seed)
            kinds.append(publisher.publish(version, b"%d" % (version // 2)).figures["delta"])
        assert kinds == [0, 1, 1, 1, 1, 1], f"{name}: {kinds}"


@pytest.mark.parametrize(
    ("names", "world_size"), slow_but([(FEW, 2)], [(FEW, 2), *((ALL, n) for n in (1, 2, 3, 4))])
)
def test_a_chain_of_deltas_makes_the_files_of_full_versions(
    tmp_path: Path, names: Sequence[str], world_size: int
) -> None:
    run_ranks(_chains, world_size, str(tmp_path), names)


def _meshes(rank: int, world_size: int, folder: str, root: str, mesh: Mesh) -> None:
    _allow_any_size()
    engine = engine_on(folder, mesh)
    publisher = Publisher(engine.model, Path(root), engine.control_group, dtype="bfloat16")
    for version in range(3):
        with torch.no_grad():
            for param in engine.model.parameters():
                local_tensor(param).mul_(1 + 0.02 * version)
        assert publisher.publish(version).figures["delta"] == (version > 0)
    entries = read_manifest(version_path(root, 1))["files"].values()
    columns = any(Piece(*piece).rows > 1 for entry in entries for piece in entry.get("pieces", ()))
    assert columns == ("t" in mesh.backend)
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    slow_but([Mesh(2, "fsdp:t2")], [Mesh(2, "fsdp:t2"), Mesh(4, "fsdp:d2t2"), Mesh(2, "fsdp", 2)]),
    ids=str,
)
def test_columns_and_copies_of_other_meshes_come_back(tmp_path: Path, mesh: Mesh) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(tied=False, vocab_size=16))
    run_ranks(_meshes, mesh.ranks, str(tmp_path / "model"), str(tmp_path / "weights"), mesh)


def _small_steps(model: Any, version: int = 1) -> None:
    """Change a few elements of the first tensor."""
    with torch.no_grad():
        local_tensor(next(model.parameters())).view(-1)[:3].add_(version)


def _kinds(rank: int, world_size: int, root: str) -> None:
    model = sharded(tiny_model("llama"))
    publisher = Publisher(model, Path(root) / "a")

    def publish(version: int, **meta: Any) -> float:
        _small_steps(model)
        return publisher.publish(version, **meta).figures["delta"]

    assert [publish(1), publish(2), publish(3)] == [0, 1, 1]
    assert publish(3) == 0, "its base was the same version of before"
    assert [publish(4), publish(7), publish(5), publish(6)] == [1, 1, 0, 1], "5 is as after a crash"
    dist.barrier()
    if rank == 0:
        shutil.rmtree(version_path(publisher.root, 6))
    dist.barrier()
    assert [publish(8), publish(9)] == [0, 1], "its base was deleted"
    dist.barrier()
    if rank == 0:
        manifest = version_path(publisher.root, 9) / "manifest.json"
        manifest.write_bytes(
            manifest.read_bytes().replace(b'"weight_version"', b'"weight_version" ')
        )
    dist.barrier()
    assert publish(10) == 0, "its base is another folder by now"

    assert [publish(v, anchor_interval=2) for v in range(11, 18)] == [1, 1, 0, 1, 1, 0, 1]
    anchor = version_path(publisher.root, 13)
    assert (anchor / "delta" / "manifest.json").is_file() and (
        anchor / "model.safetensors"
    ).is_file()
    assert check_listing(anchor)["weight_version"] == verify_folder(anchor)["weight_version"] == 13
    with pytest.raises(
        CheckpointMismatchError, match="holds only the changes from the version before"
    ):
        check_listing(version_path(publisher.root, 12))

    assert [publish(18, dtype="bfloat16"), publish(19, dtype="bfloat16")] == [0, 1], (
        "another layout"
    )
    publisher.root = Path(root) / "b"
    assert [publish(20), publish(21)] == [0, 1], "another folder"
    publisher.copy = PublishedCopy() if rank == 0 else publisher.copy
    assert [publish(22), publish(23)] == [0, 1], "a rank was replaced"
    publisher.model = model = tiny_model("llama")
    assert [publish(24), publish(25)] == [0, 1], "the ranks hold other elements"
    meta = WeightUpdateMeta("disk", str(publisher.root))
    write_version(
        model,
        replace(meta, path=str(Path(root) / "c")),
        26,
        extra_files={PROBE: b"{}"},
        copy=publisher.copy,
    )
    assert publish(26) == 1, "something else was published elsewhere"
    write_version(model, meta, 27, extra_files={PROBE: b"{}"}, copy=publisher.copy)
    assert publish(28) == 0, "its base is older than a full version, and would be deleted before it"


@pytest.mark.slow
def test_a_version_is_full_when_its_base_is_gone_or_another(tmp_path: Path) -> None:
    run_ranks(_kinds, 2, str(tmp_path))


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _too_much(rank: int, world_size: int, root: str) -> list[str]:
    model, heard = sharded(tiny_model("llama")), _Warnings()
    logging.getLogger("holdfast").addHandler(heard)
    publisher, found = Publisher(model, Path(root), anchor_interval=2), []
    for version, much in enumerate((0, 1, 0, 1, 0, 0, 0, 1, 1, 0, 0)):
        if much:
            change(model, 1.0, version + rank)
        else:
            _small_steps(model)
        written = publisher.publish(version)
        found.append(written.figures["delta"])
        assert not much or not (version_path(root, version) / "delta").exists()
        assert ("changed" in written.figures) == (0 < version < 9)
        assert not much or written.figures["changed"] > 0.5
    assert found == [0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0]
    return heard.texts


@pytest.mark.slow
def test_changes_larger_than_half_are_dropped_and_twice_in_a_row_given_up(tmp_path: Path) -> None:
    texts, others = run_ranks(_too_much, 2, str(tmp_path))
    assert len(texts) == 1 and others == []
    assert (
        "version 8 changes 98 % of the weights (float32)" in texts[0]
        and "no more are tried" in texts[0]
    )


@contextmanager
def largest_file(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _failures(rank: int, world_size: int, root: str) -> None:
    model = sharded(tiny_model("llama"))
    publisher = Publisher(model, Path(root))
    for version, failing in ((1, None), (2, 0), (3, 1), (4, None)):
        _small_steps(model, version)
        if failing is None:
            publisher.publish(version)
            continue
        error = CheckpointWriteError if rank == failing else PeerError
        with largest_file(50 if rank == failing else resource.RLIM_INFINITY), pytest.raises(error):
            publisher.publish(version)
        dist.barrier()
        assert published_versions(root)[-1] < version and not list(Path(root).glob(".staging*"))
        assert publisher.publish(version).figures["delta"] == 0, "the copy is ahead of the folder"


@pytest.mark.slow
def test_a_failed_publication_makes_the_next_one_full(tmp_path: Path) -> None:
    run_ranks(_failures, 2, str(tmp_path))


def _a_copy_that_stays_valid(rank: int, world_size: int, root: str) -> str:
    begin = PublishedCopy.begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PublishedCopy, "begin", lambda copy: setattr(copy, "base", (copy.base, begin(copy))[0])
        )
        try:
            _failures(rank, world_size, root)
        except FolderError as error:
            return str(error)
    return "nothing was noticed"


@pytest.mark.slow
def test_these_checks_notice_a_copy_that_is_valid_after_a_failure(tmp_path: Path) -> None:
    for found in run_ranks(_a_copy_that_stays_valid, 2, str(tmp_path)):
        assert "model.safetensors has digest" in found


def _retention(rank: int, world_size: int, root: str) -> None:
    model = sharded(tiny_model("llama"))
    publisher = Publisher(model, Path(root), anchor_interval=3)
    left = {
        1: [1],
        2: [1, 2],
        4: [1, 2, 3, 4],
        5: [1, 2, 3, 4, 5],
        6: [5, 6],
        7: [5, 6, 7],
        8: [5, 6, 7, 8],
    }
    for version in range(1, 9):
        _small_steps(model)
        publisher.publish(version)
        dist.barrier()
        if rank == 0:
            delete_old(root, keep=2)
        dist.barrier()
        there = published_versions(root)
        assert there == left.get(version, there)
        for kept in there:
            verify_folder(version_path(root, kept) / (DELTA_NAME if kept not in (1, 5) else ""))
            files_of_version(root, kept)


@pytest.mark.slow
def test_every_version_that_stays_can_be_made_from_those_that_stay(tmp_path: Path) -> None:
    run_ranks(_retention, 2, str(tmp_path))


def test_changes_without_their_base_are_removed_unless_they_are_the_newest_or_in_use(
    tmp_path: Path,
) -> None:
    model, copy = tiny_model("llama"), PublishedCopy()
    meta = WeightUpdateMeta("disk", str(tmp_path), delta=True, anchor_interval=0)
    for version in range(1, 6):
        _small_steps(model)
        write_version(model, meta, version, copy=copy)
    shutil.rmtree(version_path(tmp_path, 1))
    delete_old(str(tmp_path), 3, {version_path(tmp_path, 3)})
    assert published_versions(tmp_path) == [3, 5]


def _damage(rank: int, world_size: int, root: str) -> list[str]:
    """Publish after damage to the version before. Returns the warnings."""
    model, heard = sharded(tiny_model("llama")), _Warnings()
    logging.getLogger("holdfast").addHandler(heard)
    publisher = Publisher(model, Path(root))

    def publish(version: int) -> float:
        _small_steps(model)
        return publisher.publish(version).figures["delta"]

    def spoil(version: int, name: str, cut: bool) -> None:
        dist.barrier()
        if rank == 0:
            path = version_path(root, version) / name
            data = path.read_bytes()
            path.write_bytes(data[:-1] if cut else data[:-1] + bytes([data[-1] ^ 1]))
        dist.barrier()

    changes = f"{DELTA_NAME}/rank_00000.safetensors"
    assert [publish(1), publish(2)] == [0, 1]
    spoil(2, changes, cut=False)
    assert [publish(3), publish(4), publish(5)] == [0, 1, 1], (
        "a byte of the changes before is another"
    )
    spoil(4, changes, cut=True)
    assert [publish(6), publish(7)] == [0, 1], "changes between are cut"
    spoil(6, "model.safetensors", cut=True)
    assert [publish(8), publish(9)] == [0, 1], "the weights that all changes build on are cut"
    spoil(9, f"{DELTA_NAME}/manifest.json", cut=True)
    assert [publish(10), publish(11)] == [0, 1]
    return heard.texts


@pytest.mark.slow
def test_a_version_is_full_when_one_that_it_would_build_on_is_damaged(tmp_path: Path) -> None:
    texts, others = run_ranks(_damage, 2, str(tmp_path))
    assert len(texts) == 4 and others == []
    assert (
        "version 3 gets all weights, because changes from version 2 would be of no use: "
        in texts[0]
    )
    assert "rank_00000.safetensors has digest" in texts[0]


class _Server:
    """Has a mirror, which makes the files of each version and compares them with its manifest."""

    mirror = "http://127.0.0.1:9000"

    def update_weights_from_disk(self, path: str, version: int) -> int:
        files_of_version(Path(path).parent, version)
        if (Path(path) / "delta").exists():
            files_of_version(Path(path).parent, version, through_deltas=True)
        return version


def _trained(rank: int, world_size: int, folder: str, root: str) -> None:
    _allow_any_size()
    engine = make_engine(folder, optimizer=OptimizerConfig(lr=1e-6))
    meta = WeightUpdateMeta("disk", root, delta=True, anchor_interval=7, dtype="bfloat16")
    engine.connect_engine([_Server()], meta)
    kinds, changed = [], []
    for version in range(30):
        engine.train_batch(own_rows(engine, make_batch(seed=version)), nll, loss_tokens)
        engine.set_version(version)
        figures = engine.update_weights().figures
        kinds.append(figures["delta"])
        changed.append(figures.get("changed"))
    assert kinds == [version % 8 > 0 for version in range(30)]
    assert changed[0] is None and all(0 < fraction < 0.2 for fraction in changed[1:])
    engine.destroy()


@pytest.mark.slow
def test_thirty_steps_at_a_small_rate_are_published_as_deltas(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3(tied=False))
    run_ranks(_trained, 2, str(tmp_path / "model"), str(tmp_path / "weights"))


def test_delta_is_for_folders_that_servers_or_mirrors_read() -> None:
    for kind in ("xccl", "adapter"):
        with pytest.raises(
            ConfigError, match=f"delta is for WeightUpdateMeta type 'disk', not '{kind}'"
        ):
            WeightUpdateMeta(kind, "/weights", delta=True)
    with pytest.raises(ConfigError, match="anchor_interval"):
        WeightUpdateMeta("disk", "/weights", delta=True, anchor_interval=-1)


def test_the_copy_of_another_plan_is_replaced_from_there_on() -> None:
    copy, values = PublishedCopy(), np.arange(4, dtype="<u2")
    places = [Piece(8 * number, 8, 0, 1) for number in range(4)]

    def publish(*pieces: tuple[str, Piece], add: int = 0) -> tuple[list[int | None], bool]:
        copy.begin()
        masks = [copy.swap(file, piece, values + np.uint16(add)) for file, piece in pieces]
        return [None if mask is None else int(mask.sum()) for mask in masks], copy.end()

    all_of_f = [("f", place) for place in places]
    assert publish(*all_of_f) == ([None] * 4, True)
    assert publish(*all_of_f) == ([0] * 4, True)
    assert publish(*all_of_f[:2]) == ([0, 0], False), "two pieces of before are missing"
    assert publish(*all_of_f[:2], add=1) == ([4, 4], True)
    assert publish(all_of_f[0], ("g", places[1]), all_of_f[1], add=1) == ([0, None, None], True)
    assert publish(all_of_f[0], ("g", places[1]), all_of_f[1], add=1) == ([0, 0, 0], True)
