"""``make serve-demo``: GRPO with two vLLM servers. A server, the mirror, a trainer and the driver
are each killed once.

The trainers publish the changes of each step, from which a mirror next to the servers makes the
weights. So the model knows a part of the task at the start and learns at a small rate. At a rate
that teaches it from nothing, most weights change in every step.

Prints the events and a summary of the tickets: which prompts were trained, how often, and how stale
their tokens were. Draws the rewards to ``serve_demo_out/serve_demo.png``, whose path it prints
last. The servers are vLLM's CPU build. Their first start takes minutes.
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
import demo
import matplotlib.pyplot as plt
import torch
from chaos import GrpoRun, column, mark_kill
from copy_task import CopyPrompts, sft_collate, write_model_folder
from grpo_servers import vllm_spec
from rich.console import Console
from transformers import AutoModelForCausalLM

from holdfast.engine.launch import ServerProcesses

OUT = Path("serve_demo_out").absolute()
PYTHON = Path(".venv-vllm/bin/python").absolute()
SCRIPT = Path(__file__).with_name("grpo_servers.py")
TOTAL_STEPS = 120
FIRST_STEPS = 18
FIRST_BATCH = 64
START_S = 900.0
TIMEOUT_S = 1800.0


@dataclass
class Kill:
    """One SIGKILL: the process, and the step after which it was killed."""

    what: str
    step: int


def teach_a_part(folder: Path) -> None:
    """Train the model in ``folder`` on supervised samples, to about half of the reward."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = CopyPrompts(FIRST_STEPS * FIRST_BATCH, seed=0)
    # The loss is on the answer alone, as in GRPO.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for first in range(0, len(prompts), FIRST_BATCH):
        batch = sft_collate([prompts[first + row] for row in range(FIRST_BATCH)])
        labels = batch["input_ids"].where(batch["loss_mask"] == 1, -100)
        model(input_ids=batch["input_ids"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def follow(console: Console, run: GrpoRun, step: int) -> None:
    """Show progress until ``step`` has been trained. Exit if the run ends earlier."""
    demo.follow(console, run, step, "training", TOTAL_STEPS, TIMEOUT_S)
    if run.last_step() < step:
        sys.exit(f"the run in {run.fileroot} ended:\n{run.log_tail()}")


def kill_server(
    console: Console,
    run: GrpoRun,
    servers: ServerProcesses,
    name: str,
    what: str,
    note: str,
) -> Kill:
    """Kill a server or the mirror. The run goes on with the other ones until the new process has
    the current weights.
    """
    step = run.last_step()
    os.kill(servers.pids()[name], signal.SIGKILL)
    console.print(f"  [red]SIGKILL {what} after step {step}[/red]: {note}")
    return Kill(what, step)


def kill_process(console: Console, run: GrpoRun, who: str, what: str) -> Kill:
    """Kill a trainer or the driver, and wait until training goes on."""
    step = run.last_step()
    demo.kill_and_wait(console, run, who, f"{what} after step {step}[/red]", TIMEOUT_S)
    return Kill(what, step)


def draw(run: GrpoRun, kills: list[Kill], path: Path) -> None:
    """Draw reward, number of serving servers, and staleness over steps."""
    stats = run.stats()
    steps = column(stats, "step")
    figure, (upper, lower) = plt.subplots(2, 1, figsize=(9, 6), layout="constrained", sharex=True)
    upper.plot(steps, column(stats, "reward"), linewidth=1.8)
    upper.set(
        ylabel="mean reward",
        ylim=(0, 1.05),
        title="GRPO on “copy three digits” with two vLLM servers",
    )

    labels = {
        "servers_serving": "servers that serve the weights",
        "rollouts/staleness_max": "oldest token (steps)",
    }
    # Both are small integers, so they share an axis.
    for name, label in labels.items():
        lower.step(steps, column(stats, name), where="mid", label=label)
    lower.set(xlabel="step", ylim=(-0.2, 3.2))  # room for the legend
    lower.legend(loc="upper right")
    for kill in kills:
        mark_kill(upper, kill.step, f"SIGKILL {kill.what}")
        mark_kill(lower, kill.step, "")
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run the demo."""
    console = Console()
    started = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    # on a CPU, vLLM needs attention heads of at least 32
    model = write_model_folder(OUT / "base_model", hidden=128, for_vllm=True)
    teach_a_part(model)
    # The mirror reads this folder.
    published = OUT / "weights"
    spec = vllm_spec(str(model), str(PYTHON), dtype="float32")
    console.print(
        "[bold]1. Two vLLM servers and their mirror start[/bold]: a minute or two, ten on a busy "
        "machine"
    )
    with ServerProcesses(spec, 2, OUT / "servers", published=published) as servers:
        servers.wait_until_up(START_S)
        # The servers are ours, so that a kill of the driver leaves them alone.
        run = GrpoRun(
            OUT,
            f"servers_folder={OUT / 'servers'}",
            f"total_steps={TOTAL_STEPS}",
            f"actor.path={model}",
            "publish=delta",
            f"weights_folder={published}",
            "actor.optimizer.lr=5e-5",
            "actor.optimizer.warmup_steps_proportion=0.1",
            "actor.ppo_n_minibatches=1",
            script=SCRIPT,
            experiment="grpo_servers",
        )
        try:
            console.print(
                f"[bold]2. GRPO, {TOTAL_STEPS} steps[/bold]; two trainers, sampling a step ahead"
            )
            run.start()
            follow(console, run, TOTAL_STEPS // 5)
            # A fifth of the run between two kills.
            note = "the servers keep their weights meanwhile"
            kills = [kill_server(console, run, servers, "mirror", "the mirror", note)]
            follow(console, run, 2 * TOTAL_STEPS // 5)
            note = "the other one takes its requests"
            kills.append(kill_server(console, run, servers, "server_0", "server 0", note))
            follow(console, run, 3 * TOTAL_STEPS // 5)
            kills.append(kill_process(console, run, "trainer", "trainer rank 1"))
            follow(console, run, 4 * TOTAL_STEPS // 5)
            kills.append(kill_process(console, run, "driver", "the driver"))
            follow(console, run, TOTAL_STEPS - 1)
            code = run.wait(TIMEOUT_S)
        finally:
            run.stop()
    if code != 0:
        sys.exit(f"the run in {run.fileroot} failed:\n{run.log_tail()}")

    stats = run.stats()
    # The job prints this line once all steps are trained.
    accounts = [line for line in run.log_tail().splitlines() if line.startswith("tickets ")]
    picture = OUT / "serve_demo.png"
    draw(run, kills, picture)
    console.print("[bold]3. What happened[/bold]")
    console.print(accounts[-1], soft_wrap=True)
    deltas = [s for s in stats if s["publish_delta"]]
    n_bytes = sum(column(deltas, "publish_bytes"))
    percent = 100 * (n_bytes / sum(column(deltas, "publish_full_bytes")))
    console.print(
        f"{len(deltas)} of {len(stats)} publications were deltas, with {percent:.0f} % of the bytes"
    )
    console.print(f"mean reward {stats[0]['reward']:.3f} -> {stats[-1]['reward']:.3f}")
    seconds = time.monotonic() - started
    console.print(f"after {seconds:.0f} s; the picture: {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
