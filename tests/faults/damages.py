"""Damage to the files of a generation: truncated, corrupted, moved, mixed with another generation,
or not files.

Each damage is a function of the generation's folder, whose files are hard links, so it replaces the
files it changes.
"""

import io
import os
import pickletools
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise, product
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader

from holdfast.recover.info import INFO_NAME
from holdfast.utils.manifest import MANIFEST_NAME
from tests.faults.generations import NEWER, OLDER, files_of, link_tree, replace_bytes

SMALL_BYTES = 2600
"""Up to this size, one bit of every byte is flipped."""


@dataclass(frozen=True)
class Damage:
    """One kind of damage to a generation.

    Attributes:
        name: description for the report.
        strike: function that damages the folder.
        blame: files, at least one of which the reason must name.
    """

    name: str
    strike: Callable[[Path], object]
    blame: tuple[str, ...]


# Truncation


def _zip_boundaries(blob: bytes, start: int) -> Iterator[int]:
    """Offsets of the parts of a zip archive: local headers, members, the directory, its end."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        for member in archive.infolist():
            begin = member.header_offset
            name_bytes, extra_bytes = (
                int.from_bytes(blob[begin + i : begin + i + 2], "little") for i in (26, 28)
            )
            data = begin + 30 + name_bytes + extra_bytes
            yield from (start + begin, start + data, start + data + member.compress_size)
        yield start + archive.start_dir
    yield from (start + blob.rfind(b"PK\x05\x06"), start + len(blob))


def boundaries(folder: Path, name: str) -> list[int]:
    """Byte offsets at which some part of a file begins or ends, including both ends of the file."""
    data = (folder / name).read_bytes()
    found = {0, len(data)}
    if name.endswith(".json"):
        found |= {i + 1 for i, byte in enumerate(data) if byte == ord("\n")}
    elif name.endswith(".metadata"):
        strings = ("PROTO", "FRAME", "SHORT_BINUNICODE", "STOP")
        found |= {at or 0 for opcode, _, at in pickletools.genops(data) if opcode.name in strings}
    elif name.endswith(".distcp"):
        places = FileSystemReader((folder / name).parent).read_metadata().storage_data.values()
        own = sorted((p.offset, p.length) for p in places if p.relative_path == Path(name).name)
        found |= {edge for offset, length in own for edge in (offset, offset + length)}
        for offset, length in (
            own[0],
            own[-1],
        ):  # the first and the last entry suffice, because all are alike
            found |= set(_zip_boundaries(data[offset : offset + length], offset))
    elif name.endswith(".pt"):
        found |= set(_zip_boundaries(data, 0))
    return sorted(found)


def truncate(name: str, size: int, folder: Path) -> None:
    os.truncate(replace_bytes(folder / name, (folder / name).read_bytes()), size)


def truncations(good: Path) -> Iterator[Damage]:
    """Cut every file at every boundary and one byte to either side. One byte after the end makes
    the file longer.
    """
    for name in files_of(good / NEWER):
        size = (good / NEWER / name).stat().st_size
        cuts = {
            at + off
            for at in boundaries(good / NEWER, name)
            for off in (-1, 0, 1)
            if 0 <= at + off != size
        }
        for cut in sorted(cuts):
            yield Damage(
                f"{name} of {size} bytes cut at {cut}", partial(truncate, name, cut), (name,)
            )


# Bits


def flip(name: str, at: int, folder: Path) -> None:
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1 << (at % 8)
    replace_bytes(folder / name, data)


def flips(good: Path) -> Iterator[Damage]:
    """Flip one bit of every byte in small files. In larger files, flip one in two bytes of every
    part.
    """
    for name in files_of(good / NEWER):
        size, edges = (good / NEWER / name).stat().st_size, boundaries(good / NEWER, name)
        parts = {at for a, b in pairwise(edges) for at in (a, (a + b) // 2)}
        for at in sorted(parts if size > SMALL_BYTES else range(size)):
            yield Damage(
                f"{name} with a bit flipped in byte {at}", partial(flip, name, at), (name,)
            )


# Files in the wrong place


def _swap(one: str, other: str, folder: Path) -> None:
    (folder / one).rename(folder / "swap")
    (folder / other).rename(folder / one)
    (folder / "swap").rename(folder / other)


def _add(name: str, data: bytes, folder: Path) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def _remove_folder(name: str, folder: Path) -> None:
    shutil.rmtree(folder / name)


def rearrangements(good: Path) -> Iterator[Damage]:
    """Swap any two files, remove every file and folder, add files and folders."""
    source = good / NEWER
    names = files_of(source)
    for one, other in combinations(names, 2):
        if (source / one).read_bytes() != (source / other).read_bytes():
            yield Damage(f"{one} and {other} swapped", partial(_swap, one, other), (one, other))
    for name in names:
        yield Damage(f"{name} removed", lambda folder, name=name: (folder / name).unlink(), (name,))
    for folder_name in sorted({Path(name).parts[0] for name in names if "/" in name}):
        inside = tuple(name for name in names if name.startswith(f"{folder_name}/"))
        yield Damage(f"{folder_name}/ removed", partial(_remove_folder, folder_name), inside)
    twin = (source / "actor" / "__0_0.distcp").read_bytes()
    added = (
        "x",
        "x.distcp",
        "actor/__2_0.distcp",
        "actor/.hidden",
        "state/rank_00002.pt",
        "state/driver.pt",
    )
    for name in (*added, "ghost/.metadata", "actor/deep/er/x", "manifest.json.tmp", "data.pt~"):
        for data in (b"", twin):
            yield Damage(f"{name} of {len(data)} bytes added", partial(_add, name, data), (name,))
    for name in ("empty", "actor/empty"):
        yield Damage(
            f"folder {name} added", lambda folder, name=name: (folder / name).mkdir(), (name,)
        )


# Two generations in one


def _take(parts: tuple[str, ...], older: Path, folder: Path) -> None:
    for part in parts:
        if (folder / part).is_dir():
            shutil.rmtree(folder / part)
            link_tree(older / part, folder / part)
        else:
            (folder / part).unlink()
            os.link(older / part, folder / part)


def mixtures(good: Path) -> Iterator[Damage]:
    """Take each file, and all combinations of parts, from the older generation, with either
    manifest.
    """
    older, newer = good / OLDER, good / NEWER
    every = tuple(files_of(newer))
    changed = [name for name in every if (older / name).read_bytes() != (newer / name).read_bytes()]
    for name in changed:
        blame = (
            every if name == MANIFEST_NAME else (name,)
        )  # a valid manifest blames the files around it
        yield Damage(f"{name} of the older generation", partial(_take, (name,), older), blame)
        others = tuple(other for other in every if other != name)
        yield Damage(
            f"all but {name} of the older generation",
            partial(_take, others, older),
            (INFO_NAME, *every),
        )
    parts = sorted({Path(name).parts[0] for name in changed})
    for chosen in product((False, True), repeat=len(parts)):
        taken = tuple(part for part, wanted in zip(parts, chosen, strict=True) if wanted)
        if len(taken) > 1:
            yield Damage(
                f"{', '.join(taken)} of the older generation",
                partial(_take, taken, older),
                (INFO_NAME, *every),
            )


# Not files at all


def _replace(name: str, make: Callable[[Path, bytes], object], folder: Path) -> None:
    data = (folder / name).read_bytes()
    (folder / name).unlink()
    make(folder / name, data)


def _by_folder(path: Path, data: bytes) -> None:
    path.mkdir()
    (path / path.name).write_bytes(data)


def _by_link_to_the_same_bytes(path: Path, data: bytes) -> None:
    target = (
        next(parent for parent in path.parents if parent.name == "recover").parent / "elsewhere"
    )
    target.write_bytes(data)
    path.symlink_to(target)


def _by_socket(path: Path, _: bytes) -> None:
    with (
        socket.socket(socket.AF_UNIX) as server,
        chdir(path.parent),
    ):  # a socket's path is limited to 107 bytes
        server.bind(path.name)


REPLACEMENTS: dict[str, Callable[[Path, bytes], object]] = {
    "an empty folder": lambda path, _: path.mkdir(),
    "a folder with it inside": _by_folder,
    "a link to the same bytes": _by_link_to_the_same_bytes,
    "a link to nothing": lambda path, _: path.symlink_to("nothing"),
    "a link to itself": lambda path, _: path.symlink_to(path),
    "a link to endless zeros": lambda path, _: path.symlink_to("/dev/zero"),
    "a fifo": lambda path, _: os.mkfifo(path),
    "a socket": _by_socket,
}


def impostors(good: Path) -> Iterator[Damage]:
    """Replace every file by something that is not a file."""
    for name, (what, make) in product(files_of(good / NEWER), REPLACEMENTS.items()):
        yield Damage(f"{name} replaced by {what}", partial(_replace, name, make), (name,))


KINDS: dict[str, Callable[[Path], Iterator[Damage]]] = {
    "truncated file": truncations,
    "flipped bit": flips,
    "file swapped, removed or added": rearrangements,
    "two generations mixed": mixtures,
    "no regular file": impostors,
}
