"""A prompt that is computed once gives the loss and the gradients of one that is computed for each
answer.
"""

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from holdfast.engine import FSDPEngine, MicroBatchSpec, TrainEngineConfig
from holdfast.engine.api import Batch
from holdfast.engine.rl import (
    DPO,
    DPOConfig,
    PPOActor,
    PPOActorConfig,
    RewardModel,
    RewardModelConfig,
)
from holdfast.engine.rl.update import split_minibatches
from holdfast.engine.training import compilation
from holdfast.engine.training.attention import PackedRow, _attention
from holdfast.engine.training.microbatch import CutRules, split_batch
from holdfast.engine.training.packed_batch import MicroBatch, pack_rows
from holdfast.engine.training.packing import prepare_packing
from holdfast.engine.training.probe_model import Twins
from holdfast.engine.training.shared_prompts import (
    Prompts,
    find_prompts,
    repeat,
    warn_of_copies,
)
from holdfast.utils.errors import ConfigError
from tests.engine.architectures.released import tiny_config
from tests.engine.lora.engines import lora_engine, write_base
from tests.engine.meshes import SGD, Mesh, engine_on
from tests.engine.models import HAS_PLANS, build_reference, tiny_qwen3, write_model_folder
from tests.engine.rl.test_actor import start
from tests.engine.test_context_parallel import check_gradients, value_loss
from tests.engine.test_fsdp_engine import (
    capture_gradients,
    loss_tokens,
    make_engine,
    nll,
    reference,
    rows,
)
from tests.helpers import run_ranks, untimed
from tests.recover.runs import digest, make_handler, step_info
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(240)

