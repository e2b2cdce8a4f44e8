"""Build a transformers model on the meta device, and fill it shard by shard.

A 70B model must never exist whole on any rank, so the model is built without memory, sharded, given memory for this
rank's shard only, and then filled: from a Hugging Face folder (`hf.load`), or from a seed. A seeded draw goes block
by block over a second, memory-less skeleton: one block at a time exists on the CPU, and the values depend on the seed
and the block's name alone, never on the number of ranks.

Buffers that no checkpoint holds (rotary frequencies) are garbage after ``to_empty``; they are computed again by the
model's own ``_init_weights``, once over zeros and once over ones: a buffer that the model leaves alone differs, and is
an error rather than a silent wrong answer.
"""

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ...utils.compat.torch_private import Dropout, buffers_of, is_persistent
from ...utils.compat.transformers_private import float32_patterns, has_head, initialize_module, unsplit_classes
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..config import TrainEngineConfig
from ..model.model_folder import require_model_folder
from .buffer_casts import casting_class
from .rotary import fix_frequencies
from .unsharded import unsharded_class
from .value_model import build_value_model, value_model_class

logger = get_logger(__name__)

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UNUSABLE = (
    *(OSError, ImportError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError),
    StrictDataclassError,
)
"""What transformers and torch raise for a ``config.json`` that describes no model; they do not check it first."""


