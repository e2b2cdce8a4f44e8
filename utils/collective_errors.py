"""Tells a collective that broke down, because a peer hangs or a cable was cut, from an error of the code.

torch has types of its own for NCCL and the store, which also cover misuse; gloo raises plain RuntimeErrors that begin
with the place in its source. Wordings are those of torch 2.11 to 2.15.
"""

import re

import torch.distributed as dist

_GLOO_TRANSPORT = re.compile(r"\[\S*gloo/transport/\S+\] ")
"""``[.../gloo/transport/tcp/pair.cc:534] Connection closed by peer``. ``[enforce fail at ...`` is not one of them: that
ranks disagree about a size is a bug."""
_GLOO_CLOSED = re.compile(r"^Application timeout caused pair closure")
"""What every later collective of a group says in which one has timed out."""
_MONITORED_BARRIER = re.compile(r"failed to pass monitoredBarrier|received errors while waiting for send/recv")
_NCCL_BREAKDOWN = re.compile(r"timeout|timed out|ncclRemoteError|ncclSystemError", re.IGNORECASE)


def collective_broke(error: BaseException | None) -> bool:
    """Whether ``error`` says that peers could not be reached in time, which no change of the code would mend."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    if isinstance(error, dist.DistBackendError):
        return _NCCL_BREAKDOWN.search(str(error)) is not None
    if isinstance(error, RuntimeError):
        return any(pattern.search(str(error)) for pattern in (_GLOO_TRANSPORT, _GLOO_CLOSED, _MONITORED_BARRIER))
    return False