GROUPS = [(19, (5, 1, 23, 9)), (11, (30, 2)), (1, (4, 6)), (20, (7,))]
"""Tokens of each prompt, and of its answers. One prompt has a single token, and one has no
siblings.
"""
N_TOKENS = sum(prompt + answer for prompt, answers in GROUPS for answer in answers)
N_ROW_TOKENS = sum(prompt - 1 + sum(answers) + len(answers) for prompt, answers in GROUPS)
MODELS = {
    "qwen3": "Qwen/Qwen3-0.6B",
    "gemma3": "google/gemma-3-1b-it",  # windows of 8 tokens
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
}
SHARES = CutRules(shares_prompts=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    root = tmp_path_factory.mktemp("models")

    def folder(name: str) -> str:
        if not (root / name).exists():
            write_model_folder(root / name, tiny_config(MODELS[name]))
        return str(root / name)

    return folder


def grouped_batch(groups: Sequence[tuple[int, Sequence[int]]] = GROUPS, seed: int = 0) -> Batch:
    """Groups of answers to one prompt each, next to each other."""
    generator = torch.Generator().manual_seed(seed)
    n_tokens = max(prompt + max(answers) for prompt, answers in groups)
    n_rows = sum(len(answers) for _, answers in groups)
    ids, mask, loss = (torch.zeros(n_rows, n_tokens, dtype=torch.int64) for _ in range(3))
    row = 0
    for n_prompt, answers in groups:
        prompt = torch.randint(0, 15, (n_prompt,), generator=generator)
        for n_answer in answers:
            end = n_prompt + n_answer
            answer = torch.randint(0, 15, (n_answer,), generator=generator)
            ids[row, :end] = torch.cat([prompt, answer])
            mask[row, :end] = 1
            loss[row, n_prompt:end] = 1
            row += 1
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": loss}


def prompts_of(batch: Batch) -> Prompts:
    return find_prompts(batch, batch["attention_mask"].sum(1).tolist())


def packed(batch: Batch) -> MicroBatch:
    prompts = prompts_of(batch)
    return pack_rows(batch, range(len(prompts.lengths)), prompts.lengths, prompts=prompts)


# The row


def test_prompts_are_found_by_the_tokens_before_the_first_loss_token() -> None:
    batch = grouped_batch([(4, (2, 3)), (4, (2, 2))])
    ids, loss = batch["input_ids"], batch["loss_mask"]
    ids[3, :4] = ids[0, :4]  # a sibling in another group
    ids[2, :3] = ids[0, :3]
    ids[2, 3] = ids[0, 3] + 1  # a prompt that differs in its last token, which the others predict
    assert [each.family for each in prompts_of(batch).beginnings] == [0, 0, 2, 0]
    loss[1] = 0  # an answer without a loss, whose prompt is not known
    loss[3, 3] = 1  # a longer answer
    assert prompts_of(batch).beginnings == [(0, 3), (1, 0), (2, 3), (3, 2)]
    del batch["loss_mask"]
    nothing = prompts_of(batch)
    assert nothing.beginnings == [(row, 0) for row in range(4)]
    assert nothing.row(range(4)) is None


def test_a_row_has_each_prompt_once_and_the_last_prompt_token_for_each_answer() -> None:
    batch = grouped_batch([(3, (2, 1)), (1, (2,))])
    mb = packed(batch)
    row = mb.row()
    first, second, third = mb.data["input_ids"].split([5, 4, 3])
    assert row.lengths == (2, 3, 2, 3) and row.seen is not None
    assert row.data["input_ids"].tolist() == [*first.tolist(), *second[2:].tolist(), *third]
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 2, 3, 0, 1, 2]
    assert row.seen.lengths == (2, 5, 4, 3)
    assert row.seen.keys.index.tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 5, 6, 7, 8, 9]
    assert mb.of_sequences(mb.row_ids).tolist() == mb.data["input_ids"].tolist()
    assert mb.shared is not None and mb.shared.uses.tolist() == [2, 2, *[1] * 8]
    assert mb.shared.uses_between(1, 4) == 4

    # Sequences of zeros fill it up. They see only themselves.
    filled = mb.row(multiple=8)
    assert filled.lengths == (*row.lengths, 5, 1) and filled.seen is not None
    assert filled.seen.lengths == (2, 5, 4, 3, 5, 1)
    assert filled.seen.cu_seqlens.tolist() == [0, 2, 7, 11, 14, 19, 20]
    assert filled.cu_seqlens.tolist() == [0, 2, 5, 7, 10, 15, 16]
    assert filled.seen.keys.index[-6:].tolist() == list(range(10, 16))
    assert filled.seen.keys.first[-6:].tolist() == list(range(14, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_repeated_entries_is_summed_in_order_and_rounded_once(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.cat([torch.arange(7), torch.randint(0, 7, (40,), generator=generator)])
    source = torch.randn(7, 3, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(47, 3, generator=generator).to(dtype)
    out = repeat(index, 7).of(source)
    assert torch.equal(out, source[index])
    out.backward(upstream)
    expected = torch.zeros(7, 3)
    for place, entry in enumerate(index.tolist()):
        expected[entry] += upstream[place].float()
    assert source.grad is not None and torch.equal(source.grad, expected.to(dtype))


def test_many_copies_of_keys_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    few, many = (packed(grouped_batch([(prompt, (1,) * 8)])).shared for prompt in (5, 80))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for row in (None, few):
            warn_of_copies(row)
        assert caplog.messages == []
        for row in (many, many):
            warn_of_copies(row)
    (message,) = caplog.messages
    assert message.startswith("answers see more than 4 keys of their prompts for each token of a")


# Attention


def _heads(n_tokens: int, key_heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8), (key_heads, 8), (key_heads, 8)]
    return [
        torch.randn(1, heads, n_tokens, dim, generator=generator).requires_grad_()
        for heads, dim in shapes
    ]


def _of_whole_sequences(
    mb: MicroBatch, heads: Sequence[torch.Tensor], window: int | None
) -> torch.Tensor:
    """The formula in float64 over each whole sequence: ``[1, T, heads, dim]``."""
    assert mb.shared is not None
    query, key, value = (each[:, :, mb.shared.sequences.index].double() for each in heads)
    key, value = (each.repeat_interleave(4 // key.shape[1], 1) for each in (key, value))
    sequence = mb.rows
    age = torch.arange(len(sequence))[:, None] - torch.arange(len(sequence))
    seen = (sequence[:, None] == sequence) & (age >= 0) & (age < (window or len(sequence)))
    scores = (query @ key.transpose(-1, -2) * 0.3).masked_fill(~seen, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


LONG = [(290, (270, 3)), (1, (9, 2)), (6, (1,))]


def _check_attention(window: int | None, key_heads: int) -> None:
    mb = packed(grouped_batch(LONG))
    row = mb.row()
    assert mb.shared is not None
    ours, theirs = (_heads(row.n_tokens, key_heads) for _ in range(2))
    mask = PackedRow(row.lengths, row.cu_seqlens, window, seen=row.seen)
    out, _ = _attention(nn.Module(), *ours, mask, scaling=0.3)  # type: ignore[call-arg]
    out = mb.of_sequences(out[0])[None]
    expected = _of_whole_sequences(mb, theirs, window)
    assert torch.allclose(out.double(), expected, atol=1e-6)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=2e-5)


@pytest.mark.parametrize(
    ("window", "key_heads"),
    slow_but([(None, 4), (7, 1)], [(None, 2), (None, 4), (1, 2), (7, 1), (300, 2)]),
)
def test_answers_see_their_prompt_and_themselves_as_in_whole_sequences(
    window: int | None, key_heads: int
) -> None:
    _check_attention(window, key_heads)


def _in_one_kernel(rank: int, world_size: int) -> None:
    from tests.engine.training.test_compilation import varlen_on_cpus  # takes seconds

    varlen_on_cpus()
    for key_heads in (2, 4):
        _check_attention(None, key_heads)


@pytest.mark.slow
def test_one_kernel_gets_the_boundaries_of_queries_and_of_keys() -> None:
    """The call of CUDA, with a stand-in for the operator that is aligned at the ends, as torch
    documents it.
    """
    run_ranks(_in_one_kernel, 1)


# The cut


def _families(mbs: Sequence[MicroBatch]) -> list[list[int]]:
    return [sorted(mb.indices.tolist()) for mb in mbs]


def test_families_are_the_units_of_a_cut() -> None:
    batch = grouped_batch([(10, (2, 2)), (10, (2, 2)), (10, (1,) * 8)])
    cut = split_batch(batch, MicroBatchSpec(max_tokens_per_mb=30), rules=SHARES)
    assert _families(cut) == [[0, 1, 2, 3], list(range(4, 12))]
    assert [mb.n_row_tokens for mb in cut] == [30, 25]

    # A family that is too large becomes the fewest parts, each with its prompt.
    cut = split_batch(batch, MicroBatchSpec(max_tokens_per_mb=17), rules=SHARES)
    assert _families(cut) == [[4, 6, 8, 10], [5, 7, 9, 11], [0, 1], [2, 3]]
    assert [mb.n_row_tokens for mb in cut] == [17, 17, 15, 15]

    # So many micro-batches that families do not suffice.
    cut = split_batch(batch, MicroBatchSpec(n_mbs=4, max_tokens_per_mb=None), rules=SHARES)
    assert sorted(len(mb.indices) for mb in cut) == [2, 2, 4, 4]


def test_pairs_stay_together_in_a_family() -> None:
    batch = grouped_batch([(10, (2, 2)), (12, (1, 1, 1, 1))])
    spec = MicroBatchSpec(granularity=2, max_tokens_per_mb=16)
    cut = split_batch(batch, spec, rules=SHARES)
    assert sorted(_families(cut)) == [[0, 1], [2, 3], [4, 5]]
    whole = split_batch(batch, MicroBatchSpec(granularity=2, max_tokens_per_mb=19), rules=SHARES)
    assert sorted(_families(whole)) == [[0, 1], [2, 3, 4, 5]]


def test_minibatches_hold_whole_families_unless_there_are_too_few() -> None:
    batch = grouped_batch([(6, (2, 9)), (5, (3, 3)), (4, (1, 1, 1))])
    batch["row"] = torch.arange(7)
    minibatches = split_minibatches(batch, 2, shares_prompts=True)
    assert [each["row"].tolist() for each in minibatches] == [[0, 1], [2, 3, 4, 5, 6]]
    minibatches = split_minibatches(batch, 5, shares_prompts=True)
    assert sorted(len(each["row"]) for each in minibatches) == [1, 1, 1, 1, 3]


# Steps


SETTINGS: list[dict[str, Any]] = [
    {"gradient_checkpointing": True, "n_mbs": 3},
    {"pad_to_maximum": True},
    {"gradient_checkpointing": "selective"},
    {"max_tokens_per_mb": 40},  # cuts the first family
]


def own_share(engine: Any, batch: Batch) -> Batch:
    """This rank's rows: of two ranks the first has one, so that it adds dummies, and its group is
    on both.
    """
    if engine.data_parallel_world_size == 1:
        return batch
    return rows(batch, slice(0, 1) if engine.data_parallel_rank == 0 else slice(1, None))


def _steps(rank: int, world_size: int, folder: str, mesh: Mesh, n_settings: int) -> None:
    batch = grouped_batch()
    ref: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected, logprobs = reference(ref, batch)
    for settings in SETTINGS[:n_settings]:
        settings = {"max_tokens_per_mb": 200, "n_mbs": 1} | settings
        limit = settings.pop("max_tokens_per_mb")
        spec = MicroBatchSpec(n_mbs=settings.pop("n_mbs"), max_tokens_per_mb=limit)
        keys = {"optimizer": SGD, "enable_tree_training": True, "mb_spec": spec, **settings}
        engine = engine_on(folder, mesh, **keys)
        gradients, share = capture_gradients(engine), own_share(engine, batch)
        mine = own_share(engine, {"": logprobs})[""]
        torch.testing.assert_close(engine.forward_batch(share), mine, rtol=0, atol=1e-5)
        loss = engine.eval_batch(share, nll, loss_tokens)
        assert float(loss) == pytest.approx(expected, rel=1e-6)
        stats = engine.train_batch(share, nll, loss_tokens)
        assert stats["loss"] == pytest.approx(expected, rel=1e-6)
        assert stats["n_tokens"] == share["attention_mask"].sum()
        check_gradients(gradients, ref)
        if engine.data_parallel_world_size == 1 and spec.max_tokens_per_mb == 200:
            assert stats["tree_token_ratio"] == N_ROW_TOKENS / N_TOKENS
        assert N_ROW_TOKENS / N_TOKENS <= stats["tree_token_ratio"] < 1


STEPS = [(model, Mesh(2, backend)) for model in MODELS for backend in ("fsdp", "fsdp:c2")]
STEPS.append(("qwen3", Mesh(2, "fsdp", replicas=2)))
if HAS_PLANS:
    STEPS += [("qwen3", Mesh(2, "fsdp:t2")), ("qwen3_moe", Mesh(2, "fsdp:e2"))]
    STEPS.append(("qwen3", Mesh(4, "fsdp:c2t2")))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh"), STEPS, ids=str)
def test_steps_on_meshes_are_those_of_the_unsharded_model_on_whole_rows(
    folders: Callable[[str], str], model: str, mesh: Mesh
) -> None:
    run_ranks(_steps, mesh.ranks, folders(model), mesh, len(SETTINGS), timeout_s=240)


@pytest.mark.slow
def test_two_ranks_that_share_rows_take_the_step_of_the_unsharded_model_on_whole_rows(
    folders: Callable[[str], str],
) -> None:
    run_ranks(_steps, 2, folders("gemma3"), Mesh(2, "fsdp:c2"), 1)


@pytest.fixture
def engine(folders: Callable[[str], str]) -> Iterator[Callable[..., Any]]:
    opened: list[FSDPEngine] = []

    def make(**changes: Any) -> Any:
        name = changes.pop("model", "qwen3")
        keys = {"enable_tree_training": True, "optimizer": SGD, **changes}
        opened.append(make_engine(folders(name), **keys))
        return opened[-1]

    yield make
    for each in reversed(opened):
        each.destroy()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """With more, products of matrices depend on the number of their rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        difference = float((found[name] - grad).abs().max())
        assert difference <= 1e-5 * float(grad.abs().max()) + 1e-7 * largest, name


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", slow_but(["bfloat16"], ["float32", "bfloat16"]))
def test_the_bits_of_a_sequence_do_not_depend_on_who_shares_its_prompt(
    engine: Callable[..., Any], dtype: str
) -> None:
    shared = engine(dtype=dtype)
    batch = grouped_batch()
    together = shared.forward_batch(batch)
    for row in range(len(together)):
        alone = shared.forward_batch(rows(batch, slice(row, row + 1)))
        mask = batch["loss_mask"][row].bool()
        assert torch.equal(alone[0][mask], together[row][mask])


def rl_batch() -> Batch:
    generator = torch.Generator().manual_seed(5)
    batch = grouped_batch()
    shape = batch["input_ids"].shape
    return {
        **batch,
        "rewards": torch.randn(shape[0], generator=generator),
        "logprobs": -4.5 + 0.3 * torch.randn(shape, generator=generator),
    }


def actor(folder: str, **changes: Any) -> PPOActor:
    keys = {"ppo_n_minibatches": 1, "temperature": 0.8, "enable_tree_training": True, **changes}
    config = PPOActorConfig(path=folder, dtype="float32", optimizer=SGD, **keys)
    engine = FSDPEngine(config)
    start(engine)
    return PPOActor(config, engine)


@pytest.mark.usefixtures("one_thread")
def test_the_first_ratio_is_exactly_1_however_minibatches_are_cut(
    folders: Callable[[str], str],
) -> None:
    spec = MicroBatchSpec(max_tokens_per_mb=60)
    keys = {"ppo_n_minibatches": 3, "recompute_logprob": True, "mb_spec": spec}
    policy = actor(folders("qwen3"), **keys)
    batch = policy.compute_advantages(rl_batch())
    stats = policy.ppo_update(batch)
    assert stats["ratio"] == 1.0 and stats["kl"] == 0.0 and stats["n_updates"] == 3
    assert stats["tree_token_ratio"] < 1 and stats["n_tokens"] == N_TOKENS
    policy.engine.destroy()  # type: ignore[attr-defined]


LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "gspo": {"policy_loss": "gspo"},
    "seq-mean-token-mean": {"loss_agg_mode": "seq-mean-token-mean"},
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
def test_updates_with_entropies_have_the_gradient_of_whole_rows(
    folders: Callable[[str], str], model: str, loss: str
) -> None:
    found = []
    for shares in (False, True):
        keys = {"entropy_coeff": 0.01, "enable_tree_training": shares, **LOSSES[loss]}
        policy = actor(folders(model), **keys)
        gradients = capture_gradients(policy.engine)
        stats = policy.ppo_update(policy.compute_advantages(rl_batch()))
        found.append((gradients, untimed(stats)))
        policy.engine.destroy()  # type: ignore[attr-defined]
    (expected, whole), (gradients, stats) = found
    same_gradients(gradients, expected)
    assert stats.pop("tree_token_ratio") == N_ROW_TOKENS / N_TOKENS
    assert stats == pytest.approx(whole, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_values_are_those_of_whole_rows(engine: Callable[..., Any]) -> None:
    batch = {**grouped_batch(), "advantages": rl_batch()["logprobs"]}
    found = []
    for shares in (False, True):
        critic = engine(is_critic=True, enable_tree_training=shares)
        gradients = capture_gradients(critic)
        values = critic.forward_batch(batch)
        loss = critic.train_batch(batch, value_loss, loss_tokens)["loss"]
        found.append((gradients, values, loss))
    (expected, all_values, whole_loss), (gradients, values, loss) = found
    same_gradients(gradients, expected)
    torch.testing.assert_close(values, all_values, rtol=0, atol=1e-5)
    assert loss == pytest.approx(whole_loss, rel=1e-6)


@pytest.mark.slow
def test_logits_are_those_of_whole_rows(engine: Callable[..., Any]) -> None:
    def of_logits(output: Any, mb: Batch) -> torch.Tensor:
        assert output.shape == (len(mb["input_ids"]), output.logits.shape[-1])
        logprobs = output.logits.float().log_softmax(-1)[:-1]
        picked = logprobs.gather(1, mb["input_ids"][1:, None])[:, 0]
        return -(picked * mb["loss_mask"][1:]).mean()

    found = []
    for shares in (False, True):
        one = engine(enable_tree_training=shares)
        gradients = capture_gradients(one)
        one.train_batch(grouped_batch(), of_logits, loss_tokens)
        found.append(gradients)
    same_gradients(found[1], found[0])


@pytest.mark.slow
def test_adapters_and_pairs_have_the_gradient_of_whole_rows(
    folders: Callable[[str], str], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base")
    pairs = grouped_batch([(9, (4, 3, 2, 6)), (12, (5, 1))])
    pairs["ref_logp"] = torch.full(pairs["input_ids"].shape, -2.7)
    found: dict[str, list[Any]] = {"lora": [], "dpo": [], "reward": []}
    for shares in (False, True):
        adapters = lora_engine(base, enable_tree_training=shares)
        stats = adapters.train_batch(grouped_batch(), nll, loss_tokens)
        found["lora"].append((stats["loss"], stats["grad_norm"]))
        adapters.destroy()

        for kind, config_cls in (("dpo", DPOConfig), ("reward", RewardModelConfig)):
            config = config_cls(
                path=folders("qwen3"),
                dtype="float32",
                optimizer=SGD,
                mb_spec=MicroBatchSpec(max_tokens_per_mb=40),
                enable_tree_training=shares,
            )
            engine = FSDPEngine(config)
            start(engine)
            gradients = capture_gradients(engine)
            if isinstance(config, DPOConfig):
                DPO(config, engine).train_dpo(pairs)
            else:
                RewardModel(config, engine).train_rw(pairs)
            found[kind].append(gradients)
            engine.destroy()
    assert found["lora"][1] == pytest.approx(found["lora"][0], rel=1e-5)
    for kind in ("dpo", "reward"):
        same_gradients(found[kind][1], found[kind][0])


def _routed(rank: int, world_size: int, folder: str, backend: str) -> None:
    stats = []
    for shares in (False, True):
        keys = {"optimizer": SGD, "router_aux_loss_coef": 0.5, "enable_tree_training": shares}
        engine = engine_on(folder, Mesh(world_size, backend), **keys)
        gradients = capture_gradients(engine)
        stats.append((engine.train_batch(grouped_batch(), nll, loss_tokens), gradients))
    (expected, of_whole), (found, of_shared) = stats
    for name in ("expert_load_max_over_mean", "grad_norm", "router_aux_loss"):
        # Each part of a row balances its own tokens, and the parts differ.
        is_exact = world_size == 1 or name == "expert_load_max_over_mean"
        tolerance = 1e-5 if is_exact else 0.1
        assert found[name] == pytest.approx(expected[name], rel=tolerance), name
    if world_size == 1:
        same_gradients(of_shared, of_whole)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp:d1", "fsdp:c2"])
def test_experts_are_balanced_over_the_tokens_of_whole_sequences(
    folders: Callable[[str], str], backend: str
) -> None:
    run_ranks(_routed, 2 if backend == "fsdp:c2" else 1, folders("qwen3_moe"), backend)


def _compiled(rank: int, world_size: int, folder: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # takes seconds

    counter: Any = CompileCounterWithBackend("aot_eager")
    compilation._BACKEND = counter
    spec = MicroBatchSpec(n_mbs=2)
    found = []
    for compiled in (False, True):
        engine = make_engine(
            folder, optimizer=SGD, mb_spec=spec, compile=compiled, enable_tree_training=True
        )
        gradients = capture_gradients(engine)
        counts = []
        for seed in range(4):
            groups = [(9 + seed, (4, 3 + seed)), (12, (5, 1, 6)[: 3 - seed // 2])]
            engine.train_batch(grouped_batch(groups, seed), nll, loss_tokens)
            counts.append(counter.frame_count)
        found.append(gradients)
    assert 0 < counts[1] == counts[3], "other lengths and numbers of answers make no new graphs"
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.slow
def test_compiled_blocks_have_the_same_gradients(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    run_ranks(_compiled, 1, str(tmp_path / "model"))


# What is refused


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"pack_sequences": False}, "'pack_sequences' is false: only prompts of text"),
        ({"train_vision": True}, "'train_vision' is true: only prompts of text"),
        ({"disable_dropout": False}, "'disable_dropout' is false: only prompts of text"),
    ],
)
def test_settings_under_which_prompts_cannot_be_shared_are_errors(
    keys: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=rf"'enable_tree_training' is true, but {words}"):
        TrainEngineConfig(enable_tree_training=True, **keys)


class _MixesNeighbours(nn.Module):
    """An embedding that adds that of the token to the left, unless a sequence starts there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.position_ids = torch.empty(0)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(input_ids)
        left = hidden.roll(1, dims=1)
        starts = self.position_ids == 0
        if self.position_ids.shape != input_ids.shape:
            starts = torch.arange(input_ids.shape[1])[None] == 0
        return hidden + left.masked_fill(starts[..., None], 0.0)


class KeepsState(LlamaForCausalLM):
    """A layer with state between tokens, which starts anew where positions do."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.embed_tokens = _MixesNeighbours(self.model.embed_tokens)  # type: ignore[assignment]

    def forward(self, *args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
        embedding: Any = self.model.embed_tokens
        embedding.position_ids = torch.empty(0) if position_ids is None else position_ids
        return super().forward(*args, position_ids=position_ids, **kwargs)


def test_a_model_that_carries_state_from_token_to_token_is_refused() -> None:
    model = KeepsState(tiny_config("meta-llama/Llama-3.1-8B"))
    twins = Twins(model, torch.device("cpu"))
    prepare_packing(twins, TrainEngineConfig())  # packed sequences do not see each other
    with pytest.raises(
        ConfigError,
        match="KeepsState cannot be trained with enable_tree_training: sequences with a shared "
        "prompt come out otherwise than alone; set config key 'enable_tree_training' to false",
    ):
        prepare_packing(twins, TrainEngineConfig(enable_tree_training=True))


def test_a_model_with_another_attention_is_refused(folders: Callable[[str], str]) -> None:
    model = build_reference(tiny_config(MODELS["qwen3"]))
    with pytest.raises(ConfigError, match="enable_tree_training: config key 'attn_impl' is 'sdpa'"):
        model.set_attn_implementation("sdpa")
        config = TrainEngineConfig(attn_impl="sdpa", enable_tree_training=True)
        prepare_packing(Twins(model, torch.device("cpu")), config)


# A run that is killed


def _run(rank: int, world_size: int, root: str, model: str, steps: int, dies_at: int) -> str:
    engine = engine_on(model, Mesh(2), enable_tree_training=True, mb_spec=MicroBatchSpec(n_mbs=2))
    handler = make_handler(root, freq_steps=1)
    info = handler.load(engine)
    for step in range(info.last_step_info.global_step + 1 if info else 0, steps):
        engine.train_batch(own_share(engine, grouped_batch(seed=step)), nll, loss_tokens)
        engine.step_lr_scheduler()
        if step == dies_at and rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        handler.dump(engine, step_info(step))
    handler.close()
    return digest({"default": engine.dcp_state()})


@pytest.mark.slow
def test_a_killed_run_with_shared_prompts_ends_with_the_bytes_of_one_that_was_not(
    folders: Callable[[str], str], tmp_path: Path
) -> None:
    model = folders("qwen3")
    with pytest.raises(AssertionError, match="died without a word"):
        run_ranks(_run, 2, str(tmp_path / "killed"), model, 6, 3, timeout_s=30)
    resumed = run_ranks(_run, 2, str(tmp_path / "killed"), model, 6, -1)
    assert resumed == run_ranks(_run, 2, str(tmp_path / "whole"), model, 6, -1)
