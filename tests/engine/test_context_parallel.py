"""Ranks that share every row (Ulysses) train as one process does, and load each other's
checkpoints.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from holdfast.engine import MicroBatchSpec, TrainEngineConfig, fsdp_engine, full_state_dict
from holdfast.engine.api import Batch
from holdfast.engine.model import initial_model
from holdfast.engine.rl.config import PPOActorConfig
from holdfast.engine.rl.losses import masked_mean
from holdfast.engine.rl.policy_losses import policy_inputs, ppo
from holdfast.engine.training import attention
from holdfast.engine.training.attention import packed_row
from holdfast.engine.training.batch import join_trajectories
from holdfast.engine.training.context_parallel import heads_to_tokens
from holdfast.engine.training.logprobs import token_logprobs
from holdfast.engine.training.microbatch import split_batch
from holdfast.engine.training.model_output import ModelOutput, model_output
from holdfast.utils.errors import BatchError, ConfigError
from tests.engine.architectures.released import tiny_config
from tests.engine.lora.engines import lora_engine, train, trained_state, write_base
from tests.engine.meshes import SGD, Mesh, check_loads, engine_on, own_rows
from tests.engine.models import HAS_PLANS, tiny_qwen3, write_model_folder
from tests.engine.rl.test_actor import make_actor, share_of
from tests.engine.rl.test_algorithms import CASES, actor_settings, whole_batch
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    reference,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks, untimed
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(240)

MESHES = [
    Mesh(2, "fsdp:c2"),
    Mesh(4, "fsdp:d2c2"),
    Mesh(4, "fsdp:c4"),
    Mesh(4, "fsdp:d2c2", replicas=2),
]
PAIR = MESHES[0]
MODELS = {
    "qwen3": "Qwen/Qwen3-0.6B",  # tied
    "llama": "meta-llama/Llama-3.1-8B",  # untied
    "gemma3": "google/gemma-3-1b-it",  # windows of 8 tokens, one key head
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
SETTINGS = [
    ("every", True, 1, False),
    ("every", False, 3, True),
    ("last", False, 1, True),
    ("last", True, 3, False),
]
"""``gradient_sync``, checkpointing, micro-batches, and whether rows are filled (to a length that c
does not divide).
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        if not (root / name).exists():
            write_model_folder(
                root / name, tiny_config(MODELS[name]) if name in MODELS else tiny_qwen3()
            )
        return str(root / name)

    return folder


def a_batch() -> Batch:
    return make_batch((12, 1, 9, 3, 7, 2, 20, 4))


def check_gradients(found: dict[str, torch.Tensor], expected: Any) -> None:
    given = {
        name: param.grad for name, param in expected.named_parameters() if param.grad is not None
    }
    largest = max(float(grad.abs().max()) for grad in given.values())
    for name, grad in given.items():
        difference = float((found[name].cpu() - grad).abs().max())
        assert difference <= 1e-5 * float(grad.abs().max()) + 1e-7 * largest, (
            name,
            difference,
            largest,
        )


def _steps(rank: int, world_size: int, folder: str, mesh: Mesh) -> None:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, logprobs = reference(ref, a_batch())
    norm = float(
        torch.stack(
            [param.grad.norm() for param in ref.parameters() if param.grad is not None]
        ).norm()
    )
    for sync, checkpointing, n_mbs, padded in SETTINGS:
        engine = engine_on(folder, mesh, sync, gradient_checkpointing=checkpointing, optimizer=SGD)
        gradients, batch = capture_gradients(engine), own_rows(engine, a_batch())
        engine.config.pad_to_maximum = padded
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=61)
        torch.testing.assert_close(
            engine.forward_batch(batch), own_rows(engine, {"": logprobs})[""], rtol=0, atol=1e-5
        )
        assert float(engine.eval_batch(batch, nll, loss_tokens)) == pytest.approx(
            expected, rel=1e-6
        )
        stats = engine.train_batch(batch, nll, loss_tokens)
        assert stats["loss"] == pytest.approx(expected, rel=1e-6)
        assert stats["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert stats["n_tokens"] == batch["attention_mask"].sum()
        check_gradients(gradients, ref)


STEPS = [(model, mesh) for model in MODELS for mesh in MESHES]
if HAS_PLANS:
    STEPS += [("qwen3", Mesh(4, "fsdp:c2t2")), ("qwen3_moe", Mesh(2, "fsdp:c2e2"))]


@pytest.mark.parametrize(("model", "mesh"), slow_but([("qwen3", PAIR)], STEPS), ids=str)
def test_ranks_that_share_rows_take_the_steps_of_the_unsharded_model(
    folders: Callable[[str], str], model: str, mesh: Mesh
) -> None:
    run_ranks(_steps, mesh.ranks, folders(model), mesh, timeout_s=240)


def _balance(rank: int, world_size: int, folder: str, mesh: Mesh) -> None:
    engine = engine_on(folder, mesh, optimizer=SGD, pad_to_maximum=True, router_aux_loss_coef=0.5)
    engine.config.mb_spec = MicroBatchSpec(max_tokens_per_mb=64)
    ref: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_router_logits=True
    )
    batch = make_batch((5, 4))  # the last ranks have no token of the row
    aux = ref(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).aux_loss
    stats = engine.train_batch(batch, nll, loss_tokens)
    assert stats["update_successful"] == 1 and stats["expert_load_max_over_mean"] >= 1
    # Each part balances its own tokens, so the loss is that of the row only up to that.
    assert stats["router_aux_loss"] == pytest.approx(float(aux), rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow_but([PAIR], [PAIR, MESHES[2]]), ids=str)
