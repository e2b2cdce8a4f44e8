"""Models that see: packed rows with images, ranks without images, and malformed images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import FinetuneSpec, FSDPEngine, SaveLoadMeta, TrainEngineConfig, full_state_dict
from holdfast.engine.api import Batch
from holdfast.engine.config import MicroBatchSpec, OptimizerConfig
from holdfast.engine.rl import PPOActor, PPOActorConfig
from holdfast.engine.rl.losses import count_loss_tokens, sft_loss_fn
from holdfast.engine.rl.update import split_minibatches
from holdfast.engine.rollouts.ledger import Ledger
from holdfast.engine.rollouts.trajectory import concat_trajectories
from holdfast.engine.training.batch import IMAGES, join_trajectories, select_rows
from holdfast.utils.errors import BatchError, ConfigError
from holdfast.utils.plain_values import pack_plain, unpack_plain
from tests.engine.seeing import GRID, IMAGE, MODELS, alone_logprobs, load_reference, seeing_batch, write_seeing_folder
from tests.helpers import run_ranks

pytestmark = pytest.mark.timeout(180)

SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=4)
PLAIN = OptimizerConfig(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=1e9)
IMAGES_OF_ROWS = (1, 2, 0, 0)
"""Images in each row. The second of two ranks has none."""


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


@pytest.fixture(params=MODELS)
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


@pytest.mark.parametrize("n_mbs", [1, 2])
def test_gradients_of_ranks_with_and_without_images_are_the_unsharded_ones(folder: Path, n_mbs: int) -> None:
    reference, batch = load_reference(folder), seeing_batch(folder, IMAGES_OF_ROWS)
    loss = loss_of(reference, batch)
    loss.backward()
    options = {"mb_spec": MicroBatchSpec(n_mbs=n_mbs)}
    after, stats = run_ranks(_step, 2, folder, batch, options)[0]
    assert stats["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    untouched = 0
    most = max(float(param.grad.abs().max()) for param in reference.parameters() if param.grad is not None)
    for name, param in reference.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        untouched += not bool(grad.any())
        assert float((param.detach() - after[name] - grad).abs().max()) < 1e-5 * max(most, 1), name
    assert untouched < len(list(reference.parameters())) // 2


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_a_batch_without_any_image_gives_the_tower_zero_gradients(name: str, tmp_path: Path) -> None:
    reference = write_seeing_folder(tmp_path, name)
    batch = seeing_batch(tmp_path, (0, 0, 0, 0))
    loss_of(reference, batch).backward()
    after, _ = run_ranks(_step, 2, tmp_path, batch, {})[0]
    for key, param in reference.named_parameters():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        assert float((param.detach() - after[key] - grad).abs().max()) < 1e-5, key


def test_the_step_does_not_depend_on_the_cut_and_a_frozen_tower_stays(qwen: Path) -> None:
    batch, before = seeing_batch(qwen, IMAGES_OF_ROWS), load_reference(qwen).state_dict()
    whole, _ = _step(0, 1, qwen, batch, {"freeze_vision_tower": True})
    cut, _ = _step(0, 1, qwen, batch, {"freeze_vision_tower": True, "mb_spec": MicroBatchSpec(n_mbs=3)})
    for name, tensor in whole.items():
        assert float((tensor - cut[name]).abs().max()) < 1e-5, name
        assert torch.equal(tensor, before[name]) == name.startswith("model.visual"), name


def test_a_critic_sees(folder: Path) -> None:
    engine = new_engine(folder, is_critic=True)
    batch = seeing_batch(folder, (1, 0, 2))
    values = engine.forward_batch(batch)
    images: Any = batch[IMAGES]
    brighter = [own | {"pixel_values": own["pixel_values"] * 2} if own else {} for own in images]
    other: Any = {**batch, IMAGES: brighter}
    differs = (engine.forward_batch(other) != values).any(1).tolist()
    assert values.isfinite().all() and differs == [True, False, True]
    stats = engine.train_batch(batch, lambda output, data: (output * data["loss_mask"]).mean(), count_loss_tokens)
    assert not stats["update_skipped"]


def test_adapters_are_put_into_the_language_model_only(folder: Path) -> None:
    pytest.importorskip("peft")
    engine = new_engine(folder, use_lora=True, lora_rank=2)
    adapted = [name for name, param in engine.model.named_parameters() if param.requires_grad]
    assert adapted and all("language_model" in name for name in adapted)
    assert not engine.train_batch(seeing_batch(folder, (1, 0, 2)), sft_loss_fn, count_loss_tokens)["update_skipped"]


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


@pytest.mark.parametrize("backend", ["fsdp:c2", "fsdp:t2"])
def test_ranks_that_share_rows_or_matrices_are_refused(qwen: Path, backend: str) -> None:
    for message in run_ranks(_refused, 2, qwen, backend):
        assert "'train_vision' is true" in message and "parallel_size is 2" in message


def test_without_the_key_the_refusal_names_it(qwen: Path) -> None:
    with pytest.raises(ConfigError, match="train_vision"):
        new_engine(qwen, train_vision=False)


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
        case "an unknown key":
            images[0]["pixel_values_videos"] = torch.zeros(1)
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
    "an unknown key": "has the keys",
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


def test_an_image_larger_than_a_row_is_refused(qwen: Path) -> None:
    engine = new_engine(qwen, mb_spec=MicroBatchSpec(max_tokens_per_mb=5))
    with pytest.raises(BatchError, match="an image of 6 tokens"):
        engine.forward_batch(seeing_batch(qwen, (1,)))


def test_minibatches_carry_images_and_fillers_have_none(qwen: Path) -> None:
    batch = seeing_batch(qwen, (1, 2))
    batch["input_ids"][0, 0] = IMAGE  # a filler is made of this token
    *whole, filler = split_minibatches(batch, 3)
    images: Sequence[Any] = [own for part in whole for own in part[IMAGES]]
    assert [len(own["image_grid_thw"]) for own in images] == [1, 2]
    assert filler[IMAGES] == [{}] and not filler["input_ids"].any() and not filler["mm_token_type_ids"].any()


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


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trained_step_is_exported_and_resumed_bit_for_bit(folder: Path, tmp_path: Path, world_size: int) -> None:
    out = tmp_path / "out"
    trained = run_ranks(_saves, world_size, folder, out)[0]
    reference = load_reference(folder)
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(trained)
    reference.save_pretrained(tmp_path / "expected")
    assert any(not torch.equal(before[name], tensor) for name, tensor in trained.items())
    for name in ("model.safetensors", "config.json"):
        assert (out / "hf" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes(), name


def test_the_families_are_told_apart() -> None:
    assert {*GRID} < {*MODELS}


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
            assert own.keys() == found.keys() and all(torch.equal(value, found[key]) for key, value in own.items())
    new_engine(qwen).forward_batch(batch)


def test_an_actor_updates_on_images(qwen: Path) -> None:
    engine = new_engine(qwen)
    actor = PPOActor(PPOActorConfig(group_size=2, ppo_n_minibatches=3), engine)
    batch = _trajectory(qwen, (1, 2), 0)
    batch["logprobs"] = actor.compute_logp(batch)
    assert actor.ppo_update(actor.compute_advantages(batch))["n_seqs"] == 2


def _trajectory(folder: Path, images: Sequence[int], seed: int) -> Batch:
    batch = seeing_batch(folder, images, seed)
    zeros = torch.zeros(batch["input_ids"].shape)
    return {**batch, "logprobs": zeros, "versions": zeros.int(), "rewards": torch.arange(float(len(images)))}
