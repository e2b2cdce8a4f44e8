"""Bytes between weight files and tensors: every dtype, stride and chunk, and files that break
during the read.
"""

import errno
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.engine.hf import weight_files
from holdfast.engine.hf.safetensors_layout import WEIGHTS_NAME, TensorSpec, plan_layout
from holdfast.engine.hf.weight_files import WeightReader, WeightWriter
from holdfast.utils import files
from holdfast.utils.errors import CheckpointCorruptError
from holdfast.utils.manifest import described_digest
from holdfast.utils.pieces import Piece, join_digests, piece_digest, read_digest, require_whole

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SPECIAL = (
    0.0,
    -0.0,
    1e-45,
    1.17e-38,
    65504.0,
    65520.0,
    3.4e38,
    float("inf"),
    -float("inf"),
    float("nan"),
    1 + 2**-8,
)


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(weight_files, "WRITE_BYTES", 64)
        monkeypatch.setattr(weight_files, "READ_BYTES", 64)


@pytest.fixture(params=["maps", "no maps", "no populate"])
def maps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "no maps":
        monkeypatch.setattr(weight_files, "map_window", lambda *_: None)
    if request.param == "no populate":  # the answer of a kernel before 5.14
        monkeypatch.setattr(files, "_MADV_POPULATE_READ", 9999)
    return request.param


def _values(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat(
        [torch.randn(25, dtype=torch.float64), torch.tensor(SPECIAL, dtype=torch.float64)]
    ).to(dtype)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bits instead of values: zeros have a sign, and torch's NaN depends on how many values it
    casts at once.
    """
    plain = torch.where(tensor.isnan(), torch.tensor(float("nan"), dtype=tensor.dtype), tensor)
    return plain.contiguous().reshape(-1).view(torch.uint8)


def _views(values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same 36 values in other shapes and strides."""
    spread = torch.empty(36, 3, dtype=values.dtype)
    spread[:, 1] = values
    transposed = values.view(4, 9).t().contiguous().t()
    return {
        "flat": values,
        "cube": values.view(3, 3, 4),
        "column": spread[:, 1],
        "transposed": transposed,
    }


def _write(folder: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    layout = plan_layout(
        [TensorSpec(k, tuple(v.shape), dtype, k, 0) for k, v in tensors.items()], 10**9, 0
    )
    with WeightWriter(folder) as files:
        for file in layout.files:
            files.create(file)
        for key, value in tensors.items():
            files.write(layout.slots[key], 0, value)
        files.sync()
    _assert_described(folder, files)


def _assert_described(folder: Path, writer: WeightWriter) -> None:
    """Check that the pieces cover the file, and that their digests are those of its bytes."""
    data = (folder / WEIGHTS_NAME).read_bytes()
    pieces, digests = zip(*sorted(writer.digests[WEIGHTS_NAME]), strict=True)
    require_whole(pieces, len(data))
    places = [
        n
        for p in pieces
        for row in range(p.rows)
        for n in range(p.offset + row * p.step, p.offset + row * p.step + p.run)
    ]
    assert sorted(places) == list(range(len(data)))
    entry = {"pieces": pieces}
    assert described_digest(folder / WEIGHTS_NAME, entry) == join_digests(digests)
    assert read_digest(pieces, lambda begin, length: data[begin : begin + length]) == join_digests(
        digests
    )


@pytest.mark.parametrize(("source", "stored"), itertools.product(FLOATS, FLOATS))
def test_values_written_equal_torchs_casts_in_any_stride(
    tmp_path: Path, chunks: None, source: torch.dtype, stored: torch.dtype
) -> None:
    tensors = _views(_values(source)) | {
        "none": torch.zeros(0, 3, dtype=source),
        "one": torch.tensor(2.5, dtype=source),
    }
    _write(tmp_path, tensors, stored)
    found = load_file(tmp_path / WEIGHTS_NAME)
    assert found.keys() == tensors.keys()
    for key, value in tensors.items():
        assert found[key].shape == value.shape
        assert torch.equal(_bits(found[key]), _bits(value.to(stored))), key


@pytest.mark.parametrize(("stored", "wanted"), itertools.product(FLOATS, FLOATS))
def test_values_read_equal_torchs_casts_in_any_stride(
    tmp_path: Path, chunks: None, maps: str, stored: torch.dtype, wanted: torch.dtype
) -> None:
    values = _values(stored)
    save_file(
        {"w": values, "none": torch.zeros(0, 3), "one": torch.tensor(2.5).to(stored)},
        tmp_path / WEIGHTS_NAME,
    )
    with WeightReader(tmp_path) as reader:
        slots = reader.layout()
        for key, target in _views(torch.zeros(36, dtype=wanted)).items():
            reader.read(slots["w"], 0, target)
            assert torch.equal(_bits(target), _bits(values.to(wanted))), key
        part = torch.zeros(7, dtype=wanted)
        reader.read(slots["w"], 11, part)
        assert torch.equal(_bits(part), _bits(values[11:18].to(wanted)))
        one, none = torch.zeros((), dtype=wanted), torch.zeros(0, 3, dtype=wanted)
        reader.read(slots["one"], 0, one)
        reader.read(slots["none"], 0, none)
        assert one == 2.5


def test_values_that_a_header_of_odd_length_leaves_askew_are_read(
    tmp_path: Path, maps: str
) -> None:
    values = _values(torch.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [36], "data_offsets": [0, 144]}}).encode()
    header += b" " * (5003 - 8 - len(header))
    (tmp_path / WEIGHTS_NAME).write_bytes(
        len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    )
    assert torch.equal(load_file(tmp_path / WEIGHTS_NAME)["w"].nan_to_num(), values.nan_to_num())
    for wanted in FLOATS:
        target = torch.zeros(36, dtype=wanted)
        with WeightReader(tmp_path) as reader:
            slot = reader.layout()["w"]
            assert slot.offset == 5003
            reader.read(slot, 0, target)
        assert torch.equal(_bits(target), _bits(values.to(wanted)))


