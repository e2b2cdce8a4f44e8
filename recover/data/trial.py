"""Try whether the loader of a stream finds its place again, so that a run that could not be resumed
ends at its start.

The place in a map-style dataset is a number of samples of an order, and `capture` saves that order.
The place in a stream (torch's ``IterableDataset``) is only known to the stream: its own
``state_dict`` may forget what it holds, such as a shuffle buffer. So two copies of the loader are
tried in worker processes: one reads a few batches, the other one gets the state of the first and
has to go on with the same batches.

A stream that a process or a persistent worker keeps may have another order each time that it is
begun, such as webdataset's ``detshuffle``. So the same is tried in a second epoch, if there is one.
A stream may also keep its place until the epoch has been read to its end. So the first epoch is
read to its end before, and if it is a long one, what the second one shows is a warning only.

The copies read up to four batches for each worker and epoch, and `_REST` of the first one before a
second. Nothing changes in this process: the
generators and the positions of open files are restored, and the dataset is never iterated over
here.
"""

import copy
import fcntl
import multiprocessing
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from ...engine.api import Stateful
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.plain_values import pack_plain, unpack_plain
from ...utils.rng import capture_rng, restore_rng
from .dataset_fingerprint import sample_digest

logger = get_logger(__name__)

_BATCH_TIMEOUT_S = 60
_FIRST = "first_batches"
_TRIED = "_holdfast_first_batches"
_ADVICE = (
    "Shuffle a map-style dataset, best with ResumableDataLoader, or shuffle only the order of a "
    "stream's files, with a fixed seed (datasets: shuffle(seed=1, buffer_size=1, "
    "max_buffer_input_shards=1))"
)
_ADVICE_ON_EPOCHS = (
    "Give it an attribute epoch that its order depends on, a method set_epoch that sets it, and "
    "workers that end with the epoch, or the number of its epoch in its state_dict"
)
_REST = 64
"""Batches, of the rest of the first epoch."""


class _UntriedError(Exception):
    """The stream could not be tried."""


def try_stream(loader: Any, n_epochs: int = 2) -> None:
    """Try whether a new process would find the place of ``loader``, if its dataset is a stream. Of
    other loaders, refuse those whose batches come in the order in which workers finish.

    A run of ``n_epochs`` begins the stream as often. More than two are tried like two.

    A warning says so if that cannot be told, or if the stream gives other samples each time that it
    is begun. With an attribute ``inexact`` of the loader that is True, other samples are a warning
    too.

    Raises:
        ConfigError: a copy of the loader does not take the state of another one, or goes on with
            other samples, or the order of its batches depends on time.
    """
    may_differ = getattr(loader, "inexact", False)
    _require_order(_inner_loader(loader), may_differ)
    tried = _torchs_loader(loader)
    if tried is None:
        if type(loader).__module__.startswith("torchdata.nodes"):
            logger.warning(
                "a run with a loader of torchdata.nodes is resumed only as far as its nodes say: "
                "an order that a sampler has drawn, and the end of an epoch, are not in its "
                "state. Use StatefulDataLoader"
            )
        return

    # The trial draws and reads. Generators and open files come back to where they were.
    name = type(tried.dataset).__name__
    _require_resumable(tried, may_differ)
    generators = capture_rng()
    positions = _file_positions()
    try:
        first = _first_batches(tried, may_differ, n_epochs)
    except _UntriedError as reason:
        logger.warning(
            "whether a resumed run finds its place in %s could not be tried (%s): it does only if "
            "the state of the loader has everything that the next samples depend on. %s",
            name,
            reason,
            _ADVICE,
        )
        return
    finally:
        restore_rng(generators)
        for file, position in positions.items():
            os.lseek(file, position, os.SEEK_SET)

    # The first batches are kept, so that a resume can compare its own with them.
    if first is None:
        logger.warning(
            "%s gives other samples each time that it is begun: if their order is random, and not "
            "only what is in them, a resumed run loses samples and repeats others. %s",
            name,
            _ADVICE,
        )
        return
    epoch = getattr(tried.dataset, "epoch", None)
    found = {"digest": first, "epoch": str(epoch), "workers": tried.num_workers}
    vars(loader)[_TRIED] = found


def first_batches(loader: Any) -> dict[str, Any]:
    """Return what `try_stream` has read, to be saved with the draws of an order. Empty if there is
    nothing.
    """
    found = getattr(loader, _TRIED, None)
    return {} if found is None else {_FIRST: found}


def check_first_batches(loader: Any, saved: Mapping[str, Any]) -> None:
    """Compare what `try_stream` has read with what it had read when the run was saved.

    Raises:
        CheckpointMismatchError: the same epoch began with other samples.
    """
    then = saved.get(_FIRST)
    now = getattr(loader, _TRIED, None)
    if not then or not now or then["digest"] == now["digest"]:
        return
    same_epoch = (then["epoch"], then["workers"]) == (now["epoch"], now["workers"])
    if same_epoch and not getattr(loader, "inexact", False):
        raise CheckpointMismatchError(
            "the stream of the dataloader begins with other samples than in the saved run: other "
            "data, another batch size, or an order that is drawn anew in each process (a shuffle "
            "without a seed), so samples would be lost or repeated. Make it as the run did. If "
            "that is no harm, set loader.inexact = True"
        )


