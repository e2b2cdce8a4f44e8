"""Export a sharded model to a URL: the files of a Hugging Face folder, put into an object store by their owners.

    <url>/.exporting             from the first moment to the last: whose export it is and what it puts, as JSON
    <url>/model*.safetensors     streamed (`stream`), the same bytes as in a folder; never on a disk
    <url>/...                    index, tokenizer, generation config
    <url>/config.json            put last, once all of the others are there in their sizes

Stores have no rename. So an export counts when its ``config.json`` is there: nothing loads a model without it. What a
killed or failed one leaves is named by ``.exporting``, and removed by the next export to the same URL; nothing else
ever is. A URL has one writer at a time: whose marker is not there any more, because another export has begun, gives up.
How durable a file is once it is closed is the store's business, and so is trying parts of it again; opening, looking
up, removing and putting small files is tried several times.
"""

import json
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from ...utils.atomic_folder import as_write_error
from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size, rank_zero_decides
from ...utils.errors import CheckpointError, CheckpointExistsError, CheckpointWriteError, HoldfastError
from ...utils.files import walk_files
from ...utils.logging import get_logger
from ...utils.remote import RemoteFolder, without_secrets
from .name_mapping import stored_tensors
from .safetensors_layout import INDEX_NAME, Layout, WeightFile, encode_index
from .shard_ranges import Plan, plan_tensors
from .sidecars import WEIGHT_SUFFIXES, write_sidecars
from .stream import WeightStreaming

logger = get_logger(__name__)

MARKER_NAME = ".exporting"
_COMMIT_NAME = "config.json"
_MOST_FILE_BYTES, _LEAST_FILE_BYTES = 5 * 10**9, 500 * 10**6
_PART_BYTES, _MOST_PARTS = 16 << 20, 9000  # S3 takes 10,000 parts of a file


def export_to_url(
    model: PreTrainedModel,
    url: str,
    *,
    group: dist.ProcessGroup | None = None,
    gather_group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    processor: Any = None,
    base_model_path: str | os.PathLike[str] | None = None,
    max_shard_size_bytes: int | None = None,
) -> None:
    """Put a Hugging Face folder at ``url``; see `save_hf`, which calls this, for what is not said here.

    Args:
        url: of any fsspec backend.
        max_shard_size_bytes: None takes a share of a rank, though no more than 5 GB and no less than 500 MB: a file has
            one writer, so it takes files to write side by side.
    """
    started, rank, world_size = time.monotonic(), get_rank(group), get_world_size(group)
    with all_ranks_succeed(f"preparing {without_secrets(url)}", group), as_write_error(without_secrets(url)):
        remote = RemoteFolder(url, setting="path", error=CheckpointWriteError)
        stored, _ = stored_tensors(model)
        plan = plan_tensors(model, stored, rank, world_size, dtype)
        layout = plan.layout(max_shard_size_bytes or _share_bytes(plan, world_size), model.num_parameters())
        streaming = WeightStreaming(layout.files, model, plan, stored, group, gather_group)
        small: dict[str, bytes] = {}
        if rank == 0:
            small = _small_files(layout, model, dtype, tokenizer, processor, base_model_path)
    export = _Export(remote, layout, small)
    rank_zero_decides(export.begin, group)
    try:
        with all_ranks_succeed(f"writing {remote.url}", group), as_write_error(remote.url):
            streaming.run(export.open)
        rank_zero_decides(export.commit, group)
    except BaseException as error:
        if rank == 0:
            # Unless the ranks have agreed, one that is on its own may complete a file yet.
            export.undo(agreed=isinstance(error, HoldfastError))
        raise
    seconds = time.monotonic() - started
    logger.info("exported to %s: %d bytes of weights in %.1f s", remote.url, layout.total_bytes, seconds)


