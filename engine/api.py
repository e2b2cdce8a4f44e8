"""Value types and protocols of the public interface, under AReaL's names."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from ..utils.config import require_at_least, require_choice
from ..utils.errors import ConfigError
from ..utils.files import StrPath
from ..utils.remote import require_local
from .parallel_strategy import ParallelStrategy as ParallelStrategy
from .steps import FinetuneSpec as FinetuneSpec
from .steps import StepInfo as StepInfo

Batch = dict[str, Tensor]
"""Padded ``[batch, seqlen]`` tensors (``input_ids``, ``attention_mask``, ``loss_mask`` ...) and
``[batch]`` tensors (``rewards``). Per-token values are aligned with their token: ``logprobs[i, t]``
is the log-probability of ``input_ids[i, t]`` given the earlier tokens, and 0 at the first token.
``routed_experts`` alone, of ``[batch, seqlen, layers, k]``, describes the token as an input.
"""

Trajectories = Batch | Sequence[Batch]
"""A batch, or a list of batches as in AReaL (``[b, s]``, each with its own b and s): see
`join_trajectories`.
"""

LossFn = Callable[[Any, Batch], Tensor]
"""``loss_fn(output, micro_batch)`` -> scalar mean over the micro-batch. ``output`` is the
`ModelOutput` of an actor (``output.logprobs``, ``output.entropy``, or ``output.logits``), or the
``[tokens]`` values of a critic. Per-token tensors of ``micro_batch`` are packed to ``[tokens]``. A
loss that does not depend on ``output`` has a gradient of zeros.
"""

PostFn = Callable[[Any, Batch], Tensor]
"""``post_fn(output, micro_batch)`` -> ``[tokens]``. ``output`` as in `LossFn`."""

LossWeightFn = Callable[[Batch], Tensor]
"""``loss_weight_fn(micro_batch)`` -> scalar: the weight of this micro-batch's mean, usually its
loss tokens.
"""

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes for Hugging Face exports, by name."""

ADAPTER_FORMS = ("merged", "peft")
"""Export forms of a model with adapters: all weights with merged adapters, or a PEFT folder."""

WeightFormat = Literal["dcp", "hf", "peft"]
"""Formats of a checkpoint, see `SaveLoadMeta.weight_format`."""

UpdateType = Literal["disk", "xccl", "adapter"]
"""Ways to publish weights, see `WeightUpdateMeta.type`."""


def export_dtype(name: str | None, base_dtype: torch.dtype | None) -> torch.dtype | None:
    """Look a dtype up in `EXPORT_DTYPES`. None: ``base_dtype``, which is None for a model without a
    base folder.
    """
    if name is None:
        return base_dtype
    return EXPORT_DTYPES[name]


@dataclass(frozen=True)
class HFExportOptions:
    """Contents of a Hugging Face export, and the size of its files.

    Attributes:
        dtype: dtype of floating-point weights in the files. None keeps each tensor's dtype.
        tokenizer: saved with the weights, including its chat template.
        processor: saved with the weights.
        base_model_path: local folder whose other files are copied, except weights, files already
            written, and those that would replace what the tokenizer or processor says.
        max_shard_size_bytes: split weights above this size over several files. None: the limit of
            ``save_pretrained``, or at a URL a rank's share, between 500 MB and 5 GB.
        staging_folder: folder on a local or shared disk with room for one export, used before an
            upload to a URL. On several nodes all must see it. None: the folder of `tempfile`
            (``TMPDIR``).

    Raises:
        ConfigError: a value is out of range.
    """

    dtype: torch.dtype | None = None
    tokenizer: Any = None
    processor: Any = None
    base_model_path: StrPath | None = None
    max_shard_size_bytes: int | None = None
    staging_folder: StrPath | None = None

    def __post_init__(self) -> None:
        require_at_least(self, max_shard_size_bytes=1)
        # Integers, as of positions, keep their dtype in any case.
        is_dtype = isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point
        if self.dtype is not None and not is_dtype:
            raise ConfigError(
                f"dtype is {self.dtype!r}; expected a floating-point dtype of torch, or None"
            )
        for name in ("tokenizer", "processor"):
            part = getattr(self, name)
            if part is not None and not hasattr(part, "save_pretrained"):
                raise ConfigError(
                    f"{name} is {part!r}; expected the object, as from_pretrained of transformers "
                    "returns it"
                )
        if self.staging_folder is not None:
            folder = require_local(
                self.staging_folder, "staging an export", "name one with room", "staging_folder"
            )
            object.__setattr__(self, "staging_folder", folder)


