"""A value head on the body of a causal language model, for models without token classification in
transformers.

Two thirds of its causal language models have none. Their body is used under its own name, so that
folders of either kind fit, with a linear layer on the last hidden states.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

from ...utils.compat.transformers_private import (
    build_from_config,
    class_with_head,
    convert_like,
    loading_rules,
)


def value_model_class(
    config: PretrainedConfig,
    factory: type[Any] = AutoModelForCausalLM,
) -> Any:
    """Model class with a ``score`` layer on the body. None if there is no causal language model
    either.

    Args:
        config: config of the causal model, or of a multimodal one, from which the text part is
            used.
        factory: auto class of the model with the body.
    """
    causal = class_with_head(factory, config)
    if causal is None:
        return None
    cls = _class_over(causal)
    if cls is not None and factory is not AutoModelForCausalLM:
        convert_like(cls, causal)
    return cls


def build_value_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    factory: type[Any] = AutoModelForCausalLM,
    **options: Any,
) -> PreTrainedModel:
    """Build a model of `value_model_class` with new weights on the default device. ``options`` go
    to transformers.
    """
    cls: Any = value_model_class(config, factory)
    # The class may be for the text part of a multimodal config.
    text_class = config.sub_configs.get("text_config")
    if cls.config_class is text_class and text_class is not type(config):
        config = config.get_text_config()
    return build_from_config(cls, config, dtype, **options)


def body_name(model: PreTrainedModel) -> str:
    """Attribute of the module below a model's head (``"model"``). It may differ from
    ``base_model_prefix``.
    """
    for name, child in model.named_children():
        if isinstance(child, PreTrainedModel):
            return name
    return model.base_model_prefix


@cache
def _class_over(causal: type[PreTrainedModel]) -> type[PreTrainedModel] | None:
    """Create one class per causal class, so that modules of an engine and its twins have the same
    class.
    """
    # Of LlamaForCausalLM this is LlamaPreTrainedModel: how weights are drawn and sharded.
    parents = causal.__mro__
    parent = parents[parents.index(PreTrainedModel) - 1]
    if parent is causal:
        return None

    def __init__(self: Any, config: Any) -> None:
        super(cls, self).__init__(config)
        whole: Any = causal(config)  # type: ignore[call-arg]
        name = body_name(whole)
        setattr(self, name, whole.get_submodule(name))
        hidden_size = whole.get_output_embeddings().weight.shape[-1]
        self.score = nn.Linear(hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self: Any,
        input_ids: torch.Tensor,
        **inputs: Any,
    ) -> TokenClassifierOutput:
        body = self.get_submodule(body_name(self))
        known = inspect.signature(body.forward).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        if not takes_any:
            # Recurrent models lack some inputs, which may be dropped unless they describe padding.
            names = {*known, "attention_mask"}
            inputs = {name: value for name, value in inputs.items() if name in names}
        hidden = body(input_ids=input_ids, **inputs).last_hidden_state
        return TokenClassifierOutput(logits=self.score(hidden))

    # A folder is read like the causal model's, with the name rules for that class and its module.
    members = {
        **loading_rules(causal),
        "__module__": causal.__module__,
        "config_class": causal.config_class,
        "__init__": __init__,
        "forward": forward,
    }
    name = causal.__name__.partition("For")[0] + "ForTokenClassification"
    cls: Any = type(name, (parent,), members)
    return cls
