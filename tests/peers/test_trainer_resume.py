"""transformers' own tests of resuming a Trainer, with Holdfast's save and load and a SIGKILL in
between.

The undisturbed run is Trainer's, without Holdfast. If the test resumes from ``checkpoint-N``, a
process trains the same run with `recoverable` and is killed when step N + 1 begins. The test's own
process resumes that run, with the same seed or another one.
"""

import ast
import copy
import os
import re
import signal
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.integrations.processes import run_job
from tests.peers.checkout import checkout, load

PEER = checkout("HOLDFAST_PEER_TRANSFORMERS", "tests/trainer/test_trainer_checkpointing.py")
SUITE = "TrainerResumeTrainingTest"
REFUSED = {"test_resume_training_with_different_batch_size": "32 steps an epoch, this one has 16"}
"""Tests that expect lost or repeated samples -> text of the refusal."""

pytestmark = [pytest.mark.peers, pytest.mark.timeout(300)]


def substitute(peer: Any, folder: Path, seed: int) -> None:
    """Put a Trainer into the peer's modules that resumes with Holdfast. ``seed`` is added in the
    resumed process.
    """
    from transformers import Trainer, TrainerCallback

    from holdfast.integrations.transformers import recoverable
    from holdfast.recover import RecoverConfig

    class Kill(TrainerCallback):
        def __init__(self, step: int) -> None:
            self.step = step

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.step:
                os.kill(os.getpid(), signal.SIGKILL)

    class Adapted(Trainer):
        run: Any = None
        number = 0

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            self.given = dict(zip(("model", "args"), given, strict=False)) | options

        def train(self, resume_from_checkpoint: Any = None, *_: Any, **__: Any) -> Any:
            if resume_from_checkpoint is None:
                Adapted.run = self.given | {"model": copy.deepcopy(self.model)}
                return super().train()
            Adapted.number += 1
            root = folder / f"run_{Adapted.number}"
            step = re.search(r"checkpoint-(\d+)$", str(resume_from_checkpoint))
            if step is not None:
                self.train_killed(root, int(step[1]))
            args = copy.copy(self.args)
            args.seed += seed
            twin = self.twin(root, **self.given | {"model": self.model, "args": args})
            found = twin.train(resume_from_checkpoint=resume_from_checkpoint)
            self.state = twin.state
            return found

        def twin(self, root: Path, **given: Any) -> Any:
            recover = RecoverConfig(fileroot=str(root), freq_steps=1, async_save=False)
            made = recoverable(Trainer)(recover=recover, **given)
            made.model_accepts_loss_kwargs = self.model_accepts_loss_kwargs
            return made

        def train_killed(self, root: Path, step: int) -> None:
            if not (child := os.fork()):
                try:
                    twin = self.twin(root, **Adapted.run)
                    twin.add_callback(Kill(step))
                    twin.train()
                finally:
                    os._exit(1)  # it should have been killed
            _, status = os.waitpid(child, 0)
            assert os.WTERMSIG(status) == signal.SIGKILL, (
                f"the run ended with {status}, not by SIGKILL"
            )
            steps = [
                int(path.name.rpartition("_")[2]) for path in root.glob("*/*/recover/global_step_*")
            ]
            assert max(steps) == step - 1, f"generations of {steps}"

    peer.Trainer = sys.modules[peer.RegressionDataset.__module__].Trainer = Adapted  # type: ignore[attr-defined]


def job(folder: Path, name: str, seed: int) -> None:
    """Run one of the peer's tests. If it skips itself, its reason is in ``skipped``."""
    import torch

    torch.set_num_threads(1)
    peer = load(PEER)
    substitute(peer, folder, seed)
    suite = getattr(peer, SUITE)
    test = getattr(suite, name)
    if "Need to set `seedable_sampler=True`" in getattr(test, "__unittest_skip_why__", ""):
        setattr(suite, name, test.__wrapped__)  # a requirement that Holdfast does not have
    result = unittest.TextTestRunner(stream=sys.stderr).run(suite(name))
    for _, reason in result.skipped:
        (folder / "skipped").write_text(reason)
    sys.exit(0 if result.wasSuccessful() else 1)


def names() -> list[str]:
    found = next(
        each for each in ast.parse(PEER.read_text()).body if getattr(each, "name", "") == SUITE
    )
    assert isinstance(found, ast.ClassDef)
    return [
        each.name
        for each in found.body
        if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")
    ]


@pytest.mark.parametrize("seed", [0, 57], ids=["the same seed", "another seed"])
@pytest.mark.parametrize("name", names())
def test_a_trainer_resumes_as_its_own_tests_ask(name: str, seed: int, tmp_path: Path) -> None:
    (code,) = run_job(job, tmp_path, name, seed)
    log = (tmp_path / "log").read_text()
    if (reason := tmp_path / "skipped").exists():
        pytest.skip(reason.read_text())
    if name in REFUSED:
        assert code == 1 and re.search(f"CheckpointMismatchError: .*{REFUSED[name]}", log), log[
            -4000:
        ]
    else:
        assert code == 0, log[-4000:]
