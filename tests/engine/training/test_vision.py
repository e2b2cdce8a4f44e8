"""Models that see: packed rows with images, ranks without images, and malformed images."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoProcessor, CLIPImageProcessorPil, LlavaProcessor

from holdfast.engine import (
    FinetuneSpec,
    FSDPConfig,
    FSDPEngine,
    SaveLoadMeta,
    TrainEngineConfig,
    WeightUpdateMeta,
    full_state_dict,
)
from holdfast.engine.api import Batch
from holdfast.engine.config import MicroBatchSpec, OptimizerConfig
from holdfast.engine.hf.versions import version_path
from holdfast.engine.rl import (
    DPO,
    DPOConfig,
    PPOActor,
    PPOActorConfig,
    RewardModel,
    RewardModelConfig,
)
from holdfast.engine.rl.losses import count_loss_tokens, sft_loss_fn
from holdfast.engine.rl.update import split_minibatches
from holdfast.engine.rollouts.ledger import Ledger
from holdfast.engine.rollouts.trajectory import concat_trajectories
from holdfast.engine.training.batch import IMAGES, join_trajectories, select_rows
from holdfast.utils.errors import BatchError, ConfigError, PeerError
from holdfast.utils.plain_values import pack_plain, unpack_plain
from tests.engine.hf.mirrored import files_of_version
from tests.engine.hf.test_export import _tokenizer as small_tokenizer
from tests.engine.seeing import (
    IMAGE,
    MODELS,
    alone_logprobs,
    load_reference,
    seeing_batch,
    write_seeing_folder,
)
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(180)

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=4)
PLAIN = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=1e9)
IMAGES_OF_ROWS = (1, 2, 0, 0)
"""Images in each row. The second of two ranks has none."""


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """End the process group of an engine that a test did not destroy."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def new_engine(folder: Path, **options: Any) -> FSDPEngine:
    given: dict[str, Any] = {
        "path": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "train_vision": True,
        "optimizer": PLAIN,
    }
    engine = FSDPEngine(TrainEngineConfig(**given | options))
    engine.create_process_group()
    engine.initialize(None, SPEC)
    return engine


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    mask = batch["loss_mask"].clone()
    mask[:, 0] = 0
    return -(alone_logprobs(model, batch) * mask).sum() / mask.sum()


