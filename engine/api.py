"""The value types that cross Holdfast's borders, under AReaL's names, and the protocols behind them."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from ..utils.config import require_choice, require_range
from ..utils.errors import ConfigError
from ..utils.remote import require_local
from .steps import FinetuneSpec as FinetuneSpec
from .steps import StepInfo as StepInfo

Batch = dict[str, torch.Tensor]
"""Padded ``[batch, seqlen]`` tensors (``input_ids``, ``attention_mask``, ``loss_mask`` ...) and ``[batch]`` ones
(``rewards``). Everything per token is aligned with the token itself: ``logprobs[i, t]`` is the log-probability of
``input_ids[i, t]`` given what stands before it, and is 0 at the first token."""

Trajectories = Batch | Sequence[Batch]
"""A batch, or a list of batches of AReaL's kind (``[b, s]`` each, its own b and s): see `join_trajectories`."""

LossFn = Callable[[Any, Batch], torch.Tensor]
"""``loss_fn(output, micro_batch)`` -> scalar mean over the micro-batch. ``output`` is the `ModelOutput` of an actor
(``output.logprobs``, ``output.entropy``, or ``output.logits``), or the ``[tokens]`` values of a critic; every per-token
tensor of ``micro_batch`` is packed to ``[tokens]``."""

PostFn = Callable[[Any, Batch], torch.Tensor]
"""``post_fn(output, micro_batch)`` -> ``[tokens]``; ``output`` as in `LossFn`."""

LossWeightFn = Callable[[Batch], torch.Tensor]
"""``loss_weight_fn(micro_batch)`` -> scalar: how much the mean of this micro-batch counts, usually its loss tokens."""

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What a Hugging Face export may be stored as."""

ADAPTER_FORMS = ("merged", "peft")
"""What an export of a model with adapters is: all weights, the adapters added to them, or a folder of PEFT."""

UPDATE_TYPES = ("disk", "broadcast", "adapter")
"""What is published, and how it gets from its folder to the inference servers."""


def export_dtype(name: str | None, base_dtype: torch.dtype | None) -> torch.dtype | None:
    """One of `EXPORT_DTYPES` by its name; None: that of the base folder, which is None for a model without one."""
    return base_dtype if name is None else EXPORT_DTYPES[name]


@dataclass(frozen=True)
class HFExportOptions:
    """What a Hugging Face export holds, and in files of which size.

    Attributes:
        dtype: dtype of floating-point weights in the files; None keeps that of each tensor.
        tokenizer: saved beside the weights, chat template included.
        processor: saved beside the weights.
        base_model_path: local folder whose other files (neither weights nor written already) are copied.
        max_shard_size_bytes: weights above this are split over several files. None is where ``save_pretrained`` starts
            a second one; at a URL it is a rank's share, between 500 MB and 5 GB.
        staging_folder: folder on a local or shared disk with room for one export, in which an export to a URL is
            written before it is uploaded; on several nodes all of them must see it. None is the folder of `tempfile`
            (``TMPDIR``).

    Raises:
        ConfigError: a value is out of range.
    """

    dtype: torch.dtype | None = None
    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | os.PathLike[str] | None = None
    max_shard_size_bytes: int | None = None
    staging_folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        require_range("max_shard_size_bytes", self.max_shard_size_bytes, low=1)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ConfigError(f"dtype is {self.dtype}; expected a floating-point dtype, or None")
        if self.staging_folder is not None:
            folder = require_local(self.staging_folder, "staging an export", "name one with room", "staging_folder")
            object.__setattr__(self, "staging_folder", folder)


@dataclass
class SaveLoadMeta:
    """What to save or load, and where.

    Attributes:
        path: folder; a save creates it and never writes over one. A save with ``"hf"`` also takes an fsspec URL, as
            ``s3://bucket/run/step_9``.
        weight_format: ``"dcp"`` (sharded, resumable), ``"hf"`` (Hugging Face safetensors; adapters are merged into the
            weights) or ``"peft"`` (adapters alone, as PEFT has them; see docs/lora.md).
        with_optim: with ``"dcp"``, also optimizer, schedule, RNG and counters.
        tokenizer: with ``"hf"``, saved beside the weights (chat template included).
        processor: with ``"hf"``, likewise.
        base_model_path: with ``"hf"``, a folder whose other files are copied unless written already.
        dtype: with ``"hf"``, what floating-point weights are stored as: ``"float32"`` (every bit of the trained ones),
            ``"bfloat16"`` or ``"float16"``, except those that transformers keeps in float32 then. None takes the dtype
            of the folder that the engine's model was made from, as ``from_pretrained(dtype="auto")`` does.
        max_shard_size_bytes: with ``"hf"``, weights above this are split over several files; None is where
            ``save_pretrained`` starts a second one, or less at a URL (see `save_hf`).
        staging_folder: with ``"hf"`` at a URL, the folder in which the files are written before they are uploaded; see
            `HFExportOptions`.
    """

    path: str
    weight_format: str
    with_optim: bool
    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | None = None
    dtype: str | None = None
    max_shard_size_bytes: int | None = None
    staging_folder: str | None = None

    def __post_init__(self) -> None:
        require_choice("weight_format", self.weight_format, ("dcp", "hf", "peft"))
        require_choice("dtype", self.dtype, (None, *EXPORT_DTYPES))
        self.hf_options(None)  # checks its fields
        if self.weight_format != "dcp" and self.with_optim:
            raise ConfigError(
                f"weight_format {self.weight_format!r} holds weights only; use 'dcp', or with_optim=False"
            )
        only_files = (self.base_model_path, self.max_shard_size_bytes, self.staging_folder)
        if self.weight_format == "peft" and only_files != (None, None, None):
            raise ConfigError(
                "base_model_path, max_shard_size_bytes and staging_folder are for weight_format 'hf'; 'peft' is one "
                "file of adapters in a local folder"
            )
        only_hf = (self.dtype, self.max_shard_size_bytes, self.staging_folder)
        if self.weight_format == "dcp" and only_hf != (None, None, None):
            raise ConfigError(
                "dtype, max_shard_size_bytes and staging_folder are for weight_format 'hf'; 'dcp' keeps what training "
                "has"
            )

    def hf_options(self, base_dtype: torch.dtype | None) -> HFExportOptions:
        """The options of the export; without a ``dtype`` it is stored as ``base_dtype``."""
        return HFExportOptions(
            dtype=export_dtype(self.dtype, base_dtype),
            tokenizer=self.tokenizer,
            processor=self.processor,
            base_model_path=self.base_model_path,
            max_shard_size_bytes=self.max_shard_size_bytes,
            staging_folder=self.staging_folder,
        )


@dataclass(frozen=True)
class WeightUpdateMeta:
    """How weights get to the inference servers.

    Attributes:
        type: ``"disk"``: the servers read the Hugging Face weights from the folder. ``"broadcast"``: rank 0 sends them
            what it has written there, over a process group of its own with each; they are `BroadcastServer`s, and
            need not see the folder. ``"adapter"``: only the LoRA adapters are written, as a folder of PEFT; the
            servers, `AdapterServer`s that were started with the base model, put them beside it.
        path: folder that holds the ``v<N>`` folders.
        version: the version to publish; None takes the engine's own.
        keep: how many of the newest versions stay.
        timeout_s: how long the servers may take to load a version; it may be longer than the engine's own timeout.
        dtype: as in `SaveLoadMeta`; None takes the dtype of the folder that the engine's model was made from, and
            leaves adapters in float32.
        min_servers: how many servers have to confirm a version; None: what their `ServerFleet` says, else all of them.
    """

    type: str
    path: str
    version: int | None = None
    keep: int = 2
    timeout_s: float = 300.0
    dtype: str | None = None
    min_servers: int | None = None

    def __post_init__(self) -> None:
        require_choice("type", self.type, UPDATE_TYPES)
        advice = "give one that the servers see too; `engine.save` exports to URLs"
        folder = require_local(self.path, "publishing", advice, "WeightUpdateMeta.path")
        object.__setattr__(self, "path", os.fspath(folder))  # of a file:// URL
        require_range("keep", self.keep, low=1)
        require_range("version", self.version, low=0)
        require_range("min_servers", self.min_servers, low=1)
        require_choice("dtype", self.dtype, (None, *EXPORT_DTYPES))


@dataclass(frozen=True)
class ParallelStrategy:
    """The mesh. Only its data-parallel (shard) dimension exists so far.

    Attributes:
        data_parallel_size: number of ranks; None takes all of them.
    """

    data_parallel_size: int | None = None


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be captured and put back: torch modules, samplers, a user's own object."""

    def state_dict(self) -> dict[str, Any]:
        """The state, of tensors and plain values only."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put a state back."""
        ...


