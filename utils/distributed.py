"""Agreement between ranks: all succeed or all raise, and rank 0 decides for all.

Every function takes a process group (``None`` is the default group). Without torch.distributed the
process is a world of one. While nothing fails, an agreement costs one collective of a few numbers
(`gather_numbers`). Objects travel only if there is something to report. They are pickled, but only
between live ranks of one job, never from a file.

All communication uses gloo, through a `control_group` of the same ranks if the group only has NCCL.
Waits are bounded by the timeout of the group, or by torch's default over a `control_group`.
"""

import pickle
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from .errors import CheckpointWriteError, PeerError
from .heartbeat import beat, beating
from .threads import on_daemon_thread

T = TypeVar("T")

RankGroup = dist.ProcessGroup | None
"""Ranks that act together. None: all ranks, if the function says nothing else."""

WORD_EVERY_S = 1.0
"""Seconds between the messages that tell waiting ranks that slow work still runs."""


def get_rank(group: RankGroup = None) -> int:
    """Return this process's rank in ``group``, or 0 without torch.distributed.

    Raises:
        ValueError: ``group`` was destroyed. Returning 0 would let this rank go on without the
            others.
    """
    if not _has_ranks(group):
        return 0
    return dist.get_rank(group)


def get_world_size(group: RankGroup = None) -> int:
    """Return the number of ranks in ``group``, or 1 without torch.distributed. Raises as `get_rank`
    does.
    """
    if not _has_ranks(group):
        return 1
    return dist.get_world_size(group)


def get_group_ranks(group: RankGroup = None) -> list[int]:
    """Return the global ranks of ``group`` in order, or ``[0]`` without torch.distributed."""
    if not _has_ranks(group):
        return [0]
    return dist.get_process_group_ranks(group)


def _has_ranks(group: RankGroup) -> bool:
    return group is not None or dist.is_initialized()


_control_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_control_groups = weakref.WeakKeyDictionary()
"""Maps a group without CPU tensors to its `control_group`. torch.distributed owns both."""


def control_group(group: RankGroup = None) -> RankGroup:
    """Return ``group`` if CPU tensors can travel over it, else a gloo group of the same ranks.

    The first call for a group creates the gloo group and is a collective of ``group``. It lives
    until the default group is destroyed. Objects sent over NCCL would pass through the GPU and wait
    for its computations. CPU tensors do not.
    """
    if get_world_size(group) == 1:
        return group
    # This raises ValueError if a group was destroyed. Below it would be a TypeError.
    for needed in (None, group):
        dist.get_backend(needed)
    if "cpu:" in dist.get_backend_config(group):
        return group

    # A control group that was made for this group and still lives.
    whole = group or dist.group.WORLD
    assert whole is not None
    known = _control_groups.get(whole)
    control = known() if known is not None else None
    if control is None:
        control = new_background_group(whole)
        assert control is not None
        _control_groups[whole] = weakref.ref(control)
    return control


def new_background_group(group: RankGroup, timeout_s: float | None = None) -> RankGroup:
    """Create a gloo group of the same ranks for another thread, so that its collectives do not mix
    with those of training.

    Collective over ``group``. Returns None without torch.distributed. ``timeout_s`` None means
    torch's default.
    """
    if not dist.is_initialized():
        return None
    timeout = None
    if timeout_s is not None:
        timeout = timedelta(seconds=timeout_s)

    # A part of the ranks makes its group without the others.
    if get_world_size(group) == dist.get_world_size():
        background = dist.new_group(backend="gloo", timeout=timeout)
    else:
        ranks = get_group_ranks(group)
        background = dist.new_group(
            ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
        )
    assert isinstance(background, dist.ProcessGroup)
    return background


def drop_group(group: RankGroup) -> None:
    """Destroy a group of `new_background_group`, unless it was destroyed together with the default
    group.
    """
    if group is not None and dist.is_initialized():
        with suppress(ValueError):
            dist.destroy_process_group(group)


def gather_numbers(numbers: Sequence[float], group: RankGroup = None) -> list[list[float]]:
    """Gather the ``numbers`` of all ranks in rank order, in one collective of a small tensor.

    Every rank has the same count. They travel as float64, so integers are exact up to 2**53.
    """
    world_size = get_world_size(group)
    if world_size == 1:
        return [[float(number) for number in numbers]]

    # On the CPU, whatever the default device is. One row for each rank.
    own = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    gathered = own.new_empty((world_size, len(numbers)))
    dist.all_gather(list(gathered), own, group=control_group(group))
    return gathered.tolist()


def any_rank(flag: bool, group: RankGroup = None) -> bool:
    """Return whether ``flag`` is set on any rank. The result is the same on every rank."""
    flags = gather_numbers([flag], group)
    return any(theirs for (theirs,) in flags)


def all_agree(flag: bool, group: RankGroup = None) -> bool:
    """Return whether ``flag`` is set on every rank. The result is the same on every rank."""
    return not any_rank(not flag, group)


