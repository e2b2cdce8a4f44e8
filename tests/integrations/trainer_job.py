"""A job of transformers' or TRL's Trainer, for tests to kill: ``python -m
tests.integrations.trainer_job FOLDER KIND``.

It writes ``digest.json`` at its end (see `ending`).
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

from examples.integrations.tiny import digest, sums, tiny_model, tiny_tokenizer
from holdfast.integrations.transformers import recoverable
from holdfast.recover import RecoverConfig
from tests.engine.lora.engines import whole

N_ROWS = 16


class Killer:
    """Sends SIGKILL when this process reaches ``where`` for the ``count``-th time. Written
    ``where:count``.

    ``where:count:SIGUSR1`` sends another signal to the whole process group.
    """

    def __init__(self, spec: str) -> None:
        self._where, count, name = [*spec.split(":"), "", ""][:3]
        self._left = int(count or 1)
        self._signal = signal.Signals[name or "SIGKILL"]

    def at(self, where: str) -> None:
        if where == self._where:
            self._left -= 1
            if self._left == 0:
                self._kill()

    def _kill(self) -> None:
        if self._signal == signal.SIGKILL:
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(0, self._signal)
        time.sleep(0.3)  # so that the step still runs when others have ended


class KillSteps(TrainerCallback):
    """Kills at the end of a step, and at its beginning."""

    def __init__(self, killer: Killer) -> None:
        self._killer = killer

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._killer.at("begin")

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._killer.at("micro")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._killer.at("step")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._killer.at("epoch")

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self._killer.at("evaluated")

    def on_save(self, *_: Any, **__: Any) -> None:
        self._killer.at("saved")


class Counter(TrainerCallback):
    """A callback with its own state, on which training depends."""

    def __init__(self) -> None:
        self.seen = 0

    def on_step_end(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self.seen += 1
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * self.seen

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.seen = state_dict["seen"]


class MergedSends(TrainerCallback):
    """Merges and unmerges adapters before each step, as TRL does around each send of the weights to
    vLLM.
    """

    def on_step_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
        model.merge_adapter()
        model.unmerge_adapter()


class DrawingCollator:
    """Masks at random in the training process."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        labels = torch.where(torch.rand(ids.shape) < 0.5, ids, -100)
        return {"input_ids": ids, "labels": labels}


PREFERENCES = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}


def preferences(kind: str) -> Dataset:
    """Right sums are preferred to wrong ones."""
    prompts = [text.partition("=") for text in sums(N_ROWS)]
    if kind == "kto":
        return Dataset.from_list(
            [
                {
                    "prompt": prompt + equals,
                    "completion": right if i % 2 else "00",
                    "label": bool(i % 2),
                }
                for i, (prompt, equals, right) in enumerate(prompts)
            ]
        )
    return Dataset.from_list(
        [{"prompt": p + e, "chosen": right, "rejected": "00"} for p, e, right in prompts]
    )


