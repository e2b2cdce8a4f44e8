"""Load a DCP folder into a `DCPState`: verified, at any world size, on all ranks or on none.

A load goes through five steps, in this order. Rank 0 lists the folder and parses ``.metadata``, and tells the others
what is where; every rank compares the bytes of its share of the files with their digests, and finds which bytes it
needs for which of its tensors; all ranks agree that all is well; what is small is read and checked; and only then are
the values read, straight from the files into the live tensors. Host memory during a load: a few
megabytes a reading thread, and every tensor that another version of torch has written, which is read before.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size, rank_zero_decides
from ...utils.errors import CheckpointError, CheckpointMismatchError
from ...utils.manifest import MANIFEST_NAME, check_listing, verify_file
from ...utils.remote import FETCH_FIRST, require_local
from ..memory.tensors import normal_tensors
from ..memory.weight_changes import changing_weights
from .archive_reader import read_now
from .base_model import check_base, sample_base
from .compatibility import Destinations, find_destinations
from .direct_reader import Destination, TensorReader, visible_here
from .layout import FolderLayout
from .metadata import parse_metadata, read_layout
from .roots import choose_root, under_root
from .state import ROOT, DCPState


def load_dcp(
    path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None, *, root: str = ROOT
) -> None:
    """Load the folder ``path`` into ``state``, at any world size; all ranks of ``group`` call it.

    Nothing in ``state`` changes unless every rank has found the folder sound and of this model. Should a file break
    after that, while it is read, the error says that the state is half loaded.
    Whether frozen parameters are in it or left out is the folder's to say (see `DCPState`, ``trainable_only``).
    A state without an optimizer takes only the model out of a training checkpoint. A folder as AReaL writes it has no
    schedule, counters or generators: those stay as they are, with a warning. So does everything but tensors of the
    model and of the optimizer in a folder of another trainer.

    Args:
        path: the folder.
        state: what it is loaded into.
        group: the ranks; None is the default group.
        root: what the names in the folder begin with, other than Holdfast's: ``app`` for ``app.model.<parameter>`` and
            ``app.optim.state.<parameter>.<entry>`` (or ``optimizer``), "" for ``model.<parameter>`` and
            ``optimizer.state...``, or for parameters at the top.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        Otherwise see `read_dcp`.
    """
    path = require_local(path, "loading", FETCH_FIRST)
    load = read_dcp(path, state, group, root=root)
    with all_ranks_succeed(f"loading {path}", group):
        load.apply()


@normal_tensors()
def read_dcp(
    path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None, *, root: str = ROOT
) -> "DCPLoad":
    """Verify the folder ``path`` and find what this rank needs, at any world size; all ranks of ``group`` call it.

    When it returns, every rank has found the folder sound and of this model, and every part it needs in its place;
    nothing in ``state`` has changed. Values are copied when the result is applied; held in memory until then is only
    what is small, or not stored as this version of torch stores it.

    Raises:
        CheckpointNotFoundError: no such folder, or not a DCP folder.
        CheckpointCorruptError: files are missing, short, damaged, or do not cover a tensor.
        CheckpointMismatchError: keys, shapes or dtypes are not those of ``state``, tensors that its model ties differ,
            or the frozen parameters that the folder leaves out are not those of ``state``.
        OSError: a file that is there cannot be read.
        PeerError: another rank failed.
    """
    digests, layout = rank_zero_decides(lambda: _inspect(path), group)
    with all_ranks_succeed(f"checking {path}", group):
        _verify_share(path, digests, group)
        layout = _under(root, path, layout, state)
        state = _as_stored(state, layout)
        destinations = find_destinations(path, layout, state)
    with all_ranks_succeed(f"reading {path}", group):
        reader = TensorReader(path, layout, destinations.live)
        others = {name: where.like() for name, where in destinations.live.items() if name not in reader.names}
        read_now(path, layout, destinations.small | others)
        _check_ties(path, layout, destinations)
        small = {name.removeprefix(f"{ROOT}."): where.tensor for name, where in destinations.small.items()}
        values = _check_values(path, state, small)
        reader.check_unchanged()
        frozen = state.frozen_parameters()
        own = sample_base(frozen)
    check_base(path, small, frozen, own, state.base, group)
    copies = [(destinations.live[name].tensor, where.tensor) for name, where in others.items()]
    return DCPLoad(state, destinations.proposed, reader, copies, small, values)


@dataclass(frozen=True)
class DCPLoad:
    """A folder that was found good on all ranks, and waits to be put into the live state.

    Attributes:
        state: the live state, with the parameters that the folder holds.
        _proposed: memory for state that the live one does not hold yet.
        _copies: live tensor, and what was read for it, where it could not be read in place.
        _small: dotted name -> tensor, of generators, counters and parameter groups.
        _values: the same, parsed.
    """

    state: DCPState
    _proposed: Mapping[str, torch.Tensor]
    _reader: TensorReader
    _copies: list[tuple[torch.Tensor, torch.Tensor]]
    _small: dict[str, torch.Tensor]
    _values: dict[str, Any]

    @property
    def first_group(self) -> int:
        """Index of the optimizer's parameter group that the first one in the folder is; 0 without an optimizer."""
        return self._values.get("group_order", [0]).index(0)

    def check_unchanged(self) -> None:
        """Raise `CheckpointCorruptError` unless the files are those that were checked; changes nothing.

        For all ranks, and all states that are loaded together, before any of them is changed.
        """
        self._reader.check_unchanged()

    @normal_tensors()
    def apply(self) -> None:
        """Copy it into the state; the folder must still be there.

        What could be checked has been. What is left to fail is a user's own counters, and files that are no longer what
        they were when they were checked: their identity, size and time of change are looked at before the first byte is
        copied and after the last. The bytes are not digested again, which would cost as much as verifying them did: a
        disk that gives other bytes the second time, without an error, is not noticed.

        Raises:
            CheckpointCorruptError: a file changed. If that was not seen before the first byte was copied, the state is
                not to be trusted: load again, or stop.
            OSError: a file can no longer be read; likewise.
        """
        self.check_unchanged()
        parse_metadata.cache_clear()  # tens of megabytes where thousands of ranks have written; all is planned
        with changing_weights(self.state.model):
            self.state.adopt_state(self._proposed, self._small)
            self._reader.read()
            for target, source in self._copies:
                target.copy_(source)
            self.state.restore(self._values, self._small)


