"""Load a DCP folder into a `DCPState`: verified, at any world size, on all ranks or on none.

A load takes five steps, and nothing in the state changes before the last one:

1. Rank 0 opens the folder and sends its layout to all ranks (`Checkpoint.open`).
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
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    get_rank,
    get_world_size,
    rank_zero_decides,
)
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
    rank_key,
    read_layout,
)
from .reader import BLOCK_BYTES, TensorReader, read_now, visible_here
from .root_names import choose_root, describe_roots, under_root
from .state import ADAPTERS, GENERATORS, PACKED, ROOT, DCPState, SavedValues

_MODEL = f"{ROOT}.model."
_STATE = f"{ROOT}.{optim.PREFIX}"


def load_dcp(
    path: PathLike,
    state: DCPState,
    group: RankGroup = None,
    *,
    root: str = ROOT,
) -> None:
    """Load the folder ``path`` into ``state``, at any world size. All ranks of ``group`` call it.

    Nothing in ``state`` changes unless every rank has found the folder sound and of this model. If
    a file breaks later, while it is read, the error says that the state is half loaded.

        state = DCPState(model, optimizer, scheduler)
        load_dcp("runs/step_100", state)
        load_dcp("torchtitan/step-100", DCPState(model), root="")  # the model of another trainer

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
        Otherwise see `Checkpoint.open` and `Checkpoint.read`.
    """
    saved = Checkpoint.open(require_local(path, "loading", FETCH_FIRST), group)
    load = saved.read(state, root=root)

    # Every rank has found the folder good. From here on the state changes.
    with all_ranks_succeed(f"loading {path}", group):
        settled = load.apply().settle()
    if get_rank(group) == 0:
        warn_of_settings(path, *settled)


def check_loads_again(
    state: DCPState,
    values: Mapping[str, Any],
) -> None:
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
def dry_load(
    state: DCPState,
    values: Mapping[str, Any],
) -> None:
    """Make the checks of a load of ``values`` into ``state`` as the job starts with it, on
    descriptions alone.

    Nothing is read, and no tensor is allocated. Tensors may be on the meta device, except those
    that hold JSON. Frozen parameters that are left out are not compared. Raises as
    `Checkpoint.read` does.
    """
    # A folder that exists only as a layout.
    tensors = dict(flatten({ROOT: values}))
    saved = Checkpoint(Path("what would be saved"), _described(tensors), {}, None)
    start = saved.as_stored(state.at_start())
    destinations = _find_destinations(saved, start, readable=False)
    small = {_own(name): tensors[name] for name in destinations.small}
    start.check_values(small)


def _described(tensors: Mapping[str, Tensor]) -> FolderLayout:
    """The layout of a folder that holds ``tensors``, without the places of their bytes."""
    nothing = np.empty(0, np.int64)
    chunks = Chunks(nothing[:, None], nothing[:, None])
    stored = {}
    for name, tensor in tensors.items():
        places = (nothing, nothing, nothing)
        stored[name] = StoredTensor(tensor.shape, tensor.dtype, chunks, *places)
    return FolderLayout({}, stored, {})


@dataclass(frozen=True)
class Checkpoint:
    """A DCP folder, opened once by all ranks of ``group``, which call its methods together.

        saved = Checkpoint.open("runs/step_100", group)
        saved.check(state)  # compares names, shapes and dtypes
        saved.read(state).apply()

    ``unverified`` has the manifest entry of each data file that has not been compared with its
    digest yet. It is empty without a manifest. A generation has one manifest for all its engine
    folders.
    """

    path: Path
    layout: FolderLayout
    unverified: Mapping[str, Mapping[str, Any]]
    group: RankGroup

    @classmethod
    def open(
        cls,
        path: PathLike,
        group: RankGroup = None,
    ) -> Self:
        """Open a folder on rank 0 and send its layout to all ranks of ``group``.

        Raises:
            CheckpointNotFoundError: there is no such folder, or it is not a DCP folder.
            CheckpointCorruptError: the manifest or the metadata is damaged, a file is missing or
                short, or the chunks of a tensor do not cover it.
        """
        layout, unverified = rank_zero_decides(partial(_open, path), group)
        return cls(Path(path), layout, unverified, group)

    @normal_tensors()
    def check(self, state: DCPState) -> None:
        """Compare names, shapes and dtypes with ``state``. Collective.

        No data is read, and nothing changes. Raises as `read` does.
        """
        with all_ranks_succeed(f"checking {self.path}", self.group):
            _find_destinations(self, self.as_stored(state))

    @normal_tensors()
    def read(
        self,
        state: DCPState,
        *,
        root: str = ROOT,
    ) -> "DCPLoad":
        """Verify the folder and find the bytes that this rank needs. Collective.

        When it returns, every rank has found the folder sound and of this model, and nothing in
        ``state`` has changed. Until the result is applied, it holds only small values and tensors
        that another version of torch has written.

        Raises:
            CheckpointCorruptError: files are missing, short or damaged.
            CheckpointMismatchError: names, shapes or dtypes are not those of ``state``, tensors
                that its model ties differ, or the folder leaves out other frozen parameters than
                those of ``state``.
            CheckpointNotFoundError: a rank does not see a file that rank 0 sees.
            OSError: an existing file cannot be read.
            PeerError: another rank failed.
        """
        # The places of the values, and the tensors that receive them.
        with all_ranks_succeed(f"checking {self.path}", self.group):
            self._verify_share()
            state.record_frozen_base()  # the load may change it
            saved = self
            if root != ROOT:
                saved = self._under_root(root, state)
            state = saved.as_stored(state)
            destinations = _find_destinations(saved, state)

        # Small values are read and checked. What cannot be read in place is read, too.
        with all_ranks_succeed(f"reading {self.path}", self.group):
            reader = saved.plan(destinations.live)
            others = {}
            for name, destination in destinations.live.items():
                if name not in reader.names:
                    others[name] = destination.like()
            saved.read_now(destinations.small | others)
            _check_ties(saved, destinations)
            small = {_own(name): each.tensor for name, each in destinations.small.items()}
            try:
                values = state.check_values(small)
            except CheckpointError as error:
                raise type(error)(f"{self.path}: {error}") from error
            reader.check_unchanged()
            frozen = state.frozen_parameters()
            share = None
            if BASE in small:
                share = sample_base(frozen, state.group)

        # The base that the folder leaves out must be the one here.
        if share is not None:
            check_base(self.path, small, frozen, share, state.base, self.group)
        copies = []
        for name, each in others.items():
            target = destinations.live[name].tensor
            copies.append((target, each.tensor))
        return DCPLoad(state, destinations.proposed, reader, copies, values)

    def as_stored(self, state: DCPState) -> DCPState:
        """``state`` with the parameters of this folder, and with its group if it has none."""
        stored = state.as_stored({_own(name) for name in self.layout.names()})
        stored.group = state.group or self.group
        return stored

    def plan(self, destinations: Mapping[str, Destination]) -> TensorReader:
        """Find the bytes of stored tensors in the files, without reading them. Not collective."""
        return TensorReader(self.path, self.layout, destinations)

    def read_now(self, destinations: Mapping[str, Destination]) -> None:
        """Read stored tensors into memory that nothing else uses yet. Not collective."""
        read_now(self.path, self.layout, destinations)

    def _verify_share(self) -> None:
        """Compare this rank's share of the unverified files with their digests.

        At the world size of the save, the share is the file that the rank reads next. Raises
        CheckpointCorruptError, and CheckpointNotFoundError if this rank does not see a file that
        rank 0 sees.
        """
        # Names of files end with the number of the rank that wrote them.
        in_order_of_ranks = sorted(self.unverified, key=lambda name: (len(name), name))
        for name in in_order_of_ranks[get_rank(self.group) :: get_world_size(self.group)]:
            with visible_here(self.path / name):
                verify_file(self.path, name, self.unverified[name])

    def _under_root(
        self,
        root: str,
        state: DCPState,
    ) -> Self:
        """The same folder with its tensors under Holdfast's names. Raises as `choose_root` does."""
        parameters = []
        for name in state.live_tensors():
            if name.startswith("model."):
                parameters.append(name.removeprefix("model."))
        try:
            chosen = choose_root(self.layout.names(), root, parameters)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{self.path}: {error}") from error
        return replace(self, layout=under_root(self.layout, chosen))