def test_experts_are_balanced_over_the_real_tokens_of_each_part_of_a_row(
    folders: Callable[[str], str], mesh: Mesh
) -> None:
    run_ranks(_balance, mesh.ranks, folders("qwen3_moe"), mesh)


def with_rewards(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(5)
    shape = batch["input_ids"].shape
    drawn = {
        "old": -2 * torch.rand(shape, generator=generator),
        "advantages": torch.randn(shape, generator=generator),
    }
    return {**batch, **drawn}


def gspo_with_entropy(output: Any, mb: Batch) -> torch.Tensor:
    logprobs, entropy = token_logprobs(output, mb["input_ids"], mb["cu_seqlens"], 0.7)
    mask = mb["loss_mask"]
    inputs = policy_inputs(
        logprobs, mb["old"], mb["advantages"], mask, mb["cu_seqlens"], "sequence"
    )
    losses, _ = ppo(inputs, PPOActorConfig(eps_clip=0.5))
    return masked_mean(losses, mask) - 0.1 * masked_mean(entropy, mask)


def value_loss(values: torch.Tensor, mb: Batch) -> torch.Tensor:
    return masked_mean((values - mb["advantages"]) ** 2, mb["loss_mask"])


def expected_step(model: Any, batch: Batch, loss_fn: Any, is_critic: bool) -> float:
    """Loss over the padded batch, with gradients left in ``model``."""
    (mb,) = split_batch(batch, MicroBatchSpec())
    config = TrainEngineConfig(pack_sequences=False)
    output = (
        model_output(model, mb, packed=False) if is_critic else ModelOutput(model, mb, config, None)
    )
    model.zero_grad()
    loss = loss_fn(output, mb.data)
    loss.backward()
    return loss.item()


def _losses(rank: int, world_size: int, folder: str, mesh: Mesh) -> None:
    batch, engines = with_rewards(a_batch()), {}
    for name in ("head", "logits", "critic"):
        engines[name] = engine_on(folder, mesh, optimizer=SGD, is_critic=name == "critic")
    assert engines["head"]._scoring_head is not None
    engines["logits"]._scoring_head = None
    for name, engine in engines.items():
        critic = name == "critic"
        auto: Any = AutoModelForTokenClassification if critic else AutoModelForCausalLM
        options = {"num_labels": 1} if critic else {}
        ref: Any = auto.from_pretrained(folder, dtype=torch.float32, **options).eval()
        held = [full_state_dict(engine.model, group=engine.control_group)]  # on rank 0
        dist.broadcast_object_list(held)
        ref.load_state_dict(held[0])
        loss_fn = value_loss if critic else gspo_with_entropy
        expected, gradients = expected_step(ref, batch, loss_fn, critic), capture_gradients(engine)
        for n_mbs in (1, 3):
            engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
            stats = engine.train_batch(own_rows(engine, batch), loss_fn, loss_tokens)
            assert stats["loss"] == pytest.approx(expected, rel=1e-5), name
            check_gradients(gradients, ref)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow_but([PAIR], MESHES), ids=str)
def test_losses_of_whole_sequences_entropies_and_values_are_those_of_the_unsharded_model(
    folders: Callable[[str], str], mesh: Mesh
) -> None:
    run_ranks(_losses, mesh.ranks, folders("qwen3"), mesh, timeout_s=240)


