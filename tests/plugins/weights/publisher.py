"""A trainer's side for tests: publishes full versions and deltas, with every code and several
ranks, in numpy.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from holdfast.utils.manifest import encode_manifest

ITEM_BYTES = {
    "U8": 1,
    "F8_E4M3": 1,
    "BOOL": 1,
    "BF16": 2,
    "F16": 2,
    "F32": 4,
    "I32": 4,
    "I64": 8,
    "F64": 8,
}
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.embed.weight": ("BF16", (50, 12)),
    "model.columns.weight": ("BF16", (16, 24)),  # split by columns over the ranks
    "model.norm.weight": ("F32", (33,)),
    "model.scale": ("F64", ()),
    "model.mask": ("BOOL", (7,)),
    "model.fp8.weight": ("F8_E4M3", (9, 9)),
    "model.count": ("I64", (5,)),
    "model.none.weight": ("F16", (0, 4)),
    "odd@name.gap8": ("F16", (40,)),
}
CODES = ("gap8", "gap16", "bits")


@dataclass(frozen=True)
class Piece:
    """Elements of a tensor that one rank writes together: ``rows`` runs of ``run`` elements,
    ``step`` apart.
    """

    rank: int
    tensor: str
    first: int
    run: int
    step: int
    rows: int

    def places(self) -> np.ndarray:
        """The elements, rising."""
        return (
            self.first + self.step * np.arange(self.rows)[:, None] + np.arange(self.run)
        ).reshape(-1)


def digest(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128(data).hexdigest()}"


def safetensors(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """The bytes of a safetensors file."""
    header, end = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return (
        len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())
    )


def encode(places: np.ndarray, first: int, code: str) -> tuple[str, bytes]:
    """Encode rising places as ``code``: the dtype and the bytes."""
    if code == "bits":
        mask = np.zeros(int(places[-1]) - first + 1, bool)
        mask[places - first] = True
        return "U8", np.packbits(mask, bitorder="little").tobytes()
    dtype, most = ("U8", 255) if code == "gap8" else ("U16", 65535)
    tokens = []
    for gap in np.diff(places, prepend=first - 1) - 1:
        skips, rest = divmod(int(gap), most)
        tokens += [most] * skips + [rest]
    return dtype, np.array(tokens, "<u1" if dtype == "U8" else "<u2").tobytes()


@dataclass
class Publisher:
    """Weights that change, and a folder of versions.

    Attributes:
        values: bits of every tensor, flat.
        force: code of all chunks that can have it. None takes the smallest.
        format_version: of the full folders. 2 has no pieces.
    """

    root: Path
    shapes: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=lambda: SHAPES)
    ranks: int = 2
    piece_elements: int = 64
    seed: int = 0
    force: str | None = None
    format_version: int = 3
    values: dict[str, np.ndarray] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    contents: dict[int, dict[str, bytes]] = field(
        default_factory=dict
    )  # of each version, as it should come out
    manifests: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        for name, (dtype, shape) in self.shapes.items():
            bits = f"u{ITEM_BYTES[dtype]}"
            self.values[name] = self.random.integers(
                0, 1 << 8 * ITEM_BYTES[dtype], math.prod(shape), bits, False
            )
        self.small |= {
            "config.json": b'{"model_type": "qwen3"}',
            "additional_chat_templates/a b.jinja": b"{{ x }}",
        }

    def train(self, share: float = 0.02) -> None:
        """Change a share of the elements of every tensor, and the probe."""
        for values in self.values.values():
            changed = np.flatnonzero(self.random.random(len(values)) < share)
            values[changed] ^= self.random.integers(1, 200, len(changed)).astype(values.dtype)
        self.small["weights_probe.json"] = self.random.bytes(40)

    def label(self, version: int) -> str:
        return f"{version}-{digest(self.manifests[version])}"

    def folder(self, version: int) -> Path:
        return self.root / f"v{version:08d}"

    def publish(self, version: int, base: int | None = None, full: bool = False) -> str:
        """Write a version: a delta from ``base``, and all files if ``full`` or without a base.
        Returns its label.
        """
        weights = {
            f"model-{n + 1:05d}-of-00002.safetensors": self._weight_file(n) for n in range(2)
        }
        content = {**self.small, **{name: data for name, (data, _) in weights.items()}}
        files: dict[str, Any] = {}
        for name, data in sorted(content.items()):
            files[name] = {"bytes": len(data), "digest": digest(data)}
            if name in weights and self.format_version > 2:
                pieces = weights[name][1]
                files[name] |= {
                    "digest": f"xxh3_128t:{tree_digest(data, pieces)}",
                    "pieces": pieces,
                }
        manifest = encode_manifest(
            {"format_version": self.format_version, "weight_version": version, "files": files}
        )
        self.contents[version], self.manifests[version] = content, manifest
        staging = self.root / f".staging-v{version:08d}-{0:012x}"
        if base is not None:
            write_files(staging / "delta", self.delta(version, base))
        if base is None or full:
            write_files(staging, content)
        write_files(staging, {"manifest.json": manifest})
        staging.rename(self.folder(version))
        return self.label(version)

    def publish_chain(
        self, versions: Sequence[int], share: float = 0.02, anchors: Sequence[int] = ()
    ) -> None:
        """Publish the first version full, and each following one as a delta from the one before."""
        previous = None
        for version in versions:
            self.train(share)
            self.publish(version, previous, full=version in anchors)
            previous = version

    def delta(self, version: int, base: int) -> dict[str, bytes]:
        """The files of ``delta``, its manifest included."""
        old = {
            name: read_bits(self.contents[base], name, values.dtype)
            for name, values in self.values.items()
        }
        changed, ranks = (
            0,
            [dict[str, tuple[str, Sequence[int], bytes]]() for _ in range(self.ranks)],
        )
        for piece in self.pieces():
            values, places = self.values[piece.tensor], piece.places()
            places = places[values[places] != old[piece.tensor][places]]
            if not len(places):
                continue
            changed += len(places)
            possible = CODES if piece.rows == 1 else CODES[:2]
            encoded = {code: encode(places, piece.first, code) for code in possible}
            code = (
                self.force
                if self.force in encoded
                else min(encoded, key=lambda code: len(encoded[code][1]))
            )
            dtype, data = encoded[code]
            chunk, bits = f"{piece.tensor}@{piece.first}", ITEM_BYTES[self.shapes[piece.tensor][0]]
            ranks[piece.rank][f"{chunk}.{code}"] = (
                dtype,
                [len(data) // ITEM_BYTES.get(dtype, 2)],
                data,
            )
            ranks[piece.rank][f"{chunk}.values"] = (
                f"U{8 * bits}",
                [len(places)],
                values[places].tobytes(),
            )
        files = {
            f"rank_{rank:05d}.safetensors": safetensors(chunks)
            for rank, chunks in enumerate(ranks)
            if chunks
        }
        for name, data in self.small.items():
            if self.contents[base].get(name) != data:
                files[f"files/{name}"] = data
        facts = {
            "format_version": 3,
            "weight_version": version,
            "base": {"version": base, "label": self.label(base)},
            "elements": sum(map(len, self.values.values())),
            "changed": changed,
        }
        return seal(files, facts)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of all tensors."""
        for name, (_, shape) in self.shapes.items():
            count = math.prod(shape)
            if "columns" in name:
                rows, columns = shape
                width, at_once = (
                    columns // self.ranks,
                    max(1, self.piece_elements * self.ranks // columns),
                )
                for rank in range(self.ranks):
                    for row in range(0, rows, at_once):
                        some = min(at_once, rows - row)
                        yield Piece(
                            rank,
                            name,
                            row * columns + rank * width,
                            width,
                            columns * (some > 1),
                            some,
                        )
                continue
            for number, first in enumerate(range(0, count, self.piece_elements)):
                yield Piece(
                    number % self.ranks, name, first, min(self.piece_elements, count - first), 0, 1
                )

    def _weight_file(self, number: int) -> tuple[bytes, list[list[int]]]:
        names = list(self.shapes)[number::2]
        tensors = {name: (*self.shapes[name], self.values[name].tobytes()) for name in names}
        data = safetensors(tensors)
        header = 8 + int.from_bytes(data[:8], "little")
        offsets, at = {}, header
        for name in names:
            offsets[name], at = at, at + len(tensors[name][2])
        found = [[0, header, 0, 1]]
        for piece in self.pieces():
            if piece.tensor in offsets:
                item = ITEM_BYTES[self.shapes[piece.tensor][0]]
                begin = offsets[piece.tensor] + item * piece.first
                found.append([begin, item * piece.run, item * piece.step, piece.rows])
        return data, sorted(found)


def tree_digest(data: bytes, pieces: Sequence[Sequence[int]]) -> str:
    """Hexadecimal digest over the digests of pieces."""
    digests = [
        xxhash.xxh3_128(
            b"".join(data[o + row * step : o + row * step + run] for row in range(rows))
        ).digest()
        for o, run, step, rows in pieces
    ]
    return xxhash.xxh3_128(b"".join(digests)).hexdigest()


def seal(files: dict[str, bytes], facts: dict[str, Any]) -> dict[str, bytes]:
    """Add the manifest of a delta to its files."""
    entries = {
        name: {"bytes": len(data), "digest": digest(data)} for name, data in sorted(files.items())
    }
    return {**files, "manifest.json": encode_manifest({**facts, "files": entries})}


def read_bits(content: dict[str, bytes], tensor: str, dtype: np.dtype) -> np.ndarray:
    """Bits of a tensor in the files of a version."""
    for name, data in content.items():
        if name.endswith(".safetensors"):
            start = 8 + int.from_bytes(data[:8], "little")
            if entry := json.loads(data[8:start]).get(tensor):
                begin, end = entry["data_offsets"]
                return np.frombuffer(data[start + begin : start + end], dtype)
    raise KeyError(tensor)


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def read_files(folder: Path) -> dict[str, bytes]:
    """All files of a folder but its delta."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {
        name: path.read_bytes() for name, path in names.items() if not name.startswith("delta/")
    }


def assert_same(folder: Path, publisher: Publisher, version: int) -> None:
    """Check that a folder has exactly the bytes of a full publication."""
    found = read_files(folder)
    assert found == {**publisher.contents[version], "manifest.json": publisher.manifests[version]}
