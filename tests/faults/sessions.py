"""Runs that continue after a failure: every attempt writes something new, and earlier files are
checked.

A kill needs new processes afterwards. An error needs the same ones: all ranks must report it alike
and train on. An attempt either returns that it has written its files or reports that it could not.
Any other exception fails the test. After each attempt `Session.survey` compares the folder with
earlier observations.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from holdfast.engine import PublishedCopy, WeightUpdateMeta, save_hf
from holdfast.engine.hf.deltas import made_from
from holdfast.engine.hf.versions import published_versions, version_path
from holdfast.engine.servers.publish import publish_weights
from holdfast.recover import GenerationStore
from holdfast.utils.distributed import is_write_failure
from holdfast.utils.errors import CheckpointWriteError, PeerError, PublishError
from holdfast.utils.manifest import verify_folder
from tests.engine.hf.mirrored import files_of_version
from tests.faults.scenarios import change_a_little, sharded_model
from tests.faults.snapshots import Trainee, Tree, tree
from tests.recover.runs import hidden, make_handler, names, step_info

REMOVING = (".retired-",)
"""Leftovers of a failed removal. They cost space until the next start, and readers do not see them.
"""


class Session(Protocol):
    """Two ranks that write to a folder repeatedly."""

    @property
    def newest(self) -> str:
        """Folder that the last attempt should have made."""
        ...

    def attempt(self) -> bool:
        """Write the next snapshot, export or version.

        Returns:
            True if it was written, False if a failure was reported.
        """
        ...

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Check the folder on rank 0 after an attempt.

        Args:
            done: return value of the attempt.
            tidy: whether partial files could be removed, and so must be gone.

        Raises:
            AssertionError: files were changed, lost, torn or left over.
        """
        ...

    def close(self) -> None: ...


@dataclass
class Known:
    """Observed contents of a folder: every visible entry is complete and must not change.

    Attributes:
        seen: name -> files, at the last look.
        oldest_first: whether an older name goes before a newer one.
    """

    seen: dict[str, Tree] = field(default_factory=dict)
    oldest_first: bool = True

    def look(
        self, folder: Path, visible: list[str], may_go: int, newest: str, done: bool
    ) -> list[str]:
        """Compare with the last look and return the new names.

        Args:
            folder: the folder.
            visible: all visible names, oldest first.
            may_go: number of newest names that must stay. Older ones may be gone.
            newest: the only name that may be new.
            done: whether ``newest`` must exist.
        """
        now = {name: tree(folder / name) for name in visible}
        fresh = [name for name in visible if name not in self.seen]
        assert fresh in ([], [newest]), f"{fresh} appeared; {newest} was written"
        assert newest in now or not done, f"{newest} was reported as written and is not there"
        changed = [name for name in now if name in self.seen and now[name] != self.seen[name]]
        assert not changed, f"{changed} were written over"
        order = [*self.seen, *fresh]
        n_newest = max(may_go, len(visible)) if self.oldest_first else may_go
        newest_names = order[max(0, len(order) - n_newest) :]
        assert set(newest_names) <= set(visible), f"of {order} there is left {visible}"
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
        """Folder of the last step."""
        return str(self.handler.store.root / f"global_step_{self.step}")

    def attempt(self) -> bool:
        """Run one training step and its dump."""
        self.digest = self.trainee.train()
        self.step += 1
        dumped = self.handler.dump(self.trainee.engines, step_info(self.step), self.trainee.loader)
        self.handler.wait()
        assert self.trainee.digest() == self.digest, "the dump has changed what it has saved"
        assert self.handler.failed_saves == (0 if dumped else 1)
        return dumped

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Verify generations. After a failure the new one may be visible only if just its rename's
        fsync failed.
        """
        if self.rank == 0:
            store = GenerationStore(self.handler.store.root)
            visible = sorted(names(Path(self.root)), key=lambda name: int(name.rpartition("_")[2]))
            for name in self.known.look(
                store.root, visible, self.KEEP, f"global_step_{self.step}", done
            ):
                assert store.verify(store.root / name).last_step_info.global_step == self.step
            left = [name for name in hidden(self.root) if not name.startswith(REMOVING)]
            assert not (tidy and left), f"left behind: {left}"

    def close(self) -> None:
        """Release the folder's lock."""
        self.handler.close()