def gather_objects(value: T, group: RankGroup = None) -> list[T]:
    """Gather ``value`` from every rank, in rank order. Each is pickled once and unpickled once per
    rank.

    Raises:
        PeerError: the value of any rank cannot be pickled or unpickled. Raised on all ranks.
    """
    if get_world_size(group) == 1:
        return [value]
    # User code may raise anything, and the peers wait in the collective.
    try:
        data = pickle.dumps(value)
    except Exception as error:
        data = pickle.dumps(_Unsent(_why_unsent(error)))
    gathered = [_unpickled(theirs) for theirs in _gather_bytes(data, group)]

    # Every rank sees the same failures, so that all raise.
    unsent = {}
    for rank, found in enumerate(gathered):
        if isinstance(found, _Unsent):
            unsent[rank] = f"it {found.reason}"
    if unsent:
        raise PeerError("gathering a value of every rank", unsent)
    return gathered


@dataclass(frozen=True)
class _Unsent:
    reason: str  # why a value could not be sent


def _unpickled(data: memoryview) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        return _Unsent(_why_unsent(error))


def _gather_bytes(data: bytes, group: RankGroup) -> list[memoryview]:
    rows = gather_numbers([len(data)], group)
    sizes = [int(size) for (size,) in rows]

    # Ranks send the same number of bytes, so shorter values are padded.
    own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    own.numpy()[: len(data)] = np.frombuffer(data, np.uint8)
    gathered = own.new_empty((len(sizes), len(own)))
    dist.all_gather(list(gathered), own, group=control_group(group))
    return [row.numpy().data[:size] for row, size in zip(gathered, sizes, strict=True)]


