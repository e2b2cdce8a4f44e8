"""How much device memory a training step takes on each rank, computed from a model's config.

Weights, gradients and moments follow from shapes and mesh. Activations follow from a forward on
fake tensors, which have shapes but no memory: autograd tells what each block keeps for its
backward. Attention counts as flash attention
does: queries, keys, values, output, and one float32 per query.
"""

from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ...utils.compat.torch_private import TorchDispatchMode, storage_id, without_memory
from ...utils.compat.transformers_private import set_attention
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..config import OptimizerConfig, TrainEngineConfig
from ..lora.build import add_adapters
from ..parallel_strategy import ParallelStrategy
from ..training.adam8bit import BLOCK, PIECE
from ..training.adam_bf16 import CPU_BUCKET, GPU_BUCKET
from ..training.checkpointing import KeptMemory, KeptResult, tensors_of
from ..training.gradient_sync import choose_last
from ..training.host_optimizer import BLOCK_BYTES
from ..training.logprobs import PASS_ELEMENTS, chunk_elements
from ..training.model import (
    COMPUTE_DTYPES,
    UNUSABLE,
    build_on_meta,
    cast_buffers,
    describe_unusable,
)
from ..training.muon import trained_matrices
from ..training.route_replay import route_bytes
from ..training.sharding import block_classes, embedding_group
from ..training.vision import require_whole_rows

logger = get_logger(__name__)

