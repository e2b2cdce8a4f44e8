"""One call of ``train`` of transformers' Trainer, with snapshots after its steps.

Besides model, optimizer and schedule a snapshot holds the Trainer's counters and logs, its
callbacks, the state that TRL's classes keep between steps (samples for several steps), and the
place in the data.
"""

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from ..engine.api import FinetuneSpec, StateDict, Stateful, StepInfo
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
"""Most epochs of a dataset with a length. Trainer gives a stream more, each of ``max_steps``."""
_NUMERICAL_ARGS = (
    # Arguments of transformers.
    "max_grad_norm",
    "bf16",
    "fp16",
    "tf32",
    "optim",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    # Arguments of TRL.
    "beta",
    "epsilon",
    "epsilon_high",
    "loss_type",
    "scale_rewards",
    "temperature",
    "num_generations",
    "max_length",
    "max_completion_length",
    "importance_sampling_level",
    "disable_dropout",
)
"""Arguments of transformers' and TRL's trainers that change the numbers of a step and are not part
of the state.
"""


class TrainerRun:
    """Run of a Trainer. `holdfast.utils.compat.trainer_private.TrainerSeam` calls its methods in
    their order here.

    Args:
        trainer, config: the trainer, and the config of its `RecoverHandler`.
        last: last step of the generation to resume from, if there is one.
        kept: names of further attributes of the trainer to save.
        epochs_may_change: as for `RecoverHandler`. The place in the data is then the same fraction
            of the epoch.

    Attributes:
        is_resuming: whether a generation was restored and its epoch has not continued yet.
        is_over: whether the restored generation is the end of the run.
        n_epochs: number of epochs of the run, from `restore` on.
    """

    def __init__(
        self,
        trainer: Any,
        config: RecoverConfig,
        last: StepInfo | None,
        kept: tuple[str, ...],
        epochs_may_change: bool,
    ) -> None:
        self._trainer = trainer
        self._config = config
        self._last = last
        self._kept = kept
        self._epochs_may_change = epochs_may_change
        self._handler: RecoverHandler | None = None
        self._notes: LoaderNotes | None = None

        # The restored state, until the loop begins. Persistent loaders that the run had started
        # and this process has not.
        self._saved: dict[str, Any] | None = None
        self._evaluated: dict[str, Any] = {}

        # The place: the current epoch, and the number of steps before it.
        self._steps_per_epoch = self._batches_per_epoch = self._epoch = self._first_step = 0
        self._between_epochs = True
        self.is_resuming = self.is_over = False

        # Epochs of the run, and steps of those before the place that it has not taken, because they
        # had fewer then.
        self.n_epochs = self._not_taken = 0

    def most_epochs(self, n_epochs: int) -> int:
        """Return how many epochs the loop of the host may need for what its arguments call
        ``n_epochs``. How many it does need is known once a generation was restored.
        """
        self.n_epochs = n_epochs
        if self._last is None or self._trainer.args.max_steps <= 0:
            return n_epochs
        # The epochs of the generation, and then at most those that all steps take.
        return min(n_epochs + self._last.epoch + 1, sys.maxsize)

    def open(self, steps_per_epoch: int) -> tuple[int, int] | None:
        """Return the epoch and the number of its batches to continue from, or None without a
        generation.
        """
        self._steps_per_epoch = steps_per_epoch
        trainer = self._trainer
        trainer.state.num_train_epochs = self.n_epochs
        tokenizer = trainer.processing_class
        processor = None
        if hasattr(tokenizer, "tokenizer"):
            processor = tokenizer
            tokenizer = None
        self._handler = RecoverHandler(
            self._config,
            FinetuneSpec(min(self.n_epochs, _MAX_EPOCHS), steps_per_epoch, 1),
            group=control_group(),
            # A stream may be read for more steps.
            epochs_may_change=self._epochs_may_change or self._is_stream,
            tokenizer=tokenizer,
            processor=processor,
        )
        for name, thing in self._registered().items():
            self._handler.register(name, thing)
        last = self._handler.peek()
        if last is None:
            return None

        # With fewer steps per epoch, more were taken than those before it now: the last epoch is
        # trained all the same.
        epoch, step = self._place_after(last)
        if trainer.args.max_steps <= 0:
            before = epoch * steps_per_epoch + step
            trainer.state.max_steps += max(0, last.global_step + 1 - before)
        return epoch, step * trainer.args.gradient_accumulation_steps

    def _place_after(self, last: StepInfo) -> tuple[int, int]:
        """Epoch and number of its steps to continue from. With other steps per epoch it is the same
        fraction of the epoch, and in a stream after as many steps.
        """
        if self._is_stream and last.epoch == 0 and last.epoch_step == last.global_step:
            # Its max_steps, and not its end, have ended the first epoch.
            return 0, last.epoch_step + 1
        place = last.next()
        if self._is_stream:
            return place.epoch, place.epoch_step
        return place.epoch, place.epoch_step * self._steps_per_epoch // place.steps_per_epoch

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
        # With more steps per epoch, fewer were taken than those before it now: max_steps take more
        # epochs.
        state = self._trainer.state
        last = info.last_step_info
        if self._trainer.args.max_steps > 0 and not self._is_stream:
            steps_per_epoch = self._steps_per_epoch
            self._not_taken = self._saved["place"].get("not_taken", 0)
            if last.steps_per_epoch != steps_per_epoch:
                epoch, step = self._place_after(last)
                before = epoch * steps_per_epoch + step
                self._not_taken = max(0, before - state.global_step)
            n_epochs = -(-(state.max_steps + self._not_taken) // steps_per_epoch)
            self.n_epochs = max(self.n_epochs, n_epochs)
            state.num_train_epochs = self.n_epochs

        # A run that a callback had stopped goes on only if it may take more steps now.
        saved_max = self._saved["place"]["max_steps"]
        stopped = self._saved["history"]["stops"] and state.global_step < saved_max
        self.is_resuming = True
        self.is_over = state.global_step >= state.max_steps or last.next().epoch >= self.n_epochs
        if stopped and state.max_steps <= saved_max:
            self.is_over = True
        if self.is_over and stopped:
            logger.warning(
                "the run was ended by a callback after step %d, and is not trained on. With more "
                "max_steps or num_train_epochs it is",
                state.global_step - 1,
            )

    def begin_epoch(self, epoch: int, trained: int, batches_per_epoch: int) -> bool:
        """Begin an epoch, or continue it after ``trained`` batches. Return whether it continues in
        the middle.

        If it does, the next loader of the host must skip ``trained`` batches, and then call
        `settle`.
        """
        trainer = self._trainer
        notes = self._open_notes
        steps = trained // trainer.args.gradient_accumulation_steps
        self._epoch = epoch
        self._batches_per_epoch = batches_per_epoch
        self._between_epochs = False
        self._first_step = trainer.state.global_step - steps
        if not self.is_resuming:
            notes.begin_epoch()
            return False

        assert self._saved is not None, "`restore` has looked"
        state = self._saved
        self._saved = None
        self.is_resuming = False
        restore_history(trainer, state["history"])

        # Attributes that only the saved run or only this one keeps are left out.
        kept = state["kept"]
        for name in sorted(set(self._kept) ^ kept.keys()):
            logger.warning(
                "%s is not both in the generation and in %s; it is left out", name, type(trainer)
            )
        restore_kept(trainer, {name: value for name, value in kept.items() if name in self._kept})

        # Samples that wait for their step belong to a rank and a batch of the saved cut.
        saved_cut = state["place"]["cut"]
        cut = self._cut()
        if saved_cut != cut and forget_buffer(trainer, trained):
            logger.warning(
                "%s became %s: samples that were not trained on are sampled again, and the run is "
                "not bit-identical",
                saved_cut,
                cut,
            )

        # Generators follow once the host has skipped batches, if that is in the middle of an epoch.
        saved = state["notes"]
        restore_rng = self._open_handler.restore_rng
        if trained and "begin" in saved:
            if saved_cut != cut:  # digests and batches read ahead do not apply
                saved = saved | {"ahead": {}, "read": ""}
            notes.resume(saved, trained, restore_rng)
            return True
        notes.restore_sources(saved)
        restore_rng()
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
        step = self._step()
        control = self._trainer.control
        stops = control.should_epoch_stop or control.should_training_stop
        if stops or step.epoch_step == self._steps_per_epoch - 1 or self._has_gradients:
            return
        self._dump(step)

    def begin_evaluation(self, name: str, loader: Any) -> None:
        """Restore the state of ``loader`` before it is read for the evaluation dataset ``name``."""
        saved = self._evaluated.pop(name, None)
        if saved is not None and persistent_state(loader) is None:
            restore_persistent(loader, saved)

    def end_epoch(self) -> None:
        """Save a snapshot if one is due, after an epoch or when the run stops in its middle.

        Gradients of batches that wait for the next step, at the end of a stream, are not in a
        snapshot: it is saved after that step. After the last epoch none follows.
        """
        step = self._step()
        if step.global_step < 0:
            return
        control = self._trainer.control
        stops = control.should_training_stop
        if self._has_gradients and not stops and self._epoch + 1 < self.n_epochs:
            every = self._config.freq_epochs
            if every is not None and (self._epoch + 1) % every == 0:
                self._open_handler.make_due()
            return
        last = self._steps_per_epoch - 1
        has_all_steps = step.epoch_step == last and not self._is_stream
        if control.should_epoch_stop or not stops or has_all_steps:
            # The epoch is over, even if it had fewer steps.
            step = StepInfo(self._epoch, last, step.global_step, self._steps_per_epoch)
            self._between_epochs = True
        self._dump(step, force=stops)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._handler is not None:
            self._handler.__exit__(*raised)

    # Saved state

    def state_dict(self) -> StateDict:
        """Return all but weights, optimizer and schedule, for `RecoverHandler.register`."""
        trainer = self._trainer
        given = None
        if not self._between_epochs:  # batches of this epoch that were trained on
            steps = trainer.state.global_step - self._first_step
            given = min(steps * trainer.args.gradient_accumulation_steps, self._batches_per_epoch)

        # Loaders that run here replace the restored ones.
        evaluated = dict(self._evaluated)
        for name, loader in evaluation_loaders(trainer).items():
            state = persistent_state(loader)
            if state is not None:
                evaluated[name] = state
        return {
            "history": _plain(history_of(trainer)),
            "kept": {name: _plain(getattr(trainer, name)) for name in self._kept},
            "notes": self._open_notes.state_dict(given),
            "place": {
                "max_steps": trainer.state.max_steps,
                "not_taken": self._not_taken,
                "is_stream": self._is_stream,
                "cut": self._cut(),
            },
            "seed": trainer.args.seed,
            "evaluated": evaluated,
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Take a state. Most of its values are restored when the loop begins.

        Raises:
            CheckpointMismatchError: a step has another number of samples.
            DatasetMismatchError: the dataset has other samples, or the same in another order.
        """
        saved_place = state_dict["place"]
        # Older versions tell it by the digest of the dataset alone.
        was_stream = self._is_stream and not state_dict["notes"]["dataset"]
        was_stream = saved_place.get("is_stream", was_stream)
        if was_stream != self._is_stream and not self._epochs_may_change:
            kinds = {True: "is a stream", False: "has a length"}
            raise DatasetMismatchError(
                f"the dataset of the run {kinds[was_stream]}, this one {kinds[self._is_stream]}: "
                "samples would be lost or repeated. Resume with the dataset of the run, or set "
                "epochs_may_change=True to go on with this one"
            )

        # With few steps per epoch, or a stream, other batches may make as many steps.
        saved_cut = saved_place["cut"]
        cut = self._cut()
        saved_samples = self._samples_of_a_step(saved_cut)
        samples = self._samples_of_a_step(cut)
        groups_by_length = self._trainer.args.train_sampling_strategy == "group_by_length"
        advice = "Choose gradient_accumulation_steps so that it has as many"
        if groups_by_length:
            advice = "Resume with the processes and batches of the run"
        problem = ""
        if samples != saved_samples:
            problem = f"a step of the run has {saved_samples} samples ({saved_cut}), here it has "
            problem += f"{samples} ({cut})"
        elif groups_by_length and _samples_of_a_process(cut) != _samples_of_a_process(saved_cut):
            # LengthGroupedSampler is not told how many processes there are.
            problem = (
                "group_by_length makes the order of an epoch from the samples of a step in one "
                f"process, which were {_samples_of_a_process(saved_cut)} ({saved_cut}) and are "
                f"{_samples_of_a_process(cut)} here ({cut})"
            )
        if problem:
            problem += ": samples would be lost or repeated"
            if not self._epochs_may_change:
                raise CheckpointMismatchError(
                    f"{problem}. {advice}, or set epochs_may_change=True to go on at the same part "
                    "of the epoch, in a stream after as many steps"
                )
            if self._is_stream:
                logger.warning("%s", problem)

        message = self._open_notes.other_dataset(state_dict["notes"])
        if message:
            if not self._epochs_may_change:
                raise DatasetMismatchError(
                    f"{message}. With epochs_may_change=True the run goes on with this one"
                )
            logger.warning("%s", message)
        self._saved = state_dict
        self._evaluated = dict(state_dict.get("evaluated", {}))

        # TRL makes the order of each evaluation from the seed.
        args = self._trainer.args
        seed = state_dict.get("seed", args.seed)
        if seed != args.seed:
            logger.info("args.seed is %d here: the run goes on with its own, %d", args.seed, seed)
            args.seed = seed

        state = self._trainer.state
        restore_state(self._trainer, state_dict["history"])
        best = state.best_model_checkpoint
        if best is not None and not Path(best).is_dir():
            logger.warning("the best checkpoint, %s, is gone: it is no longer tracked", best)
            state.best_model_checkpoint = None

    def _registered(self) -> dict[str, Stateful]:
        # Callbacks that export their state are in the history of the trainer.
        found: dict[str, Stateful] = {"trainer": self}
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        if scaler is not None:
            found["scaler"] = scaler

        # Numbered within their class, because other callbacks may come and go, as with report_to.
        numbers: Counter[str] = Counter()
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, Stateful) and not is_exportable(callback):
                name = type(callback).__name__
                found[f"callback_{name}_{numbers[name]}"] = callback
                numbers[name] += 1
        return found

    def _engines(self) -> Any:
        trainer = self._trainer
        args = trainer.args
        n_same = self._ranks_with_same_samples
        trained = HostEngine(
            trainer.model,
            trainer.optimizer,
            trainer.lr_scheduler,
            ranks_with_same_data=n_same,
            settings={name: getattr(args, name) for name in _NUMERICAL_ARGS if hasattr(args, name)},
        )

        # A reference model that follows the policy changes during the run.
        reference = getattr(trainer, "ref_model", None)
        if reference is None or not getattr(args, "sync_ref_model", False):
            return trained
        return {"model": trained, "ref_model": HostEngine(reference, ranks_with_same_data=n_same)}

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
        if args.n_gpu > 1:  # in nn.DataParallel
            cut["n_gpu"] = args.n_gpu
        return cut | {"world_size": get_world_size() // self._ranks_with_same_samples}

    def _samples_of_a_step(self, cut: Mapping[str, int]) -> int:
        samples = _samples_of_a_process(cut)
        # A batch is otherwise one of all ranks.
        if not self._trainer.args.accelerator_config.split_batches:
            samples *= cut["world_size"]
        return samples

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

    @property
    def _is_stream(self) -> bool:
        """Whether the dataset has no length."""
        return self.n_epochs > _MAX_EPOCHS

    @property
    def _has_gradients(self) -> bool:
        """Whether the last batch was not the last one of a step."""
        return not self._trainer.accelerator.sync_gradients

    def _step(self) -> StepInfo:
        """Step that was trained last."""
        last = self._trainer.state.global_step - 1
        return StepInfo(self._epoch, last - self._first_step, last, self._steps_per_epoch)

    def _dump(self, step: StepInfo, force: bool = False) -> None:
        """Save a snapshot if one is due, with the numbers that were logged at this step."""
        # Earlier numbers are not those of these weights. Each evaluation dataset has its own log.
        state = self._trainer.state
        numbers: dict[str, float] = {}
        for logs in reversed(state.log_history):
            if logs.get("step", state.global_step) != state.global_step:
                break
            for name, value in logs.items():
                if isinstance(value, int | float):
                    numbers.setdefault(name, float(value))
        self._open_handler.dump(self._engines(), step, force=force, metrics=numbers)


def _samples_of_a_process(cut: Mapping[str, int]) -> int:
    samples = cut["per_device_train_batch_size"] * cut["gradient_accumulation_steps"]
    return samples * cut.get("n_gpu", 1)


def _plain(value: Any) -> Any:
    """Convert the containers of a trainer's state to lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
