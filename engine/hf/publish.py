"""Publish versions of the weights to the inference servers: written to disk, announced, confirmed.

A version is a Hugging Face folder ``v00000121`` with a manifest, renamed into place when all ranks have written it.
Rank 0 then tells every server and takes its word for the version it serves; the other ranks wait as long as that takes.
Older versions go only after that, because a server may still be reading one; versions newer than the one published
are of steps that a crash took back, and go first, as does what a killed publisher left half-written. One job publishes
to a folder at a time.
"""

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.atomic_folder import as_write_error, staged_folder
from ...utils.distributed import (
    all_ranks_succeed,
    gather_objects,
    get_rank,
    rank_zero_decides,
    rank_zero_decides_slowly,
)
from ...utils.errors import PublishError
from ...utils.files import remove_or_log
from ...utils.logging import get_logger
from ...utils.manifest import file_entries, write_manifest
from ...utils.threads import on_daemon_thread
from ..api import HFExportOptions, InferenceServer, WeightUpdateMeta, export_dtype
from .write import write_hf

logger = get_logger(__name__)

_MIN_FILE_BYTES = 64 << 20
"""Larger weights are a file a rank, so that all ranks make digests, and servers read files side by side."""

_VERSION = re.compile(r"v(\d{8,})")


def version_path(root: str | os.PathLike[str], version: int) -> Path:
    """The folder of a version: ``<root>/v00000121``."""
    return Path(root) / f"v{version:08d}"


def published_versions(root: str | os.PathLike[str]) -> list[int]:
    """The complete versions under ``root``, oldest first; none when there is no such folder."""
    if not Path(root).is_dir():
        return []
    return sorted(int(match[1]) for entry in os.listdir(root) if (match := _VERSION.fullmatch(entry)))


def publish_weights(
    model: PreTrainedModel,
    meta: WeightUpdateMeta,
    version: int,
    servers: Sequence[InferenceServer],
    group: dist.ProcessGroup | None = None,
    base_model_path: str | None = None,
    base_dtype: torch.dtype | None = None,
) -> Path:
    """Write the weights as ``version``, have every server load them, and delete old versions; all ranks call it.

    Args:
        model: sharded model.
        meta: where to, and how many versions stay.
        version: what the servers must confirm.
        servers: told by rank 0, all at once; other ranks' are not used.
        group: control group.
        base_model_path: folder whose tokenizer and other files go along.
        base_dtype: what the weights are stored as when ``meta.dtype`` is None; None: each as it is.

    Raises:
        CheckpointWriteError: any rank could not write; no server was told.
        PublishError: a server confirmed another version, or none within ``meta.timeout_s``.
    """
    started = time.monotonic()
    final = version_path(meta.path, version)
    rank_zero_decides(lambda: _clear(final, version), group)
    with staged_folder(final, group) as staging:
        options = HFExportOptions(export_dtype(meta.dtype, base_dtype), base_model_path=base_model_path)
        names = write_hf(model, staging, options, group=group, share_bytes=_MIN_FILE_BYTES)
        with all_ranks_succeed(f"describing {final}", group), as_write_error(final):  # nobody gathers if one fails
            own = file_entries(staging, names)
        entries = gather_objects(own, group)
        if get_rank(group) == 0:
            write_manifest(staging, [entry for rank in entries for entry in rank], {"weight_version": version})
    rank_zero_decides_slowly(lambda: _tell(servers, final, version, meta.timeout_s), group)
    rank_zero_decides(lambda: _delete_old(meta.path, meta.keep), group)
    logger.info("published weight version %d to %s in %.3f s", version, final, time.monotonic() - started)
    return final


def _tell(servers: Sequence[InferenceServer], path: Path, version: int, timeout_s: float) -> None:
    told = [
        on_daemon_thread(partial(server.update_weights_from_disk, str(path), version), "weight update")
        for server in servers
    ]
    wait(told, timeout_s, return_when=FIRST_EXCEPTION)
    for server, answer in zip(servers, told, strict=True):
        if answer.done() and answer.result() != version:  # or raises what the server raised
            served = answer.result()
            raise PublishError(f"{server!r} serves version {served!r} after it was told to load version {version}")
    if silent := [server for server, answer in zip(servers, told, strict=True) if not answer.done()]:
        raise PublishError(f"{silent[0]!r} did not load {path} within {timeout_s:g} s ({len(silent)} silent)")


def _clear(final: Path, version: int) -> None:
    """Remove ``version`` and what is newer, and what killed publishers left."""
    root = final.parent
    with as_write_error(final):
        for pattern in (".staging-v*", ".retired-v*"):
            for leftover in root.glob(pattern):
                remove_or_log(leftover)
        for newer in [v for v in published_versions(root) if v >= version]:
            remove_or_log(version_path(root, newer))


def _delete_old(root: str, keep: int) -> None:
    """Remove all but the newest versions. What cannot be removed, or listed, is left: it costs space, not the run."""
    try:
        old = published_versions(root)[:-keep]
    except OSError as error:
        logger.warning("cannot list %s to delete old versions: %s", root, error)
        return
    for version in old:
        remove_or_log(version_path(root, version))
