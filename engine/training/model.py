"""Build a transformers model on the meta device, in the dtypes that transformers would compute
with.

A 70B model must never exist whole on any rank, so the model is built without memory. Then it is
sharded (`sharding`), given memory for this rank's shard (`weights`) and filled, from a Hugging Face
folder (`hf.load`) or from a seed.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from ...utils.compat.torch_private import Dropout, buffers_of, is_persistent, n_writes
from ...utils.compat.transformers_private import float32_patterns, has_head
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from ..config import TrainEngineConfig
from ..model.model_folder import require_model_folder
from .checkpointing import checkpoint_activations
from .rotary import fix_frequencies
from .value_model import body_name, build_value_model, value_model_class
from .vision import Vision, vision_tower

logger = get_logger(__name__)

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UNUSABLE = (
    *(
        OSError,
        ImportError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
    ),
    StrictDataclassError,
)
"""Errors of transformers and torch for a ``config.json`` that describes no model. They do not check
it first.
"""


def build_on_meta(config: TrainEngineConfig) -> PreTrainedModel:
    """Build the model of ``config.path``, a local folder, in float32 without memory, with a
    language-model or value head.

    Raises:
        ConfigError: ``path`` has no ``config.json`` or contains untrusted code, or transformers has
            no such head or attention for the architecture. Or see `fix_frequencies`,
            `checkpoint_activations` and `Vision`.
    """
    model = _construct(config, torch.float32)
    if config.train_vision:
        Vision(model)  # raises if its images are not understood
        if config.freeze_vision_tower:
            model.get_submodule(vision_tower(model)).requires_grad_(False)
    if config.disable_dropout:
        _disable_dropout(model)
    checkpoint_activations(model, config.gradient_checkpointing)
    return model


def _construct(config: TrainEngineConfig, dtype: torch.dtype) -> PreTrainedModel:
    factory, hf_config = _factory(config), read_config(config)
    if config.is_critic:
        for part in (hf_config, hf_config.get_text_config()):
            part.num_labels = 1
    options = {} if config.attn_impl is None else {"attn_implementation": config.attn_impl}
    try:
        with torch.device("meta"):
            if _is_made(factory, hf_config) and not (config.is_critic and config.train_vision):
                model = factory.from_config(
                    hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code, **options
                )
            else:
                model = build_value_model(hf_config, dtype, _body_factory(config), **options)
    except UNUSABLE as error:
        attention = (
            "" if config.attn_impl is None else f" with config key 'attn_impl' {config.attn_impl!r}"
        )
        raise ConfigError(
            f"config key 'path': transformers cannot build the {hf_config.model_type} model of "
            f"{config.path}/config.json{attention}: {describe_unusable(error)}"
        ) from error
    fix_frequencies(model, config.max_model_len)
    return model


def _factory(config: TrainEngineConfig) -> type[Any]:
    # transformers' models for token classification see no images
    return (
        AutoModelForTokenClassification
        if config.is_critic and not config.train_vision
        else _body_factory(config)
    )


def _body_factory(config: TrainEngineConfig) -> type[Any]:
    return AutoModelForImageTextToText if config.train_vision else AutoModelForCausalLM


def read_config(config: TrainEngineConfig) -> PretrainedConfig:
    """Read the ``config.json`` at ``config.path``.

    Raises:
        ConfigError: it cannot be read, or transformers has no model with the required head for it.
    """
    folder, factory = require_model_folder(config.path), _factory(config)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except UNUSABLE as error:
        reason = describe_unusable(error)
        if not config.trust_remote_code and "trust_remote_code" in reason:
            reason = "the folder has Python code of its own, which only config key 'trust_remote_code' true allows to run"
        raise ConfigError(
            f"config key 'path': {folder / 'config.json'} cannot be used: {reason}"
        ) from error
    if config.train_vision:
        return _require_vision(hf_config, config)
    if _is_made(factory, hf_config) or (
        config.is_critic and value_model_class(hf_config) is not None
    ):
        return hf_config
    if config.is_critic:
        raise ConfigError(
            f"config key 'is_critic' is true, but of {hf_config.model_type} transformers has "
            "neither a model for token classification, which a value head takes, nor a causal "
            "language model on whose body one could be put; set it to false, or 'path' "
            f"({folder}) to another model"
        )
    raise ConfigError(
        f"config key 'path': {folder} holds a {hf_config.model_type} model, for which "
        "transformers has no causal language model; name another "
        f"folder{', or set train_vision to true' if _sees(hf_config) else ''}"
    )


def _require_vision(hf_config: PretrainedConfig, config: TrainEngineConfig) -> PretrainedConfig:
    if not _sees(hf_config):
        raise ConfigError(
            f"config key 'train_vision' is true, but {config.path} holds a {hf_config.model_type} "
            "model, which has no 'vision_config', or which transformers does not build for images "
            "and text; set it to false"
        )
    if config.is_critic and value_model_class(hf_config, AutoModelForImageTextToText) is None:
        raise ConfigError(
            "config keys 'train_vision' and 'is_critic' are true, but no value head can be put on "
            f"a {hf_config.model_type} model; set one to false"
        )
    return hf_config


def _sees(hf_config: PretrainedConfig) -> bool:
    return hasattr(hf_config, "vision_config") and has_head(AutoModelForImageTextToText, hf_config)


def _is_made(factory: type[Any], hf_config: PretrainedConfig) -> bool:
    """Whether an auto class, or code in the folder, has a model for the config."""
    return has_head(factory, hf_config) or factory.__name__ in (
        getattr(hf_config, "auto_map", None) or {}
    )


def describe_unusable(error: Exception) -> str:
    """Format the error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def build_causal_on_meta(config: TrainEngineConfig) -> PreTrainedModel | None:
    """Build the causal language model of a critic's ``config.path``. None if transformers has none
    for the architecture.
    """
    causal = copy.copy(config)
    causal.is_critic = (
        False  # not with replace(), because configs of critics and reward models refuse it
    )
    try:
        return _construct(causal, torch.float32)
    except ConfigError:
        return None