def _open(path: PathLike) -> tuple[FolderLayout, dict[str, Any]]:
    """Layout and unverified files of a folder. ``.metadata`` is verified here."""
    unverified: dict[str, Any] = {}
    if (Path(path) / MANIFEST_NAME).exists():
        unverified = dict(check_listing(path)["files"])
        if ".metadata" in unverified:
            verify_file(path, ".metadata", unverified.pop(".metadata"))
    return read_layout(path), unverified


@dataclass(frozen=True)
class DCPLoad:
    """A folder that all ranks have found good, ready to be put into the live state."""

    state: DCPState  # the live state, with the parameters that the folder holds
    # memory for tensors that the live state does not have yet
    _proposed: Mapping[str, Tensor]
    _reader: TensorReader
    # a live tensor and its values, if not read in place
    _copies: list[tuple[Tensor, Tensor]]
    _values: SavedValues

    @property
    def first_group(self) -> int:
        """Index of the optimizer's parameter group that is the first one in the folder. 0 without
        an optimizer.
        """
        return self._values.group_order.index(0)

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

        # Everything is planned, and a layout may take tens of megabytes.
        parse_metadata.cache_clear()

        # The load replaces the configuration of this process.
        configured = self.state.configured(self._values)
        with half_loaded(self._reader.folder), changing_weights(self.state.model):
            self.state.adopt_state(self._proposed, self._values)
            self._reader.read()
            for target, source in self._copies:
                target.copy_(source)
            self.state.restore(self._values)
        return configured


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

    proposed: dict[str, Tensor]
    live: dict[str, Destination]
    small: dict[str, Destination]
    ties: dict[str, str]


