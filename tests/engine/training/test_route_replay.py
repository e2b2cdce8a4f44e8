"""Experts that servers chose, replayed in the routers of six architectures."""

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.engine import MicroBatchSpec, TrainEngineConfig
from holdfast.engine.api import Batch
from holdfast.engine.config import RouterReplayConfig
from holdfast.engine.training.route_replay import has_choice, layer_of, routers_by_layer
from holdfast.engine.training.routers import number_of_experts
from holdfast.utils.errors import BatchError, ConfigError, PeerError
from tests.engine.meshes import SGD
from tests.engine.models import NEEDS_PLANS, tiny_qwen3, write_model_folder
from tests.engine.rl.test_actor import global_batch, make_actor
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    reference,
    rows,
    same,
)
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = [pytest.mark.timeout(120), NEEDS_PLANS]

LAYERS, K, EXPERTS = 3, 4, 16
COMMON: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "num_experts_per_tok": K,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPS: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "moe_intermediate_size": 16,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
FULL_ATTENTION: dict[str, Any] = {"layer_types": ["full_attention"] * LAYERS}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "glm4_moe": {**GROUPS, "norm_topk_prob": True},
    "deepseek_v3": {**GROUPS, **LATENT},
    "qwen3_5_moe_text": {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        **FULL_ATTENTION,
    },
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": 16, **FULL_ATTENTION},
    "mixtral": {"num_local_experts": EXPERTS},
}
PADDED = ("gpt_oss",)
"""Models whose sequences are not kept apart in packed rows."""
R3 = {"router_replay": RouterReplayConfig("R3"), "optimizer": SGD}
CUTS = {
    "recomputed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective", "mb_spec": MicroBatchSpec(n_mbs=3)},
    "every second": {"gradient_checkpointing": "every_2", "pack_sequences": False},
    "filled": {"pad_to_maximum": True, "mb_spec": MicroBatchSpec(max_tokens_per_mb=24)},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    def folder_of(kind: str, **changes: Any) -> str:
        folder = root / f"{kind}{'-'.join(changes)}"
        if not folder.exists():
            values = COMMON | MODELS.get(kind, {}) | changes
            write_model_folder(folder, AutoConfig.for_model(kind, **values))
        return str(folder)

    return folder_of


def experts_by_layer(model: Any) -> dict[int, Any]:
    found = {layer_of(name): m for name, m in model.named_modules() if number_of_experts(m)}
    return {layer: module for layer, module in found.items() if layer is not None}


def taken(engine: Any, batch: Batch) -> Tensor:
    """The experts that the model takes, ``[B, S, layers, k]`` int16. Dense layers have zeros."""
    seen: dict[int, Tensor] = {}

    def note(layer: int, module: Any, args: Any) -> None:
        seen[layer] = args[1]

    def choices(output: Any, mb: Batch) -> Tensor:
        assert output.logprobs is not None
        places = torch.arange(len(mb["input_ids"]))  # without filling
        if not engine.config.pack_sequences:
            lengths = mb["cu_seqlens"].diff().long()
            numbers = torch.arange(len(lengths)).repeat_interleave(lengths)
            places = numbers * lengths.max() + mb["position_ids"]
        found = torch.zeros(len(places), LAYERS, K)
        for layer, chosen in seen.items():
            found[:, layer] = chosen[places].float()
        return found

    handles = [
        module.register_forward_pre_hook(partial(note, layer))
        for layer, module in experts_by_layer(engine.model).items()
    ]
    try:
        return engine.forward_batch(batch, choices).to(torch.int16)
    finally:
        for handle in handles:
            handle.remove()


def drawn(batch: Batch, dense: set[int], seed: int = 0) -> Tensor:
    """Different experts for each token and layer."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(*batch["input_ids"].shape, LAYERS, EXPERTS, generator=generator)
    routes = draws.argsort(-1)[..., :K]
    routes[:, :, list(dense)] = 0
    routes[batch["attention_mask"] == 0] = 0
    return routes.to(torch.uint8)


def by_hand(kind: str, router: Any, chosen: Tensor, hidden: Tensor) -> Any:
    """The output of a router for chosen experts, by the formula of its architecture."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = hidden @ router.weight.T
    if kind == "gpt_oss":
        logits = logits + router.bias
        return logits, F.softmax(logits.gather(1, chosen), 1), chosen
    grouped = kind in ("glm4_moe", "deepseek_v3")
    scores = logits.sigmoid() if grouped else logits.softmax(1)
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True)
    return logits, weights * getattr(router, "routed_scaling_factor", 1.0), chosen


