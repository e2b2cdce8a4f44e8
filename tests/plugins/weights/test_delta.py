"""Rank files change exactly the elements that they say, and are refused where they do not fit the
base.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from holdfast_weights import delta
from holdfast_weights.delta import apply_deltas, read_header
from holdfast_weights.errors import FolderError
from holdfast_weights.manifest import parse_manifest
from holdfast_weights.versions import Delta

from tests.plugins.weights.publisher import CODES, encode, safetensors, seal, write_files

pytestmark = pytest.mark.timeout(60)

COUNT = 200_000
WEIGHTS = {"w": ("BF16", [COUNT // 8, 8]), "b": ("F32", [10]), "e": ("F16", [0])}
ELEMENTS = COUNT + 10


def write_base(folder: Path) -> np.ndarray:
    """A folder with the weights. Returns the bits of ``w``."""
    values = np.arange(COUNT, dtype="<u2")
    tensors = {
        name: (dtype, shape, bytes(ELEMENTS * 4)[: 0 if name == "e" else 40])
        for name, (dtype, shape) in WEIGHTS.items()
    }
    tensors["w"] = ("BF16", [COUNT // 8, 8], values.tobytes())
    write_files(folder, {"model.safetensors": safetensors(tensors)})
    return values


def read(folder: Path, name: str, dtype: str) -> np.ndarray:
    (tensor,) = (
        tensor for tensor in read_header(folder / "model.safetensors") if tensor.name == name
    )
    return np.fromfile(tensor.path, dtype, tensor.count, offset=tensor.offset)


Chunks = Mapping[str, tuple[str, Sequence[int], bytes]]


def apply(
    folder: Path, *ranks: Chunks | bytes, changed: int | None = None, elements: int = ELEMENTS
) -> None:
    """Apply one delta with a file for each rank."""
    files = {
        f"rank_{i:05d}.safetensors": r if isinstance(r, bytes) else safetensors(dict(r))
        for i, r in enumerate(ranks)
    }
    counts = [
        shape[0]
        for r in ranks
        if not isinstance(r, bytes)
        for name, (_, shape, _) in r.items()
        if ".values" in name
    ]
    facts: dict[str, Any] = {
        "format_version": 3,
        "weight_version": 2,
        "base": {},
        "elements": elements,
    }
    sealed = seal(files, facts | {"changed": sum(counts) if changed is None else changed})
    write_files(folder / "delta", sealed)
    manifest = parse_manifest(sealed["manifest.json"], "delta/manifest.json")
    apply_deltas(folder, ["model.safetensors"], [(folder / "delta", Delta(2, manifest, 1, ""))])


def chunk(
    places: Sequence[int], values: Sequence[int], first: int, code: str, tensor: str = "w"
) -> Chunks:
    dtype, data = encode(np.array(places), first, code)
    item = 2 if tensor == "w" else 4
    shape = [len(data) // (2 if dtype == "U16" else 1)]
    stored = np.array(values, f"<u{item}").tobytes()
    name = f"{tensor}@{first}"
    return {
        f"{name}.{code}": (dtype, shape, data),
        f"{name}.values": (f"U{8 * item}", [len(values)], stored),
    }


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    "places",
    [
        [0],
        [COUNT - 1],
        [0, COUNT - 1],
        [254, 510],
        [255],
        [256],
        [65534],
        [65535],
        [65536, 131072, 131073],
        range(COUNT),
    ],
    ids=lambda places: f"{places[0]}-{len(places)}",
)
def test_elements_at_odd_places_are_changed(
    places: Sequence[int], code: str, tmp_path: Path
) -> None:
    expected = write_base(tmp_path)
    values = [(7 * place + 1) % 65536 for place in places]
    expected[list(places)] = values
    apply(tmp_path, chunk(places, values, 0, code))
    assert np.array_equal(read(tmp_path, "w", "<u2"), expected)
    assert not read(tmp_path, "b", "<u4").any()


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("share", [0.001, 0.2, 0.9])
def test_long_chunks_are_changed_a_block_at_a_time(
    share: float, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(delta, "PIECE_BYTES", 100)
    expected, random = write_base(tmp_path), np.random.default_rng(1)
    places = 300 + np.flatnonzero(random.random(20_000) < share)
    values = random.integers(0, 1 << 16, len(places))
    expected[places] = values
    apply(tmp_path, chunk(places.tolist(), values.tolist(), 290, code))
    assert np.array_equal(read(tmp_path, "w", "<u2"), expected)


@pytest.mark.parametrize("code", CODES)
def test_a_chunk_begins_anywhere(code: str, tmp_path: Path) -> None:
    expected = write_base(tmp_path)
    expected[[100_001, 199_999]] = [1, 2]
    apply(tmp_path, chunk([100_001, 199_999], [1, 2], 99_991, code))
    assert np.array_equal(read(tmp_path, "w", "<u2"), expected)


def test_bits_are_stored_and_not_numbers(tmp_path: Path) -> None:
    write_base(tmp_path)
    odd = [
        0x80000000,
        0x7FC00001,
        0xFFC12345,
        0x7F800000,
        0x00000001,
    ]  # -0.0, NaNs, infinity, a denormal
    apply(tmp_path, chunk(range(5), odd, 0, "gap8", "b"))
    assert read(tmp_path, "b", "<u4").tolist() == [*odd, 0, 0, 0, 0, 0]


def test_ranks_change_columns_of_one_tensor_at_the_same_time(tmp_path: Path) -> None:
    expected, places = write_base(tmp_path), np.arange(COUNT)
    ranks = []
    for rank in range(4):
        own = places[places // 2 % 4 == rank]
        ranks.append(chunk(own.tolist(), [rank + 1] * len(own), 2 * rank, "gap8"))
    expected[:] = places // 2 % 4 + 1
    apply(tmp_path, *ranks)
    assert np.array_equal(read(tmp_path, "w", "<u2"), expected)


def raw(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "U8", shape: Any = (1,), begin: Any = 0, end: Any = 1) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


V = ("U16", [1], b"\1\0")
TWO = {"w@0.gap8": entry(), "w@0.values": entry("U16", [1], 1, 3)}
REFUSED: dict[str, tuple[Chunks | bytes, str]] = {
    "behind the end": (
        chunk([COUNT], [1], 0, "gap16"),
        f"w@0.gap16 changes element {COUNT}, w has {COUNT}",
    ),
    "behind the end, bits": (
        chunk([COUNT], [1], COUNT - 1, "bits"),
        f"changes element {COUNT}, w has {COUNT}",
    ),
    "far behind": (
        chunk([10**17], [1], 10**17, "gap8"),
        f"changes element {10**17}, w has {COUNT}",
    ),
    "into the next tensor": (
        chunk([10], [1], 9, "gap8", "b"),
        "b@9.gap8 changes element 10, b has 10",
    ),
    "empty tensor": (
        {"e@0.gap8": ("U8", [1], b"\0"), "e@0.values": V},
        "changes element 0, e has 0",
    ),
    "more places": (
        {"w@0.gap8": ("U8", [2], b"\0\0"), "w@0.values": V},
        "another number of places than of values",
    ),
    "fewer places": (
        {"w@0.gap8": ("U8", [2], b"\xff\xff"), "w@0.values": V},
        "another number of places",
    ),
    "no places": ({"w@0.gap8": ("U8", [0], b""), "w@0.values": V}, "another number of places"),
    "no values": ({"w@0.gap8": ("U8", [1], b"\0")}, "has \\['gap8'\\] and no values"),
    "values alone": ({"w@0.values": V}, "has \\[\\] and its values"),
    "two codes": (
        {"w@0.gap8": ("U8", [1], b"\0"), "w@0.bits": ("U8", [1], b"\1"), "w@0.values": V},
        "'bits', 'gap8'",
    ),
    "values of another dtype": (
        {"w@0.gap8": ("U8", [1], b"\0"), "w@0.values": ("U8", [1], b"\1")},
        "dtype U8, expected U16",
    ),
    "floats": (
        {"w@0.gap8": ("U8", [1], b"\0"), "w@0.values": ("F16", [1], b"\1\1")},
        "dtype F16, expected U16",
    ),
    "places of another dtype": (
        {"w@0.gap8": ("I8", [1], b"\0"), "w@0.values": V},
        "dtype I8, expected U8",
    ),
    "unknown tensor": (
        {"v@0.gap8": ("U8", [1], b"\0")},
        "'v@0.gap8' is no change of a tensor in the base",
    ),
    "unknown code": ({"w@0.zstd": ("U8", [1], b"\0")}, "is no change of a tensor"),
    "odd number": ({"w@00.gap8": ("U8", [1], b"\0")}, "is no change of a tensor"),
    "negative number": ({"w@-1.gap8": ("U8", [1], b"\0")}, "is no change of a tensor"),
    "other digits": ({"w@\u0661.gap8": ("U8", [1], b"\0")}, "is no change of a tensor"),
    "no name": ({"": ("U8", [1], b"\0")}, "is no change of a tensor"),
    "empty": (b"", "has 0 bytes and a header of 0"),
    "short": (b"\1\0\0", "has 3 bytes and a header of 1"),
    "header over the end": (
        (1 << 40).to_bytes(8, "little") + b"{}",
        "a header of 1099511627776; at most",
    ),
    "no JSON": (raw(b"\xff\xfe"), "broken header"),
    "list": (raw([]), "broken header"),
    "deep": (raw(b"[" * 200_000), "broken header: RecursionError"),
    "overlap": (
        raw(TWO | {"w@1.gap8": entry("U8", [1], 0, 1)}, b"\0" * 3),
        "begins at byte .*, expected",
    ),
    "hole": (raw({"w@0.gap8": entry("U8", [1], 1, 2)}, b"\0" * 2), "begins at byte .*, expected"),
    "rest": (raw(TWO, b"\0" * 4), "its header asks for"),
    "cut": (raw(TWO, b"\0" * 2), "its header asks for"),
    "size of another shape": (
        raw({"w@0.gap8": entry("U8", [2], 0, 1)}, b"\0"),
        "cannot be at \\[0, 1\\]",
    ),
    "negative shape": (raw({"w@0.gap8": entry("U8", [-1], 0, 1)}, b"\0"), "has the shape \\[-1\\]"),
    "huge shape": (raw({"w@0.gap8": entry("U8", [2**40, 2**40], 0, 1)}, b"\0"), "cannot be at"),
    "long shape": (raw({"w@0.gap8": entry("U8", [2**40] * 99, 0, 1)}, b"\0"), "has the shape"),
    "shape of text": (raw({"w@0.gap8": entry("U8", "1", 0, 1)}, b"\0"), "has the shape"),
    "no shape": (raw({"w@0.gap8": {"dtype": "U8"}}, b"\0"), "broken header"),
    "true": (raw({"w@0.gap8": entry("U8", [True], 0, 1)}, b"\0"), "has the shape"),
    "unknown dtype": (raw({"w@0.gap8": entry("X9", [1], 0, 1)}, b"\0"), "has dtype 'X9'"),
    "dtype of another type": (raw({"w@0.gap8": entry([], [1], 0, 1)}, b"\0"), "broken header"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rank_file_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    expected, (rank, message) = write_base(tmp_path), REFUSED[name]
    before = (tmp_path / "model.safetensors").stat().st_size
    with pytest.raises(FolderError, match=f"rank_00000.safetensors.*{message}"):
        apply(tmp_path, rank)
    assert np.array_equal(read(tmp_path, "w", "<u2"), expected), "an element that no change names"
    assert (tmp_path / "model.safetensors").stat().st_size == before


def test_a_header_over_100_megabytes_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    with open(tmp_path / "big", "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(FolderError, match="a header of 100000001; at most 100000000 are read"):
        read_header(tmp_path / "big")


def test_counts_of_another_model_are_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    with pytest.raises(
        FolderError, match=f"counts 3 elements, the weights of its base have {ELEMENTS}"
    ):
        apply(tmp_path, chunk([1], [1], 0, "gap8"), elements=3)
    with pytest.raises(FolderError, match="counts 2 changed elements, its rank files have 1"):
        apply(tmp_path, chunk([1], [1], 0, "gap8"), changed=2)


def test_a_tensor_in_two_weight_files_is_refused(tmp_path: Path) -> None:
    write_base(tmp_path)
    write_files(tmp_path, {"more.safetensors": safetensors({"b": ("F32", [1], b"\0" * 4)})})
    with pytest.raises(FolderError, match=r"b is in model\.safetensors and in more"):
        apply_deltas(tmp_path, ["model.safetensors", "more.safetensors"], [])
