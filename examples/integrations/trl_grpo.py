"""GRPO with TRL, two lines from plain TRL: ``python examples/integrations/trl_grpo.py runs/trl``,
again after a kill.

Plain TRL, killed inside a generation buffer, samples the same prompts again and reaches the end of
the run late.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny import sums, tiny_model, tiny_tokenizer, write_digest
from trl import GRPOConfig, GRPOTrainer

from holdfast.integrations.transformers import recoverable
from holdfast.recover import RecoverConfig


def reward(completions: list[str], **_: Any) -> list[float]:
    """Reward short completions with even digits."""
    rewards = []
    for text in completions:
        n_even = sum(character in "02468" for character in text)
        rewards.append(n_even / 4 - 0.1 * len(text))
    return rewards


def main(folder: Path) -> None:
    """Train 32 steps over two epochs. Each generation of completions is used for four steps."""
    torch.set_num_threads(1)
    # TRL saves nothing itself.
    args = GRPOConfig(
        output_dir=str(folder / "trl"),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        num_generations=2,
        steps_per_generation=4,
        max_completion_length=4,
        learning_rate=1e-2,
        save_strategy="no",
        report_to=[],
        logging_steps=4,
        use_cpu=True,
        disable_tqdm=True,
    )

    # Holdfast: these are the two lines.
    trainer = recoverable(GRPOTrainer)(
        recover=RecoverConfig(fileroot=str(folder), freq_steps=3),
        model=tiny_model(),
        args=args,
        reward_funcs=reward,
        processing_class=tiny_tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": sums(16)}),
    )
    trainer.train()

    last = f"step {trainer.state.global_step - 1}"
    write_digest(folder, last, trainer.model, trainer.optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
