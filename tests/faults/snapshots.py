"""Scenarios of a run of two ranks: a snapshot, and a resume with damaged generations and partial
files around.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.tensors import flatten, local_tensor
from holdfast.recover import GenerationStore, ResumableDataLoader
from holdfast.utils.rng import seed_rng
from tests.recover.runs import (
    Diary,
    Meter,
    Prompts,
    draw,
    hidden,
    make_handler,
    names,
    step_info,
    stream,
)

Action = Callable[[], Any]
Tree = dict[str, str]
"""Relative path -> digest of the file."""


class Trainee:
    """Two sharded engines, a data cursor and a user's object. Each step draws from every random
    generator.
    """

    def __init__(self, rank: int, world_size: int = 2) -> None:
        torch.manual_seed(5)
        mesh = init_device_mesh("cpu", (world_size,))
        self.engines = {"actor": _engine(10, mesh), "critic": _engine(7, mesh)}
        self.loader = ResumableDataLoader(Prompts(), 4, seed=3, rank=rank, world_size=world_size)
        self.meter, self._batches = Meter(), stream(self.loader)
        self.diary = Diary()
        seed_rng(7 + rank)

    def train(self) -> str:
        """Train both engines for one step and return the digest."""
        ids = next(self._batches)
        self.meter.seen += ids
        self.meter.mean = self.meter.mean + torch.rand(2)
        inputs = (
            torch.tensor(ids)[:, None] * torch.linspace(0.1, 1, 6)
            + draw()[0]
            + torch.randn(len(ids), 6)
        )
        for state in self.engines.values():
            assert state.optimizer is not None and state.scheduler is not None
            state.model(inputs).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.scheduler.step()
        return self.digest()

    def digest(self) -> str:
        """Digest of this rank's whole state, including generators, without changing it."""
        found = sha256()
        for name, state in self.engines.items():
            for key, tensor in sorted(flatten(state.state_dict())):
                found.update(
                    f"{name}.{key}".encode() + local_tensor(tensor).detach().numpy().tobytes()
                )
        found.update(
            repr((self.loader.state_dict(), self.meter.seen, self.meter.mean.tolist())).encode()
        )
        return found.hexdigest()