@contextmanager
def all_ranks_succeed(what: str, group: RankGroup = None) -> Iterator[None]:
    """Run a block on all ranks. If it fails on one rank, it fails on all.

    A rank that failed raises its own error. The other ranks raise a `PeerError` that names it. The
    result of `is_write_failure` is the same on all ranks: if one rank could not write and another
    failed for another reason, the first raises a `PeerError` about the second. The block must not
    leave a collective half-done, because a rank that fails skips the rest of the block while its
    peers go on.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    _gather_unless_failed(what, error, [], group)


def gather_numbers_of(
    what: str,
    compute: Callable[[], Sequence[float]],
    count: int,
    group: RankGroup = None,
) -> list[list[float]]:
    """Gather the ``count`` numbers that ``compute`` returns on each rank. If it fails on one rank,
    all raise.

    Failures and numbers travel in one collective, and ``compute`` must not leave another collective
    half-done. ``what`` and the errors are as in `all_ranks_succeed`.
    """
    numbers: Sequence[float] = [0.0] * count
    error: Exception | None = None
    try:
        numbers = compute()
    except Exception as caught:
        error = caught
    return _gather_unless_failed(what, error, numbers, group)


def reduce_flags_of(what: str, compute: Callable[[], int], group: RankGroup = None) -> int:
    """Bitwise OR of the flags (below 2**53) that ``compute`` returns on each rank. See
    `gather_numbers_of`.
    """
    rows = gather_numbers_of(what, lambda: [compute()], 1, group)
    flags = 0
    for (theirs,) in rows:
        flags |= int(theirs)
    return flags


def _gather_unless_failed(
    what: str, error: Exception | None, numbers: Sequence[float], group: RankGroup
) -> list[list[float]]:
    """Gather numbers and failures in one collective. If any rank failed, gather the errors, and all
    ranks raise.
    """
    # The first number says whether the rank has failed.
    rows = gather_numbers([error is not None, *numbers], group)
    if not any(failed for failed, *_ in rows):
        return [theirs for _, *theirs in rows]

    # A failed write counts less than any other failure, wherever that is.
    report = None
    if error is not None:
        report = _report(error)
    failed = {}
    worse = {}
    for rank, theirs in enumerate(gather_objects(report, group)):
        if theirs is None:
            continue
        failed[rank] = theirs
        if not theirs.startswith(_WRITE_FAILURE):
            worse[rank] = theirs

    # This rank's own error has its traceback, so that it is raised if it is among the worst.
    if error is None:
        raise PeerError(what, failed)
    if worse and is_write_failure(error):
        raise PeerError(what, worse) from error
    raise error


def all_ranks_succeed_slowly(
    what: str, work: Callable[[], object], group: RankGroup = None
) -> None:
    """Run ``work`` on every rank, however long it takes. If it fails on one rank, it fails on all.

    Like `all_ranks_succeed`, for work without collectives that may take longer than the timeout of
    ``group`` (which must be above `WORD_EVERY_S`). The work runs on a daemon thread. Meanwhile the
    ranks tell each other that they still wait, and call `beat`. With one rank the work runs on the
    calling thread, so that Ctrl-C ends it.
    """
    if get_world_size(group) == 1:
        with beating(WORD_EVERY_S):
            work()
        return
    # All go on when all are done. Until then a collective in every round keeps the timeout away.
    outcome = on_daemon_thread(work, what)
    while not all_agree(_is_done(outcome), group):
        beat()
    with all_ranks_succeed(what, group):
        outcome.result()


def _is_done(outcome: Future[Any]) -> bool:
    """Wait for an outcome until it is time to tell the other ranks."""
    waited = wait([outcome], WORD_EVERY_S)
    return bool(waited.done)


def is_write_failure(error: BaseException) -> bool:
    """Return whether ``error`` only means that a checkpoint could not be written, here or on other
    ranks.
    """
    if isinstance(error, PeerError):
        return error.types == {CheckpointWriteError.__name__}
    return isinstance(error, CheckpointWriteError)


_WRITE_FAILURE = f"{CheckpointWriteError.__name__}:"


def _report(error: Exception) -> str:
    """Describe an error for the other ranks. A `PeerError` that holds only write failures counts as
    a write failure.
    """
    kind = CheckpointWriteError if is_write_failure(error) else type(error)
    return f"{kind.__name__}: {error}"


def rank_zero_decides(decide: Callable[[], T], group: RankGroup = None) -> T:
    """Call ``decide`` on rank 0 of ``group``, and return its result or raise its error on every
    rank.

    Raises:
        PeerError: the result or the error cannot be pickled. Raised on all ranks.
    """
    if get_world_size(group) == 1:
        return decide()
    result: Any = None
    error: Exception | None = None
    sent = [b""]

    # Rank 0 decides. A result or an error that the others cannot read becomes an error for all.
    if get_rank(group) == 0:
        try:
            result = decide()
            data = _pickled((result, None))
            if isinstance(data, str):
                raise PeerError(_DECISION, {0: f"its result {data}"})
        except Exception as caught:
            error = caught
            data = _pickled((None, caught))
            if isinstance(data, str):
                error = PeerError(_DECISION, {0: f"{type(caught).__name__}: {caught}"})
                data = pickle.dumps((None, error))
        sent = [data]

    # The others follow.
    dist.broadcast_object_list(sent, group=control_group(group), group_src=0)
    if get_rank(group) != 0:
        result, error = pickle.loads(sent[0])
    if error is not None:
        raise error
    return result


def rank_zero_decides_slowly(decide: Callable[[], T], group: RankGroup = None) -> T:
    """Like `rank_zero_decides`, for decisions that may take longer than the timeout of ``group``.

    The timeout must be above `WORD_EVERY_S`. Rank 0 works on a daemon thread and tells the others
    to go on waiting. All ranks call `beat` meanwhile. With one rank the decision runs on the
    calling thread, so that Ctrl-C ends it.
    """
    if get_world_size(group) == 1:
        with beating(WORD_EVERY_S):
            return decide()
    # Only rank 0 has an outcome. It decides in each round whether the others wait on.
    outcome: Future[T] = Future()
    if get_rank(group) == 0:
        outcome = on_daemon_thread(decide, "slow decision")
    while not rank_zero_decides(lambda: _is_done(outcome), group):
        beat()
    return rank_zero_decides(outcome.result, group)


_DECISION = "the decision of rank 0"


def _pickled(value: object) -> bytes | str:
    """Pickle ``value``, or return the reason why the other ranks cannot read it."""
    # User code may raise anything, and the peers wait in the collective.
    try:
        data = pickle.dumps(value)
        pickle.loads(data)
    except Exception as error:
        return _why_unsent(error)
    return data


def _why_unsent(error: Exception) -> str:
    return f"cannot be sent to the other ranks: {type(error).__name__}: {error}"


_GLOO_TRANSPORT = re.compile(r"\[\S*gloo/transport/\S+\] ")
"""Matches ``[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer``, but not ``[enforce
fail at ...``, which is a bug: ranks disagree about a size.
"""
_GLOO_CLOSED = re.compile(r"^Application timeout caused pair closure")
"""Message of every collective after one in the same group has timed out."""
_MONITORED_BARRIER = re.compile(
    r"failed to pass monitoredBarrier|received errors while waiting for send/recv"
)
_NCCL_BREAKDOWN = re.compile(r"timeout|timed out|ncclRemoteError|ncclSystemError", re.IGNORECASE)


def collective_broke(error: BaseException | None) -> bool:
    """Return whether ``error`` says that peers could not be reached in time, so that the code is
    not the cause.

    torch has error types for NCCL and the store, which also cover misuse. gloo raises RuntimeErrors
    that start with a place in its source. The patterns match torch 2.11 to 2.15.
    """
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return _NCCL_BREAKDOWN.search(str(error)) is not None
    # gloo has no type of its own.
    if isinstance(error, RuntimeError):
        patterns = (_GLOO_TRANSPORT, _GLOO_CLOSED, _MONITORED_BARRIER)
        return any(pattern.search(str(error)) for pattern in patterns)
    return False
