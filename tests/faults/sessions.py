"""Runs that go on after a failure: each attempt writes something new, and what was there before is looked after.

Where a kill wants fresh processes, an error wants the same ones: they must report it, alike on all ranks, and train on.
An attempt says whether it has written what it should have, or has reported that it could not; anything else it raises
is a failure of the test. After each, `Session.survey` compares the folder with what an observer knows of it.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.engine import WeightUpdateMeta, save_hf
from holdfast.engine.hf.versions import published_versions, version_path
from holdfast.engine.servers.publish import publish_weights
from holdfast.recover import GenerationStore
from holdfast.utils.distributed import is_write_failure
from holdfast.utils.errors import CheckpointWriteError, PeerError
from holdfast.utils.manifest import verify_folder
from tests.faults.scenarios import sharded_model
from tests.faults.snapshots import Trainee, Tree, tree
from tests.recover.runs import hidden, make_handler, names, step_info

REMOVING = (".retired-",)
"""What a removal that failed may leave, to be swept at the next start: it costs space, and no reader sees it."""


class Session(Protocol):
    """Two ranks that write to a folder again and again."""

    @property
    def newest(self) -> str:
        """The folder that the last attempt was to make."""
        ...

    def attempt(self) -> bool:
        """Write the next thing.

        Returns:
            whether it is there; False: it was reported that it could not be written.
        """
        ...

    def survey(self, done: bool, tidy: bool = True) -> None:
        """See, on rank 0, that all is as it should be after an attempt.

        Args:
            done: what the attempt has returned.
            tidy: whether what is half-done could be, and so must have been, removed.

        Raises:
            AssertionError: something was touched, lost, torn or left.
        """
        ...

    def close(self) -> None:
        """Write no more."""
        ...


@dataclass
class Known:
    """What an observer has seen in a folder: everything that is visible there is complete, and stays as it is.

    Attributes:
        seen: name -> files, of what was there at the last look.
    """

    seen: dict[str, Tree] = field(default_factory=dict)

    def look(self, folder: Path, visible: list[str], may_go: int, newest: str, done: bool) -> list[str]:
        """Compare with the last look; the names that are new.

        Args:
            folder: where.
            visible: all there is, oldest first.
            may_go: how many of the newest must stay; what is older may be gone.
            newest: the only name that may be new.
            done: whether it must be there.
        """
        now = {name: tree(folder / name) for name in visible}
        fresh = [name for name in visible if name not in self.seen]
        assert fresh in ([], [newest]), f"{fresh} appeared; {newest} was written"
        assert newest in now or not done, f"{newest} was reported as written and is not there"
        changed = [name for name in now if name in self.seen and now[name] != self.seen[name]]
        assert not changed, f"{changed} were written over"
        order = [*self.seen, *fresh]
        assert visible == order[len(order) - len(visible) :] and len(visible) >= min(may_go, len(order)), (
            f"of {order} there is left {visible}"
        )
        self.seen = now
        return fresh


class SnapshotSession:
    """Train and dump, step after step."""

    KEEP = 2

    def __init__(self, rank: int, root: str, model: str) -> None:
        self.rank, self.root = rank, root
        self.trainee = Trainee(rank)
        self.handler = make_handler(root, freq_steps=1, max_ckpt_to_keep=self.KEEP)
        self.handler.register("meter", self.trainee.meter)
        assert self.handler.load(self.trainee.engines, self.trainee.loader) is None
        self.step, self.known = -1, Known()
        self.digest = ""

    @property
    def newest(self) -> str:
        """Of the last step."""
        return str(self.handler.store.root / f"global_step_{self.step}")

    def attempt(self) -> bool:
        """One step of training, and its dump."""
        self.digest = self.trainee.train()
        self.step += 1
        dumped = self.handler.dump(self.trainee.engines, step_info(self.step), self.trainee.loader)
        self.handler.wait()
        assert self.trainee.digest() == self.digest, "the dump has changed what it has saved"
        assert self.handler.failed_saves == (0 if dumped else 1)
        return dumped

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Generations verify; a failed one may be visible only when nothing but its rename's fsync has failed."""
        if self.rank == 0:
            store = GenerationStore(self.handler.store.root)
            visible = sorted(names(Path(self.root)), key=lambda name: int(name.rpartition("_")[2]))
            for name in self.known.look(store.root, visible, self.KEEP, f"global_step_{self.step}", done):
                assert store.verify(store.root / name).last_step_info.global_step == self.step
            left = [name for name in hidden(self.root) if not name.startswith(REMOVING)]
            assert not (tidy and left), f"left behind: {left}"

    def close(self) -> None:
        """Give the folder's lock up."""
        self.handler.close()


