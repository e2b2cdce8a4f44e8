"""GRPO of a model that sees: a tiny Qwen2.5-VL from scratch learns to count coloured squares in
images.

    python examples/vision.py [key=value ...]             # minutes on two cores

Images are drawn by number, so the dataset needs no files. It is `examples/grpo.py` with this task,
whose items have images, and with the supervised steps and evaluations of `warm_start.py`.
Supervised steps end early, while most answers are wrong, and GRPO does the rest.

The picture ``held_out.png`` shows accuracy and rewards over steps, and some held-out images with
the policy's answers.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from chaos import column
from grpo import Numbered, Parts, Sampler, run_parts
from grpo_job import exit_with, read_config, run_job
from tasks import Item, Task
from tiny_models import IMAGE_TOKENS, SPECIAL_TOKENS, make_tokenizer, write_tiny_qwen2_5_vl
from transformers import AutoImageProcessor, AutoTokenizer
from warm_start import WarmStartConfig, WarmStartWorker, plot_held_out, warm_start_step

from holdfast.engine.worker_group import WorkerGroup
from holdfast.recover.supervisor import Supervisor
from holdfast.utils.errors import ConfigError
from holdfast.utils.metrics import read_stats

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
PATCH = 8
"""Side of a patch in pixels. An image token is two by two patches."""
CELL = 2 * PATCH
"""Side of a cell in pixels. Each square is somewhere in a cell of its own."""
CELLS = 3
"""Cells on each side of an image."""
MOST = 4
"""Largest right answer."""
QUESTION = "How many squares are "
VOCABULARY = (
    *SPECIAL_TOKENS,
    *IMAGE_TOKENS,
    QUESTION,
    "?",
    *COLOURS,
    *"0123456789",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{{ "
    "'<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endfor %}"
)
N_SHOWN = 6
"""Held-out images in the picture."""


@dataclass
class VisionConfig(WarmStartConfig):
    """Options of the job, in addition to `WarmStartConfig`."""

    experiment_name: str = "vision"
    task: str = "coloured squares"
    """Name of the task in the picture."""
    model_width: int = 64
    """Width of the tiny model and of its vision tower, a multiple of 32."""


def draw_squares(seed: int, number: int, held_out: bool) -> tuple[np.ndarray, str, int]:
    """Return an image, ``[height, width, 3]`` uint8, the colour that is asked for, and its number
    of squares.

    A digest of image and colour decides whether an item is for training or held out, so no item is
    in both sets.
    """
    for attempt in count():
        rng = np.random.default_rng([seed, number, held_out, attempt])
        asked, *others = rng.permutation(list(COLOURS))
        right = int(rng.integers(MOST + 1))
        wrong = int(rng.integers(MOST))
        distractors = rng.choice(others, wrong)
        colours = [asked] * right + list(distractors)

        # Each square has a random size and place in its cell, on white ground.
        width = CELLS * CELL
        image = np.full((width, width, 3), 255, np.uint8)
        cells = rng.permutation(CELLS**2)
        for colour, cell in zip(colours, cells, strict=False):
            side = rng.integers(CELL // 2, CELL)
            room = CELL - side + 1
            row, across = divmod(int(cell), CELLS)
            top = CELL * row + rng.integers(0, room)
            left = CELL * across + rng.integers(0, room)
            square = image[top : top + side, left : left + side]
            square[:] = COLOURS[colour]

        # One item in ten is held out.
        item = image.tobytes() + asked.encode()
        digest = zlib.crc32(item)
        if (digest % 10 == 0) == held_out:
            return image, str(asked), right
    raise AssertionError


class VisionTask:
    """Counting the squares of one colour (`tasks.Task`), for a model and image processor of the
    Qwen-VL family.

    Args:
        seed: seed of the images.
        max_new_tokens: see `tasks.Task`.
        tokenizer: the model's tokenizer. The image processor is read from the same folder.
    """

    def __init__(self, seed: int, max_new_tokens: int, tokenizer: Any) -> None:
        self.max_new_tokens = max_new_tokens
        self._seed = seed
        self._tokenizer = tokenizer
        self._processor = AutoImageProcessor.from_pretrained(tokenizer.name_or_path)
        self._image_token = tokenizer.convert_tokens_to_ids(IMAGE_TOKENS[0])

    def item(self, number: int, held_out: bool = False) -> Item:
        """See `tasks.Task`."""
        image, colour, right = draw_squares(self._seed, number, held_out)
        images = dict(self._processor(image, return_tensors="pt"))
        content = [
            {"type": "image"},
            {"type": "text", "text": f"{QUESTION}{colour}?"},
        ]
        messages = [{"role": "user", "content": content}]
        ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

        # The template has one token for the image, the model needs one for each group of patches.
        n_patches = int(images["image_grid_thw"].prod())
        n_tokens = n_patches // self._processor.merge_size**2
        at = ids.index(self._image_token)
        ids[at : at + 1] = [self._image_token] * n_tokens

        answer = str(right)
        answer_ids = self._tokenizer.encode(answer, add_special_tokens=False)
        unit = "square" if right == 1 else "squares"
        return {
            "prompt_ids": ids,
            "answer_ids": [*answer_ids, self._tokenizer.eos_token_id],
            "data": {"task": f"{right} {unit}", "answer": answer},
            "images": images,
        }

    def rewards(
        self,
        items: Sequence[Item],
        answers: Sequence[list[int]],
    ) -> list[float]:
        """Return 1 for each answer that is the right number and nothing else, or 0."""
        texts = self._tokenizer.batch_decode(answers, skip_special_tokens=True)
        rewards = []
        for item, ids, text in zip(items, answers, texts, strict=True):
            ended = ids[-1] == self._tokenizer.eos_token_id
            right = text.strip() == item["data"]["answer"]
            rewards.append(float(ended and right))
        return rewards

    def stats(self) -> dict[str, float]:
        """Return no statistics."""
        return {}


def vision_step(
    config: VisionConfig,
    sampler: Sampler,
    trainer: WorkerGroup,
    batches: Numbered,
    global_step: int,
) -> dict[str, float]:
    """Run a step and, with an evaluation, log the likeliest answers to the images of the picture.
    -1 is no number.
    """
    stats = warm_start_step(config, sampler, trainer, batches, global_step)
    if "held_out" in stats:
        texts = sampler.ask("answers", N_SHOWN, phase="evaluating")
        for number, text in enumerate(texts):
            said = float(text) if text.isdecimal() else -1.0
            stats[f"answer/{number}"] = said
    return stats


def make_task(config: VisionConfig, tokenizer: Any) -> Task:
    """Make the task. Called in the rollout worker."""
    return VisionTask(config.seed, config.max_new_tokens, tokenizer)


def make_model(config: VisionConfig, folder: Path) -> Path:
    """Make the folder of the tiny model."""
    tokenizer = make_tokenizer(VOCABULARY, CHAT_TEMPLATE)
    layers = config.model_layers
    width = config.model_width
    return write_tiny_qwen2_5_vl(folder, tokenizer, layers, width, PATCH)


def require_image_token(folder: Path) -> None:
    """Raise ConfigError unless the tokenizer of a model folder has Qwen-VL's image token and a chat
    template.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    token = IMAGE_TOKENS[0]
    known = token in tokenizer.get_vocab()
    if not known or tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer in {folder} has no {token} or no chat template; take a Qwen-VL model"
        )


