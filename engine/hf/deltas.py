"""Versions that hold only the changes from the version before: their chains on disk, what this rank
published last, and one publication.

Every rank keeps the bytes that it wrote last in host memory (`PublishedCopy`) and compares each
piece with them when it writes the next version. A version that is only a delta has no weight files.
Mirrors next to the servers make them from the version before, byte for byte, and compare them with
the digests in the manifest, which every rank computed from the whole pieces.

Cost: the bytes of the rank's share of an export in host memory, and about a second for each GB of
it on one core.
"""

import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    gather_numbers,
    gather_objects,
    get_rank,
    get_world_size,
)
from ...utils.errors import CheckpointCorruptError, CheckpointError
from ...utils.files import StrPath, as_write_error, bytes_digest
from ...utils.logging import get_logger
from ...utils.manifest import (
    DELTA_FILES,
    DELTA_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileEntry,
    check_listing,
    manifest_digest,
    read_manifest,
    verify_folder,
    write_entry,
    write_manifest,
)
from ...utils.pieces import Piece
from .delta_file import DeltaFile, unsigned
from .safetensors_layout import Layout, TensorSlot
from .weight_files import WeightWriter

logger = get_logger(__name__)

# A larger delta is not worth it.
_MOST_OF_FULL = 0.5
# Publications in a row with larger deltas, after which no more are tried.
_MOST_UNFIT = 2


# A chain: a version that holds changes alone, the version before it, and so on to all weights.


def version_path(root: StrPath, version: int) -> Path:
    """The folder of a version: ``<root>/v00000121``."""
    return Path(root) / f"v{version:08d}"


def holds_delta_alone(folder: StrPath) -> bool:
    """Whether a published folder holds only the changes from the version before."""
    changes = Path(folder) / DELTA_NAME / MANIFEST_NAME
    return changes.is_file() and set(os.listdir(folder)) == {DELTA_NAME, MANIFEST_NAME}


def base_of(folder: Path) -> Path:
    """The base of a version of changes: the folder before them. Raises as `read_manifest`."""
    changes = read_manifest(folder / DELTA_NAME)
    base = changes["base"]["version"]
    if base >= changes["weight_version"]:
        raise CheckpointCorruptError(f"{folder} is made from version {base}, which is not older")
    return version_path(folder.parent, base)


def made_from(folder: Path) -> list[Path]:
    """The folder of a version, its base, the base of that, and so on. Empty if one is missing or
    damaged.
    """
    folders = [folder]
    try:
        while holds_delta_alone(folder):
            folder = base_of(folder)
            folders.append(folder)
    except CheckpointError:
        return []
    if not folder.is_dir():
        return []
    return folders


def _chain_problem(folder: Path) -> str | None:
    """Describe the first damage with which no version after ``folder`` can be made from it, or
    return None.

    Sizes of all files are compared, and the bytes of the newest changes. The bytes of older files
    are not read again.
    """
    compare = verify_folder
    try:
        while holds_delta_alone(folder):
            compare(folder / DELTA_NAME)
            folder = base_of(folder)

            # The bytes of older changes were compared when they were the newest.
            compare = check_listing
        check_listing(folder)
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


# Publications


@dataclass(frozen=True)
class Base:
    """The version that a `PublishedCopy` holds, and how it was published."""

    path: str
    version: int
    label: str  # ``<version>-<digest of its manifest>``
    # digest of the names and headers of all weight files
    layout: str
    world_size: int
    # versions without weight files since the last one with them
    deltas: int
    # publications in a row, up to this one, whose changes were too large
    unfit: int

    @property
    def root(self) -> Path:
        """The folder of versions that it is in."""
        return Path(self.path).parent


class _Kept(NamedTuple):
    """The elements of a piece that were published last."""

    file: str
    piece: Piece
    values: np.ndarray


