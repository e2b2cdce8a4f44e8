"""A training step beside a plain FSDP2 loop and TRL: tokens per second, collectives, bytes, by
micro-batches.

All rows have one length, so that packing changes nothing and only the step itself is compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.engine import MicroBatchSpec
from holdfast.engine.api import Batch

from .harness import Figure, Options, Times, Way, interleave, over
from .model import build_engine, ragged_batch, train, training_size
from .ranks import Session, on_ranks
from .trl_steps import HAS_TRL, TrlSteps

PLAIN = "plain FSDP2 loop"
PLAIN_COMPILED = "plain FSDP2 loop, blocks compiled"
TRL = "TRL"
EVERY = "Holdfast, gradient_sync every"
LAST = "Holdfast, gradient_sync last"
COMPILED = "Holdfast, compile"
N_MBS = (1, 8)
_PARAMETERS = 12_000_000
_ROWS = 16
_TOKENS = 64


def step_figures(options: Options) -> list[Figure]:
    """Measure a step of ``options.ranks`` ranks with one and with eight micro-batches."""
    figures = []
    for n_mbs in N_MBS:
        times = on_ranks(_measure, options, n_mbs)
        figures += _figures(options, n_mbs, times)
    return figures


def _figures(
    options: Options,
    n_mbs: int,
    times: Times,
) -> list[Figure]:
    # The note describes the measurement and the rival.
    size = training_size(options, _PARAMETERS, longer=16)
    trl = "TRL is not installed (pip install 'holdfast[bench]')"
    if HAS_TRL:
        trl = "TRL uses DDP here"
    note = (
        f"{_ROWS} rows of {size.longer * _TOKENS} tokens a rank in {size.dtype}, n_mbs {n_mbs}, "
        f"{size.parameters / 1e6:g}M parameters at most; {trl}"
    )
    seconds = times["seconds"]
    speed = Figure(
        f"train.speed.n_mbs_{n_mbs}",
        "tokens a second / those of a plain FSDP2 loop",
        "higher",
        over(PLAIN, seconds, inverse=True),
        seconds=seconds,
        note=note,
    )
    collectives = _count_figure("collectives", n_mbs, times, "", 1)
    n_bytes = _count_figure("bytes", n_mbs, times, "MB of their tensors: ", 1e6)
    return [speed, collectives, n_bytes]


def _count_figure(
    what: str,
    n_mbs: int,
    times: Times,
    words: str,
    unit: float,
) -> Figure:
    """A count as a ratio, with the absolute values in the note."""
    counts = times[what]
    absolute = [f"{way} {values[0] / unit:.4g}" for way, values in counts.items()]
    return Figure(
        f"train.{what}.n_mbs_{n_mbs}",
        f"{what} of a step / those of a plain FSDP2 loop",
        "lower",
        over(PLAIN, counts),
        note=words + ", ".join(absolute),
    )


class _Collectives(TorchDispatchMode):
    """Counts collectives inside the block, and the bytes of the largest side of each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.n_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # comes again as operators on local tensors
        collective = func.namespace in ("c10d", "_c10d_functional")
        if collective and "wait_tensor" not in str(func):
            # The first two arguments are its two sides: outputs and inputs.
            self.count += 1
            self.n_bytes += max(_tensor_bytes(side) for side in args[:2])
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, float]:
        return {"collectives": float(self.count), "bytes": float(self.n_bytes)}


def _tensor_bytes(side: Any) -> int:
    """Size of all tensors in an argument."""
    n_bytes = 0
    for leaf in tree_leaves(side):
        if isinstance(leaf, torch.Tensor):
            n_bytes += leaf.nbytes
    return n_bytes


def _measure(session: Session, n_mbs: int) -> Times:
    size = training_size(session.options, _PARAMETERS, longer=16)
    build = partial(build_engine, session, parameters=size.parameters, dtype=size.dtype)
    engines = {
        EVERY: build(gradient_sync="every"),
        LAST: build(gradient_sync="last"),
    }
    folder = engines[LAST].config.path
    lengths = [size.longer * _TOKENS] * _ROWS
    batch = ragged_batch(engines[LAST], lengths)
    plain = partial(_PlainLoop, session, folder, batch, n_mbs, size.dtype)
    steps: dict[str, Callable[[], object]] = {PLAIN: plain(compiled=False).step}

    # Compilation takes minutes on a CPU.
    if session.device.type == "cuda":
        engines[COMPILED] = build(compiled=True)
        steps[PLAIN_COMPILED] = plain(compiled=True).step

    for way, engine in engines.items():
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        steps[way] = partial(train, engine, batch)

    # The first step makes the optimizer's state. Every later one has the same collectives, so that
    # those of the second are counted once and the timed steps run without the counter.
    ways: dict[str, Way] = {}
    for way, step in steps.items():
        step()
        with _Collectives() as collectives:
            step()
        ways[way] = partial(session.timed, step, **collectives.counts())

    # TRL measures its own seconds, without the start of a run.
    if HAS_TRL:
        trl = TrlSteps(
            folder,
            batch,
            padding_free=False,
            scratch=session.options.scratch,
            n_mbs=n_mbs,
            bf16=size.dtype == "bfloat16",
        )
        trl.step()
        collectives = _Collectives()
        trl.step(collectives)
        counts = collectives.counts()
        ways[TRL] = lambda: {"seconds": max(session.all(trl.step())), **counts}

    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times


class _PlainLoop:
    """A step as in FSDP2's tutorial: each block sharded, the loss of transformers, torch's clipping
    and AdamW.
    """

    def __init__(
        self,
        session: Session,
        folder: str,
        batch: Batch,
        n_mbs: int,
        dtype: str,
        compiled: bool,
    ) -> None:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._model = model.to(session.device).train()

        # Each block is a unit of FSDP, and the rest is one.
        mesh = init_device_mesh(session.device.type, (session.world_size,))
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, dtype),
            reduce_dtype=torch.float32,
        )
        for block in self._model.model.layers:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self._model, mesh=mesh, mp_policy=precision)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)

        # Equal parts of the batch, which stay on the device.
        input_ids = batch["input_ids"].to(session.device).chunk(n_mbs)
        masks = batch["attention_mask"].to(session.device).chunk(n_mbs)
        self._micro_batches = list(zip(input_ids, masks, strict=True))

    def step(self) -> None:
        """Run one optimizer step."""
        for input_ids, mask in self._micro_batches:
            output = self._model(
                input_ids=input_ids,
                attention_mask=mask,
                labels=input_ids,
                use_cache=False,
            )
            (output.loss / len(self._micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