def _engine(hidden_width: int, mesh: Any) -> DCPState:
    model = nn.Sequential(nn.Linear(6, hidden_width), nn.Linear(hidden_width, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return DCPState(
        model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    )


def tree(folder: str | Path) -> Tree:
    """Digests of all files below ``folder``."""
    root = Path(folder)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        path.relative_to(root).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files
    }


@dataclass(frozen=True)
class Snapshot:
    """Resume from step ``base``, train one step, and dump it.

    Attributes:
        base: the last existing step, -1 for none.
        keep: number of generations to keep. If ``base`` >= ``keep`` - 1, the dump deletes one.
        digests: step -> rank -> `Trainee.digest` in an undisturbed run.
    """

    name: str
    base: int
    keep: int = 2
    digests: tuple[tuple[str, ...], ...] = ()

    def build(self, rank: int, root: str) -> list[str]:
        """Train to ``base`` with a dump of each step, then three more steps without dumps."""
        handler, trainee, step = self.resume(rank, root)
        assert step == -1
        digests = []
        for step in range(self.base + 1):
            digests.append(trainee.train())
            assert handler.dump(trainee.engines, step_info(step), trainee.loader)
        handler.wait()
        handler.close()
        return digests + [trainee.train() for _ in range(3)]

    def learn(self, built: list[list[str]]) -> Self:
        return replace(self, digests=tuple(zip(*built, strict=True)))

    def handler(self, root: str, **options: Any) -> Any:
        """Make a handler over ``root``."""
        return make_handler(root, freq_steps=1, max_ckpt_to_keep=self.keep, **options)

    def register(self, handler: Any, trainee: Trainee, root: str) -> None:
        """Register the objects of a trainee."""
        handler.register("meter", trainee.meter)

    def resume(self, rank: int, root: str, **options: Any) -> tuple[Any, Trainee, int]:
        """Return a handler and the state it has loaded, checked to the bit, with the last step (-1
        for none).
        """
        trainee, handler = Trainee(rank), self.handler(root, **options)
        self.register(handler, trainee, root)
        info = handler.load(trainee.engines, trainee.loader)
        step = -1 if info is None else info.last_step_info.global_step
        assert step == -1 or trainee.digest() == self.digests[step][rank], (
            f"step {step} came back as something else"
        )
        return handler, trainee, step

    def arm(self, rank: int, root: str) -> Action:
        """Resume and train a step. The action dumps it."""
        handler, trainee, step = self.resume(rank, root)
        assert step == self.base
        assert trainee.train() == self.digests[step + 1][rank]

        return partial(self.act, handler, trainee, step + 1, root)

    def act(self, handler: Any, trainee: Trainee, step: int, root: str) -> bool:
        """Dump a step."""
        dumped = handler.dump(trainee.engines, step_info(step), trainee.loader)
        handler.wait()
        return dumped

    def check(self, rank: int, root: str) -> bool:
        """Resume, compare with the undisturbed run, and dump the next step."""
        handler, trainee, step = self.resume(rank, root)
        assert step in (self.base, self.base + 1), (
            f"step {self.base} was there, and step {step} was resumed"
        )
        store = GenerationStore(handler.store.root)
        assert store.quarantined() == [] and hidden(root) == [], (
            f"left after the resume: {hidden(root)}"
        )
        wanted = {f"global_step_{n}" for n in range(max(step + 1 - self.keep, 0), step + 1)}
        assert wanted <= set(names(Path(root))), (
            f"of {sorted(wanted)} only {names(Path(root))} are left"
        )
        assert trainee.train() == self.digests[step + 1][rank], "the resumed run is another one"
        assert handler.dump(trainee.engines, step_info(step + 1), trainee.loader)
        handler.wait()
        handler.close()
        if rank == 0:
            assert names(Path(root)) == [
                f"global_step_{n}" for n in range(max(step + 2 - self.keep, 0), step + 2)
            ]
            for generation in store.generations():
                assert store.verify(generation.path).last_step_info.global_step == generation.step
            assert hidden(root) == []
        return step > self.base


@dataclass(frozen=True)
class Logged(Snapshot):
    """A snapshot of a run with a log. Entries are noted before, while and after it is taken.

    Whenever the run is resumed, the leader must have every entry that was on stable storage:
    `built_entries`, and those of this folder's lives, which are listed in a file next to it.
    """

    def handler(self, root: str, **options: Any) -> Any:
        # Only who waits for it syncs a record, so that the order of all calls is the same.
        return super().handler(root, episode_log_s=1e6, **options)

    @property
    def built_entries(self) -> list[str]:
        """Entries that are durable when the folder has been built."""
        if not self.digests or self.base < 0:
            return []
        captures = [f"capture of step {step}" for step in range(self.base + 1)]
        return ["before step 0", *captures]

    def register(self, handler: Any, trainee: Trainee, root: str) -> None:
        super().register(handler, trainee, root)
        handler.register("diary", trainee.diary)
        handler.register("late", NotesWhenCaptured(trainee.diary, root))

    def resume(self, rank: int, root: str, **options: Any) -> tuple[Any, Trainee, int]:
        """Do the same, and look for every durable entry."""
        handler, trainee, step = super().resume(rank, root, **options)
        if rank == 0:
            missing = {*self.built_entries, *durable_entries(root)} - {*trainee.diary.entries}
            assert not missing, f"entries of the log are lost: {sorted(missing)}"
        note_durably(trainee.diary, f"before step {step + 1}", root)
        return handler, trainee, step

    def act(self, handler: Any, trainee: Trainee, step: int, root: str) -> bool:
        dumped = super().act(handler, trainee, step, root)
        note_durably(trainee.diary, "after the snapshot", root)
        return dumped


class NotesWhenCaptured:
    """An object that notes something while the state is captured, after the diary was."""

    def __init__(self, diary: Diary, root: str) -> None:
        self._diary = diary
        self._root = root
        self._captured = 0

    def state_dict(self) -> dict[str, Any]:
        note_durably(self._diary, f"capture of step {self._captured}", self._root)
        self._captured += 1
        return {"captured": self._captured}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._captured = state_dict["captured"]


def note_durably(diary: Diary, entry: str, root: str) -> None:
    """Note an entry, wait until it is on stable storage, and list it next to ``root``."""
    diary.note(entry, durably=True)
    if diary.log is not None:
        with open(f"{root}.durable", "a") as file:
            file.write(f"{entry}\n")


def durable_entries(root: str) -> list[str]:
    """The entries that `note_durably` has listed."""
    path = Path(f"{root}.durable")
    return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Resume:
    """Resume from step 1 in a folder with a damaged step 2 and the leftovers of killed writers and
    removers.

    Attributes:
        snapshot: the scenario that resumes and checks.
    """

    snapshot: Snapshot
    name: str = "resume"

    def build(self, rank: int, root: str) -> list[str]:
        """Make complete steps 0 and 1, the damaged step and the leftovers."""
        digests = self.snapshot.build(rank, root)
        if rank == 0:
            recover = Path(root, "e", "t", "recover")
            for left in (
                "global_step_2",
                ".staging-3-0123456789ab",
                ".retired-global_step_0-0123456789ab",
            ):
                shutil.copytree(recover / "global_step_1", recover / left)
            (recover / "global_step_2" / "recover_info.json").write_bytes(b"")
            (recover / ".staging-3-0123456789ab" / "manifest.json").unlink()
        return digests

    def learn(self, built: list[list[str]]) -> "Resume":
        return replace(self, snapshot=self.snapshot.learn(built))

    def arm(self, rank: int, root: str) -> Action:
        """Return the action: a whole resume, beginning with the lock."""
        return partial(self.snapshot.resume, rank, root)

    def check(self, rank: int, root: str) -> bool:
        """Check that step 1 is resumed, step 2 is quarantined, all leftovers are gone, and step 2
        can be dumped.
        """
        recover = Path(root, "e", "t", "recover")
        set_aside = not (recover / "global_step_2").exists()
        dist.barrier()  # all ranks have looked
        handler, trainee, step = self.snapshot.resume(rank, root)
        assert step == 1
        (rejected,) = hidden(root)
        assert rejected.startswith(".rejected-global_step_2-")
        trainee.train()
        assert handler.dump(trainee.engines, step_info(2), trainee.loader)
        handler.close()
        return set_aside
