"""Read back the state of one process, its generators and user objects, from a generation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...engine.api import Stateful
from ...utils.distributed import get_rank
from ...utils.errors import CheckpointCorruptError
from ...utils.logging import get_logger
from ...utils.rng import capture_rng, check_rng, derive_rng, restore_rng, rng_digest
from ...utils.safe_torch import read_plain, unpack_plain
from ..info import DRIVER_STATE, rank_state_name

logger = get_logger(__name__)


class ProcessState:
    """The state of a process that was read and not yet restored.

    A process that the saved run did not have (a new rank, a driver after torchrun, or ranks after a driver) takes the
    state of a user object from rank 0, else from the driver, and derives its generators from those of rank 0. A
    converted generation may have no such state at all. Then everything stays as it is.
    """

    def __init__(self, own: Path, sources: Mapping[Path, dict[str, Any]]) -> None:
        self._own, self._sources = own, sources

    @classmethod
    def read(cls, generation: Path, name: str) -> "ProcessState":
        """Read the file ``name`` of this process, and the files of rank 0 and the driver, which may stand in for it.

        Raises:
            CheckpointCorruptError: a file is not the state of a process.
        """
        own = generation / name
        files = [own, generation / rank_state_name(0), generation / DRIVER_STATE]
        return cls(own, {path: _read_process_file(path) for path in dict.fromkeys(files) if path.exists()})

    def restore(self, stateful: Mapping[str, Stateful]) -> str | None:
        """Restore user objects, then generators.

        Returns:
            digest of the generators. None if they were derived, or if this process has other CUDA devices than the
            saved one, because their generators stay as they are.
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
