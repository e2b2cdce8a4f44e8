"""The folder of the initial model: a local one, or a snapshot of a model on the Hugging Face hub.

A model on the hub is pinned first: rank 0 looks up the commit of the revision, and every rank takes
that commit, even if others push meanwhile. One rank per node downloads it into the cache of
`huggingface_hub`, and the others read it there. ``HF_ENDPOINT``, ``HF_HOME``, ``HF_TOKEN`` and
``HF_HUB_OFFLINE`` work as usual: offline, or if the hub cannot be reached, a complete revision in
the cache is used.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..utils.compat.transformers_private import commit_of
from ..utils.distributed import (
    RankGroup,
    all_ranks_succeed,
    all_ranks_succeed_slowly,
    any_rank,
    gather_objects,
    get_rank,
    rank_zero_decides,
)
from ..utils.errors import ConfigError
from ..utils.files import bytes_digest
from ..utils.logging import get_logger
from .config import TrainEngineConfig

logger = get_logger(__name__)

_OTHER_FORMATS = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.ot",
]
_OTHER_FILES = ["*/*", "consolidated*.safetensors", ".*", *_OTHER_FORMATS]


def require_model_folder(path: str) -> Path:
    """Return ``path`` if it is a local folder of a Hugging Face model, else raise ConfigError."""
    if not path or not os.path.isfile(
        os.path.join(path, "config.json")
    ):  # pathlib's raises OSError
        raise ConfigError(
            f"config key 'path' is {path!r}; expected a folder with the config.json of a Hugging "
            "Face model, or the id of a model on the hub ('Qwen/Qwen3-0.6B')"
        )
    return Path(path)


def read_raw_config(folder: Path) -> dict[str, Any]:
    """The unchanged ``config.json`` of a folder. Empty if there is none, or if it is not a JSON
    object.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def index_digest(folder: Path) -> str | None:
    """Digest of the index of a folder, or of the header of its one file. None if it has neither.

    It identifies which weights are in which file.
    """
    for name in ("model.safetensors.index.json", "model.safetensors"):
        try:
            with open(folder / name, "rb") as file:
                n_bytes = -1 if name.endswith(".json") else int.from_bytes(file.read(8), "little")
                return bytes_digest(file.read(n_bytes))
        except FileNotFoundError:
            continue
    return None


def find_model_folder(config: TrainEngineConfig, group: RankGroup = None) -> Path:
    """The local folder of the model at ``config.path``, downloaded if necessary. Every rank of
    ``group`` calls this.

    Raises ConfigError if ``path`` is neither a folder with a ``config.json`` nor a model on the hub
    (in the cache if offline), or if a local folder has a ``revision``, and PeerError if only other
    ranks failed.
    """
    path = config.path
    if not _is_on_hub(path, group):
        with all_ranks_succeed(f"finding the model at {path!r}", group):
            if config.revision is not None:
                raise ConfigError(
                    f"config key 'revision' is {config.revision!r}, but 'path' is a local folder: "
                    f"{path}"
                )
            return require_model_folder(path)
    ignored = [*_OTHER_FILES, *([] if config.trust_remote_code else ["*.py"])]
    if config.init_from_scratch:
        ignored.append("*.safetensors")
    commit = rank_zero_decides(lambda: fetch_config(path, config.revision).name, group)
    downloading = is_first_of_its_node(group)
    all_ranks_succeed_slowly(
        f"downloading {path}",
        lambda: downloading and _from_hub(path, commit, ignore_patterns=ignored),
        group,
    )
    with all_ranks_succeed(f"finding {path} in the cache", group):
        folder = _from_hub(path, commit, ignore_patterns=ignored, local_files_only=True)
    if get_rank(group) == 0:
        logger.info("%s is %s", path, folder)
    return folder


def fetch_config(path: str, revision: str | None = None) -> Path:
    """Snapshot in the cache with the ``config.json`` of a model on the hub. Raises ConfigError if
    there is none.
    """
    return _from_hub(path, revision, allow_patterns=["config.json"])


def find_source_folder(config: Any) -> Path | None:
    """The local folder, or the snapshot in the cache of the hub, that a model was loaded from.
    Downloads nothing.

    ``config`` is the config of the model. None if it names no folder, or the folder is gone.
    """
    path = getattr(config, "name_or_path", None)
    if not isinstance(path, str) or not path:
        return None
    if os.path.isdir(path):
        return Path(path)
    try:
        return Path(snapshot_download(path, revision=commit_of(config), local_files_only=True))
    except (OSError, ValueError):  # as in `_from_hub`
        return None


def _is_on_hub(path: str, group: RankGroup) -> bool:
    """Whether ``path`` is the id of a model on the hub. A folder on any rank is a folder for all
    ranks.
    """
    if any_rank(os.path.exists(path), group):  # pathlib's may raise: the others would wait
        return False
    try:
        validate_repo_id(path)
    except HFValidationError:
        return False
    return bool(path)


def _from_hub(path: str, revision: str | None, **options: object) -> Path:
    try:
        return Path(snapshot_download(path, revision=revision, **options))  # type: ignore[arg-type]
    except (OSError, ValueError) as error:  # an OSError: every error of the hub's and the cache's
        reason = str(error).strip().splitlines()[0]
        revised = "" if revision is None else f" (revision {revision})"
        raise ConfigError(
            f"config key 'path' is {path!r}{revised}: there is no such folder, and no such model "
            f"could be had from {constants.ENDPOINT} or the cache {constants.HF_HUB_CACHE}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def is_first_of_its_node(group: RankGroup) -> bool:
    """Whether no lower rank uses the same cache on the same host."""
    caches = gather_objects((socket.gethostname(), str(constants.HF_HUB_CACHE)), group)
    return caches.index(caches[get_rank(group)]) == get_rank(group)