@normal_tensors()
def check_dcp(path: str | os.PathLike[str], state: DCPState, group: dist.ProcessGroup | None = None) -> None:
    """Raise what `load_dcp` would raise of the folder's keys, shapes and dtypes; all ranks of ``group`` call it.

    No data is read, and nothing changes. `PeerError`: another rank failed.
    """
    layout = rank_zero_decides(lambda: read_layout(path), group)
    with all_ranks_succeed(f"checking {path}", group):
        find_destinations(path, layout, _as_stored(state, layout))


def _as_stored(state: DCPState, layout: FolderLayout) -> DCPState:
    return state.as_stored({name.removeprefix(f"{ROOT}.") for name in layout.names()})


def _inspect(path: str | os.PathLike[str]) -> tuple[dict[str, Any], FolderLayout]:
    """What the manifest, if there is one, says of the files that are still to be verified, and what is in them."""
    files: dict[str, Any] = {}
    if (Path(path) / MANIFEST_NAME).exists():
        files = dict(check_listing(path)["files"])
        if ".metadata" in files:
            verify_file(path, ".metadata", files.pop(".metadata"))
    return files, read_layout(path)


def _under(root: str, path: str | os.PathLike[str], layout: FolderLayout, state: DCPState) -> FolderLayout:
    """The layout under the names that Holdfast gives, of a folder that has others."""
    if root == ROOT:
        return layout
    parameters = [name.removeprefix("model.") for name in state.live_tensors() if name.startswith("model.")]
    try:
        return under_root(layout, choose_root(layout.names(), root, parameters))
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{path}: {error}") from error


def _verify_share(
    path: str | os.PathLike[str], files: Mapping[str, Any], group: dist.ProcessGroup | None = None
) -> None:
    """Compare this rank's share of the files with their digests; at the world size of the save, the file it reads."""
    in_order_of_ranks = sorted(files, key=lambda name: (len(name), name))
    for name in in_order_of_ranks[get_rank(group) :: get_world_size(group)]:
        with visible_here(Path(path) / name):
            verify_file(path, name, files[name])


def _check_ties(path: str | os.PathLike[str], layout: FolderLayout, destinations: Destinations) -> None:
    """A folder that holds a tied tensor under two names must hold the same values under both."""
    for alias, name in destinations.ties.items():
        if not _same_values(path, layout, (alias, name), destinations.live[name]):
            one, other = (key.removeprefix(f"{ROOT}.model.") for key in (alias, name))
            raise CheckpointMismatchError(
                f"{path} holds different values for {one} and {other}, which this model ties; build it with "
                "tie_word_embeddings=False"
            )


def _same_values(path: str | os.PathLike[str], layout: FolderLayout, names: tuple[str, str], part: Destination) -> bool:
    """Whether a part of two stored tensors is the same; a few rows at a time, where they are stored so."""
    direct = TensorReader(path, layout, dict.fromkeys(names, part)).names.issuperset(names)
    for rows in part.split_rows() if direct else (part,):
        copies = {name: rows.like() for name in names}
        read_now(path, layout, copies)
        one, other = (copy.tensor for copy in copies.values())
        if not torch.equal(one, other):
            return False
    return True


def _check_values(path: str | os.PathLike[str], state: DCPState, small: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    try:
        return state.check_values(small)
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from error
