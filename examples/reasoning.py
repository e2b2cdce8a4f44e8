"""GRPO on tasks of reasoning-gym, evaluated on held-out items.

    python examples/reasoning.py [key=value ...]                               # from scratch, five minutes on two cores
    python examples/reasoning.py --config examples/reasoning_gpu.yaml actor.path=Qwen/Qwen3-0.6B task=gsm_symbolic

It is `examples/grpo.py` with another task and two more kinds of step:

- The first ``sft_steps`` are supervised, because a model from scratch gives no answers that could be rewarded.
- Every ``eval_steps`` the policy answers the held-out items: ``held_out`` in the statistics and in ``held_out.png``.

All steps belong to one run. A kill at any step does not change the final weights.
"""

import string
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))
from chaos import read_attempts
from grpo import Numbered, Parts, Sampler, grpo_step, run_parts
from grpo_job import GRPOConfig, TrainWorker, exit_with, read_config, run_job, split_rows
from tasks import Task
from tiny_models import SPECIAL_TOKENS, make_tokenizer, write_tiny_qwen3

from holdfast.engine import FinetuneSpec
from holdfast.engine.api import Batch
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.engine.worker_group import WorkerGroup
from holdfast.recover.supervisor import Supervisor
from holdfast.utils.config import require_range
from holdfast.utils.errors import ConfigError
from holdfast.utils.metrics import read_stats

SORT = """Your task is to sort words in ascending or descending order using ASCII/Unicode ordering.

Your output should be a comma-separated list of words, e.g. word_1, word_2, word_3

Now, sort these words in {} order (using ASCII/Unicode ordering) and return them as a comma-separated list: """
PALINDROME = """Your task is, given a list of letters, to form a valid palindrome.

A palindrome is a phrase that reads the same forwards and backwards.

If there are multiple possible answers, only respond with one of them. You must use all the letters provided.

Your output should be a single string, with no spaces or punctuation.

Now, form a valid palindrome using the following letters: """
INSTRUCTIONS = (
    PALINDROME,
    SORT.format("ascending"),
    SORT.format("descending"),
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
)
"""Prompts of palindrome_generation, word_sorting, spell_backward and chain_sum. Each is one token of the tiny model."""
VOCABULARY = (*SPECIAL_TOKENS, *INSTRUCTIONS, *string.printable[:95], "\n")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] + bos_token }}{% endfor %}"


@dataclass
class ReasoningConfig(GRPOConfig):
    """Options of the job, in addition to `GRPOConfig`."""

    experiment_name: str = "reasoning"
    task: str = "palindrome_generation+spell_backward"
    """Datasets of reasoning-gym, mixed evenly."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options by dataset."""
    max_new_tokens: int = 8
    """Number of tokens after which an answer is cut off."""
    answer_tags: bool = False
    """Ask the model to think first, and to put its answer between ``<answer>`` and ``</answer>``."""
    sft_steps: int = 0
    """Supervised steps before GRPO. If there are any, the schedule of the learning rate ends with them."""
    sft_batch_size: int = 128
    """Items of a supervised step, a multiple of ``batch_size``."""
    sft_wrong: float = 0.0
    """Share of wrong supervised answers (taken from another item), as in data written by people. Fine-tuning learns to
    give wrong answers, and GRPO unlearns it.
    """
    eval_steps: int = 10
    """Steps between evaluations on the held-out items."""
    n_held_out: int = 200
    """Number of held-out items."""
    model_layers: int = 2
    """Layers of the tiny model."""
    model_width: int = 96
    """Width of the tiny model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range("sft_steps", self.sft_steps, low=0, high=self.total_steps)
        require_range("sft_wrong", self.sft_wrong, low=0.0, high=1.0)
        require_range("eval_steps", self.eval_steps, low=1)
        require_range("n_held_out", self.n_held_out, low=1)
        require_range("max_new_tokens", self.max_new_tokens, low=1)
        if self.sft_batch_size < 1 or self.sft_batch_size % self.batch_size:
            raise ConfigError(
                f"config key 'sft_batch_size' is {self.sft_batch_size}; expected a multiple of batch_size, "
                f"{self.batch_size}"
            )

    @property
    def names(self) -> list[str]:
        """Names of the datasets."""
        return self.task.split("+")

    @property
    def lr_spec(self) -> FinetuneSpec:
        """The supervised steps, after which the learning rate stays at its last value. Without any, the whole run."""
        spec = super().lr_spec
        return spec if not self.sft_steps else FinetuneSpec(1, self.sft_steps, 1)


class ReasoningWorker(TrainWorker):
    """One rank of the policy."""

    def sft_step(self, batch: Batch) -> dict[str, float]:
        """Run one supervised step on this rank's share of the batch."""
        self.engine.train()
        stats = self.engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
        self.engine.step_lr_scheduler()
        self.engine.set_version(self.engine.get_version() + 1)
        return {name: stats[name] for name in ("loss", "lr", "grad_norm", "update_skipped")}


