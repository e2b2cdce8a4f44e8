"""Reward models and DPO take the same step as float64 sums over pairs, however the pairs are cut
and distributed.

The batch is ragged, one pair has a row without a loss token, and all values outside of the loss
mask are -inf.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForTokenClassification

from holdfast.engine.api import Batch, FinetuneSpec
from holdfast.engine.config import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from holdfast.engine.fsdp_engine import FSDPEngine
from holdfast.engine.rl import DPO, DPOConfig, RewardModel, RewardModelConfig
from holdfast.engine.rl.dpo import dpo_loss_fn
from holdfast.engine.rl.pairs import PairStats, count_pairs, require_pairs
from holdfast.utils.config import load_config
from holdfast.utils.errors import BatchError, ConfigError
from tests.engine.models import build_reference, tiny_qwen3, write_model_folder
from tests.engine.rl.reference import reference_logprobs
from tests.helpers import run_ranks
from tests.tiers import slow_but

LENGTHS = [7, 3, 2, 9, 5, 5, 8, 4, 3, 6]  # the third pair has no weight, see whole_batch
SHARES = {1: [range(10)], 2: [range(6), range(6, 10)]}
CASES: dict[str, dict[str, Any]] = {
    "rw": {},
    "dpo": {"beta": 0.4},
    "smoothed": {"beta": 0.4, "label_smoothing": 0.2, "temperature": 0.8},
    "ipo": {"beta": 0.4, "loss_type": "ipo"},
}


def whole_batch() -> Batch:
    draw = torch.Generator().manual_seed(3)
    mask = (torch.arange(9) < torch.tensor(LENGTHS)[:, None]).long()
    loss_mask = mask * (torch.arange(9) > 0)
    loss_mask[0, 2] = 0
    loss_mask[5] = 0
    tokens = torch.randint(0, 15, mask.shape, generator=draw) * mask
    ref_logp = (-2.7 + torch.randn(mask.shape, generator=draw)).masked_fill(
        loss_mask == 0, -math.inf
    )
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "loss_mask": loss_mask,
        "ref_logp": ref_logp,
    }


def share_of(batch: Batch, rows: range) -> Batch:
    longest = int(batch["attention_mask"][list(rows)].sum(1).max())
    return {key: value[list(rows)][:, :longest] for key, value in batch.items()}


def reward_model() -> Any:
    config = tiny_qwen3()
    config.num_labels = 1
    torch.manual_seed(1)
    model = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    return model.eval()


def reference_step(name: str) -> tuple[Any, dict[str, float]]:
    """The model after a step of SGD, and the statistics."""
    batch, case = whole_batch(), CASES[name]
    model = (reward_model() if name == "rw" else build_reference(tiny_qwen3())).double()
    if name == "rw":
        out = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        scores = [out[i, n - 1, 0] for i, n in enumerate(LENGTHS)]
    else:
        logp, _ = reference_logprobs(model, batch, case.get("temperature", 1.0))
        scores = []
        for i, row in enumerate(batch["loss_mask"].bool()):
            ratios = logp[i, row] - batch["ref_logp"][i, row].double()
            scores.append(case["beta"] * ratios.sum())
    losses, seen = [], {"chosen": 0.0, "rejected": 0.0, "margin": 0.0, "accuracy": 0.0}
    counting = [0, 1, 3, 4]
    for pair in counting:
        chosen, rejected = scores[2 * pair], scores[2 * pair + 1]
        margin = chosen - rejected
        smoothing = case.get("label_smoothing", 0.0)
        if case.get("loss_type") == "ipo":
            a, b = (int(batch["loss_mask"][2 * pair + k].sum()) for k in (0, 1))
            beta = case["beta"]
            losses.append((chosen / beta / a - rejected / beta / b - 1 / (2 * beta)) ** 2)
        else:
            losses.append(
                -(1 - smoothing) * margin.sigmoid().log() - smoothing * (-margin).sigmoid().log()
            )
        for key, value in (
            ("chosen", chosen),
            ("rejected", rejected),
            ("margin", margin),
            ("accuracy", margin > 0),
        ):
            seen[key] += float(value.detach()) / len(counting)
    loss = torch.stack(losses).mean()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.5 * param.grad
    return model, {**seen, "loss": float(loss.detach())}


def make_trainer(name: str, folder: str, **changes: Any) -> Any:
    optimizer = OptimizerConfig(
        type="sgd", lr=0.5, weight_decay=0.0, gradient_clipping=1e6, warmup_steps_proportion=0.0
    )
    settings = {"dtype": "float32", "optimizer": optimizer, **CASES[name], **changes}
    kinds: Any = (RewardModelConfig, RewardModel) if name == "rw" else (DPOConfig, DPO)
    config = kinds[0](path=f"{folder}/{'rw' if name == 'rw' else 'policy'}", **settings)
    return kinds[1](config, started(config))


def started(config: TrainEngineConfig) -> FSDPEngine:
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, FinetuneSpec(1, 100, 1))
    return engine


def _steps(rank: int, world_size: int, folder: str, n_mbs: list[int]) -> list[str]:
    """Cases whose step differs from the reference, each with its largest difference."""
    wrong = []
    mine = share_of(whole_batch(), SHARES[world_size][rank])
    for name in CASES:
        reference, expected = reference_step(name)
        wanted = dict(reference.named_parameters())
        for n in n_mbs:
            trainer = make_trainer(name, folder, mb_spec=MicroBatchSpec(n_mbs=n))
            before = trainer.evaluate_rw(mine) if name == "rw" else trainer.evaluate_dpo(mine)
            stats = trainer.train_rw(mine) if name == "rw" else trainer.train_dpo(mine)
            worst = max(
                float((param.full_tensor() - wanted[key]).abs().max())
                for key, param in trainer.engine.model.named_parameters()
            )
            if worst > 2e-6:
                wrong.append(f"{name}, {n} micro-batches: weights differ by {worst:.2g}")
            for key, value in expected.items():
                if [stats[key], before[key]] != pytest.approx([value, value], rel=1e-4, abs=2e-6):
                    wrong.append(
                        f"{name}, {n} micro-batches: {key} is {stats[key]}, {before[key]}, "
                        f"expected {value}"
                    )
            trainer.engine.destroy()
    return wrong


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("models")
    write_model_folder(root / "policy", tiny_qwen3())
    reward_model().save_pretrained(root / "rw")
    return str(root)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world_size", "n_mbs"), slow_but([(2, [2])], [(1, [1, 2, 5]), (2, [2]), (2, [1, 5])])
)
def test_pairs_take_the_step_of_their_formula(
    folder: str, world_size: int, n_mbs: list[int]
) -> None:
    for wrong in run_ranks(_steps, world_size, folder, n_mbs, timeout_s=200):
        assert wrong == []


def _refusals(rank: int, world_size: int, folder: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    batch = whole_batch()

    def refused(name: str, action: Any) -> None:
        with pytest.raises(BatchError) as caught:
            action()
        seen[name] = str(caught.value)

    trainer = make_trainer("dpo", folder)
    refused("odd", lambda: trainer.train_dpo(share_of(batch, range(3))))
    refused(
        "reference",
        lambda: trainer.train_dpo({key: batch[key] for key in batch if key != "ref_logp"}),
    )
    refused(
        "nothing",
        lambda: trainer.train_dpo({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}),
    )
    reference = trainer.compute_logp(batch)
    even = trainer.evaluate_dpo({**batch, "ref_logp": reference})
    seen["even"] = f"{even['loss']:.4f} {even['margin']:.4f}"
    trainer.engine.destroy()

    torn = TrainEngineConfig(
        path=f"{folder}/policy", dtype="float32", mb_spec=MicroBatchSpec(n_mbs=10)
    )
    engine = started(torn)
    stats = PairStats()
    loss_fn = dpo_loss_fn(DPOConfig(), stats)
    refused("torn", lambda: engine.train_batch(require_pairs(engine, batch), loss_fn, count_pairs))
    engine.destroy()
    return seen


def test_pairs_that_cannot_be_trained_on_are_refused_in_words(folder: str) -> None:
    (seen,) = run_ranks(_refusals, 1, folder)
    assert seen["odd"].startswith("3 sequences are not whole groups of 2")
    assert (
        seen["reference"]
        == "the batch has no 'ref_logp'; compute_logp of the reference policy must give it"
    )
    assert "no token of the batch counts" in seen["nothing"]
    assert seen["even"] == "0.6931 0.0000"  # the policy is the reference
    assert seen["torn"].startswith("a micro-batch holds half of a pair")


def test_configurations_keep_pairs_together() -> None:
    assert (
        load_config(DPOConfig).mb_spec.granularity == RewardModelConfig().mb_spec.granularity == 2
    )
    assert DPOConfig(mb_spec=MicroBatchSpec(granularity=4)).mb_spec.granularity == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "mb_spec.granularity=3",
            "'mb_spec.granularity' is 3, which tears pairs apart; expected a multiple of 2",
        ),
        ("loss_type=hinge", "'loss_type' is 'hinge'; expected one of 'sigmoid', 'ipo'"),
        ("label_smoothing=0.5", "'label_smoothing' is 0.5"),
        ("beta=0", "'beta' is 0.0; expected more than 0"),
        ("is_critic=true", "'is_critic' is True"),
        (
            "label_smoothing=0.1 loss_type=ipo",
            "'label_smoothing' is 0.1, but loss_type 'ipo' has none",
        ),
    ],
)
def test_a_bad_value_of_dpo_is_an_error_that_names_the_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(DPOConfig, overrides=override.split())
