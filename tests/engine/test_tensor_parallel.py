"""Matrices cut over ranks give the steps, checkpoints and refusals of whole ones."""

import gc
import math
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from holdfast.engine import MicroBatchSpec, OptimizerConfig, SaveLoadMeta
from holdfast.engine.api import Batch
from holdfast.engine.memory.tensors import counts_here, local_tensor
from holdfast.engine.training import tensor_parallel
from holdfast.engine.training.logprobs import score_tokens, token_logprobs
from holdfast.engine.training.meshes import is_cut
from holdfast.engine.training.microbatch import CutRules, split_batch
from holdfast.utils.distributed import gather_objects
from holdfast.utils.errors import BatchError, ConfigError
from tests.engine.meshes import SGD, Mesh, check_loads, engine_on, fingerprint, own_rows
from tests.engine.models import NEEDS_PLANS, tiny_qwen3, write_model_folder
from tests.engine.rl.test_actor import global_batch, make_actor, share_of
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_batch,
    nll,
    reference,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks, untimed
from tests.tiers import slow_but

pytestmark = [pytest.mark.timeout(240), NEEDS_PLANS]

MESHES = [
    Mesh(2, "fsdp:t2"),
    Mesh(4, "fsdp:d2t2"),
    Mesh(4, "fsdp:d2t2", replicas=2),
    Mesh(4, "fsdp:t4"),
]
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
}
"""Models of released architectures: tied or not, with biases, windows, norms of heads, and experts.
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        write_model_folder(root / name, config)
    return {name: root / name for name in CONFIGS}


def score(output: Any, mb: Batch) -> torch.Tensor:
    """A loss of log-probabilities and entropies, from the head or from whole logits."""
    logprobs, entropy = token_logprobs(output, mb["input_ids"], mb["cu_seqlens"], 0.7)
    return -((logprobs + 0.1 * entropy) * mb["loss_mask"]).sum() / mb["loss_mask"].sum()


def score_of_logits(output: Any, mb: Batch) -> torch.Tensor:
    return score(output.logits, mb)


def reference_score(model: PreTrainedModel, batch: Batch) -> float:
    """`score` over the padded batch by the unsharded model, with gradients left in it."""
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    log_p = (logits[:, :-1] / 0.7).log_softmax(-1)
    picked = log_p.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    mask = batch["loss_mask"][:, 1:]
    loss = -((picked - 0.1 * (log_p.exp() * log_p).sum(-1)) * mask).sum() / mask.sum()
    model.zero_grad()
    loss.backward()
    return float(loss.detach())


def check_step(
    engine: Any, batch: Batch, loss_fn: Any, ref: PreTrainedModel, expected: float
) -> None:
    grads = {name: param.grad for name, param in ref.named_parameters() if param.grad is not None}
    norm = float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    gradients = capture_gradients(engine)
    stats = engine.train_batch(own_rows(engine, batch), loss_fn, loss_tokens)
    assert stats["loss"] == pytest.approx(expected, rel=1e-6)
    assert stats["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, grad in grads.items():
        difference = (gradients[name].cpu() - grad).abs().max() / grad.abs().max()
        assert difference < 1e-5, f"{name}: {difference}"


def _steps(rank: int, world_size: int, folder: str, mesh: Mesh, sync: str) -> None:
    warnings.filterwarnings("error", "FSDP2-wrapped module")
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch = make_batch()
    engine = engine_on(folder, mesh, sync, optimizer=SGD, gradient_checkpointing=sync == "last")
    assert engine._scoring_head is not None
    expected, logprobs = reference(ref, batch)
    found = engine.forward_batch(own_rows(engine, batch))
    assert (found - own_rows(engine, {"logprobs": logprobs})["logprobs"]).abs().max() < 1e-5
    engine.config.mb_spec = MicroBatchSpec(n_mbs=3)
    check_step(engine, batch, nll, ref, expected)
    expected = reference_score(ref, batch)
    assert float(engine.eval_batch(own_rows(engine, batch), score, loss_tokens)) == pytest.approx(
        expected, rel=1e-6
    )
    for n_mbs, loss_fn in ((1, score), (3, score), (3, score_of_logits)):
        engine.config.mb_spec = MicroBatchSpec(n_mbs=n_mbs)
        check_step(engine, batch, loss_fn, ref, expected)


STEPS = [(name, mesh, sync) for name in CONFIGS for mesh in MESHES for sync in ("every", "last")]


QUICK = [("qwen3", MESHES[0], "last")]


@pytest.mark.parametrize(("name", "mesh", "sync"), slow_but(QUICK, STEPS), ids=str)
def test_cut_matrices_take_the_steps_of_the_unsharded_model(
    folders: dict[str, Path], name: str, mesh: Mesh, sync: str
) -> None:
    run_ranks(_steps, mesh.ranks, str(folders[name]), mesh, sync)


def _updates(rank: int, world_size: int, folder: str) -> None:
    batch = make_batch()
    for kind, kernels in (
        ("adam", ("loop", "foreach")),
        ("adam_bf16", ("foreach",)),
        ("muon", ("foreach",)),
    ):
        options: dict[str, Any] = {"type": kind, "lr": 1e-2, "gradient_clipping": 0.5}
        configs = [OptimizerConfig(**options, implementation=name) for name in kernels]
        engine, *others = (engine_on(folder, MESHES[0], optimizer=config) for config in configs)
        plain = engine_on(folder, Mesh(2), optimizer=configs[0])
        for step in range(3):
            stats = untimed(engine.train_batch(batch, nll, loss_tokens))
            for each in others:
                assert untimed(each.train_batch(batch, nll, loss_tokens)) == stats
            other = plain.train_batch(rows(batch, slice(rank * 4, rank * 4 + 4)), nll, loss_tokens)
            assert stats["loss"] == pytest.approx(
                other["loss"], rel=1e-5 if kind == "adam" else 1e-3
            ), step
            assert stats["n_tokens"] == batch["attention_mask"].sum()
        assert all(same(whole(engine), whole(each)) for each in others)
        common = [
            local_tensor(tensor)
            for tensor in engine.dcp_state().live_tensors().values()
            if not is_cut(tensor, engine._meshes.tensor)
        ]
        ours, theirs = gather_objects([tensor.tolist() for tensor in common])
        assert len(ours) > 20 and ours == theirs, (
            "weights and moments that every rank has stay equal"
        )


@pytest.mark.slow
def test_updates_are_those_of_whole_matrices_and_equal_on_all_ranks(
    folders: dict[str, Path],
) -> None:
    run_ranks(_updates, 2, str(folders["qwen3"]))


def _collectives(rank: int, world_size: int, folder: str) -> None:
    engine = engine_on(folder, MESHES[0], optimizer=SGD)
    (batch,) = split_batch(
        make_batch(),
        MicroBatchSpec(n_mbs=1),
        engine.control_group,
        rules=CutRules(ranks_with_same_data=2),
    )
    batch = batch.to(engine.device)
    for recomputes in (False, True):
        if recomputes:
            engine.model.gradient_checkpointing_enable({"use_reentrant": False})
        with CommDebugMode() as found:
            engine.train()._output(batch).logprobs.sum().backward()
        reduced = sum(
            count for kind, count in found.get_comm_counts().items() if "reduce" in str(kind)
        )
        # For each of two layers 2 forward, 1 of them again, and 2 backward, 1 for the embedding, 3
        # for the head.
        assert reduced == 2 * (4 + recomputes) + 4, found.get_comm_counts()
        engine.optimizer_zero_grad()


@pytest.mark.slow
def test_the_ranks_sum_each_activation_and_its_gradient_once(folders: dict[str, Path]) -> None:
    run_ranks(_collectives, 2, str(folders["llama"]))


def _unknown_token(rank: int, world_size: int, folder: str) -> None:
    engine = engine_on(folder, MESHES[0], optimizer=SGD)
    batch = make_batch()
    n_words = SIZES["vocab_size"]
    batch["input_ids"][0, 0] = n_words - 1
    assert engine.forward_batch(batch).isfinite().all()
    batch["input_ids"][0, 0] = n_words
    with pytest.raises(
        BatchError, match=f"token 0 of row 0 of the batch has id {n_words} .* has {n_words} rows"
    ):
        engine.forward_batch(batch)


def test_a_token_that_no_rank_has_is_refused(folders: dict[str, Path]) -> None:
    run_ranks(_unknown_token, 2, str(folders["llama"]))


def _nothing_stays(rank: int, world_size: int, folder: str) -> None:
    for checkpointing in (False, True):
        engine = engine_on(folder, MESHES[0], optimizer=SGD, gradient_checkpointing=checkpointing)
        engine.config.mb_spec = MicroBatchSpec(n_mbs=2)
        counts = []
        for _ in range(7):
            engine.train_batch(make_batch(), nll, loss_tokens)
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        # After one step in 60 one tensor lives some milliseconds longer, probably in a thread of
        # gloo.
        assert min(counts[4:]) == min(counts[1:4]), counts
        engine.destroy()


@pytest.mark.slow
def test_a_step_leaves_no_activation_behind(folders: dict[str, Path]) -> None:
    run_ranks(_nothing_stays, 2, str(folders["qwen3"]))


def _counts(rank: int, world_size: int, folder: str, mesh: Mesh) -> None:
    engine, plain = engine_on(folder, mesh), engine_on(folder, Mesh(world_size))
    for each in (engine, plain):
        each.load(SaveLoadMeta(folder, "hf", with_optim=False))
    assert fingerprint(engine) == fingerprint(plain)
    counted = torch.zeros((), dtype=torch.int64)
    for param in engine.model.parameters():
        counted += local_tensor(param).numel() * counts_here(param)
    dist.all_reduce(counted)
    assert counted == sum(param.numel() for param in engine.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", slow_but(MESHES[:1], MESHES), ids=str)
def test_each_element_counts_on_one_rank_so_fingerprints_do_not_depend_on_the_mesh(
    folders: dict[str, Path], mesh: Mesh
) -> None:
    run_ranks(_counts, mesh.ranks, str(folders["llama"]), mesh)


def _draws(rank: int, world_size: int, folder: str, mesh: Mesh) -> dict[str, torch.Tensor]:
    drawn = {}
    for name, critic in (("actor", False), ("critic", True)):
        engine = engine_on(
            folder, mesh, init_from_scratch=True, is_critic=critic, seed=3, optimizer=None
        )
        state = engine.model.state_dict()
        drawn |= {
            f"{name}.{n}": t.full_tensor() if isinstance(t, DTensor) else t
            for n, t in state.items()
        }
        assert all(buffer.isfinite().all() for buffer in engine.model.buffers())
    return drawn


@pytest.mark.slow
def test_weights_drawn_from_a_seed_do_not_depend_on_the_mesh(folders: dict[str, Path]) -> None:
    (alone,) = run_ranks(_draws, 1, str(folders["qwen3"]), Mesh(1))
    for drawn in run_ranks(_draws, 2, str(folders["qwen3"]), MESHES[0]):
        assert same(drawn, alone)


def _values(rank: int, world_size: int, folder: str) -> None:
    """Compare a critic, and an actor with micro-batches in which nothing counts."""
    batch, part = make_batch(masked_rows=(0, 1, 2, 3)), slice(rank * 4, rank * 4 + 4)

    def loss(values: Any, mb: Batch) -> torch.Tensor:
        return (values.square() * mb["loss_mask"]).sum() / mb["loss_mask"].sum()

    for critic, loss_fn in ((True, loss), (False, nll)):
        changes = {"is_critic": critic, "optimizer": SGD, "mb_spec": MicroBatchSpec(n_mbs=4)}
        engine, plain = (engine_on(folder, mesh, **changes) for mesh in (MESHES[0], Mesh(2)))
        found, expected = engine.forward_batch(batch), plain.forward_batch(rows(batch, part))
        torch.testing.assert_close(found[part], expected, rtol=0, atol=1e-5)
        gradients, others = capture_gradients(engine), capture_gradients(plain)
        stats = engine.train_batch(batch, loss_fn, loss_tokens)
        assert stats["loss"] == pytest.approx(
            plain.train_batch(rows(batch, part), loss_fn, loss_tokens)["loss"]
        )
        for name, gradient in gradients.items():
            difference = (gradient - others[name]).abs().max() / others[name].abs().max()
            assert difference < 1e-5, name


@pytest.mark.slow
def test_a_critic_and_micro_batches_that_do_not_count_give_the_gradients_of_whole_matrices(
    folders: dict[str, Path],
) -> None:
    run_ranks(_values, 2, str(folders["qwen3"]))


def _algorithm(rank: int, world_size: int, folder: str) -> None:
    batch, share = global_batch(), share_of(global_batch(), rank, world_size)
    for changes in ({"entropy_coeff": 0.02}, {"importance_sampling_level": "sequence"}):
        cut, plain = (
            make_actor(folder, backend=backend, **changes) for backend in ("fsdp:d1t2", "fsdp:d2")
        )
        results = []
        for actor, rows_here in ((cut, batch), (plain, share)):
            old = actor.compute_logp(rows_here) + 0.1 * rows_here["noise"]
            advantages = actor.compute_advantages(rows_here | {"logprobs": old})
            results.append(untimed(actor.ppo_update(advantages)))
        ours, theirs = results
        assert ours.keys() == theirs.keys() and "n_loss_tokens" in ours
        for name in ours.keys() - {"n_mbs", "num_micro_batches", "n_tokens"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
def test_an_algorithm_counts_tokens_and_sequences_once(folders: dict[str, Path]) -> None:
    run_ranks(_algorithm, 2, str(folders["qwen3"]))


def _scores(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 6, generator=generator, requires_grad=True)
    weight, bias = torch.randn(10, 6, generator=generator), torch.randn(10, generator=generator)
    weight[3] *= 30  # a word with almost all the probability
    targets = torch.tensor([0, 3, 9, 5, 4, 3, 8, 1, 2])
    group, own = dist.group.WORLD, slice(rank * 5, rank * 5 + 5)
    for temperature, chunk_size in ((1.0, None), (0.5, 2)):
        results = []
        for words, first, ranks in ((slice(0, 10), 0, None), (own, rank * 5, group)):
            leaves = [tensor.clone()[words].detach().requires_grad_() for tensor in (weight, bias)]
            hidden.grad = None
            how = temperature, chunk_size, first, ranks
            logprobs, entropy = score_tokens(hidden, leaves[0], leaves[1], targets, *how)
            (logprobs * hidden.detach()[:, 0] + 0.3 * entropy).sum().backward()
            results.append(
                (logprobs.detach(), entropy.detach(), hidden.grad, *(leaf.grad for leaf in leaves))
            )
        expected, found = results
        for name, one, other in zip(
            ("logprobs", "entropy", "hidden", "weight", "bias"), expected, found, strict=True
        ):
            assert one is not None and other is not None
            one = one[own] if name in ("weight", "bias") else one
            assert (other - one).abs().max() < 2e-5 * one.abs().max(), name


def _impossible_words(rank: int, world_size: int) -> None:
    hidden, weight, bias = (
        torch.ones(3, 2),
        torch.zeros(4, 2),
        torch.tensor([0.0, 0.0, -torch.inf, -torch.inf]),
    )
    own, targets = slice(rank * 2, rank * 2 + 2), torch.tensor([0, 2, 3])
    logprobs, entropy = score_tokens(
        hidden, weight[own], bias[own], targets, 1.0, None, rank * 2, dist.group.WORLD
    )
    assert logprobs.tolist() == pytest.approx([-math.log(2), -math.inf, -math.inf])
    assert entropy.tolist() == pytest.approx([math.log(2)] * 3)


def test_a_word_among_impossible_ones_of_another_rank_is_impossible() -> None:
    run_ranks(_impossible_words, 2)


def test_scores_of_a_part_of_the_words_are_those_of_all_words() -> None:
    run_ranks(_scores, 2)


WHOLE = [Mesh(1), Mesh(3), Mesh(4, replicas=2)]
SAVED_AND_LOADED = [
    ("qwen3", MESHES[0], [Mesh(2)]),
    *(("qwen3", mesh, [*WHOLE, *MESHES]) for mesh in MESHES[1:]),
    *(("qwen3", mesh, MESHES) for mesh in WHOLE),
    *((name, MESHES[1], [WHOLE[0], WHOLE[1], MESHES[3]]) for name in ("llama", "qwen3_moe")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "saved_by", "loaded_by"), SAVED_AND_LOADED)
def test_checkpoints_of_cut_matrices_load_into_whole_ones_and_back(
    folders: dict[str, Path], tmp_path: Path, name: str, saved_by: Mesh, loaded_by: list[Mesh]
) -> None:
    check_loads(folders[name], tmp_path, saved_by, loaded_by)


def refused(folder: str | Path, words: str, **changes: Any) -> None:
    with pytest.raises(ConfigError, match=words):
        engine_on(folder, MESHES[0], **changes)


def _refusals(rank: int, world_size: int, folders: dict[str, str]) -> None:
    sizes = r"tensor_parallel_size \(t in config key 'backend'\) is 2, "
    refused(
        folders["odd"],
        sizes + r"which does not divide the 15 rows of '.*weight'; expected one of \[1\]",
    )
    refused(
        folders["few heads"],
        sizes + r"which does not divide the 1 heads of 'model.layers.0.self_attn.k_proj'",
    )
    refused(
        folders["gpt2"],
        sizes + "but transformers has no plan for the layers of GPT2LMHeadModel; set it to 1",
    )
    refused(
        folders["qwen3"],
        sizes + "with config key 'use_lora' true: .* set it to 1",
        use_lora=True,
        lora_rank=2,
    )
    dropout = "'disable_dropout' is false, and .* has {'attention_dropout': 0.1}, .* set it to true"
    refused(folders["dropout"], dropout, disable_dropout=False)
    engine_on(folders["dropout"], MESHES[0])


def test_what_cannot_be_cut_is_refused_on_all_ranks(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    few = Qwen3Config(**{**SIZES, "num_key_value_heads": 1})
    write_model_folder(tmp_path / "odd", tiny_qwen3(vocab_size=15))
    write_model_folder(tmp_path / "few heads", few)
    write_model_folder(
        tmp_path / "gpt2", GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=16, n_positions=32)
    )
    write_model_folder(tmp_path / "dropout", Qwen3Config(**SIZES, attention_dropout=0.1))
    named = {path.name: str(path) for path in tmp_path.iterdir()}
    run_ranks(_refusals, 2, {**named, "qwen3": str(folders["qwen3"])})


def _wrong_plans(rank: int, world_size: int, folder: str) -> None:
    plan_of = tensor_parallel.tensor_parallel_plan

    def without(words: str) -> Any:
        return lambda *args: {
            name: style for name, style in plan_of(*args).items() if words not in name
        }

    for gone, found in (
        ("q_norm", "gradients of 'model.layers.0.self_attn.q_norm.weight' differ by"),
        ("v_proj", "its outputs differ by"),
        ("o_proj", "it fails"),
    ):
        wrong = patch.object(tensor_parallel, "tensor_parallel_plan", without(gone))
        with wrong, patch.object(tensor_parallel, "_norms_of_heads", lambda *_: []):
            refused(
                folder,
                f"Qwen3ForCausalLM computes otherwise with the plan of transformers: {found}",
            )


@pytest.mark.slow
def test_a_plan_of_transformers_that_lacks_a_rule_is_refused_and_not_trained_with(
    folders: dict[str, Path],
) -> None:
    run_ranks(_wrong_plans, 2, str(folders["qwen3"]))
