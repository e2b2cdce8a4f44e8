"""``holdfast serve``: keep inference servers running beside a job."""

import logging
import signal
import time
from pathlib import Path
from typing import Any

import click

_LOOK_S = 0.5


@click.command(
    "serve",
    short_help="Keep inference servers of a run running.",
    context_settings={"show_default": True},
)
@click.argument("model")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--run",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the run, which may not exist yet. The servers are listed in RUN/servers.",
)
@click.option("--kind", default="vllm", help="vllm or sglang.")
@click.option("--python", help="Python of the environment of the servers.  [default: this one]")
@click.option("--count", default=1, help="Number of servers.")
@click.option("--gpus", metavar="2,3", help="Devices for all servers.  [default: all]")
@click.option(
    "--tensor-parallel-size",
    default=1,
    help="Devices of a server.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    help="Address of this host that the trainers reach. Updates need no key: keep it private.",
)
@click.option(
    "--dtype",
    default="bfloat16",
    help="Dtype of published weights.",
)
@click.option("--max-model-len", type=int, help="Most tokens.  [default: those of the model]")
@click.option("--max-num-seqs", type=int, help="Most requests that are computed at once.")
@click.option(
    "--lora-rank",
    default=0,
    help="Rank of published adapters.",
)
@click.option(
    "--lora-versions",
    default=2,
    help="Versions of adapters that answer at the same time.",
)
@click.option("--transfer", help="Backend of weights that are sent, see VLLMServer.")
@click.option("--images", is_flag=True, help="Prompts have images.")
@click.option(
    "--routed-experts", is_flag=True, help="Return the experts of each token (router_replay)."
)
@click.option("--cpu", is_flag=True, help="Compute on the CPU, for tests.")
@click.option(
    "--published",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of published weights, of which this host gets a mirror.",
)
def serve_command(
    model: str,
    flags: tuple[str, ...],
    run: Path,
    python: str | None,
    cpu: bool,
    **options: Any,
) -> None:
    """Start servers of MODEL for the run in RUN, and start those again that end, until Ctrl-C or
    SIGTERM.

    Start it beside torchrun, on any host that sees RUN. The job finds the servers by
    ServerFolder("RUN/servers"), and may be started and killed any number of times meanwhile. FLAGS
    after -- go to each server.
    """
    from ...engine.launch import ServerProcesses, ServerSpec
    from ...engine.launch.records import SERVERS

    # SIGTERM ends the servers like Ctrl-C. Each change of a state is logged.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.getLogger("holdfast.engine.launch").setLevel(logging.INFO)

    # Some options are those of the processes, the others describe a server.
    of_processes = {name: options.pop(name) for name in ("count", "gpus", "host", "published")}
    if python is not None:
        options["python"] = python
    spec = ServerSpec(
        model=model,
        device="cpu" if cpu else "cuda",
        extra_flags=flags,
        **options,
    )
    folder = run / SERVERS
    with ServerProcesses(spec, folder=folder, **of_processes) as processes:
        click.echo(f"{of_processes['count']} servers are starting, see {folder}")
        while True:
            time.sleep(_LOOK_S)
            processes.servers()  # raises if they cannot be kept running