class PublishedCopy:
    """The bytes that this rank published last, piece by piece. Pass the same object to each
    publication.

    It is valid for one version in one folder. If a publication fails on any rank, it is invalid,
    and the next version has all weights.
    """

    def __init__(self) -> None:
        self.base: Base | None = None
        self.given_up = False
        self._pieces: list[_Kept] = []
        self._at = 0

    def begin(self) -> None:
        """Begin a publication. The copy is invalid until ``base`` is set again."""
        self.base = None
        self._at = 0

    def swap(
        self,
        file: str,
        piece: Piece,
        new: np.ndarray,
    ) -> np.ndarray | None:
        """Keep ``new``, the elements of the next piece. Returns a mask of those that differ from
        the previous ones.

        None if the previous publication had another piece at this point.
        """
        at = self._at
        self._at += 1
        if at < len(self._pieces):
            kept = self._pieces[at]
            same_place = (kept.file, kept.piece) == (file, piece)
            if same_place and kept.values.dtype == new.dtype:
                changed = new != kept.values
                np.copyto(kept.values, new)
                return changed

        # The cut into pieces is another one from here on.
        self._pieces[at:] = [_Kept(file, piece, new.copy())]
        return None

    def end(self) -> bool:
        """End the pieces of a publication. Returns False if the previous one had more, which are
        dropped.
        """
        had_more = self._at < len(self._pieces)
        del self._pieces[self._at :]
        return not had_more

    def write_into(self, files: WeightWriter) -> None:
        """Write all pieces."""
        for file, piece, values in self._pieces:
            files.put(file, piece, values.view(np.uint8).data)

    def give_up(self) -> None:
        """Free the copy. No later version is a delta."""
        self._pieces = []
        self.given_up = True


def _base_problem(base: Base) -> str | None:
    """Describe why nothing can be made from changes to a version, or return None."""
    try:
        label = f"{base.version}-{manifest_digest(base.path)}"
    except OSError as error:
        return str(error)
    if label != base.label:
        return f"{base.path} was replaced"
    return _chain_problem(Path(base.path))


