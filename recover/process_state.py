"""What one process holds besides its engines: its generators and the user's objects, as one file.

``state/rank_00000.pt`` (and ``state/driver.pt`` under Ray) holds tensors and plain values that torch loads with
``weights_only``. That is checked when it is written: an object whose state could not be read back fails the snapshot,
not the recovery.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine.api import Stateful
from ..utils.distributed import get_rank
from ..utils.errors import CheckpointCorruptError
from ..utils.logging import get_logger
from ..utils.manifest import FileEntry, write_entry
from ..utils.rng import capture_rng, check_rng, derive_rng, restore_rng, rng_digest
from ..utils.safe_torch import pack_plain, read_plain, unpack_plain

logger = get_logger(__name__)

DRIVER_STATE = "state/driver.pt"


def rank_state_name(rank: int) -> str:
    """``state/rank_00001.pt``."""
    return f"state/rank_{rank:05d}.pt"


def capture_process(stateful: Mapping[str, Stateful]) -> tuple[bytes, str]:
    """The generators of this process and its user objects, as they are now, as a file holds them; and the digest of the
    former.

    Raises:
        ConfigError: an object's state could not be read back.
    """
    user = {key: pack_plain(f"state of {key!r}", thing.state_dict()) for key, thing in stateful.items()}
    rng = capture_rng()
    return pack_plain("generators", {"rng": rng, "user": user}), rng_digest(rng)


def write_process(folder: str | os.PathLike[str], name: str, state: bytes) -> FileEntry:
    """Write what `capture_process` returned as ``<folder>/<name>``."""
    (Path(folder) / name).parent.mkdir(exist_ok=True)
    return write_entry(folder, name, state)


class ProcessState:
    """What `capture_process` took, read back but not put back yet.

    A process that the saved run did not have (a new rank; a driver after torchrun, or ranks after a driver) takes a
    user object's state from rank 0, else from the driver, and derives its generators from those of rank 0. A generation
    that was converted may have none at all: everything stays as it is then.
    """

    def __init__(self, own: Path, sources: Mapping[Path, dict[str, Any]]) -> None:
        self._own, self._sources = own, sources

    @classmethod
    def read(cls, generation: Path, name: str) -> "ProcessState":
        """Read the state of the process whose file is ``name``, and of those that may stand in for it.

        Raises:
            CheckpointCorruptError: a file is not what `capture_process` makes.
        """
        own = generation / name
        files = [own, generation / rank_state_name(0), generation / DRIVER_STATE]
        return cls(own, {path: _read_process_file(path) for path in dict.fromkeys(files) if path.exists()})

    def restore(self, stateful: Mapping[str, Stateful]) -> str | None:
        """Put user objects back, then the generators.

        Returns:
            their digest; None when they had to be derived, or when this process has other CUDA devices than it was
            saved with, whose generators stay as they are.
        """
        first = next(iter(self._sources), None)
        if first is None:
            for key in sorted(stateful):
                logger.warning("%s has no state for %r; it starts anew", self._own.parents[1], key)
            return None
        for key, thing in sorted(stateful.items()):
            source = next((path for path, state in self._sources.items() if key in state["user"]), None)
            if source is None:
                logger.warning("%s has no state for %r; it starts anew", self._own.parents[1], key)
            else:
                thing.load_state_dict(self._sources[source]["user"][key])
        for key in sorted(self._sources[first]["user"].keys() - stateful.keys()):
            logger.warning("%s has a state for %r, which nothing is registered for here; it is ignored", first, key)
        if self._own in self._sources:
            saved = self._sources[self._own]["rng"]
            restore_rng(saved)
            now = capture_rng()
            same_devices = {name: rows.shape for name, rows in saved.items()} == {n: t.shape for n, t in now.items()}
            return rng_digest(now) if same_devices else None
        restore_rng(derive_rng(self._sources[first]["rng"], get_rank()))
        return None


def _read_process_file(path: Path) -> dict[str, Any]:
    state = read_plain(path)
    parts = [state.get("rng"), state.get("user")] if isinstance(state, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise CheckpointCorruptError(f"{path} is not the state of a process; expected dicts 'rng' and 'user'")
    check_rng(state["rng"])
    return state | {"user": {key: unpack_plain(data, f"{path}: {key}") for key, data in state["user"].items()}}
