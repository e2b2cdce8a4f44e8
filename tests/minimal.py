"""Run examples/minimal_grpo.py without a GPU: ``python -m tests.minimal FOLDER [name=value ...]``.

A tiny model with random weights takes the place of a released one, and the example starts a
stand-in for vLLM by the command of vLLM. It reads published weights, samples with them, and reports
their version.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.tiny_models import SPECIAL_TOKENS, make_tokenizer, write_tiny_qwen3
from tests.engine.launch.stand_in import stand_in_environment
from tests.engine.servers.fakes import FakeServer

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "minimal_grpo.py"
ON_RAY = ROOT / "examples" / "minimal_grpo_ray.py"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OPTIONS = ("dtype=float32", "lr=2e-3", "max_new_tokens=2", "epochs=10")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def arguments_of(folder: Path) -> list[str]:
    """Write a tiny model, and give the arguments of an example that trains it."""
    tokenizer = make_tokenizer([*SPECIAL_TOKENS, *"0123456789+="], CHAT)
    model = write_tiny_qwen3(folder / "model", tokenizer, for_vllm=True)
    return [f"model={model}", f"fileroot={folder / 'runs'}", *OPTIONS]


def environment() -> dict[str, str]:
    """The environment of an example that starts stand-ins."""
    return {**os.environ, **stand_in_environment(), "OMP_NUM_THREADS": "1"}


@contextmanager
def served_model(folder: Path) -> Iterator[list[str]]:
    """Write a tiny model, serve it, and give the arguments of an example that name both."""
    arguments = arguments_of(folder)
    (folder / "server").mkdir(exist_ok=True)

    # Ctrl-C is for the job, and a server of its own does not get it either.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = FakeServer("vllm", folder / "server", dtype="float32")
    signal.signal(signal.SIGINT, before)
    with server:
        yield [*arguments, f"server={server.url}"]


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # the stand-in loads weights at each step
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(exist_ok=True)
    command = [*TORCHRUN, str(EXAMPLE), *arguments_of(folder), *sys.argv[2:]]
    print(" ".join(command), flush=True)
    job = subprocess.Popen(command, env=environment())
    try:
        status = job.wait()
    except KeyboardInterrupt:
        status = job.wait()  # the job got it, too, and takes a snapshot
    sys.exit(status)