def _share_bytes(plan: Plan, world_size: int) -> int:
    total_bytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in plan.tensors)
    return min(max(-(-total_bytes // world_size), _LEAST_FILE_BYTES), _MOST_FILE_BYTES)


def _small_files(layout: Layout, model: PreTrainedModel, *sidecars: Any) -> dict[str, bytes]:
    """Everything but the weights, by name."""
    files = {} if layout.index is None else {INDEX_NAME: encode_index(layout.index)}
    with tempfile.TemporaryDirectory(prefix="holdfast-export-") as folder:
        write_sidecars(model, Path(folder), *sidecars)
        return files | {name: (Path(folder) / name).read_bytes() for name in walk_files(folder)}


class _Export:
    """What becomes of a URL. All but `open` is for rank 0.

    Args:
        remote: the folder at the URL.
        layout: of the weights.
        small: the other files, by name.
    """

    def __init__(self, remote: RemoteFolder, layout: Layout, small: Mapping[str, bytes]) -> None:
        self._remote, self._small, self._committed = remote, small, False
        self._sizes = {file.name: file.total_bytes for file in layout.files}
        self._sizes |= {name: len(data) for name, data in small.items()}
        self._marker = json.dumps({"export": uuid.uuid4().hex, "files": list(self._sizes)}, indent=1).encode()

    def begin(self) -> None:
        """Clear what a killed export left, and say what is to come.

        Raises:
            CheckpointExistsError: there is a model, or something that would be written over.
        """
        with as_write_error(self._remote.url):
            if self._remote.size(_COMMIT_NAME) is not None:
                raise CheckpointExistsError(
                    f"{self._remote.url} has a {_COMMIT_NAME}, so there is a model, which is never written over; "
                    "choose another path"
                )
            left = _marked(self._remote.read(MARKER_NAME))
            ours, cleared = ({PurePosixPath(name).parts[0] for name in names} for names in (self._sizes, left))
            present = set(self._remote.names()) - cleared
            if others := sorted(name for name in present if name in ours or name.endswith(WEIGHT_SUFFIXES)):
                raise CheckpointExistsError(
                    f"{self._remote.url} has {others[:5]}, which no unfinished export left there, and an export would "
                    "write over, or be taken for; remove them or choose another path"
                )
            if left:
                logger.warning("removing what an unfinished export left at %s: %d files", self._remote.url, len(left))
                self._remove(left)
            self._remote.put_bytes(MARKER_NAME, self._marker)

    def open(self, file: WeightFile) -> Any:
        """Open a weight file for writing; for the rank that owns it."""
        return self._remote.create(file.name, max(_PART_BYTES, -(-file.total_bytes // _MOST_PARTS)))

    def commit(self) -> None:
        """Put what is small, see that all is there, and make it count."""
        with as_write_error(self._remote.url):
            if not self._alone():
                raise CheckpointWriteError(
                    f"another export to {self._remote.url} has begun, and removed the files of this one; "
                    "give each a URL of its own"
                )
            for name, data in self._small.items():
                if name != _COMMIT_NAME:
                    self._remote.put_bytes(name, data)
            found = self._remote.sizes("")
            expected = [(name, size) for name, size in self._sizes.items() if name != _COMMIT_NAME]
            if lost := [(name, size) for name, size in expected if found.get(name) != size]:
                name, size = lost[0]
                raise CheckpointWriteError(
                    f"{self._remote.url}/{name} was put with {size} bytes, the store says {found.get(name, 'nothing')} "
                    f"({len(lost)} such files); nothing became visible"
                )
            self._remote.put_bytes(_COMMIT_NAME, self._small[_COMMIT_NAME])
        self._committed = True
        try:
            self._remote.remove_file(MARKER_NAME)
        except CheckpointError as error:
            logger.warning("%s is complete, but its %s stays: %s", self._remote.url, MARKER_NAME, error)

    def undo(self, agreed: bool) -> None:
        """Remove what was put, as far as the store lets us; the marker stays unless ``agreed`` that nobody goes on.

        What counts already stays: somebody may be reading it.
        """
        if self._committed:
            return
        try:
            if not self._alone():
                return
            self._remove(self._sizes)
            if agreed:
                self._remote.remove_file(MARKER_NAME)
        except (CheckpointError, OSError) as error:
            logger.warning("parts of a failed export stay at %s until the next one: %s", self._remote.url, error)

    def _alone(self) -> bool:
        """Whether the files at the URL are still those of this export."""
        return self._remote.read(MARKER_NAME) == self._marker

    def _remove(self, names: Iterable[str]) -> None:
        """The config first: nothing that is half removed looks complete."""
        for name in sorted(names, key=lambda name: name != _COMMIT_NAME):
            self._remote.remove_file(name)


def _marked(marker: bytes | None) -> list[str]:
    """The names in a marker, which comes from elsewhere: none that leads out of the folder, none if it is damaged."""
    try:
        names = [] if marker is None else [str(name) for name in json.loads(marker)["files"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [name for name in names if name and "" not in name.split("/") and not {".", ".."} & set(name.split("/"))]
