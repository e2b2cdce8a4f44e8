"""Single steps of TRL's supervised fine-tuning. TRL is optional (extra ``bench``)."""

import importlib.util
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback

from holdfast.engine.api import Batch
from holdfast.utils.distributed import get_world_size

if TYPE_CHECKING:
    from trl import SFTTrainer  # pyright: ignore[reportMissingImports]

HAS_TRL = importlib.util.find_spec("trl") is not None


class _Clock(TrainerCallback):
    """Seconds of the last step: forward, backward, clipping and update, without collating. Each
    runs in ``around``.
    """

    def __init__(self) -> None:
        self.started = self.seconds = 0.0
        self.around: AbstractContextManager[Any] = nullcontext()

    def on_step_begin(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.around.__enter__()
        self.started = time.perf_counter()

    def on_step_end(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.seconds = time.perf_counter() - self.started
        self.around.__exit__(None, None, None)


class TrlSteps:
    """``SFTTrainer`` on one batch, with the engine's model, optimizer and precision. Everything
    else is TRL's default.

    Precision and activations are set as in the engine of these benchmarks. TRL's defaults would
    compute in bfloat16 and recompute every activation, which is slow on a CPU.

    Args:
        config_folder: model folder.
        batch: see `ragged_batch`. The whole batch of every rank is one step.
        padding_free: TRL's option: the batch as one row without padding.
        scratch: folder for TRL's files.
        n_mbs: micro-batches of a step (TRL's gradient accumulation).
        bf16: compute in bfloat16 (with autocast).
    """

    def __init__(
        self,
        config_folder: str,
        batch: Batch,
        *,
        padding_free: bool,
        scratch: Path,
        n_mbs: int = 1,
        bf16: bool = False,
    ) -> None:
        self._clock = _Clock()
        self._trainer = _trainer(
            config_folder, batch, padding_free, scratch, n_mbs, bf16, self._clock
        )

    def step(self, around: AbstractContextManager[Any] | None = None) -> float:
        """Run one optimizer step in ``around`` and return its seconds, less the start of a run."""
        self._clock.around = around or nullcontext()
        self._trainer.train()
        return self._clock.seconds


def _trainer(
    config_folder: str,
    batch: Batch,
    padding_free: bool,
    scratch: Path,
    n_mbs: int,
    bf16: bool,
    clock: _Clock,
) -> "SFTTrainer":
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    # TRL takes sequences without padding.
    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True)]
    args = SFTConfig(
        output_dir=str(scratch / f"trl-{padding_free}"),
        per_device_train_batch_size=len(rows) // n_mbs,
        gradient_accumulation_steps=n_mbs,
        max_steps=1,
        padding_free=padding_free,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=bf16,
        learning_rate=1e-5,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    # The weights are random, with one seed on all ranks.
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(config_folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    # Each rank takes its share of the rows.
    rows *= get_world_size()
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=dataset,
        processing_class=_tokenizer(),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _tokenizer() -> Any:
    """A tokenizer for TRL, which asks it for the padding token. Nothing is tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
