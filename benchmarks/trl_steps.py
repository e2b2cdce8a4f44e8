"""Single steps of TRL's supervised fine-tuning. TRL is optional (extra ``bench``)."""

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback

from holdfast.engine.api import Batch

if TYPE_CHECKING:
    from trl import SFTTrainer  # pyright: ignore[reportMissingImports]

HAS_TRL = importlib.util.find_spec("trl") is not None


class _Clock(TrainerCallback):
    """Seconds of the last step: forward, backward, clipping and update, without collating."""

    def __init__(self) -> None:
        self.started = self.seconds = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.started


class TrlSteps:
    """``SFTTrainer`` on one batch, with the engine's model, optimizer and precision. Everything else is TRL's default.

    Precision (float32) and activations are set as in the engine of these benchmarks. TRL's defaults would compute in
    bfloat16 and recompute every activation, which is slow on a CPU.

    Args:
        config_folder: model folder.
        batch: see `ragged_batch`. The whole batch is one step with one micro-batch.
        padding_free: TRL's option: the batch as one row without padding.
        scratch: folder for TRL's files.
    """

    def __init__(self, config_folder: str, batch: Batch, *, padding_free: bool, scratch: Path) -> None:
        self._clock = _Clock()
        self._trainer = _trainer(config_folder, batch, padding_free, scratch, self._clock)

    def step(self) -> float:
        """Run one optimizer step and return its seconds."""
        self._trainer.train()
        return self._clock.seconds


def _trainer(config_folder: str, batch: Batch, padding_free: bool, scratch: Path, clock: _Clock) -> "SFTTrainer":
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]

    lengths = batch["attention_mask"].sum(1).tolist()
    rows = [ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True)]
    args = SFTConfig(
        output_dir=str(scratch / f"trl-{padding_free}"),
        per_device_train_batch_size=len(rows),
        max_steps=1,
        padding_free=padding_free,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=False,
        bf16=False,
        learning_rate=1e-5,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config_folder), dtype=torch.float32)
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    trainer = SFTTrainer(
        model=model, args=args, train_dataset=dataset, processing_class=_tokenizer(), callbacks=[clock]
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _tokenizer() -> Any:
    """A tokenizer for TRL, which asks it for the padding token. Nothing is tokenized."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
