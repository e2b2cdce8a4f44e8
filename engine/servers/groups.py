"""Process groups through which rank 0 sends buckets of weights to the workers of one server.

Every server has a group of its own, so a server that fails or hangs harms no other. A group is kept
for later versions. After any error it is dropped, and the next version gets a new one. The groups
of training are never used.
"""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import Tensor

from ...utils.errors import PoisonedServerError, ServerError
from ...utils.threads import on_daemon_thread
from .http import Calls, Json
from .stream import BucketReader, FilledBucket, StreamEndedError

_IN_PIECES = (
    "a part of them was, so that its weights are in pieces, and it stays paused: publish again"
)


class SenderGroup(Protocol):
    """A group of rank 0 and the workers of one server."""

    @property
    def init_info(self) -> dict[str, Any]:
        """Address, sizes and ranks, with which a worker joins."""
        ...

    def connect(self) -> None:
        """Form the group while the workers join it. Raises RuntimeError if they do not in time."""
        ...

    def send(self, data: Tensor) -> None:
        """Broadcast bytes in host memory, which may change afterwards. RuntimeError if a worker is
        gone or too slow.
        """
        ...

    def abort(self) -> None:
        """Leave the group, also while another thread sends or connects."""
        ...


class GlooGroup:
    """A group of rank 0 and ``workers`` processes over gloo, which waits ``limit_s`` for a worker.

    Rank 0 listens at the address from which it reaches the server's ``url``. ``prefixes`` lead to
    the keys under which the workers look for it.
    """

    def __init__(
        self, url: str, workers: int, limit_s: float, prefixes: Sequence[str] = ()
    ) -> None:
        self._workers = workers
        self._limit = timedelta(seconds=limit_s)

        # The workers find rank 0 by a store that it serves.
        self._address = address_towards(url, limit_s)
        self._tcp = dist.TCPStore(
            self._address, 0, is_master=True, wait_for_workers=False, timeout=self._limit
        )
        self._store: dist.Store = self._tcp
        for prefix in prefixes:
            self._store = dist.PrefixStore(prefix, self._store)

        self._group: dist.ProcessGroupGloo | None = None

    @property
    def init_info(self) -> dict[str, Any]:
        """See `SenderGroup`."""
        return {
            "master_address": self._address,
            "master_port": self._tcp.port,
            "rank_offset": 1,
            "world_size": 1 + self._workers,
        }

    def connect(self) -> None:
        """See `SenderGroup`."""
        self._group = dist.ProcessGroupGloo(self._store, 0, 1 + self._workers, self._limit)

    def send(self, data: Tensor) -> None:
        """See `SenderGroup`."""
        assert self._group is not None, "send comes after connect"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([data], options).wait()  # type: ignore[attr-defined]

    def abort(self) -> None:
        """See `SenderGroup`. A send that runs ends at its time limit, because gloo cannot end it
        earlier.
        """
        self._group = None


def address_towards(url: str, limit_s: float) -> str:
    """Address of this host from which it reaches the host of ``url``."""
    parts = urlsplit(url)
    usual_port = 443 if parts.scheme == "https" else 80
    server = (parts.hostname or "", parts.port or usual_port)
    with socket.create_connection(server, limit_s) as connection:
        address, *_ = connection.getsockname()
        return address


class KeptGroup:
    """The group of one client and its server, kept from version to version."""

    def __init__(self) -> None:
        self._group: SenderGroup | None = None
        # Label that the server got over the group, and size of the largest bucket.
        self._made_for: tuple[str | None, int] = (None, 0)

    @contextmanager
    def open(
        self,
        label: str,
        serving: str | None,
        form: Callable[[], SenderGroup],
        buckets: BucketReader,
        calls: Calls,
    ) -> Iterator[SenderGroup]:
        """Yield the group when the first bucket is there. After an error in the block the group is
        dropped.

        It is formed again unless the server is ``serving`` the label that it got over this group:
        after a restart it has another label, and no group. Also if the buckets have another size.
        """
        group = self._group
        self._group = None
        try:
            if group is None or (serving, buckets.largest_bytes) != self._made_for:
                self._abort(group)
                group = form()
            buckets.wait()
            yield group
        except BaseException as error:
            # At once, because the caller may still ask the server for its status.
            buckets.close()
            self._abort(group)
            if not isinstance(error, StreamEndedError):
                raise

            # The first bucket was released before anything was sent.
            problem = f"the weights could not be sent: {error}"
            if buckets.released:
                raise calls.refuse(f"{problem}; {_IN_PIECES}", PoisonedServerError) from error
            raise calls.refuse(problem) from error

        # Keep it for the next version.
        self._group = group
        self._made_for = (label, buckets.largest_bytes)

    def drop(self) -> None:
        """Use the group no more."""
        group = self._group
        self._group = None
        self._abort(group)

    def _abort(self, group: SenderGroup | None) -> None:
        if group is not None:
            group.abort()


def connected(group: SenderGroup, calls: Calls, tell: Callable[[Json], object]) -> SenderGroup:
    """Form a group while ``tell`` asks the server to join it."""
    # Both sides wait for each other, so rank 0 connects on a thread.
    joined = on_daemon_thread(group.connect, "weight sender")
    try:
        tell(group.init_info)
        joined.result()
    except (RuntimeError, TimeoutError) as error:
        raise _unsent(calls, error) from error
    return group


def send_bucket(
    group: SenderGroup,
    buckets: BucketReader,
    bucket: FilledBucket,
    calls: Calls,
    tell: Callable[[], object],
) -> None:
    """Send a bucket while ``tell`` asks the server to receive and load it.

    The bucket is released when it was sent, so that the next one is gathered while the server
    loads. If it cannot be sent, nobody waits for this server any more.
    """

    def send() -> None:
        try:
            group.send(bucket.data)
        except BaseException as error:
            buckets.close(f"{type(error).__name__}: {error}")
            raise
        finally:
            buckets.release()

    sent = on_daemon_thread(send, "weight sender")

    # After an error the send ends by itself: the server may never have entered the broadcast.
    tell()
    try:
        sent.result()  # the group limits it
    except RuntimeError as error:
        raise _unsent(calls, error, PoisonedServerError) from error


def _unsent(calls: Calls, error: Exception, kind: type[ServerError] | None = None) -> ServerError:
    return calls.refuse(f"the weights could not be sent: {type(error).__name__}: {error}", kind)