@dataclass
class SaveLoadMeta:
    """Format and place of a checkpoint to save or load.

    Example::

        engine.save(SaveLoadMeta("/data/step_9", weight_format="dcp", with_optim=True))

    Attributes:
        path: folder. A save creates it and never overwrites one. A save as ``"hf"`` also accepts an
            fsspec URL, such as ``s3://bucket/run/step_9``.
        weight_format: ``"dcp"`` (sharded, resumable), ``"hf"`` (Hugging Face safetensors with
            merged adapters) or ``"peft"`` (adapters alone, see docs/lora.md).
        with_optim: with ``"dcp"``, include optimizer, schedule, RNG and counters.
        tokenizer: with ``"hf"``, saved with the weights (including the chat template).
        processor: with ``"hf"``, saved with the weights.
        base_model_path: with ``"hf"``, a folder whose other files are copied unless already
            written.
        dtype: with ``"hf"``, dtype of floating-point weights: ``"float32"`` (every bit of the
            trained weights), ``"bfloat16"`` or ``"float16"``, except for weights that transformers
            then keeps in float32. None takes the dtype of the folder from which the engine's model
            was built, like ``from_pretrained(dtype="auto")``.
        max_shard_size_bytes: with ``"hf"``, split weights above this size over several files. None:
            see `HFExportOptions`.
        staging_folder: with ``"hf"`` at a URL, see `HFExportOptions`.
    """

    path: str
    weight_format: WeightFormat
    with_optim: bool
    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | None = None
    dtype: str | None = None
    max_shard_size_bytes: int | None = None
    staging_folder: str | None = None

    def __post_init__(self) -> None:
        require_choice("weight_format", self.weight_format, get_args(WeightFormat))
        require_choice("dtype", self.dtype, (None, *EXPORT_DTYPES))
        self.hf_options(None)  # checks its fields

        # Each format takes only the options that it can keep to.
        if self.weight_format != "dcp" and self.with_optim:
            raise ConfigError(
                f"weight_format {self.weight_format!r} holds weights only; use 'dcp', or "
                "with_optim=False"
            )
        # The files of a PEFT folder are fixed: one of weights, one of options.
        only_files = (self.base_model_path, self.max_shard_size_bytes, self.staging_folder)
        if self.weight_format == "peft" and only_files != (None, None, None):
            raise ConfigError(
                "base_model_path, max_shard_size_bytes and staging_folder are for weight_format "
                "'hf'; 'peft' is one file of adapters in a local folder"
            )
        # A checkpoint that training resumes from keeps every bit, in its own files.
        only_hf = (self.dtype, self.max_shard_size_bytes, self.staging_folder)
        if self.weight_format == "dcp" and only_hf != (None, None, None):
            raise ConfigError(
                "dtype, max_shard_size_bytes and staging_folder are for weight_format 'hf'; 'dcp' "
                "keeps what training has"
            )

    def hf_options(self, base_dtype: torch.dtype | None) -> HFExportOptions:
        """Options of the export. Without ``dtype`` it is stored as ``base_dtype``."""
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
    """How weights are published to the inference servers.

    Attributes:
        type: ``"disk"``: the servers read Hugging Face weights from the folder. ``"xccl"``: rank 0
            gathers the weights of all ranks in buckets, and sends them over a separate process
            group to each `DistributedServer`. ``"adapter"``: only the LoRA adapters are written, as
            a PEFT folder, and each `AdapterServer`, started with the base model, loads them.
        path: folder of the ``v<N>`` folders, made absolute. None, only with ``"xccl"``: no weights
            are written. With a folder, each version is written there before it is sent, and a
            restarted server loads it from there.
        version: version to publish. None: the engine's version.
        keep: number of newest versions to keep.
        timeout_s: time limit for a server to load a version. It may be longer than the engine's
            timeout.
        dtype: as in `SaveLoadMeta`. None takes the dtype of the folder from which the engine's
            model was built, and leaves adapters in float32.
        min_servers: number of servers that must confirm a version. None: as their `ServerFleet`
            says, else all.
        weight_chunked_mem_mb: with ``"xccl"``, size of a bucket in MiB. Rank 0 has memory for two,
            or for two of the largest tensor.
        delta: with type ``"disk"``, write only the elements that changed since the version before.
            Every server needs a ``mirror``, which makes the weights from them (docs/servers.md).
        anchor_interval: with ``delta``, write all weights again after this number of deltas. 0:
            only when needed.
    """

    type: UpdateType
    path: str | None = None
    version: int | None = None
    keep: int = 2
    timeout_s: float = 300.0
    dtype: str | None = None
    min_servers: int | None = None
    weight_chunked_mem_mb: int = 1024
    delta: bool = False
    anchor_interval: int = 20

    def __post_init__(self) -> None:
        require_choice("type", self.type, get_args(UpdateType))
        if self.path is not None:
            advice = "give one that the servers see too; `engine.save` exports to URLs"
            folder = require_local(self.path, "publishing", advice, "WeightUpdateMeta.path")
            # Servers have another working directory, and so may the driver that tells them.
            object.__setattr__(self, "path", str(Path(folder).absolute()))
        # Only weights that are sent from memory need no folder.
        elif self.type != "xccl":
            raise ConfigError(
                f"WeightUpdateMeta type {self.type!r} needs a path, a folder that the servers see "
                "too"
            )
        require_at_least(self, weight_chunked_mem_mb=1, keep=1, version=0, min_servers=1)
        require_choice("dtype", self.dtype, (None, *EXPORT_DTYPES))
        require_at_least(self, anchor_interval=0)
        # Changes are read from the folder, by the mirrors of the servers.
        if self.delta and self.type != "disk":
            raise ConfigError(
                f"delta is for WeightUpdateMeta type 'disk', not {self.type!r}; leave it out"
            )


