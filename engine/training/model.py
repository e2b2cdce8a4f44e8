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
from torch import Tensor, nn
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
from ..model_folder import require_model_folder
from .checkpointing import checkpoint_activations
from .rotary import fix_frequencies
from .value_model import body_name, build_value_model, value_model_class
from .vision import Vision, vision_tower

logger = get_logger(__name__)

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UNUSABLE = (
    OSError,
    ImportError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
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
    # Nothing of this needs memory: the model is on meta.
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
    hf_config = read_config(config)
    if config.is_critic:
        for part in (hf_config, hf_config.get_text_config()):
            part.num_labels = 1
    options: dict[str, Any] = {}
    if config.attn_impl is not None:
        options["attn_implementation"] = config.attn_impl

    # transformers' own class if there is one, else a value head on the body.
    factory = _factory(config)
    sees_values = config.is_critic and config.train_vision
    try:
        with torch.device("meta"):
            if _is_made(factory, hf_config) and not sees_values:
                model = factory.from_config(
                    hf_config,
                    dtype=dtype,
                    trust_remote_code=config.trust_remote_code,
                    **options,
                )
            else:
                model = build_value_model(hf_config, dtype, _body_factory(config), **options)
    except UNUSABLE as error:
        attention = ""
        if config.attn_impl is not None:
            attention = f" with config key 'attn_impl' {config.attn_impl!r}"
        raise ConfigError(
            f"config key 'path': transformers cannot build the {hf_config.model_type} model of "
            f"{config.path}/config.json{attention}: {describe_unusable(error)}"
        ) from error
    fix_frequencies(model, config.max_model_len)
    return model


def _factory(config: TrainEngineConfig) -> type[Any]:
    # transformers' models for token classification see no images.
    if config.is_critic and not config.train_vision:
        return AutoModelForTokenClassification
    return _body_factory(config)


def _body_factory(config: TrainEngineConfig) -> type[Any]:
    return AutoModelForImageTextToText if config.train_vision else AutoModelForCausalLM


def read_config(config: TrainEngineConfig) -> PretrainedConfig:
    """Read the ``config.json`` at ``config.path``.

    Raises:
        ConfigError: it cannot be read, or transformers has no model with the required head for it.
    """
    folder = require_model_folder(config.path)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    except UNUSABLE as error:
        reason = describe_unusable(error)
        if not config.trust_remote_code and "trust_remote_code" in reason:
            reason = (
                "the folder has Python code of its own, which only config key 'trust_remote_code' "
                "true allows to run"
            )
        raise ConfigError(
            f"config key 'path': {folder / 'config.json'} cannot be used: {reason}"
        ) from error
    if config.train_vision:
        return _require_vision(hf_config, config)
    if _is_made(_factory(config), hf_config):
        return hf_config

    # No class with the head. A value head may be put on the body.
    if not config.is_critic:
        other_way = ", or set train_vision to true" if _sees(hf_config) else ""
        raise ConfigError(
            f"config key 'path': {folder} holds a {hf_config.model_type} model, for which "
            f"transformers has no causal language model; name another folder{other_way}"
        )
    if value_model_class(hf_config) is None:
        raise ConfigError(
            f"config key 'is_critic' is true, but of {hf_config.model_type} transformers has "
            "neither a model for token classification, which a value head takes, nor a causal "
            "language model on whose body one could be put; set it to false, or 'path' "
            f"({folder}) to another model"
        )
    return hf_config


def _require_vision(
    hf_config: PretrainedConfig,
    config: TrainEngineConfig,
) -> PretrainedConfig:
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
    of_folder = getattr(hf_config, "auto_map", None) or {}
    return has_head(factory, hf_config) or factory.__name__ in of_folder


def describe_unusable(error: Exception) -> str:
    """Format the error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def build_causal_on_meta(config: TrainEngineConfig) -> PreTrainedModel | None:
    """Build the causal language model of a critic's ``config.path``. None if transformers has none
    for the architecture.
    """
    # Not with replace(), because configs of critics and reward models refuse it.
    causal = copy.copy(config)
    causal.is_critic = False
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
    patterns = [re.compile(pattern) for pattern in float32_patterns(reference, dtype)]

    def is_kept(name: str) -> bool:
        return any(pattern.search(name) for pattern in patterns)

    # Parameters are cast by FSDP, whatever transformers keeps.
    strict = [name for name, _ in reference.named_parameters() if is_kept(name)]
    if strict:
        logger.warning(
            "transformers keeps %d parameters of %s in float32, %s for one; they are computed with "
            "in %s here",
            len(strict),
            config.path,
            strict[0],
            config.dtype,
        )

    # Modules of one class that cast the same buffers share their subclass.
    classes: dict[Any, type[nn.Module]] = {}
    for prefix, module in model.named_modules():
        given = buffers_of(reference.get_submodule(prefix))
        cast: dict[str, torch.dtype] = {}
        for name, buffer in buffers_of(module).items():
            other = given[name]
            if buffer is None or other is None or other.dtype == buffer.dtype:
                continue
            # Buffers that no checkpoint has may change for good.
            if not is_persistent(module, name):
                buffers_of(module)[name] = buffer.to(other.dtype)
            elif not is_kept(f"{prefix}.{name}"):
                cast[name] = other.dtype
        if cast:
            cls = type(module)
            key = (cls, *cast.items())
            if key not in classes:
                classes[key] = casting_class(cls, cast)
            module.__class__ = classes[key]  # type: ignore[assignment]


def _disable_dropout(model: PreTrainedModel) -> None:
    """Set every dropout probability to 0. ``model.config``, which is exported, keeps its values.

    Some models read probabilities from their config in the forward, so submodules get copies with
    zeros.
    """
    # The memo of deepcopy has a copy for the id of each nested config.
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for copied in copies.values():
        if isinstance(copied, PretrainedConfig):
            _zero_dropout_attributes(copied)
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        config = getattr(module, "config", None)
        if module is not model and isinstance(config, PretrainedConfig):
            module.config = copies.get(id(config), config)
        _zero_dropout_attributes(module)


def _zero_dropout_attributes(thing: object) -> None:
    for name in _probabilities(thing):
        setattr(thing, name, 0.0)


def _probabilities(thing: object) -> dict[str, float]:
    """Attributes with a dropout probability above 0."""
    found = {}
    for name, value in vars(thing).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            found[name] = value
    return found


def refuse_dropout(model: PreTrainedModel) -> None:
    """Raise ConfigError if a dropout probability is above 0. Ranks with the same data would not
    drop what one rank drops.
    """
    for module in model.modules():
        found = _probabilities(module)
        if isinstance(module, Dropout) and module.p > 0:
            found["p"] = module.p
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
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
    # Models whose config is the text part of the whole config.
    text = model.config.get_text_config(decoder=True)
    named = dict(model.named_modules())
    language_models = []
    for name, module in named.items():
        if name and isinstance(module, PreTrainedModel) and type(module.config) is type(text):
            language_models.append(name)
    if text is model.config or not language_models:
        return []

    # All that is next to the outermost language model. The model's own children may be heads, too.
    body, _, last = min(language_models, key=len).rpartition(".")
    others = []
    for key, child in named[body].named_children():
        may_be_head = named[body] is model and not isinstance(child, PreTrainedModel)
        has_parameters = any(True for _ in child.parameters())
        if key != last and has_parameters and not may_be_head:
            others.append(f"{body}.{key}" if body else key)
    return others


def describe_parameters(model: PreTrainedModel, sees: bool) -> str:
    """Describe how many parameters there are, how many are trained, and which of these text gives
    no gradient.

    If the model ``sees`` images: how many each part has, and whether they are trained.
    """
    if sees:
        return _describe_parts(model)
    n_params = sum(param.numel() for param in model.parameters())
    n_trained = _n_trained(model)

    # Vision and audio towers may get gradients, but not from text.
    towers = untrained_by_text(model)
    n_untouched = sum(_n_trained(model.get_submodule(name)) for name in towers)
    text = f"{n_params} parameters, {n_trained - n_untouched} of them trained"
    if n_untouched:
        text += (
            f"; text gives no gradient to the {n_untouched} of {', '.join(towers)}, which take "
            "memory all the same"
        )
    return text


def _n_trained(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def _describe_parts(model: PreTrainedModel) -> str:
    # The children of the body, and its neighbours.
    body = body_name(model)
    parts = []
    for name, part in model.get_submodule(body).named_children():
        parts.append((f"{body}.{name}", part))
    for name, part in model.named_children():
        if name != body:
            parts.append((name, part))

    described = []
    for name, part in parts:
        n_params = sum(param.numel() for param in part.parameters())
        n_trained = _n_trained(part)
        if n_trained:
            described.append(f"{name} {n_trained} trained")
        if n_params > n_trained:
            described.append(f"{name} {n_params - n_trained} frozen")
    total = sum(param.numel() for param in model.parameters())
    return f"{total} parameters: {', '.join(described)}"


def casting_class(cls: type[nn.Module], dtypes: Mapping[str, torch.dtype]) -> type[nn.Module]:
    """Subclass of ``cls`` whose ``forward`` sees the named buffers in these dtypes.

    The cast replaces the buffer only while the module's own ``forward`` runs, also when a
    checkpointed activation is recomputed. Values that ``forward`` writes are cast back. All other
    code sees the stored tensor, so its writes are kept, saved and loaded. FSDP2 does the same for
    parameters.
    """

    def forward(
        module: nn.Module,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with _cast(module, dtypes):
            return cls.forward(module, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@contextmanager
def _cast(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    buffers = buffers_of(module)
    stored = {}
    casts = {}
    for name, dtype in dtypes.items():
        buffer = buffers[name]
        if buffer is not None:
            stored[name] = buffer
            casts[name] = buffer.to(dtype, copy=True)
    buffers.update(casts)
    try:
        yield
    finally:
        for name, buffer in stored.items():
            buffers[name] = _after(buffer, casts[name], buffers[name])


@torch.no_grad()
def _after(
    stored: Tensor,
    cast: Tensor,
    found: Tensor | None,
) -> Tensor | None:
    # Another tensor, or a write into the cast one.
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
        embeddings = model.get_input_embeddings()
    except NotImplementedError:
        # transformers does not find it.
        return None
    weight = getattr(embeddings, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return None
    return len(weight)
