"""Detection of collectives that failed because a peer hangs or the network broke.

torch has error types for NCCL and the store, which also cover misuse. gloo raises RuntimeErrors that start with a place
in its source. The patterns match torch 2.11 to 2.15.
"""

import re

import torch.distributed as dist

_GLOO_TRANSPORT = re.compile(r"\[\S*gloo/transport/\S+\] ")
"""Matches ``[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer``, but not ``[enforce fail at ...``, which
is a bug: ranks disagree about a size.
"""
_GLOO_CLOSED = re.compile(r"^Application timeout caused pair closure")
"""Message of every collective after one in the same group has timed out."""
_MONITORED_BARRIER = re.compile(r"failed to pass monitoredBarrier|received errors while waiting for send/recv")
_NCCL_BREAKDOWN = re.compile(r"timeout|timed out|ncclRemoteError|ncclSystemError", re.IGNORECASE)


def collective_broke(error: BaseException | None) -> bool:
    """Return whether ``error`` says that peers could not be reached in time, so that the code is not the cause."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return _NCCL_BREAKDOWN.search(str(error)) is not None
    if isinstance(error, RuntimeError):
        return any(pattern.search(str(error)) for pattern in (_GLOO_TRANSPORT, _GLOO_CLOSED, _MONITORED_BARRIER))
    return False