StateDict = dict[str, Any]
"""State of an object: tensors and plain values, nested."""


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be saved and restored: a module, a sampler, a user's object."""

    def state_dict(self) -> StateDict:
        """Return the state, made of tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore a state."""
        ...


class TrainEngine(Protocol):
    """Interface that `holdfast.engine.rl` needs. `FSDPEngine` implements it."""

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among the ranks with different data."""
        ...

    @property
    def data_parallel_world_size(self) -> int:
        """Number of ranks with different data."""
        ...

    def get_version(self) -> int:
        """Policy version of the weights."""
        ...

    def register_state(self, name: str, thing: Stateful) -> None:
        """Save and restore an object with the optimizer. Its state is plain values, the same on
        every rank. If it has a ``check_state_dict``, a load calls that before anything changes.
        """
        ...

    def train(self, mode: bool = True) -> "TrainEngine":
        """Switch to training mode."""
        ...

    def eval(self) -> "TrainEngine":
        """Switch to evaluation mode."""
        ...

    def train_batch(
        self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn
    ) -> dict[str, float]:
        """Take one optimizer step on this rank's share of a batch."""
        ...

    def eval_batch(self, batch: Batch, loss_fn: LossFn, loss_weight_fn: LossWeightFn) -> Tensor:
        """The loss that `train_batch` would report, without gradients."""
        ...

    def forward_batch(self, batch: Batch, post_fn: PostFn | None = None) -> Tensor:
        """Per-token results ``[batch, seqlen]`` without gradients."""
        ...

    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside the block the engine uses the base model without its adapters. ConfigError if it
        has none.
        """
        ...

    def step_lr_scheduler(self) -> None:
        """Advance the schedule by one, if the optimizer has stepped since the last call."""
        ...

    def all_reduce_stats(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sum each named number over the data-parallel ranks."""
        ...
