"""One call of ``train`` of transformers' Trainer, with snapshots after its steps.

Besides model, optimizer and schedule a snapshot holds the Trainer's counters and logs, its
callbacks, the state that TRL's classes keep between steps (samples for several steps), and the
place in the data.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from ..engine.api import FinetuneSpec, Stateful, StepInfo
from ..recover import RecoverConfig, RecoverHandler
from ..recover.engines import HostEngine
from ..utils.compat.trainer_private import (
    evaluation_loaders,
    history_of,
    is_exportable,
    restore_history,
    restore_state,
)
from ..utils.compat.trl_private import forget_buffer, restore_kept
from ..utils.distributed import control_group, get_world_size
from ..utils.errors import CheckpointMismatchError, DatasetMismatchError
from ..utils.logging import get_logger
from .batch_order import LoaderNotes, persistent_state, restore_persistent

logger = get_logger(__name__)

_MAX_EPOCHS = 2**31
_NUMERICAL_ARGS = (
    *(
        "max_grad_norm",
        "bf16",
        "fp16",
        "tf32",
        "optim",
        "label_smoothing_factor",
        "neftune_noise_alpha",
    ),
    *(
        "beta",
        "epsilon",
        "epsilon_high",
        "loss_type",
        "scale_rewards",
        "temperature",
        "num_generations",
    ),
    *("max_length", "max_completion_length", "importance_sampling_level", "disable_dropout"),
)
"""Arguments of transformers' and TRL's trainers that change the numbers of a step and are not part
of the state.
"""


class TrainerRun:
    """Run of a Trainer. `holdfast.utils.compat.trainer_private.TrainerSeam` calls its methods in
    their order here.

    Args:
        trainer, config: the trainer, and the config of its `RecoverHandler`.
        kept: names of further attributes of the trainer to save.
        epochs_may_change: as for `RecoverHandler`. The place in the data is then the same fraction
            of the epoch.

    Attributes:
        is_resuming: whether a generation was restored and its epoch has not continued yet.
        is_over: whether the restored generation is the end of the run.
    """

    def __init__(
        self, trainer: Any, config: RecoverConfig, kept: tuple[str, ...], epochs_may_change: bool
    ) -> None:
        self._trainer, self._config, self._kept = trainer, config, kept
        self._epochs_may_change = epochs_may_change
        self._handler: RecoverHandler | None = None
        self._notes: LoaderNotes | None = None
        self._saved: dict[str, Any] | None = None
        self._evaluated: dict[
            str, Any
        ] = {}  # persistent loaders that the run had started and this process has not
        self._steps_per_epoch = self._batches_per_epoch = self._epoch = self._first_step = 0
        self._between_epochs = True
        self.is_resuming = self.is_over = False

    def open(self, steps_per_epoch: int, n_epochs: int) -> tuple[int, int] | None:
        """Return the epoch and the number of its batches to continue from, or None without a
        generation.
        """
        self._steps_per_epoch = steps_per_epoch
        trainer = self._trainer
        processor = (
            trainer.processing_class if hasattr(trainer.processing_class, "tokenizer") else None
        )
        self._handler = RecoverHandler(
            self._config,
            FinetuneSpec(min(n_epochs, _MAX_EPOCHS), steps_per_epoch, 1),
            group=control_group(),
            epochs_may_change=self._epochs_may_change,
            tokenizer=None if processor is not None else trainer.processing_class,
            processor=processor,
        )
        for name, thing in self._registered().items():
            self._handler.register(name, thing)
        if (last := self._handler.peek()) is None:
            return None
        place = last.next()
        step = place.epoch_step * steps_per_epoch // place.steps_per_epoch
        return place.epoch, step * trainer.args.gradient_accumulation_steps

    def restore(self, loader: Any) -> None:
        """Restore the newest generation, if any. Model, optimizer and schedule exist by now.

        Raises:
            CheckpointMismatchError: a Trainer did not write the generation.
            Exception: as `RecoverHandler.load`.
        """
        self._notes = LoaderNotes(loader)
        info = self._open_handler.load(self._engines())
        if info is None:
            return
        if self._saved is None:
            raise CheckpointMismatchError(
                f"the generation of step {info.last_step_info.global_step} in "
                f"{self._config.recover_root} holds no state of a Trainer: another program wrote "
                "it. Use another fileroot, experiment_name or trial_name"
            )
        state, place = self._trainer.state, self._saved["place"]
        stopped = self._saved["history"]["stops"] and state.global_step < place["max_steps"]
        self.is_resuming = True
        self.is_over = state.global_step >= state.max_steps or (
            stopped and state.max_steps <= place["max_steps"]
        )
        if self.is_over and stopped:
            logger.warning(
                "the run was ended by a callback after step %d, and is not trained on. With more max_steps or "
                "num_train_epochs it is", state.global_step - 1,
            )  # fmt: skip

    def begin_epoch(self, epoch: int, trained: int, batches_per_epoch: int) -> bool:
        """Begin an epoch, or continue it after ``trained`` batches. Return whether it continues in
        the middle.

        If it does, the next loader of the host must skip ``trained`` batches, and then call
        `settle`.
        """
        trainer, handler, notes = self._trainer, self._open_handler, self._open_notes
        self._epoch, self._batches_per_epoch, self._between_epochs = epoch, batches_per_epoch, False
        self._first_step = (
            trainer.state.global_step - trained // trainer.args.gradient_accumulation_steps
        )
        if not self.is_resuming:
            notes.begin_epoch()
            return False
        assert self._saved is not None, "`restore` has looked"
        state, self._saved, self.is_resuming = self._saved, None, False
        restore_history(trainer, state["history"])
        as_before, saved = state["place"]["cut"] == self._cut(), state["notes"]
        for name in sorted(set(self._kept) ^ state["kept"].keys()):
            logger.warning(
                "%s is not both in the generation and in %s; it is left out", name, type(trainer)
            )
        restore_kept(
            trainer, {name: value for name, value in state["kept"].items() if name in self._kept}
        )
        if not as_before and forget_buffer(trainer, trained):
            logger.warning(
                "%s became %s: samples that were not trained on are sampled again, and the run is not bit-identical",
                state["place"]["cut"], self._cut(),
            )  # fmt: skip
        if trained and "begin" in saved:
            notes.resume(
                saved if as_before else saved | {"ahead": {}, "read": ""},
                trained,
                handler.restore_rng,
            )
            return True
        notes.restore_sources(saved)
        handler.restore_rng()
        notes.begin_epoch()
        return bool(trained)

    def settle(self) -> None:
        """Continue after the host has skipped the trained batches of an epoch."""
        self._open_notes.settle()

    def step_trained(self) -> None:
        """Save a snapshot if one is due, after a step was trained, logged and evaluated.

        The last step of an epoch is saved by `end_epoch`, after the evaluation at the end of the
        epoch.
        """
        step, control = self._step(), self._trainer.control
        ends = (
            step.epoch_step == self._steps_per_epoch - 1
            or control.should_epoch_stop
            or control.should_training_stop
        )
        if not ends:
            self._dump(step)

    def begin_evaluation(self, name: str, loader: Any) -> None:
        """Restore the state of ``loader`` before it is read for the evaluation dataset ``name``."""
        if (saved := self._evaluated.pop(name, None)) is not None and persistent_state(
            loader
        ) is None:
            restore_persistent(loader, saved)

    def end_epoch(self) -> None:
        """Save a snapshot if one is due, after an epoch or when the run stops in its middle."""
        step, control = self._step(), self._trainer.control
        if step.global_step < 0:
            return
        stops = control.should_training_stop
        if control.should_epoch_stop or not stops or step.epoch_step == self._steps_per_epoch - 1:
            step = StepInfo(
                self._epoch, self._steps_per_epoch - 1, step.global_step, self._steps_per_epoch
            )
            self._between_epochs = True
        self._dump(step, force=stops)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._handler is not None:
            self._handler.__exit__(*raised)

    # What is saved

    def state_dict(self) -> dict[str, Any]:
        """Return everything except weights, optimizer and schedule, for `RecoverHandler.register`."""
        trainer, given = self._trainer, None
        if not self._between_epochs:  # batches of this epoch that were trained on
            steps = trainer.state.global_step - self._first_step
            given = min(steps * trainer.args.gradient_accumulation_steps, self._batches_per_epoch)
        running = {
            name: persistent_state(loader) for name, loader in evaluation_loaders(trainer).items()
        }
        return {
            "history": _plain(history_of(trainer)),
            "kept": {name: _plain(getattr(trainer, name)) for name in self._kept},
            "notes": self._open_notes.state_dict(given),
            "place": {"max_steps": trainer.state.max_steps, "cut": self._cut()},
            "seed": trainer.args.seed,
            "evaluated": self._evaluated
            | {name: state for name, state in running.items() if state is not None},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state. Most of its values are restored when the loop begins.

        Raises:
            DatasetMismatchError: the dataset has other samples, or the same in another order.
        """
        if message := self._open_notes.other_dataset(state_dict["notes"]):
            if not self._epochs_may_change:
                raise DatasetMismatchError(
                    f"{message}. With epochs_may_change=True the run goes on with this one"
                )
            logger.warning("%s", message)
        self._saved, self._evaluated = state_dict, dict(state_dict.get("evaluated", {}))
        state, args = self._trainer.state, self._trainer.args
        if (
            seed := state_dict.get("seed", args.seed)
        ) != args.seed:  # TRL makes the order of each evaluation from it
            logger.info("args.seed is %d here: the run goes on with its own, %d", args.seed, seed)
            args.seed = seed
        restore_state(self._trainer, state_dict["history"])
        if (
            state.best_model_checkpoint is not None
            and not Path(state.best_model_checkpoint).is_dir()
        ):
            logger.warning(
                "the best checkpoint, %s, is gone: it is no longer tracked",
                state.best_model_checkpoint,
            )
            state.best_model_checkpoint = None

    def _registered(self) -> dict[str, Stateful]:
        found: dict[str, Stateful] = {"trainer": self}
        if (scaler := getattr(self._trainer.accelerator, "scaler", None)) is not None:
            found["scaler"] = scaler
        for number, callback in enumerate(self._trainer.callback_handler.callbacks):
            if isinstance(callback, Stateful) and not is_exportable(callback):
                found[f"callback_{number}_{type(callback).__name__}"] = callback
        return found

    def _engines(self) -> Any:
        trainer, args = self._trainer, self._trainer.args
        trained = HostEngine(
            trainer.model,
            trainer.optimizer,
            trainer.lr_scheduler,
            ranks_with_same_data=self._ranks_with_same_samples,
            settings={name: getattr(args, name) for name in _NUMERICAL_ARGS if hasattr(args, name)},
        )
        if (
            getattr(args, "sync_ref_model", False)
            and getattr(trainer, "ref_model", None) is not None
        ):
            reference = HostEngine(
                trainer.ref_model, ranks_with_same_data=self._ranks_with_same_samples
            )
            return {"model": trained, "ref_model": reference}
        return trained

    def _cut(self) -> dict[str, int]:
        """Arguments that assign samples to batches and ranks."""
        args = self._trainer.args
        names = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "steps_per_generation",
            "num_iterations",
        )
        cut = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
        return cut | {"world_size": get_world_size() // self._ranks_with_same_samples}

    @property
    def _ranks_with_same_samples(self) -> int:
        trainer = self._trainer
        return trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()

    # Current place of the run

    @property
    def _open_handler(self) -> RecoverHandler:
        assert self._handler is not None, "`open` comes first"
        return self._handler

    @property
    def _open_notes(self) -> LoaderNotes:
        assert self._notes is not None, "`restore` has made them"
        return self._notes

    def _step(self) -> StepInfo:
        """Step that was trained last."""
        last = self._trainer.state.global_step - 1
        return StepInfo(self._epoch, last - self._first_step, last, self._steps_per_epoch)

    def _dump(self, step: StepInfo, force: bool = False) -> None:
        metrics = next(
            (logs for logs in reversed(self._trainer.state.log_history) if "step" in logs), {}
        )
        numbers = {
            name: float(value) for name, value in metrics.items() if isinstance(value, int | float)
        }
        self._open_handler.dump(self._engines(), step, force=force, metrics=numbers)


def _plain(value: Any) -> Any:
    """Convert the containers of a trainer's state to lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
