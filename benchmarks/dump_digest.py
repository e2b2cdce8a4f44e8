"""What digests cost a snapshot: a whole dump with them against one without.

Every rank holds its shard of a model with AdamW, takes a step and dumps, again and again; every other dump has the
digest of its files replaced by one that does nothing. The order within a pair alternates, so that neither side always
finds the disk as the other left it. A dump is everything that `RecoverHandler.dump` does: sample, write, fsync, commit,
and remove the generation before. Times are those of the slowest rank; the processor's tell more than the clock's where
others use the machine.

    python benchmarks/dump_digest.py [--ranks 2] [--pairs 7] [--small] [--folder /where] [--json out.json]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

from holdfast.engine.api import FinetuneSpec, StepInfo
from holdfast.engine.dcp_state import DCPState
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils import files

LIMIT = 1.1
SIDES = ("with", "without")


class _NoDigest:
    def update(self, data: memoryview) -> None:
        """Look at nothing."""

    def hexdigest(self) -> str:
        """As long as a real one."""
        return "0" * 32


@contextmanager
def _without_digests() -> Iterator[None]:
    """Have files that are written while the block runs not be digested. Only here: the product has no such switch."""
    original = files.DurableFile.__init__

    def init(self: files.DurableFile, path: str | os.PathLike[str]) -> None:
        original(self, path)
        self._digest = _NoDigest()  # type: ignore[assignment]

    files.DurableFile.__init__ = init
    try:
        yield
    finally:
        files.DurableFile.__init__ = original


def _build(width: int, layers: int) -> DCPState:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)  # type: ignore[arg-type]
    fully_shard(model)
    return DCPState(model, torch.optim.AdamW(model.parameters(), lr=1e-4))


def _train(state: DCPState, width: int) -> None:
    assert state.optimizer is not None
    state.model(torch.ones(1, width)).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


def _rank_main(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}/rendezvous", rank=rank, world_size=options.ranks)
    width, layers = (512, 8) if options.small else (2048, 25)
    state = _build(width, layers)
    spec = FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1)
    handler = RecoverHandler(RecoverConfig(fileroot=store, freq_steps=1, max_ckpt_to_keep=1), spec)
    handler.load(state)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu_s: dict[str, list[float]] = {side: [] for side in SIDES}
    for step in range(2 * (options.pairs + 1)):
        pair, second = divmod(step, 2)
        side = SIDES[(pair + second) % 2]
        _train(state, width)
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        if side == "with":
            handler.dump(state, StepInfo(0, step, step, spec.steps_per_epoch))
        else:
            with _without_digests():
                handler.dump(state, StepInfo(0, step, step, spec.steps_per_epoch))
        if pair:  # the first warms up
            seconds[side].append(time.perf_counter() - start)
            cpu_s[side].append(time.process_time() - cpu)
    handler.close()
    parameters = sum(parameter.numel() for parameter in state.model.parameters())
    results.put((parameters, seconds, cpu_s))
    dist.barrier()  # a rank that leaves early makes the others complain
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the ranks, print the table, and fail when the ratio of the medians exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument(
        "--small", action="store_true", help="2M parameters instead of 105M; too few for the limit to mean much"
    )
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder by default")
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.folder) as store:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank_main, (options, store, results), nprocs=options.ranks)  # type: ignore[arg-type]
        reports = [results.get() for _ in range(options.ranks)]
    parameters = reports[0][0]
    seconds, cpu_s = (
        {side: [max(times) for times in zip(*(report[at][side] for report in reports), strict=True)] for side in SIDES}
        for at in (1, 2)
    )
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    ratio = medians["with"] / medians["without"]
    n_bytes = 12 * parameters  # float32, and two moments
    print(
        f"{parameters / 1e6:.1f}M parameters, float32 and AdamW, {options.ranks} ranks, {options.pairs} pairs of dumps"
    )
    print(f"{'digests':8} {'median s':>9} {'min s':>7} {'max s':>7} {'cpu s':>6} {'MB/s':>6}")
    for side, times in seconds.items():
        print(
            f"{side:8} {medians[side]:9.3f} {min(times):7.3f} {max(times):7.3f} {statistics.median(cpu_s[side]):6.3f} "
            f"{n_bytes / medians[side] / 1e6:6.0f}"
        )
    print(f"ratio {ratio:.3f}, limit {LIMIT}")
    if options.json:
        document = {
            "parameters": parameters,
            "options": vars(options),
            "seconds": seconds,
            "cpu_s": cpu_s,
            "ratio": ratio,
        }
        Path(options.json).write_text(json.dumps(document, indent=1))
    if ratio > LIMIT and not options.small:
        raise SystemExit(f"digests cost {ratio:.2f} times a dump without; the limit is {LIMIT}")


if __name__ == "__main__":
    main()
