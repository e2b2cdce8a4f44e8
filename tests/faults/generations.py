"""Two valid generations to damage, copied by hard links in a millisecond, and a warm process that
loads the result.

The generations hold steps 0 and 1 of two real ranks with two sharded engines, a data cursor and a
user's object. `Victim.load` reports the outcome of a load: the returned step, whether the whole
state is then equal to one of the generations to the bit, and the number of writes to it.
"""

import json
import logging
import os
import random
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from holdfast.engine.dcp.state import DCPState
from holdfast.recover import ResumableDataLoader
from holdfast.utils.files import file_digest
from holdfast.utils.manifest import MANIFEST_NAME, FileEntry, write_manifest
from holdfast.utils.rng import seed_rng
from tests.helpers import run_ranks
from tests.recover.runs import Meter, Prompts, make_handler, make_loader, step_info, stream

WIDTHS = {"actor": 7, "critic": 4}
"""Rows of the only weight by engine. 7 rows cannot be divided evenly between the ranks."""
OLDER, NEWER = "global_step_0", "global_step_1"
LOAD_TIMEOUT_S = 20.0


def _net(name: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, WIDTHS[name]))


def _state(model: nn.Module) -> DCPState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return DCPState(
        model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    )


def sharded_states(world_size: int) -> dict[str, DCPState]:
    """The engines of one rank of ``world_size``."""
    torch.manual_seed(5)
    mesh = init_device_mesh("cpu", (world_size,))
    nets = {name: _net(name) for name in WIDTHS}
    for net in nets.values():
        fully_shard(net, mesh=mesh)
    return {name: _state(net) for name, net in nets.items()}


def _train(rank: int, world_size: int, root: str, steps: int) -> None:
    """Take snapshots of ``steps`` steps, beginning with step 0."""
    states = sharded_states(world_size)
    seed_rng(7 + rank)
    handler, meter, loader = (
        make_handler(root, freq_steps=1),
        Meter(),
        make_loader("own", rank, world_size),
    )
    handler.register("meter", meter)
    assert handler.load(states, loader) is None
    batches = stream(loader)
    for step in range(steps):
        meter.seen += next(batches)
        for state in states.values():
            assert state.optimizer is not None and state.scheduler is not None
            state.model(torch.randn(5, 6)).square().mean().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.scheduler.step()
        assert handler.dump(states, step_info(step), loader)
    handler.wait()
    handler.close()


def make_generations(root: Path, steps: int = 2) -> Path:
    """Run two ranks and return the ``recover`` folder with one generation per step."""
    run_ranks(_train, 2, str(root), steps)
    return recover_folder(root)


def recover_folder(root: Path) -> Path:
    return root / "e" / "t" / "recover"


def link_tree(source: Path, target: Path) -> None:
    """Copy a folder by hard links. Use `replace_bytes` to change a file in one copy only."""
    shutil.copytree(source, target, copy_function=os.link)


def copy_generations(good: Path, root: Path, *names: str) -> Path:
    """Link the named generations of ``good`` below ``root`` and return the new ``recover``
    folder.
    """
    recover = recover_folder(root)
    recover.mkdir(parents=True)
    for name in names:
        link_tree(good / name, recover / name)
    return recover


def replace_bytes(path: Path, data: bytes | bytearray) -> Path:
    """Write a new file in place of ``path``, so that other hard links keep the old bytes."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    return path


def reseal(folder: Path) -> None:
    """Write the manifest again, as an attacker who knows the format would after changing a file."""
    document = json.loads((folder / MANIFEST_NAME).read_text())
    facts = {
        key: value
        for key, value in document.items()
        if key not in ("format_version", "files", "digest")
    }
    (folder / MANIFEST_NAME).unlink()
    names = files_of(folder)
    entries = [
        FileEntry(name, (folder / name).stat().st_size, file_digest(folder / name))
        for name in names
    ]
    write_manifest(folder, entries, facts)


def slug(text: str) -> str:
    """Format text as in the name of a quarantined folder."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def files_of(folder: Path) -> list[str]:
    """List every file below ``folder`` as sorted relative POSIX paths."""
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the block takes longer, even inside a system call that hangs."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"hangs: not done after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


class _CountingMeter(Meter):
    """Counts the states it is given."""

    loads = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads += 1
        super().load_state_dict(state_dict)


class _CountingLoader(ResumableDataLoader):
    """Counts the states it is given."""

    loads = 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loads += 1
        super().load_state_dict(state_dict)


@dataclass(frozen=True)
class Loaded:
    """Outcome of a load.

    Attributes:
        step: step of the restored generation. None if there was nothing to resume.
        record: digest of everything that can be restored, and the data cursor.
        writes: number of writes to it.
    """

    step: int | None
    record: str
    writes: int


class Victim:
    """Engines, a data cursor, a user's object and generators of one process."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        self.states = {name: _state(_net(name)) for name in WIDTHS}
        self.untouched = ""
        self.tensors = [
            t for _, state in sorted(self.states.items()) for t in state.live_tensors().values()
        ]
        self.scramble()

    def scramble(self) -> None:
        """Set everything to values that no generation holds."""
        with torch.no_grad():
            for number, tensor in enumerate(self.tensors):
                tensor.fill_(-1000.0 - number)
        self.meter, self.loader = _CountingMeter(), _CountingLoader(Prompts(), 4, seed=3)
        seed_rng(99)

    def load(self, root: Path, **options: Any) -> Loaded:
        """Scramble the state and load the run below ``root``. Raises the errors of
        `RecoverHandler.load`.

        Afterwards `state_record` is equal to ``untouched`` if and only if the load changed no
        engine, object or generator.
        """
        self.scramble()
        self.untouched = self.state_record()
        before, handler = self._writes(), make_handler(root, freq_steps=1, **options)
        handler.register("meter", self.meter)
        try:
            with time_limit(LOAD_TIMEOUT_S):
                info = handler.load(self.states, self.loader)
        finally:
            handler.close()
        step = None if info is None else info.last_step_info.global_step
        return Loaded(step, self.record(), self._writes() - before)

    def record(self) -> str:
        """Digest of every value that a load can change."""
        return f"{self.state_record()} {self.loader.state_dict()}"

    def state_record(self) -> str:
        """Digest of the engines, the user's object and the generators, without the data cursor."""
        found = sha256()
        for tensor in self.tensors:
            found.update(tensor.detach().numpy().tobytes())
        for _, state in sorted(self.states.items()):
            assert state.scheduler is not None and state.optimizer is not None
            found.update(
                repr((state.scheduler.state_dict(), state.optimizer.param_groups[0]["lr"])).encode()
            )
        found.update(repr((self.meter.seen, self.meter.mean.tolist())).encode())
        legacy: Any = np.random.get_state()
        found.update(legacy[1].tobytes() + repr((random.getstate(), legacy[2:])).encode())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()

    def _writes(self) -> int:
        return (
            sum(tensor._version for tensor in self.tensors) + self.meter.loads + self.loader.loads
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log, to which thousands of quarantined generations would write."""
    previous = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(previous)