def cast_buffers(model: PreTrainedModel, config: TrainEngineConfig) -> None:
    """Compute with buffers in the dtype that transformers gives them in a model of dtype
    ``config.dtype``.

    Call it before sharding. Non-persistent buffers get that dtype. Persistent ones keep theirs,
    also in checkpoints and exports, and are cast for each forward of their module (see
    `casting_class`).
    """
    dtype = COMPUTE_DTYPES[config.dtype]
    if dtype == model.dtype:
        return
    reference = _construct(config, dtype)
    kept = [re.compile(pattern) for pattern in float32_patterns(reference, dtype)]
    strict = [
        name
        for name, _ in reference.named_parameters()
        if any(pattern.search(name) for pattern in kept)
    ]
    if strict:
        logger.warning(
            "transformers keeps %d parameters of %s in float32, %s for one; they are computed with in %s here",
            len(strict), config.path, strict[0], config.dtype,
        )  # fmt: skip
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
    """Set every dropout probability to 0. ``model.config``, which is exported, keeps its values.

    Some models read probabilities from their config in the forward, so submodules get copies with
    zeros.
    """
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)  # fills the memo: id of each nested config -> its copy
    for copied in copies.values():
        if isinstance(copied, PretrainedConfig):
            _zero_dropout_attributes(copied)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        if module is not model and isinstance(
            config := getattr(module, "config", None), PretrainedConfig
        ):
            module.config = copies.get(id(config), config)
        _zero_dropout_attributes(module)


def _zero_dropout_attributes(thing: object) -> None:
    for name in _probabilities(thing):
        setattr(thing, name, 0.0)


def _probabilities(thing: object) -> dict[str, float]:
    """Attributes with a dropout probability above 0."""
    attributes = vars(thing).items()
    return {
        name: value
        for name, value in attributes
        if "drop" in name and isinstance(value, float) and value > 0
    }


def refuse_dropout(model: PreTrainedModel) -> None:
    """Raise ConfigError if a dropout probability is above 0. Ranks with the same data would not
    drop what one rank drops.
    """
    for module in model.modules():
        found = _probabilities(module)
        if isinstance(module, Dropout) and module.p > 0:
            found["p"] = module.p
        if isinstance(config := getattr(module, "config", None), PretrainedConfig):
            found |= _probabilities(config)
        if found:
            raise ConfigError(
                f"config key 'disable_dropout' is false, and {type(module).__name__} has {found}, "
                "but ranks share their data (context_parallel_size or tensor_parallel_size is "
                "above 1); set it to true"
            )