def is_of_datasets(stream: Any) -> bool:
    """Return whether a dataset is one of Hugging Face's library."""
    return type(stream).__module__.partition(".")[0] == "datasets"


def _torchs_loader(loader: Any) -> Any:
    """Return the loader over a stream, torch's or torchdata's, that ``loader`` is or wraps. None if
    there is none.
    """
    inner = _inner_loader(loader)
    if not isinstance(inner, DataLoader) or not isinstance(inner.dataset, IterableDataset):
        return None
    library = type(inner).__iter__.__module__.partition(".")[0]
    return inner if library in ("torch", "torchdata") else None


def _inner_loader(loader: Any) -> Any:
    """Return the loader that ``loader`` wraps, or ``loader`` itself."""
    inner = getattr(loader, "loader", loader)
    return getattr(inner, "base_dataloader", inner)  # of accelerate's loaders


def _require_order(loader: Any, may_differ: bool) -> None:
    """Refuse a loader that yields whichever batch is ready first."""
    if getattr(loader, "in_order", True) or getattr(loader, "num_workers", 0) < 2 or may_differ:
        return
    raise ConfigError(
        f"the batches of the {type(loader).__name__} come in the order in which its "
        f"{loader.num_workers} workers finish (in_order=False), which no state holds, so a resumed "
        "run would lose samples and repeat others: use in_order=True. If that is no harm, set "
        "loader.inexact = True"
    )


def _require_resumable(loader: Any, may_differ: bool) -> None:
    """Refuse what a trial in one epoch of one process cannot show about a stream of Hugging Face's
    datasets.
    """
    if not is_of_datasets(loader.dataset):
        return
    # See `restore._resume_once`.
    context = loader.multiprocessing_context or multiprocessing
    if loader.persistent_workers and context.get_start_method() != "fork":
        raise ConfigError(
            "persistent workers that are not forked would begin each later epoch of a resumed "
            "stream of datasets in its middle: use persistent_workers=False, or "
            "multiprocessing_context='fork'"
        )
    if _is_unseeded(loader.dataset) and not may_differ:
        raise ConfigError(
            f"{type(loader.dataset).__name__} is shuffled without a seed, so a resumed run would "
            "have another order, and lose samples and repeat others: give shuffle a seed. If that "
            "is no harm, set loader.inexact = True"
        )


def _is_unseeded(part: Any) -> bool:
    """Whether a part of a stream draws from a generator of numpy that was made without a seed."""
    if isinstance(part, np.random.Generator):
        # Without a seed numpy takes 128 bits from the system.
        entropy = getattr(part.bit_generator.seed_seq, "entropy", None)
        return isinstance(entropy, int) and entropy.bit_length() > 64
    if isinstance(part, list | tuple):
        return any(map(_is_unseeded, part))
    return is_of_datasets(part) and any(map(_is_unseeded, getattr(part, "__dict__", {}).values()))


