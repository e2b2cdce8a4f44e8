"""Messages, refusals and loads of a recoverable Trainer at its start."""

import errno
import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from examples.integrations.tiny import digest, sums, tiny_model, tiny_tokenizer
from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.integrations import transformers as integration
from holdfast.integrations.transformers import gaps, recoverable
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.recover.saving import snapshot as snapshot_saving
from holdfast.utils.compat import require_attributes
from holdfast.utils.errors import (
    CheckpointMismatchError,
    ConfigError,
    DatasetMismatchError,
    Preempted,
    UnsupportedVersionError,
)
from tests.integrations.processes import run_job
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)


RECOVERABLE = recoverable(Trainer)


class Own(Trainer):
    """A trainer with additional state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: dict[str, Any] = {"steps": torch.zeros(1)}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen["steps"] += 1
        return super().training_step(*args, **kwargs)


class Forgetful(TrainerCallback):
    def __init__(self) -> None:
        self.best = 1.0


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids}


def make(
    folder: Path,
    base: Any = RECOVERABLE,
    *,
    callbacks: Any = (),
    mode: str = "auto",
    rows: Any = None,
    recover: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    common = {
        "output_dir": str(folder / "trainer"),
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    common |= {"per_device_train_batch_size": 2, "max_steps": 6, "save_strategy": "no"}
    if rows is None:
        rows = Dataset.from_list([{"input_ids": [i % 15 + 3] * 4} for i in range(8)])
    keys: dict[str, Any] = {"fileroot": str(folder / "runs"), "freq_steps": 2, "mode": mode}
    keys |= recover or {}
    given: dict[str, Any] = {} if base in (Trainer, Own) else {"recover": RecoverConfig(**keys)}
    own = ("epochs_may_change", "eval_dataset")
    given |= {name: options.pop(name) for name in own if name in options}
    return base(
        model=tiny_model(),
        args=TrainingArguments(**common | options),
        train_dataset=rows,
        callbacks=list(callbacks),
        data_collator=collate,
        **given,
    )


def generations(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("runs/*/*/recover/global_step_*"))


def test_a_checkpoint_of_trainers_own_is_loaded_as_long_as_there_is_no_generation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, Trainer, max_steps=3, save_strategy="steps", save_steps=3).train()
    caplog.set_level(logging.INFO)
    trainer = make(tmp_path, max_steps=5)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 5 and generations(tmp_path) == [
        "global_step_3",
        "global_step_4",
    ]
    again = make(tmp_path, max_steps=6)
    again.train(resume_from_checkpoint=True)
    assert (
        "there is a generation of step 4: True is not used" in caplog.text
        and again.state.global_step == 6
    )
    assert "resumed at step 5 from" in caplog.text
    caplog.clear()
    caplog.set_level(logging.WARNING)
    make(tmp_path, max_steps=6).train()
    assert "resumed at step 6 from" in caplog.text, (
        "a user who configures nothing sees where the run goes on"
    )


def test_an_unused_checkpoint_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, Trainer, max_steps=1, save_strategy="steps", save_steps=1).train()
    make(tmp_path, max_steps=1).train()
    assert (
        "checkpoint-1: training starts at step 0. train(resume_from_checkpoint=True) begins"
        in caplog.text
    )


@pytest.mark.slow
def test_attributes_of_a_subclass_come_back_where_they_are_named(tmp_path: Path) -> None:
    named = recoverable(Own, attributes=("seen",))
    assert gaps(make(tmp_path, named), told=True) == []
    make(tmp_path, named, max_steps=4).train()
    again = make(tmp_path, named, max_steps=6)
    again.train()
    assert again.seen["steps"].item() == 6
    with pytest.raises(ConfigError, match="RecoverableOwn has no attribute '_buffer'"):
        make(tmp_path, recoverable(Own, attributes=("_buffer",)))


class Counted(TrainerCallback):
    """A callback with a state: the steps that it has seen, from a start."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.seen = state_dict["seen"]


def test_callbacks_keep_their_state_if_another_one_joins_before_them(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2, callbacks=[Counted(), Counted(10)]).train()
    counted = [Counted(), Counted()]
    make(tmp_path, max_steps=4, callbacks=[Forgetful(), *counted]).train()
    assert [each.seen for each in counted] == [4, 14]