class _ModelSession(ABC):
    """What an export and a publication have in common."""

    folder: str

    def __init__(self, rank: int, root: str, model: str) -> None:
        self.rank, self.root, self.base = rank, Path(root, self.folder), model
        self.model = sharded_model(model, 0)
        self.number, self.known = 0, Known()

    def attempt(self) -> bool:
        """Change the weights and write them."""
        self.number += 1
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)
        try:
            self.write()
        except (CheckpointWriteError, PeerError) as error:
            assert is_write_failure(error), error
            return False
        return True

    @abstractmethod
    def write(self) -> None:
        """Write the weights as they are."""

    def close(self) -> None:  # noqa: B027  (the others have something to close)
        """Nothing is held."""


class ExportSession(_ModelSession):
    """Save one Hugging Face folder after the other; all stay."""

    folder = "hf"

    @property
    def newest(self) -> str:
        """The last one."""
        return str(self.root / f"global_step_{self.number}")

    def write(self) -> None:
        """The next one."""
        save_hf(self.model, self.newest, base_model_path=self.base)

    def survey(self, done: bool, tidy: bool = True) -> None:
        """What is visible is complete, which no manifest says of an export: as many bytes as the first one."""
        if self.rank == 0:
            entries = os.listdir(self.root)
            visible = sorted((e for e in entries if e[0] != "."), key=lambda name: int(name.rpartition("_")[2]))
            for name in self.known.look(self.root, visible, len(visible), Path(self.newest).name, done):
                assert self._sizes(name) == self._sizes(visible[0])
            left = [name for name in entries if name[0] == "." and not name.startswith(REMOVING)]
            assert not (tidy and left), f"left behind: {left}"

    def _sizes(self, name: str) -> dict[str, int]:
        return {file: (self.root / name / file).stat().st_size for file in self.known.seen[name]}


class Reader:
    """A server in another process, whose reading is none of the shim's business; `PublicationSession.survey` reads."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """The version."""
        return version


class PublicationSession(_ModelSession):
    """Publish one version after the other."""

    folder = "weights"
    KEEP = 2

    @property
    def newest(self) -> str:
        """The last one."""
        return str(version_path(self.root, self.number))

    def write(self) -> None:
        """The next one."""
        meta = WeightUpdateMeta("disk", str(self.root), keep=self.KEEP)
        publish_weights(self.model, meta, self.number, [Reader()], base_model_path=self.base)

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Versions verify."""
        if self.rank == 0:
            visible = [version_path(self.root, version).name for version in published_versions(self.root)]
            name = Path(self.newest).name
            for fresh in self.known.look(self.root, visible, self.KEEP, name, done):
                assert verify_folder(self.root / fresh)["weight_version"] == self.number
            left = [e for e in os.listdir(self.root) if e[0] == "." and not e.startswith(REMOVING)]
            assert not (tidy and left), f"left behind: {left}"


SESSIONS: dict[str, Any] = {"snapshot": SnapshotSession, "export": ExportSession, "publication": PublicationSession}
"""Name -> what makes one of ``(rank, root, model)``."""


def agree(value: Any) -> Any:
    """What all ranks say, which must be the same."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), f"the ranks disagree: {values}"
    return value
