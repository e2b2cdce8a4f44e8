"""Published versions of the weights on disk: write, list and delete them.

A version is a folder ``v00000121`` with a manifest, in the format of Hugging Face or, for adapters alone, of PEFT. It
is renamed into place when all ranks have written it. A new version first removes newer versions, because they belong to
steps that a crash took back, and the leftovers of killed publishers. A folder has one writer at a time.
"""

import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.atomic_folder import staged_folder
from ...utils.distributed import all_ranks_succeed, gather_objects, get_rank, rank_zero_decides
from ...utils.files import as_write_error, remove_or_log
from ...utils.logging import get_logger
from ...utils.manifest import FileEntry, file_entries, write_entry, write_manifest
from ...utils.timing import timed
from ..api import EXPORT_DTYPES, HFExportOptions, WeightUpdateMeta, export_dtype
from .adapter_folder import WEIGHTS, write_adapters
from .save import write_hf

logger = get_logger(__name__)

_VERSION = re.compile(r"v(\d{8,})")
_MIN_FILE_BYTES = 64 << 20
"""Larger weights get one file per rank, so that servers read and check files in parallel."""


def version_path(root: str | os.PathLike[str], version: int) -> Path:
    """The folder of a version: ``<root>/v00000121``."""
    return Path(root) / f"v{version:08d}"


def published_versions(root: str | os.PathLike[str]) -> list[int]:
    """The complete versions under ``root``, oldest first. Empty if there is no such folder."""
    if not Path(root).is_dir():
        return []
    return sorted(int(match[1]) for entry in os.listdir(root) if (match := _VERSION.fullmatch(entry)))


def write_version(
    model: PreTrainedModel,
    meta: WeightUpdateMeta,
    version: int,
    group: dist.ProcessGroup | None = None,
    *,
    weights: bool = True,
    base_model_path: str | None = None,
    base_dtype: torch.dtype | None = None,
    extra_files: Mapping[str, bytes] | None = None,
) -> dict[str, float]:
    """Write the weights as ``version`` and remove the same version and newer ones. Every rank of ``group`` calls this.

    The arguments are those of `publish_weights`. The manifest of adapters names ``base_dtype`` and their own dtype,
    because a server computes in the dtype of their base. Without ``weights``, a version has only its manifest and small
    files, and only rank 0 needs to see the folder.

    Returns the seconds of ``write`` (gather, cast, digest, write, fsync) and ``commit`` (manifest, rename) here.
    """
    assert meta.path is not None, "the caller names a folder"
    final, facts = version_path(meta.path, version), {"weight_version": version}
    seconds: dict[str, float] = {}
    if meta.type == "adapter":
        base = next((name for name, dtype in EXPORT_DTYPES.items() if dtype == base_dtype), None)
        facts |= {"base_dtype": base, "dtype": meta.dtype}
    rank_zero_decides(lambda: _clear(final, version), group)
    with staged_folder(final, group) as staging:
        with timed(seconds, "write"):
            own = _write_files(model, staging, meta, group, base_model_path, base_dtype, weights)
        written = time.monotonic()
        with all_ranks_succeed(f"describing {final}", group), as_write_error(final):
            if extra_files and get_rank(group) == 0:
                own += [write_entry(staging, name, data) for name, data in extra_files.items()]
        entries = gather_objects(own, group)
        if get_rank(group) == 0:
            write_manifest(staging, [entry for rank in entries for entry in rank], facts)
    return seconds | {"commit": time.monotonic() - written}


def _write_files(
    model: PreTrainedModel,
    folder: Path,
    meta: WeightUpdateMeta,
    group: dist.ProcessGroup | None,
    base_model_path: str | None,
    base_dtype: torch.dtype | None,
    weights: bool,
) -> list[FileEntry]:
    if meta.type == "adapter":
        names = write_adapters(model, folder, HFExportOptions(export_dtype(meta.dtype, None)), group=group)
        with all_ranks_succeed(f"describing {folder}", group), as_write_error(folder):
            return file_entries(folder, names)
    options = HFExportOptions(export_dtype(meta.dtype, base_dtype), base_model_path=base_model_path)
    return write_hf(model, folder, options, group=group, share_bytes=_MIN_FILE_BYTES, weights=weights)


def holds_adapters(manifest: Mapping[str, Any]) -> bool:
    """Whether a published folder with this manifest holds adapters alone."""
    return WEIGHTS in manifest["files"]


def _clear(final: Path, version: int) -> None:
    root = final.parent
    with as_write_error(final):
        for pattern in (".staging-v*", ".retired-v*"):
            for leftover in root.glob(pattern):
                remove_or_log(leftover)
        for newer in [v for v in published_versions(root) if v >= version]:
            remove_or_log(version_path(root, newer))


def delete_old(root: str, keep: int, spare: Collection[Path] = ()) -> None:
    """Remove all versions except the ``keep`` newest and the folders in ``spare``. A failure is only logged."""
    try:
        old = published_versions(root)[:-keep]
    except OSError as error:
        logger.warning("cannot list %s to delete old versions: %s", root, error)
        return
    for path in [version_path(root, version) for version in old]:
        if path not in spare:
            remove_or_log(path)