def test_state_that_is_not_restored_is_reported_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, recoverable(Own), callbacks=[Forgetful()], dataloader_num_workers=1)
    assert "Own is a class of your own: what it keeps between steps is not saved" in caplog.text
    assert "callback Forgetful has attributes (best) and says nothing of its state" in caplog.text
    assert "collate may draw random numbers in the 1 processes" in caplog.text
    caplog.clear()
    make(tmp_path)
    assert "not saved" not in caplog.text
    make(tmp_path).train()
    assert "class of your own" not in caplog.text


def test_a_generation_has_the_numbers_of_its_own_step_alone(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"input_ids": [5] * 4}] * 2)
    make(
        tmp_path,
        max_steps=4,
        logging_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset={"first": rows, "second": rows},
        recover={"freq_steps": 1, "async_save": False, "max_ckpt_to_keep": 4},
    ).train()
    logged: list[set[str]] = []
    for step in range(3):
        (info,) = tmp_path.glob(f"runs/*/*/recover/global_step_{step}/recover_info.json")
        metrics = json.loads(info.read_text())["metrics"]
        logged.append(metrics.keys() & {"loss", "eval_first_loss", "eval_second_loss"})
    assert logged == [set(), {"loss", "eval_first_loss", "eval_second_loss"}, set()]


def test_state_that_vllm_does_not_restore_is_reported(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.args.use_vllm, trainer.args.vllm_mode = True, "colocate"
    (sampling,) = gaps(trainer, told=True)
    assert "samples other completions after it" in sampling
    trainer.args.vllm_mode = "server"
    assert "start the server anew" in gaps(trainer, told=True)[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignore_data_skip": True}, "samples would be trained on twice"),
        ({"auto_find_batch_size": True}, "set per_device_train_batch_size"),
        (
            {"dataloader_in_order": False, "dataloader_num_workers": 2},
            "the order in which the 2 workers finish",
        ),
    ],
)
def test_trainers_that_cannot_be_resumed_exactly_are_refused_with_the_reason(
    options: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"cannot be resumed exactly: .*{message}"):
        make(tmp_path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "skips too few batches"),
        ({"split_batches": True}, "completes the last batch .* set dataloader_drop_last"),
    ],
)
def test_a_trainer_of_two_ranks_that_dispatches_batches_is_refused_with_the_reason(
    options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "get_world_size", lambda: 2)
    config = {"dispatch_batches": True} | options
    with pytest.raises(ConfigError, match=f"cannot be resumed exactly: .*{message}"):
        make(tmp_path, accelerator_config=config)


def test_a_trainer_that_dispatches_split_batches_of_one_size_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(integration, "get_world_size", lambda: 2)
    config = {"dispatch_batches": True, "split_batches": True}
    make(tmp_path, accelerator_config=config, dataloader_drop_last=True)


def test_other_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected one, as GRPOTrainer or SFTTrainer"):
        recoverable(torch.nn.Linear)  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="hyperparameter_search trains many runs"):
        make(tmp_path).train(trial=1)


