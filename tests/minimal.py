"""Run a minimal example without a GPU: ``python -m tests.minimal grpo|distill FOLDER [name=value
...]``.

A tiny model with random weights takes the place of a released one, and the example starts a
stand-in for vLLM by the command of vLLM. It reads published weights, samples with them, and reports
their version. The teacher of ``distill`` is a second tiny model. It is trained here on the right
answers, and so is the student, for fewer steps.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from examples.tiny_models import SPECIAL_TOKENS, make_tokenizer, write_tiny_qwen3
from tests.engine.launch.stand_in import stand_in_environment
from tests.engine.servers.fakes import FakeServer

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "minimal_grpo.py"
DISTILL = ROOT / "examples" / "minimal_distill.py"
ON_RAY = ROOT / "examples" / "minimal_grpo_ray.py"
PROMPT_TOKENS = 4
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
OPTIONS = ("dtype=float32", "lr=2e-3", "max_new_tokens=2", "epochs=10")
SFT_STEPS = 30
"""Supervised steps of the student before a teacher takes over."""
DISTILL_OPTIONS = ("lr=1e-3", "batch_size=25", "n_samples=8", "epochs=80", "freq_steps=5")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def arguments_of(folder: Path, sft_steps: int = 0) -> list[str]:
    """Make a tiny model, and give the arguments of an example that trains it."""
    model = trained_model(folder / "model", 2, sft_steps)
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


def sums() -> dict[str, str]:
    """Prompt -> answer of all items of the minimal examples."""
    return {f"{a}+{b}=": str(a + b) for a in range(5) for b in range(5)}


def trained_model(folder: Path, layers: int, steps: int) -> Path:
    """Write a tiny model after ``steps`` supervised steps on all answers, unless ``folder`` exists.

    A hundred steps take a few seconds.
    """
    if folder.exists():
        return folder
    tokenizer = make_tokenizer([*SPECIAL_TOKENS, *"0123456789+="], CHAT)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        torch.manual_seed(layers)
        written = write_tiny_qwen3(Path(scratch) / "model", tokenizer, layers, for_vllm=True)
        if steps:
            supervise(written, steps)
        written.rename(folder)
    return folder


def supervise(folder: Path, steps: int) -> None:
    """Train the model in ``folder`` on the answers and their end tokens, and write it there."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = encoded(folder)
    labels = ids.clone()
    labels[:, :PROMPT_TOKENS] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def encoded(folder: Path) -> torch.Tensor:
    """Token ids of all items with their answers: ``[25, 6]``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [prompt + answer + tokenizer.eos_token for prompt, answer in sums().items()]
    return torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)


def accuracy(folder: Path) -> float:
    """Probability of the right answer and its end token at temperature 1, the mean over all
    items.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = encoded(folder)
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[:, PROMPT_TOKENS - 1 : -1].log_softmax(-1)
    of_answers = logprobs.gather(2, ids[:, PROMPT_TOKENS:, None])
    return of_answers.sum((1, 2)).exp().mean().item()


if __name__ == "__main__":
    os.environ["TQDM_DISABLE"] = "1"  # the stand-in loads weights at each step
    disable_progress_bar()
    examples = {"grpo": EXAMPLE, "distill": DISTILL}
    example = examples[sys.argv[1]]
    folder = Path(sys.argv[2]).absolute()
    folder.mkdir(exist_ok=True)
    sft_steps = 0
    options = []
    if example == DISTILL:
        sft_steps = SFT_STEPS
        options = [f"teacher={trained_model(folder / 'teacher', 3, 100)}", *DISTILL_OPTIONS]
    arguments = [*arguments_of(folder, sft_steps), *options, *sys.argv[3:]]
    command = [*TORCHRUN, str(example), *arguments]
    print(" ".join(command), flush=True)
    job = subprocess.Popen(command, env=environment())
    try:
        status = job.wait()
    except KeyboardInterrupt:
        status = job.wait()  # the job got it, too, and takes a snapshot
    if status == 0 and example == DISTILL:
        trained = max((folder / "runs").glob("model_*"), key=os.path.getmtime)
        models = {
            "teacher": folder / "teacher",
            "student before": folder / "model",
            "student": trained,
        }
        for name, model in models.items():
            print(f"accuracy of the {name}: {accuracy(model):.3f}", flush=True)
    sys.exit(status)