_PROBE = "holdfast_plan"
"""Name of an attention in transformers that computes nothing and keeps what flash attention keeps.
"""
_MOMENT_BYTES = {"adam": 8, "adam_bf16": 4, "adam8bit": 2 + 8 / BLOCK, "muon": 8, "sgd": 4}
"""Bytes of optimizer state per trained parameter. SGD has none without momentum, and Muon 4 for
matrices.
"""
UNCOUNTED = "activations of the vision tower are not counted"
"""True of every plan with ``train_vision``, because the tower's forward depends on the sizes of
images.
"""
_attended: ContextVar[Callable[[str, Tensor], None]] = ContextVar("attended")
"""Called with ``results`` or ``keys`` and each result of an attention, its keys and its values."""


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP2 gathers together (a block, the embedding, or the rest), and what they
    keep.

    Attributes:
        dense, experts: elements of the parameters, which several ranks can share in different ways.
        dense_bytes, expert_bytes: the same in bytes, as they are stored.
        trained: elements of the trained dense parameters.
        trained_experts: elements of the trained experts.
        matrices: elements of the trained matrices that `Muon` updates.
        largest: elements of the largest trained parameter.
        kept: bytes per token that the backward needs and that every rank of a tensor-parallel group
            has.
        kept_in_parts: bytes per token that these ranks share.
        results, results_in_parts: the same for what ``gradient_checkpointing: selective`` keeps.
        keys: bytes per token of keys and values, which these ranks share.
    """

    dense: int = 0
    experts: int = 0
    dense_bytes: int = 0
    expert_bytes: int = 0
    trained: int = 0
    trained_experts: int = 0
    matrices: int = 0
    largest: int = 0
    kept: float = 0.0
    kept_in_parts: float = 0.0
    results: float = 0.0
    results_in_parts: float = 0.0
    keys: float = 0.0


@dataclass(frozen=True)
class AnswerGroup:
    """Tokens of a prompt, and of each of ``size`` answers to it, for ``enable_tree_training``."""

    prompt: int
    answer: int
    size: int

    @property
    def row_tokens(self) -> int:
        """Tokens of a row with one group. The last prompt token is there for each answer."""
        return self.prompt - 1 + self.size * (self.answer + 1)

    @property
    def factor(self) -> float:
        """Tokens of whole sequences for each token of a row."""
        return self.size * (self.prompt + self.answer) / self.row_tokens

    @property
    def copied_keys(self) -> float:
        """Copies of keys of the prompt in front of answers, for each token of a row."""
        return self.size * (self.prompt - 1) / self.row_tokens


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model, before it is spread over ranks. The result of `measure_model`.

    Attributes:
        embedding: the `embedding_group`. Without one it is empty, and the embedding is in ``rest``.
        route_bytes: bytes of ``routed_experts`` for each token.
    """

    blocks: tuple[Unit, ...]
    embedding: Unit
    rest: Unit
    hidden_size: int
    vocab_size: int
    key_value_heads: int
    route_bytes: int

    @property
    def units(self) -> tuple[Unit, ...]:
        """All parameters."""
        return (*self.blocks, self.embedding, self.rest)

    @property
    def n_parameters(self) -> int:
        """Number of parameters."""
        return sum(unit.dense + unit.experts for unit in self.units)

    @property
    def n_trained(self) -> int:
        """Number of trained parameters."""
        return sum(unit.trained + unit.trained_experts for unit in self.units)

    @property
    def n_in_matrices(self) -> int:
        """Number of trained parameters in matrices that `Muon` updates."""
        return sum(unit.matrices for unit in self.blocks)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, on its device at the peak of a training step, and in host memory. Shards
    are taken to be even.

    Attributes:
        weights: shards of the parameters, float32 if trained, else in their dtype.
        gradients: shards of the gradients, or with ``gradient_sync: last`` the whole sum of a step.
        moments: shards of the optimizer's state, or of the block that ``optimizer.offload`` has
            brought. In the step also what an update takes.
        gathered: parameters that FSDP2 has gathered at a time, and the gradients that it is
            reducing.
        activations: what the backward of a micro-batch needs.
        head: logits of a chunk with their gradient, and the gradient of the last hidden states.
        on_host: state that ``optimizer.offload`` or ``fsdp.offload_params`` keeps in host memory.
        staged: copies in host memory that snapshots are written from.
    """

    weights: int
    gradients: int
    moments: int
    gathered: int
    activations: int
    head: int
    on_host: int
    staged: int

    @property
    def on_device(self) -> dict[str, int]:
        """Bytes of each part on the device, by name."""
        return {
            name: n_bytes
            for name, n_bytes in asdict(self).items()
            if name not in ("on_host", "staged")
        }

    @property
    def peak(self) -> int:
        """The sum of all parts on the device."""
        return sum(self.on_device.values())


def measure_model(config: TrainEngineConfig, tokens: int) -> ModelSizes:
    """Build the model of ``config.path``, a local folder, on fake tensors, and run it on ``tokens``
    tokens.

    Takes about a second, and reads no weights.

    Raises:
        ConfigError: see `build_on_meta`. Or the forward of this architecture depends on values.
    """
    with without_memory():
        model = build_on_meta(replace(config, gradient_checkpointing=False))
        dtype = COMPUTE_DTYPES[config.dtype]
        blocks = block_classes(model, config.fsdp.wrap_policy.transformer_layer_cls_to_wrap)
        cast_buffers(model, config)
        set_attention(model, _PROBE, instead_of="sdpa")
        if config.use_lora:
            dtypes = dict.fromkeys(dict(model.named_parameters()), dtype)
            add_adapters(model, config, config.path, dtypes)

        # Parameters are stored in their own dtypes, but compute in the one that FSDP2 gathers.
        stored = {id(param): param.element_size() for param in model.parameters()}
        for param in model.parameters():
            param.data = param.data.to(dtype)

        modules = [module for module in model.modules() if isinstance(module, blocks)]
        try:
            kept = _kept_bytes(model, modules, tokens)
        except UNUSABLE as error:
            raise ConfigError(
                f"the activations of {type(model).__name__} cannot be computed from its config "
                f"alone: {describe_unusable(error)}"
            ) from error

        # The rest comes after the blocks: it is what is left of the model's parameters.
        matrices = {id(param) for param in trained_matrices(modules)}
        seen = set[int]()
        units = [_unit(module, kept[module], stored, matrices, seen) for module in modules]
        embedding = Unit()
        own_group = embedding_group(model)
        if own_group is not None:
            embedding = _unit(own_group, {}, stored, matrices, seen)
        rest = _unit(model, kept[model], stored, matrices, seen)

        # Layers may differ in their numbers, and some versions of transformers have no such view.
        text = model.config.get_text_config(decoder=True)
        heads = [
            getattr(layer, "num_key_value_heads", None) or getattr(layer, "num_attention_heads", 1)
            for layer in getattr(text, "per_layer_config", [text])
        ]
        return ModelSizes(
            blocks=tuple(units),
            embedding=embedding,
            rest=rest,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            key_value_heads=gcd(*heads),
            route_bytes=route_bytes(model),
        )


class _Instant(NamedTuple):
    """Bytes on the device at one instant of a step. The fields are those of `MemoryPlan`."""

    gradients: int
    moments: int
    gathered: int = 0
    activations: float = 0.0
    head: int = 0


def plan_step(
    sizes: ModelSizes,
    config: TrainEngineConfig,
    strategy: ParallelStrategy,
    tokens: int,
    memory: int = 0,
    group: AnswerGroup | None = None,
) -> MemoryPlan:
    """Compute the memory of a step on micro-batches of ``tokens`` tokens (of all ranks that share a
    row).

    A loss with entropies, and any loss on a CPU, takes 32 MiB more in the head. With ``compile``
    blocks keep less than planned.

    Args:
        sizes: of `measure_model`, with the same settings of LoRA and dtype.
        config: the engine's settings.
        strategy: the mesh, for a number of ranks.
        tokens: in a micro-batch.
        memory: bytes of the GPU, on which ``gradient_sync: auto`` depends. 0: a CPU.
        group: of answers that share their prompt. None: no prompt is shared.

    Raises:
        ConfigError: see `require_whole_rows`.
    """
    assert config.optimizer is not None
    if config.train_vision:
        require_whole_rows(strategy)
    units = sizes.units
    tensor_ranks = strategy.tp_size
    expert_ranks = strategy.ep_size
    shards = strategy.world_size // strategy.replicate_size // tensor_ranks
    expert_shards = shards
    if expert_ranks > 1:  # tensor parallelism alone does not cut experts
        expert_shards *= tensor_ranks

    def sharded(dense: int, experts: int) -> int:
        """Elements that a rank stores."""
        return dense // (shards * tensor_ranks) + experts // expert_shards

    def whole(dense: int, experts: int) -> int:
        """Elements that a rank has while they are gathered."""
        return dense // tensor_ranks + experts // expert_ranks

    # State that lives from step to step.
    weights_stay = "weights" not in config.parts_on_host
    moments_stay = "optimizer" not in config.parts_on_host
    trained = sharded(
        sum(unit.trained for unit in units), sum(unit.trained_experts for unit in units)
    )
    weights = sharded(
        sum(unit.dense_bytes for unit in units), sum(unit.expert_bytes for unit in units)
    )
    moments = moment_bytes(config.optimizer, trained, sharded(sizes.n_in_matrices, 0))
    held_moments = moments * moments_stay

    # Gradients are float32 shards once they are reduced. `gradient_sync: last` sums them whole.
    item = COMPUTE_DTYPES[config.dtype].itemsize
    reduce_item = COMPUTE_DTYPES[config.grad_reduce_dtype].itemsize
    summed = reduce_item * sum(whole(unit.trained, unit.trained_experts) for unit in units)
    last = choose_last(config, summed, memory) and strategy.world_size > 1
    reduced_gradients = 4 * trained * weights_stay
    gradients = summed if last else reduced_gradients

    # Activations. Blocks that are checkpointed keep their inputs, and with `selective` also
    # some results.
    row_tokens = -(-tokens // strategy.cp_size)
    *kept_blocks, kept_rest = [
        row_tokens * (unit.kept + unit.kept_in_parts / tensor_ranks)
        for unit in (*sizes.blocks, sizes.rest)
    ]
    if group is not None:
        # Ranks that share a row have some heads each, for all of its tokens.
        n_copies = row_tokens * group.copied_keys / tensor_ranks
        for number, unit in enumerate(sizes.blocks):
            kept_blocks[number] += n_copies * unit.keys
    results = [0.0] * len(kept_blocks)
    if config.gradient_checkpointing == "selective":
        results = [
            row_tokens * (unit.results + unit.results_in_parts / tensor_ranks)
            for unit in sizes.blocks
        ]
    inputs = row_tokens * item * sizes.hidden_size
    kept_blocks, recomputed = _checkpointed(config, kept_blocks, results, inputs)
    kept = sum([*kept_blocks, kept_rest])

    # Logits of a chunk with the pass over them in float32, and the gradient of the hidden states.
    # After its pass a chunk adds a product to that gradient.
    words = sizes.vocab_size // tensor_ranks
    chunk = min(chunk_elements(words, config.logprobs_chunk_size), row_tokens * words)
    states = row_tokens * sizes.hidden_size
    logits = item * chunk + 4 * states + max(4 * min(PASS_ELEMENTS, chunk), item * states)

    # Parameters of two blocks are gathered at a time, this one and the next, or stay gathered.
    of_blocks = [item * whole(unit.dense, unit.experts) for unit in sizes.blocks]
    of_embedding = item * whole(sizes.embedding.dense, sizes.embedding.experts)
    of_rest = item * whole(sizes.rest.dense, sizes.rest.experts)
    if config.fsdp.reshard_after_forward:
        others_at_head = 0
        others_in_block = sum(sorted(of_blocks)[-2:])
    else:
        others_at_head = others_in_block = sum(of_blocks) + of_embedding

    # Forward of the embedding. Each gathered parameter is copied out of a buffer, which FSDP2 frees
    # one gather later.
    at_start = _Instant(
        gradients=gradients, moments=held_moments, gathered=2 * (of_embedding + of_rest)
    )

    # Backward of the head. The rest of the model is gathered, and its head has a gradient.
    trained_rest = whole(sizes.rest.trained, sizes.rest.trained_experts)
    trained_head = min(sizes.vocab_size * sizes.hidden_size // tensor_ranks, trained_rest)
    gathered_rest = of_rest + item * trained_head
    at_head = _Instant(
        gradients=gradients,
        moments=held_moments,
        gathered=gathered_rest + others_at_head,
        activations=kept,
        head=logits,
    )

    # Backward of a block. Gradients are in flight in both dtypes, or parameters are copied out of
    # a gather.
    largest_trained = max(
        (whole(unit.trained, unit.trained_experts) for unit in sizes.blocks), default=0
    )
    in_flight = max((item + reduce_item) * largest_trained, max(of_blocks, default=0))
    in_block = _Instant(
        gradients=gradients,
        moments=held_moments,
        gathered=gathered_rest + others_in_block + in_flight,
        activations=kept + recomputed,
    )

    # Backward of embedding and rest: the gradients of both are there, and one after the other is
    # reduced. Nothing else is left of the micro-batch.
    trained_embedding = whole(sizes.embedding.trained, 0)
    both = trained_rest + trained_embedding
    larger = max(trained_rest, trained_embedding)
    reducing = reduce_item * (both + larger)
    if not last:
        reducing = item * both + reduce_item * larger + reduce_item * larger // shards
    at_end = _Instant(
        gradients=reduced_gradients,
        moments=held_moments,
        gathered=of_rest + of_embedding + reducing,
    )

    # The optimizer's step. Moments in host memory come block by block, see `host_optimizer`.
    largest = max(unit.largest for unit in units) // shards
    present = trained
    in_step = moments
    if not moments_stay:
        present = min(trained, BLOCK_BYTES // 4 + largest)
        in_step = moments * present // max(1, trained) * weights_stay
    bucket = GPU_BUCKET if memory else CPU_BUCKET
    updated = min(present, max(bucket, largest))
    in_step += _update_bytes(config.optimizer, updated) * weights_stay
    at_update = _Instant(gradients=reduced_gradients, moments=in_step)

    # The worst instant decides.
    on_host = moments - held_moments
    if not weights_stay:
        on_host += weights + 4 * trained
    peak = max((at_start, at_head, in_block, at_end, at_update), key=sum)
    return MemoryPlan(
        weights=weights * weights_stay,
        gradients=peak.gradients,
        moments=peak.moments,
        gathered=peak.gathered,
        activations=int(peak.activations),
        head=peak.head,
        on_host=on_host,
        staged=4 * trained + moments,
    )


def _checkpointed(
    config: TrainEngineConfig, needed: list[float], results: list[float], inputs: int
) -> tuple[list[float], float]:
    """Bytes that each block keeps for its backward, and what a block that runs again has in
    addition.

    Args:
        needed: bytes that the backward of each block needs.
        results: the part of them that is kept in any case.
        inputs: bytes of the inputs of a block.
    """
    choice = config.gradient_checkpointing
    if not choice:
        return needed, 0.0
    every = 1
    if isinstance(choice, str) and choice != "selective":
        every = int(choice.removeprefix("every_"))
    numbers = range(0, len(needed), every)
    kept = list(needed)
    for number in numbers:
        kept[number] = inputs + results[number]

    # One block at a time runs again. The backward has freed all blocks after it by then.
    recomputed = 0.0
    for number in numbers:
        freed = sum(kept[number + 1 :])
        recomputed = max(recomputed, needed[number] - results[number] - freed)
    return kept, recomputed


def log_plan(config: TrainEngineConfig, strategy: ParallelStrategy, device: torch.device) -> None:
    """Log the planned peak of a step next to the memory of ``device``, a GPU. ``config.path`` is a
    local folder.

    Takes half a second for 28 layers, so an engine on CPUs goes without. Without
    ``mb_spec.max_tokens_per_mb`` nothing is known of activations, and nothing is logged.
    """
    tokens = config.mb_spec.max_tokens_per_mb
    if device.type != "cuda" or tokens is None or config.optimizer is None:
        return
    memory = torch.cuda.get_device_properties(device).total_memory
    try:
        plan = plan_step(measure_model(config, tokens), config, strategy, tokens, memory)
    except Exception as error:  # training needs no plan
        logger.debug("the memory of a step is not planned: %s", describe_unusable(error))
        return
    largest = sorted(plan.on_device.items(), key=lambda part: -part[1])[:3]
    parts = ", ".join(f"{name} {n_bytes / 1e9:.3g}" for name, n_bytes in largest)
    logger.info(
        "a step of %d tokens per micro-batch is planned to take %.3g GB on each rank (%s); the "
        "device has %.3g GB%s%s",
        tokens,
        plan.peak / 1e9,
        parts,
        memory / 1e9,
        f"; {UNCOUNTED}" * config.train_vision,
        "; holdfast plan says what to change" * (plan.peak > memory),
    )


def moment_bytes(config: OptimizerConfig, trained: int, in_matrices: int) -> int:
    """Bytes of optimizer state for a number of trained parameters, some of them in matrices that
    `Muon` updates.
    """
    if config.type == "sgd" and not config.momentum:
        return 0
    return int(_MOMENT_BYTES[config.type] * trained) - 4 * in_matrices * (config.type == "muon")


def _update_bytes(config: OptimizerConfig, together: int) -> int:
    """Bytes of the temporary tensors of an update, for the number of parameters that are updated
    together.
    """
    match config.type:
        case "adam_bf16":
            return 30 * together
        case "adam8bit":
            return 16 * together + 26 * min(together, PIECE)
        case _:
            return 0


def _unit(
    module: nn.Module,
    kept: dict[str, Any],
    stored: dict[int, int],
    matrices: set[int],
    seen: set[int],
) -> Unit:
    """Sum up the parameters of ``module`` that are not yet ``seen``."""
    sums = defaultdict[str, int](int)
    for name, param in module.named_parameters():
        if id(param) in seen:
            continue
        seen.add(id(param))

        # Experts are dealt to ranks, the others are cut.
        elements = param.numel()
        trained = elements * param.requires_grad
        n_bytes = elements * stored[id(param)]
        if ".experts." in f".{name}":
            sums["experts"] += elements
            sums["expert_bytes"] += n_bytes
            sums["trained_experts"] += trained
        else:
            sums["dense"] += elements
            sums["dense_bytes"] += n_bytes
            sums["trained"] += trained
        if id(param) in matrices:
            sums["matrices"] += elements
        sums["largest"] = max(sums["largest"], trained)
    return Unit(**sums, **kept)


def _kept_bytes(
    model: PreTrainedModel, blocks: list[nn.Module], tokens: int
) -> dict[nn.Module, dict[str, Any]]:
    """Bytes per token that each block and the rest of ``model`` keep, by fields of `Unit`."""
    width = model.config.get_text_config(decoder=True).hidden_size
    known = {storage_id(param) for param in model.parameters()}
    held = []  # so that no other storage gets the id of one
    kept: dict[nn.Module, dict[str, Any]] = {
        module: defaultdict(float) for module in (*blocks, model)
    }
    current: list[nn.Module] = [model]
    results: list[tuple[nn.Module, KeptResult]] = []

    def add(module: nn.Module, name: str, tensor: Tensor, n_bytes: int) -> None:
        if tensor.shape[-1:] != (width,):  # no hidden states, so tensor parallelism cuts it
            name += "_in_parts"
        kept[module][name] += n_bytes / tokens

    def keep(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in known:
            known.add(storage_id(tensor))
            held.append(tensor)
            add(current[-1], "kept", tensor, tensor.untyped_storage().nbytes())
        return tensor

    def add_result(result: KeptResult) -> None:
        results.append((current[-1], result))

    def add_of_attention(name: str, tensor: Tensor) -> None:
        if name == "results":
            add_result(KeptResult(tensor))
        else:
            kept[current[-1]][name] += tensor.nbytes / tokens

    def enter(block: nn.Module, _: Any) -> None:
        current.append(block)

    def leave(*_: Any) -> None:
        current.pop()

    for block in blocks:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave)

    # The head is left out, because it runs in chunks (see `plan_step`).
    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    token = _attended.set(add_of_attention)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        _Results(add_result),
    ):
        model.base_model(input_ids=ids, position_ids=ids.clone(), use_cache=False)
    _attended.reset(token)

    # Without the results that the model has written to.
    for module, result in results:
        for tensor in tensors_of(result.get()):
            add(module, "results", tensor, tensor.nbytes)
    return kept


class _Results(TorchDispatchMode):
    """Reports the results of operators that ``gradient_checkpointing: selective`` keeps."""

    def __init__(self, add: Callable[[KeptResult], None]) -> None:
        super().__init__()
        self._add = add
        self._memory = KeptMemory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_grouped_mm" in func.name() and args[0].dtype != torch.bfloat16:
            # The product of experts. Torch has its fake results in bfloat16 alone.
            out = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        kept = self._memory.note(func, out)
        if kept is not None:
            self._add(kept)
        return out


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        note = _attended.get()
        for result in (out, sums):
            note("results", result)
        for seen in (key, value):
            note("keys", seen)
        ctx.save_for_backward(query, key, value, out, sums)
        return out


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, None]:
    return _FlashAttention.apply(query, key, value).transpose(1, 2), None  # type: ignore[union-attr]


def _no_mask(**_: Any) -> None:
    return None


AttentionInterface.register(_PROBE, _attend)
AttentionMaskInterface.register(_PROBE, _no_mask)
