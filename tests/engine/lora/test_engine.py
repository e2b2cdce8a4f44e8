"""An engine that trains adapters: trained parameters, answers of the base model, exports and
publications.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from holdfast.engine import SaveLoadMeta, TrainEngineConfig, WeightUpdateMeta
from holdfast.engine.config import FSDPConfig
from holdfast.engine.lora.adapters import plain_view
from holdfast.engine.rl import EngineTeacher, PPOActor, PPOActorConfig
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from tests.engine.lora.engines import (
    ALPHA,
    RANK,
    batch,
    lora_engine,
    same,
    train,
    trained_state,
    whole,
    write_base,
)
from tests.helpers import run_ranks

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _error(act: Any) -> str:
    try:
        act()
    except (ConfigError, CheckpointMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def _train_and_export(rank: int, world_size: int, root: str) -> dict[str, Any]:
    folder = Path(root)
    engine = lora_engine(folder / "base")
    params = dict(engine.model.named_parameters())
    seen: dict[str, Any] = {
        "dtypes": {name: (param.dtype, param.requires_grad) for name, param in params.items()},
        "trained": [name for name, param in params.items() if param.requires_grad],
        "drawn": {name: whole(param) for name, param in params.items() if "lora_" in name},
        "optimized": sum(len(group["params"]) for group in engine.optimizer.param_groups),  # type: ignore[union-attr]
        "untrained": engine.forward_batch(batch()),
        "scored": engine._scoring_head is not None,
    }
    base = {name: whole(param) for name, param in params.items() if not param.requires_grad}
    engine.save(SaveLoadMeta(str(folder / f"begun_{world_size}"), "peft", False))
    seen["stats"] = train(engine, 3)
    seen["trained_logp"] = engine.forward_batch(batch())
    with engine.adapters_off():
        seen["base_logp"] = engine.forward_batch(batch())
    actor = PPOActor(PPOActorConfig(group_size=1, kl_ctl=0.0), engine)
    seen["ref_logp"] = actor.compute_ref_logp(batch())
    seen["again"] = engine.forward_batch(batch())
    seen["base_kept"] = same(
        base, {name: whole(dict(engine.model.named_parameters())[name]) for name in base}
    )
    out = folder / f"out_{world_size}"
    for name, blocking in (("now", True), ("later", False)):
        engine.save(
            SaveLoadMeta(str(out / f"hf_{name}"), "hf", False, dtype="float32"), blocking=blocking
        )
        engine.save(SaveLoadMeta(str(out / f"peft_{name}"), "peft", False), blocking=blocking)
    engine.wait_for_save()
    engine.update_weights(
        WeightUpdateMeta("disk", str(out / "published"), version=3, dtype="float32")
    )
    state = trained_state(engine)
    train(engine, 1)
    engine.load(SaveLoadMeta(str(out / "peft_later"), "peft", False))
    loaded = trained_state(engine)
    seen["loaded"] = all(
        torch.equal(state[name], loaded[name]) for name in state if name.startswith("model.")
    )
    seen["hf_refused"] = _error(lambda: engine.load(SaveLoadMeta(str(out / "hf_now"), "hf", False)))
    engine.destroy()
    return seen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    write_base(root / "base")
    return root


@pytest.fixture(scope="module")
def seen(root: Path) -> list[dict[str, Any]]:
    return [run_ranks(_train_and_export, world_size, str(root))[0] for world_size in (1, 2)]


def test_adapters_are_float32_and_trained_and_all_else_is_frozen_in_the_dtype_of_the_folder(
    seen: list[dict[str, Any]],
) -> None:
    for report in seen:
        for name, found in report["dtypes"].items():
            assert found == (
                (torch.float32, True) if ".lora_" in name else (torch.bfloat16, False)
            ), name
        layers = {name.rpartition(".lora_")[0] for name in report["trained"]}
        assert {layer.rpartition(".")[2] for layer in layers} == set(LINEAR) and len(layers) == 14
        assert report["optimized"] == len(report["trained"]) == 28
        assert report["scored"] and report["base_kept"]
        losses = [stats["loss"] for stats in report["stats"]]
        assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1
        assert all(0 < stats["grad_norm"] < 100 for stats in report["stats"])


def test_adapters_begin_the_same_at_every_world_size_and_the_policy_as_its_base(
    seen: list[dict[str, Any]], root: Path
) -> None:
    one, two = (report["drawn"] for report in seen)
    assert same(one, two)
    for name, drawn in one.items():
        if ".lora_B." in name:
            assert not drawn.any()
        else:
            bound = drawn.shape[1] ** -0.5
            assert 0.5 * bound < drawn.abs().max() <= bound and drawn.shape[0] == RANK
    a = [drawn for name, drawn in one.items() if ".lora_A." in name and drawn.shape[1] == 32]
    assert not any(torch.equal(a[0], other) for other in a[1:])
    model = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
    ids = batch()["input_ids"]
    logp = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[:, :, 0]
    expected = torch.where(batch()["attention_mask"][:, 1:].bool(), logp, 0.0)
    for report in seen:
        torch.testing.assert_close(report["untrained"][:, 1:], expected, atol=1e-5, rtol=1e-5)


def test_with_adapters_off_the_engine_answers_as_before_training_and_then_as_it_did(
    seen: list[dict[str, Any]],
) -> None:
    for report in seen:
        assert torch.equal(report["base_logp"], report["untrained"])
        assert torch.equal(report["ref_logp"], report["untrained"])
        assert torch.equal(report["again"], report["trained_logp"])
        assert (report["trained_logp"] - report["untrained"]).abs().max() > 0.05


def test_a_folder_of_peft_answers_as_the_engine_and_merges_to_what_is_exported_and_published(
    seen: list[dict[str, Any]], root: Path
) -> None:
    for world_size, report in enumerate(seen, 1):
        out, ids = root / f"out_{world_size}", batch()["input_ids"]
        for name in ("peft_now", "peft_later"):
            base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
            model = PeftModel.from_pretrained(base, out / name).eval()
            logp = (
                model(input_ids=ids)
                .logits.log_softmax(-1)[:, :-1]
                .gather(2, ids[:, 1:, None])[:, :, 0]
            )
            mask = batch()["attention_mask"][:, 1:].bool()
            torch.testing.assert_close(
                report["trained_logp"][:, 1:][mask], logp[mask], atol=1e-5, rtol=1e-5
            )
            config = json.loads((out / name / "adapter_config.json").read_text())
            assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
            assert config["base_model_name_or_path"] == str(root / "base")
            assert config["target_modules"] == sorted(LINEAR), "in one order in each process"
        merged = model.merge_and_unload().state_dict()
        for name in ("hf_now", "hf_later", "published/v00000003"):
            exported = AutoModelForCausalLM.from_pretrained(out / name, dtype="auto")
            assert exported.dtype == torch.float32
            state = exported.state_dict()
            assert state.keys() == merged.keys()
            for key, value in state.items():
                torch.testing.assert_close(value, merged[key], atol=1e-6, rtol=1e-6)


def test_steps_change_the_policy_as_those_of_peft_and_torch_do(
    seen: list[dict[str, Any]], root: Path
) -> None:
    for world_size, report in enumerate(seen, 1):
        base = AutoModelForCausalLM.from_pretrained(root / "base", dtype=torch.float32)
        model = PeftModel.from_pretrained(
            base, root / f"begun_{world_size}", is_trainable=True
        ).eval()
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.01)
        ids, mask = batch()["input_ids"], batch()["attention_mask"].bool()

        def logp(model: Any = model, ids: torch.Tensor = ids) -> torch.Tensor:
            return (
                model(input_ids=ids)
                .logits.log_softmax(-1)[:, :-1]
                .gather(2, ids[:, 1:, None])[:, :, 0]
            )

        for stats in report["stats"]:
            loss = -logp()[mask[:, 1:]].mean()  # a first token has no prediction
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert (stats["loss"], stats["grad_norm"]) == pytest.approx(
                (loss.item(), norm.item()), rel=1e-4
            )
        torch.testing.assert_close(
            report["trained_logp"][:, 1:][mask[:, 1:]], logp()[mask[:, 1:]], atol=1e-4, rtol=1e-4
        )


def test_adapters_load_back_and_another_base_is_refused(seen: list[dict[str, Any]]) -> None:
    for report in seen:
        assert report["loaded"]
        assert report["hf_refused"].startswith(
            "ConfigError: weight_format 'hf' would put another base"
        )


def _after_an_evaluation(rank: int, world_size: int, root: str) -> None:
    folder = Path(root)
    kept = FSDPConfig(reshard_after_forward=False)
    engine = lora_engine(folder / "base", dtype="bfloat16", fsdp=kept)
    train(engine, 1)
    state = trained_state(engine)
    for name in ("trained", "evaluated"):
        engine.save(SaveLoadMeta(str(folder / name), "peft", False))
        engine.forward_batch(batch())
    if rank == 0:
        files = [folder / name / "adapter_model.safetensors" for name in ("trained", "evaluated")]
        assert files[0].read_bytes() == files[1].read_bytes()
    train(engine, 1)
    engine.forward_batch(batch())
    engine.load(SaveLoadMeta(str(folder / "trained"), "peft", False))
    loaded = trained_state(engine)
    changed = [name for name in state if not torch.equal(state[name], loaded[name])]
    assert not [name for name in changed if name.startswith("model.")]
    teacher = EngineTeacher(engine)
    identity = teacher.identity()
    engine.forward_batch(batch())
    assert teacher.identity() == identity
    engine.destroy()


@pytest.mark.slow
def test_adapters_are_saved_and_loaded_after_a_forward_that_leaves_gathered_ones(
    tmp_path: Path,
) -> None:
    write_base(tmp_path / "base")
    run_ranks(_after_an_evaluation, 2, str(tmp_path))


def _refused(rank: int, world_size: int, root: str) -> dict[str, str]:
    folder, messages = Path(root), {}
    for name, keys in {
        "unknown": {"target_modules": ["q_proj", "query"]},
        "embedding": {"target_modules": ["embed_tokens"]},
        "tied": {"target_modules": ["lm_head"]},
    }.items():
        messages[name] = _error(lambda keys=keys: lora_engine(folder / "base", **keys))
    (folder / "quantized").mkdir()
    config = json.loads((folder / "base" / "config.json").read_text())
    quantized = {
        **config,
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }
    (folder / "quantized" / "config.json").write_text(json.dumps(quantized))
    messages["qlora"] = _error(lambda: lora_engine(folder / "quantized"))
    full = lora_engine(folder / "base", use_lora=False)
    messages["full_peft"] = _error(
        lambda: full.save(SaveLoadMeta(str(folder / "never"), "peft", False))
    )
    messages["full_off"] = _error(lambda: full.adapters_off().__enter__())
    full.destroy()
    critic = lora_engine(folder / "base", is_critic=True, target_modules=["q_proj", "v_proj"])
    trained = [name for name, param in critic.model.named_parameters() if param.requires_grad]
    messages["critic_trains"] = " ".join(sorted({name for name in trained if "lora_" not in name}))
    messages["critic_peft"] = _error(
        lambda: critic.save(SaveLoadMeta(str(folder / "never"), "peft", False))
    )
    critic.save(SaveLoadMeta(str(folder / "critic"), "hf", False))
    state = plain_view(critic.model).state_dict()
    critic.destroy()
    messages["critic_names"] = (
        "plain" if not any("lora" in key or "base_layer" in key for key in state) else "odd"
    )
    return messages


def test_impossible_adapter_options_are_refused_with_the_key(root: Path) -> None:
    (messages,) = run_ranks(_refused, 1, str(root))
    assert (
        "names 'query', which Qwen3ForCausalLM does not have; its linear layers are down_proj"
        in messages["unknown"]
    )
    assert "'target_modules' takes in model.embed_tokens, a Embedding" in messages["embedding"]
    assert "tied" in messages["tied"] and "lm_head" in messages["tied"]
    assert "quantized with bitsandbytes" in messages["qlora"]
    assert (
        "'use_lora' is false" in messages["full_peft"]
        and "'use_lora' is false" in messages["full_off"]
    )
    assert messages["critic_trains"].startswith("score.") and messages["critic_names"] == "plain"
    assert "its value head is no adapter" in messages["critic_peft"]
    assert not (root / "never").exists() and (root / "critic" / "config.json").exists()


def test_keys_of_lora_are_checked_when_the_configuration_is_read() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"use_lora": True, "peft_type": "dora"}, "'peft_type' is 'dora'"),
        ({"lora_rank": 0}, "'lora_rank' is 0"),
        ({"lora_alpha": 0}, "'lora_alpha' is 0"),
    ]
    for keys, message in refused:
        with pytest.raises(ConfigError, match=message):
            TrainEngineConfig(**keys)
    assert TrainEngineConfig(peft_type="lokr").use_lora is False, "says nothing without use_lora"
    with pytest.raises(ConfigError, match="'peft' holds weights only"):
        SaveLoadMeta("x", "peft", with_optim=True)
    with pytest.raises(ConfigError, match="one file of adapters"):
        SaveLoadMeta("x", "peft", with_optim=False, base_model_path="y")


@pytest.mark.slow
def test_a_folder_of_peft_with_other_adapters_is_refused(
    root: Path, seen: list[dict[str, Any]]
) -> None:
    messages = run_ranks(_load_others, 2, str(root))[0]
    assert (
        "lora_A.weight is [4, 32], the model's [2, 32]; is lora_rank the same?" in messages["rank"]
    )
    assert (
        "only the folder has base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
        in messages["targets"]
    )
    assert "adapters count 2 (alpha 8, rank 4), here 4" in messages["alpha"]
    assert messages["unchanged"] == "yes"


def _load_others(rank: int, world_size: int, root: str) -> dict[str, str]:
    folder, messages, unchanged = Path(root), {}, True
    meta = SaveLoadMeta(str(folder / "out_1" / "peft_now"), "peft", False)
    for name, keys in {
        "rank": {"lora_rank": 2, "lora_alpha": 4},
        "targets": {"target_modules": ["q_proj"]},
        "alpha": {"lora_alpha": 16},
    }.items():
        engine = lora_engine(folder / "base", **keys)
        before = trained_state(engine)
        messages[name] = _error(lambda engine=engine: engine.load(meta))
        unchanged = unchanged and same(before, trained_state(engine))
        engine.destroy()
    return {**messages, "unchanged": "yes" if unchanged else "no"}