def make_trainer(
    kind: str, folder: Path, plain: bool, killer: Killer, options: dict[str, Any]
) -> Any:
    tokenizer = tiny_tokenizer()
    keys = {
        "freq_steps": options.pop("freq_steps", 1),
        "max_ckpt_to_keep": 3,
        **options.pop("recover", {}),
    }
    recover = RecoverConfig(fileroot=str(folder / "runs"), **keys)
    common: dict[str, Any] = {
        "output_dir": str(folder / "trainer"),
        "use_cpu": True,
        "report_to": [],
        "learning_rate": 1e-2,
        "seed": 3,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "disable_tqdm": True,
        "lr_scheduler_type": "cosine",
        "save_strategy": "steps" if plain else "no",
        "save_steps": 1,
    } | options
    own = ("patience", "lora", "merged_sends", "distributed")
    patience, lora, merges, distributed = (common.pop(name, None) for name in own)
    if "WORLD_SIZE" in os.environ:
        common["ddp_backend"] = "gloo"
    wrap = (
        (lambda base: base)
        if plain
        else (lambda base: lambda **given: recoverable(base)(recover=recover, **given))
    )
    given: dict[str, Any] = {"model": tiny_model(), "callbacks": [KillSteps(killer), Counter()]}
    if distributed:
        ParallelismConfig._validate_accelerator = lambda *_: None  # type: ignore[method-assign]  # it asks for GPUs
        given["model"].save_pretrained(model := folder / f"model_{os.environ['RANK']}")
        from transformers import DistributedConfig  # newer than the oldest supported release

        given["model"] = AutoModelForCausalLM.from_pretrained(
            model, distributed_config=DistributedConfig(**distributed)
        )
    if merges:
        given["callbacks"].append(MergedSends())
    if (
        options.get("beta") or merges or kind in ("rloo", "dpo", "kto")
    ):  # TRL reads the reference model from a folder
        given["model"].save_pretrained(folder / "model")
        given["model"] = str(folder / "model")
    if lora:
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        given["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.1, target_modules="all-linear", task_type=task
        )
    if patience is not None:
        given["callbacks"].append(EarlyStoppingCallback(early_stopping_patience=patience))
    if kind in ("grpo", "rloo"):

        def reward(completions: list[str], **_: Any) -> list[float]:
            killer.at("generated")
            return [sum(c in "02468" for c in text) / 4 - 0.1 * len(text) for text in completions]

        config, base = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
        args = config(
            **{
                "num_generations": 2,
                "max_completion_length": 4,
                "steps_per_generation": 4,
                **common,
            }
        )
        rows = Dataset.from_dict({"prompt": sums(N_ROWS)})
        return wrap(base)(
            **given,
            args=args,
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            reward_funcs=reward,
            processing_class=tokenizer,
        )
    if kind == "sft":
        rows = Dataset.from_dict({"text": sums(N_ROWS)})
        return wrap(SFTTrainer)(
            **given,
            args=SFTConfig(**common),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
        )
    if kind in PREFERENCES:
        config, base = (getattr(trl, PREFERENCES[kind] + part) for part in ("Config", "Trainer"))
        if kind == "reward":
            given["model"] = tiny_model(AutoModelForSequenceClassification, num_labels=1)
        rows = preferences(kind)
        return wrap(base)(
            **given,
            args=config(**common),
            train_dataset=rows,
            eval_dataset=rows.select(range(4)),
            processing_class=tokenizer,
        )
    rows = Dataset.from_list([{"input_ids": tokenizer(text)["input_ids"]} for text in sums(N_ROWS)])
    return wrap(Trainer)(
        **given,
        args=TrainingArguments(**common),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        data_collator=DrawingCollator(),
        processing_class=tokenizer,
    )


def shard_with_fsdp2(trainer: Any) -> None:
    """Restore the plugin that accelerate drops if there is no GPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    plugin.set_auto_wrap_policy(trainer.model)
    AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    trainer.is_fsdp_enabled = True


def ending(trainer: Any) -> dict[str, Any]:
    """The values to compare between runs: SHA-256 of weights and moments, counters and logs."""
    logs = [
        {k: v for k, v in row.items() if k in ("step", "loss", "eval_loss")}
        for row in trainer.state.log_history
    ]
    found = {"digest": digest(trainer.model, trainer.optimizer), "step": trainer.state.global_step}
    return found | {"best": trainer.state.best_metric, "logs": logs}


def main(
    folder: Path,
    kind: str,
    kill: str = "",
    plain: bool = False,
    options: dict[str, Any] | None = None,
) -> None:
    """Train to the end, or until ``kill`` (see `Killer`).

    Args:
        folder: folder of the run and of ``digest.json``.
        kind: ``grpo``, ``rloo``, ``sft``, ``dpo``, ``kto``, ``reward`` or ``trainer``.
        kill: moment of the kill, or empty.
        plain: use the host's own checkpoints, one per step, and start from the newest.
        options: training arguments, and ``freq_steps`` of the generations, ``recover`` for other
            keys of `RecoverConfig`, ``lora`` to train only adapters, ``merged_sends`` to merge and
            unmerge them, ``distributed`` for sizes of transformers' `DistributedConfig`.
    """
    torch.set_num_threads(1)
    options = dict(options or {})
    fsdp2 = options.pop("fsdp2", False)
    trainer = make_trainer(kind, folder, plain, Killer(kill), options)
    if fsdp2:
        shard_with_fsdp2(trainer)
    has_checkpoint = any((folder / "trainer").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if plain and has_checkpoint else None)
    assert isinstance(trainer.model, FSDPModule) == (
        fsdp2 or options.get("distributed", {}).get("fsdp_size", 1) > 1
    )
    found = ending(trainer)
    weights = None
    if options.get("lora") and fsdp2:
        weights = {name: whole(tensor) for name, tensor in trainer.model.state_dict().items()}
    if trainer.is_world_process_zero():
        if options.get("lora"):
            trainer.accelerator.unwrap_model(trainer.model).save_pretrained(
                folder / "adapters", state_dict=weights
            )
        (folder / "digest.json").write_text(json.dumps(found))


def main_of_a_group(folder: Path, *args: Any) -> None:
    """`main` in a process group of its own, in which workers of loaders are forked."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)
    main(folder, *args)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
