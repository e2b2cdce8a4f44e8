"""Load a DCP folder into a `DCPState`: verified, at any world size, on all ranks or on none.

A load takes five steps, and nothing in the state changes before the last one:

1. Rank 0 opens the folder and sends its layout to all ranks (`_DCPFolder`).
2. Every rank compares the bytes of its share of the files with their digests.
3. Every rank finds which bytes it needs for which of its tensors. Names, shapes and dtypes must be
   those of the state.
4. Small values (schedule, counters, generators) are read and checked, and all ranks agree that all
   is well.
5. The values are read from the files straight into the live tensors.

Host memory: a few megabytes per reading thread, and every tensor that another version of torch has
written.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size, rank_zero_decides
from ...utils.errors import CheckpointError, CheckpointMismatchError, ConfigError
from ...utils.files import half_loaded
from ...utils.manifest import MANIFEST_NAME, check_listing, verify_file
from ...utils.remote import FETCH_FIRST, require_local
from ..memory.tensors import Box, flatten, local_box, local_tensor, normal_tensors
from ..memory.weight_changes import changing_weights
from . import optimizer_state as optim
from .base_model import BASE, BASE_SAMPLE, check_base, sample_base
from .configured import Configured, warn_of_settings
from .format import (
    Chunks,
    Destination,
    FolderLayout,
    PathLike,
    StoredTensor,
    parse_metadata,
    read_layout,
)
from .reader import BLOCK_BYTES, TensorReader, read_now, visible_here
from .root_names import choose_root, describe_roots, under_root
from .state import ADAPTERS, GENERATORS, PACKED, ROOT, DCPState, rank_key


def load_dcp(
    path: PathLike, state: DCPState, group: dist.ProcessGroup | None = None, *, root: str = ROOT
) -> None:
    """Load the folder ``path`` into ``state``, at any world size. All ranks of ``group`` call it.

    Nothing in ``state`` changes unless every rank has found the folder sound and of this model. If
    a file breaks later, while it is read, the error says that the state is half loaded.

        state = DCPState(model, optimizer, scheduler) load_dcp("runs/step_100", state)
        load_dcp("torchtitan/step-100", DCPState(model), root="")  # the model alone, of another
        trainer

    - A state without an optimizer takes only the model from a training checkpoint.
    - The folder decides whether frozen parameters are loaded (see ``trainable_only`` of
      `DCPState`).
    - A folder of AReaL has no schedule, counters or generators. Those stay as they are, with a
      warning.
    - From a folder of another trainer only tensors of the model and of the optimizer are loaded.

    Args:
        path: the folder.
        state: what it is loaded into.
        group: the ranks. None is the default group.
        root: prefix of the names in a folder of another trainer. ``app`` stands for
            ``app.model.<parameter>`` and ``app.optim.state.<parameter>.<entry>`` (or
            ``optimizer``). "" stands for ``model.<parameter>`` and ``optimizer.state...``, or for
            parameters at the top.

    Raises:
        ConfigError: ``path`` is a URL (other than ``file://``).
        Otherwise see `read_dcp`.
    """
    path = require_local(path, "loading", FETCH_FIRST)
    load = read_dcp(path, state, group, root=root)
    with all_ranks_succeed(f"loading {path}", group):
        settled = load.apply().settle()
    if get_rank(group) == 0:
        warn_of_settings(path, *settled)


@normal_tensors()
def check_dcp(path: PathLike, state: DCPState, group: dist.ProcessGroup | None = None) -> None:
    """Compare a folder's names, shapes and dtypes with ``state``. All ranks of ``group`` call it.

    No data is read, and nothing changes. Raises as `read_dcp` does.
    """
    folder = _DCPFolder.open_together(path, group)
    with all_ranks_succeed(f"checking {path}", group):
        _find_destinations(folder, _as_stored(state, folder))


def check_loads_again(state: DCPState, values: Mapping[str, Any]) -> None:
    """Check that what is about to be saved can be loaded by the next start of the same job. Not
    collective.

    Args:
        state: what is saved.
        values: its `DCPState.state_dict`, or a copy.

    Raises:
        ConfigError: a load would refuse it, whenever it came.
    """
    try:
        dry_load(state, values)
    except CheckpointError as error:
        raise ConfigError(
            f"the state of {type(state.model).__name__} and {type(state.optimizer).__name__} is "
            f"not saved, because the same job could not load it again: {error}"
        ) from error


@normal_tensors()
def dry_load(state: DCPState, values: Mapping[str, Any]) -> None:
    """Make the checks of a load of ``values`` into ``state`` as the job starts with it, on
    descriptions alone.

    Nothing is read, and no tensor is allocated. Tensors may be on the meta device, except those
    that hold JSON. Frozen parameters that are left out are not compared. Raises as `read_dcp` does.
    """
    tensors = dict(flatten({ROOT: values}))
    folder = _DCPFolder(Path("what would be saved"), _described(tensors), {})
    start = _as_stored(state.at_start(), folder)
    destinations = _find_destinations(folder, start, readable=False)
    start.check_values({_own(name): tensors[name] for name in destinations.small})


def _described(tensors: Mapping[str, torch.Tensor]) -> FolderLayout:
    """The layout of a folder that holds ``tensors``, without the places of their bytes."""
    nothing = np.empty(0, np.int64)
    chunks = Chunks(nothing[:, None], nothing[:, None])
    stored = {
        n: StoredTensor(t.shape, t.dtype, chunks, nothing, nothing, nothing)
        for n, t in tensors.items()
    }
    return FolderLayout({}, stored, {})


@normal_tensors()
def read_dcp(
    path: PathLike, state: DCPState, group: dist.ProcessGroup | None = None, *, root: str = ROOT
) -> "DCPLoad":
    """Verify a folder and find the bytes that this rank needs. All ranks of ``group`` call it.

    When it returns, every rank has found the folder sound and of this model, and nothing in
    ``state`` has changed. Until the result is applied, it holds only small values and tensors that
    another version of torch has written.

    Raises:
        CheckpointNotFoundError: there is no such folder, or it is not a DCP folder.
        CheckpointCorruptError: files are missing, short or damaged, or do not cover a tensor.
        CheckpointMismatchError: names, shapes or dtypes are not those of ``state``, tensors that
            its model ties differ, or the folder leaves out other frozen parameters than those of
            ``state``.
        OSError: an existing file cannot be read.
        PeerError: another rank failed.
    """
    folder = _DCPFolder.open_together(path, group)
    with all_ranks_succeed(f"checking {path}", group):
        folder.verify_share(group)
        if root != ROOT:
            parameters = [
                name.removeprefix("model.")
                for name in state.live_tensors()
                if name.startswith("model.")
            ]
            folder = folder.under_root(root, parameters)
        state = _as_stored(state, folder)
        destinations = _find_destinations(folder, state)
    with all_ranks_succeed(f"reading {path}", group):
        reader = folder.plan(destinations.live)
        others = {
            name: where.like()
            for name, where in destinations.live.items()
            if name not in reader.names
        }
        folder.read(destinations.small | others)
        _check_ties(folder, destinations)
        small = {_own(name): where.tensor for name, where in destinations.small.items()}
        try:
            values = state.check_values(small)
        except CheckpointError as error:
            raise type(error)(f"{folder.path}: {error}") from error
        reader.check_unchanged()
        frozen = state.frozen_parameters()
        own = sample_base(frozen) if BASE in small else None
    if own is not None:
        check_base(path, small, frozen, own, state.base, group)
    copies = [(destinations.live[name].tensor, where.tensor) for name, where in others.items()]
    return DCPLoad(state, destinations.proposed, reader, copies, small, values)


@dataclass(frozen=True)
class DCPLoad:
    """A folder that all ranks have found good, ready to be put into the live state."""

    state: DCPState  # the live state, with the parameters that the folder holds
    _proposed: Mapping[
        str, torch.Tensor
    ]  # memory for tensors that the live state does not have yet
    _reader: TensorReader
    _copies: list[
        tuple[torch.Tensor, torch.Tensor]
    ]  # a live tensor and its values, if not read in place
    _small: dict[
        str, torch.Tensor
    ]  # dotted name -> tensor, of generators, counters and parameter groups
    _values: dict[str, Any]  # the same values, parsed

    @property
    def first_group(self) -> int:
        """Index of the optimizer's parameter group that is the first one in the folder. 0 without
        an optimizer.
        """
        return self._values.get("group_order", [0]).index(0)

    def check_unchanged(self) -> None:
        """Raise `CheckpointCorruptError` if a file has changed since it was checked.

        All ranks call it, for all states that are loaded together, before any state changes.
        """
        self._reader.check_unchanged()

    @normal_tensors()
    def apply(self) -> Configured:
        """Copy the values into the state. The folder must still be there. Returns what was
        configured before.

        Identity, size and time of change of each file are compared before the first byte is copied
        and after the last one. The bytes are not digested again, which would cost as much as the
        first time. So a disk that returns other bytes the second time, without an error, is not
        noticed. Counters of the user can also fail.

        Raises:
            CheckpointCorruptError: a file changed.
            OSError: a file can no longer be read. If values had been copied, both errors say that
                the model is half loaded: load again, or stop.
        """
        self.check_unchanged()
        parse_metadata.cache_clear()  # everything is planned, and it may take tens of megabytes
        configured = self.state.configured(self._values)
        with half_loaded(self._reader.folder), changing_weights(self.state.model):
            self.state.adopt_state(self._proposed, self._small)
            self._reader.read()
            for target, source in self._copies:
                target.copy_(source)
            self.state.restore(self._values, self._small)
        return configured


@dataclass(frozen=True)
class _DCPFolder:
    """An opened DCP folder, whose layout is known and complete.

    ``unverified`` has the manifest entry of each data file that has not been compared with its
    digest yet. It is empty without a manifest. A generation has one manifest for all its engine
    folders.
    """

    path: Path
    layout: FolderLayout
    unverified: Mapping[str, Mapping[str, Any]]

    @classmethod
    def open(cls, path: PathLike) -> Self:
        """Open a folder on this rank alone. Raises as `read_layout` does, also if the manifest is
        damaged.
        """
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

    def under_root(self, root: str, parameters: Iterable[str]) -> Self:
        """The same folder with its tensors under Holdfast's names. Raises as `choose_root` does."""
        try:
            return replace(
                self,
                layout=under_root(self.layout, choose_root(self.layout.names(), root, parameters)),
            )
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{self.path}: {error}") from error

    def verify_share(self, group: dist.ProcessGroup | None) -> None:
        """Compare this rank's share of the unverified files with their digests.

        At the world size of the save, the share is the file that the rank reads next. Raises
        CheckpointCorruptError, and CheckpointNotFoundError if this rank does not see a file that
        rank 0 sees.
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


@dataclass(frozen=True)
class _Destinations:
    """The tensors that a rank reads, and where they go. Names are those in the folder, with `ROOT`.

    Attributes:
        proposed: dotted name -> new tensor, if the state has none that fits (see
            `DCPState.propose_state`).
        live: name -> this rank's part of a tensor of model or optimizer, read when the load is
            applied.
        small: name -> fresh memory for schedule, counters, generators and state of modules, read
            before that.
        ties: second name of a tied tensor in the folder -> its name in ``live``.
    """

    proposed: dict[str, torch.Tensor]
    live: dict[str, Destination]
    small: dict[str, Destination]
    ties: dict[str, str]


def _find_destinations(
    folder: _DCPFolder, state: DCPState, *, readable: bool = True
) -> _Destinations:
    """Compare names, shapes and dtypes of a folder with ``state``. No data is read, and ``state``
    stays as it is.
    """
    names, tensors = folder.layout.names(), folder.layout.tensors
    _check_kind(folder, names, state)
    proposed = state.propose_state(
        {_own(name): (stored.shape, stored.dtype) for name, stored in tensors.items()}
    )
    live = {
        f"{ROOT}.{name}": tensor
        for name, tensor in (state.live_tensors(readable=readable) | proposed).items()
    }
    aliases = {f"{ROOT}.{alias}": f"{ROOT}.{name}" for alias, name in state.aliases().items()}
    ties = {alias: name for alias, name in aliases.items() if alias in names and name in live}
    _check_same_names(folder, live.keys(), names, aliases.keys(), state)
    for name, tensor in (live | {alias: live[name] for alias, name in ties.items()}).items():
        _check_same_tensor(folder, name, tensor, state)
    parts = {
        name: Destination(local_box(tensor), local_tensor(tensor)) for name, tensor in live.items()
    }
    small = {}
    for name in _small_names(names, state):
        if (stored := tensors.get(name)) is None:
            raise CheckpointMismatchError(
                f"{folder.path}: {name} is not a tensor; expected one, as Holdfast writes it"
            )
        memory = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        small[name] = Destination(local_box(memory), memory)
    return _Destinations(proposed, parts, small, ties)


def _own(name: str) -> str:
    return name.removeprefix(f"{ROOT}.")


def _as_stored(state: DCPState, folder: _DCPFolder) -> DCPState:
    return state.as_stored({_own(name) for name in folder.layout.names()})


def _check_kind(folder: _DCPFolder, names: Collection[str], state: DCPState) -> None:
    if not any(name.startswith(f"{ROOT}.model.") for name in names):
        raise CheckpointMismatchError(
            f"{folder.path} holds no model under {ROOT!r}, where Holdfast and AReaL have it; "
            f"{describe_roots(names)}"
        )
    trained = any(
        name == f"{ROOT}.param_groups" or name.startswith(f"{ROOT}.optim.") for name in names
    )
    if state.optimizer is not None and not trained:  # plain SGD has groups but no state
        raise CheckpointMismatchError(
            f"{folder.path} holds a model only, no optimizer state; load it with_optim=False"
        )


def _check_same_names(
    folder: _DCPFolder,
    live: Iterable[str],
    saved: Collection[str],
    aliases: Iterable[str],
    state: DCPState,
) -> None:
    prefixes = (
        (f"{ROOT}.model.",)
        if state.optimizer is None
        else (f"{ROOT}.model.", f"{ROOT}.optim.state.")
    )
    here, there = set(live), {name for name in saved if name.startswith(prefixes)}
    if missing := sorted(here - there):
        raise CheckpointMismatchError(
            f"{folder.path} lacks {missing[0]!r} ({len(missing)} missing): it is a checkpoint of "
            "another model or optimizer"
            + (
                ", or of one that had other parameters frozen, which it leaves out"
                if f"{ROOT}.{BASE}" in saved
                else ""
            )
            + _name_optimizers(missing[0], folder, state)
        )
    if unexpected := sorted((there - here).difference(aliases)):
        advice = _name_optimizers(unexpected[0], folder, state)
        if state.is_kept_from_optimizer(_own(unexpected[0])):
            advice = (
                "; give the optimizer all parameters that it had in the saved run, frozen or not"
            )
        raise CheckpointMismatchError(
            f"{folder.path} has {unexpected[0]!r}, which this model or optimizer does not "
            f"({len(unexpected)} unexpected){advice}"
        )


def _check_same_tensor(folder: _DCPFolder, name: str, live: torch.Tensor, state: DCPState) -> None:
    stored, what = folder.layout.tensors.get(name), f"{folder.path}: {name}"
    if stored is None:
        raise CheckpointMismatchError(
            f"{what} is not a tensor; expected {list(live.shape)} {live.dtype}"
        )
    if stored.shape != live.shape:
        raise CheckpointMismatchError(
            f"{what} has shape {list(stored.shape)}, this model needs {list(live.shape)}; is it "
            "another model?"
        )
    if stored.dtype != live.dtype:
        raise CheckpointMismatchError(
            f"{what} has dtype {stored.dtype}, this model needs "
            f"{live.dtype}{_name_optimizers(name, folder, state)}"
        )


def _name_optimizers(name: str, folder: _DCPFolder, state: DCPState) -> str:
    """Describe the saved optimizer and that of ``state``, for an error about the entry ``name`` of
    one of them.
    """
    prefix = f"{ROOT}.{optim.PREFIX}"
    if not name.startswith(prefix):
        return ""
    entries = {
        f"{saved.rpartition('.')[2]} in {str(stored.dtype).removeprefix('torch.')}"
        for saved, stored in folder.layout.tensors.items()
        if saved.startswith(prefix)
    }
    saved_state = ", ".join(sorted(entries)) or "no state"
    return (
        f"; the saved optimizer has {saved_state}, and this one is "
        f"{type(state.optimizer).__name__}: use the optimizer of the saved run "
        "('optimizer.type'), or load the weights alone"
    )


def _small_names(saved: Iterable[str], state: DCPState) -> list[str]:
    """Names of the values that come back besides live tensors. A new rank reads the values of rank
    0.
    """
    saved = sorted(saved)
    facts = {f"{ROOT}.{name}" for name in (BASE, ADAPTERS)}
    found = _of_rank("module_state", get_rank(), saved)
    found += [name for name in saved if name in facts or name.startswith(f"{ROOT}.{BASE_SAMPLE}.")]
    if state.optimizer is not None:
        found += _of_rank(GENERATORS, state.data_rank, saved) + [
            name for key in PACKED if (name := f"{ROOT}.{key}") in saved
        ]
    return found


def _of_rank(key: str, rank: int, saved: Sequence[str]) -> list[str]:
    own, first = (f"{ROOT}.{key}.{rank_key(number)}." for number in (rank, 0))
    found = [name for name in saved if f"{name}.".startswith(own)]
    return found or [name for name in saved if f"{name}.".startswith(first)]


def _check_ties(folder: _DCPFolder, destinations: _Destinations) -> None:
    """Raise unless a tied tensor that the folder holds under two names has the same values under
    both.
    """
    for alias, name in destinations.ties.items():
        if not _same_values(folder, (alias, name), destinations.live[name]):
            one, other = (key.removeprefix(f"{ROOT}.model.") for key in (alias, name))
            raise CheckpointMismatchError(
                f"{folder.path} holds different values for {one} and {other}, which this model "
                "ties; build it with tie_word_embeddings=False"
            )


def _same_values(folder: _DCPFolder, names: tuple[str, str], part: Destination) -> bool:
    """Compare a part of two stored tensors, a few rows at a time if they can be read so."""
    direct = folder.plan(dict.fromkeys(names, part)).names.issuperset(names)
    for rows in _split_rows(part) if direct else (part,):
        copies = {name: rows.like() for name in names}
        folder.read(copies)
        one, other = (copy.tensor for copy in copies.values())
        if not torch.equal(one, other):
            return False
    return True


def _split_rows(part: Destination) -> Iterator[Destination]:
    if not part.tensor.ndim:
        yield part
        return
    n_rows, offsets = len(part.tensor), part.box.offsets
    step = max(1, n_rows * BLOCK_BYTES // max(1, part.tensor.nbytes))
    for row in range(0, n_rows, step):
        rows = part.tensor[row : row + step]
        yield Destination(Box((offsets[0] + row, *offsets[1:]), tuple(rows.shape)), rows)
