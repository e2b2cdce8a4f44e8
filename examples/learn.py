"""``make learn`` and ``make learn-vision``: a job from scratch, while a trainer and then the driver
are killed.

    python examples/learn.py [reasoning|vision]

Prints the kills and the accuracy on held-out items before and after GRPO, draws it to
``learn_out/`` or ``learn_vision_out/``, and exits with 1 if the accuracy has not risen.
"""

import shutil
import sys
import time
from pathlib import Path

from chaos import GrpoRun, sha256
from demo import finish, follow, kill_and_watch, show
from reasoning import ReasoningConfig
from rich.console import Console
from vision import VisionConfig

from holdfast.utils.config import load_config

JOBS = {"reasoning": (ReasoningConfig, "learn_out"), "vision": (VisionConfig, "learn_vision_out")}


def main(job: str = "reasoning") -> int:
    """Run a job of `JOBS` and its kills."""
    console = Console()
    started = time.monotonic()
    script = Path(__file__).with_name(f"{job}.py")
    kind, folder = JOBS[job]
    config = load_config(kind, script.with_suffix(".yaml"))
    out = Path(folder).absolute()
    grpo_steps = config.total_steps - config.sft_steps
    last = config.total_steps - 1
    console.print(
        f"{config.sft_steps} supervised steps, then {grpo_steps} of GRPO, on {config.task}; it is "
        "killed twice."
    )
    shutil.rmtree(out, ignore_errors=True)
    run = GrpoRun(out, script=script, experiment=config.experiment_name)

    # Kill a trainer after a third of GRPO, and the driver after two thirds.
    first_kill = config.sft_steps + grpo_steps // 3
    second_kill = config.sft_steps + 2 * grpo_steps // 3
    try:
        run.start()
        follow(console, run, first_kill, "learning", config.total_steps)
        kills = [kill_and_watch(console, run, "trainer", "trainer rank 1")]
        follow(console, run, second_kill, "learning", config.total_steps)
        kills.append(kill_and_watch(console, run, "driver", "driver"))
        follow(console, run, last, "learning", config.total_steps)
        finish(run)
    finally:
        run.stop()
    show(console, kills)

    # Compare the last evaluation of the supervised steps with the last one of all.
    accuracy = {entry["step"]: entry["held_out"] for entry in run.stats() if "held_out" in entry}
    before = accuracy[max(step for step in accuracy if step < config.sft_steps)]
    after = accuracy[last]
    seconds = time.monotonic() - started
    console.print(
        f"right on held-out items: {before:.0%} before GRPO, {after:.0%} after it, after "
        f"{seconds:.0f} s"
    )
    console.print(f"SHA-256 of the final weights: {sha256(run.final_weights())}", soft_wrap=True)
    console.print(f"The picture: {run.trial_root / 'held_out.png'}", soft_wrap=True)
    return 0 if after > before else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
