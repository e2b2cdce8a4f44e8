"""Private methods of transformers' Trainer: the steps of its loop at which `TrainerRun` is called.

A callback is too late: at ``on_train_begin`` the place in the data is already fixed.
"""

import json
from typing import Any

import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from ..distributed import gather_numbers
from . import privates, require

_INIT = "max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial"
_LOOP = (
    "epoch, epochs_trained, steps_trained_in_current_epoch, steps_in_epoch, resume_from_checkpoint"
)

NAMES = privates(
    {
        "resume a Trainer exactly": [
            "transformers:Trainer.set_initial_training_values(args, dataloader)",
            f"transformers:Trainer._init_training_state({_INIT})",
            "transformers:Trainer._prepare_for_training"
            "(max_steps, train_dataloader, resume_from_checkpoint)",
            f"transformers:Trainer._run_epoch({_LOOP})",
            "transformers:Trainer._load_rng_state(checkpoint)",
            "transformers:Trainer._maybe_log_save_evaluate(tr_loss, model, trial, epoch)",
            "transformers:Trainer._evaluate(trial, ignore_keys_for_eval, skip_scheduler)",
        ],
        "save what callbacks count": ["transformers.trainer_callback:ExportableState"],
    }
)
require("transformers", NAMES)

_RESUMED = "a generation of Holdfast"
"""Value that Trainer's loop takes for the checkpoint that it resumes from."""

_LOGS = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged")
_HISTORY = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of TrainerState that say what happened. The other fields come from the arguments."""


class TrainerSeam(Trainer):
    """Trainer that calls a `TrainerRun` at each stage. The run exists during ``train``."""

    recovery: Any = None
    _loss_of_others = 0.0  # that the next log adds to the restored loss of this rank

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple:
        """Return Trainer's own values, with epochs enough for a run that is resumed."""
        n_epochs, *others = super().set_initial_training_values(args, dataloader)
        if self.recovery is not None:
            n_epochs = self.recovery.most_epochs(n_epochs)
        return (n_epochs, *others)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        place = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._loss_of_others = 0.0
        run = _run_of(self)
        return run.open(num_update_steps_per_epoch) or place

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        # `open` may have changed their number, by which the schedule is made.
        model, loader = super()._prepare_for_training(
            self.state.max_steps, train_dataloader, resume_from_checkpoint
        )
        _run_of(self).restore(loader)
        return model, loader

    def _run_epoch(self, **given: Any) -> None:
        run = _run_of(self)
        epoch = given["epoch"]
        skipped = 0
        if epoch == given["epochs_trained"]:
            skipped = given["steps_trained_in_current_epoch"]
        # A run that had all its steps before it was resumed trains no more.
        if run.is_over:
            self.control.should_training_stop = True
            return
        if run.begin_epoch(epoch, skipped, given["steps_in_epoch"]):
            given["resume_from_checkpoint"] = _RESUMED
        super()._run_epoch(**given)
        run.end_epoch()
        # The loop has more epochs than the run, see `TrainerRun.most_epochs`.
        if epoch + 1 == run.n_epochs:
            self.control.should_training_stop = True

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint == _RESUMED:
            _run_of(self).settle()
        else:
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        last_logged = self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if self._globalstep_last_logged != last_logged:
            self._total_loss_scalar -= self._loss_of_others
            self._loss_of_others = 0.0
        _run_of(self).step_trained()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return Trainer's own loader, continuing the persistent workers of the run that is
        resumed.
        """
        loader = super().get_eval_dataloader(eval_dataset)
        if self.recovery is not None:
            name = "eval"
            if isinstance(eval_dataset, str):
                name = eval_dataset
            self.recovery.begin_evaluation(name, loader)
        return loader

    def _evaluate(
        self, trial: Any, ignore_keys_for_eval: list[str] | None, skip_scheduler: bool = False
    ) -> dict:
        # ``eval_on_start`` was before the first step.
        if self.recovery is not None and self.recovery.is_resuming:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)


def _run_of(trainer: TrainerSeam) -> Any:
    assert trainer.recovery is not None, "the loop of a Trainer runs in `train`"
    return trainer.recovery


def evaluation_loaders(trainer: Any) -> dict[str, Any]:
    """Return the evaluation loaders with persistent workers that a Trainer keeps, by dataset."""
    return getattr(trainer, "_eval_dataloaders", {})


def history_of(trainer: Any) -> dict[str, Any]:
    """Return the progress and logs of a Trainer as plain values, with the state as JSON like in its
    own checkpoints.
    """
    state = {name: getattr(trainer.state, name) for name in _HISTORY}
    # The loss since the last log is a tensor on the device. The loop changes it in place.
    counted = {name: trainer.__dict__[name] for name in _LOGS if name in trainer.__dict__}
    loss = counted.get("_tr_loss")
    if isinstance(loss, torch.Tensor):
        counted["_tr_loss"] = loss.detach().cpu().clone()
    callbacks = []
    for each in _exportable(trainer):
        callbacks.append([type(each).__name__, each.state()["attributes"]])
    return {
        "state": json.dumps(state),
        "callbacks": json.dumps(callbacks),
        "stops": trainer.control.should_training_stop,
        "flos": float(trainer.current_flos),
        **counted,
    }


def restore_state(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore the state of a Trainer from `history_of`."""
    for name, value in json.loads(saved["state"]).items():
        setattr(trainer.state, name, value)


def restore_history(trainer: Any, saved: dict[str, Any]) -> None:
    """Restore everything from `history_of`. All ranks call it, in the loop, which has reset its
    counters.
    """
    restore_state(trainer, saved)
    trainer.current_flos = saved["flos"]
    for name in set(_LOGS) & saved.keys():
        value = saved[name]
        if isinstance(value, torch.Tensor):
            value = value.to(trainer.args.device)
        setattr(trainer, name, value)

    # Newer Trainers report the mean loss of the steps of one `train`, others that of all steps. A
    # log counts the mean loss of the ranks, an end without one that of this rank.
    if hasattr(trainer, "_initial_global_step"):
        own = float(trainer._tr_loss)
        losses = gather_numbers([own])
        trainer._total_loss_scalar = -own
        trainer._loss_of_others = sum(loss for (loss,) in losses) / len(losses) - own

    # Callbacks of one class are matched in their order.
    left = list(_exportable(trainer))
    for name, attributes in json.loads(saved["callbacks"]):
        callback = next((each for each in left if type(each).__name__ == name), None)
        if callback is not None:
            left.remove(callback)
            vars(callback).update(attributes)


def is_exportable(callback: Any) -> bool:
    """Return whether a callback exports its state."""
    return isinstance(callback, ExportableState)


def _exportable(trainer: Any) -> list[Any]:
    return [each for each in trainer.callback_handler.callbacks if is_exportable(each)]