def _first_batches(loader: Any, may_differ: bool, n_epochs: int) -> str | None:
    """Return a digest of the first batches. None if they are others each time."""
    name = type(loader.dataset).__name__
    n_workers = loader.num_workers
    n_batches = 2 * max(1, n_workers)
    is_kept = n_epochs > 1 and _is_kept(loader)
    # Workers are restored with their seeds. In this process other numbers are drawn at the restart.
    seed_at_restart = 2 if isinstance(loader, Stateful) and not n_workers else 1

    # Step 1: read from the beginning, and only the half of an epoch that is shorter than that.
    original = _Copy(loader, seed=1, is_kept=is_kept)
    begun = original.read(n_batches)
    if len(begun) < n_batches:
        n_batches = max(1, len(begun) // 2)
        original = _Copy(loader, seed=1, is_kept=is_kept)
        begun = original.read(n_batches)
    state = original.state()
    expected = original.read(n_batches)

    # Step 2: go on from the state in another copy.
    found = []
    error = None
    try:
        restored = _Copy(loader, seed_at_restart, state)
        if state is None:
            restored.read(n_batches)
        found = restored.read(n_batches)
    except _UntriedError as raised:
        if state is None:
            raise
        error = raised
    finds_place = found == expected and error is None
    if finds_place and not is_kept:
        return sample_digest(begun)
    if error is not None:
        raise ConfigError(
            f"the loader does not take its own state, so the run could not be resumed: {error}. "
            f"{_ADVICE}"
        )

    where = ""
    is_sure = True
    reason = (
        f"the state of {name} lacks samples that it has read ahead, such as a shuffle buffer, so a "
        f"resumed run would lose samples and repeat others. {_ADVICE}"
    )

    # Step 3: the same in the second epoch of the stream, whose samples may depend on seeds.
    other_seed = seed_at_restart
    if finds_place:
        other_seed = 3
        is_sure = len(original.read(_REST)) < _REST
        if _finds_place_again(original, loader, n_batches, seed_at_restart):
            return sample_digest(begun)
        where = " in its second epoch"
        if not is_sure:
            where += ", begun before the end of the first"
        reason = (
            f"{name} has another order each time that a process begins it, which a restarted one "
            "cannot know, so a run that is resumed in a later epoch would lose samples and repeat "
            f"others. {_ADVICE_ON_EPOCHS}"
        )

    # Step 4: a stream that is another one each time may only have random contents.
    if _Copy(loader, other_seed).read(n_batches) != begun:
        return None

    message = (
        f"a copy of the loader with the state after {n_batches} batches goes on with other "
        f"samples than the loader{where}: {reason}. If that is no harm, set loader.inexact = True"
    )
    if is_sure and not may_differ:
        raise ConfigError(message)
    logger.warning(message)
    return sample_digest(begun)


def _is_kept(loader: Any) -> bool:
    """Whether the stream of a later epoch is the object of the first, and neither its own state nor
    ``set_epoch`` tells it the epoch.
    """
    if isinstance(loader.dataset, Stateful):
        return False
    if loader.num_workers:
        return loader.persistent_workers
    return not hasattr(loader.dataset, "set_epoch")


def _finds_place_again(
    original: "_Copy", loader: Any, n_batches: int, seed_at_restart: int
) -> bool:
    """Whether a new copy goes on as ``original`` in its second epoch."""
    with _next_epoch(loader.dataset):
        original.begin()
        original.read(n_batches)
        state = original.state()
        expected = original.read(n_batches)
        restored = _Copy(loader, seed_at_restart, state)
        if state is None:
            restored.read(n_batches)
        return restored.read(n_batches) == expected


@contextmanager
def _next_epoch(stream: Any) -> Iterator[None]:
    """Tell the stream the next epoch, as a script does, and afterwards its own again."""
    epoch = getattr(stream, "epoch", None)
    if not isinstance(epoch, int) or not hasattr(stream, "set_epoch"):
        yield
        return
    stream.set_epoch(epoch + 1)
    try:
        yield
    finally:
        stream.set_epoch(epoch)


class _Copy:
    """A copy of a loader that reads in worker processes, at least one.

    With ``is_kept`` the workers, and so the streams in them, stay when it is begun again.
    """

    def __init__(
        self, loader: Any, seed: int, state: bytes | None = None, *, is_kept: bool = False
    ) -> None:
        self._loader = copy.copy(loader)
        own = vars(self._loader)  # torch's loader refuses to set some of them
        own["batch_sampler"] = copy.deepcopy(loader.batch_sampler)
        own["persistent_workers"] = is_kept
        own["_iterator"] = None
        if not loader.num_workers:
            self._loader.num_workers = 1
            self._loader.prefetch_factor = 2
            # The dataset of such a loader may not be picklable.
            self._loader.multiprocessing_context = "fork"
        self._loader.timeout = _BATCH_TIMEOUT_S
        self._loader.pin_memory = False
        self._loader.generator = torch.Generator().manual_seed(seed)
        if state is not None:
            restored = unpack_plain(state, "the loader's state")
            if not loader.num_workers:
                restored["_snapshot"]["_main_snapshot"]["_base_seed"] = seed
            self._loader.load_state_dict(restored)
        self.begin()

    def begin(self) -> None:
        """Read from the beginning, or the first time from the given state."""
        try:
            self._batches = iter(self._loader)
        except Exception as error:
            raise _UntriedError(_last_line(error)) from error

    def read(self, n_batches: int) -> list[str]:
        """Read batches, and return a digest of each. Fewer if the stream ends."""
        try:
            return [sample_digest(batch) for batch in islice(self._batches, n_batches)]
        except Exception as error:  # of the user's dataset, or of a library's
            raise _UntriedError(_last_line(error)) from error

    def state(self) -> bytes | None:
        """Return the state as it is saved. None if the loader has none: then its batches are read
        again.
        """
        if not isinstance(self._loader, Stateful):
            return None
        return pack_plain("dataloader state", self._loader.state_dict())


def _last_line(error: Exception) -> str:
    # A worker's error has its whole traceback as its message, which ends with the error's own line.
    lines = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    return lines[-1] if lines[-1].startswith(name) else f"{name}: {lines[-1]}"


def _file_positions() -> dict[int, int]:
    """Positions of this process's read-only files, which a forked worker shares and moves."""
    positions = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISREG(os.fstat(int(name)).st_mode):
                continue
            if fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                positions[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)
        except OSError:  # closed in the meantime, such as the folder itself
            continue
    return positions
