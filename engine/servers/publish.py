"""Publish weights to inference servers: write a version to disk, have the servers load it, delete
old versions.

A version is complete on disk (`write_version`) before rank 0 tells all servers at once. The other
ranks wait meanwhile. Old versions are deleted after enough servers have confirmed the new one, and
a folder that a server reads stays. Also if its version is published again: the same weights are not
written a second time, and others only after the server has ended.

With type ``"xccl"`` all ranks gather the weights while rank 0 sends them (`_send`). Before that,
their digests are computed and the manifest is written, so that a version has the same label
whatever carries it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    get_rank,
    rank_zero_decides,
    rank_zero_decides_slowly,
)
from ...utils.errors import ConfigError
from ...utils.files import remove_or_log
from ...utils.logging import get_logger
from ...utils.manifest import manifest_digest
from ...utils.threads import on_daemon_thread
from ...utils.timing import timed
from ..api import HFExportOptions, WeightUpdateMeta, export_dtype
from ..hf.adapter_folder import require_adapters
from ..hf.buckets import WeightGatherer
from ..hf.deltas import PublishedCopy
from ..hf.versions import (
    WrittenVersion,
    clear_from,
    delete_old,
    holds_all_of,
    version_path,
    write_version,
)
from .api import InferenceServer, ServerReport, server_stats
from .content_check import PROBE_NAME, WeightsProbe, compute_weights_probe
from .fleet import ServerFleet
from .stream import WeightStream

logger = get_logger(__name__)


@dataclass(frozen=True)
class PublishedWeights:
    """Result of a publication.

    Attributes:
        path, version: folder and number of the version. If `WeightUpdateMeta` has no ``path``, a
            temporary folder of rank 0 without weights.
        seconds: seconds of each phase on this rank: ``write`` (gather, cast, digest, write, fsync),
            ``commit`` (manifest, rename), ``tell`` (until enough servers confirmed) and ``total``.
            With deltas, ``write`` includes ``compare``. With type ``"xccl"``, ``tell`` includes
            ``gather`` (cast, collect on rank 0). An engine adds ``probe``
            (`compute_weights_probe`).
        servers: report on each server, on every rank.
        figures: see `WrittenVersion`.
    """

    path: Path
    version: int
    seconds: Mapping[str, float]
    servers: tuple[ServerReport, ...]
    figures: Mapping[str, float] = field(default_factory=dict)

    def stats(self) -> dict[str, float]:
        """Statistics: ``publish_<phase>_s``, ``publish_<figure>`` and `server_stats`."""
        stats = {f"publish_{phase}_s": seconds for phase, seconds in self.seconds.items()}
        stats |= {f"publish_{name}": figure for name, figure in self.figures.items()}
        return stats | server_stats(self.servers)


def publish_weights(
    model: PreTrainedModel,
    meta: WeightUpdateMeta,
    version: int,
    servers: Sequence[InferenceServer] | ServerFleet,
    group: RankGroup = None,
    base_model_path: str | None = None,
    base_dtype: torch.dtype | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    copy: PublishedCopy | None = None,
) -> PublishedWeights:
    """Write the weights as ``version``, have the servers load them, and delete old versions. All
    ranks call it.

        servers = ServerFleet([VLLMServer("http://10.0.0.5:8000")], min_servers=1)
        meta = WeightUpdateMeta("disk", "/shared/weights")
        published = publish_weights(model, meta, version=step, servers=servers)

    Args:
        model: sharded model.
        meta: folder, type and dtype of the publication, and how many versions to keep.
        version: version that the servers must confirm.
        servers: servers of rank 0. Other ranks' are ignored. Without a fleet, no thread updates a
            server that missed the version.
        group: control group.
        base_model_path: folder whose tokenizer and other files are copied.
        base_dtype: stored dtype if ``meta.dtype`` is None. None: the dtype of each parameter.
        extra_files: name -> contents of additional files under the manifest. Rank 0's are written.
        copy: with ``meta.delta``, the object that this rank passed to the publication before. An
            engine keeps it. None: all weights are written.

    Raises:
        CheckpointWriteError: a rank could not write. No server was told.
        ConfigError: see `ServerFleet.update`. If a server does not support ``meta.type`` or has no
            mirror for ``meta.delta``, the servers sleep, there are none to send weights to, or the
            model has no adapters that can be published alone, nothing was written.
        PublishError: a server is still loading this version or a newer one, which would be
            replaced.
        PublishError, WorkerLost: see `ServerFleet.update`. Raised on every rank.
    """
    seconds: dict[str, float] = {}
    with timed(seconds, "total"):
        # Refuse what cannot succeed before anything is written.
        with all_ranks_succeed("naming the inference servers", group):
            fleet = open_fleet(servers, group, probe_interval_s=None)
            if meta.type == "adapter":
                require_adapters(model)
            fleet.require_support("delta" if meta.delta else meta.type)
            fleet.require_awake()
            if meta.type == "xccl" and get_rank(group) == 0 and not fleet.may_get_servers:
                raise ConfigError(
                    "WeightUpdateMeta type 'xccl' sends the weights to the servers of rank 0, "
                    "which has none; give it their clients, or publish with type 'disk'"
                )

        # Weights are sent to the servers there are, so some must have started.
        if meta.type == "xccl":
            rank_zero_decides_slowly(lambda: fleet.await_start(meta.min_servers), group)

        # Write the version once no server reads what is removed for it.
        root = meta.path or rank_zero_decides(fleet.scratch_folder, group)
        path = version_path(root, version)
        write = partial(
            write_version,
            model,
            version=version,
            group=group,
            base_model_path=base_model_path,
            base_dtype=base_dtype,
            extra_files=extra_files,
        )
        written = _describe_unchanged(write, meta, version, fleet, group)
        first_removed = version if written is None else version + 1
        rank_zero_decides_slowly(lambda: fleet.withdraw(first_removed, meta.timeout_s), group)
        if written is None:
            sent_only = meta.path is None
            written = write(meta=replace(meta, path=root), weights=not sent_only, copy=copy)
        else:
            rank_zero_decides(lambda: clear_from(Path(root), first_removed), group)
            if copy is not None:
                copy.begin()  # it may be of a version that was removed
        seconds |= written.seconds

        # Have the servers load it, or send it to them.
        try:
            with timed(seconds, "tell"):
                if meta.type == "xccl":
                    reports = _send(model, meta, version, path, fleet, group, base_dtype, seconds)
                else:
                    reports = rank_zero_decides_slowly(
                        lambda: fleet.update(path, version, meta.timeout_s, meta.min_servers), group
                    )
        except Exception:
            # The reason may be a version that no mirror can make, and then it can make none from it
            # either.
            if meta.delta and copy is not None and copy.base is not None:
                copy.begin()
                if get_rank(group) == 0:
                    logger.warning(
                        "weight version %d was not confirmed, so the next one gets all weights, "
                        "not changes",
                        version,
                    )
            raise

        # Old versions go only now, so that there is always one that servers can load.
        rank_zero_decides(lambda: delete_old(root, meta.keep, fleet.folders_in_use()), group)

    logger.info("published weight version %d to %s in %.3f s", version, path, seconds["total"])
    return PublishedWeights(path, version, seconds, tuple(reports), written.figures)


def _describe_unchanged(
    write: Callable[..., WrittenVersion],
    meta: WeightUpdateMeta,
    version: int,
    fleet: ServerFleet,
    group: RankGroup,
) -> WrittenVersion | None:
    """Describe weights that are published again without writing them. None if the folder of the
    version holds others, or is damaged.

    A folder with exactly these weights stays, because a server or a mirror may still be reading it,
    perhaps for a process that was killed or after its request was given up. Changes alone are
    replaced, because mirrors may fail to make the weights from them.
    """
    if meta.path is None or meta.delta:
        return None
    path = version_path(meta.path, version)
    if not rank_zero_decides(path.is_dir, group):
        return None

    # The manifest says which weights these are, to the last bit.
    scratch = rank_zero_decides(fleet.scratch_folder, group)
    here = Path(scratch, "described")
    described = write(meta=replace(meta, path=str(here)), weights=False)

    def is_unchanged() -> bool:
        digest = manifest_digest(version_path(here, version))
        remove_or_log(here)
        return holds_all_of(path, digest)

    if not rank_zero_decides_slowly(is_unchanged, group):
        return None
    return replace(described, figures={**described.figures, "bytes": 0.0})


def _send(
    model: PreTrainedModel,
    meta: WeightUpdateMeta,
    version: int,
    path: Path,
    fleet: ServerFleet,
    group: RankGroup,
    base_dtype: torch.dtype | None,
    seconds: dict[str, float],
) -> list[ServerReport]:
    """Gather the weights on rank 0, bucket by bucket, while its threads send them to the servers.

    Before each bucket, rank 0 waits for a free buffer and tells the other ranks that they wait, so
    no collective waits for a server. When nobody reads any more, all ranks stop together.
    """
    # All ranks cut the weights into the same buckets.
    options = HFExportOptions(export_dtype(meta.dtype, base_dtype))
    gatherer = WeightGatherer(model, options, meta.weight_chunked_mem_mb << 20, group)

    # On rank 0, a thread tells the servers of the update. Theirs then wait for the first bucket.
    stream: WeightStream | None = None
    update_result: Future[list[ServerReport]] = Future()
    if get_rank(group) == 0:
        stream = WeightStream(gatherer.buckets, meta.timeout_s, pinned=gatherer.on_gpu)
        update = partial(
            fleet.update, path, version, meta.timeout_s, meta.min_servers, stream=stream
        )
        update_result = on_daemon_thread(update, "weight update")
        update_result.add_done_callback(lambda _: stream.end("the update is over"))

    try:
        for bucket in gatherer.buckets:
            # Rank 0 waits for a free buffer, and stops all ranks if no server reads any more.
            goes_on = rank_zero_decides_slowly(
                lambda: stream is not None and stream.make_room(), group
            )
            if not goes_on:
                break

            # All ranks send their parts of the bucket to rank 0, which has a buffer for it.
            with timed(seconds, "gather"):
                target = None if stream is None else stream.target(bucket)
                gatherer.gather(bucket, target)

            # Its threads send the bucket to the servers while the next one is gathered.
            if stream is not None:
                stream.put(bucket)

    # An error here ends the update on all servers. It is raised when they have answered.
    except BaseException as error:
        if stream is not None:
            stream.end(f"the trainers failed: {type(error).__name__}: {error}")
            if isinstance(error, Exception):  # Ctrl-C waits for no server
                wait([update_result], meta.timeout_s)
        raise

    # The result is that of the fleet.
    return rank_zero_decides_slowly(update_result.result, group)


def open_fleet(
    servers: Sequence[InferenceServer] | ServerFleet,
    group: RankGroup,
    probe_interval_s: float | None = 5.0,
) -> ServerFleet:
    """Return ``servers`` if it is a fleet. Else make a fleet, which is empty on all ranks but 0."""
    if isinstance(servers, ServerFleet):
        return servers
    if get_rank(group) != 0:
        servers = ()
    return ServerFleet(servers, probe_interval_s=probe_interval_s)


class ServerConnection:
    """The servers of an engine. It closes the fleet that it makes from single servers, and never a
    given fleet.
    """

    def __init__(self) -> None:
        self._servers: Sequence[InferenceServer] | ServerFleet = ()
        self._own: ServerFleet | None = None
        self._meta: WeightUpdateMeta | None = None
        self._offloaded_probe: WeightsProbe | None = None  # of offloaded weights
        self._copy = PublishedCopy()

    def connect(
        self, servers: Sequence[InferenceServer] | ServerFleet, meta: WeightUpdateMeta
    ) -> None:
        """Publish to ``servers`` as ``meta`` says, from now on."""
        self.close()
        self._servers = servers
        self._meta = meta

    def publish(
        self, engine: Any, model: PreTrainedModel, meta: WeightUpdateMeta | None
    ) -> PublishedWeights:
        """Publish ``model``, the weights of an `FSDPEngine`. ``meta`` replaces the one of
        `connect`.

        If a server checks contents, the folder gets a `WeightsProbe`, which costs one forward. The
        one of an offloaded engine is from `before_offload`.
        """
        meta = self.meta_for(meta)
        version = engine.get_version() if meta.version is None else meta.version
        fleet = self._open(engine.control_group)

        # The probe goes into the folder, and needs the model on its device.
        seconds: dict[str, float] = {}
        with timed(seconds, "probe"):
            if "weights" in engine.offloaded:
                probe = self._offloaded_probe
            else:
                probe = self._compute_probe(engine, fleet)
        extra_files = {} if probe is None else {PROBE_NAME: probe.encode()}

        done = publish_weights(
            model,
            meta,
            version,
            fleet,
            engine.control_group,
            base_model_path=str(engine.model_folder),
            base_dtype=engine.base_dtype,
            extra_files=extra_files,
            copy=self._copy,
        )
        total_s = seconds["probe"] + done.seconds["total"]
        return replace(done, seconds={**seconds, **done.seconds, "total": total_s})

    def meta_for(
        self, meta: WeightUpdateMeta | None, fleet: ServerFleet | None = None
    ) -> WeightUpdateMeta:
        """``meta`` or the one of `connect`. ConfigError if there is none, or ``fleet`` is not
        connected.
        """
        if fleet is not None and self._servers is not fleet:
            raise ConfigError(
                "this fleet is not the one that the engine publishes to; call connect_engine with "
                "it first"
            )
        meta = meta or self._meta
        if meta is None:
            raise ConfigError(
                "update_weights has no WeightUpdateMeta; pass one or call connect_engine first"
            )
        return meta

    def before_offload(self, engine: Any) -> None:
        """Compute the probe for a publication of the weights while they are offloaded, if servers
        are connected.
        """
        probe = None
        if self._meta is not None:
            fleet = self._open(engine.control_group)
            probe = self._compute_probe(engine, fleet)
        self._offloaded_probe = probe

    def _open(self, group: dist.ProcessGroup) -> ServerFleet:
        with all_ranks_succeed("connecting the inference servers", group):
            fleet = self._own or open_fleet(self._servers, group)
        self._own = None if fleet is self._servers else fleet
        return fleet

    def _compute_probe(self, engine: Any, fleet: ServerFleet) -> WeightsProbe | None:
        wanted = rank_zero_decides(fleet.may_check_content, engine.control_group)
        return compute_weights_probe(engine) if wanted else None

    def close(self) -> None:
        """Disconnect from the servers. A fleet of the user goes on."""
        if self._own is not None:
            self._own.close()
        self._own = None
        self._servers = ()
