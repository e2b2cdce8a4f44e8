"""Speed of training steps: tokens per second, and the share of the devices' peak that they use.

Model FLOPs utilization (MFU) divides the operations that a model needs by those that its devices
could have done in the same time. Operations that are repeated (activation checkpointing) do not
count.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...utils.distributed import gather_numbers
from ..config import TrainEngineConfig
from .microbatch import WeighedBatch
from .model import untrained_by_text
from .process_groups import ProcessGroups
from .routers import number_of_experts

_PEAK_FLOPS = {
    "GB200": 2.5e15,
    "B200": 2.25e15,
    "H200 NVL": 836e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI325X": 1307.4e12,
    "MI300X": 1307.4e12,
}
"""Words in the name of a device -> dense bfloat16 operations per second, from the data sheets of
NVIDIA and AMD. The first row whose words are all in the name counts.
"""
_EXPERTS_IN_CONFIG = ("num_experts", "num_local_experts", "n_routed_experts")
_WITHOUT_KEYS = ("linear_attention", "mamba", "recurrent", "conv")
"""Kinds of layers in ``layer_types`` whose cost per token does not grow with the sequence."""


class Speed:
    """Speed of an engine's steps.

    ``mfu`` is known for a model that computes in bfloat16, on devices that are all in the table of
    peaks. It is left out where the operations are not known:

    - with ``train_vision``, because those of the vision tower depend on the sizes of images
    - if the config does not have one number of layers, of heads, and one size of heads
    - if the config names experts that are not found in the model
    - if a layer is of a kind whose keys are not known
    - on a part of a device (MIG)

    Args:
        model: the model of the engine, on the ranks.
        config: its configuration.
        groups: the ranks. Collective: all of them compare their devices.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainEngineConfig, groups: ProcessGroups
    ) -> None:
        text: Any = model.config.get_text_config(decoder=True)
        self._dense_flops, self._expert_flops = parameter_flops(model)
        self._width = _attention_width(text)
        windows = _windows(text) if self._width else None
        self._layers = Counter(windows)

        # Ranks may have different devices. One that is not known makes the sum unknown.
        peak = 0.0
        if groups.device.type == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(groups.device)) or 0.0
        peaks = [theirs for (theirs,) in gather_numbers([peak], groups.control)]
        names_experts = any(getattr(text, name, None) for name in _EXPERTS_IN_CONFIG)
        is_known = (
            all(peaks)
            and config.dtype == "bfloat16"
            and not config.train_vision
            and windows is not None
            and (self._expert_flops > 0 or not names_experts)
        )
        self._peak = sum(peaks) if is_known else 0.0

    def attention_flops(self, lengths: Sequence[int]) -> float:
        """Operations of attention for whole sequences, forward and backward.

        ``12 L H Q T`` per token (PaLM, appendix B, https://arxiv.org/abs/2204.02311): L layers, H
        heads of size Q, T keys. As there and in torchtitan, a causal mask does not halve it. A
        layer with a window has at most as many keys.

        Args:
            lengths: tokens of each sequence.
        """
        n_pairs = 0
        for window, n_layers in self._layers.items():
            pairs = sum(length * min(length, window or length) for length in lengths)
            n_pairs += n_layers * pairs
        return 12.0 * self._width * n_pairs

    def of_step(self, weighed: WeighedBatch, top_k: int, seconds: float) -> dict[str, float]:
        """``tokens_per_second`` and ``mfu`` of a step, over all ranks.

        Args:
            weighed: what was trained.
            top_k: experts that a token passes in each layer.
            seconds: wall time of the step. On CUDA it ends when the update has been launched.
                Kernels that still run then are in the time of the next step.
        """
        stats = {"tokens_per_second": weighed.n_tokens / seconds}
        if self._peak:
            flops = weighed.n_tokens * (self._dense_flops + top_k * self._expert_flops)
            flops += weighed.attention_flops
            # Prompts that are shared are computed once.
            flops *= weighed.tree_token_ratio
            stats["mfu"] = flops / seconds / self._peak
        return stats


def parameter_flops(model: PreTrainedModel) -> tuple[float, float]:
    """Operations per token of all parameters that every token passes, and of one expert of each
    layer.

    6 for each parameter (PaLM, appendix B): 2 in the forward, 2 for the gradient of its input, 2
    for its own gradient. A frozen parameter takes 4. Embeddings are looked up, which takes none,
    except where the head has the same weight. Towers that text does not reach are left out.
    """
    left_out: set[nn.Module] = set()
    for name in untrained_by_text(model):
        left_out.update(model.get_submodule(name).modules())

    dense = 0.0
    experts = 0.0
    counted: set[int] = set()
    for module in model.modules():
        if module in left_out or isinstance(module, nn.Embedding):
            continue
        n_experts = number_of_experts(module)
        for param in module.parameters(recurse=False):
            if id(param) in counted:
                continue
            counted.add(id(param))
            flops = param.numel() * (6.0 if param.requires_grad else 4.0)
            if n_experts:
                experts += flops / n_experts
            else:
                dense += flops
    return dense, experts


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 operations per second of a device, by its name in torch. None: not known."""
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    if "MIG" in words:
        return None  # only a part of the device
    for name, peak in _PEAK_FLOPS.items():
        if words.issuperset(name.split()):
            return peak
    return None


def _windows(text: Any) -> list[int | None] | None:
    """The most keys that a token sees, for each layer with attention. None instead of a number: all
    keys. None instead of the list: a layer is of another kind.
    """
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = [kind] * text.num_hidden_layers
    windows: list[int | None] = []
    for kind in kinds:
        if kind in ("full_attention", "attention"):
            windows.append(None)
        elif kind == "sliding_attention":
            windows.append(window)
        elif kind == "chunked_attention":
            windows.append(getattr(text, "attention_chunk_size", None))
        elif kind not in _WITHOUT_KEYS:
            return None
    return windows


def _attention_width(text: Any) -> float:
    """Heads times their size. 0: the config does not say it for all layers alike."""
    if getattr(text, "is_heterogeneous", False):
        return 0.0
    named = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    n_layers, n_heads, hidden = (getattr(text, name, None) for name in named)
    if not isinstance(n_layers, int) or not isinstance(n_heads, int):
        return 0.0

    # Latent attention has a size for keys and another one for values.
    keys = getattr(text, "qk_head_dim", None)
    values = getattr(text, "v_head_dim", None)
    if isinstance(keys, int) and isinstance(values, int):
        return n_heads * (keys + values) / 2
    size = getattr(text, "head_dim", None)
    if size is None and isinstance(hidden, int):
        size = hidden // n_heads
    return float(n_heads * size) if isinstance(size, int) else 0.0
