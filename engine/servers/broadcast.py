"""Broadcast the weights of a published folder to a server that does not see the folder.

The sender and the workers of one server form a gloo group for one update. So no death on either side needs repair, and
a failing server delays no other. The tensors are mapped from the folder and sent one after the other, followed by the
digest of all their bytes.
"""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import xxhash
from safetensors.torch import load_file

from ..memory.tensors import bytes_of


class WeightSender:
    """The sending end of one update. Each end waits ``timeout_s`` for the other.

    The sender listens at the address from which this process reaches the server's ``url``.
    """

    def __init__(self, folder: str | os.PathLike[str], url: str, workers: int, timeout_s: float) -> None:
        self._timeout, self._workers = timedelta(seconds=timeout_s), workers
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout_s) as connection:
            self._address = connection.getsockname()[0]
        files = sorted(Path(folder).glob("*.safetensors"))
        self._tensors: dict[str, torch.Tensor] = {name: t for file in files for name, t in load_file(file).items()}
        self._store = dist.TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._group: dist.ProcessGroupGloo | None = None

    @property
    def init_info(self) -> dict[str, Any]:
        """Body of ``/init_weight_transfer_engine``."""
        return {
            "master_address": self._address,
            "master_port": self._store.port,
            "rank_offset": 1,
            "world_size": 1 + self._workers,
            "timeout_s": self._timeout.total_seconds(),
        }

    @property
    def update_info(self) -> dict[str, Any]:
        """Body of ``/update_weights``: names, dtypes and shapes of the tensors, in the order of sending."""
        return {
            "names": list(self._tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self._tensors.values()],
        }

    def connect(self) -> None:
        """Form the group while the server joins it. Raises RuntimeError after ``timeout_s``."""
        self._group = dist.ProcessGroupGloo(self._store, 0, 1 + self._workers, self._timeout)

    def send(self) -> None:
        """Send all tensors and then their digest. Raises RuntimeError if a worker leaves or exceeds ``timeout_s``."""
        digest = xxhash.xxh3_128()
        for tensor in self._tensors.values():
            data = bytes_of(tensor)
            digest.update(data.numpy())  # type: ignore[arg-type]
            self._broadcast(data)
        self._broadcast(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))

    def _broadcast(self, data: torch.Tensor) -> None:
        assert self._group is not None, "send comes after connect"
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([data], options).wait()  # type: ignore[attr-defined]
