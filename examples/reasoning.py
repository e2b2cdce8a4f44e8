"""GRPO on tasks of reasoning-gym, evaluated on held-out items.

    # from scratch, five minutes on two cores
    python examples/reasoning.py [key=value ...]
    python examples/reasoning.py --config examples/reasoning_gpu.yaml \\
        actor.path=Qwen/Qwen3-0.6B task=gsm_symbolic

It is `examples/grpo.py` with another task and two more kinds of step, which `warm_start.py`
describes.
"""

import string
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from grpo import Parts, run_parts
from grpo_job import exit_with, read_config, run_job
from tasks import Task
from tiny_models import SPECIAL_TOKENS, make_tokenizer, write_tiny_qwen3
from transformers import AutoTokenizer
from warm_start import WarmStartConfig, WarmStartWorker, draw, warm_start_step

from holdfast.recover.supervisor import Supervisor
from holdfast.utils.config import require_range
from holdfast.utils.errors import ConfigError

SORT = """Your task is to sort words in ascending or descending order using ASCII/Unicode ordering.

Your output should be a comma-separated list of words, e.g. word_1, word_2, word_3

Now, sort these words in {} order (using ASCII/Unicode ordering) \
and return them as a comma-separated list: """
PALINDROME = """Your task is, given a list of letters, to form a valid palindrome.

A palindrome is a phrase that reads the same forwards and backwards.

If there are multiple possible answers, only respond with one of them. \
You must use all the letters provided.

Your output should be a single string, with no spaces or punctuation.

Now, form a valid palindrome using the following letters: """
INSTRUCTIONS = (
    PALINDROME,
    SORT.format("ascending"),
    SORT.format("descending"),
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
)
"""Prompts of palindrome_generation, word_sorting, spell_backward and chain_sum. Each is one token
of the tiny model.
"""
VOCABULARY = (*SPECIAL_TOKENS, *INSTRUCTIONS, *string.printable[:95], "\n")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + bos_token }}{% endfor %}"


@dataclass
class ReasoningConfig(WarmStartConfig):
    """Options of the job, in addition to `WarmStartConfig`."""

    experiment_name: str = "reasoning"
    task: str = "palindrome_generation+spell_backward"
    """Datasets of reasoning-gym, mixed evenly."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options by dataset."""
    answer_tags: bool = False
    """Ask the model to think first, and to put its answer between ``<answer>`` and ``</answer>``.
    """
    sft_wrong: float = 0.0
    """Share of wrong supervised answers (taken from another item), as in data written by people.
    Fine-tuning learns to give wrong answers, and GRPO unlearns it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("sft_wrong", self.sft_wrong, low=0.0, high=1.0)

    @property
    def names(self) -> list[str]:
        """Names of the datasets."""
        return self.task.split("+")


def make_task(config: ReasoningConfig, tokenizer: Any) -> Task:
    """Make the task. Called in the rollout worker, which alone imports reasoning-gym."""
    from reasoning_task import ReasoningTask

    return ReasoningTask(
        config.names,
        config.task_options,
        config.seed,
        (config.n_prompts, config.n_held_out),
        tokenizer,
        config.max_new_tokens,
        config.answer_tags,
        config.sft_wrong,
    )


def make_model(config: ReasoningConfig, folder: Path) -> Path:
    """Make the folder of the tiny model, which has one token per character."""
    # The prompts are longer than the default of 64 tokens.
    tokenizer = make_tokenizer(VOCABULARY, CHAT_TEMPLATE)
    return write_tiny_qwen3(
        folder, tokenizer, config.model_layers, config.model_width, max_length=256
    )


def require_chat_template(folder: Path) -> None:
    """Raise ConfigError unless the tokenizer of a model folder has a chat template."""
    if AutoTokenizer.from_pretrained(folder).chat_template is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no chat template; take an instruction-tuned model"
        )


def run(config: ReasoningConfig, supervisor: Supervisor) -> None:
    """Run the job and draw its picture."""
    fingerprint = f"reasoning-gym {config.task} {config.task_options}, seed {config.seed}"
    parts = Parts(partial(make_task, config), fingerprint, WarmStartWorker, warm_start_step)
    run_parts(parts, config, supervisor)
    print(f"accuracy on held-out items over steps: {draw(config)}")


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(ReasoningConfig, "reasoning.yaml", __doc__, argv)
    return run_job(config, partial(make_model, config), run, require_chat_template)


if __name__ == "__main__":
    exit_with(main)