class InferenceServer(Protocol):
    """A rollout worker, or a client of an inference server, that can be told to serve new weights."""

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Load the Hugging Face folder ``path`` and return the version served from now on."""
        ...


@runtime_checkable
class BroadcastServer(InferenceServer, Protocol):
    """An inference server that weights can be sent to."""

    def update_weights_from_distributed(self, path: str, version: int) -> int:
        """Send it the weights of the Hugging Face folder ``path``; return the version served from now on."""
        ...


@runtime_checkable
class AdapterServer(InferenceServer, Protocol):
    """An inference server that puts adapters beside the base model that it was started with."""

    def update_adapters_from_disk(self, path: str, version: int) -> int:
        """Load the folder of PEFT ``path`` and return the version that new requests are answered by."""
        ...

    def folders_in_use(self) -> set[str]:
        """Folders whose adapters the server may read again: they must not be deleted yet."""
        ...


class TrainEngine(Protocol):
    """What `holdfast.engine.rl` needs of an engine; `FSDPEngine` is one."""

    @property
    def data_parallel_rank(self) -> int:
        """This rank's place among those that see different data."""
        ...

    @property
    def data_parallel_world_size(self) -> int:
        """How many ranks see different data."""
        ...

    def get_version(self) -> int:
        """The version of the policy the weights are."""
        ...

    def register_state(self, name: str, thing: Stateful) -> None:
        """Save and restore an object of plain values, the same on every rank, with the optimizer."""
        ...

    def train(self, mode: bool = True) -> "TrainEngine":
        """Switch to training mode."""
        ...

    def eval(self) -> "TrainEngine":
        """Switch to evaluation mode."""
        ...

    def train_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> dict[str, float]:
        """One optimizer step on this rank's share of a batch."""
        ...

    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> torch.Tensor:
        """The loss `train_batch` would have, without gradients."""
        ...

    def forward_batch(self, batch: Batch, post_fn: PostFn | None = None) -> torch.Tensor:
        """Per-token results ``[batch, seqlen]`` without gradients."""
        ...

    def adapters_off(self) -> AbstractContextManager[None]:
        """Within the block the engine answers as the base under its adapters; a ConfigError without adapters."""
        ...

    def step_lr_scheduler(self) -> None:
        """Advance the schedule by one, if the optimizer has stepped since the last call."""
        ...

    def all_reduce_stats(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sum each named number over the data-parallel ranks."""
        ...
