"""Adapters of a checkpoint without its base: merge them into the base, or write a PEFT folder. See
docs/lora.md.

The base is read from the folder that the run began with. The fingerprint in the checkpoint must
match it. Merging adds a product to one block of rows at a time, with A and B in memory.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ...engine.api import export_dtype
from ...engine.dcp.base_model import base_fingerprint, pack_share, same_base
from ...engine.dcp.fingerprint import BlockSampler, bit_sum
from ...engine.hf.adapter_folder import (
    CONFIG,
    ROOT,
    WEIGHTS,
    write_adapter_weights,
)
from ...engine.lora.adapters import Adapter
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.atomic_folder import staged_folder
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.files import write_durably
from ...utils.manifest import verify_folder
from .architecture import Architecture
from .stored_tensors import Tensors, read_whole
from .weights import ModelWeights, read_model_folder, without_tied_copies


@dataclass(frozen=True)
class LeftOut:
    """Stands for the frozen parameters that a checkpoint does not contain."""

    description: Mapping[str, Any]  # contents that `describe_base` packed
    fingerprint: str  # fingerprint of the parameters, see `base_fingerprint`

    @property
    def base(self) -> str | None:
        """Folder or hub id of the base, if it is known."""
        return self.description.get("path")


@dataclass(frozen=True)
class _Pair:
    """The two low-rank matrices of a layer."""

    a: LazyTensor
    b: LazyTensor


class StoredAdapters:
    """The plain LoRA adapters of a checkpoint: ``where`` it is, the tensors of its ``model``, and
    the missing base.
    """

    def __init__(self, where: Path, model: Tensors, left_out: LeftOut) -> None:
        self.where = where
        self.left_out = left_out
        about = left_out.description.get("adapters")
        if not isinstance(about, dict):
            raise ConfigError(
                f"{where} does not say what its adapters are: it holds none, others than plain "
                "LoRA, or was written by an older version. Load it in the run, and use "
                'engine.save with weight_format="hf" or "peft"'
            )
        self.config = about["config"]
        self._scaling = about["scaling"]

        # peft renames the modules. The prefix is there or not, by the kind of the model.
        has_prefix = any(name.startswith(ROOT) for name in model)
        self._prefix = ROOT if has_prefix else ""

        # Names of the architecture.
        plain: Tensors = {}
        for name, tensor in model.items():
            own = name.removeprefix(self._prefix)
            own = own.replace(".base_layer.", ".")
            plain[own] = tensor

        # Two matrices for each layer. What is left over was trained beside the adapters.
        self._pairs: dict[str, _Pair] = {}
        for layer in self._scaling:
            matrices: list[LazyTensor] = []
            for part in ("lora_A", "lora_B"):
                name = f"{layer}.{part}.{about['name']}.weight"
                if name not in plain:
                    raise CheckpointMismatchError(
                        f"{where} lacks {name!r}, an adapter that it says it has"
                    )
                matrices.append(plain.pop(name))
            self._pairs[layer] = _Pair(*matrices)
        self._beside = plain

    def base_folder(self, given: Path | None) -> Path:
        """Folder of the base, by default the one in the checkpoint. Raises `ConfigError` if it
        holds no model.
        """
        folder = given
        if folder is None and self.left_out.base is not None:
            folder = Path(self.left_out.base)
        has_model = folder is not None and (folder / "config.json").is_file()
        if folder is None or not has_model:
            raise ConfigError(
                f"{self.where} holds adapters without their base, "
                f"{self.left_out.base or 'an unknown one'}, which is no folder of a model here: "
                "name it (base=, --base), or export the adapters as peft"
            )
        return folder

    def in_folder(self) -> dict[str, Tensor]:
        """Name in a PEFT folder -> tensor. Raises `ConfigError` if more than the adapters was
        trained.
        """
        if self._beside:
            raise ConfigError(
                f"{self.where} holds {sorted(self._beside)[0]!r} ({len(self._beside)} such) beside "
                "its adapters, which a folder of PEFT would lack; export it merged"
            )
        found: dict[str, Tensor] = {}
        for layer, pair in self._pairs.items():
            found[f"{ROOT}{layer}.lora_A.weight"] = read_whole(pair.a)
            found[f"{ROOT}{layer}.lora_B.weight"] = read_whole(pair.b)
        return found

    def merged(self, architecture: Architecture, files: ExitStack) -> ModelWeights:
        """All weights of the base in the folder of ``architecture`` with the adapters added, and
        the aliases of tied weights. ``files`` closes the files that are opened.
        """
        base = architecture.folder
        stored = read_model_folder(base, architecture, files)
        found, aliases = without_tied_copies(stored, architecture.aliases)

        # All tensors must be used: another class of model would leave some over.
        model = architecture.model
        modules = dict(model.named_modules())
        tensors = model.state_dict()
        strangers = sorted(
            (self._beside.keys() - tensors.keys()) | (self._pairs.keys() - modules.keys())
        )
        if strangers:
            raise CheckpointMismatchError(
                f"{self.where} holds {strangers[0]!r}, which {type(model).__name__} "
                f"does not have ({len(strangers)} such); export it from the run"
            )

        # A file has one place for a tied weight, and an adapter is at one of its uses.
        tied = {*architecture.aliases, *architecture.aliases.values()}
        shared = [layer for layer in sorted(self._pairs) if f"{layer}.weight" in tied]
        if shared:
            raise CheckpointMismatchError(
                f"{self.where} has an adapter of {shared[0]}, whose weight is tied to another one, "
                "so that a file has no place for the sum; export the adapters as peft"
            )

        # The rest of the base must be what the run has left out.
        frozen: Tensors = {}
        for name in architecture.parameters:
            if name not in self._beside:
                frozen[name] = found[name]
        frozen = self._as_left_out(base, frozen)

        # Buffers come from the base, and what was trained beside the adapters replaces it.
        merged = {**found, **frozen, **self._beside}
        for layer, pair in self._pairs.items():
            name = f"{layer}.weight"
            scaling = self._scaling[layer]
            merged[name] = _add(merged[name], pair, scaling, modules[layer])
        return ModelWeights(merged, aliases)

    def _as_left_out(self, base: Path, frozen: Tensors) -> Tensors:
        """The frozen parameters in their dtype in the run, usually that of the files."""
        for cast in self._casts(frozen):
            found = self._fingerprint(cast)
            if same_base(self.left_out.fingerprint, found):
                return cast
        raise CheckpointMismatchError(
            f"{self.where} was trained on another base than {base}: its frozen parameters (of "
            f"{self.left_out.base}) have the fingerprint {self.left_out.fingerprint}, those here "
            f"{self._fingerprint(frozen)}. Name the base that the run began with; of one that was "
            "drawn from a seed there are no files: export the adapters as peft, or merged from "
            "the run"
        )

    def _casts(self, frozen: Tensors) -> Iterator[Tensors]:
        yield frozen
        dtypes = list(self.left_out.description["dtypes"])
        if len(dtypes) == 1:
            dtype = getattr(torch, dtypes[0])
            yield {name: tensor.to(dtype) for name, tensor in frozen.items()}

    def _fingerprint(self, frozen: Tensors) -> str:
        # The two halves of the fingerprint: a sample, and a sum over all bits.
        sampler = BlockSampler()
        bits = 0
        for name, tensor in frozen.items():
            key = f"model.{self._name_in_run(name)}"
            for first, values in tensor.blocks():
                sampler.add(key, tensor.numel, first, values)
                first_row = first // tensor.row_elements
                bits += bit_sum(key, values, (first_row,))
        sample = int(sampler.sums["model"])
        return base_fingerprint([pack_share(sample, bits)])

    def _name_in_run(self, name: str) -> str:
        """Name of a parameter in the model of the run, which peft has changed."""
        layer, _, own = name.rpartition(".")
        if layer in self._pairs:
            name = f"{layer}.base_layer.{own}"
        return self._prefix + name


def write_peft(
    source: Path,
    adapters: StoredAdapters,
    target: Path,
    dtype: str | None,
) -> float:
    """Write the adapters of the generation ``source``, which is verified byte by byte, as a PEFT
    folder.

    The folder appears only after it was read back and compared. ``dtype`` is one of
    `EXPORT_DTYPES`, or None to leave the dtypes unchanged. Returns the duration in seconds.
    """
    began = time.monotonic()
    verify_folder(source)

    # They are small, so all are in memory.
    tensors: dict[str, Tensor] = {}
    for name, tensor in adapters.in_folder().items():
        own = export_dtype(dtype, tensor.dtype)
        tensors[name] = tensor.to(own)
    config = json.dumps(adapters.config, indent=2, sort_keys=True)

    with staged_folder(target) as staging:
        write_adapter_weights(staging, tensors)
        write_durably(staging / CONFIG, config.encode())

        # Compared before the folder gets its name.
        again = load_file(staging / WEIGHTS)
        for name, tensor in tensors.items():
            is_same = name in again and torch.equal(again[name], tensor)
            if not is_same:
                raise CheckpointCorruptError(
                    f"{target}: {name} is not what was read; look at the disk, and try again"
                )
    return time.monotonic() - began


def _add(
    weight: LazyTensor,
    pair: _Pair,
    scaling: float,
    layer: nn.Module,
) -> LazyTensor:
    """``W + scaling * B @ A``, in float32 or in W's dtype if that is wider."""
    a = read_whole(pair.a)
    b = read_whole(pair.b)
    transposed = isinstance(layer, Conv1D)
    adapter = Adapter("", a, b, scaling, transposed)
    dtype = torch.promote_types(weight.dtype, torch.float32)

    def rows(first: int, last: int) -> Tensor:
        base = weight.rows(first, last).to(dtype, copy=True)
        return base + adapter.rows(first, last, a, b)

    return LazyTensor(weight.shape, dtype, rows)
