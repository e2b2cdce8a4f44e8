"""Optimizers with other state than AdamW's: every bit comes back on every mesh, and the next step
is the same.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from holdfast.engine import OptimizerConfig, SaveLoadMeta
from holdfast.utils.errors import CheckpointError, ConfigError
from tests.engine.meshes import Mesh, check_loads, engine_on, fingerprint
from tests.engine.models import (
    HAS_PLANS,
    NEEDS_PLANS,
    tiny_qwen3,
    tiny_qwen3_moe,
    write_model_folder,
)
from tests.engine.staging.test_offload import make_engine, step, write_model
from tests.engine.test_fsdp_engine import same, whole
from tests.helpers import run_ranks
from tests.tiers import slow_but

KINDS = ("adam_bf16", "adam8bit", "muon")
CONFIGS = {
    kind: OptimizerConfig(type=kind, lr=1e-2, weight_decay=0.1, gradient_clipping=1e9)
    for kind in KINDS
}
DTYPES = {
    "adam_bf16": {torch.bfloat16},
    "adam8bit": {torch.uint8, torch.bfloat16},
    "muon": {torch.float32},
}
REFUSALS = {
    "adam_bf16": (
        r"has dtype torch\.bfloat16, this model needs torch\.float32; .* exp_avg in bfloat16, .* "
        r"one is AdamW"
    ),
    "adam8bit": (
        r"has '.*_scale', which this model or optimizer does not .* exp_avg_scale in float32, .* "
        r"one is AdamW"
    ),
    "muon": (
        r"lacks '.*exp_avg' .* another model or optimizer.*; .* momentum_buffer in float32, .* one "
        r"is AdamW"
    ),
}
"""How a plain AdamW refuses a checkpoint of each."""


def _killed_and_resumed(
    rank: int, world_size: int, base: str, out: str, kind: str, model: str
) -> None:
    make = partial(make_engine, base, model, optimizer=CONFIGS[kind])
    engine: Any = make()
    engine.save(SaveLoadMeta(f"{out}/fresh", "dcp", with_optim=True))
    fresh = whole(engine)
    for _ in range(3):
        step(engine)
    engine.save(SaveLoadMeta(f"{out}/now", "dcp", with_optim=True))
    engine.save(SaveLoadMeta(f"{out}/later", "dcp", with_optim=True), blocking=False)
    saved, marks = whole(engine), [fingerprint(engine)]
    moments = [
        tensor
        for name, tensor in saved.items()
        if name.endswith(("exp_avg", "exp_avg_sq", "momentum_buffer"))
    ]
    assert {tensor.dtype for tensor in moments} <= DTYPES[kind] and any(
        tensor.any() for tensor in moments
    )
    step(engine)
    after = whole(engine)
    marks.append(fingerprint(engine))
    engine.wait_for_save()
    assert marks[0]["optim"] != marks[1]["optim"] and marks[0]["moved"]
    for path in (f"{out}/now", f"{out}/later"):
        other: Any = make()
        other.load(SaveLoadMeta(path, "dcp", with_optim=True))
        assert same(whole(other), saved) and fingerprint(other) == marks[0]
        step(other)
        assert same(whole(other), after), (
            "the step after a resume is the one that it would have been"
        )
        other.load(SaveLoadMeta(f"{out}/fresh", "dcp", with_optim=True))
        assert same(whole(other), fresh)
    plain: Any = make_engine(base, model)
    before = whole(plain)
    with pytest.raises(CheckpointError, match=REFUSALS[kind]):
        plain.load(SaveLoadMeta(f"{out}/now", "dcp", with_optim=True))
    assert same(whole(plain), before)


@pytest.mark.parametrize(
    ("kind", "model"),
    slow_but(
        [],
        [(kind, model) for kind in KINDS for model in ("full", "lora", "critic")],
    ),
)
def test_the_state_survives_checkpoints_bit_for_bit_and_the_next_step_is_the_same(
    kind: str, model: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "model", model)
    run_ranks(_killed_and_resumed, 2, str(tmp_path / "model"), str(tmp_path), kind, model)


def wide_qwen3() -> Qwen3Config:
    """A model whose rows two ranks can share in whole blocks, with a few that are no multiple of a
    block.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 40,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return Qwen3Config(
        **sizes, **heads, max_position_embeddings=128, bos_token_id=None, eos_token_id=None
    )


LOADS = [
    (kind, saved_by, loaded_by)
    for kind in KINDS[1:]
    for saved_by, loaded_by in (
        (Mesh(2), (Mesh(1), Mesh(3), Mesh(4, replicas=2))),
        (Mesh(2, "fsdp:t2"), (Mesh(3), Mesh(4, "fsdp:d2t2"))),
        (Mesh(2, "fsdp:d2e2"), (Mesh(1), Mesh(3))),
    )
]


@pytest.mark.parametrize(("kind", "saved_by", "loaded_by"), slow_but([], LOADS), ids=str)
def test_each_mesh_loads_what_another_saved_bit_for_bit(
    kind: str, saved_by: Mesh, loaded_by: tuple[Mesh, ...], tmp_path: Path
) -> None:
    if saved_by.backend != "fsdp" and not HAS_PLANS:
        pytest.skip("this transformers cannot share matrices or experts")
    write_model_folder(
        tmp_path / "model", tiny_qwen3_moe() if "e2" in saved_by.backend else wide_qwen3()
    )
    check_loads(tmp_path / "model", tmp_path, saved_by, loaded_by, optimizer=CONFIGS[kind])


def _cut_within_a_block(rank: int, world_size: int, folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"blocks of 128 columns, but 2 ranks share the 32 columns of .*o_proj"
    ):
        engine_on(folder, Mesh(2, "fsdp:t2"), optimizer=CONFIGS["adam8bit"])


@NEEDS_PLANS
def test_a_row_that_ranks_would_cut_within_a_block_is_refused(tmp_path: Path) -> None:
    write_model_folder(tmp_path, tiny_qwen3(vocab_size=16))
    run_ranks(_cut_within_a_block, 2, str(tmp_path))