def build_on_meta(config: TrainEngineConfig) -> PreTrainedModel:
    """The model of ``config.path``, a local folder, in float32 without memory, with a language-model or a value head.

    Raises:
        ConfigError: ``path`` is no folder with a ``config.json``, has code of its own that is not trusted, or its
            architecture has no such head or no such attention in transformers; or see `fix_frequencies`.
    """
    model = _construct(config, torch.float32)
    if config.disable_dropout:
        _disable_dropout(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _construct(config: TrainEngineConfig, dtype: torch.dtype) -> PreTrainedModel:
    factory, hf_config = _factory(config), read_config(config)
    if config.is_critic:
        for part in (hf_config, hf_config.get_text_config()):
            part.num_labels = 1
    options = {} if config.attn_impl is None else {"attn_implementation": config.attn_impl}
    try:
        with torch.device("meta"):
            if _is_made(factory, hf_config):
                model = factory.from_config(
                    hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code, **options
                )
            else:
                model = build_value_model(hf_config, dtype, **options)
    except UNUSABLE as error:
        attention = "" if config.attn_impl is None else f" with config key 'attn_impl' {config.attn_impl!r}"
        raise ConfigError(
            f"config key 'path': transformers cannot build the {hf_config.model_type} model of "
            f"{config.path}/config.json{attention}: {describe_unusable(error)}"
        ) from error
    fix_frequencies(model, config.max_model_len)
    return model


def _factory(config: TrainEngineConfig) -> type[Any]:
    return AutoModelForTokenClassification if config.is_critic else AutoModelForCausalLM


def read_config(config: TrainEngineConfig) -> PretrainedConfig:
    """What transformers reads of the ``config.json`` at ``config.path``.

    Raises:
        ConfigError: it cannot be read, or transformers has no model with the head that is wanted for it.
    """
    folder, factory = require_model_folder(config.path), _factory(config)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except UNUSABLE as error:
        reason = describe_unusable(error)
        if not config.trust_remote_code and "trust_remote_code" in reason:
            reason = (
                "the folder has Python code of its own, which only config key 'trust_remote_code' true allows to run"
            )
        raise ConfigError(f"config key 'path': {folder / 'config.json'} cannot be used: {reason}") from error
    if _is_made(factory, hf_config) or (config.is_critic and value_model_class(hf_config) is not None):
        return hf_config
    if config.is_critic:
        raise ConfigError(
            f"config key 'is_critic' is true, but of {hf_config.model_type} transformers has neither a model for token "
            "classification, which a value head takes, nor a causal language model on whose body one could be put; set "
            f"it to false, or 'path' ({folder}) to another model"
        )
    raise ConfigError(
        f"config key 'path': {folder} holds a {hf_config.model_type} model, for which transformers has no causal "
        "language model; name another folder"
    )


def _is_made(factory: type[Any], hf_config: PretrainedConfig) -> bool:
    """Whether an auto class, or the folder's own code, has a model for the config."""
    return has_head(factory, hf_config) or factory.__name__ in (getattr(hf_config, "auto_map", None) or {})


def describe_unusable(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def build_causal_on_meta(config: TrainEngineConfig) -> PreTrainedModel | None:
    """The causal language model of a critic's ``config.path``; None if transformers has none of its architecture."""
    try:
        return _construct(replace(config, is_critic=False), torch.float32)
    except ConfigError:
        return None


def cast_buffers(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Have buffers computed with in the dtype that transformers gives them in a model of dtype ``config.dtype``.

    Those that no checkpoint holds become of that dtype. The others stay as they are, in checkpoints and exports too,
    and are cast for each forward of the module that has them (see `casting_class`).

    Args:
        model: on meta, not sharded yet, built from ``config``.
        config: of the engine.
    """
    dtype = COMPUTE_DTYPES[config.dtype]
    if dtype == model.dtype:
        return
    reference = _construct(config, dtype)
    kept = [re.compile(pattern) for pattern in float32_patterns(reference, dtype)]
    strict = [name for name, _ in reference.named_parameters() if any(pattern.search(name) for pattern in kept)]
    if strict:
        logger.warning(
            "transformers keeps %d parameters of %s in float32, %s for one; they are computed with in %s here",
            len(strict),
            config.path,
            strict[0],
            config.dtype,
        )
    classes: dict[Any, type[nn.Module]] = {}
    for prefix, module in model.named_modules():
        given, cast = buffers_of(reference.get_submodule(prefix)), dict[str, torch.dtype]()
        for name, buffer in buffers_of(module).items():
            other = given[name]
            if buffer is None or other is None or other.dtype == buffer.dtype:
                continue
            if not is_persistent(module, name):
                buffers_of(module)[name] = buffer.to(other.dtype)
            elif not any(pattern.search(f"{prefix}.{name}") for pattern in kept):
                cast[name] = other.dtype
        if cast:
            cls = type(module)
            casting = classes.setdefault((cls, *cast.items()), casting_class(cls, cast))
            module.__class__ = casting  # type: ignore[assignment]


def _disable_dropout(model: PreTrainedModel) -> None:
    """Zero every probability of the modules; ``model.config``, which is exported, keeps the author's numbers.

    Some models read probabilities from their config in the forward, so the modules below get zeroed copies of it.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)  # the memo: id of each config in it -> its copy
    for copied in copies.values():
        if isinstance(copied, PretrainedConfig):
            _zero_dropout_attributes(copied)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        if module is not model and isinstance(config := getattr(module, "config", None), PretrainedConfig):
            module.config = copies.get(id(config), config)
        _zero_dropout_attributes(module)


def _zero_dropout_attributes(thing: object) -> None:
    for name, value in vars(thing).items():
        if "drop" in name and isinstance(value, float):
            setattr(thing, name, 0.0)


def block_classes(model: PreTrainedModel, names: list[str] | None) -> tuple[type[nn.Module], ...]:
    """Classes of the repeated blocks: those named, or the ones transformers says not to split.

    Of the latter, those with a weight that is tied to one outside are left out: FSDP cannot shard it in two groups.

    Raises:
        ConfigError: a named class does not occur in the model.
    """
    wanted = set(names or unsplit_classes(model))
    found = {type(module).__name__: type(module) for module in model.modules()}
    if names and (unknown := sorted(wanted - found.keys())):
        raise ConfigError(
            f"config key 'fsdp.wrap_policy.transformer_layer_cls_to_wrap' names {unknown[0]!r}, which "
            f"{type(model).__name__} does not contain; it contains {', '.join(sorted(found))}"
        )
    uses = Counter(id(param) for _, param in model.named_parameters(remove_duplicate=False))
    if not names:
        for module in model.modules():
            if any(uses[id(param)] > 1 for param in module.parameters()):
                wanted.discard(type(module).__name__)
    return tuple(found[name] for name in sorted(wanted & found.keys()))


def untrained_by_text(model: PreTrainedModel) -> list[str]:
    """Names of the outermost modules that no text reaches: vision and audio towers, and what maps them to tokens.

    Found from the place of the language model: everything next to it in a multimodal body is for other inputs.
    """
    text = model.config.get_text_config(decoder=True)
    named = dict(model.named_modules())
    language_models = [name for name, module in named.items() if name and _is_model_of(module, text)]
    if text is model.config or not language_models:
        return []
    body, _, last = min(language_models, key=len).rpartition(".")
    if named[body] is model:  # its children may be heads, too
        children = [(key, child) for key, child in model.named_children() if isinstance(child, PreTrainedModel)]
    else:
        children = list(named[body].named_children())
    others = [(key, child) for key, child in children if key != last and any(True for _ in child.parameters())]
    return [f"{body}.{key}" if body else key for key, _ in others]


def _is_model_of(module: nn.Module, config: PretrainedConfig) -> bool:
    return isinstance(module, PreTrainedModel) and type(module.config) is type(config)


def describe_parameters(model: PreTrainedModel) -> str:
    """How many parameters there are, how many are trained, and which of these get no gradient from text."""

    def count(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters() if param.requires_grad)

    n_params, towers = sum(param.numel() for param in model.parameters()), untrained_by_text(model)
    n_untouched = sum(count(model.get_submodule(name)) for name in towers)
    text = f"{n_params} parameters, {count(model) - n_untouched} of them trained"
    if n_untouched:
        text += f"; text gives no gradient to the {n_untouched} of {', '.join(towers)}, which take memory all the same"
    return text


def give_memory(model: PreTrainedModel, skeleton: PreTrainedModel, device: torch.device) -> list[str]:
    """Allocate this rank's shard (uninitialised) and compute every buffer that the model's own code can compute.

    Args:
        model: on meta, already sharded.
        skeleton: the same model on meta, not sharded; its buffers are used up by this.
        device: where the shard goes.

    Returns:
        Names of the persistent buffers that nothing computed, which only a checkpoint can fill; they are NaN or 0.

    Raises:
        ConfigError: nothing computes a buffer that no checkpoint holds.
    """
    model.to_empty(device=device)
    model.tie_weights()  # _apply may have untied what is tied
    first, second = (_initialized_buffers(skeleton, garbage) for garbage in (0, 1))
    unfilled = []
    for name, module in model.named_modules():
        for key, buffer in buffers_of(module).items():
            full = f"{name}.{key}" if name else key
            if buffer is None:
                continue
            if torch.equal(first[full], second[full]):
                buffer.copy_(first[full])
            elif not is_persistent(module, key):
                raise ConfigError(
                    f"{unsharded_class(module).__name__} at {name!r} does not compute its buffer {key!r} in "
                    "_init_weights, so the model cannot be built on the meta device; upgrade transformers or report "
                    "the architecture"
                )
            else:
                buffer.fill_(float("nan") if buffer.is_floating_point() else 0)
                unfilled.append(full)
    return unfilled


@torch.no_grad()
def _initialized_buffers(skeleton: PreTrainedModel, garbage: int) -> dict[str, torch.Tensor]:
    """The buffers, on the CPU, after all modules have initialised themselves over ``garbage``; parameters stay on meta.

    Modules may compute buffers of those inside them (Falcon-H1), so each begins where the ones inside have ended.
    """
    for module in skeleton.modules():
        for key, buffer in buffers_of(module).items():
            if buffer is not None:
                buffers_of(module)[key] = torch.full(buffer.shape, garbage, dtype=buffer.dtype, device="cpu")
    with torch.random.fork_rng(devices=[]):
        for module, initialize in reversed(_initializers(skeleton)):
            initialize(module)
    return dict(skeleton.named_buffers(remove_duplicate=False))


def _initializers(model: PreTrainedModel) -> list[tuple[nn.Module, Callable[[nn.Module], None]]]:
    """Every module, parents before children, with the ``_init_weights`` of the model that it belongs to.

    As in transformers, that is the innermost model around it (a vision tower initialises its own modules).
    """
    found: list[tuple[nn.Module, Callable[[nn.Module], None]]] = []

    def walk(module: nn.Module, initialize: Callable[[nn.Module], None]) -> None:
        if isinstance(module, PreTrainedModel):
            initialize = partial(initialize_module, module)
        found.append((module, initialize))
        for child in module.children():
            walk(child, initialize)

    walk(model, partial(initialize_module, model))
    return found


@torch.no_grad()
def draw_weights(
    model: PreTrainedModel, skeleton: PreTrainedModel, seed: int, blocks: tuple[type[nn.Module], ...]
) -> list[str]:
    """Draw every parameter as transformers would, one block at a time; the same values at every world size.

    Args:
        model: sharded, with memory; each rank keeps its own rows.
        skeleton: the same model on meta, not sharded; used up by this.
        seed: together with a block's name, what the block is drawn from.
        blocks: the classes that are drawn whole (some models scale a block's inner weights).

    Returns:
        Names of the parameters that nothing drew, which only a checkpoint can fill; they hold NaN.
    """
    initializers, undrawn = dict(_initializers(skeleton)), []
    for name, unit in _draw_units(skeleton, blocks):
        unit.to_empty(device="cpu")
        for drawn in unit.parameters():
            drawn.fill_(float("nan"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}:{name}".encode()) >> 1)
            for module in reversed(list(unit.modules())):  # children before parents, as transformers does
                initializers[module](module)
        for key, drawn in unit.named_parameters(prefix=name):
            if drawn.isnan().any():
                undrawn.append(key)
            keep_own_shard(model.get_parameter(key), drawn)
        unit.to_empty(device="meta")
    return undrawn


def _draw_units(skeleton: nn.Module, blocks: tuple[type[nn.Module], ...]) -> list[tuple[str, nn.Module]]:
    """The outermost blocks, and the outermost modules elsewhere that own parameters: together, every parameter."""
    units: list[tuple[str, nn.Module]] = []
    for name, module in skeleton.named_modules():
        inside = any(f"{name}.".startswith(f"{unit}." if unit else "") for unit, _ in units)
        if not inside and (isinstance(module, blocks) or next(module.parameters(recurse=False), None) is not None):
            units.append((name, module))
    return units


@torch.no_grad()
def keep_own_shard(param: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of ``full`` (the whole tensor, equal on all ranks) into ``param``; no communication."""
    if isinstance(param, DTensor):
        full = distribute_tensor(
            full.to(param.device), param.device_mesh, param.placements, src_data_rank=None
        ).to_local()
        param = param.to_local()
    param.copy_(full)