def reasoning_step(
    config: ReasoningConfig, sampler: Sampler, trainer: WorkerGroup, batches: Numbered, global_step: int
) -> dict[str, float]:
    """Run a supervised or a GRPO step, then an evaluation if it is due."""
    if global_step < config.sft_steps:
        numbers = [number for _ in range(config.sft_batch_size // config.batch_size) for number in next(batches)]
        batch = sampler.ask("demonstrate", numbers, publish=False)
        stats = trainer.call_all("sft_step", per_rank=split_rows(batch, config, trainer.world_size, 1))[0]
    else:
        stats = grpo_step(config, sampler, trainer, batches, global_step)
    if (global_step + 1) % config.eval_steps and global_step != config.total_steps - 1:
        return stats
    how = config.n_held_out, config.actor.temperature, config.seed
    return {**stats, **sampler.ask("evaluate", *how, phase="evaluating")}


def make_task(config: ReasoningConfig, tokenizer: Any) -> Task:
    """Make the task. Called in the rollout worker, which alone imports reasoning-gym."""
    from reasoning_task import ReasoningTask

    options = {name: config.task_options.get(name, {}) for name in config.names}
    counts = (config.n_prompts, config.n_held_out)
    data = (config.names, options, config.seed, counts)
    return ReasoningTask(*data, tokenizer, config.max_new_tokens, config.answer_tags, config.sft_wrong)


def make_model(config: ReasoningConfig, folder: Path) -> Path:
    """Make the folder of the tiny model, which has one token per character."""
    tokenizer = make_tokenizer(VOCABULARY, CHAT_TEMPLATE)
    return write_tiny_qwen3(folder, tokenizer, config.model_layers, config.model_width, max_length=256)


def require_chat_template(folder: Path) -> None:
    """Raise ConfigError unless the tokenizer of a model folder has a chat template."""
    if AutoTokenizer.from_pretrained(folder).chat_template is None:
        raise ConfigError(f"the tokenizer in {folder} has no chat template; take an instruction-tuned model")


def draw(config: ReasoningConfig) -> Path:
    """Draw accuracy on held-out items over the time of the steps, with restarts marked. Returns its path."""
    stats = list(read_stats(config.stats_folder / "stats.jsonl"))
    passed = accumulate(entry["seconds"] / 60 for entry in stats)
    minutes = dict(zip((entry["step"] for entry in stats), passed, strict=True))
    stats = [entry for entry in stats if "held_out" in entry]
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for name in (name for name in stats[-1] if name.startswith("held_out")):
        style: dict[str, Any] = {"linewidth": 2.2} if name == "held_out" else {"linewidth": 1.2, "alpha": 0.7}
        label = name.partition("/")[2] or "held-out items"
        axes.plot([minutes[entry["step"]] for entry in stats], [entry[name] for entry in stats], label=label, **style)
    if config.sft_steps:
        axes.axvspan(0, minutes[config.sft_steps - 1], color="tab:gray", alpha=0.15, label="supervised")
    for attempt in read_attempts(config.stats_folder)[1:]:
        at = minutes.get(attempt["step"] - 1, 0.0)
        axes.axvline(at, color="tab:red", linewidth=1)
        axes.annotate("back from a kill", (at, 0.03), rotation=90, ha="right", color="tab:red", fontsize=9)
    title = f"GRPO on {config.task}"
    axes.set(xlabel="minutes of steps", ylabel="share of right answers", ylim=(0, 1.05), title=title)
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    path = config.recover.trial_root / "held_out.png"
    figure.savefig(path, dpi=130)
    return path


def run(config: ReasoningConfig, supervisor: Supervisor) -> None:
    """Run the job and draw its picture."""
    fingerprint = f"reasoning-gym {config.task} {config.task_options}, seed {config.seed}"
    run_parts(Parts(partial(make_task, config), fingerprint, ReasoningWorker, reasoning_step), config, supervisor)
    print(f"accuracy on held-out items over steps: {draw(config)}")


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(ReasoningConfig, "reasoning.yaml", __doc__, argv)
    return run_job(config, partial(make_model, config), run, require_chat_template)


if __name__ == "__main__":
    exit_with(main)