class DeltaPublication:
    """One publication that may be a delta. All ranks of ``group`` call each method.

    Args:
        copy: what this rank published last.
        final: folder of the new version, next to the folders of the other versions.
        version: number of the new version.
        anchor_interval: number of deltas after which a version has weight files again. 0: never for
            this reason.
        group: control group.

    Attributes:
        base: the version that the changes are from. None: the version has no delta.
        full: whether the version has weight files.
        n_changed: number of elements that changed, on all ranks. None: they were not compared.
        compare_s: seconds of comparing and encoding on this rank.
    """

    def __init__(
        self,
        copy: PublishedCopy,
        final: Path,
        version: int,
        anchor_interval: int,
        group: RankGroup,
    ) -> None:
        self._copy = copy
        self._final = final
        self._version = version
        self._anchor_interval = anchor_interval
        self._group = group
        self.base: Base | None = None
        self.full = True
        self.n_changed: int | None = None
        self.compare_s = 0.0

        # Whether this rank's pieces are not those of the last publication.
        self._torn = False
        self._unfit = 0

    def open(self, folder: Path, layout: Layout) -> WeightWriter:
        """Decide whether the staged ``folder`` gets weight files, and open this rank's writer."""
        self._folder = folder
        self._layout = layout
        name = f"rank_{get_rank(self._group):05d}.safetensors"
        self._file = DeltaFile(folder / DELTA_NAME, name)
        self._names = {
            (slot.file, slot.offset): key
            for key, slot in layout.slots.items()
            if 0 not in slot.shape
        }

        # Changes are of use if all ranks can make them from the same version.
        bases = gather_objects(self._usable_base(), self._group)
        self.base = bases[0] if bases.count(bases[0]) == len(bases) else None
        self.full = self.base is None or 0 < self._anchor_interval <= self.base.deltas

        self._copy.begin()
        watch = None if self._copy.given_up else self._take
        return WeightWriter(folder if self.full else None, watch)

    @property
    def _layout_key(self) -> str:
        headers = [file.name.encode() + file.header for file in self._layout.files]
        return bytes_digest(b"".join(headers))

    def _usable_base(self) -> Base | None:
        base = self._copy.base
        if base is None or base.root != self._final.parent:
            return None
        if base.layout != self._layout_key or base.world_size != get_world_size(self._group):
            return None

        # One rank looks at the files for all.
        problem = None
        if get_rank(self._group) == 0:
            problem = _base_problem(base)
        if problem is None:
            return base
        logger.warning(
            "version %d gets all weights, because changes from version %d would be of no use: %s",
            self._version,
            base.version,
            problem,
        )
        return None

    def _take(
        self,
        slot: TensorSlot,
        piece: Piece,
        data: memoryview,
    ) -> None:
        started = time.perf_counter()
        new = np.frombuffer(data, unsigned(slot.dtype.itemsize))
        changed = self._copy.swap(slot.file, piece, new)
        if changed is None:
            self._torn = True
        elif self.base is not None and not self._torn:
            first = (piece.offset - slot.offset) // slot.dtype.itemsize
            self._file.add(self._names[slot.file, slot.offset], first, piece, changed, new)
        self.compare_s += time.perf_counter() - started

    def settle(self) -> list[FileEntry]:
        """Finish the changes, or drop them and write the weight files. Returns entries of this
        rank's changes.
        """
        self._torn |= not self._copy.end()
        if self.base is None:
            return []
        entries = []
        with (
            all_ranks_succeed(f"writing the changes of {self._final}", self._group),
            as_write_error(self._final),
        ):
            if not self._torn:
                entries = self._file.close()

        # Sums over the ranks.
        own_bytes = sum(entry.bytes for entry in entries)
        by_rank = gather_numbers([self._torn, own_bytes, self._file.changed], self._group)
        torn, n_bytes, n_changed = (sum(numbers) for numbers in zip(*by_rank, strict=True))
        if not torn:
            self.n_changed = int(n_changed)
            if n_bytes <= _MOST_OF_FULL * self._layout.total_bytes:
                return entries
            self._unfit = self.base.unfit + 1
        self._drop()
        return []

    def _drop(self) -> None:
        """Remove the changes, and write the weight files from the copy unless they are there."""
        group = self._group
        folder = self._folder
        with (
            all_ranks_succeed(f"creating {folder}", group),
            as_write_error(folder),
            WeightWriter(folder) as files,
        ):
            if get_rank(group) == 0:
                if (folder / DELTA_NAME).exists():
                    shutil.rmtree(folder / DELTA_NAME)
                if not self.full:
                    for file in self._layout.files:
                        files.create(file)
                files.sync()

        # Each rank writes its part of all weights from its copy.
        with (
            all_ranks_succeed(f"writing {folder}", group),
            as_write_error(folder),
            WeightWriter(folder) as files,
        ):
            if not self.full:
                self._copy.write_into(files)
                files.sync()
        self.base = None
        self.full = True

        # The copy takes host memory, and is of no use any more.
        if self._unfit == _MOST_UNFIT:
            self._copy.give_up()
            if get_rank(group) == 0:
                logger.warning(
                    "version %d changes %.0f %% of the weights (%s). For the second time in a "
                    "row, the changes are larger than half of all weights, so no more are tried; "
                    "publish in 16 bits, or without delta",
                    self._version,
                    100 * self.figures["changed"],
                    self._dtype,
                )

    @property
    def figures(self) -> dict[str, float]:
        """``delta``: 1 if the version holds changes alone. ``changed``: fraction of the elements,
        if compared.
        """
        figures = {"delta": float(not self.full)}
        if self.n_changed is not None:
            figures["changed"] = self.n_changed / self._n_elements
        return figures

    @property
    def _n_elements(self) -> int:
        n_elements = sum(math.prod(slot.shape) for slot in self._layout.slots.values())
        return max(1, n_elements)

    @property
    def _dtype(self) -> str:
        ((dtype, _),) = Counter(slot.dtype for slot in self._layout.slots.values()).most_common(1)
        return str(dtype).removeprefix("torch.")

    def seal(self, files: Sequence[FileEntry], changes: Sequence[FileEntry]) -> int:
        """Write the manifest of the changes, and remove the other files of a version without weight
        files.

        Called on rank 0. ``files`` are those of the version with all weights, ``changes`` those of
        all ranks. Returns the bytes of all changes.
        """
        if self.base is None:
            return 0
        before = read_manifest(self.base.path)["files"]
        root = self._folder / DELTA_NAME
        root.mkdir(exist_ok=True)

        # Small files that changed belong to the changes as they are.
        entries = list(changes)
        for file in files:
            if not file.pieces and before.get(file.name, {}).get("digest") != file.digest:
                name = f"{DELTA_FILES}/{file.name}"
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                data = (self._folder / file.name).read_bytes()
                entries.append(write_entry(root, name, data))
        facts = {
            "format_version": FORMAT_VERSION,
            "weight_version": self._version,
            "base": {"version": self.base.version, "label": self.base.label},
            "elements": self._n_elements,
            "changed": self.n_changed,
        }
        write_manifest(root, entries, facts)

        if not self.full:
            for path in sorted(self._folder.iterdir()):
                if path == root:
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        return sum(entry.bytes for entry in entries)

    def commit(self, label: str) -> None:
        """Declare the copy valid for the new version, which has been renamed."""
        if self._copy.given_up:
            return
        deltas = 0
        if self.base is not None and not self.full:
            deltas = self.base.deltas + 1
        self._copy.base = Base(
            str(self._final),
            self._version,
            label,
            layout=self._layout_key,
            world_size=get_world_size(self._group),
            deltas=deltas,
            unfit=self._unfit,
        )
