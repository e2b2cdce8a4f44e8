"""Published versions of the weights on disk: write, list and delete them.

A version is a folder ``v00000121`` with a manifest, in the format of Hugging Face or, for adapters
alone, of PEFT. It is renamed into place when all ranks have written it. A new version first removes
newer versions, because they belong to steps that a crash took back, and the leftovers of killed
publishers (`clear_from`). The caller sees to it that nobody reads them. A folder has one writer at
a time.
"""

import os
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ...utils.atomic_folder import staged_folder
from ...utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    gather_objects,
    get_rank,
    rank_zero_decides,
)
from ...utils.errors import CheckpointError
from ...utils.files import StrPath, as_write_error, remove_or_log
from ...utils.logging import get_logger
from ...utils.manifest import (
    DELTA_FILES,
    DELTA_NAME,
    FileEntry,
    Manifest,
    file_entries,
    manifest_digest,
    read_manifest,
    verify_folder,
    write_entry,
    write_manifest,
)
from ...utils.timing import timed
from ..api import EXPORT_DTYPES, HFExportOptions, WeightUpdateMeta, export_dtype
from .adapter_folder import WEIGHTS, write_adapters
from .deltas import (
    DeltaPublication,
    PublishedCopy,
    base_of,
    holds_delta_alone,
    made_from,
    version_path,
)
from .safetensors_layout import Layout
from .save import write_hf
from .weight_files import WeightWriter

logger = get_logger(__name__)

AMPLIFIED_PREFIX = ".amplified-"
"""Begins the name of a folder that a client makes beside a version of adapters, while a server
shows their effect.
"""
_VERSION = re.compile(r"v(\d{8,})")
_MIN_FILE_BYTES = 64 << 20
"""Larger weights get one file per rank, so that servers read and check files in parallel."""


def published_versions(root: StrPath) -> list[int]:
    """The complete versions under ``root``, oldest first. Empty if there is no such folder."""
    if not Path(root).is_dir():
        return []
    matches = map(_VERSION.fullmatch, os.listdir(root))
    return sorted(int(match[1]) for match in matches if match)


@dataclass(frozen=True)
class WrittenVersion:
    """How a version was written.

    Attributes:
        seconds: seconds of each phase on this rank: ``write`` (gather, cast, digest, write, fsync),
            in it ``compare`` (find and encode changes), and ``commit`` (manifest, rename).
        figures: ``bytes`` that were written, ``full_bytes`` of a version with all weights,
            ``delta`` (1 if the version holds changes alone), and ``changed``, the fraction of
            elements that changed, if they were compared.
    """

    seconds: Mapping[str, float]
    figures: Mapping[str, float]


def write_version(
    model: PreTrainedModel,
    meta: WeightUpdateMeta,
    version: int,
    group: RankGroup = None,
    *,
    weights: bool = True,
    base_model_path: str | None = None,
    base_dtype: torch.dtype | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    copy: PublishedCopy | None = None,
) -> WrittenVersion:
    """Write the weights as ``version`` and remove the same version and newer ones. Every rank of
    ``group`` calls this.

    The arguments are those of `publish_weights`. The manifest of adapters names ``base_dtype`` and
    their own dtype, because a server computes in the dtype of their base. Without ``weights``, a
    version has only its manifest and small files, and only rank 0 needs to see the folder.
    """
    assert meta.path is not None, "the caller names a folder"
    final = version_path(meta.path, version)
    delta = None
    if meta.delta:
        kept = copy or PublishedCopy()
        delta = DeltaPublication(kept, final, version, meta.anchor_interval, group)
    elif copy is not None and copy.base is not None and copy.base.root == final.parent:
        # A later delta would be from a version before this one, which may be deleted by then.
        copy.begin()

    facts: dict[str, Any] = {"weight_version": version}
    if meta.type == "adapter":
        base = next((name for name, dtype in EXPORT_DTYPES.items() if dtype == base_dtype), None)
        facts |= {"base_dtype": base, "dtype": meta.dtype}

    seconds = {}
    rank_zero_decides(lambda: clear_from(final.parent, version), group)
    with staged_folder(final, group) as staging:
        with timed(seconds, "write"):
            own, changes = _write_files(
                model,
                staging,
                meta,
                group,
                base_model_path,
                base_dtype,
                delta,
                weights,
            )
        written = time.monotonic()
        with all_ranks_succeed(f"describing {final}", group), as_write_error(final):
            if extra_files and get_rank(group) == 0:
                own += [write_entry(staging, name, data) for name, data in extra_files.items()]

        # Rank 0 writes the manifest for all.
        by_rank = gather_objects((own, changes), group)
        files = [file for theirs, _ in by_rank for file in theirs]
        all_changes = [change for _, theirs in by_rank for change in theirs]

        def seal() -> tuple[str, int]:
            delta_bytes = 0
            if delta is not None:
                delta_bytes = delta.seal(files, all_changes)
            write_manifest(staging, files, facts)
            return f"{version}-{manifest_digest(staging)}", delta_bytes

        label, delta_bytes = rank_zero_decides(seal, group)

    full_bytes = sum(file.bytes for file in files)
    small_bytes = sum(file.bytes for file in files if not file.pieces)
    figures = {
        "bytes": full_bytes if weights else small_bytes,
        "full_bytes": full_bytes,
        "delta": 0.0,
    }
    if delta is not None:
        delta.commit(label)
        seconds["compare"] = delta.compare_s
        figures |= delta.figures
        figures["bytes"] = delta_bytes
        if delta.full:
            figures["bytes"] += full_bytes
    seconds["commit"] = time.monotonic() - written
    return WrittenVersion(seconds, figures)


