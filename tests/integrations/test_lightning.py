"""Lightning's Trainer, killed and started again by the same command; needs lightning installed."""

import json
import os
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("lightning")

import lightning.pytorch as pl  # type: ignore[import-not-found]
from lightning.pytorch.callbacks import EarlyStopping  # type: ignore[import-not-found]

from examples.integrations.lightning_fit import Module, main
from examples.integrations.tiny import token_rows
from holdfast.integrations.lightning import Recover, recoverable
from holdfast.recover import RecoverConfig
from holdfast.utils.errors import CheckpointMismatchError, ConfigError, Preempted
from holdfast.utils.folder_lock import probe_lock
from tests.integrations.processes import run_killed

pytestmark = pytest.mark.timeout(300)


class Killer(pl.Callback):
    """Sends this process a signal, SIGKILL as a rule, when ``where`` is reached the ``count``-th time."""

    def __init__(self, kill: str, number: int = signal.SIGKILL) -> None:
        self._number = number
        self._where, _, count = kill.partition(":")
        self._left = int(count or 0)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def _at(self, where: str, trainer: Any) -> None:
        self._left -= where == self._where and not trainer.sanity_checking
        if where == self._where and not self._left:
            os.kill(os.getpid(), self._number)

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._at("begin", trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._at("batch", trainer)

    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        self._at("validating", trainer)

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self._at("validated", trainer)

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._at("epoch", trainer)


class Counter(pl.Callback):
    """A callback with a state, on which training depends, that hooks around an epoch change too."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        self.seen += 10

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen += 1
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.001 * self.seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.seen = state_dict["seen"]


def job(folder: Path, kill: str = "", plain: bool = False, options: dict[str, Any] | None = None) -> None:
    given = dict(options or {})
    callbacks: list[Any] = [Killer(kill), Counter()]
    if (patience := given.pop("patience", None)) is not None:
        callbacks.append(EarlyStopping("val_loss", patience=patience, min_delta=10.0))
    main(folder, tuple(callbacks), plain, **given)


def digest(folder: Path) -> str:
    return (folder / "digest.txt").read_text()


@cache
def untouched(options: str = "{}", ranks: int = 1) -> str:
    run_killed(job, folder := Path(mkdtemp()), [], "", False, json.loads(options), ranks=ranks)
    return digest(folder)


def check(folder: Path, kills: list[str], options: dict[str, Any] | None = None, ranks: int = 1) -> None:
    run_killed(job, folder, [(kill, False, options) for kill in kills], "", False, options, ranks=ranks)
    assert digest(folder) == untouched(json.dumps(options or {}), ranks)


@pytest.mark.slow
def test_a_fit_killed_in_its_second_epoch_ends_with_the_weights_and_moments_of_one_left_alone(tmp_path: Path) -> None:
    check(tmp_path, ["batch:15"])


SECOND = {"check_val_every_n_epoch": 2, "val_check_interval": 1.0}
CASES = [
    pytest.param(["batch:3", "begin:6", "batch:9"], {}, id="three times"),
    pytest.param(["validating:1", "validating:4"], {}, id="in a validation"),
    pytest.param(["validated:2", "epoch:2"], {}, id="between epochs"),
    pytest.param(["batch:7"], {"accumulate_grad_batches": 3}, id="between micro-batches, a short last step"),
    pytest.param(["batch:9"], {"limit_train_batches": 6}, id="a part of every epoch"),
    pytest.param(["batch:13", "batch:2"], {"max_steps": 13, "max_epochs": -1}, id="max_steps"),
    pytest.param(
        ["epoch:1", "validated:1"], {"check_val_every_n_epoch": 2, "val_check_interval": 1.0}, id="second val"
    ),
    pytest.param(["validated:3"], {"patience": 3}, id="early stopping"),
    pytest.param(["batch:5"], {"gradient_clip_val": 0.1, "num_sanity_val_steps": 0}, id="no sanity check"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "options"), CASES)
def test_a_fit_killed_ends_with_the_weights_and_moments_of_one_left_alone(
    kills: list[str], options: dict[str, Any], tmp_path: Path
) -> None:
    check(tmp_path, kills, options)


@pytest.mark.slow
def test_two_ranks_killed_end_with_the_weights_and_moments_of_two_left_alone(tmp_path: Path) -> None:
    check(tmp_path, ["batch:8"], {"strategy": "ddp", "devices": 2}, ranks=2)


@pytest.mark.slow
def test_a_fit_that_is_asked_to_stop_is_snapshotted_at_that_step_and_goes_on_with_the_next(tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    main(tmp_path / "whole")
    with pytest.raises(Preempted, match="SIGTERM"):
        main(tmp_path / "stopped", (Killer("batch:9", signal.SIGTERM),))
    assert (tmp_path / "stopped" / "experiment" / "trial" / "recover" / "global_step_4").is_dir()
    main(tmp_path / "stopped")
    assert digest(tmp_path / "stopped") == digest(tmp_path / "whole")


def test_a_fit_that_cannot_be_resumed_gives_up_folder_and_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    main(tmp_path, max_epochs=1, limit_train_batches=2)
    for _ in range(2):
        with pytest.raises(CheckpointMismatchError):
            main(tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert probe_lock(tmp_path / "experiment" / "trial" / "recover.lock") is False


@pytest.mark.slow
def test_lightnings_own_checkpoints_lead_elsewhere(tmp_path: Path) -> None:
    """The control: they hold neither the random generators nor the order of the epoch."""
    run_killed(job, tmp_path, [("batch:15", True)], "", True)
    assert digest(tmp_path) != untouched()


@pytest.mark.slow
def test_a_fit_that_is_over_stays_so_and_goes_on_with_more_epochs(tmp_path: Path) -> None:
    for _ in range(2):
        run_killed(job, tmp_path, [], "", False, {"max_epochs": 2})
        assert digest(tmp_path) == untouched('{"max_epochs": 2}')
    run_killed(job, tmp_path, [], "", False, {})
    assert digest(tmp_path) == untouched()


@pytest.mark.slow
def test_a_fit_that_a_callback_has_ended_is_not_trained_on(tmp_path: Path) -> None:
    for _ in range(2):
        run_killed(job, tmp_path, [], "", False, {"patience": 3})
        assert digest(tmp_path) == untouched('{"patience": 3}') != untouched()
    assert "ended by a callback" in (tmp_path / "log").read_text()


def test_a_trial_of_one_batch_leaves_nothing_that_the_run_would_resume(tmp_path: Path) -> None:
    main(tmp_path, fast_dev_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["digest.txt"]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(token_rows(4))


REFUSED = [
    (lambda: DataLoader(token_rows(8)), {}, "expected recoverable"),  # type: ignore[arg-type]
    (lambda: recoverable(DataLoader(Stream())), {}, "has no length"),
    (lambda: recoverable(DataLoader(token_rows(8))), {"reload_dataloaders_every_n_epochs": 1}, "another loader"),  # type: ignore[arg-type]
]


def quiet_trainer(*callbacks: pl.Callback, **options: Any) -> Any:
    torch.set_num_threads(1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        max_epochs=1, accelerator="cpu", callbacks=list(callbacks), enable_model_summary=False, **quiet, **options
    )


def test_what_lightning_would_resume_by_itself_on_slurm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = quiet_trainer(default_root_dir=tmp_path, max_steps=1)
    trainer.fit(Module(), DataLoader(token_rows(8)))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    for name, value in {"NTASKS": "1", "JOB_NAME": "train", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    trainer = quiet_trainer(Recover(RecoverConfig(fileroot=str(tmp_path / "runs"))), default_root_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"hpc_ckpt_1\.ckpt would be loaded over what is resumed"):
        trainer.fit(Module(), recoverable(DataLoader(token_rows(8))))  # type: ignore[arg-type]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("make", "options", "reason"), REFUSED)
def test_what_cannot_be_resumed_is_refused_before_the_first_step(
    make: Any, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    trainer = quiet_trainer(Recover(RecoverConfig(fileroot=str(tmp_path))), **options)
    with pytest.raises(ConfigError, match=reason):
        trainer.fit(Module(), make())
    assert not any(tmp_path.iterdir())