def _find_destinations(
    folder: Checkpoint,
    state: DCPState,
    *,
    readable: bool = True,
) -> _Destinations:
    """Compare names, shapes and dtypes of a folder with ``state``. No data is read, and ``state``
    stays as it is.
    """
    names = folder.layout.names()
    tensors = folder.layout.tensors
    _check_kind(folder, names, state)

    # The tensors of the state, and new ones where it has none that fits.
    shapes = {_own(name): (stored.shape, stored.dtype) for name, stored in tensors.items()}
    proposed = state.propose_state(shapes)
    live = {}
    tensors_here = state.live_tensors(readable=readable) | proposed
    for name, tensor in tensors_here.items():
        live[f"{ROOT}.{name}"] = tensor

    # The folder must have the same. It may have a tied tensor under its second name, too.
    aliases = {f"{ROOT}.{alias}": f"{ROOT}.{name}" for alias, name in state.aliases().items()}
    ties = {alias: name for alias, name in aliases.items() if alias in names and name in live}
    _check_same_names(folder, live.keys(), names, aliases.keys(), state)
    for name, tensor in live.items():
        _check_same_tensor(folder, name, tensor, state)
    for alias, name in ties.items():
        _check_same_tensor(folder, alias, live[name], state)

    # Live tensors take their part where it is. Other values go to the CPU of every rank.
    parts = {}
    for name, tensor in live.items():
        parts[name] = Destination(local_box(tensor), local_tensor(tensor))
    small = {}
    for name in _small_names(names, state):
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointMismatchError(
                f"{folder.path}: {name} is not a tensor; expected one, as Holdfast writes it"
            )
        memory = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        small[name] = Destination(local_box(memory), memory)
    return _Destinations(proposed, parts, small, ties)


def _own(name: str) -> str:
    return name.removeprefix(f"{ROOT}.")


def _check_kind(
    folder: Checkpoint,
    names: Collection[str],
    state: DCPState,
) -> None:
    if not any(name.startswith(_MODEL) for name in names):
        raise CheckpointMismatchError(
            f"{folder.path} holds no model under {ROOT!r}, where Holdfast and AReaL have it; "
            f"{describe_roots(names)}"
        )

    # Plain SGD has groups, but no state.
    if state.optimizer is None or f"{ROOT}.param_groups" in names:
        return
    if not any(name.startswith(f"{ROOT}.optim.") for name in names):
        raise CheckpointMismatchError(
            f"{folder.path} holds a model only, no optimizer state; load it with_optim=False"
        )


