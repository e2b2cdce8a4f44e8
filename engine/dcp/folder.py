"""`DCPFolder`: an opened DCP folder, the one place where a load asks what lies where."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from ...utils.distributed import get_rank, get_world_size, rank_zero_decides
from ...utils.errors import CheckpointMismatchError
from ...utils.manifest import MANIFEST_NAME, check_listing, verify_file
from .metadata import Destination, FolderLayout, PathLike, parse_metadata, read_layout
from .reader import TensorReader, read_now, visible_here
from .roots import choose_root, under_root


@dataclass(frozen=True)
class DCPFolder:
    """An opened DCP folder, whose layout is known and complete.

    Attributes:
        path: the folder.
        layout: where each stored tensor lies, checked for consistency and against the sizes of the files.
        unverified: file name -> manifest entry of each data file that has not been compared with its digest yet. Empty
            without a manifest. A generation has one manifest for all its engine folders.
    """

    path: Path
    layout: FolderLayout
    unverified: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, path: PathLike) -> Self:
        """Open a folder on this rank alone. Raises as `read_layout` does, also if the manifest is damaged."""
        unverified: dict[str, Any] = {}
        if (Path(path) / MANIFEST_NAME).exists():
            unverified = dict(check_listing(path)["files"])
            if ".metadata" in unverified:
                verify_file(path, ".metadata", unverified.pop(".metadata"))
        return cls(Path(path), read_layout(path), unverified)

    @classmethod
    def open_together(cls, path: PathLike, group: dist.ProcessGroup | None) -> Self:
        """Open a folder on rank 0 and send the layout to all ranks of ``group``, which all call it."""
        return replace(rank_zero_decides(lambda: cls.open(path), group), path=Path(path))

    @staticmethod
    def forget_layouts() -> None:
        """Free the parsed ``.metadata`` of the last folders: tens of megabytes after a save by thousands of ranks."""
        parse_metadata.cache_clear()

    def under_root(self, root: str, parameters: Iterable[str]) -> Self:
        """The same folder with its tensors under Holdfast's names. Raises as `choose_root` does."""
        try:
            return replace(self, layout=under_root(self.layout, choose_root(self.layout.names(), root, parameters)))
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{self.path}: {error}") from error

    def verify_share(self, group: dist.ProcessGroup | None) -> None:
        """Compare this rank's share of the unverified files with their digests.

        At the world size of the save, the share is the file that the rank reads next.

        Raises:
            CheckpointCorruptError: a file has another digest.
            CheckpointNotFoundError: this rank does not see a file that rank 0 sees.
        """
        in_order_of_ranks = sorted(self.unverified, key=lambda name: (len(name), name))
        for name in in_order_of_ranks[get_rank(group) :: get_world_size(group)]:
            with visible_here(self.path / name):
                verify_file(self.path, name, self.unverified[name])

    def plan(self, destinations: Mapping[str, Destination]) -> TensorReader:
        """Find the bytes of stored tensors in the files, without reading them."""
        return TensorReader(self.path, self.layout, destinations)

    def read(self, destinations: Mapping[str, Destination]) -> None:
        """Read stored tensors now, into memory that nothing else uses yet."""
        read_now(self.path, self.layout, destinations)
