"""Publish versions of the weights to the inference servers: written to disk, announced, confirmed.

A version is complete on disk (`write_version`) before rank 0 tells the servers of it, all at once; the other ranks wait
as long as that takes. Older versions go only after enough servers have confirmed the new one, because a server may
still be reading one; a folder that one is still loading stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.distributed import all_ranks_succeed, get_rank, rank_zero_decides, rank_zero_decides_slowly
from ...utils.logging import get_logger
from ...utils.timing import timed
from ..api import InferenceServer, WeightUpdateMeta
from ..hf.adapter_folder import require_adapters
from ..hf.versions import delete_old, write_version
from .fleet import ServerFleet
from .states import ServerReport, server_stats

logger = get_logger(__name__)


@dataclass(frozen=True)
class PublishedWeights:
    """What became of a publication.

    Attributes:
        path: folder of the version.
        version: its number.
        seconds: of ``write`` (gather, cast, write, fsync), ``digest`` (read again, manifest), ``tell`` (until enough
            servers confirmed it) and ``total``, on this rank; of an engine's weights also ``probe`` (`probe_weights`).
        servers: what rank 0 knows of each server.
    """

    path: Path
    version: int
    seconds: Mapping[str, float]
    servers: tuple[ServerReport, ...]

    def stats(self) -> dict[str, float]:
        """Numbers for the statistics: ``publish_<phase>_s``, and those of `server_stats`."""
        return {f"publish_{phase}_s": seconds for phase, seconds in self.seconds.items()} | server_stats(self.servers)


def publish_weights(
    model: PreTrainedModel,
    meta: WeightUpdateMeta,
    version: int,
    servers: Sequence[InferenceServer] | ServerFleet,
    group: dist.ProcessGroup | None = None,
    base_model_path: str | None = None,
    base_dtype: torch.dtype | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> PublishedWeights:
    """Write the weights as ``version``, have the servers load them, and delete old versions; all ranks call it.

    Args:
        model: sharded model.
        meta: where to, how many servers have to confirm it, and how many versions stay.
        version: what the servers must confirm.
        servers: told by rank 0; other ranks' are not used. Of a sequence nobody looks after those that were missed.
        group: control group.
        base_model_path: folder whose tokenizer and other files go along.
        base_dtype: what the weights are stored as when ``meta.dtype`` is None; None: each as it is.
        extra_files: name -> contents of files that go along, too, and that the manifest covers; rank 0's are used.

    Raises:
        CheckpointWriteError: any rank could not write; no server was told.
        ConfigError: see `ServerFleet.update`; where a server cannot be sent weights, or takes no adapters, or the model
            has none to publish alone, nothing was written.
        PublishError, WorkerLost: see there; on every rank.
    """
    seconds: dict[str, float] = {}
    with timed(seconds, "total"):
        with all_ranks_succeed("naming the inference servers", group):
            fleet = open_fleet(servers, group, probe_interval_s=None)
            if broadcast := meta.type == "broadcast":
                fleet.require_receivers()
            if meta.type == "adapter":
                require_adapters(model)
                fleet.require_adapter_servers()
        fleet.withdraw(version)
        written = write_version(
            model, meta, version, group, base_model_path=base_model_path, base_dtype=base_dtype, extra_files=extra_files
        )
        told = (written.path, version, meta.timeout_s, meta.min_servers)
        with timed(seconds, "tell"):
            reports = rank_zero_decides_slowly(lambda: fleet.update(*told, broadcast=broadcast), group)
        rank_zero_decides(lambda: delete_old(meta.path, meta.keep, fleet.folders_in_use()), group)
    logger.info("published weight version %d to %s in %.3f s", version, written.path, seconds["total"])
    return PublishedWeights(written.path, version, {**written.seconds, **seconds}, tuple(reports))


def open_fleet(
    servers: Sequence[InferenceServer] | ServerFleet,
    group: dist.ProcessGroup | None,
    probe_interval_s: float | None = 5.0,
) -> ServerFleet:
    """``servers`` as a fleet; that of any rank but 0 is empty, unless it is one already.

    Raises:
        ConfigError: see `ServerFleet`; on rank 0.
    """
    if isinstance(servers, ServerFleet):
        return servers
    return ServerFleet(servers if get_rank(group) == 0 else (), probe_interval_s=probe_interval_s)