def untrained_by_text(model: PreTrainedModel) -> list[str]:
    """Names of the outermost modules that text does not reach: vision and audio towers, and their
    projections.

    Everything next to the language model in a multimodal body is taken to be for other inputs.
    """
    text = model.config.get_text_config(decoder=True)
    named = dict(model.named_modules())
    language_models = [
        name for name, module in named.items() if name and _is_model_of(module, text)
    ]
    if text is model.config or not language_models:
        return []
    body, _, last = min(language_models, key=len).rpartition(".")
    if named[body] is model:  # its children may be heads, too
        children = [
            (key, child)
            for key, child in model.named_children()
            if isinstance(child, PreTrainedModel)
        ]
    else:
        children = list(named[body].named_children())
    others = [
        (key, child)
        for key, child in children
        if key != last and any(True for _ in child.parameters())
    ]
    return [f"{body}.{key}" if body else key for key, _ in others]


def _is_model_of(module: nn.Module, config: PretrainedConfig) -> bool:
    return isinstance(module, PreTrainedModel) and type(module.config) is type(config)


def describe_parameters(model: PreTrainedModel, sees: bool) -> str:
    """Describe how many parameters there are, how many are trained, and which of these text gives
    no gradient.

    If the model ``sees`` images: how many each part has, and whether they are trained.
    """
    if sees:
        return _describe_parts(model)

    def count(module: nn.Module) -> int:
        return sum(param.numel() for param in module.parameters() if param.requires_grad)

    n_params, towers = sum(param.numel() for param in model.parameters()), untrained_by_text(model)
    n_untouched = sum(count(model.get_submodule(name)) for name in towers)
    text = f"{n_params} parameters, {count(model) - n_untouched} of them trained"
    if n_untouched:
        text += f"; text gives no gradient to the {n_untouched} of {', '.join(towers)}, which take memory all the same"
    return text


def _describe_parts(model: PreTrainedModel) -> str:
    body = body_name(model)
    parts = [(f"{body}.{name}", part) for name, part in model.get_submodule(body).named_children()]
    parts += [(name, part) for name, part in model.named_children() if name != body]
    described = []
    for name, part in parts:
        numels = {True: 0, False: 0}
        for param in part.parameters():
            numels[param.requires_grad] += param.numel()
        described += [f"{name} {numels[True]} trained"] * (numels[True] > 0)
        described += [f"{name} {numels[False]} frozen"] * (numels[False] > 0)
    return (
        f"{sum(param.numel() for param in model.parameters())} parameters: {', '.join(described)}"
    )


def casting_class(cls: type[nn.Module], dtypes: Mapping[str, torch.dtype]) -> type[nn.Module]:
    """Subclass of ``cls`` whose ``forward`` sees the named buffers in these dtypes.

    The cast replaces the buffer only while the module's own ``forward`` runs, also when a
    checkpointed activation is recomputed. Values that ``forward`` writes are cast back. All other
    code sees the stored tensor, so its writes are kept, saved and loaded. FSDP2 does the same for
    parameters.
    """

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _cast(module, dtypes):
            return cls.forward(module, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@contextmanager
def _cast(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    buffers = buffers_of(module)
    stored = {name: buffer for name in dtypes if (buffer := buffers[name]) is not None}
    casts = {name: buffer.to(dtypes[name], copy=True) for name, buffer in stored.items()}
    buffers.update(casts)
    try:
        yield
    finally:
        for name, buffer in stored.items():
            buffers[name] = _after(buffer, casts[name], buffers[name])


@torch.no_grad()
def _after(
    stored: torch.Tensor, cast: torch.Tensor, found: torch.Tensor | None
) -> torch.Tensor | None:
    if found is not cast:
        return None if found is None else found.to(stored.dtype)
    if n_writes(cast):
        stored.copy_(cast)
    return stored


def n_known_tokens(model: PreTrainedModel) -> int | None:
    """Number of rows of the input embedding, on all ranks together. None if the model has no usual
    one.
    """
    try:
        weight = getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:  # transformers does not find it
        return None
    return len(weight) if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
