"""The engine against an unsharded, padded reference, with its schedule, skipped steps, saves and
loads.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedModel

from holdfast.engine import (
    FinetuneSpec,
    FSDPConfig,
    FSDPEngine,
    MicroBatchSpec,
    OptimizerConfig,
    ParallelStrategy,
    SaveLoadMeta,
    TrainEngineConfig,
    fsdp_engine,
)
from holdfast.engine.api import Batch
from holdfast.engine.config import FSDPWrapPolicy
from holdfast.engine.staging import background_save
from holdfast.engine.training.logprobs import token_logprobs
from holdfast.engine.training.sharding import embedding_group
from holdfast.utils.errors import BatchError, ConfigError, HoldfastError, PeerError
from tests.engine.architectures.tiny import tiny_config
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.engine.shelf import shelf_url
from tests.helpers import run_ranks
from tests.limits import stretched

SPEC = FinetuneSpec(total_train_epochs=2, dataset_size=20, train_batch_size=2)
LENGTHS = (5, 1, 9, 3, 7, 2, 6, 4)


def make_engine(path: str | Path, **changes: Any) -> Any:
    optimizer = changes.pop("optimizer", OptimizerConfig(lr=1e-2, gradient_clipping=1e9))
    config = {"dtype": "float32", "optimizer": optimizer, **changes}
    engine = FSDPEngine(TrainEngineConfig(path=str(path), **config))
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return engine


def make_batch(
    lengths: tuple[int, ...] = LENGTHS, seed: int = 0, masked_rows: tuple[int, ...] = ()
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    loss_mask = mask & (torch.rand(shape, generator=generator) < 0.8)
    loss_mask[list(masked_rows)] = False
    return {
        "input_ids": torch.randint(0, 15, shape, generator=generator) * mask,
        "attention_mask": mask.long(),
        "loss_mask": loss_mask.long(),
    }


def rows(batch: Batch, part: slice) -> Batch:
    return {key: tensor[part] for key, tensor in batch.items()}


def nll(logits: torch.Tensor, mb: Batch) -> torch.Tensor:
    logprobs = token_logprobs(logits, mb["input_ids"], mb["cu_seqlens"], 1.0)[0]
    return -(logprobs * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def loss_tokens(mb: Batch) -> torch.Tensor:
    return mb["loss_mask"].sum()


def reference(model: PreTrainedModel, batch: Batch) -> tuple[float, torch.Tensor]:
    """Loss over the padded batch, with gradients left in ``model``, and token-aligned
    log-probabilities.
    """
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    logprobs = torch.zeros(batch["input_ids"].shape)
    picked = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    logprobs = torch.cat([logprobs[:, :1], picked * batch["attention_mask"][:, 1:]], dim=1)
    mask = batch["loss_mask"].clone()
    mask[:, 0] = 0
    loss = -(logprobs * mask).sum() / mask.sum()
    model.zero_grad()
    loss.backward()
    return float(loss), logprobs.detach()


def capture_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """A dict that is filled with whole gradients just before the next optimizer step."""
    gradients: dict[str, torch.Tensor] = {}

    def hook(*_: Any) -> None:
        for name, param in engine.model.named_parameters():
            gradients[name] = param.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(hook)
    return gradients


def whole(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    tensors = engine.dcp_state().live_tensors()
    return {
        n: (t.full_tensor() if isinstance(t, DTensor) else t).clone().cpu()
        for n, t in tensors.items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


SPLITS = {
    "one micro-batch": MicroBatchSpec(n_mbs=1),
    "two micro-batches": MicroBatchSpec(n_mbs=2),
    "five micro-batches": MicroBatchSpec(n_mbs=5, packing_algorithm="kk"),
    "at most 8 tokens": MicroBatchSpec(max_tokens_per_mb=8),
}


def _gradients_of_every_cut(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    results = {}
    for packed, checkpointing in ((True, "selective"), (False, True)):
        engine = make_engine(
            folder,
            pack_sequences=packed,
            gradient_checkpointing=checkpointing,
            optimizer=OptimizerConfig(type="sgd", lr=0.0),
        )
        engine.config.optimizer.gradient_clipping = 1e9
        gradients = capture_gradients(engine)
        for masked in ((), (0, 1, 2, 3)):  # the second case masks everything on rank 0 of 2
            batch = make_batch(masked_rows=masked)
            share = rows(batch, slice(rank * 8 // world_size, (rank + 1) * 8 // world_size))
            expected, _ = reference(ref, batch)
            for name, spec in SPLITS.items():
                engine.config.mb_spec = spec
                stats = engine.train_batch(share, nll, loss_tokens)
                key = f"{name}, packed {packed}, masked {masked}"
                results[key] = (
                    stats,
                    {
                        n: (gradients[n].cpu() - p.grad).abs().max()
                        for n, p in ref.named_parameters()
                    },
                )
                assert abs(stats["loss"] - expected) < 1e-5, (key, stats, expected)
                assert abs(float(engine.eval_batch(share, nll, loss_tokens)) - expected) < 1e-5
                norm = torch.stack([p.grad.norm() for p in ref.parameters()]).norm()
                assert abs(stats["grad_norm"] - float(norm)) < 1e-4
    return {
        key: (stats["n_mbs"], {n: float(d) for n, d in diffs.items()})
        for key, (stats, diffs) in results.items()
    }


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    write_model_folder(folder, tiny_qwen3())
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_gradient_does_not_depend_on_how_the_batch_was_cut(
    qwen3: Path, world_size: int
) -> None:
    for result in run_ranks(_gradients_of_every_cut, world_size, str(qwen3)):
        assert len(result) == 4 * len(SPLITS)
        for key, (n_mbs, differences) in result.items():
            assert max(differences.values()) < 2e-6, (key, differences)
            if key.startswith("five"):
                assert n_mbs == 5


def _forward_and_edges(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(folder, mb_spec=MicroBatchSpec(n_mbs=3))
    assert (engine.data_parallel_rank, engine.data_parallel_world_size) == (rank, world_size)
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = make_batch()
    _, expected = reference(ref, batch)
    share = slice(0, 1) if rank == 0 else slice(1, 8)  # uneven: one sequence and seven
    logprobs = engine.forward_batch(rows(batch, share))
    assert logprobs.shape == expected[share].shape
    assert torch.allclose(logprobs, expected[share], atol=1e-5)
    before = whole(engine)
    for bad, words in (
        ({}, "input_ids"),
        (rows(batch, slice(0, 0)), "empty"),
        ({**batch, "loss_mask": batch["loss_mask"][:, :-1]}, "loss_mask"),
        ({**batch, "attention_mask": torch.zeros_like(batch["attention_mask"])}, "no token"),
        (
            {**batch, "input_ids": batch["input_ids"] + 15},
            r"expected 0 to 14, because the model's embedding has 15",
        ),
        (
            {**batch, "input_ids": batch["input_ids"] - 1},
            r"token \d+ of row \d+ of the batch has id -1 \(\d+ such\)",
        ),
    ):
        # Only rank 1 has the bad batch, and rank 0 must not hang in a collective.
        with pytest.raises(BatchError if rank == 1 else PeerError, match=words):
            engine.train_batch(bad if rank == 1 else batch, nll, loss_tokens)
    with pytest.raises(BatchError, match="no token of the batch counts"):
        engine.train_batch(
            {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}, nll, loss_tokens
        )
    assert same(whole(engine), before)
    padded = {
        **batch,
        "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100),
    }
    assert torch.equal(engine.forward_batch(rows(padded, share)), logprobs), (
        "padding may have any id"
    )


def _half_precision(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(folder, dtype="bf16", grad_reduce_dtype="fp32")
    expected, _ = reference(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), make_batch()
    )
    seen: set[torch.dtype] = set()

    def loss_fn(logits: torch.Tensor, mb: Batch) -> torch.Tensor:
        seen.add(logits.dtype)
        return nll(logits, mb)

    stats = engine.train_batch(
        rows(make_batch(), slice(rank * 4, rank * 4 + 4)), loss_fn, loss_tokens
    )
    assert seen == {torch.bfloat16}
    assert stats["loss"] == pytest.approx(expected, rel=0.01)
    assert {tensor.dtype for tensor in engine.dcp_state().live_tensors().values()} == {
        torch.float32
    }


def test_computing_in_bfloat16_leaves_parameters_and_moments_in_float32(qwen3: Path) -> None:
    run_ranks(_half_precision, 2, str(qwen3))


def test_log_probabilities_equal_the_reference_and_bad_batches_change_nothing(qwen3: Path) -> None:
    run_ranks(_forward_and_edges, 2, str(qwen3))


def _poison(logits: torch.Tensor, mb: Batch) -> torch.Tensor:
    return nll(logits, mb) * float("nan")


def _skipped_steps(rank: int, world_size: int, folder: str) -> None:
    config = OptimizerConfig(lr=1e-2, lr_scheduler_type="linear", warmup_steps_proportion=0.0)
    engine = make_engine(folder, optimizer=config)
    batch = rows(make_batch(), slice(rank * 4, rank * 4 + 4))
    stats = engine.train_batch(batch, nll, loss_tokens)
    assert (stats["lr"], stats["update_skipped"]) == (1e-2, 0.0)
    engine.step_lr_scheduler()
    before = whole(engine)
    # Only rank 1 computes a NaN. Both skip the step, and the schedule stays.
    stats = engine.train_batch(batch, _poison if rank == 1 else nll, loss_tokens)
    engine.step_lr_scheduler()
    assert stats["update_skipped"] == 1.0
    assert engine.counters.skipped_steps == 1
    assert engine.counters.optimizer_steps == 1
    assert same(whole(engine), before)
    stats = engine.train_batch(batch, nll, loss_tokens)
    assert stats["lr"] == pytest.approx(1e-2 * (1 - 1 / 20))
    assert not same(whole(engine), before)


def test_a_non_finite_gradient_is_a_skipped_step_that_advances_no_schedule(
    qwen3: Path,
) -> None:
    run_ranks(_skipped_steps, 2, str(qwen3))


def _save_and_load(rank: int, world_size: int, folder: str, out: str) -> None:
    batch = rows(make_batch(), slice(rank * 4, rank * 4 + 4))
    engine = make_engine(folder)
    engine.train_batch(batch, nll, loss_tokens)
    engine.step_lr_scheduler()
    engine.set_version(7)
    if rank == 0:
        for name in ("dcp", "hf"):
            Path(out, name).mkdir()  # like callers that create the folder first
    engine.save(SaveLoadMeta(f"{out}/dcp", "dcp", with_optim=True))
    engine.save(SaveLoadMeta(f"{out}/hf", "hf", with_optim=False, base_model_path=folder))
    with pytest.raises(
        (ConfigError, PeerError), match=r"dcp, which is committed with a manifest\.json"
    ):
        engine.save(SaveLoadMeta(f"{out}/dcp/hf", "hf", with_optim=False, base_model_path=folder))
    engine.save(
        SaveLoadMeta(
            f"{shelf_url(Path(out))}/hf_at_url", "hf", with_optim=False, base_model_path=folder
        )
    )
    for path in Path(f"{out}/hf").iterdir():
        assert Path(f"{out}/hf_at_url/{path.name}").read_bytes() == path.read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"needs a folder of this machine: save to one, and set recover\.mirror_url",
    ):
        engine.save(SaveLoadMeta("s3://bucket/step_9", "dcp", with_optim=True))
    with pytest.raises(
        ConfigError,
        match="path is s3://bucket/step_9; loading needs a folder of this machine: fetch",
    ):
        engine.load(SaveLoadMeta("s3://bucket/step_9", "hf", with_optim=False))
    saved = whole(engine)
    engine.train_batch(batch, nll, loss_tokens)
    after = whole(engine)
    other = make_engine(folder)
    other.load(SaveLoadMeta(f"{out}/dcp", "dcp", with_optim=True))
    assert same(whole(other), saved)
    assert (other.get_version(), other.counters.optimizer_steps) == (7, 1)
    other.train_batch(batch, nll, loss_tokens)
    assert same(whole(other), after)
    from_hf = make_engine(f"{out}/hf", optimizer=None)
    weights = {n: t.full_tensor().cpu() for n, t in from_hf.model.state_dict().items()}
    assert all(
        torch.equal(weights[n.removeprefix("model.")], t)
        for n, t in saved.items()
        if n.startswith("model.")
    )
    with pytest.raises(ConfigError, match="'torch'; expected one of 'dcp', 'hf'"):
        engine.save(SaveLoadMeta(f"{out}/x", "torch", with_optim=True))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights only"):
        engine.save(SaveLoadMeta(f"{out}/x", "hf", with_optim=True))
    with pytest.raises(ConfigError, match="no optimizer"):
        from_hf.load(SaveLoadMeta(f"{out}/dcp", "dcp", with_optim=True))
    from_hf.load(SaveLoadMeta(f"{out}/dcp", "dcp", with_optim=False))
    loaded = AutoModelForCausalLM.from_pretrained(f"{out}/hf", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in weights.items())
    from_hf.save(
        SaveLoadMeta(
            f"{out}/half", "hf", with_optim=False, dtype="bfloat16", max_shard_size_bytes=8000
        )
    )
    assert len(list(Path(f"{out}/half").glob("model-*.safetensors"))) > 1
    halved = AutoModelForCausalLM.from_pretrained(f"{out}/half", dtype="auto").state_dict()
    assert all(torch.equal(halved[n], t.bfloat16()) for n, t in weights.items())


def test_save_and_load_dispatch_on_the_format_and_bring_everything_back(
    qwen3: Path, tmp_path: Path
) -> None:
    run_ranks(_save_and_load, 2, str(qwen3), str(tmp_path))


class RecordingEngine(FSDPEngine):
    """Notes which of the engine's own methods a save or load calls."""

    def __init__(self, config: TrainEngineConfig) -> None:
        super().__init__(config)
        self.called: list[str] = []

    def _save_to_dcp(self, meta: SaveLoadMeta) -> None:
        self.called.append("_save_to_dcp")
        super()._save_to_dcp(meta)

    def _load_from_dcp(self, meta: SaveLoadMeta) -> None:
        self.called.append("_load_from_dcp")
        super()._load_from_dcp(meta)

    def _save_to_hf(self, meta: SaveLoadMeta) -> None:
        self.called.append("_save_to_hf")
        super()._save_to_hf(meta)

    def _load_from_hf(self, meta: SaveLoadMeta) -> None:
        self.called.append("_load_from_hf")
        super()._load_from_hf(meta)


