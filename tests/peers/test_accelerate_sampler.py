"""Accelerate's own test of samplers and checkpoints, with Holdfast's save and load and a SIGKILL
after each save.

The undisturbed run is Accelerate's, without Holdfast. The resumed process has the same seed, or
another one.
"""

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

from tests.integrations.processes import run_job
from tests.peers.checkout import checkout, load

PEER = checkout("HOLDFAST_PEER_ACCELERATE", "tests/test_sampler_checkpointing.py")
peer = load(PEER)

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]

EPOCHS = 3


class Checkpoints:
    """Replaces ``save_state``, ``load_state`` and ``skip_first_batches`` of one Accelerator by
    Holdfast.
    """

    def __init__(self) -> None:
        self.trained: Any = None
        self.loader: Any = None

    def substitute(self) -> None:
        from accelerate import Accelerator

        prepare: Any = Accelerator.prepare

        def prepared(accelerator: Any, *given: Any) -> Any:
            from holdfast.integrations.accelerate import recoverable

            *self.trained, loader = prepare(accelerator, *given)
            self.loader = recoverable(loader)
            return *self.trained, self.loader

        Accelerator.prepare = prepared  # type: ignore[method-assign]
        Accelerator.save_state = lambda _, folder: self.save(folder)  # type: ignore[method-assign, assignment]
        Accelerator.load_state = lambda _, folder: self.load(folder)  # type: ignore[method-assign, assignment]
        Accelerator.skip_first_batches = lambda _, loader, count: loader  # type: ignore[method-assign, assignment]

    def handler(self, folder: Path) -> Any:
        from holdfast.engine import FinetuneSpec
        from holdfast.recover import RecoverConfig, RecoverHandler

        return RecoverHandler(
            RecoverConfig(fileroot=str(folder), freq_steps=1),
            FinetuneSpec(EPOCHS, len(self.loader), 1),
        )

    def save(self, folder: Path) -> None:
        with self.handler(folder) as handler:
            handler.load(tuple(self.trained), dataloader=self.loader)
            handler.dump(tuple(self.trained), self.loader.step, dataloader=self.loader)
            handler.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    def load(self, folder: Path) -> None:
        with self.handler(folder) as handler:
            assert handler.load(tuple(self.trained), dataloader=self.loader) is not None


def job(_: Path, seed: int, held: bool, *arguments: str) -> None:
    """Run one phase of the peer's worker in this process.

    Args:
        seed: added to the peer's seed.
        held: save and load with Holdfast.
        arguments: arguments of the peer's worker.
    """
    os.environ["ACCELERATE_USE_CPU"] = "true"
    there: Any = load(PEER)
    there.torch.set_num_threads(1)
    set_seed = there.set_seed
    there.set_seed = lambda given: set_seed(given + seed)
    if held:
        Checkpoints().substitute()
    there.worker(*arguments)


@pytest.fixture(autouse=True, params=[0, 57], ids=["the same seed", "another seed"])
def phases(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the phases, which the peer starts as processes, as killed processes with Holdfast."""

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        phase, *arguments = command[2:]
        log = tmp_path / phase
        killed = phase in ("save", "recheckpoint")
        if phase == "save":  # for the records of the undisturbed run
            assert run_job(job, log, 0, False, phase, *_elsewhere(tmp_path, arguments)) == [0], (
                log / "log"
            ).read_text()
            name = "expected_0.json"
            (tmp_path / name).write_bytes((tmp_path / "alone" / name).read_bytes())
        seed = 0 if phase == "save" else request.param
        (code,) = run_job(job, log, seed, True, phase, *arguments)
        wrong = code != (-signal.SIGKILL if killed else 0)
        return SimpleNamespace(
            returncode=int(wrong),
            stdout=f"{phase} ended with {code}\n",
            stderr=(log / "log").read_text(),
        )

    monkeypatch.setattr(peer, "subprocess", SimpleNamespace(run=run))


def _elsewhere(folder: Path, arguments: list[str]) -> list[str]:
    (folder / "alone").mkdir(exist_ok=True)
    return [str(folder / "alone"), *arguments[1:]]


test_checkpoint_restores_sampler_and_training_rng = (
    peer.test_checkpoint_restores_sampler_and_training_rng
)
test_checkpoint_during_resumed_epoch = peer.test_checkpoint_during_resumed_epoch
