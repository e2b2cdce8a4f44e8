"""Keys of an AReaL file that mean something together. Each rule changes the translated keys, or
refuses them.

A rule takes the translated keys and the section as the file has it. It returns remarks for the
warning. The first lines of these docstrings are a table of docs/areal.md.
"""

from collections.abc import Callable, Mapping

from ...engine.api import ParallelStrategy
from ...utils.errors import ConfigError
from .keys import Keys, Section

Rule = Callable[[Keys, Section], list[str]]


def mesh_of_this_engine(keys: Keys, found: Section) -> list[str]:
    """`backend` with pipeline parallelism (`p` above 1), or with `e` and `t` both above 1:
    refused.
    """
    backend = keys.get("backend")
    if backend:
        ParallelStrategy.from_backend(str(backend))
    else:
        # Absent or empty: the default here.
        keys.pop("backend", None)
    return []


def weights_of_one(keys: Keys, found: Section) -> list[str]:
    """`use_decoupled_loss` without `rejection_sampling`: AReaL's weights are 1, so
    `recompute_logprob` alone.
    """
    if not keys.get("use_decoupled_loss") or keys.get("rejection_sampling"):
        return []
    method = keys.get("prox_logp_method", "recompute")
    if method not in ("recompute", "metrics"):
        raise ConfigError(
            f"config key 'prox_logp_method' is {method!r} without 'rejection_sampling': AReaL's "
            "weights are 1 then, which here goes with a recomputed policy alone; set "
            "rejection_sampling"
        )

    # The ratio is relative to the recomputed policy, as before, and has no weights.
    keys["use_decoupled_loss"] = False
    keys["recompute_logprob"] = True
    keys.pop("prox_logp_method", None)
    return [
        "use_decoupled_loss without rejection_sampling is recompute_logprob, for AReaL's weights "
        "are 1 then"
    ]


def bounds_of_nothing(keys: Keys, found: Section) -> list[str]:
    """`rejection_sampling` without `use_decoupled_loss`: dropped, as AReaL does."""
    if not keys.get("rejection_sampling") or keys.get("use_decoupled_loss"):
        return []
    keys.pop("rejection_sampling")
    return ["rejection_sampling without use_decoupled_loss bounds nothing"]


def one_minibatch(keys: Keys, found: Section) -> list[str]:
    """`reuse_train_logp` as `prox_logp_method`, with several `ppo_n_minibatches`: one, as AReaL
    does.
    """
    if keys.get("prox_logp_method") != "reuse_train_logp" or keys.get("ppo_n_minibatches") == 1:
        return []
    keys["ppo_n_minibatches"] = 1
    return ["ppo_n_minibatches is 1 with prox_logp_method reuse_train_logp"]


def deviation(keys: Keys, found: Section) -> list[str]:
    """`std_level` batch with `mean_level` group, or one level with `mean_leave1out`: not AReaL's,
    with a remark.
    """
    remarks = []
    for name in ("reward_norm", "adv_norm"):
        norm = keys.get(name) or {}
        mean = norm.get("mean_level", "batch")
        std = norm.get("std_level", "batch")

        # AReaL takes the deviation from the means that it subtracts: of groups, or of all others.
        of_batch_around_groups = mean == "group" and std == "batch"
        of_one_level = std is not None and mean == std
        if of_batch_around_groups or (of_one_level and norm.get("mean_leave1out")):
            remarks.append(
                f"the standard deviation of {name} is not AReaL's: see docs/algorithms.md"
            )
    return remarks


def nothing_saved(keys: Keys, found: Section) -> list[str]:
    """`mode` that is `off` or `disabled`: no exports either, although AReaL's `saver` goes on, with
    a remark.
    """
    if keys.get("mode") not in ("disabled", "off", False):
        return []
    return [
        "the mode is off, so neither snapshots nor exports are made: set recover.mode=auto for both"
    ]


_OF_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}


def megatron_layers(keys: Keys, found: Section) -> list[str]:
    """`target_modules` with Megatron's names (`linear_qkv`): translated to transformers' layers,
    with a remark.
    """
    names = keys.get("target_modules") or []
    if not keys.get("use_lora") or not any(name in _OF_MEGATRON for name in names):
        return []

    # Megatron fuses layers, so one name of it is several here. Other names stay.
    layers: list[str] = []
    for name in names:
        layers += _OF_MEGATRON.get(name, (name,))
    keys["target_modules"] = layers
    return [f"target_modules {names} are {layers}, with adapters of their own each"]


RULES: Mapping[str, tuple[Rule, ...]] = {
    "TrainEngineConfig": (mesh_of_this_engine, megatron_layers),
    "PPOActorConfig": (weights_of_one, bounds_of_nothing, one_minibatch, deviation),
    "RecoverConfig": (nothing_saved,),
}
"""Rules of each class, in the order of their use."""