@pytest.fixture(params=slow_but(["qwen3_vl"], MODELS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_seeing_folder(tmp_path / "model", request.param)
    return tmp_path / "model"


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    write_seeing_folder(tmp_path / "model", "qwen3_vl")
    return tmp_path / "model"


def test_packed_sequences_are_computed_as_alone(folder: Path) -> None:
    batch = seeing_batch(folder, (1, 0, 2))
    with torch.no_grad():
        expected = alone_logprobs(load_reference(folder), batch)
    engine = new_engine(folder)
    assert float((engine.forward_batch(batch) - expected).abs().max()) < 1e-5
    filled = new_engine(folder, pad_to_maximum=True, mb_spec=MicroBatchSpec(max_tokens_per_mb=100))
    assert float((filled.forward_batch(batch) - expected).abs().max()) < 1e-5


def _step(
    rank: int, world_size: int, folder: Path, batch: Batch, options: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    engine = new_engine(folder, **options)
    n_own = len(IMAGES_OF_ROWS) // world_size
    own = select_rows(batch, range(rank * n_own, (rank + 1) * n_own))
    stats = engine.train_batch(own, sft_loss_fn, count_loss_tokens)
    return full_state_dict(engine.model, group=engine.control_group), stats


@pytest.mark.slow
@pytest.mark.parametrize("n_mbs", [1, 2])
def test_gradients_of_ranks_with_and_without_images_are_the_unsharded_ones(
    folder: Path, n_mbs: int
) -> None:
    reference, batch = load_reference(folder), seeing_batch(folder, IMAGES_OF_ROWS)
    loss = loss_of(reference, batch)
    loss.backward()
    options = {"mb_spec": MicroBatchSpec(n_mbs=n_mbs)}
    after, stats = run_ranks(_step, 2, folder, batch, options)[0]
    assert stats["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    untouched = 0
    most = max(
        float(param.grad.abs().max()) for param in reference.parameters() if param.grad is not None
    )
    for name, param in reference.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        untouched += not bool(grad.any())
        assert float((param.detach() - after[name] - grad).abs().max()) < 1e-5 * max(most, 1), name
    assert untouched < len(list(reference.parameters())) // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_batch_without_any_image_gives_the_tower_zero_gradients(
    name: str, tmp_path: Path
) -> None:
    reference = write_seeing_folder(tmp_path, name)
    batch = seeing_batch(tmp_path, (0, 0, 0, 0))
    loss_of(reference, batch).backward()
    after, _ = run_ranks(_step, 2, tmp_path, batch, {})[0]
    for key, param in reference.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        assert float((param.detach() - after[key] - grad).abs().max()) < 1e-5, key


@pytest.mark.slow
def test_the_step_does_not_depend_on_the_cut_and_a_frozen_tower_stays(qwen: Path) -> None:
    batch, before = seeing_batch(qwen, IMAGES_OF_ROWS), load_reference(qwen).state_dict()
    whole, _ = _step(0, 1, qwen, batch, {"freeze_vision_tower": True})
    cut, _ = _step(
        0, 1, qwen, batch, {"freeze_vision_tower": True, "mb_spec": MicroBatchSpec(n_mbs=3)}
    )
    for name, tensor in whole.items():
        assert float((tensor - cut[name]).abs().max()) < 1e-5, name
        assert torch.equal(tensor, before[name]) == name.startswith("model.visual"), name


@pytest.mark.slow
def test_a_critic_sees(folder: Path) -> None:
    engine = new_engine(folder, is_critic=True)
    batch = seeing_batch(folder, (1, 0, 2))
    values = engine.forward_batch(batch)
    images: Any = batch[IMAGES]
    brighter = [own | {"pixel_values": own["pixel_values"] * 2} if own else {} for own in images]
    other: Any = {**batch, IMAGES: brighter}
    differs = (engine.forward_batch(other) != values).any(1).tolist()
    assert values.isfinite().all() and differs == [True, False, True]
    stats = engine.train_batch(
        batch, lambda output, data: (output * data["loss_mask"]).mean(), count_loss_tokens
    )
    assert not stats["update_skipped"]


@pytest.mark.slow
def test_adapters_are_put_into_the_language_model_only(folder: Path) -> None:
    pytest.importorskip("peft")
    engine = new_engine(folder, use_lora=True, lora_rank=2)
    adapted = [name for name, param in engine.model.named_parameters() if param.requires_grad]
    assert adapted and all("language_model" in name for name in adapted)
    assert not engine.train_batch(seeing_batch(folder, (1, 0, 2)), sft_loss_fn, count_loss_tokens)[
        "update_skipped"
    ]


def test_adapters_in_the_tower_are_refused(qwen: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"'qkv', .* outside of its vision tower"):
        new_engine(qwen, use_lora=True, target_modules=["qkv"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pack_sequences": False}, "packed rows"),
        ({"train_vision": False, "freeze_vision_tower": True}, "'freeze_vision_tower'"),
    ],
)
def test_configs_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = {"train_vision": True} | options
    with pytest.raises(ConfigError, match=message):
        TrainEngineConfig(**settings)


def _refused(rank: int, world_size: int, folder: Path, backend: str) -> str:
    with pytest.raises(ConfigError) as caught:
        new_engine(folder, backend=backend)
    return str(caught.value)


@pytest.mark.parametrize("backend", slow_but(["fsdp:c2"], ["fsdp:c2", "fsdp:t2"]))
def test_ranks_that_share_rows_or_matrices_are_refused(qwen: Path, backend: str) -> None:
    for message in run_ranks(_refused, 2, qwen, backend):
        assert "'train_vision' is true" in message and "parallel_size is 2" in message


def test_without_the_key_the_refusal_names_it(qwen: Path) -> None:
    with pytest.raises(ConfigError, match="train_vision"):
        new_engine(qwen, train_vision=False)


@pytest.mark.slow
def test_images_for_a_model_of_text_are_refused(tmp_path: Path) -> None:
    write_seeing_folder(tmp_path, "gemma3")
    engine = new_engine(tmp_path, train_vision=False)
    with pytest.raises(BatchError, match="'train_vision' is false"):
        engine.forward_batch(seeing_batch(tmp_path, (1,)))


def _changed(batch: Batch, change: str) -> Batch:
    given: Any = batch[IMAGES]
    images: Any = [dict(own) for own in given]
    batch = {**batch, IMAGES: images}
    match change:
        case "no pixels":
            images[0] = {}
        case "no list":
            batch[IMAGES] = {}  # type: ignore[assignment]
        case "too few":
            images.pop()
        case "a video":
            images[0]["pixel_values_videos"] = torch.zeros(1)
        case "image tokens that were cut":
            batch["attention_mask"] = batch["attention_mask"].clone()
            batch["attention_mask"][0, 5:] = 0
            batch.pop("mm_token_type_ids")
        case "another grid":
            images[0]["image_grid_thw"] = images[0]["image_grid_thw"] * torch.tensor([1, 2, 1])
        case "an odd grid":
            images[0]["image_grid_thw"] = images[0]["image_grid_thw"] + 1
        case "a flat grid":
            images[0]["image_grid_thw"] = images[0]["image_grid_thw"].flatten()
        case "corrupt pixels":
            images[0]["pixel_values"] = images[0]["pixel_values"][:, 1:]
        case "a sampled image token":
            batch["input_ids"] = batch["input_ids"].clone()
            batch["input_ids"][1, 1] = IMAGE
            batch.pop("mm_token_type_ids")
        case "other types":
            batch["mm_token_type_ids"] = 1 - batch["mm_token_type_ids"]
    return batch


_BAD = {
    "no pixels": "has no pixels",
    "no list": "expected a list",
    "too few": "expected a list",
    "a video": "Videos are not supported",
    "image tokens that were cut": "row 0 of the batch has 2 image tokens",
    "another grid": "patches",
    "an odd grid": "multiples of 2",
    "a flat grid": "expected integers",
    "corrupt pixels": "the model takes",
    "a sampled image token": "row 1 of the batch has 1 image tokens",
    "other types": "is not 1 at image tokens",
}


def _bad_batches(rank: int, world_size: int, folder: Path) -> dict[str, tuple[str, str]]:
    engine, found = new_engine(folder), {}
    good = seeing_batch(folder, (1, 0))
    for change in _BAD:
        own = _changed(good, change) if rank == 0 else good
        try:
            engine.train_batch(own, sft_loss_fn, count_loss_tokens)
        except Exception as error:
            found[change] = (type(error).__name__, str(error))
    assert not engine.train_batch(good, sft_loss_fn, count_loss_tokens)["update_skipped"]
    return found


def test_bad_images_end_in_one_error_on_all_ranks(qwen: Path) -> None:
    first, second = run_ranks(_bad_batches, 2, qwen)
    for change, message in _BAD.items():
        assert first[change][0] == "BatchError" and message in first[change][1], change
        assert second[change][0] == "PeerError", change


def _large_image(rank: int, world_size: int, folder: Path) -> str:
    engine = new_engine(folder, mb_spec=MicroBatchSpec(max_tokens_per_mb=5))
    with pytest.raises(PeerError if rank else BatchError) as caught:
        engine.forward_batch(seeing_batch(folder, (1 - rank,)))
    return str(caught.value)


@pytest.mark.slow
def test_an_image_larger_than_a_row_is_one_error_on_all_ranks(qwen: Path) -> None:
    assert all("an image of 6 tokens" in message for message in run_ranks(_large_image, 2, qwen))


def test_minibatches_carry_images_and_fillers_have_none(qwen: Path) -> None:
    batch = seeing_batch(qwen, (1, 2))
    batch["input_ids"][0, 0] = IMAGE  # a filler is made of this token
    *whole, filler = split_minibatches(batch, 3)
    images: Sequence[Any] = [own for part in whole for own in part[IMAGES]]
    assert [len(own["image_grid_thw"]) for own in images] == [1, 2]
    assert (
        filler[IMAGES] == [{}]
        and not filler["input_ids"].any()
        and not filler["mm_token_type_ids"].any()
    )


def _saves(rank: int, world_size: int, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    adam = OptimizerConfig(lr=1e-2)
    engine = new_engine(folder, optimizer=adam)
    rows = IMAGES_OF_ROWS if world_size == 1 else IMAGES_OF_ROWS[2 * rank : 2 * rank + 2]
    batch = seeing_batch(folder, rows, seed=rank)
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    engine.save(SaveLoadMeta(str(out / "dcp"), "dcp", True))
    engine.save(SaveLoadMeta(str(out / "hf"), "hf", False))
    saved = full_state_dict(engine.model, group=engine.control_group)
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    further = full_state_dict(engine.model, group=engine.control_group)
    engine.load(SaveLoadMeta(str(out / "dcp"), "dcp", True))
    loaded = full_state_dict(engine.model, group=engine.control_group)
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in saved.items())
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    again = full_state_dict(engine.model, group=engine.control_group)
    assert all(torch.equal(tensor, again[name]) for name, tensor in further.items())
    return saved


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trained_step_is_exported_and_resumed_bit_for_bit(
    folder: Path, tmp_path: Path, world_size: int
) -> None:
    out = tmp_path / "out"
    trained = run_ranks(_saves, world_size, folder, out)[0]
    reference = load_reference(folder)
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(trained)
    reference.save_pretrained(tmp_path / "expected")
    assert any(not torch.equal(before[name], tensor) for name, tensor in trained.items())
    for name in ("model.safetensors", "config.json"):
        assert (out / "hf" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name


@pytest.mark.slow
def test_a_ledger_keeps_images_and_shares_join_them(qwen: Path) -> None:
    trajectories = [_trajectory(qwen, images, seed) for seed, images in enumerate([(1, 0), (2, 2)])]
    ledger = Ledger(batch_size=2, seed=1)
    ledger.set_version(0)
    ledger.drawn = [0, 1]
    ledger.hand_out(0, 2)
    for number, trajectory in enumerate(trajectories):
        ledger.settle(number, trajectory)
    other = Ledger(batch_size=2, seed=1)
    other.load_state_dict(unpack_plain(pack_plain("rollouts", ledger.state_dict()), "rollouts"))
    batch = concat_trajectories([trajectory for _, trajectory in other.accepted(0)])
    given: list[Any] = [own for trajectory in trajectories for own in trajectory[IMAGES]]
    joined: list[Any] = [batch[IMAGES], join_trajectories(trajectories)[IMAGES]]
    for images in joined:
        for own, found in zip(given, images, strict=True):
            assert own.keys() == found.keys() and all(
                torch.equal(value, found[key]) for key, value in own.items()
            )
    new_engine(qwen).forward_batch(batch)


@pytest.mark.slow
def test_an_actor_updates_on_images(qwen: Path) -> None:
    engine = new_engine(qwen)
    actor = PPOActor(PPOActorConfig(group_size=2, ppo_n_minibatches=3), engine)
    batch = _trajectory(qwen, (1, 2), 0)
    batch["logprobs"] = actor.compute_logp(batch)
    assert actor.ppo_update(actor.compute_advantages(batch))["n_seqs"] == 2


def _trajectory(folder: Path, images: Sequence[int], seed: int) -> Batch:
    batch = seeing_batch(folder, images, seed)
    zeros = torch.zeros(batch["input_ids"].shape)
    return {
        **batch,
        "logprobs": zeros,
        "versions": zeros.int(),
        "rewards": torch.arange(float(len(images))),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": "selective"},
    "two copies": {"fsdp": FSDPConfig(replicate_size=2)},
    "offload_params": {"fsdp": FSDPConfig(offload_params=True)},
    "sync of the last": {
        "fsdp": FSDPConfig(gradient_sync="last"),
        "mb_spec": MicroBatchSpec(n_mbs=2),
    },
    "sdpa": {"attn_impl": "sdpa"},
    "offload and onload": {},
    "bfloat16": {"dtype": "bfloat16"},
}


def _variants(rank: int, world_size: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    own, found = (
        select_rows(seeing_batch(folder, IMAGES_OF_ROWS), range(2 * rank, 2 * rank + 2)),
        {},
    )
    for name, options in {"plain": {}, **VARIANTS}.items():
        engine = new_engine(folder, **options)
        if name == "offload and onload":
            engine.offload()
            engine.onload()
        engine.train_batch(own, sft_loss_fn, count_loss_tokens)
        found[name] = full_state_dict(engine.model, group=engine.control_group)
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_settings_that_do_not_change_the_step_do_not_change_it_with_images(
    name: str, tmp_path: Path
) -> None:
    write_seeing_folder(tmp_path, name)
    plain, *others = run_ranks(_variants, 2, tmp_path)[0].items()
    for variant, after in others:
        limit = 2e-2 if variant == "bfloat16" else 1e-6
        for key, tensor in plain[1].items():
            assert float((after[key] - tensor).abs().max()) <= limit, (variant, key)


def _saves_dcp(
    rank: int, world_size: int, folder: Path, out: Path
) -> tuple[dict[str, torch.Tensor], float]:
    engine = new_engine(folder, optimizer=OptimizerConfig(lr=1e-2))
    batch, n_own = seeing_batch(folder, (1, 2, 0, 0, 0, 1)), 6 // world_size
    own = select_rows(batch, range(rank * n_own, (rank + 1) * n_own))
    engine.train_batch(own, sft_loss_fn, count_loss_tokens)
    engine.save(SaveLoadMeta(str(out / f"of_{world_size}"), "dcp", True))
    tensors = {name: _whole(tensor) for name, tensor in engine.dcp_state().live_tensors().items()}
    return tensors, engine.train_batch(own, sft_loss_fn, count_loss_tokens)["loss"]


def _loads_dcp(
    rank: int, world_size: int, folder: Path, out: Path, was: int
) -> tuple[dict[str, torch.Tensor], float]:
    engine = new_engine(folder, optimizer=OptimizerConfig(lr=1e-2))
    engine.load(SaveLoadMeta(str(out / f"of_{was}"), "dcp", True))
    tensors = {name: _whole(tensor) for name, tensor in engine.dcp_state().live_tensors().items()}
    batch, n_own = seeing_batch(folder, (1, 2, 0, 0, 0, 1)), 6 // world_size
    own = select_rows(batch, range(rank * n_own, (rank + 1) * n_own))
    return tensors, engine.train_batch(own, sft_loss_fn, count_loss_tokens)["loss"]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_other_numbers_of_ranks_resume_with_the_tower_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    write_seeing_folder(tmp_path / "model", name)
    saved = {size: run_ranks(_saves_dcp, size, tmp_path / "model", tmp_path)[0] for size in (1, 2)}
    for was, now in ((2, 1), (1, 2), (2, 3)):
        tensors, loss = run_ranks(_loads_dcp, now, tmp_path / "model", tmp_path, was)[0]
        expected, next_loss = saved[was]
        assert tensors.keys() == expected.keys() and any("vis" in name for name in tensors)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
        assert loss == pytest.approx(next_loss, abs=1e-5)


def _publishes(
    rank: int, world_size: int, folder: Path, out: Path, options: dict[str, Any]
) -> None:
    engine = new_engine(folder, optimizer=OptimizerConfig(lr=1e-2), **options)
    batch = seeing_batch(folder, (1, 0), seed=rank)
    for version in (1, 2):
        engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
        engine.set_version(version)
        for kind in ("disk", "delta"):
            engine.connect_engine(
                [], WeightUpdateMeta("disk", str(out / kind), delta=kind == "delta")
            )
            engine.update_weights()
    engine.save(SaveLoadMeta(str(out / "now"), "hf", False))
    engine.save(SaveLoadMeta(str(out / "later"), "hf", False), blocking=False)
    engine.wait_for_save()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"use_lora": True, "lora_rank": 2}], ids=["all weights", "adapters"]
)
def test_background_exports_and_publications_equal_the_export(
    qwen: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    run_ranks(_publishes, 2, qwen, tmp_path, options)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "now").iterdir()}
    for found in (tmp_path / "later", version_path(tmp_path / "disk", 2)):
        assert {name: (found / name).read_bytes() for name in expected} == expected
    delta = files_of_version(tmp_path / "delta", 2)
    assert {name: delta[name] for name in expected} == expected
    before, after = load_reference(qwen).state_dict(), load_reference(tmp_path / "now").state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed and (not options or all("language_model" in name for name in changed))


def _pairs(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    batch, found = seeing_batch(folder, (1, 1, 0, 2)), {}
    own = select_rows(batch, range(2 * rank, 2 * rank + 2)) if world_size == 2 else batch
    for kind in (DPOConfig, RewardModelConfig):
        given: Any = {"path": str(folder), "dtype": "float32", "device": "cpu", "optimizer": PLAIN}
        config = kind(train_vision=True, **given)
        engine = FSDPEngine(config)
        engine.create_process_group()
        engine.initialize(None, SPEC)
        if isinstance(config, DPOConfig):
            dpo = DPO(config, engine)
            pairs = {**own, "ref_logp": dpo.compute_logp(own) - 0.1 * own["loss_mask"]}
            found |= {f"dpo {name}": value for name, value in dpo.train_dpo(pairs).items()}
            found["dpo after"] = dpo.evaluate_dpo(pairs)["loss"]
        else:
            model = RewardModel(config, engine)
            found |= {f"reward {name}": value for name, value in model.train_rw(own).items()}
            found["reward after"] = model.evaluate_rw(own)["loss"]
        engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_pairs_with_images_take_the_same_step_on_one_and_two_ranks(
    name: str, tmp_path: Path
) -> None:
    write_seeing_folder(tmp_path, name)
    alone, together = (run_ranks(_pairs, size, tmp_path)[0] for size in (1, 2))
    for key in ("loss", "grad_norm", "margin"):
        for kind in ("dpo", "reward"):
            assert together[f"{kind} {key}"] == pytest.approx(
                alone[f"{kind} {key}"], rel=1e-4, abs=1e-6
            ), (kind, key)
    for kind in ("dpo", "reward"):
        assert together[f"{kind} after"] == pytest.approx(alone[f"{kind} after"], rel=1e-3)


def test_an_export_has_the_processor_and_its_chat_template(qwen: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16)
    processor = LlavaProcessor(images, small_tokenizer(), patch_size=4, chat_template=template)
    new_engine(qwen).save(SaveLoadMeta(str(tmp_path / "out"), "hf", False, processor=processor))
    loaded = AutoProcessor.from_pretrained(tmp_path / "out")
    assert type(loaded) is LlavaProcessor and loaded.chat_template == template
    processor.save_pretrained(tmp_path / "expected")
    for path in (tmp_path / "expected").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_architectures_whose_images_are_of_another_kind_are_refused_in_words(
    tmp_path: Path,
) -> None:
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    vision = {"model_type": "pixtral", **small, "patch_size": 4, "image_size": 16}
    text = {"model_type": "mistral", **small, "num_key_value_heads": 2, "vocab_size": 96}
    CONFIG_MAPPING["mistral3"].from_dict(
        {"text_config": text, "vision_config": vision}
    ).save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match="how Mistral3ForConditionalGeneration takes images is not known"
    ):
        new_engine(tmp_path, init_from_scratch=True)


@pytest.mark.slow
def test_the_model_is_gone_after_destroy(qwen: Path) -> None:
    engine = new_engine(qwen)
    body = weakref.ref(engine.model.get_submodule("model"))
    engine.destroy()
    gc.collect()
    assert body() is None
