"""Split the experts of a mixture-of-experts model over ranks (expert parallelism).

Each of the e ranks in `Meshes.expert` holds a run of whole experts, and computes them for the
tokens of all e ranks. Two all-to-alls per layer bring tokens to experts and results back.
Everything else is sharded as without it. transformers has the code and the rules for each
architecture.

All ranks of `Meshes.expert` must run the same forwards and backwards.
"""

from collections.abc import Mapping
from math import gcd

from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from ...utils.compat.transformers_private import plan_experts, split_experts
from ...utils.errors import ConfigError
from ..config import TrainEngineConfig
from ..parallel_strategy import divisors
from .meshes import Meshes
from .sharding import fsdp_options


def shard_experts(model: PreTrainedModel, config: TrainEngineConfig, meshes: Meshes) -> None:
    """Split the experts over `Meshes.expert` in place, and shard each rank's experts over
    `Meshes.expert_fsdp`.

    Does nothing if e is 1. Call it before `shard_model`, on the meta device. No communication.

    Raises:
        ConfigError: the model has adapters, or no experts that can be split, or e does not divide
            their number.
        UnsupportedVersionError: this transformers cannot split experts.
    """
    if meshes.expert is None or meshes.expert_fsdp is None:
        return
    e = meshes.expert.size()
    shards = meshes.expert_fsdp.size(-1)
    plan = plan_experts(model, e)
    modules = {}
    for name, module in model.named_modules():
        if plan.get(name) == "ep_dispatch_experts":
            modules[name] = module
    _check(model, config, modules, plan, e, shards)

    split_experts(model, meshes.expert, meshes.alone, plan)
    for module in modules.values():
        sharded = fully_shard(module, **fsdp_options(config, meshes.expert_fsdp))
        # These gradients are sums over the tokens of e ranks already, so the divisor is not the
        # number of shards.
        sharded.set_gradient_divide_factor(float(meshes.fsdp.size()))
        # With one shard FSDP2 divides by itself, and would divide twice. With several, gloo has no
        # sum with a factor, see pytorch#190747.
        if shards > 1:
            sharded.set_force_sum_reduction_for_comms(True)


def _check(
    model: PreTrainedModel,
    config: TrainEngineConfig,
    modules: Mapping[str, nn.Module],
    plan: Mapping[str, str],
    e: int,
    shards: int,
) -> None:
    name = type(model).__name__
    found = f"expert_parallel_size is {e}"
    instead = "set config key 'backend' without e"
    if config.use_lora:
        raise ConfigError(
            f"{found}, but config key 'use_lora' is true: experts with adapters are not split; "
            f"{instead}"
        )
    if not modules:
        raise ConfigError(
            f"{found}, but transformers has no rules to split experts of {name}; {instead}"
        )

    # Each rank would train its own copy of a weight that its experts share.
    params: dict[str, nn.Parameter] = {}
    for key, module in modules.items():
        params.update(module.named_parameters(prefix=key))
    common = [full for full in params if plan.get(full) != "grouped_gemm"]
    if common:
        raise ConfigError(f"{found}, but all experts of {name} share {common[0]}; {instead}")

    counts = sorted({param.shape[0] for param in params.values()})
    if any(count % e for count in counts):
        fitting = divisors(gcd(e * shards, *counts))
        raise ConfigError(
            f"{found}, but {name} has {' or '.join(map(str, counts))} experts in a layer; "
            f"expected one of {fitting}, which divide this and the {e * shards} ranks of a replica"
        )
