"""``make serve-demo``: GRPO with two vLLM servers. A server, a trainer and the driver are each killed once.

Prints the events and a summary of the tickets: which prompts were trained, how often, and how stale their tokens were.
Draws the rewards to ``serve_demo_out/serve_demo.png``, whose path it prints last. The servers are vLLM's CPU build.
Their first start takes minutes.
"""

import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from chaos import GrpoRun
from copy_task import write_model_folder
from server_processes import VLLM_COMMAND, ServerProcesses, wait_for_servers

from holdfast.utils.metrics import read_stats

OUT = Path("serve_demo_out").absolute()
PYTHON = Path(".venv-vllm/bin/python").absolute()
SCRIPT = Path(__file__).with_name("grpo_servers.py")
TOTAL_STEPS = 120
START_S = 900.0
TIMEOUT_S = 1800.0


@dataclass
class Kill:
    """One SIGKILL: the process, and the step after which it was killed."""

    what: str
    step: int


def follow(console: Console, run: GrpoRun, step: int) -> None:
    """Show progress until ``step`` has been trained. Exit if the run ends earlier."""
    with console.status("training") as status:

        def reached() -> bool:
            last = run.last_step()
            status.update(f"step {last + 1} of {TOTAL_STEPS}")
            return last >= step or run.exit_code() is not None

        run.wait_until(reached, TIMEOUT_S)
    if run.last_step() < step:
        sys.exit(f"the run in {run.fileroot} ended:\n{run.log_tail()}")


def kill_server(console: Console, run: GrpoRun, servers: ServerProcesses) -> Kill:
    """Kill a server. The run goes on with the other one until the new server has the current weights."""
    step = run.last_step()
    os.kill(servers.pids()[0], signal.SIGKILL)
    console.print(f"  [red]SIGKILL server 0 after step {step}[/red]: the other one takes its requests")
    return Kill("server 0", step)


def kill_process(console: Console, run: GrpoRun, who: str, what: str) -> Kill:
    """Kill a trainer or the driver, and wait until training goes on."""
    attempts, step = len(run.attempts()), run.last_step()
    assert run.kill(who, rank=1)
    console.print(f"  [red]SIGKILL {what} after step {step}[/red]")
    if who == "driver":
        run.start()
    run.wait_until(lambda: len(run.attempts()) > attempts or run.exit_code() is not None, TIMEOUT_S)
    if len(run.attempts()) == attempts:
        sys.exit(f"the run in {run.fileroot} did not come back:\n{run.log_tail()}")
    console.print(f"  [green]back: step {run.attempts()[-1]['step']} is next[/green]")
    return Kill(what, step)


def draw(run: GrpoRun, kills: list[Kill], path: Path) -> None:
    """Draw reward, number of serving servers, and staleness over steps."""
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    steps = [s["step"] for s in stats]
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained", sharex=True)
    upper.plot(steps, [s["reward"] for s in stats], linewidth=1.8)
    upper.set(ylabel="mean reward", ylim=(0, 1.05), title="GRPO on “copy three digits” with two vLLM servers")
    lower.step(steps, [s["servers_serving"] for s in stats], where="mid", label="servers that serve the weights")
    lower.step(steps, [s["rollouts/staleness_max"] for s in stats], where="mid", label="oldest token (steps)")
    lower.set(xlabel="step", ylim=(-0.2, 3.2))  # room for the legend
    lower.legend(loc="upper right")
    for kill in kills:
        for axes in (upper, lower):
            axes.axvline(kill.step, color="tab:red", linewidth=1)
        upper.annotate(f"SIGKILL {kill.what}", (kill.step, 0.03), rotation=90, ha="right", color="tab:red", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run the demo."""
    console, started = Console(), time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    # on a CPU, vLLM needs attention heads of at least 32
    model = write_model_folder(OUT / "base_model", hidden=128, for_vllm=True)
    console.print("[bold]1. Two vLLM servers start[/bold]: a minute or two, ten on a busy machine")
    with ServerProcesses(VLLM_COMMAND, str(PYTHON), model, 2, OUT / "logs") as servers:
        wait_for_servers(servers.servers, START_S, servers)
        urls = ",".join(server.url for server in servers.servers)
        overrides = (f"total_steps={TOTAL_STEPS}", f"servers=[{urls}]", f"actor.path={model}")
        run = GrpoRun(OUT, *overrides, "actor.init_from_scratch=true", script=SCRIPT, experiment="grpo_servers")
        try:
            console.print(f"[bold]2. GRPO, {TOTAL_STEPS} steps[/bold]; two trainers, sampling a step ahead")
            run.start()
            follow(console, run, TOTAL_STEPS // 4)
            kills = [kill_server(console, run, servers)]
            follow(console, run, TOTAL_STEPS // 2)
            kills.append(kill_process(console, run, "trainer", "trainer rank 1"))
            follow(console, run, 3 * TOTAL_STEPS // 4)
            kills.append(kill_process(console, run, "driver", "the driver"))
            follow(console, run, TOTAL_STEPS - 1)
            code = run.wait(TIMEOUT_S)
        finally:
            run.stop()
    if code != 0:
        sys.exit(f"the run in {run.fileroot} failed:\n{run.log_tail()}")
    stats = read_stats(run.trial_root / "stats" / "stats.jsonl")
    account = next(line for line in reversed(run.log_tail().splitlines()) if line.startswith("tickets "))
    draw(run, kills, OUT / "serve_demo.png")
    console.print("[bold]3. What happened[/bold]")
    console.print(account, soft_wrap=True)
    console.print(f"mean reward {stats[0]['reward']:.3f} -> {stats[-1]['reward']:.3f}")
    console.print(f"after {time.monotonic() - started:.0f} s; the picture: {OUT / 'serve_demo.png'}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