class _ModelSession(ABC):
    """Common code of exports and publications."""

    folder: str

    def __init__(self, rank: int, root: str, model: str) -> None:
        self.rank, self.root, self.base = rank, Path(root, self.folder), model
        self.model = sharded_model(model, 0)
        self.number, self.known = 0, Known()

    def attempt(self) -> bool:
        """Change the weights and write them."""
        self.number += 1
        self.train()
        try:
            self.write()
        except (CheckpointWriteError, PeerError) as error:
            assert is_write_failure(error), error
            return False
        except PublishError:  # the version is there, but rank 0 could not read it for the servers
            return False
        return True

    def train(self) -> None:
        """Change the weights."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.5)

    @abstractmethod
    def write(self) -> None:
        """Write the current weights."""

    def close(self) -> None:  # noqa: B027  (the others have something to close)
        """Do nothing, because nothing is open."""


class ExportSession(_ModelSession):
    """Save Hugging Face folders one after the other. All of them stay."""

    folder = "hf"

    @property
    def newest(self) -> str:
        return str(self.root / f"global_step_{self.number}")

    def write(self) -> None:
        save_hf(self.model, self.newest, base_model_path=self.base)

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Check that visible exports are complete, which no manifest tells: they must be as large
        as the first one.
        """
        if self.rank == 0:
            entries = os.listdir(self.root)
            visible = sorted(
                (e for e in entries if e[0] != "."), key=lambda name: int(name.rpartition("_")[2])
            )
            for name in self.known.look(
                self.root, visible, len(visible), Path(self.newest).name, done
            ):
                assert self._sizes(name) == self._sizes(visible[0])
            left = [name for name in entries if name[0] == "." and not name.startswith(REMOVING)]
            assert not (tidy and left), f"left behind: {left}"

    def _sizes(self, name: str) -> dict[str, int]:
        return {file: (self.root / name / file).stat().st_size for file in self.known.seen[name]}


class Reader:
    """A server that reads nothing, as if in another process. `PublicationSession.survey` reads
    instead.
    """

    mirror = "http://127.0.0.1:9000"

    def update_weights_from_disk(self, path: str, version: int) -> int:
        return version


class PublicationSession(_ModelSession):
    """Publish versions one after the other."""

    folder = "weights"
    KEEP = 2

    @property
    def newest(self) -> str:
        return str(version_path(self.root, self.number))

    def write(self) -> None:
        meta = WeightUpdateMeta("disk", str(self.root), keep=self.KEEP)
        publish_weights(self.model, meta, self.number, [Reader()], base_model_path=self.base)

    def verify(self, folder: Path) -> None:
        """Check a version."""
        assert verify_folder(folder)["weight_version"] == self.number

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Verify all versions."""
        if self.rank == 0:
            visible = [
                version_path(self.root, version).name for version in published_versions(self.root)
            ]
            name = Path(self.newest).name
            for fresh in self.known.look(self.root, visible, self.KEEP, name, done):
                self.verify(self.root / fresh)
            left = [e for e in os.listdir(self.root) if e[0] == "." and not e.startswith(REMOVING)]
            assert not (tidy and left), f"left behind: {left}"


class DeltaSession(PublicationSession):
    """Publish versions that hold the changes from the one before, and all weights after every
    second of them.
    """

    folder = "deltas"

    def __init__(self, rank: int, root: str, model: str) -> None:
        super().__init__(rank, root, model)
        self.copy = PublishedCopy()
        self.known.oldest_first = False  # changes go before what they are made from

    def train(self) -> None:
        change_a_little(self.model, 1.0)

    def write(self) -> None:
        meta = WeightUpdateMeta(
            "disk", str(self.root), keep=self.KEEP, delta=True, anchor_interval=2
        )
        publish_weights(
            self.model, meta, self.number, [Reader()], base_model_path=self.base, copy=self.copy
        )

    def verify(self, folder: Path) -> None:
        files_of_version(self.root, self.number)

    def survey(self, done: bool, tidy: bool = True) -> None:
        """Verify all versions, each with those that it is made from."""
        super().survey(done, tidy)
        if self.rank == 0:
            for name in self.known.seen:
                assert made_from(self.root / name), f"{name} lacks what it is made from"


SESSIONS: dict[str, Any] = {
    "snapshot": SnapshotSession,
    "export": ExportSession,
    "publication": PublicationSession,
    "delta": DeltaSession,
}
"""Name -> constructor with ``(rank, root, model)``."""


def agree(value: Any) -> Any:
    """Gather a value that must be the same on all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(other == values[0] for other in values), f"the ranks disagree: {values}"
    return value
