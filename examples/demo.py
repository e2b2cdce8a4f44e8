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
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from chaos import GrpoRun, column, mark_kill, sha256
from rich.console import Console
from rich.table import Table

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
    step = run.last_step()
    killed_at = time.time()
    attempt = kill_and_wait(
        console, run, who, f"{what} after step {step}[/red]; recovery takes ten to twenty seconds"
    )
    detected_s = None
    if attempt["loss"]:
        detected_s = attempt["loss"]["detected_at"] - killed_at
    return Kill(what, step, detected_s, attempt["time"] - killed_at, attempt["step"])


def kill_and_wait(
    console: Console, run: GrpoRun, who: str, note: str, timeout_s: float = TIMEOUT_S
) -> dict[str, Any]:
    """Kill a process, print the note, wait until training goes on, and return the new attempt."""
    # Each start of training adds an attempt.
    n_before = len(run.attempts())
    assert run.kill(who, rank=1)
    console.print(f"  [red]SIGKILL {note}")
    # The supervisor in the driver restarts trainers, and nobody restarts the driver.
    if who == "driver":
        run.start()

    def back_or_ended() -> bool:
        return len(run.attempts()) > n_before or run.exit_code() is not None

    run.wait_until(back_or_ended, timeout_s)
    attempts = run.attempts()
    if len(attempts) == n_before:
        sys.exit(f"the run in {run.fileroot} did not come back:\n{run.log_tail()}")
    attempt = attempts[-1]
    console.print(f"  [green]back: step {attempt['step']} is next[/green]")
    return attempt


def follow(
    console: Console,
    run: GrpoRun,
    step: int,
    name: str,
    total_steps: int = TOTAL_STEPS,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Show progress until ``step`` has been trained, or the run has ended."""
    # The condition also updates the line, because it is polled.
    with console.status(name) as status:

        def reached() -> bool:
            last = run.last_step()
            status.update(f"{name}: step {last + 1} of {total_steps}")
            return last >= step or run.exit_code() is not None

        run.wait_until(reached, timeout_s)


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
        # Nobody is there to detect the death of the driver.
        detected = "[dim]restarted[/dim]"
        if kill.detected_s is not None:
            detected = f"{kill.detected_s:.2f} s"
        table.add_row(
            kill.what,
            str(kill.step),
            detected,
            f"{kill.rebuilt_s:.2f} s",
            str(kill.resumed_step),
            str(kill.redone),
        )
    console.print(table)


def draw(reference: GrpoRun, killed: GrpoRun, kills: list[Kill], path: Path) -> None:
    """Reward over steps of both runs, with the kills marked."""
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for run, label, style in ((reference, "left alone", "-"), (killed, "killed twice", "--")):
        stats = run.stats()
        rewards = column(stats, "reward")
        axes.plot(column(stats, "step"), rewards, style, label=label, linewidth=1.8)

    # The steps of a band were trained twice.
    for kill in kills:
        axes.axvspan(kill.resumed_step, kill.step, color="tab:red", alpha=0.15)
        mark_kill(axes, kill.step, f"SIGKILL {kill.what}")
    axes.set(
        xlabel="step", ylabel="mean reward", ylim=(0, 1.05), title="GRPO on “copy three digits”"
    )
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run the demo."""
    console = Console()
    started = time.monotonic()
    console.print(
        "Two GRPO runs of a tiny Qwen3: two Ray workers train, a third samples. About three "
        "minutes in all."
    )
    # An earlier demo would be resumed.
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT)
    length = f"total_steps={TOTAL_STEPS}"
    reference = GrpoRun(OUT / "reference", length)
    killed = GrpoRun(OUT / "killed", length)
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
    picture = OUT / "demo.png"
    draw(reference, killed, kills, picture)
    # The proof: both runs end with the same bytes.
    expected = sha256(reference.final_weights())
    found = sha256(killed.final_weights())
    reward = killed.stats()[-1]["reward"]
    console.print(f"final mean reward {reward:.3f}; rewards over steps: {picture}", soft_wrap=True)
    console.print(f"SHA-256 of the final weights, left alone   {expected}", soft_wrap=True)
    console.print(f"SHA-256 of the final weights, killed twice {found}", soft_wrap=True)
    same = expected == found
    verdict = "[green]bit-identical[/green]" if same else "[red]THE WEIGHTS DIFFER[/red]"
    console.print(f"{verdict}, after {time.monotonic() - started:.0f} s")
    console.print(f"The picture: {picture}", soft_wrap=True)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