def draw(config: VisionConfig) -> Path:
    """Draw accuracy, rewards, and held-out images with answers. Returns the path of the picture."""
    stats = list(read_stats(config.stats_folder / "stats.jsonl"))
    figure = plt.figure(figsize=(11, 7.5), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(3, 2))

    # Above: accuracy and rewards.
    upper, lower = halves
    accuracy, rewards = upper.subplots(1, 2, width_ratios=(2, 1))
    plot_held_out(config, accuracy)
    learned = [entry for entry in stats if "reward" in entry]
    steps = column(learned, "step")
    rewards.plot(steps, column(learned, "reward"))
    rewards.set(
        xlabel="step",
        ylabel="mean reward",
        ylim=(0, 1.05),
        title="GRPO",
    )
    rewards.grid(alpha=0.3)

    # Below: images, each over its answers in up to five evaluations, evenly spread over the run.
    evaluated = [entry for entry in stats if "answer/0" in entry]
    n_lines = min(5, len(evaluated))
    spread = np.linspace(0, len(evaluated) - 1, n_lines)
    for number, axes in enumerate(lower.subplots(1, N_SHOWN)):
        image, colour, right = draw_squares(config.seed, number, held_out=True)
        axes.imshow(image)
        # Empty lines under the image make room for the answers.
        axes.set(xticks=[], yticks=[], xlabel="\n" * n_lines)
        axes.set_title(f"How many are {colour}?", fontsize=10)
        for line, index in enumerate(spread, 1):
            entry = evaluated[round(index)]
            said = int(entry[f"answer/{number}"])
            answer = "no number" if said < 0 else said
            axes.annotate(
                f"step {entry['step']}: {answer}",
                (0.5, 0),
                (0, -13 * line),
                "axes fraction",
                "offset points",
                color="tab:green" if said == right else "tab:red",
                ha="center",
            )

    path = config.recover.trial_root / "held_out.png"
    figure.savefig(path, dpi=110)
    return path


def run(config: VisionConfig, supervisor: Supervisor) -> None:
    """Run the job and draw its picture."""
    fingerprint = f"coloured squares, seed {config.seed}"
    make = partial(make_task, config)
    parts = Parts(make, fingerprint, WarmStartWorker, vision_step)
    run_parts(parts, config, supervisor)
    print(f"accuracy on held-out items over steps: {draw(config)}")


def main(argv: list[str]) -> int:
    """Run the job."""
    config = read_config(VisionConfig, "vision.yaml", __doc__, argv)
    return run_job(config, partial(make_model, config), run, require_image_token)


if __name__ == "__main__":
    exit_with(main)
