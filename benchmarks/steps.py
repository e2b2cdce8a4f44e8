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

from .harness import Figure, Options, Times, interleave, over
from .model import build_engine, ragged_batch, train, training_size
from .ranks import Session, on_ranks
from .trl_steps import HAS_TRL, TrlSteps

PLAIN, TRL = "plain FSDP2 loop", "TRL"
EVERY, LAST = "Holdfast, gradient_sync every", "Holdfast, gradient_sync last"
PLAIN_COMPILED, COMPILED = "plain FSDP2 loop, blocks compiled", "Holdfast, compile"
N_MBS = (1, 8)
_PARAMETERS = 12_000_000
_ROWS, _TOKENS = 16, 64


def step_figures(options: Options) -> list[Figure]:
    """Measure a step of ``options.ranks`` ranks with one and with eight micro-batches."""
    return [
        figure
        for n_mbs in N_MBS
        for figure in _figures(options, n_mbs, on_ranks(_measure, options, n_mbs))
    ]


def _figures(options: Options, n_mbs: int, times: Times) -> list[Figure]:
    where, seconds = f"n_mbs_{n_mbs}", times["seconds"]
    size = training_size(options, _PARAMETERS, longer=16)
    note = f"{_ROWS} rows of {size.longer * _TOKENS} tokens a rank in {size.dtype}, n_mbs {n_mbs}"
    note += f", {size.parameters / 1e6:g}M parameters at most"
    note += (
        "; TRL uses DDP here"
        if HAS_TRL
        else "; TRL is not installed (pip install 'holdfast[bench]')"
    )
    title, ours = (
        "tokens a second / those of a plain FSDP2 loop",
        over(PLAIN, seconds, inverse=True),
    )
    figures = [Figure(f"train.speed.{where}", title, "higher", ours, {}, seconds, note)]
    for what, unit in (("collectives", 1), ("bytes", 1e6)):
        counts = {way: f"{values[0] / unit:.4g}" for way, values in times[what].items()}
        absolute = ", ".join(f"{way} {count}" for way, count in counts.items())
        title = f"{what} of a step / those of a plain FSDP2 loop"
        note = f"{'MB of their tensors: ' if what == 'bytes' else ''}{absolute}"
        figures.append(
            Figure(f"train.{what}.{where}", title, "lower", over(PLAIN, times[what]), note=note)
        )
    return figures


class _Collectives(TorchDispatchMode):
    """Counts collectives inside the block, and the bytes of the largest side of each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # comes again as operators on local tensors
        if func.namespace in ("c10d", "_c10d_functional") and "wait_tensor" not in str(func):
            sides = [
                [t.nbytes for t in tree_leaves(side) if isinstance(t, torch.Tensor)]
                for side in args[:2]
            ]
            self.count, self.n_bytes = self.count + 1, self.n_bytes + max(map(sum, sides))
        return func(*args, **(kwargs or {}))

    def counts(self) -> dict[str, float]:
        return {"collectives": float(self.count), "bytes": float(self.n_bytes)}


def _measure(session: Session, n_mbs: int) -> Times:
    size = training_size(session.options, _PARAMETERS, longer=16)
    engines = {
        way: build_engine(session, parameters=size.parameters, dtype=size.dtype, gradient_sync=sync)
        for way, sync in ((EVERY, "every"), (LAST, "last"))
    }
    batch, folder = (
        ragged_batch(engines[LAST], [size.longer * _TOKENS] * _ROWS),
        engines[LAST].config.path,
    )
    plain = partial(_PlainLoop, session, folder, batch, n_mbs, size.dtype)
    calls: dict[str, Callable[[], object]] = {PLAIN: plain(compiled=False).step}
    if session.device.type == "cuda":  # minutes on a CPU
        engines[COMPILED] = build_engine(
            session, parameters=size.parameters, dtype=size.dtype, compiled=True
        )
        calls[PLAIN_COMPILED] = plain(compiled=True).step
    for way, engine in engines.items():
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        calls[way] = partial(train, engine, batch)
    ways: dict[str, Callable[[], dict[str, float]]] = {}
    for way, step in calls.items():
        step()  # makes the optimizer's state
        with _Collectives() as collectives:
            step()
        ways[way] = partial(_timed, session, step, collectives.counts())
    if HAS_TRL:
        bf16 = size.dtype == "bfloat16"
        trl = TrlSteps(
            folder,
            batch,
            padding_free=False,
            scratch=session.options.scratch,
            n_mbs=n_mbs,
            bf16=bf16,
        )
        trl.step()
        trl.step(collectives := _Collectives())
        counts = collectives.counts()
        ways[TRL] = lambda: {"seconds": max(session.all(trl.step())), **counts}
    times = interleave(ways, session.options.rounds)
    for engine in engines.values():
        engine.destroy()
    return times


def _timed(
    session: Session, step: Callable[[], object], counts: dict[str, float]
) -> dict[str, float]:
    return {"seconds": session.seconds(step), **counts}


class _PlainLoop:
    """A step as in FSDP2's tutorial: each block sharded, the loss of transformers, torch's clipping
    and AdamW.
    """

    def __init__(
        self, session: Session, folder: str, batch: Batch, n_mbs: int, dtype: str, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        self._model = model.to(session.device).train()
        mesh = init_device_mesh(session.device.type, (session.world_size,))
        precision = MixedPrecisionPolicy(
            param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32
        )
        for block in self._model.model.layers:
            if compiled:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=precision)
        fully_shard(self._model, mesh=mesh, mp_policy=precision)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-5)
        parts = [
            batch[key].to(session.device).chunk(n_mbs) for key in ("input_ids", "attention_mask")
        ]
        self._micro_batches = list(zip(*parts, strict=True))

    def step(self) -> None:
        """Run one optimizer step."""
        for input_ids, mask in self._micro_batches:
            output = self._model(
                input_ids=input_ids, attention_mask=mask, labels=input_ids, use_cache=False
            )
            (output.loss / len(self._micro_batches)).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