def test_a_window_may_begin_and_end_on_any_page(
    tmp_path: Path, maps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "READ_BYTES", 5000)
    values = torch.randn(20_000)
    save_file({"w": values}, tmp_path / WEIGHTS_NAME)
    target = torch.zeros(19_998, dtype=torch.float64)
    with WeightReader(tmp_path) as reader:
        reader.read(reader.layout()["w"], 1, target)
    assert torch.equal(target, values[1:-1].double())


def test_two_tensors_are_the_same_when_the_model_would_keep_them_alike(
    tmp_path: Path, chunks: None
) -> None:
    values = _values(torch.float32)
    changed = values.clone()
    changed[30] += 1
    stored = {"a": values, "b": values.double(), "c": changed, "d": values.clone()}
    save_file(stored, tmp_path / WEIGHTS_NAME)
    with WeightReader(tmp_path) as reader:
        slots = reader.layout()
        assert reader.same(slots["a"], slots["b"], 0, 36, torch.float32)
        assert not reader.same(slots["a"], slots["c"], 0, 36, torch.float32)
        assert reader.same(slots["a"], slots["c"], 0, 30, torch.float32)
        assert reader.same(slots["a"], slots["d"], 5, 5, torch.float32)


def test_a_view_of_one_element_with_any_stride_is_written_and_read(tmp_path: Path) -> None:
    _write(tmp_path, {"w": torch.arange(10.0).as_strided((1, 1), (7, 5), 3)}, torch.float32)
    target = torch.zeros(10)
    with WeightReader(tmp_path) as reader:
        reader.read(reader.layout()["w"], 0, target.as_strided((1, 1), (7, 5), 3))
    assert target.tolist() == [0, 0, 0, 3, 0, 0, 0, 0, 0, 0]


def test_a_read_that_is_cut_short_goes_on(
    tmp_path: Path, maps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv, values = os.preadv, torch.randn(100)
    save_file({"w": values}, tmp_path / WEIGHTS_NAME)
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset)
    )
    for wanted in (torch.float32, torch.bfloat16):
        target = torch.zeros(100, dtype=wanted)
        with WeightReader(tmp_path) as reader:
            reader.read(reader.layout()["w"], 0, target)
        assert torch.equal(target, values.to(wanted))


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [100, 5000, 39_000])
def test_a_file_that_became_shorter_is_an_error_and_not_a_signal(
    tmp_path: Path, maps: str, keep: int, wanted: torch.dtype
) -> None:
    path = tmp_path / WEIGHTS_NAME
    save_file({"w": torch.randn(10_000)}, path)
    with WeightReader(tmp_path) as reader:
        slot = reader.layout()["w"]
        os.truncate(path, keep)
        with pytest.raises(
            CheckpointCorruptError, match=r"model\.safetensors ends at byte .*became shorter"
        ):
            reader.read(slot, 0, torch.zeros(10_000, dtype=wanted))


