"""``holdfast_disk``: load a published folder after comparing it with its manifest.

The trainer calls ``/start_weight_update``, ``/update_weights`` with ``{"path": folder, "manifest":
digest of its manifest.json}`` and ``/finish_weight_update``. The second call checks everything
before it dismantles a layer, so a refused folder changes nothing. Each worker reads the files
twice, the second time from the page cache. The workers share the digests.
"""

# pyright: reportMissingImports=false

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from .checked import CheckedEngine, Weights
from .published import check_files, check_model, read_manifest


@dataclass
class DiskInitInfo(WeightTransferInitInfo):
    """Empty, because a folder needs no connection."""


@dataclass
class DiskUpdateInfo(WeightTransferUpdateInfo):
    """A published version."""

    path: str  # folder, as the server sees it
    manifest: str  # digest of ``manifest.json``


class DiskWeightTransferEngine(CheckedEngine):
    """Check a folder on all workers, then load it."""

    init_info_cls = DiskInitInfo
    update_info_cls = DiskUpdateInfo

    def init_transfer_engine(self, init_info: DiskInitInfo) -> None:
        """Do nothing."""

    def checked_weights(
        self,
        update_info: DiskUpdateInfo,
        rank: int,
        world_size: int,
    ) -> Weights:
        """Check that the folder is the published one and fits the served model, then return its
        weights.
        """
        folder = Path(update_info.path)
        files = read_manifest(folder, update_info.manifest)
        check_files(folder, files, rank, world_size)
        stored: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        check_model(stored, self.model_config.hf_config.to_dict(), folder)
        return _stored_tensors(folder, files)

    def shutdown(self) -> None:
        """Do nothing."""


def _stored_tensors(folder: Path, files: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in files:
        # One file is open, and one tensor is in memory, at a time.
        if name.endswith(".safetensors"):
            with safe_open(folder / name, framework="pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118
                    yield tensor, opened.get_tensor(tensor)
