"""``make demo``: train twice, kill one of the two runs twice, and compare the final weights.

The first run is left alone. The second run loses a trainer to SIGKILL after a third of its steps.
After two thirds its driver is killed and started again with the same command. Prints the events and
the SHA-256 of both results, draws the rewards to ``demo_out/demo.png``, whose path it prints last,
and exits with 1 if the weights differ.
"""

import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from chaos import GrpoRun, sha256

from holdfast.utils.metrics import read_stats

OUT = Path("demo_out").absolute()
TOTAL_STEPS = 150
TIMEOUT_S = 600.0


@dataclass
class Kill:
    """One SIGKILL and its consequences. Times are seconds after the kill."""

    what: str
    step: int
    detected_s: float | None
    rebuilt_s: float
    resumed_step: int

    @property
    def redone(self) -> int:
        """Number of steps trained before the kill and again after it."""
        return self.step - self.resumed_step + 1


def leave_alone(console: Console, run: GrpoRun) -> None:
    """Run the reference, without kills."""
    console.print("  starting Ray and the workers takes about ten seconds, then it trains")
    run.start()
    follow(console, run, TOTAL_STEPS - 1, "reference")
    finish(run)


def kill_twice(console: Console, run: GrpoRun) -> list[Kill]:
    """Run the same job and kill it twice."""
    run.start()
    follow(console, run, TOTAL_STEPS // 3 + 3, "to be killed")
    kills = [kill_and_watch(console, run, "trainer", "trainer rank 1")]
    follow(console, run, 2 * TOTAL_STEPS // 3 + 3, "to be killed")
    kills.append(kill_and_watch(console, run, "driver", "driver"))
    follow(console, run, TOTAL_STEPS - 1, "was killed")
    finish(run)
    return kills


def kill_and_watch(console: Console, run: GrpoRun, who: str, what: str) -> Kill:
    """Kill a process, wait until training goes on, and report the times."""
    attempts, step, killed_at = len(run.attempts()), run.last_step(), time.time()
    assert run.kill(who, rank=1)
    console.print(
        f"  [red]SIGKILL {what} after step {step}[/red]; recovery takes ten to twenty seconds"
    )
    if who == "driver":
        run.start()
    run.wait_until(lambda: len(run.attempts()) > attempts or run.exit_code() is not None, TIMEOUT_S)
    if len(run.attempts()) == attempts:
        sys.exit(f"the run in {run.fileroot} did not come back:\n{run.log_tail()}")
    attempt = run.attempts()[-1]
    console.print(f"  [green]back: step {attempt['step']} is next[/green]")
    detected_s = attempt["loss"]["detected_at"] - killed_at if attempt["loss"] else None
    return Kill(what, step, detected_s, attempt["time"] - killed_at, attempt["step"])


def follow(
    console: Console, run: GrpoRun, step: int, name: str, total_steps: int = TOTAL_STEPS
) -> None:
    """Show progress until ``step`` has been trained."""
    with console.status(name) as status:

        def reached() -> bool:
            last = run.last_step()
            status.update(f"{name}: step {last + 1} of {total_steps}")
            return last >= step or run.exit_code() is not None

        run.wait_until(reached, TIMEOUT_S)


def finish(run: GrpoRun) -> None:
    """Wait for a run to end, and exit if it failed."""
    if run.wait(TIMEOUT_S) != 0:
        sys.exit(f"the run in {run.fileroot} failed:\n{run.log_tail()}")


def show(console: Console, kills: list[Kill]) -> None:
    """Print the table of kills."""
    table = Table(
        "SIGKILL",
        "after step",
        "detected\nafter",
        "rebuilt\nafter",
        "resumed\nat step",
        "steps\nredone",
    )
    for kill in kills:
        detected = "[dim]restarted[/dim]" if kill.detected_s is None else f"{kill.detected_s:.2f} s"
        rebuilt = f"{kill.rebuilt_s:.2f} s"
        table.add_row(
            kill.what, str(kill.step), detected, rebuilt, str(kill.resumed_step), str(kill.redone)
        )
    console.print(table)


def draw(reference: GrpoRun, killed: GrpoRun, kills: list[Kill], path: Path) -> None:
    """Reward over steps of both runs, with the kills marked."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for run, label, style in ((reference, "left alone", "-"), (killed, "killed twice", "--")):
        stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
        axes.plot(
            [s["step"] for s in stats],
            [s["reward"] for s in stats],
            style,
            label=label,
            linewidth=1.8,
        )
    for kill in kills:
        axes.axvspan(kill.resumed_step, kill.step, color="tab:red", alpha=0.15)
        axes.axvline(kill.step, color="tab:red", linewidth=1)
        axes.annotate(
            f"SIGKILL {kill.what}",
            (kill.step, 0.03),
            rotation=90,
            ha="right",
            color="tab:red",
            fontsize=9,
        )
    axes.set(
        xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title="GRPO on “copy three digits”"
    )
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run the demo."""
    console, started = Console(), time.monotonic()
    console.print(
        "Two GRPO runs of a tiny Qwen3: two Ray workers train, a third samples. About three "
        "minutes in all."
    )
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT)
    reference, killed = (
        GrpoRun(OUT / name, f"total_steps={TOTAL_STEPS}") for name in ("reference", "killed")
    )
    try:
        console.print(
            f"[bold]1. An undisturbed GRPO run[/bold]: {TOTAL_STEPS} steps, about a minute on two "
            "cores"
        )
        leave_alone(console, reference)
        console.print(
            "[bold]2. The same run; a worker is killed, then the driver[/bold]: about two minutes"
        )
        kills = kill_twice(console, killed)
    finally:
        reference.stop()
        killed.stop()
    console.print(
        "[bold]3. What happened[/bold]: the kills, the rewards, the weights; a few seconds"
    )
    show(console, kills)
    draw(reference, killed, kills, OUT / "demo.png")
    hashes = [sha256(run.final_weights()) for run in (reference, killed)]
    reward = read_stats(killed.trial_root / "stats" / "stats.jsonl")[-1]["reward"]
    console.print(
        f"final mean reward {reward:.3f}; rewards over steps: {OUT / 'demo.png'}", soft_wrap=True
    )
    console.print(f"SHA-256 of the final weights, left alone   {hashes[0]}", soft_wrap=True)
    console.print(f"SHA-256 of the final weights, killed twice {hashes[1]}", soft_wrap=True)
    same = hashes[0] == hashes[1]
    verdict = "[green]bit-identical[/green]" if same else "[red]THE WEIGHTS DIFFER[/red]"
    console.print(f"{verdict}, after {time.monotonic() - started:.0f} s")
    console.print(f"The picture: {OUT / 'demo.png'}", soft_wrap=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
