"""Every example file of AReaL that has an actor loads, or is refused for a reason given here."""

import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.engine import TrainEngineConfig
from holdfast.engine.rl import DPOConfig
from holdfast.integrations.areal import load_areal
from holdfast.integrations.areal.keys import KEYS, Fate
from holdfast.recover import RecoverConfig
from holdfast.utils.errors import ConfigError
from tests.integrations.areal.test_load import Job
from tests.tiers import slow_but

FILES = yaml.safe_load((Path(__file__).parent / "files.yaml").read_text())
REMOVED = "AReaL has removed it: `rejection_sampling"
ROUTER = (
    "'actor.megatron.moe_router_dtype' .* is 'fp32': routers of experts compute in `dtype` here"
)
GRADIENTS = "'actor.megatron..*' .*(gradients are float32 here|`grad_reduce_dtype` says it here)"
REFUSED = {
    "dte/gsm8k_grpo_qwen3_30b_a3b": ROUTER,
    "experimental/inference_service/online_rollout": (
        "'group_size' is 1: every reward would become 0"
    ),
    "math/gsm8k_grpo_megatron_fp8": "'actor.megatron.ddp.fp8_param_gather' .* no training in fp8",
    "math/gsm8k_grpo_megatron_lora_moe": "'backend' is .*, with pipeline parallelism",
    "math/gsm8k_kpop": "'rejection_sampling.metric' is 'binary_kl'",
    "math/gsm8k_m2po": "'actor.m2_threshold' .* no M2PO",
    "math/gsm8k_sft_archon_fp8": "'actor.archon.fp8_config.mode' .* no training in fp8",
    "openclaw/config": "'group_size' is 1: every reward would become 0",
    "profile/qwen3_30b_a3b_sft_profile": GRADIENTS,
    "profile/qwen3_5_35b_a3b_sft_profile": GRADIENTS,
    "scaffolding/gsm8k_rlvr_scaffolding": REMOVED,
    "scaffolding/gsm8k_rlvr_scaffolding_2nodes": REMOVED,
    "search_agent/tongyi_deepresearch/config": (
        "'backend' is 'megatron:d2p2t1', with pipeline parallelism"
    ),
    "swe/qwen3_30b_a3b_grpo": ROUTER,
    "tau2/config_235b_moe_airline": ROUTER,
    "tau2/config_30b_moe_airline": ROUTER,
    "terminal_bench/config_tb_sglang": REMOVED,
    "terminal_bench/config_tb_vllm_npu": REMOVED,
    "vlm/qwen3_5_35b_a3b_megatron_geometry3k_grpo_awex_colocate": "with pipeline parallelism",
    "vlm/qwen3_6_35b_a3b_megatron_geometry3k_grpo": "with pipeline parallelism",
}


def keys_of(name: str) -> dict[str, Any]:
    """Dotted key -> value."""
    own = dict(FILES["files"][name])
    base, less = FILES[own.pop("base")], own.pop("less", [])
    left = {
        key: value
        for key, value in base.items()
        if not any(f"{key}.".startswith(f"{gone}.") for gone in less)
    }
    return {**left, **own}


def write(folder: Path, keys: dict[str, Any]) -> Path:
    file: dict[str, Any] = {
        "experiment_name": "e",
        "trial_name": "t",
        "cluster": {"fileroot": "/shared"},
    }
    for key, value in keys.items():
        *parents, last = key.split(".")
        spec = [{"task_type": "worker", "gpu": 1, "cmd": "python -m areal.infra.rpc.rpc_server"}]
        reduce(lambda section, name: section.setdefault(name, {}), parents, file)[last] = (
            spec if value == "SPEC" else value
        )
    (folder / "config.yaml").write_text(yaml.safe_dump(file))
    return folder / "config.yaml"


def load(name: str, path: Path) -> dict[str, Any]:
    """Section -> values read from it."""
    if FILES["files"][name]["base"] == "engine":
        cls = DPOConfig if name.endswith("_dpo") else TrainEngineConfig
        return {"actor": load_areal(cls, path), "recover": load_areal(RecoverConfig, path)}
    return vars(load_areal(Job, path))


def test_there_are_as_many_files_as_areal_has() -> None:
    assert len(FILES["files"]) == 67 and len(FILES["files"]) - len(REFUSED) == 47
    assert set(REFUSED) <= set(FILES["files"])


@pytest.mark.parametrize("name", slow_but([*FILES["files"]][::5], FILES["files"]))
def test_an_example_file_loads_or_is_refused_for_a_named_reason(name: str, tmp_path: Path) -> None:
    keys = keys_of(name)
    path = write(tmp_path, keys)
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            load(name, path)
        return
    sections = load(name, path)
    compared = 0
    for key, value in keys.items():
        section, _, inner = key.partition(".")
        if (
            section in sections
            and sections[section] is not None
            and is_same(sections[section], inner)
            and is_plain(value)
        ):
            found = reduce(getattr, inner.split("."), sections[section])
            assert found == (float(value) if type(found) is float else value), key
            compared += 1
    assert compared >= 15


def is_same(config: Any, key: str) -> bool:
    """Whether the table says that a key has the same meaning in both, and no rule reads the key."""
    tables = [KEYS[base.__name__] for base in type(config).__mro__ if base.__name__ in KEYS]
    fate: Fate | None = next((table[key] for table in tables if key in table), None)
    by_rule = (
        "use_decoupled_loss",
        "recompute_logprob",
        "rejection_sampling",
        "mode",
        "target_modules",
    )
    return fate is not None and fate.kind == "same" and key.partition(".")[0] not in by_rule


def is_plain(value: Any) -> bool:
    return value is not None and not re.match(r"\$\{", str(value)) and value not in ("bf16", "fp32")