def _write_files(
    model: PreTrainedModel,
    folder: Path,
    meta: WeightUpdateMeta,
    group: RankGroup,
    base_model_path: str | None,
    base_dtype: torch.dtype | None,
    delta: DeltaPublication | None,
    weights: bool,
) -> tuple[list[FileEntry], list[FileEntry]]:
    """Entries of the files that this rank describes, and of its changes."""
    if meta.type == "adapter":
        options = HFExportOptions(export_dtype(meta.dtype, None))
        names = write_adapters(model, folder, options, group=group)
        with all_ranks_succeed(f"describing {folder}", group), as_write_error(folder):
            return file_entries(folder, names), []

    def open_writer(place: Path, layout: Layout) -> WeightWriter:
        if delta is not None:
            return delta.open(place, layout)
        return WeightWriter(place if weights else None)

    entries = write_hf(
        model,
        folder,
        HFExportOptions(export_dtype(meta.dtype, base_dtype), base_model_path=base_model_path),
        group=group,
        share_bytes=_MIN_FILE_BYTES,
        open_writer=open_writer,
    )
    changes = []
    if delta is not None:
        changes = delta.settle()
    return entries, changes


def holds_adapters(manifest: Manifest) -> bool:
    """Whether a published folder with this manifest holds adapters alone."""
    return WEIGHTS in manifest["files"]


def holds_all_of(folder: Path, digest: str) -> bool:
    """Whether a published folder has the manifest with this digest, and all bytes that it lists."""
    try:
        if manifest_digest(folder) != digest:
            return False
        verify_folder(folder)
    except (CheckpointError, OSError):
        return False
    return True


def clear_from(root: Path, version: int) -> None:
    """Remove ``version``, newer ones, and what killed publishers left. CheckpointWriteError if the
    file system refuses.
    """
    with as_write_error(version_path(root, version)):
        for pattern in (".staging-v*", ".retired-v*"):
            for leftover in root.glob(pattern):
                remove_or_log(leftover)
        for newer in published_versions(root):
            if newer >= version:
                remove_or_log(version_path(root, newer))

        # A server may read these while it loads the version beside them.
        for made in root.glob(f"{AMPLIFIED_PREFIX}v*"):
            name, _, _ = made.name.removeprefix(AMPLIFIED_PREFIX).rpartition("-")
            if not (root / name).exists():
                remove_or_log(made)


def delete_old(root: str, keep: int, spare: Collection[Path] = ()) -> None:
    """Remove old versions except the ``keep`` newest and the folders in ``spare``. A failure is
    only logged.

    The versions that one of these is made from stay, too. Of the others, changes go before what
    they are made from.
    """
    try:
        versions = published_versions(root)
        used = {version_path(root, version) for version in versions[-keep:]} | set(spare)
        needed = {folder for path in used for folder in made_from(path)}
    except OSError as error:
        logger.warning("cannot list %s to delete old versions: %s", root, error)
        return
    stay = needed | set(spare)
    for version in reversed(versions[:-1]):
        path = version_path(root, version)
        if path not in stay:
            remove_or_log(path)


def published_file(folder: StrPath, name: str) -> Path:
    """Path of a small file of a published version, which may be in a version before if this one
    holds changes alone.

    If the version has no such file, the path where it would be.
    """
    here = Path(folder)
    if not holds_delta_alone(here) or name not in read_manifest(here)["files"]:
        return here / name
    while holds_delta_alone(here):
        changed = here / DELTA_NAME / DELTA_FILES / name
        if changed.exists():
            return changed
        here = base_of(here)
    return here / name
