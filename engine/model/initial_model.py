"""The sharded model that an engine starts with: built, given memory, and filled from a folder or
from a seed.

Every step that is not itself a collective ends on all ranks together, so that an error on one rank
is an error on all.
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...utils.compat.transformers_private import conversions_of, set_conversions
from ...utils.distributed import RankGroup, all_ranks_succeed, get_rank, rank_zero_decides
from ...utils.errors import CheckpointMismatchError, ConfigError
from ...utils.logging import get_logger
from ...utils.remote import FETCH_FIRST, require_local
from ..config import TrainEngineConfig
from ..dcp.base_model import BaseFolder
from ..hf.dtypes import base_dtype, file_dtypes
from ..hf.load import load_hf
from ..hf.name_mapping import plan_loading
from ..hf.refused_weights import refuse_other_weights, refuse_quantized
from ..hf.weight_files import WeightReader
from ..lora.adapters import plain_view
from ..lora.build import add_adapters, draw_adapters
from ..model_folder import index_digest, is_first_of_its_node
from ..training.adam8bit import require_whole_blocks
from ..training.attention import keep_lengths_out_of_graphs
from ..training.compilation import compile_blocks
from ..training.expert_parallel import shard_experts
from ..training.head import ScoringHead, find_scoring_head
from ..training.meshes import Meshes
from ..training.microbatch import CutRules
from ..training.model import (
    build_causal_on_meta,
    build_on_meta,
    cast_buffers,
    n_known_tokens,
    refuse_dropout,
)
from ..training.packing import prepare_packing
from ..training.probe_model import Twins
from ..training.process_groups import ProcessGroups
from ..training.rotary import longest_sequence
from ..training.route_probe import find_replay
from ..training.route_replay import RouteReplay, RouteRules
from ..training.routers import require_routers
from ..training.sharding import block_classes, shard_model
from ..training.speed import Speed
from ..training.tensor_parallel import cut_over_ranks, require_cuttable
from ..training.tensor_parallel_check import check_tensor_parallel
from ..training.unsharded import unsharded_class
from ..training.value_model import body_name
from ..training.vision import Vision, require_whole_rows
from ..training.weights import compute_buffers, draw_weights, give_memory
from .memory_plan import log_plan

logger = get_logger(__name__)


def build_initial_model(
    config: TrainEngineConfig, folder: Path, groups: ProcessGroups
) -> tuple[PreTrainedModel, ScoringHead | None, RouteReplay]:
    """Build the model of ``folder``, sharded, with its initial weights. Every rank of ``groups``
    calls this.

    ``config.path`` becomes the name of the base in folders of adapters. Returns the model, its head
    if that can return log-probabilities (see `find_scoring_head`), but no head for a critic, and
    its routers.

    Raises:
        ConfigError: the model cannot be built as configured, see `build_on_meta`,
            `refuse_quantized`, `prepare_packing`, `find_replay`.
        CheckpointError: the weights do not load, see `load_hf`.
        PeerError: only other ranks failed.
    """
    name = config.path
    config = replace(config, path=str(folder))
    control = groups.control
    meshes = groups.meshes
    if config.train_vision:
        require_whole_rows(meshes.strategy)
    if config.trust_remote_code:
        _import_code(config, control)

    # One rank looks into the folder, because ranks could see other files.
    frozen_dtype = None
    if config.use_lora:
        frozen_dtype = rank_zero_decides(lambda: base_dtype(build_on_meta(config), folder), control)

    # On meta: the whole model, with its cuts, adapters and compiled blocks.
    with all_ranks_succeed(f"building the model of {folder}", control):
        refuse_quantized(folder)
        if not config.init_from_scratch:
            refuse_other_weights(folder)
            with WeightReader(folder) as reader:
                refuse_quantized(folder, reader.layout())
        model = build_on_meta(config)
        computed = compute_buffers(model)
        blocks = block_classes(model, config.fsdp.wrap_policy.transformer_layer_cls_to_wrap)
        cast_buffers(model, config)
        if not config.disable_dropout and meshes.ranks_with_same_data > 1:
            refuse_dropout(model)

        # Tensor parallelism cuts weights, and refuses adapters and compiled blocks.
        if meshes.tensor is not None:
            require_cuttable(config, model, meshes.tensor.size())
            cut_over_ranks(model, meshes.tensor)
            if config.optimizer is not None and config.optimizer.type == "adam8bit":
                require_whole_blocks(model)
        if config.use_lora:
            dtypes = file_dtypes(model, dict(model.named_parameters()), frozen_dtype)
            add_adapters(model, config, name, dtypes)
        require_routers(model, config)
        shard_experts(model, config, meshes)
        if config.compile:
            keep_lengths_out_of_graphs()
            compile_blocks(model, blocks)
    shard_model(model, config, blocks, meshes.fsdp)

    # Checks come before the model has memory, because twins take as much for a moment.
    with closing(Twins(model, groups.device)) as twins:
        check_tensor_parallel(twins, control)
        if config.pack_sequences:
            prepare_packing(twins, config, meshes.sequence, control)
        elif meshes.sequence is not None:
            raise ConfigError(
                "config key 'pack_sequences' is false, but only packed rows are cut "
                f"(context_parallel_size is {meshes.strategy.cp_size}); set it to true, or "
                "take 'c' out of config key 'backend'"
            )
        head = None if config.is_critic else find_scoring_head(twins, control)
        replay = find_replay(twins, config, meshes, control)
    if get_rank(control) == 0:
        log_plan(config, meshes.strategy, groups.device)

    # Memory and values. What the folder does not fill has its values from the seed.
    with all_ranks_succeed(f"giving the model of {folder} memory", control):
        params_on = torch.device("cpu") if config.fsdp.offload_params else None
        unfilled = give_memory(model, computed, groups.device, params_on)
        base = plain_view(model)
        if config.init_from_scratch or config.is_critic:
            unfilled += draw_weights(base, build_on_meta(config), config.seed, blocks)
        draw_adapters(model, config.seed)
    if not config.init_from_scratch:
        fresh = load_weights(base, folder, config, control)
        unfilled = [tensor for tensor in unfilled if tensor in fresh]
    if unfilled:
        raise ConfigError(
            f"{unsharded_class(base).__name__} does not initialise {unfilled[0]!r} in "
            "_init_weights: it can only be loaded, from a folder that has it (config key "
            "'init_from_scratch' false)"
        )
    if config.max_model_len is None:
        longest = longest_sequence(model, None)
        if longest and get_rank(control) == 0:
            logger.warning(
                "%s: rotary frequencies for at most %d tokens; longer sequences are refused. "
                "Servers with a larger --max-model-len may compute with others: then set config "
                "key 'max_model_len' to theirs",
                name,
                longest,
            )

    # Exports rename tensors as the plain model does.
    if base is not model:
        set_conversions(model, conversions_of(base))
    return model, head, replay


def base_of(config: TrainEngineConfig, folder: Path, group: RankGroup) -> BaseFolder:
    """The source of the frozen weights of an engine's model, as rank 0 sees it. Every rank calls
    this.
    """
    index = None
    if not config.init_from_scratch:
        index = rank_zero_decides(lambda: index_digest(folder), group)
    return BaseFolder(config.path, index)


def _import_code(config: TrainEngineConfig, group: RankGroup) -> None:
    """Let one rank per node copy the code of the model to where transformers imports it from,
    before the others do.
    """
    first = is_first_of_its_node(group)
    with all_ranks_succeed(f"importing the code of {config.path}", group):
        if first:
            build_on_meta(config)


def load_weights(
    model: PreTrainedModel,
    folder: str | Path,
    config: TrainEngineConfig,
    group: RankGroup,
) -> list[str]:
    """`load_hf` into an engine's model. If a critic loads a causal language model, its value head
    keeps its values.

    ``config.path`` is the local folder that the model was built from. Returns the names that
    ``folder`` does not have.
    """
    missing = unexpected = ()
    if config.is_critic:
        # The value head is not in the folder of a language model, whose own head is not used.
        body = body_name(model)
        missing = [f"{name}.*" for name, _ in model.named_children() if name != body]
        with all_ranks_succeed(f"looking for a language-model head in {folder}", group):
            unexpected = _head_of_causal_lm(require_local(folder, "loading", FETCH_FIRST), config)
    fresh = load_hf(model, folder, group=group, allow_missing=missing, allow_unexpected=unexpected)
    if fresh:
        logger.warning("%s does not hold %s; kept as they were", folder, ", ".join(fresh))
    return fresh


def cut_rules(
    model: PreTrainedModel,
    config: TrainEngineConfig,
    meshes: Meshes,
    routes: RouteRules | None,
    speed: Speed,
) -> CutRules:
    """Rules for micro-batches that a model and its ranks need."""
    vision = Vision(model) if config.train_vision else None
    return CutRules(
        row_tokens=config.row_tokens,
        max_model_len=longest_sequence(model, config.max_model_len),
        ranks_with_same_data=meshes.ranks_with_same_data,
        vision=vision,
        n_known_tokens=n_known_tokens(model),
        shares_prompts=config.enable_tree_training,
        routes=routes,
        attention_flops=speed.attention_flops,
    )


def _head_of_causal_lm(folder: Path, config: TrainEngineConfig) -> list[str]:
    """Tensors of a folder that a causal language model has in addition to its base model, under
    their names there.
    """
    # Names in files and in the model differ, so a plan of loading tells which belong to the head.
    causal = build_causal_on_meta(config)
    if causal is None:
        return []
    with WeightReader(folder) as reader:
        shapes = {name: slot.shape for name, slot in reader.layout().items()}
    try:
        loading = plan_loading(causal, shapes)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{folder}: {error}") from error
    base = f"{body_name(causal)}."
    names: list[str] = []
    for key, tensor in loading.filled.items():
        if not key.startswith(base):
            # A critic renames it as the causal model does, or not.
            names += [key, *tensor.sources]
    return names