def _save_and_load_by_areal_names(rank: int, world_size: int, folder: str, out: str) -> None:
    engine = RecordingEngine(
        TrainEngineConfig(path=folder, dtype="float32", optimizer=OptimizerConfig(lr=1e-2))
    )
    engine.create_process_group()
    engine.initialize(None, SPEC)
    batch = make_batch()
    expected = engine.forward_batch(batch)
    for weight_format in ("dcp", "hf"):
        meta = SaveLoadMeta(
            f"{out}/{weight_format}", weight_format, with_optim=weight_format == "dcp"
        )
        engine.save(meta)
        engine.train_batch(batch, nll, loss_tokens)
        assert not torch.equal(engine.forward_batch(batch), expected)
        engine.load(meta)
        assert torch.equal(engine.forward_batch(batch), expected)
    assert engine.called == ["_save_to_dcp", "_load_from_dcp", "_save_to_hf", "_load_from_hf"]


def test_save_and_load_go_through_the_methods_that_areal_names(qwen3: Path, tmp_path: Path) -> None:
    run_ranks(_save_and_load_by_areal_names, 1, str(qwen3), str(tmp_path))


def _save_and_load_what_a_forward_left(rank: int, world_size: int, folder: str, out: str) -> None:
    batch = rows(make_batch(), slice(rank, None, 2))
    engine = make_engine(folder, fsdp=FSDPConfig(reshard_after_forward=False))
    engine.train_batch(batch, nll, loss_tokens)
    for path, blocking in ((f"{out}/now", True), (f"{out}/later", False)):
        expected = engine.forward_batch(batch)
        assert not any(isinstance(parameter, DTensor) for parameter in engine.model.parameters())
        engine.save(SaveLoadMeta(path, "dcp", with_optim=True), blocking=blocking)
        engine.train_batch(batch, nll, loss_tokens)
        assert not torch.equal(engine.forward_batch(batch), expected)
        engine.wait_for_save()
        engine.load(SaveLoadMeta(path, "dcp", with_optim=True))
        assert torch.equal(engine.forward_batch(batch), expected)