def expected_gradients(folder: str, kind: str, batch: Batch, routes: Tensor) -> dict[str, Tensor]:
    """Gradients of an unsharded, padded model whose routers are written by hand."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for layer, router in routers_by_layer(model).items():
        chosen = routes[:, :, layer].flatten(0, 1).long()
        router.forward = partial(by_hand, kind, router, chosen)
    reference(model, batch)
    return {name: param.grad for name, param in model.named_parameters()}


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative to the largest number of each gradient."""
    differences = []
    for name, gradient in expected.items():
        size = gradient.abs().max().clamp(min=1e-6)
        differences.append(float((found[name].cpu() - gradient).abs().max() / size))
    return max(differences)


def _replays(rank: int, world_size: int, folder: str, kind: str, cuts: dict[str, Any]) -> None:
    packed = {"pack_sequences": kind not in PADDED}
    batch = make_batch()
    part = slice(0, 1) if rank == 0 else slice(1, 8)  # rank 0 adds dummies
    share = rows(batch, part)

    # Own choices change no bit.
    native = make_engine(folder, optimizer=SGD, **packed)
    engine = make_engine(folder, **R3, **packed)
    own = taken(native, share)
    dense = {layer for layer in range(LAYERS) if not own[:, :, layer].any()}
    assert dense == ({0} if kind in ("glm4_moe", "deepseek_v3") else set())
    gradients, replayed = capture_gradients(native), capture_gradients(engine)
    before = native.train_batch(share, nll, loss_tokens)
    after = engine.train_batch({**share, "routed_experts": own}, nll, loss_tokens)
    assert same(gradients, replayed) and before["loss"] == after["loss"]
    assert after["routes_differ"] == after["tokens_rerouted"] == after["routes_missing"] == 0
    with_own = {**share, "routed_experts": own.to(torch.uint8)}
    assert torch.equal(engine.forward_batch(with_own), native.forward_batch(share))

    # Other ones reach the experts, whatever the cut, and give the gradient of the formula.
    routes = drawn(batch, dense)
    expected = expected_gradients(folder, kind, batch, routes)
    real = share["attention_mask"].bool()
    given = {**share, "routed_experts": routes[part]}
    for name, changes in cuts.items():
        engine = make_engine(folder, **R3, **{**packed, **changes})
        assert torch.equal(taken(engine, given)[real], routes[part][real].short()), name
        replayed = capture_gradients(engine)
        stats = engine.train_batch(given, nll, loss_tokens)
        assert largest_difference(replayed, expected) < 2e-5, name
        assert 0.5 < stats["routes_differ"] < 1 and stats["routes_missing"] == 0

    # The same engine with wrong routes.
    wrong = {
        "layers": routes.flip(2),
        "tokens": routes.roll(1, 1),
        "nothing": torch.zeros_like(routes),
    }
    for name, other in wrong.items():
        engine.train_batch({**share, "routed_experts": other[part]}, nll, loss_tokens)
        assert largest_difference(replayed, expected) > 1e-2, name