@pytest.mark.slow
def test_another_batch_size_is_resumed_at_the_same_part_of_the_epoch_where_allowed(
    tmp_path: Path,
) -> None:
    make(tmp_path, max_steps=6).train()  # 4 steps per epoch
    with pytest.raises(CheckpointMismatchError, match="4 steps an epoch, this one has 8"):
        make(tmp_path, per_device_train_batch_size=1, max_steps=20).train()
    places: list[float] = []

    class Note(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            places.append(state.epoch)

    make(
        tmp_path,
        per_device_train_batch_size=1,
        max_steps=9,
        epochs_may_change=True,
        callbacks=[Note()],
    ).train()
    assert places == [1.625, 1.75, 1.875]


@pytest.mark.parametrize("batch_size", [4, 8])
def test_a_run_with_larger_batches_trains_its_last_epoch_to_the_end(
    tmp_path: Path, batch_size: int
) -> None:
    make(tmp_path, max_steps=6).train()  # of 8, in 2 epochs
    resumed = make(
        tmp_path,
        per_device_train_batch_size=batch_size,
        max_steps=-1,
        num_train_epochs=2,
        logging_steps=1,
        epochs_may_change=True,
    )
    resumed.train()
    places = [row["epoch"] for row in resumed.state.log_history if row.get("step", 0) > 6]
    assert places[:1] == [2.0]
    # The schedule ends with the run.
    assert set(resumed.lr_scheduler.get_last_lr()) == {0.0}


def test_another_batch_size_is_refused_where_an_epoch_has_as_many_steps(tmp_path: Path) -> None:
    # Two steps per epoch, for 8 rows.
    make(tmp_path, per_device_train_batch_size=4, max_steps=3).train()
    refused = "a step of the run has 4 samples .* here it has 7 .*: samples would be lost"
    with pytest.raises(CheckpointMismatchError, match=refused):
        make(tmp_path, per_device_train_batch_size=7, max_steps=4).train()
    cut: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    resumed = make(tmp_path, **cut, max_steps=4)
    resumed.train()
    assert resumed.state.global_step == 4


def stopped_in_its_epoch(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="stopped here"):
        make(folder, callbacks=[StopAt(2)], recover={"freq_steps": 1}, **options).train()


def test_an_order_by_length_is_refused_with_another_number_of_processes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_sampling_strategy": "group_by_length"}
    codes = run_job(stopped_in_its_epoch, tmp_path, options, ranks=2)
    assert codes == [0, 0], (tmp_path / "log").read_text()

    # A step has as many samples, but the order is made from those of one process.
    options |= {"gradient_accumulation_steps": 2}
    refused = r"one process, which were 2 .* and are 4 here .*: samples would be lost"
    with pytest.raises(CheckpointMismatchError, match=refused):
        make(tmp_path, **options).train()
    assert generations(tmp_path) == ["global_step_0"]
    allowed = make(tmp_path, epochs_may_change=True, **options)
    allowed.train()
    assert allowed.state.global_step == 6


def test_another_batch_size_is_refused_for_a_stream(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stopped here"):
        make(tmp_path, rows=Stream(), callbacks=[StopAt(3)]).train()
    with pytest.raises(CheckpointMismatchError, match=r"here it has 1 .*: samples would"):
        make(tmp_path, rows=Stream(), per_device_train_batch_size=1).train()


def test_another_number_of_gpus_in_one_process_is_refused_for_a_stream(tmp_path: Path) -> None:
    """A batch of `nn.DataParallel` is one for all GPUs of the process."""
    with pytest.raises(RuntimeError, match="stopped here"):
        make(tmp_path, rows=Stream(), callbacks=[StopAt(3)]).train()
    resumed = make(tmp_path, rows=Stream())
    resumed.args._n_gpu = 2
    with pytest.raises(
        CheckpointMismatchError, match=r"here it has 4 .*'n_gpu': 2.*: samples would"
    ):
        resumed.train()


def test_a_run_with_smaller_batches_takes_all_of_its_max_steps(tmp_path: Path) -> None:
    make(tmp_path, max_steps=12).train()  # 3 epochs of 4 steps, of 5
    smaller: dict[str, Any] = {
        "max_steps": 20,
        "per_device_train_batch_size": 1,
        "epochs_may_change": True,
    }
    # The second start has the steps per epoch of its generation.
    with pytest.raises(RuntimeError, match="stopped here"):
        make(tmp_path, callbacks=[StopAt(17)], **smaller).train()
    steps = Steps()
    resumed = make(tmp_path, callbacks=[steps], **smaller)
    resumed.train()
    assert (resumed.state.global_step, resumed.state.epoch, steps.n_trained) == (20, 4.0, 4)
    assert resumed.state.num_train_epochs == 4
    steps.n_trained = 0
    make(tmp_path, callbacks=[steps], **smaller).train()
    assert steps.n_trained == 0


EACH_EPOCH = {"freq_steps": None, "freq_epochs": 1, "async_save": False}


class Stream(IterableDataset):
    """Five batches of two rows."""

    def __iter__(self) -> Any:
        return iter([{"input_ids": [i + 3] * 4} for i in range(10)])


class StopAt(TrainerCallback):
    """Ends the run with an error at the end of a step, before the step is saved."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            raise RuntimeError("stopped here")


def test_a_batch_that_waits_for_the_next_epoch_of_a_stream_is_not_lost(tmp_path: Path) -> None:
    options = {
        "rows": Stream(),
        "recover": EACH_EPOCH,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
    }
    untouched = make(tmp_path / "untouched", **options)
    untouched.train()
    with pytest.raises(RuntimeError, match="stopped here"):
        make(tmp_path, callbacks=[StopAt(4)], **options).train()
    assert generations(tmp_path) == ["global_step_2"]  # the step after the first epoch
    resumed = make(tmp_path, **options)
    resumed.train()
    found, expected = (digest(each.model, each.optimizer) for each in (resumed, untouched))
    assert found == expected


@pytest.mark.parametrize("stop_at", slow_but([3], [None, 3]), ids=["after its end", "after a kill"])
def test_a_run_on_a_stream_goes_on_where_it_was_with_more_steps(
    tmp_path: Path, stop_at: int | None
) -> None:
    given: dict[str, Any] = {"rows": Stream(), "lr_scheduler_type": "constant"}
    given |= {"learning_rate": 1e-2, "recover": {"freq_steps": 1}}
    untouched = make(tmp_path / "untouched", max_steps=8, **given)
    untouched.train()

    # Its epochs have 5 steps.
    first = make(tmp_path, max_steps=4, callbacks=[StopAt(stop_at or 9)], **given)
    if stop_at is None:
        first.train()
    else:
        with pytest.raises(RuntimeError, match="stopped here"):
            first.train()
    resumed = make(tmp_path, max_steps=8, **given)
    resumed.train()
    found, expected = (digest(each.model, each.optimizer) for each in (resumed, untouched))
    assert (found, resumed.state.epoch) == (expected, untouched.state.epoch)


class ShortEpochs(TrainerCallback):
    """Ends each epoch after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


def test_a_stream_whose_epochs_a_callback_ends_goes_on_in_the_next_one(tmp_path: Path) -> None:
    given: dict[str, Any] = {"rows": Stream(), "lr_scheduler_type": "constant"}
    given |= {"learning_rate": 1e-2, "recover": {"freq_steps": 1}}
    untouched = make(tmp_path / "untouched", max_steps=6, callbacks=[ShortEpochs()], **given)
    untouched.train()
    make(tmp_path, max_steps=4, callbacks=[ShortEpochs()], **given).train()
    resumed = make(tmp_path, max_steps=6, callbacks=[ShortEpochs()], **given)
    resumed.train()
    found, expected = (digest(each.model, each.optimizer) for each in (resumed, untouched))
    assert (found, resumed.state.epoch) == (expected, untouched.state.epoch)


def test_a_stream_instead_of_a_dataset_with_a_length_is_refused(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2).train()
    with pytest.raises(DatasetMismatchError, match="run has a length, this one is a stream"):
        make(tmp_path, rows=Stream()).train()


class ShortStream(Stream):
    """A stream that announces a sixth batch, so that its epochs are known before."""

    def __len__(self) -> int:
        return 12


class Steps(TrainerCallback):
    """Counts the steps of a process, and asks for a stop at the end of an epoch."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.n_trained = 0
        self._stop_after = stop_after

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.n_trained += 1

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._stop_after:
            signal.raise_signal(signal.SIGUSR1)


SHORT_STREAM = {
    "rows": ShortStream(),
    "recover": EACH_EPOCH,
    "gradient_accumulation_steps": 2,
    "max_steps": -1,
    "num_train_epochs": 3,
}


def test_a_run_whose_last_epoch_leaves_a_batch_is_saved_at_its_end(tmp_path: Path) -> None:
    make(tmp_path, **SHORT_STREAM).train()
    assert generations(tmp_path) == ["global_step_4", "global_step_5"]
    steps = Steps()
    again = make(tmp_path, callbacks=[steps], **SHORT_STREAM)
    again.train()
    assert (steps.n_trained, again.state.global_step) == (0, 6)


@pytest.mark.parametrize(("stop_after", "last"), [(4, 4), (6, 5)])
def test_a_stop_after_an_epoch_that_leaves_a_batch_is_answered(
    tmp_path: Path, stop_after: int, last: int
) -> None:
    unanswered: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: unanswered.append(number))
    try:
        with pytest.raises(Preempted):
            make(tmp_path, callbacks=[Steps(stop_after)], **SHORT_STREAM).train()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert generations(tmp_path)[-1] == f"global_step_{last}" and not unanswered


def test_a_snapshot_after_the_first_step_of_the_next_epoch_may_fail_as_any_that_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = snapshot_saving.write_process
    full = [True]

    def write_when_there_is_room(*args: Any, **kwargs: Any) -> Any:
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args, **kwargs)

    monkeypatch.setattr(snapshot_saving, "write_process", write_when_there_is_room)
    options = {"rows": Stream(), "gradient_accumulation_steps": 2, "recover": EACH_EPOCH}
    trainer = make(tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 6 and "No space left on device" in caplog.text
    assert generations(tmp_path) == ["global_step_4", "global_step_5"]


def test_the_loss_of_a_resumed_run_is_the_mean_of_the_steps_that_trainer_says(
    tmp_path: Path,
) -> None:
    options = {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
    untouched = make(tmp_path / "untouched", max_steps=8, logging_steps=1, **options)
    untouched.train()
    losses = [row["loss"] for row in untouched.state.log_history if "loss" in row]

    # The snapshot of step 6 has two losses that were not logged yet.
    make(tmp_path, max_steps=6, logging_steps=4, **options).train()
    resumed = make(tmp_path, max_steps=8, logging_steps=4, **options)
    found = resumed.train().training_loss
    said = losses[6:] if hasattr(resumed, "_initial_global_step") else losses
    assert found == pytest.approx(sum(said) / len(said), rel=1e-5)


def losses_of_two_ranks(folder: Path) -> None:
    """Write the losses of each step, and what uninterrupted and resumed runs report."""

    def train(name: str, max_steps: int, logging_steps: int) -> Any:
        options = {"lr_scheduler_type": "constant", "learning_rate": 1e-2, "ddp_backend": "gloo"}
        options |= {"max_steps": max_steps, "logging_steps": logging_steps}
        trainer = make(folder / name, **options)
        return trainer, trainer.train().training_loss

    # One run logs after it was resumed, the other one does not.
    untouched, _ = train("every", 8, 1)
    found: dict[str, Any] = {
        "losses": [row["loss"] for row in untouched.state.log_history if "loss" in row]
    }
    train("logs", 6, 4)
    found["logs"] = train("logs", 8, 4)[1]
    _, of_eight = train("unlogged", 8, 100)
    _, of_six = train("silent", 6, 100)
    found["own"] = (8 * of_eight - 6 * of_six) / 2
    trainer, found["silent"] = train("silent", 8, 100)
    found["is_new"] = hasattr(trainer, "_initial_global_step")
    if trainer.is_world_process_zero():
        (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_the_loss_of_a_resumed_run_of_two_ranks_counts_each_step_as_trainer_does(
    tmp_path: Path,
) -> None:
    codes = run_job(losses_of_two_ranks, tmp_path, ranks=2)
    assert codes == [0, 0], (tmp_path / "log").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    if not found["is_new"]:
        pytest.skip("this Trainer reports the mean of all steps")
    assert found["logs"] == pytest.approx(sum(found["losses"][6:]) / 2, rel=1e-5)
    # Without a log Trainer reports the losses of rank 0.
    assert found["silent"] == pytest.approx(found["own"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_another_seed_at_a_restart_leaves_the_order_of_the_run(
    workers: int, tmp_path: Path
) -> None:
    """Compared with plain Trainer, with evaluations and persistent workers.

    The restart is in the second epoch of four steps.
    """
    seen: list[Any] = []

    class Noting(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            seen.append((inputs["input_ids"][:, 0].tolist(), torch.rand(1).item()))
            return super().training_step(model, inputs, *args, **kwargs)

    def train(seed: int, steps: int, recover: dict[str, Any]) -> None:
        args = TrainingArguments(
            output_dir=str(tmp_path / "trainer"),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=2,
            max_steps=steps,
            seed=seed,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
            eval_strategy="steps",
            eval_steps=2,
        )
        rows = Dataset.from_list([{"input_ids": [i % 15 + 3] * 4} for i in range(8)])
        base: Any = recoverable(Noting, attributes=()) if recover else Noting
        given = {
            "train_dataset": rows,
            "eval_dataset": rows.select(range(4)),
            "data_collator": collate,
        }
        base(model=tiny_model(), args=args, **given, **recover).train()

    train(1, 12, {})
    expected = seen.copy()
    seen.clear()
    recover = {"recover": RecoverConfig(fileroot=str(tmp_path / "runs"), freq_steps=1)}
    train(1, 6, recover)
    train(2, 12, recover)
    assert seen == expected


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_another_seed_at_a_restart_leaves_the_prompts_that_grpo_evaluates(
    workers: int, tmp_path: Path
) -> None:
    """Compared with plain GRPOTrainer: the prompts of each evaluation, in their order."""
    from trl import GRPOConfig, GRPOTrainer

    seen: list[tuple[int, list[str]]] = []

    def train(seed: int, steps: int, recover: dict[str, Any]) -> None:
        args = GRPOConfig(
            output_dir=str(tmp_path / "trainer"),
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            per_device_train_batch_size=2,
            per_device_eval_batch_size=4,
            max_steps=steps,
            seed=seed,
            num_generations=2,
            max_completion_length=1,
            eval_strategy="steps",
            eval_steps=2,
            dataloader_num_workers=workers,
            dataloader_persistent_workers=workers > 0,
        )

        def reward(prompts: list[str], **_: Any) -> list[float]:
            if not trainer.model.training:
                seen.append((trainer.state.global_step, prompts))
            return [float(len(prompt)) for prompt in prompts]

        rows = Dataset.from_dict({"prompt": sums(8)})
        base: Any = recoverable(GRPOTrainer) if recover else GRPOTrainer
        trainer = base(
            model=tiny_model(),
            args=args,
            train_dataset=rows,
            eval_dataset=rows,
            reward_funcs=reward,
            processing_class=tiny_tokenizer(),
            **recover,
        )
        trainer.train()

    train(1, 6, {})
    expected = seen.copy()
    seen.clear()
    recover = {"recover": RecoverConfig(fileroot=str(tmp_path / "runs"), freq_steps=1)}
    train(1, 4, recover)
    train(2, 6, recover)
    assert {step for step, _ in expected} == {2, 4, 6} and seen == expected


@pytest.mark.slow
def test_a_dataset_that_is_shuffled_otherwise_at_a_restart_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, max_steps=2).train()
    options: dict[str, Any] = {"max_steps": 4}
    other = make(tmp_path, **options)
    other.train_dataset = other.train_dataset.shuffle(seed=2)
    with pytest.raises(
        DatasetMismatchError, match=r"8 samples, xxh3_128:\w+: other samples, or another order"
    ):
        other.train()
    allowed = make(tmp_path, epochs_may_change=True, **options)
    allowed.train_dataset = other.train_dataset
    allowed.train()
    assert allowed.state.global_step == 4 and "other samples, or another order" in caplog.text


@pytest.mark.slow
def test_mode_off_leaves_nothing_and_trains_as_ever(tmp_path: Path) -> None:
    trainer = make(tmp_path, mode="off", max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2 and generations(tmp_path) == []


@pytest.mark.slow
def test_a_generation_of_another_program_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.create_optimizer_and_scheduler(6)
    with RecoverHandler(trainer.recover, FinetuneSpec(2, 4, 1)) as handler:
        handler.load(trainer)
        handler.dump(trainer, StepInfo.at(1, 4))
    with pytest.raises(
        CheckpointMismatchError, match="holds no state of a Trainer: another program wrote it"
    ):
        make(tmp_path).train()


def test_a_trainer_without_a_needed_private_attribute_is_refused() -> None:
    from trl import GRPOTrainer, SFTTrainer

    assert issubclass(recoverable(GRPOTrainer), GRPOTrainer) and recoverable(
        SFTTrainer
    ) is recoverable(SFTTrainer)
    with pytest.raises(
        UnsupportedVersionError, match=r"trl .* does not fit: its Trainer has no '_buffered_inputs'"
    ):
        require_attributes("trl", object.__new__(Trainer), ("_buffered_inputs",), "go on")


def test_a_restart_with_other_arguments_says_once_what_is_in_use_and_what_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cosine: dict[str, Any] = {"lr_scheduler_type": "cosine", "learning_rate": 0.01}
    make(tmp_path, max_steps=4, **cosine, weight_decay=0.1).train()
    other: dict[str, Any] = cosine | {
        "learning_rate": 0.02,
        "weight_decay": 0.2,
        "max_grad_norm": 0.5,
    }
    trainer = make(tmp_path, max_steps=6, **other, logging_steps=1)
    trainer.train()
    (warning,) = [text for text in caplog.messages if "was saved with other settings" in text]
    assert "num_training_steps=4" in warning and "num_training_steps=6" in warning
    assert "max_grad_norm of default was 1.0, is 0.5" in warning
    assert "learning rate of default was 0.0, is 0.0025" in warning
    assert "lr of default is 0.01, configured 0.02" in warning
    assert "weight_decay of group 0 of default is 0.1, configured 0.2" in warning
    rates = [logs["learning_rate"] for logs in trainer.state.log_history if "learning_rate" in logs]
    assert rates[0] == pytest.approx(0.0025)