def _updates(rank: int, world_size: int, folder: str, mesh: Mesh) -> dict[str, Any]:
    """Statistics of updates of one batch, log-probabilities and weights."""
    found: dict[str, Any] = {}
    for name in ("gspo", "entropy", "clip_cov", "verl's both"):
        actor = make_actor(folder, backend=mesh.backend, **actor_settings(CASES[name]))
        engine: Any = actor.engine
        batch = share_of(whole_batch(), engine.data_parallel_rank, engine.data_parallel_world_size)
        found[name] = actor.ppo_update(actor.compute_advantages(batch)) | engine.export_stats()
        found[name] = {
            key: value
            for key, value in untimed(found[name]).items()
            if key not in ("n_mbs", "num_micro_batches")
        }
        if engine.data_parallel_world_size > 1:
            found[name].pop("n_tokens")  # of a rank
        found[f"{name}, weights"] = whole(engine)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow_but([PAIR], MESHES[:2]), ids=str)
def test_updates_of_a_policy_and_their_statistics_are_those_of_one_rank(
    folders: Callable[[str], str], mesh: Mesh
) -> None:
    folder = folders("trained by actors")
    (expected,) = run_ranks(_updates, 1, folder, Mesh(1))
    for found in run_ranks(_updates, mesh.ranks, folder, mesh):
        for name, stats in expected.items():
            if name.endswith("weights"):
                for key, tensor in stats.items():
                    torch.testing.assert_close(
                        found[name][key], tensor, rtol=1e-5, atol=2e-6, msg=f"{name}: {key}"
                    )
            else:
                assert found[name].keys() | {"n_tokens"} == stats.keys() | {"n_tokens"}
                expected_stats = {key: stats[key] for key in found[name]}
                assert found[name] == pytest.approx(expected_stats, rel=1e-4, abs=1e-6), name


def _small_rows(rank: int, world_size: int, folder: str) -> None:
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for lengths in ((2,), (1, 3)):
        batch = make_batch(lengths)
        batch["loss_mask"] = batch["attention_mask"].clone()
        expected, logprobs = reference(ref, batch)
        engine = engine_on(folder, PAIR, optimizer=SGD, mb_spec=MicroBatchSpec(n_mbs=3))
        gradients = capture_gradients(engine)
        torch.testing.assert_close(engine.forward_batch(batch), logprobs, rtol=0, atol=1e-5)
        assert engine.train_batch(batch, nll, loss_tokens)["loss"] == pytest.approx(
            expected, rel=1e-6
        )
        check_gradients(gradients, ref)
    half = engine_on(folder, PAIR, optimizer=SGD, dtype="bfloat16")
    assert half.train_batch(batch, nll, loss_tokens)["loss"] == pytest.approx(expected, rel=0.01)


@pytest.mark.slow
def test_rows_of_one_token_and_dummies_are_shared_too(folders: Callable[[str], str]) -> None:
    run_ranks(_small_rows, 2, folders("qwen3"))