def _check_same_names(
    folder: Checkpoint,
    live: Iterable[str],
    saved: Collection[str],
    aliases: Iterable[str],
    state: DCPState,
) -> None:
    prefixes = [_MODEL]
    if state.optimizer is not None:
        prefixes.append(_STATE)
    here = set(live)
    there = {name for name in saved if name.startswith(tuple(prefixes))}

    # A model with other parameters frozen looks like another model.
    missing = sorted(here - there)
    if missing:
        frozen = ""
        if f"{ROOT}.{BASE}" in saved:
            frozen = ", or of one that had other parameters frozen, which it leaves out"
        raise CheckpointMismatchError(
            f"{folder.path} lacks {missing[0]!r} ({len(missing)} missing): it is a checkpoint of "
            f"another model or optimizer{frozen}{_name_optimizers(missing[0], folder, state)}"
        )

    # A parameter that left the optimizer may have left its state behind.
    unexpected = sorted((there - here).difference(aliases))
    if unexpected:
        advice = _name_optimizers(unexpected[0], folder, state)
        if state.is_kept_from_optimizer(_own(unexpected[0])):
            advice = (
                "; give the optimizer all parameters that it had in the saved run, frozen or not"
            )
        raise CheckpointMismatchError(
            f"{folder.path} has {unexpected[0]!r}, which this model or optimizer does not "
            f"({len(unexpected)} unexpected){advice}"
        )


def _check_same_tensor(
    folder: Checkpoint,
    name: str,
    live: Tensor,
    state: DCPState,
) -> None:
    stored = folder.layout.tensors.get(name)
    what = f"{folder.path}: {name}"
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


def _name_optimizers(
    name: str,
    folder: Checkpoint,
    state: DCPState,
) -> str:
    """Describe the saved optimizer and that of ``state``, for an error about the entry ``name`` of
    one of them.
    """
    if not name.startswith(_STATE):
        return ""
    # Each kind of entry once: "exp_avg in float32".
    entries = set()
    for saved, stored in folder.layout.tensors.items():
        if saved.startswith(_STATE):
            dtype = str(stored.dtype).removeprefix("torch.")
            entries.add(f"{saved.rpartition('.')[2]} in {dtype}")
    saved_state = ", ".join(sorted(entries)) or "no state"
    return (
        f"; the saved optimizer has {saved_state}, and this one is "
        f"{type(state.optimizer).__name__}: use the optimizer of the saved run "
        "('optimizer.type'), or load the weights alone"
    )


def _small_names(
    saved: Iterable[str],
    state: DCPState,
) -> list[str]:
    """Names of the values that come back besides live tensors. A new rank reads the values of rank
    0.
    """
    saved = sorted(saved)
    found = _of_rank("module_state", state.rank, saved)

    # Facts about the model, and the share of every rank in the fingerprint of its base.
    facts = {f"{ROOT}.{BASE}", f"{ROOT}.{ADAPTERS}"}
    for name in saved:
        if name in facts or name.startswith(f"{ROOT}.{BASE_SAMPLE}."):
            found.append(name)
    if state.optimizer is None:
        return found

    # The training state.
    found += _of_rank(GENERATORS, state.data_rank, saved)
    for key in PACKED:
        name = f"{ROOT}.{key}"
        if name in saved:
            found.append(name)
    return found


def _of_rank(
    key: str,
    rank: int,
    saved: Sequence[str],
) -> list[str]:
    # A tensor, or a dict of tensors, may be under the key of the rank.
    for number in (rank, 0):
        prefix = f"{ROOT}.{key}.{rank_key(number)}."
        found = [name for name in saved if f"{name}.".startswith(prefix)]
        if found:
            return found
    return []


def _check_ties(
    folder: Checkpoint,
    destinations: _Destinations,
) -> None:
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


def _same_values(
    folder: Checkpoint,
    names: tuple[str, str],
    part: Destination,
) -> bool:
    """Compare a part of two stored tensors, a few rows at a time if they can be read so."""
    # An archive that is parsed as a whole would be parsed for each block.
    reader = folder.plan(dict.fromkeys(names, part))
    is_direct = reader.names.issuperset(names)
    blocks = _split_rows(part) if is_direct else [part]
    for rows in blocks:
        copies = {name: rows.like() for name in names}
        folder.read_now(copies)
        one, other = (copy.tensor for copy in copies.values())
        if not torch.equal(one, other):
            return False
    return True


def _split_rows(part: Destination) -> Iterator[Destination]:
    if not part.tensor.ndim:
        yield part
        return
    n_rows = len(part.tensor)
    first, *others = part.box.offsets

    # Rows for one block.
    step = max(1, n_rows * BLOCK_BYTES // max(1, part.tensor.nbytes))
    for row in range(0, n_rows, step):
        rows = part.tensor[row : row + step]
        box = Box((first + row, *others), tuple(rows.shape))
        yield Destination(box, rows)
