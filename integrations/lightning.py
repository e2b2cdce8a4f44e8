"""Lightning's Trainer: a callback that snapshots a fit and resumes it at its very batch.

    trainer = Trainer(callbacks=[Recover(RecoverConfig(fileroot="runs", freq_steps=10))], ...)
    trainer.fit(module, recoverable(DataLoader(...)))  # the same command again resumes

Both snapshot and resume happen where the loop asks for its next batch. Whatever belongs to the step before is over
then: the validation after it, callbacks, schedules that look at a metric. None of Lightning's hooks comes there.
"""

from dataclasses import replace
from typing import Any

from torch.utils.data import DistributedSampler

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..recover import RecoverConfig, RecoverHandler
from ..utils.distributed import control_group
from ..utils.errors import ConfigError
from ..utils.logging import get_logger
from .accelerate import RecoverableLoader, recoverable
from .compat.lightning_private import (
    Callback,
    begin_at,
    counters_of,
    give_signals_back,
    go_on_at,
    overrides,
    set_up_data,
)
from .loader_notes import inner_sampler

__all__ = ["Recover", "recoverable"]

logger = get_logger(__name__)

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_MAX_EPOCHS = 2**31


class Recover(Callback):  # type: ignore[misc]
    """Snapshots every fit of its trainer, and resumes it from the newest generation; see `RecoverHandler`.

    The module's weights, its optimizer and schedules, the loops' counters, the callbacks' ``state_dict``, the data
    module's, the precision plugin's, all random generators and the place in the data are in a generation.

    Args:
        config: where, how often, and what to do at the start.

    Raises:
        ConfigError: when the fit begins: it cannot be resumed exactly (see docs/integrations.md).
    """

    def __init__(self, config: RecoverConfig) -> None:
        super().__init__()
        self.config = config
        self._run: _Run | None = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the newest generation, before the loop looks where it is."""
        # Lightning's own checkpoints are off in a trial of a batch or two, too, which is no part of the run.
        config = replace(self.config, mode="off") if trainer.fast_dev_run else self.config
        self._run = _Run(trainer, pl_module, config, self)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Have signals to stop answered with a snapshot, rather than by the trainer, which has set its own since."""
        if not trainer.fast_dev_run and self.config.mode != "off":
            give_signals_back(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Snapshot the end of the run."""
        assert self._run is not None, "a fit has begun"
        self._run.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Wait for the snapshot that is being written."""
        if self._run is not None:
            self._run.close(exception)
            self._run = None

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the last snapshot, and give the folder up."""
        if self._run is not None:
            self._run.close(None)
            self._run = None


class _Run:
    """One fit, from where its data is known."""

    def __init__(self, trainer: Any, module: Any, config: RecoverConfig, callback: Recover) -> None:
        _refuse(trainer, module)
        set_up_data(trainer)
        self._trainer, self._loader = trainer, _loader_of(trainer)
        self._steps_per_epoch = -(-trainer.num_training_batches // trainer.accumulate_grad_batches)
        self._others = [each for each in trainer.callbacks if each is not callback]
        self._schedules = [each.scheduler for each in trainer.lr_scheduler_configs]
        self._trained = (module, trainer.optimizers[0], self._schedules[0] if self._schedules else None)
        epochs = trainer.max_epochs if trainer.max_epochs and trainer.max_epochs > 0 else _MAX_EPOCHS
        self._handler = RecoverHandler(config, FinetuneSpec(epochs, self._steps_per_epoch, 1), group=control_group())
        self._handler.register("lightning", self)
        for name, thing in (("datamodule", trainer.datamodule), ("precision", trainer.precision_plugin)):
            if isinstance(thing, Stateful):
                self._handler.register(name, thing)
        if config.mode != "off" and trainer.is_global_zero:
            for gap in gaps(trainer, module, self._others):
                logger.warning("%s", gap)
        self._saved: dict[str, Any] | None = None
        self._is_over = False
        try:
            info = self._handler.load(self._trained, dataloader=self._loader)
        except BaseException as error:  # no other hook will close it
            self._handler.__exit__(type(error), error, None)
            raise
        self._step = 0 if info is None else info.last_step_info.global_step + 1
        self._loader.before_fetch = self._between_batches
        if self._saved is not None:
            self._begin(self._saved)

    # What is saved beside weights, optimizer and the first schedule

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "counters": counters_of(trainer),
            "callbacks": [[each.state_key, each.state_dict()] for each in self._others],
            "metrics": dict(trainer.callback_metrics),
            "schedules": [each.state_dict() for each in self._schedules[1:]],
            "limits": self._limits(),
            "over": self._is_over,
            "stopped": bool(trainer.should_stop),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict

    def _limits(self) -> list[int]:
        return [-1 if limit is None else limit for limit in (self._trainer.max_epochs, self._trainer.max_steps)]

    # The loop

    def _begin(self, saved: dict[str, Any]) -> None:
        """Have the loop start with the epoch that was left; its other hooks find the callbacks as they were."""
        trainer, loader = self._trainer, self._loader
        begin_at(trainer, saved["counters"], loader.epoch)
        self._restore_callbacks(saved)
        for schedule, state in zip(self._schedules[1:], saved["schedules"], strict=True):
            schedule.load_state_dict(state)
        if saved["stopped"] and saved["limits"] == self._limits():
            logger.warning("the run was ended by a callback; with other max_epochs or max_steps it is trained on")
            trainer.should_stop = True

    def _between_batches(self) -> None:
        """A batch is asked for: take up what was restored, else snapshot the step before if it is new."""
        if self._saved is not None:
            saved, self._saved = self._saved, None
            if self._loader.given and self._trainer.is_global_zero:
                logger.warning(
                    "resumed after batch %d of epoch %d: what self.log and metrics gather over the epoch begins here",
                    self._loader.given, self._loader.epoch,
                )  # fmt: skip
            go_on_at(self._trainer, saved["counters"], self._loader.epoch, self._loader.given)
            self._trainer.callback_metrics.update(saved["metrics"])  # a schedule may look at those of epochs before
            if self._loader.given or not saved["over"]:  # else the hooks of this epoch's beginning come after the state
                self._restore_callbacks(saved)
                self._handler.restore_rng()
        elif self._trainer.global_step > self._step:
            self._dump()

    def end(self) -> None:
        """The last step was trained, and validated."""
        self._is_over = True
        if self._loader.given >= self._trainer.num_training_batches:
            self._loader.end_epoch()
        if self._trainer.global_step > self._step:
            self._dump(force=True)

    def close(self, failed: BaseException | None) -> None:
        """Give the folder up, after the snapshot that is being written."""
        self._loader.before_fetch = None
        give_signals_back(self._trainer)  # those of the handler, which gives them up in turn
        self._handler.__exit__(type(failed) if failed is not None else None, failed, None)

    def _dump(self, force: bool = False) -> None:
        trainer, given = self._trainer, self._loader.given
        self._step, last = trainer.global_step, trainer.global_step - 1
        epoch, step = self._loader.epoch - 1, self._steps_per_epoch - 1
        if given:
            epoch, step = self._loader.epoch, (given - 1) // trainer.accumulate_grad_batches
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        info = StepInfo(epoch, step, last, self._steps_per_epoch)
        self._handler.dump(self._trained, info, dataloader=self._loader, force=force, metrics=metrics)

    def _restore_callbacks(self, saved: dict[str, Any]) -> None:
        states = dict(saved["callbacks"])
        for callback in self._others:
            if states.get(callback.state_key):
                callback.load_state_dict(states[callback.state_key])


def gaps(trainer: Any, module: Any, callbacks: list[Any]) -> list[str]:
    """What of a fit will not come back exactly, a sentence each."""
    found = []
    if overrides(module, "on_save_checkpoint"):
        found.append(
            f"on_save_checkpoint of {type(module).__name__} is not called: keep what it saves in buffers of the "
            "module, or in a callback with state_dict and load_state_dict"
        )
    for callback in callbacks:
        name, own = type(callback).__name__, type(callback).__module__
        if overrides(callback, "on_save_checkpoint"):
            found.append(f"what callback {name} adds in on_save_checkpoint is not saved: give it state_dict")
        elif vars(callback) and not overrides(callback, "state_dict") and not own.startswith(_LIGHTNINGS):
            found.append(
                f"callback {name} has attributes ({', '.join(sorted(vars(callback))[:4])}) and no state_dict: it "
                "starts anew at a resume"
            )
    return found


_LIGHTNINGS = ("lightning.", "pytorch_lightning.")


def _loader_of(trainer: Any) -> RecoverableLoader:
    """The loader that a fit trains on.

    Raises:
        ConfigError: it is not of `recoverable`, has no length, or gives every rank the same samples.
    """
    loader = trainer.train_dataloader
    if not isinstance(loader, RecoverableLoader):
        raise ConfigError(
            f"train_dataloaders is a {type(loader).__name__}; expected recoverable(DataLoader(...)), of "
            "holdfast.integrations.lightning, which finds its place again"
        )
    if trainer.num_training_batches == float("inf"):
        raise ConfigError(
            "the train dataloader has no length, so that Lightning reads one batch ahead: give its dataset a __len__"
        )
    if trainer.world_size > 1 and not _is_shared_out(loader.loader):
        raise ConfigError(
            f"{trainer.world_size} ranks would train on the same samples, since Lightning puts no sampler into a "
            "loader of recoverable: make it with sampler=DistributedSampler(dataset)"
        )
    return loader


def _is_shared_out(source: Any) -> bool:
    while source is not None and not isinstance(source, DistributedSampler) and not hasattr(source, "num_replicas"):
        source = inner_sampler(source)
    return source is not None


def _refuse(trainer: Any, module: Any) -> None:
    """Raise a `ConfigError` for what cannot be resumed."""
    strategy = type(trainer.strategy).__name__
    accumulates = any(type(each).__name__ == "GradientAccumulationScheduler" for each in trainer.callbacks)
    reasons = {
        f"{strategy} is not supported; expected one of {', '.join(_STRATEGIES)}": strategy not in _STRATEGIES,
        f"the module has {len(trainer.optimizers)} optimizers; expected one": len(trainer.optimizers) != 1,
        "with manual optimization it is not known which batches are a step": not module.automatic_optimization,
        "GradientAccumulationScheduler changes what a step is": accumulates,
        "reload_dataloaders_every_n_epochs makes another loader; leave it 0": trainer.reload_dataloaders_every_n_epochs,
        f"{trainer.ckpt_path} would be loaded over what is resumed; leave ckpt_path out and load weights into the "
        "module, and remove what Lightning finds by itself (hpc_ckpt_* on SLURM)": trainer.ckpt_path is not None,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        raise ConfigError(f"the fit cannot be resumed exactly: {reason}")