@pytest.mark.slow
def test_parameters_that_a_forward_left_gathered_are_saved_and_loaded_as_shards(
    qwen3: Path, tmp_path: Path
) -> None:
    run_ranks(_save_and_load_what_a_forward_left, 2, str(qwen3), str(tmp_path))


def _draw_from_scratch(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    drawn = {}
    for name, critic in (("actor", False), ("critic", True)):
        engine = make_engine(folder, init_from_scratch=True, is_critic=critic, seed=3)
        drawn |= {f"{name}.{n}": t.full_tensor() for n, t in engine.model.state_dict().items()}
        assert all(torch.isfinite(b).all() for b in engine.model.buffers())
        engine.destroy()
        engine.create_process_group()
    critic = make_engine(folder, is_critic=True)
    values = critic.forward_batch(make_batch())
    assert values.shape == (8, 9)
    assert values.abs().sum() > 0
    return drawn


@pytest.mark.slow
def test_weights_drawn_from_a_seed_are_the_same_at_every_world_size(tmp_path: Path) -> None:
    for name, config in {
        "qwen3": tiny_qwen3(tied=False),
        "gpt2": GPT2Config(vocab_size=15, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    }.items():
        write_model_folder(tmp_path / name, config)
        runs = [
            run_ranks(_draw_from_scratch, world_size, str(tmp_path / name))[0]
            for world_size in (1, 2)
        ]
        assert same(runs[0], runs[1])
        spread = [
            t.std()
            for n, t in runs[0].items()
            if t.dim() == 2 and n.startswith("actor.") and "lm_head" not in n
        ]
        assert all(0.002 < float(std) < 0.05 for std in spread), spread
        assert len({float(std) for std in spread}) == len(spread), spread


def _unusual_wraps(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    drawn = {}
    for names in (["Qwen3MLP"], ["Qwen3DecoderLayer", "Qwen3MLP"]):
        fsdp = FSDPConfig(wrap_policy=FSDPWrapPolicy(names))
        engine = make_engine(folder, init_from_scratch=True, fsdp=fsdp)
        drawn |= {
            f"{names}.{n}": t.full_tensor().clone() for n, t in engine.model.state_dict().items()
        }
        assert all(torch.isfinite(t).all() for t in drawn.values())
        stats = engine.train_batch(make_batch(), nll, loss_tokens)
        assert 2.5 < stats["loss"] < 3.0  # log 15, because the weights are freshly drawn
        engine.destroy()
        engine.create_process_group()
    return drawn


@pytest.mark.slow
def test_blocks_inside_blocks_and_parameters_outside_of_any_are_sharded_and_drawn(
    qwen3: Path,
) -> None:
    one, two = (run_ranks(_unusual_wraps, world_size, str(qwen3))[0] for world_size in (1, 2))
    assert same(one, two)


def _lifecycle(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(folder)
    engine.destroy()
    engine.destroy()
    assert dist.is_initialized()  # the engine did not create the group
    with pytest.raises(ConfigError, match="no model"):
        engine.train()
    with pytest.raises(ConfigError, match="no optimizer, because initialize was not called or"):
        engine.optimizer_zero_grad()
    with pytest.raises(ConfigError, match="create_process_group first"):
        engine.initialize(None, SPEC)
    with pytest.raises(ConfigError, match="'device' is 'cuda', but"):
        FSDPEngine(TrainEngineConfig(path=folder, device="cuda")).create_process_group()
    with pytest.raises(ConfigError, match="data_parallel_size is 5, but 2 rank"):
        engine.create_process_group(ParallelStrategy(data_parallel_size=5))
    dist.destroy_process_group()
    engine = FSDPEngine(TrainEngineConfig(path=folder))
    os.environ.pop("RANK")
    engine.create_process_group()  # a world of one, created by the engine
    engine.initialize(None, SPEC)
    assert engine.data_parallel_world_size == 1
    engine.destroy()
    assert not dist.is_initialized()


def test_destroy_may_be_called_twice_and_leaves_a_foreign_group_alone(qwen3: Path) -> None:
    run_ranks(_lifecycle, 2, str(qwen3))


def _destroy_when_the_device_fails(rank: int, world_size: int, folder: str, out: str) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError(
            "CUDA error: device-side assert triggered"
        )  # after which every call raises this

    dropped = list[Any]()
    dist.destroy_process_group()
    os.environ.pop("RANK")
    for method in ("free", "release"):
        engine = make_engine(folder)
        engine.save(SaveLoadMeta(f"{out}/{method}", "dcp", with_optim=True), blocking=False)
        staging, group = engine._background._staging, engine._background._background_group
        with (
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(RuntimeError, match="device-side assert"),
        ):
            if method == "free":
                patch.setattr(fsdp_engine, "free_cached_memory", fail)
            else:
                patch.setattr(staging, "release", fail)
                patch.setattr(background_save, "drop_group", dropped.append)
            engine.destroy()
        assert method == "free" or dropped == [group]
        assert not dist.is_initialized()
        engine.destroy()


def test_groups_are_closed_when_the_device_can_no_longer_free_its_memory(
    qwen3: Path, tmp_path: Path
) -> None:
    run_ranks(_destroy_when_the_device_fails, 1, str(qwen3), str(tmp_path))


def _destroy_after_a_peer_died(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises((RuntimeError, HoldfastError)):
        while True:
            engine.train_batch(make_batch(), nll, loss_tokens)
    engine.destroy()
    print("destroyed", flush=True)


@pytest.mark.timeout(60)
def test_destroy_does_not_hang_when_a_peer_has_died(
    qwen3: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="rank 1\nthe process died") as caught:
        run_ranks(_destroy_after_a_peer_died, 2, str(qwen3), timeout_s=40)
    assert "rank 0" not in str(caught.value)
    assert "did not answer" not in str(caught.value)


LATE_THREADS = """
import os, sys
from pathlib import Path
import torch.distributed as dist
from holdfast.engine import FSDPEngine, TrainEngineConfig
from holdfast.utils.distributed import rank_zero_decides

engine = FSDPEngine(TrainEngineConfig(path=""))
engine.create_process_group()
held = dist.group.WORLD, engine.control_group
rank_zero_decides(lambda: "connected", engine.control_group)
cpus = sorted(os.sched_getaffinity(0))
# gloo's threads get their turn when the main thread sleeps, no sooner
for task in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(task.name), {cpus[int(os.environ["RANK"]) % len(cpus)]})
    if "pt_gloo" in (task / "comm").read_text():
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
sys.setswitchinterval(1000)
rank_zero_decides(lambda: "the last collective", engine.control_group)
engine.destroy()
"""


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_a_late_gloo_thread_does_not_abort_a_process_after_destroy(tmp_path: Path) -> None:
    script = tmp_path / "late_threads.py"
    script.write_text(LATE_THREADS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    job = subprocess.run(command, capture_output=True, text=True, timeout=stretched(80))
    assert job.returncode == 0, job.stderr


def _groups(rank: int, world_size: int, folder: str) -> tuple[list[str], list[bool]]:
    engine = make_engine(folder)
    groups = [name for name, each in engine.model.named_modules() if isinstance(each, FSDPModule)]
    sharded = []

    def after_the_blocks(*_: object) -> None:
        embedding = engine.model.get_input_embeddings()
        sharded.append(isinstance(embedding.weight, DTensor))

    engine.model.model.norm.register_forward_pre_hook(after_the_blocks)
    engine.train_batch(rows(make_batch(), slice(rank, None, world_size)), nll, loss_tokens)
    engine.destroy()
    return groups, sharded


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_is_gathered_with_the_head_only_if_they_share_their_weight(
    tied: bool, tmp_path: Path
) -> None:
    write_model_folder(tmp_path, tiny_qwen3(tied))
    own = [] if tied else ["model.embed_tokens"]
    for groups, sharded in run_ranks(_groups, 2, str(tmp_path)):
        assert groups == ["", *own, "model.layers.0", "model.layers.1"]
        assert sharded == [not tied]


def test_an_embedding_that_another_module_reads_has_no_group_of_its_own() -> None:
    for name, has_group in (("gemma4", False), ("llama4_text", True)):
        config = tiny_config(name)
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        assert (embedding_group(model) is not None) == has_group


@pytest.mark.slow
def test_a_critic_of_a_model_that_reads_its_embedding_twice_starts(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(tiny_config("gemma4")).save_pretrained(tmp_path)
    engine = make_engine(tmp_path, is_critic=True)
    try:
        assert torch.isfinite(engine.forward_batch(make_batch())).all()
    finally:
        engine.destroy()


def _bad_models(rank: int, world_size: int, folder: str) -> None:
    with pytest.raises(ConfigError, match="'path' is '/nowhere'; expected a folder with"):
        make_engine("/nowhere")
    with pytest.raises(ConfigError, match="'NoSuchBlock'"):
        engine = FSDPEngine(TrainEngineConfig(path=folder))
        engine.config.fsdp.wrap_policy.transformer_layer_cls_to_wrap = ["NoSuchBlock"]
        engine.create_process_group()
        engine.initialize(None, SPEC)
    with pytest.raises(ConfigError, match=r"cannot build .*flash_attention_9"):
        make_engine(folder, attn_impl="flash_attention_9")


def test_a_model_that_cannot_be_built_says_which_key_is_wrong(qwen3: Path) -> None:
    run_ranks(_bad_models, 1, str(qwen3))
