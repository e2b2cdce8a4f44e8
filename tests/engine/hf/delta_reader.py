"""A second reader of deltas, written from docs/checkpoint-format.md: it makes the files of a version in memory."""

import json
from pathlib import Path

import numpy as np

from holdfast.engine.hf.versions import holds_delta_alone, version_path
from holdfast.utils.files import bytes_digest
from holdfast.utils.manifest import manifest_digest, read_manifest, verify_folder
from holdfast.utils.pieces import read_digest

SIZES = {"U8": 1, "U16": 2, "U32": 4, "U64": 8}
Files = dict[str, bytes]


def files_of_version(root: str | Path, version: int, through_deltas: bool = False) -> Files:
    """The files of a version, compared with its manifest. With ``through_deltas`` an anchor is also made from its base.

    Raises AssertionError if a file differs from the manifest.
    """
    folder = version_path(root, version)
    manifest = read_manifest(folder)
    assert manifest["weight_version"] == version
    delta = folder / "delta"
    if holds_delta_alone(folder) or (through_deltas and delta.is_dir()):
        facts = verify_folder(delta)
        assert facts["format_version"] == 3 and facts["weight_version"] == version
        base = facts["base"]["version"]
        assert facts["base"]["label"] == f"{base}-{manifest_digest(version_path(root, base))}"
        found = files_of_version(root, base)
        changed = _apply(found, delta, list(facts["files"]))
        assert changed == facts["changed"] <= facts["elements"]
    else:
        found = {name: (folder / name).read_bytes() for name in manifest["files"]}
    assert found.keys() >= manifest["files"].keys()
    for name, entry in manifest["files"].items():
        data = found[name]
        if "pieces" in entry:
            digest = read_digest(entry["pieces"], lambda begin, n_bytes, data=data: data[begin : begin + n_bytes])
        else:
            digest = bytes_digest(data)
        assert (len(data), digest) == (entry["bytes"], entry["digest"]), f"version {version}: {name} is another file"
    return {name: found[name] for name in manifest["files"]}


def _apply(files: Files, delta: Path, names: list[str]) -> int:
    changed = 0
    places = {
        key: (name, *where) for name in files if name.endswith(".safetensors") for key, where in _header(files[name])
    }
    rewritten = {name: bytearray(data) for name, data in files.items()}
    for name in names:
        if name.startswith("files/"):
            rewritten[name.removeprefix("files/")] = bytearray((delta / name).read_bytes())
            continue
        tensors = read_tensors((delta / name).read_bytes())
        for key in [key for key in tensors if key.endswith(".values")]:
            chunk = key.removesuffix(".values")
            tensor, _, first = chunk.rpartition("@")
            (code,) = {other.rpartition(".")[2] for other in tensors if other.rpartition(".")[0] == chunk} - {"values"}
            elements = int(first) + decode_places(code, tensors[f"{chunk}.{code}"])
            file, begin, end = places[tensor]
            values = tensors[key]
            assert len(elements) == len(values) > 0 and (np.diff(elements) > 0).all()
            target = np.frombuffer(rewritten[file], values.dtype, (end - begin) // values.itemsize, begin)
            assert (target[elements] != values).all(), "an element that did not change was sent"
            target[elements] = values
            changed += len(elements)
    files |= {name: bytes(data) for name, data in rewritten.items()}
    return changed


def decode_places(code: str, codes: np.ndarray) -> np.ndarray:
    """The places of changed elements, counted from the first element of the chunk."""
    if code == "bits":
        return np.flatnonzero(np.unpackbits(codes, bitorder="little"))
    assert codes.dtype.itemsize == {"gap8": 1, "gap16": 2}[code]
    places, at, most = [], 0, np.iinfo(codes.dtype).max
    for gap in codes.tolist():
        at += gap
        if gap != most:
            places.append(at)
            at += 1
    return np.array(places, np.int64)


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a rank's file."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    found = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        found[name] = np.frombuffer(data[start + begin : start + end], f"<u{SIZES[entry['dtype']]}")
        assert entry["shape"] == [len(found[name])]
    assert start + max(entry["data_offsets"][1] for entry in header.values()) == len(data)
    return found


def _header(data: bytes) -> list[tuple[str, tuple[int, int]]]:
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    entries.pop("__metadata__", None)
    return [
        (key, (start + entry["data_offsets"][0], start + entry["data_offsets"][1])) for key, entry in entries.items()
    ]
