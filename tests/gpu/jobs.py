"""Measurements and faults on ranks: functions for `benchmarks.ranks.on_ranks`, on GPUs or on the
CPU.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from shutil import rmtree
from statistics import median
from typing import Any

import torch

from benchmarks import ours
from benchmarks.footprint import peak_bytes
from benchmarks.limits import WarmBuffer
from benchmarks.model import (
    SPEC,
    build_engine,
    bytes_of,
    dense_batch,
    folder_bytes,
    train,
    training_tensors,
    weight_tensors,
)
from benchmarks.ranks import Session
from holdfast.engine import (
    FSDPEngine,
    MicroBatchSpec,
    OptimizerConfig,
    ParallelStrategy,
    StepInfo,
    TrainEngineConfig,
)
from holdfast.engine.dcp.state import flatten, local_tensor
from holdfast.engine.model.memory_plan import measure_model, plan_step
from holdfast.engine.rl import NormConfig, PPOActor, PPOActorConfig, count_loss_tokens
from holdfast.engine.staging.staged_state import Staging
from holdfast.recover import RecoverConfig, RecoverHandler
from holdfast.utils.errors import HoldfastError

N_LATER = 4
"""Snapshots in the background after the first."""
BUSY_CYCLES = 500_000_000
"""Cycles of a GPU that take a quarter of a second or more."""


@dataclass(frozen=True)
class StagingMemory:
    """Host memory for one staged snapshot, divided by the bytes of the shard, on the rank that
    needs most.

    Attributes:
        buffers: memory of the copy.
        resident: growth of the process.
        pinned_by_torch: growth of torch's own pinned memory, which is separate from the buffers.
        all_pinned: whether all buffers of tensors on a device are pinned, on every rank. AdamW
            keeps the number of its steps on the CPU, and a copy from there needs no pinned memory.
    """

    buffers: float
    resident: float
    pinned_by_torch: float
    all_pinned: bool


def staging_memory(session: Session) -> StagingMemory:
    """Stage one snapshot."""
    engine = build_engine(session)
    shard_bytes = bytes_of(training_tensors(engine))
    staging, staged, before = Staging(engine.model), {}, _pinned_by_torch(session)

    def stage() -> None:
        staged.update(staging.stage(engine.dcp_state()))
        staging.finish()

    resident = peak_bytes(session, stage)
    copies = {name: local_tensor(tensor) for name, tensor in flatten(staged)}
    storages = {
        storage.data_ptr(): storage.nbytes()
        for storage in (copy.untyped_storage() for copy in copies.values())
    }
    by_torch = _pinned_by_torch(session) - before
    shares = session.all(
        (sum(storages.values()) / shard_bytes, resident / shard_bytes, by_torch / shard_bytes)
    )
    live = dict(flatten(engine.dcp_state().state_dict()))
    of_device = [copy for name, copy in copies.items() if live[name].device == session.device]
    assert of_device
    all_pinned = all(session.all(all(copy.is_pinned() for copy in of_device if copy.numel())))
    staging.release()
    engine.destroy()
    buffers, resident, by_torch = (max(of_ranks) for of_ranks in zip(*shares, strict=True))
    return StagingMemory(buffers, resident, by_torch, all_pinned)


def _pinned_by_torch(session: Session) -> int:
    return (
        torch.cuda.host_memory_stats()["allocated_bytes.current"]
        if session.device.type == "cuda"
        else 0
    )


@dataclass(frozen=True)
class Stalls:
    """Seconds that training waits, on the slowest rank.

    Attributes:
        prepare_s: `RecoverHandler.load` of a new run, which may allocate the buffers.
        first_s: the first `RecoverHandler.dump`.
        later_s: the median of later dumps.
        written_s: the median time until these are committed.
        copy_s: the median copy of the shard into warm (pinned) memory.
        committed: number of snapshots at the end.
    """

    prepare_s: float
    first_s: float
    later_s: float
    written_s: float
    copy_s: float
    committed: int


def stalls(session: Session) -> Stalls:
    """Snapshot in the background after each of a few steps."""
    engine = build_engine(session)
    batch, started = dense_batch(engine), time.perf_counter()
    dump = ours.Dump(session, engine, "stalls")
    prepare_s = time.perf_counter() - started
    stalled, written = [], []
    for _ in range(1 + N_LATER):
        train(engine, batch)
        session.barrier()
        started = time.perf_counter()
        dump.save(session.options.scratch)
        stalled.append(max(session.all(time.perf_counter() - started)))
        dump.wait()
        written.append(max(session.all(time.perf_counter() - started)))
    committed = len(list(dump.root.glob("global_step_*")))  # retention keeps two
    buffer = WarmBuffer(training_tensors(engine))
    copies = [session.seconds(buffer.copy) for _ in range(1 + session.options.rounds)]
    prepare_s = max(session.all(prepare_s))
    dump.close()
    engine.destroy()
    return Stalls(
        prepare_s,
        stalled[0],
        median(stalled[1:]),
        median(written[1:]),
        median(copies[1:]),
        committed,
    )


@dataclass(frozen=True)
class Transfer:
    """One format in both directions.

    Attributes:
        n_bytes: size of its files.
        save_s: median seconds until they are durable.
        load_s: median seconds to read them from the page cache and put them on the device.
        came_back: whether all tensors on all ranks were restored after they had been overwritten.
    """

    n_bytes: int
    save_s: float
    load_s: float
    came_back: bool


def transfers(session: Session) -> dict[str, Transfer]:
    """Save and load a training state, and export and import weights in their own dtype and in
    bfloat16.
    """
    engine = build_engine(session)
    dcp = ours.EngineSave(engine, "dcp")
    hf = ours.EngineSave(engine, "hf")
    half = ours.EngineSave(engine, "hf", "bfloat16")
    results = {
        "DCP": _both_ways(session, engine, dcp, training_tensors),
        "Hugging Face, float32": _both_ways(session, engine, hf, weight_tensors),
        "Hugging Face, bfloat16": _both_ways(session, engine, half, weight_tensors, torch.bfloat16),
    }
    engine.destroy()
    return results


def _both_ways(
    session: Session,
    engine: FSDPEngine,
    way: ours.EngineSave,
    tensors_of: Callable[[FSDPEngine], list[torch.Tensor]],
    dtype: torch.dtype | None = None,
) -> Transfer:
    path, n_bytes, saves, loads, same = session.options.scratch / "transfer", 0, [], [], True
    for _ in range(1 + session.options.rounds):
        saves.append(session.seconds(lambda: way.save(path)))
        n_bytes, tensors = folder_bytes(path), tensors_of(engine)
        expected = [
            tensor.to(dtype).to(tensor.dtype) if dtype else tensor.clone() for tensor in tensors
        ]
        for tensor in tensors:
            tensor.fill_(1)
        loads.append(session.seconds(lambda: way.load(path)))
        same &= all(map(torch.equal, tensors_of(engine), expected))
        session.barrier()
        if session.rank == 0:
            rmtree(path)
        session.barrier()
    return Transfer(n_bytes, median(saves[1:]), median(loads[1:]), all(session.all(same)))


@dataclass(frozen=True)
class Torn:
    """Outcome of a snapshot whose parameters changed before the next step.

    Attributes:
        errors: name and message of the error, by rank.
        generations: generations on the disk at the end.
    """

    errors: list[tuple[str, str]]
    generations: list[str]


def torn_snapshot(session: Session) -> Torn:
    """Take snapshots of steps 0, 1 and 2. Right after the call for 1, every parameter is changed
    outside of a step.
    """
    engine = build_engine(session)
    batch, step = dense_batch(engine), StepInfo(0, 0, 0, SPEC.steps_per_epoch)
    root = str(session.options.scratch)
    config = RecoverConfig(
        "gpu", "torn", fileroot=root, freq_steps=1, max_ckpt_to_keep=None, stop_signals=[]
    )
    error = ("none", "")
    with RecoverHandler(config, SPEC, group=engine.control_group) as handler:
        handler.load(engine)
        for number in range(3):
            train(engine, batch)
            session.barrier()
            if session.device.type == "cuda":
                torch.cuda._sleep(
                    BUSY_CYCLES
                )  # the copy begins after this, and the write is requested before it ends
            handler.dump(engine, step)
            if number == 1:
                with torch.no_grad():
                    for parameter in engine.model.parameters():
                        parameter.mul_(1.5)
            try:
                handler.wait()
            except HoldfastError as told:
                error = (type(told).__name__, str(told))
            step = step.next()
    errors = session.all(error)
    engine.destroy()
    return Torn(errors, sorted(path.name for path in config.recover_root.glob("global_step_*")))


@dataclass(frozen=True)
class Steps:
    """Training steps of one configuration.

    Attributes:
        losses: losses of all steps.
        tokens_per_s: of the timed steps, on all ranks.
        peak: most bytes that torch had allocated on the device, 0 on the CPU.
        planned: peak that `plan_step` computes.
    """

    losses: list[float]
    tokens_per_s: float
    peak: int
    planned: int


def training_steps(
    session: Session, folder: str, rows: int, length: int, ways: dict[str, dict[str, Any]]
) -> dict[str, Steps]:
    """Train a model from scratch with each of these configurations, in turn, in micro-batches of
    half a batch.
    """
    return {
        way: _training_steps(session, folder, rows, length, changes)
        for way, changes in ways.items()
    }


def _training_steps(
    session: Session, folder: str, rows: int, length: int, changes: dict[str, Any]
) -> Steps:
    tokens, device = rows * length // 2, session.options.device
    settings = {
        "dtype": "bfloat16",
        "init_from_scratch": True,
        "optimizer": OptimizerConfig(lr=1e-4),
    }
    settings["mb_spec"] = MicroBatchSpec(max_tokens_per_mb=tokens)
    config = TrainEngineConfig(path=folder, device=device, **settings | changes)
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    batch = dense_batch(engine, rows, length)
    batch["input_ids"] = torch.randint(
        0, 1000, (rows, length), generator=torch.Generator().manual_seed(session.rank)
    )
    losses: list[float] = []

    def step() -> None:
        losses.append(engine.train_batch(batch, _nll, count_loss_tokens)["loss"])

    for _ in range(2):
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = [session.seconds(step) for _ in range(session.options.rounds)]
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    sizes = measure_model(config, tokens)
    memory = (
        torch.cuda.get_device_properties(session.device).total_memory if device == "cuda" else 0
    )
    planned = plan_step(
        sizes, config, ParallelStrategy().for_world(session.world_size), tokens, memory
    ).peak
    engine.destroy()
    return Steps(losses, session.world_size * rows * length / median(seconds), peak, planned)


def _nll(output: Any, mb: Any) -> torch.Tensor:
    return -(output.logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


@dataclass(frozen=True)
class PolicyUpdate:
    """A GRPO step of a policy on the device, without sampling.

    Attributes:
        logp_s: seconds of `PPOActor.compute_logp`.
        update_s: seconds of `PPOActor.ppo_update`.
        moved: whether the update changed the log-probabilities in the direction of the rewards.
        tokens: tokens of the batch on all ranks.
    """

    logp_s: float
    update_s: float
    moved: bool
    tokens: int


def policy_update(session: Session, folder: str, rows: int, length: int) -> PolicyUpdate:
    """Reward every second answer of a batch and take one GRPO update."""
    config = PPOActorConfig(
        path=folder,
        device=session.options.device,
        dtype="bfloat16",
        init_from_scratch=True,
        group_size=rows,
        ppo_n_minibatches=2,
        reward_norm=NormConfig(mean_level="group", std_level="group"),
        mb_spec=MicroBatchSpec(max_tokens_per_mb=rows * length // 2),
        optimizer=OptimizerConfig(lr=1e-3),  # far above the rounding of bfloat16
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    actor = PPOActor(config, engine)
    torch.manual_seed(session.rank)
    batch = dense_batch(engine, rows, length)
    batch["loss_mask"][:, : length // 2] = 0
    batch["logprobs"] = actor.compute_logp(batch)
    batch["rewards"] = torch.arange(rows).remainder(2).float()
    batch = actor.compute_advantages(batch)
    for _ in range(2):  # the first round warms up
        logp_s = session.seconds(lambda: actor.compute_logp(batch))
        update_s = session.seconds(lambda: actor.ppo_update(batch))
    gain = ((actor.compute_logp(batch) - batch["logprobs"]) * batch["loss_mask"]).sum(1)
    moved = bool(gain[1::2].mean() > gain[::2].mean())
    engine.destroy()
    return PolicyUpdate(
        logp_s, update_s, all(session.all(moved)), session.world_size * rows * length
    )


@dataclass(frozen=True)
class Away:
    """An engine that leaves its device to another process, and comes back.

    Attributes:
        state: bytes of weights and optimizer state on the device.
        left: bytes that torch still has allocated there after `FSDPEngine.offload`.
        offload_s: median seconds of a later `offload`, whose host memory is there.
        onload_s: median seconds of `onload`.
        refused: whether `onload` failed while another process had all of the memory. True without a
            GPU.
        came_back: whether every bit is as before.
    """

    state: int
    left: int
    offload_s: float
    onload_s: float
    refused: bool
    came_back: bool


def away(session: Session, tenant: bool) -> Away:
    """Offload a few times. The last time, with ``tenant``, a process takes memory that was not free
    before.
    """
    engine, on_device = build_engine(session), session.device.type == "cuda"
    tensors = [
        tensor for tensor in training_tensors(engine) if tensor.device.type == session.device.type
    ]
    expected, state, refused = (
        [tensor.cpu().clone() for tensor in tensors],
        bytes_of(tensors),
        not tenant,
    )
    offloads, onloads, left = list[float](), list[float](), 0
    for last in (*[False] * session.options.rounds, True):
        free = torch.cuda.mem_get_info(session.device)[0] if tenant else 0
        offloads.append(session.seconds(engine.offload))
        by_storage = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        left = torch.cuda.memory_allocated(session.device) if on_device else by_storage
        if last and tenant:
            with _tenant(session.device, free + state // 4):  # and its CUDA context
                try:
                    engine.onload()
                except (RuntimeError, HoldfastError):
                    refused = engine.offloaded == {"weights", "optimizer"}
        onloads.append(session.seconds(engine.onload))
    came_back = all(map(torch.equal, [tensor.cpu() for tensor in tensors], expected))
    train(engine, dense_batch(engine))
    engine.destroy()
    found = Away(state, left, median(offloads[1:]), median(onloads[1:]), refused, came_back)
    return max(
        session.all(found),
        key=lambda one: (not one.refused, not one.came_back, one.left / one.state),
    )


@contextmanager
def _tenant(device: torch.device, n_bytes: int) -> Iterator[None]:
    """Another process, such as an inference server, that holds memory of the device in the
    block.
    """
    code = (
        f"import torch; held = torch.empty({n_bytes}, dtype=torch.uint8, device='{device}'); "
        "print('held', flush=True)"
    )
    command = [sys.executable, "-c", f"{code}; input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n", "the memory that the engine left is not free"
        try:
            yield
        finally:
            process.communicate("\n", timeout=60)