@pytest.mark.parametrize("kind", slow_but(["qwen3_moe"], MODELS))
def test_replayed_experts_give_the_gradient_of_the_formula(
    kind: str, folders: Callable[[str], str], request: pytest.FixtureRequest
) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    names = ["selective"]
    if is_slow:
        names = ["recomputed", "every second"] if kind in PADDED else list(CUTS)
    run_ranks(_replays, 2, folders(kind), kind, {name: CUTS[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_replayed_experts_do_not_depend_on_the_cut(
    kind: str, folders: Callable[[str], str]
) -> None:
    run_ranks(_replays, 2, folders(kind), kind, CUTS)


def _on_mesh(rank: int, world_size: int, folder: str, backend: str, compiles: bool = False) -> None:
    batch = make_batch()
    routes = drawn(batch, set())
    engine = make_engine(folder, backend=backend, compile=compiles, **R3)
    replayed = capture_gradients(engine)
    part = slice(None)
    if engine.data_parallel_world_size > 1:
        part = slice(rank * 4, rank * 4 + 4)
    share = {**rows(batch, part), "routed_experts": routes[part]}
    stats = engine.train_batch(share, nll, loss_tokens)
    expected = expected_gradients(folder, "qwen3_moe", batch, routes)
    assert largest_difference(replayed, expected) < 2e-5
    assert stats["routes_missing"] == 0 < stats["routes_differ"]


@pytest.mark.parametrize("backend", slow_but([], ["fsdp:c2", "fsdp:t2", "fsdp:e2"]))
def test_ranks_that_share_rows_or_experts_replay_them(
    backend: str, folders: Callable[[str], str]
) -> None:
    run_ranks(_on_mesh, 2, folders("qwen3_moe"), backend)


@pytest.mark.slow
def test_compiled_blocks_replay_experts(folders: Callable[[str], str]) -> None:
    run_ranks(_on_mesh, 1, folders("qwen3_moe"), "fsdp", True)


def _policy(rank: int, world_size: int, folder: str) -> None:
    batch = global_batch()
    given = {**batch, "routed_experts": drawn(batch, set())}
    keys: Any = {"use_lora": True, "target_modules": ["q_proj"], "recompute_logprob": True}
    actor = make_actor(folder, router_replay=RouterReplayConfig("R3"), **keys)
    routed_natively = actor.compute_logp(batch)
    assert (actor.compute_logp(given) - routed_natively).abs().max() > 1e-2
    assert torch.equal(actor.compute_ref_logp(given), routed_natively)

    # The old policy is replayed, too, so that the first ratio is 1.
    stats = actor.ppo_update(actor.compute_advantages(given))
    assert stats["ratio"] == pytest.approx(1, abs=1e-5)
    assert 0.5 < stats["routes_differ"] < 1 == stats["tokens_rerouted"]
    with pytest.raises(BatchError, match="has no 'routed_experts', which routers replay"):
        actor.ppo_update(actor.compute_advantages(batch))


def test_the_policy_is_replayed_and_its_reference_is_not(folders: Callable[[str], str]) -> None:
    run_ranks(_policy, 1, folders("qwen3_moe"))


def _missing(rank: int, world_size: int, folder: str) -> None:
    """The model routes tokens without a choice, and the statistics are those of a count by hand."""
    batch = make_batch()
    native = make_engine(folder, optimizer=SGD)
    own = taken(native, batch)
    routes = drawn(batch, set()).to(torch.int16)
    routes[2:, 3:] = 0
    given = {**batch, "routed_experts": routes}
    stats = native.train_batch(given, nll, loss_tokens)

    # Tokens that predict one of the loss.
    predicts = batch["loss_mask"][:, 1:].bool() & batch["attention_mask"][:, 1:].bool()
    own, routes = own[:, :-1], routes[:, :-1]
    known = has_choice(routes) & predicts[..., None]
    differs = (own[..., :, None] != routes[..., None, :]).all(-1) & known[..., None]
    assert stats["routes_differ"] == pytest.approx(float(differs.sum() / (known.sum() * K)))
    rerouted = differs.flatten(2).any(-1).sum() / predicts.sum()
    assert stats["tokens_rerouted"] == pytest.approx(float(rerouted))
    missing = predicts & ~known.all(-1)
    assert missing.any()
    assert stats["routes_missing"] == pytest.approx(float(missing.sum() / predicts.sum()))

    # Replayed, the tokens without a choice take other experts than zeros.
    engine = make_engine(folder, **R3)
    found = taken(engine, given)
    real = batch["attention_mask"].bool()
    without = ~has_choice(given["routed_experts"]).all(-1) & real
    assert torch.equal(found[real & ~without], given["routed_experts"][real & ~without])
    assert has_choice(found[without]).all()

    # Nothing is replayed where the batch has no entry: evaluation, and the reference.
    assert torch.equal(engine.forward_batch(batch), native.forward_batch(batch))


def test_tokens_without_a_choice_are_routed_by_the_model_and_counted(
    folders: Callable[[str], str],
) -> None:
    run_ranks(_missing, 1, folders("qwen3_moe"))


def _only_some_ranks(rank: int, world_size: int, folder: str) -> None:
    """Statistics have the same names on all ranks in each step, so that they can be added up."""
    batch = make_batch()
    share = rows(batch, slice(rank * 4, rank * 4 + 4))
    given = {**share, "routed_experts": drawn(share, set())}
    without_loss = {**share, "loss_mask": torch.zeros_like(share["loss_mask"])}
    engine = make_engine(folder, optimizer=SGD)
    for number, own in enumerate((share, given if rank else without_loss, given, share)):
        stats = engine.train_batch(own, nll, loss_tokens)
        assert ("routes_differ" in stats) == (number in (1, 2)), number
        assert engine.export_stats().keys() == stats.keys(), number

    # A rank without a loss counts nothing, and reports what the other one counted.
    engine = make_engine(folder, **R3)
    routed = {**without_loss, "routed_experts": given["routed_experts"]}
    stats = engine.train_batch(given if rank else routed, nll, loss_tokens)
    assert 0.5 < stats["routes_differ"] < 1 and stats["routes_missing"] == 0
    assert engine.export_stats()["routes_differ"] == pytest.approx(stats["routes_differ"])


def test_all_ranks_report_routes_if_any_has_them(folders: Callable[[str], str]) -> None:
    run_ranks(_only_some_ranks, 2, folders("qwen3_moe"))


def _siblings(rank: int, world_size: int, folder: str) -> None:
    """Four answers to one prompt of five tokens."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 15, (4, 9), generator=generator)
    ids[:, :5] = ids[0, :5]
    loss_mask = torch.ones_like(ids)
    loss_mask[:, :5] = 0
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": loss_mask}
    routes = drawn(batch, set())
    routes[:, :4] = routes[:1, :4]
    plain = make_engine(folder, **R3)
    shares = make_engine(folder, enable_tree_training=True, **R3)
    expected, found = capture_gradients(plain), capture_gradients(shares)
    plain.train_batch({**batch, "routed_experts": routes}, nll, loss_tokens)
    stats = shares.train_batch({**batch, "routed_experts": routes}, nll, loss_tokens)
    assert stats["tree_token_ratio"] < 1 and stats["sibling_routes_differ"] == 0
    assert largest_difference(found, expected) < 2e-5

    # The first sibling's are taken. The others disagree about two tokens of twelve.
    other = routes.clone()
    other[2, 1:3] = drawn(batch, set(), seed=1)[2, 1:3]
    stats = shares.train_batch({**batch, "routed_experts": other}, nll, loss_tokens)
    assert stats["sibling_routes_differ"] == pytest.approx(2 / 12)
    assert largest_difference(found, expected) < 2e-5


def test_a_shared_prompt_has_the_routes_of_its_first_answer(folders: Callable[[str], str]) -> None:
    run_ranks(_siblings, 1, folders("qwen3_moe"))


def _no_choice(rank: int, world_size: int, folder: str) -> None:
    """Batches of samples from before the servers were asked: of all ranks, then of one."""
    batch = make_batch()
    share = rows(batch, slice(rank * 4, rank * 4 + 4))
    empty = torch.zeros(*share["input_ids"].shape, 0, 0, dtype=torch.uint8)
    without = {**share, "routed_experts": empty}
    native = make_engine(folder, optimizer=SGD)
    engine = make_engine(folder, **R3)
    assert torch.equal(engine.forward_batch(without), native.forward_batch(share))
    gradients, replayed = capture_gradients(native), capture_gradients(engine)
    native.train_batch(without, nll, loss_tokens)
    stats = engine.train_batch(without, nll, loss_tokens)
    assert same(gradients, replayed)
    assert stats["routes_missing"] == 1 and stats["tokens_rerouted"] == 0

    given = {**share, "routed_experts": drawn(share, set())} if rank else without
    for each in (native, engine):
        stats = each.train_batch(given, nll, loss_tokens)
        assert 0.5 < stats["routes_differ"] < 1, stats
        assert each.export_stats().keys() == stats.keys()
    assert 0 < stats["routes_missing"] < 1

    # Of one rank, as a list of trajectories.
    routes = drawn(share, set())
    known = {**rows(share, slice(0, 2)), "routed_experts": routes[:2]}
    unknown = rows(without, slice(2, 4))
    routes[2:] = 0
    found = engine.forward_batch([unknown, known])
    expected = engine.forward_batch({**share, "routed_experts": routes})
    for own, part in zip(found, (expected[2:], expected[:2]), strict=True):
        assert torch.allclose(own, part[:, : own.shape[1]], atol=1e-6)
    stats = engine.train_batch([known, unknown], nll, loss_tokens)
    assert 0 < stats["routes_missing"] < 1 and stats["tokens_rerouted"] > 0


@pytest.mark.slow
def test_samples_of_a_run_that_did_not_ask_are_routed_by_the_model(
    folders: Callable[[str], str],
) -> None:
    run_ranks(_no_choice, 2, folders("qwen3_moe"))


def _refuses(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(folder, **R3)
    batch = make_batch()
    share = rows(batch, slice(rank * 4, rank * 4 + 4))
    routes = drawn(share, set())
    outside = routes.clone()
    outside[2, 1, 1, 0] = EXPERTS
    for wrong, words in (
        (None, "has no 'routed_experts', .* --enable-return-routed-experts"),
        (routes[:, :, :2], r"shape \[4, 9, 2, 4\]; expected .* \[4, 9, 3, 4\]"),
        (routes.long(), "is torch.int64"),
        (outside, r"experts 0 to 16 in row 2 and layer 1; expected 0 to 15"),
    ):
        given = dict(share) if rank else {**share, "routed_experts": routes}
        if rank and wrong is not None:
            given["routed_experts"] = wrong
        error = BatchError if rank else PeerError
        with pytest.raises(error, match=words if rank else None):
            engine.train_batch(given, nll, loss_tokens)


def test_routes_that_do_not_fit_the_model_are_refused_on_all_ranks(
    folders: Callable[[str], str],
) -> None:
    run_ranks(_refuses, 2, folders("qwen3_moe"))


def _unsuitable(rank: int, world_size: int, folder: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_engine(folder, **R3)


def test_a_model_whose_experts_cannot_be_replayed_is_refused(
    folders: Callable[..., str], tmp_path: Path
) -> None:
    write_model_folder(tmp_path / "dense", tiny_qwen3())
    words = "in Qwen3ForCausalLM (transformers knows no router for the experts of each layer)"
    run_ranks(_unsuitable, 1, str(tmp_path / "dense"), words)
    changes = GROUPS | LATENT | {"topk_method": "group_limited_greedy"}
    masked = folders("deepseek_v2", **changes)
    run_ranks(_unsuitable, 1, masked, "an expert given to layer 1 has weight 0")
    single = folders("mixtral", num_experts_per_tok=1)
    run_ranks(_unsuitable, 1, single, "a token has one expert")


def test_keys_that_contradict_replay_are_refused() -> None:
    with pytest.raises(ConfigError, match="'R2', the choices of the trainer's own"):
        RouterReplayConfig("R2")
    with pytest.raises(ConfigError, match=r"router_replay\.mode' is 'R4'"):
        RouterReplayConfig("R4")
    for key, value in (("is_critic", True), ("optimizer", None), ("train_vision", True)):
        changes: Any = {"router_replay": RouterReplayConfig("R3"), key: value}
        with pytest.raises(ConfigError, match=f"mode' is 'R3', but '{key}' is .* routes its"):
            TrainEngineConfig(**changes)


def _ignored(rank: int, world_size: int, folder: str) -> list[list[str]]:
    """Lines in the logs of a policy, a critic and a reference, none of which replays."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger = logging.getLogger("holdfast.engine.training.route_replay")
    logger.setLevel(logging.INFO)
    logger.addHandler(Keep())
    batch = make_batch()
    given = {**batch, "routed_experts": drawn(batch, set())}
    found = []
    for keys in ({}, {"is_critic": True}, {"optimizer": None}):
        engine = make_engine(folder, **{"optimizer": SGD, **keys})
        wrapped = [
            vars(router).get("forward") for router in routers_by_layer(engine.model).values()
        ]
        for _ in range(2):
            assert torch.equal(engine.forward_batch(given), engine.forward_batch(batch))
        assert not lines
        if "optimizer" not in keys:
            loss = value_loss if engine.config.is_critic else nll
            engine.eval_batch(given, loss, loss_tokens)
            assert not lines
            stats = [engine.train_batch(given, loss, loss_tokens) for _ in range(2)]
            assert all(("routes_differ" in each) == (not keys) for each in stats)
        if keys:
            routers = routers_by_layer(engine.model).values()
            assert [vars(router).get("forward") for router in routers] == wrapped
        found.append(list(lines))
        lines.clear()
    return found


def value_loss(values: Tensor, micro_batch: Batch) -> Tensor:
    """Values of tokens in the loss, squared."""
    mask = micro_batch["loss_mask"].bool()
    return values[mask].square().mean()


@pytest.mark.slow
def test_only_a_trained_policy_counts_routes_that_it_does_not_replay(
    folders: Callable[[str], str],
) -> None:
    (found,) = run_ranks(_ignored, 1, folders("qwen3_moe"))
    (line,), *others = found
    assert "mode' is 'disabled'" in line
    assert others == [[], []]


def _uncounted(rank: int, world_size: int, folder: str) -> None:
    """Passes without an update replay, and count nothing."""
    batch = make_batch()
    given = {**batch, "routed_experts": drawn(batch, set())}
    engine = make_engine(folder, **R3)
    expected = engine.eval_batch(given, nll, loss_tokens)
    assert abs(float(expected) - float(engine.eval_batch(batch, nll, loss_tokens))) > 1e-3
    engine.forward_batch(given)
    assert not engine._replay._sums.any()
    loss = engine.train_batch(given, nll, loss_tokens)["loss"]
    assert loss == pytest.approx(float(expected), rel=1e-5)


def test_the_loss_of_an_evaluation_is_that_of_the_update_and_counts_nothing(
    folders: Callable[[str], str],
) -> None:
    run_ranks(_uncounted, 1, folders("qwen3_moe"))
