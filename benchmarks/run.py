"""Command line: the choice of benchmarks, their options, and the folder of the results."""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from .footprint import bytes_written, memory
from .growth import growth
from .harness import Benchmark, Figure, Options, save_results
from .hugging_face import hf_load, hf_save, publish
from .loading import load
from .logits import logits
from .model import checkpoint_bytes
from .recovering import recover
from .report import show, write_report
from .saving import save, save_stall
from .training import train_throughput

BENCHMARKS: dict[str, Benchmark] = {
    "save_stall": save_stall,
    "save": save,
    "load": load,
    "hf_save": hf_save,
    "hf_load": hf_load,
    "publish": publish,
    "memory": memory,
    "bytes": bytes_written,
    "recover": recover,
    "train": train_throughput,
    "logits": logits,
    "growth": growth,
}
RESULTS = "results.json"
_CHECKPOINTS_AT_ONCE = 5  # `load` keeps one checkpoint of each way, and the raw file


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmarks, print and write the results. Returns the exit code."""
    options, names, out = _read_arguments(argv)
    console = Console()
    # Like Ctrl-C: stop, and remove temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    out.mkdir(parents=True, exist_ok=True)
    _require_space(out, options)
    figures: list[Figure] = []
    took_s: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="scratch-", dir=out) as scratch:
            options = replace(options, scratch=Path(scratch).absolute())
            for name in names:
                started = time.monotonic()
                with console.status(f"{name} ..."):
                    figures += BENCHMARKS[name](options)
                took_s[name] = time.monotonic() - started
                # Saved after each benchmark, so that a later failure loses nothing.
                document = save_results(out / RESULTS, options, figures, took_s)
    except KeyboardInterrupt:
        console.print("stopped; nothing is left running")
        return 130
    show(document, console)
    write_report(document, out)
    console.print(f"{out / RESULTS}, performance.md and performance.svg next to it", soft_wrap=True)
    return 0


def _read_arguments(argv: Sequence[str] | None) -> tuple[Options, list[str], Path]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="benchmark",
        help=f"one of {', '.join(BENCHMARKS)} (default: all)",
    )
    parser.add_argument(
        "--parameters",
        type=float,
        default=None,
        help="lower bound of the model size (default 100e6)",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--rounds", type=int, default=None, help="rounds after a warm-up round (default 5)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU for each rank"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench_out"),
        help="results, and scratch space while it runs",
    )
    parser.add_argument(
        "--quick", action="store_true", help="check that everything works: 1e6 parameters, 2 rounds"
    )
    given = parser.parse_args(argv)
    # Names and numbers that argparse cannot check.
    unknown = sorted(set(given.names) - BENCHMARKS.keys())
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    for name in ("parameters", "ranks", "rounds"):
        number = getattr(given, name)
        if number is not None and number < 1:
            parser.error(f"--{name} is {number}; expected 1 or more")

    # NCCL needs one GPU per rank.
    if given.device == "cuda":
        if not torch.cuda.is_available():
            parser.error("--device is cuda, but torch finds no CUDA device")
        given.ranks = min(given.ranks, torch.cuda.device_count())

    # A quick run has smaller defaults. Benchmarks run in their own order.
    parameters = int(given.parameters or (1e6 if given.quick else 100e6))
    rounds = given.rounds or (2 if given.quick else 5)
    options = Options(parameters, given.ranks, rounds, given.device, given.out, given.quick)
    names = [name for name in BENCHMARKS if name in given.names or not given.names]
    return options, names, given.out


def _require_space(out: Path, options: Options) -> None:
    needed = _CHECKPOINTS_AT_ONCE * checkpoint_bytes(options.parameters)
    free = shutil.disk_usage(out).free
    if free < needed:
        sys.exit(
            f"{out} has {free / 1e9:.1f} GB free, a model of {options.parameters / 1e6:g}M "
            f"parameters needs {needed / 1e9:.1f} GB at a time; name another folder with --out, "
            "or a smaller model with --parameters"
        )