def test_a_file_removed_after_its_opening_is_read_and_nothing_stays_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values, seen = tmp_path / WEIGHTS_NAME, torch.randn(10_000), []

    def mapping(fd: int, begin: int, length: int) -> memoryview | None:
        window = files.map_window(fd, begin, length)
        seen.append(str(path) in Path("/proc/self/maps").read_text())
        return window

    monkeypatch.setattr(weight_files, "map_window", mapping)
    save_file({"w": values}, path)
    target = torch.zeros(10_000, dtype=torch.float64)
    with WeightReader(tmp_path) as reader:
        slot = reader.layout()["w"]
        path.unlink()
        reader.read(slot, 0, target)
        assert seen == [True] and str(path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(target, values.double())
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert not [link for link in Path("/proc/self/fd").iterdir() if str(path) in _target(link)]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # raised by the listing itself
        return ""


def test_a_short_write_goes_on_and_a_failed_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, values = os.pwrite, torch.randn(100)
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:7], offset))
    _write(tmp_path, {"w": values}, torch.float32)
    assert torch.equal(load_file(tmp_path / WEIGHTS_NAME)["w"], values)
    answers: Iterator[int] = iter([errno.EIO])

    def failing(fd: int, data: memoryview, offset: int) -> int:
        for number in answers:
            raise OSError(number, os.strerror(number))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", failing)
    (tmp_path / "second").mkdir()
    with pytest.raises(OSError, match="Input/output error"):
        _write(tmp_path / "second", {"w": values}, torch.float32)


def test_a_weight_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_NAME).write_text("precious")
    with pytest.raises(FileExistsError):
        _write(tmp_path, {"w": torch.zeros(3)}, torch.float32)
    assert (tmp_path / WEIGHTS_NAME).read_text() == "precious"


@pytest.mark.parametrize("long_bytes", [1, 16, 1 << 20])
@pytest.mark.parametrize("run", [1, 3, 7])
def test_rows_at_equal_distances_are_written_and_read_in_any_dtype(
    chunks: None,
    maps: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    run: int,
    long_bytes: int,
) -> None:
    monkeypatch.setattr(weight_files, "LONG_BYTES", long_bytes)
    values = torch.arange(1.0, 71).view(10, 7)
    layout = plan_layout([TensorSpec("w", (10, 7), torch.bfloat16, "w", 0)], 10**9, 0)
    slot = layout.slots["w"]
    with WeightWriter(tmp_path) as writer:
        writer.create(layout.files[0])
        for first in range(0, 7, run):
            for rows in (slice(0, 4), slice(4, 10)):
                columns = values[rows, first : first + run]
                kept = (
                    columns.to(torch.bfloat16) if first else columns
                )  # as it is in memory, or cast
                writer.write(
                    slot, rows.start * 7 + first, kept.contiguous() if first > 2 else kept, 7
                )
    assert torch.equal(load_file(tmp_path / WEIGHTS_NAME)["w"].float(), values)
    _assert_described(tmp_path, writer)
    with WeightReader(tmp_path) as reader:
        slot = reader.layout()["w"]
        for dtype in (torch.bfloat16, torch.float32):
            for spread in (False, True):
                target = torch.zeros((10, 2 * run) if spread else (10, run), dtype=dtype)[
                    :, :: 2 if spread else 1
                ]
                reader.read(slot, 7 - run, target, 7)
                assert torch.equal(target.float(), values[:, 7 - run :])


def test_columns_are_digested_in_few_pieces_and_watched_with_their_bytes(tmp_path: Path) -> None:
    values = torch.arange(1.0, 71).view(10, 7)
    layout = plan_layout([TensorSpec("w", (10, 7), torch.float32, "w", 0)], 10**9, 0)
    slot, seen = layout.slots["w"], []
    with WeightWriter(
        None, lambda slot, piece, data: seen.append((slot, piece, bytes(data)))
    ) as writer:
        writer.write(slot, 2, values[:, 2:5], 7)
        assert list(tmp_path.iterdir()) == [], "without a folder nothing is written"
    piece = Piece(slot.offset + 8, 12, 28, 10)
    data = values[:, 2:5].contiguous().numpy().tobytes()
    assert seen == [(slot, piece, data)]
    assert writer.digests == {WEIGHTS_NAME: [(piece, piece_digest(data))]}


def test_runs_that_are_near_are_read_together_and_those_far_apart_one_by_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "f").write_bytes(bytes(range(256)) * 4)
    asked: list[int] = []

    def read(begin: int, length: int) -> bytes:
        asked.append(length)
        return (tmp_path / "f").read_bytes()[begin : begin + length]

    data = (tmp_path / "f").read_bytes()
    runs = b"".join(data[begin : begin + 8] for begin in (0, 16, 32, 48))
    assert read_digest([Piece(0, 8, 16, 4)], read) == join_digests([piece_digest(runs)])
    read_digest([Piece(8, 8, 1 << 30, 2)], read)
    assert asked == [56, 8, 8]