def _adapters(rank: int, world_size: int, folder: str) -> None:
    shared, alone = lora_engine(Path(folder), backend="fsdp:c2"), lora_engine(Path(folder))
    # Both ranks of ``alone`` train on the same rows, so the mean over them is the gradient of one.
    for stats, expected in zip(train(shared, 2), train(alone, 2), strict=True):
        assert stats["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert stats["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    found, expected = trained_state(shared), trained_state(alone)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.slow
def test_adapters_are_trained_by_ranks_that_share_rows(tmp_path: Path) -> None:
    run_ranks(_adapters, 2, str(write_base(tmp_path / "base")))


def _broadcasts(rank: int, world_size: int, folder: str) -> None:
    engine, alone = (
        engine_on(folder, PAIR, optimizer=None),
        engine_on(folder, Mesh(2), optimizer=None),
    )
    batch, head = a_batch(), rank == 0
    listed, peers = [rows(batch, slice(3)), rows(batch, slice(3, 8))], rows(batch, slice(2))
    with patch.object(fsdp_engine, "join_trajectories", side_effect=join_trajectories) as joins:
        assert same(engine.broadcast_batch(listed if head else None), batch)
    assert joins.call_count == head, "the head joins its list once"
    assert same(engine.broadcast_batch(batch if head else peers), batch)
    assert same(alone.broadcast_batch(listed), batch)
    bad: tuple[Any, ...] = (
        (None, "got None on the first of"),
        ([], "is empty"),
        ([batch, peers["input_ids"]], "a Tensor"),
    )
    for given, words in bad:
        for each in (engine, alone):
            with pytest.raises(BatchError, match=words):
                each.broadcast_batch(batch if each is engine and not head else given)


def test_the_head_gives_its_batch_to_all_ranks_with_its_data_or_all_of_them_raise(
    folders: Callable[[str], str],
) -> None:
    run_ranks(_broadcasts, 2, folders("qwen3"))


LOADS = [(one, other) for one in (Mesh(2), *MESHES) for other in (Mesh(2), *MESHES) if one != other]


@pytest.mark.parametrize(("saved_by", "loaded_by"), slow_but([], LOADS), ids=str)
def test_checkpoints_do_not_depend_on_who_shares_rows(
    folders: Callable[[str], str], tmp_path: Path, saved_by: Mesh, loaded_by: Mesh
) -> None:
    check_loads(folders("qwen3"), tmp_path, saved_by, [loaded_by])


def _refusals(
    rank: int, world_size: int, folder: str, three_heads: str, gpt2: str, gemma2: str
) -> None:
    with patch.object(initial_model, "give_memory", side_effect=AssertionError("it has memory")):
        for path, changes, words in (
            (
                folder,
                {"backend": "fsdp:c4"},
                r"4 ranks have the same data .* only 2 rank\(s\) have joined",
            ),
            (folder, {"pack_sequences": False}, "'pack_sequences' is false, .* set it to true"),
            (
                folder,
                {"attn_impl": "sdpa"},
                "Qwen3ForCausalLM cannot be .* 'attn_impl' is 'sdpa', and null or 'holdfast'",
            ),
            (
                three_heads,
                {},
                (
                    "context_parallel_size 2: 2 ranks cannot share 3 heads with 3 key heads; .* "
                    "of 1, 3;"
                ),
            ),
            (three_heads, {"attn_impl": "holdfast"}, "2 ranks cannot share 3 heads"),
            (gemma2, {}, "Gemma2ForCausalLM cannot be .* in another way"),
            (
                gpt2,
                {"disable_dropout": False},
                (
                    r"'disable_dropout' is false, and GPT2LMHeadModel has \{.*_pdrop': 0.1.* set "
                    r"it to true"
                ),
            ),
        ):
            with pytest.raises(ConfigError, match=words):
                make_engine(path, **{"backend": "fsdp:c2", **changes})
        with (
            patch.object(
                attention, "heads_to_tokens", lambda out, group: heads_to_tokens(out, group).flip(1)
            ),
            pytest.raises(
                ConfigError,
                match=r"Qwen3ForCausalLM cannot be .* come out otherwise than the whole row",
            ),
        ):
            make_engine(folder, backend="fsdp:c2")
    make_engine(folder, backend="fsdp:c2", disable_dropout=False)  # it has none
    engine = make_engine(gpt2, backend="fsdp:c2")
    batch = a_batch()
    engine.train_batch(batch, nll, loss_tokens)
    before = whole(engine)
    with pytest.raises(
        BatchError, match=r"asked for logits, but ranks share each row .* is 2.*; take output"
    ):
        engine.train_batch(batch, lambda output, mb: output.float().sum(), loss_tokens)
    with pytest.raises(
        BatchError, match=r"ranks 0 and 1 share their data \(2 ranks do\), but were given different"
    ):
        engine.train_batch(rows(batch, slice(rank, 8)), nll, loss_tokens)
    assert same(whole(engine), before)
    ids, mask = torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.int64)
    row = (4,), torch.tensor([0, 4], dtype=torch.int32), engine._meshes.sequence
    with (
        packed_row(*row),
        pytest.raises(ValueError, match="needs a mask of its own, but ranks share the row"),
    ):
        engine.model(input_ids=ids, attention_mask=mask, use_cache=False)


@pytest.mark.slow
def test_what_cannot_share_rows_is_refused_in_words_on_all_ranks(
    folders: Callable[[str], str], tmp_path: Path
) -> None:
    config = tiny_qwen3()
    config.num_attention_heads = config.num_key_value_heads = 3
    write_model_folder(tmp_path / "three", config)
    for name in ("openai-community/gpt2", "google/gemma-2-2b"):
        write_model_folder(tmp_path / name, tiny_config(name))
    paths = [
        str(tmp_path / name) for name in ("three", "openai-community/gpt2", "google/gemma-2-2b")
    ]
    run_ranks(_refusals, 2, folders("qwen3"), *paths)
