"""Adapters of a checkpoint without its base: merge them into the base, or write a PEFT folder. See
docs/lora.md.

The base is read from the folder that the run began with. The fingerprint in the checkpoint must
match it. Merging adds a product to one block of rows at a time, with A and B in memory.
"""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from ...engine.api import export_dtype
from ...engine.dcp.base_model import base_fingerprint, pack_share, same_base
from ...engine.dcp.fingerprint import BlockSampler, bit_sum
from ...engine.hf.adapter_folder import CONFIG, ROOT, WEIGHTS, write_adapter_weights
from ...engine.lora.adapters import Adapter
from ...engine.memory.lazy_tensor import LazyTensor
from ...utils.atomic_folder import staged_folder
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ...utils.files import write_durably
from ...utils.manifest import verify_folder
from .checkpoint import Architecture
from .stored_tensors import read_whole
from .weights import read_model_folder, without_tied_copies


@dataclass(frozen=True)
class LeftOut:
    """Stands for the frozen parameters that a checkpoint does not contain."""

    description: Mapping[str, Any]  # contents that `describe_base` packed
    fingerprint: str  # fingerprint of the parameters, see `base_fingerprint`

    @property
    def base(self) -> str | None:
        """Folder or hub id of the base, if it is known."""
        return self.description.get("path")


class StoredAdapters:
    """The plain LoRA adapters of a checkpoint: ``where`` it is, the tensors of its ``model``, and
    the missing base.
    """

    def __init__(self, where: Path, model: Mapping[str, LazyTensor], left_out: LeftOut) -> None:
        self.where, self.left_out = where, left_out
        about = left_out.description.get("adapters")
        if not isinstance(about, dict):
            raise ConfigError(
                f"{where} does not say what its adapters are: it holds none, others than plain LoRA, or was written by "
                'an older version. Load it in the run, and use engine.save with weight_format="hf" or "peft"'
            )
        self.config, self._scaling = about["config"], about["scaling"]
        self._prefix = ROOT if any(name.startswith(ROOT) for name in model) else ""
        plain = {
            name.removeprefix(self._prefix).replace(".base_layer.", "."): each
            for name, each in model.items()
        }
        self.pairs: dict[str, tuple[LazyTensor, LazyTensor]] = {}
        for layer in self._scaling:
            a, b = (f"{layer}.lora_{part}.{about['name']}.weight" for part in "AB")
            if missing := [name for name in (a, b) if name not in plain]:
                raise CheckpointMismatchError(
                    f"{where} lacks {missing[0]!r}, an adapter that it says it has"
                )
            self.pairs[layer] = plain.pop(a), plain.pop(b)
        self.beside = plain

    def base_folder(self, given: Path | None = None) -> Path:
        """Folder of the base, by default the one in the checkpoint. Raises `ConfigError` if it
        holds no model.
        """
        folder = (
            given
            if given is not None
            else None
            if self.left_out.base is None
            else Path(self.left_out.base)
        )
        if folder is None or not (folder / "config.json").is_file():
            raise ConfigError(
                f"{self.where} holds adapters without their base, "
                f"{self.left_out.base or 'an unknown one'}, which is no folder of a model here: "
                "name it (base=, --base), or export the adapters as peft"
            )
        return folder

    def in_folder(self) -> dict[str, torch.Tensor]:
        """Name in a PEFT folder -> tensor. Raises `ConfigError` if more than the adapters was
        trained.
        """
        if self.beside:
            raise ConfigError(
                f"{self.where} holds {sorted(self.beside)[0]!r} ({len(self.beside)} such) beside "
                "its adapters, which a folder of PEFT would lack; export it merged"
            )
        return {
            f"{ROOT}{layer}.lora_{part}.weight": read_whole(tensor)
            for layer, pair in self.pairs.items()
            for part, tensor in zip("AB", pair, strict=True)
        }

    def merged(
        self, architecture: Architecture, files: ExitStack
    ) -> tuple[dict[str, LazyTensor], dict[str, str]]:
        """All weights of the base in the folder of ``architecture`` with the adapters added, and
        the aliases of tied weights. ``files`` closes the files that are opened.
        """
        base = architecture.folder
        found, aliases = without_tied_copies(
            read_model_folder(base, architecture, files), architecture.aliases
        )
        modules = dict(architecture.model.named_modules())
        unknown = (
            self.beside.keys() - architecture.model.state_dict().keys()
            | self.pairs.keys() - modules.keys()
        )
        if strangers := sorted(unknown):
            raise CheckpointMismatchError(
                f"{self.where} holds {strangers[0]!r}, which {type(architecture.model).__name__} "
                f"does not have ({len(strangers)} such); export it from the run"
            )
        frozen = {name: found[name] for name in architecture.parameters if name not in self.beside}
        merged = found | self._as_left_out(base, frozen) | self.beside
        for layer, (a, b) in self.pairs.items():
            transposed = isinstance(modules[layer], Conv1D)
            merged[f"{layer}.weight"] = _sum(
                merged[f"{layer}.weight"], a, b, self._scaling[layer], transposed
            )
        return merged, aliases

    def _as_left_out(self, base: Path, frozen: dict[str, LazyTensor]) -> dict[str, LazyTensor]:
        dtypes = list(self.left_out.description["dtypes"])
        as_one = [getattr(torch, dtypes[0])] if len(dtypes) == 1 else []
        for dtype in (None, *as_one):  # usually as they are in the files
            cast = (
                frozen
                if dtype is None
                else {name: tensor.to(dtype) for name, tensor in frozen.items()}
            )
            if same_base(self.left_out.fingerprint, self._fingerprint(cast)):
                return cast
        raise CheckpointMismatchError(
            f"{self.where} was trained on another base than {base}: its frozen parameters (of "
            f"{self.left_out.base}) have the fingerprint {self.left_out.fingerprint}, those here "
            f"{self._fingerprint(frozen)}. Name the base that the run began with; of one that was "
            "drawn from a seed there are no files: export the adapters as peft, or merged from "
            "the run"
        )

    def _fingerprint(self, frozen: Mapping[str, LazyTensor]) -> str:
        sampler, bits = BlockSampler(), 0
        for name, tensor in frozen.items():
            layer, _, own = name.rpartition(".")
            known = self._prefix + (f"{layer}.base_layer.{own}" if layer in self.pairs else name)
            for first, values in tensor.blocks():
                sampler.add(f"model.{known}", tensor.numel, first, values)
                bits += bit_sum(f"model.{known}", values, (first // tensor.row_elements,))
        return base_fingerprint([pack_share(int(sampler.sums["model"]), bits)])


def write_peft(source: Path, adapters: StoredAdapters, target: Path, dtype: str | None) -> float:
    """Write the adapters of the generation ``source``, which is verified byte by byte, as a PEFT
    folder.

    The folder appears only after it was read back and compared. ``dtype`` is one of
    `EXPORT_DTYPES`, or None to leave the dtypes unchanged. Returns the duration in seconds.
    """
    began = time.monotonic()
    verify_folder(source)
    tensors = {
        name: tensor.to(export_dtype(dtype, tensor.dtype))
        for name, tensor in adapters.in_folder().items()
    }
    with staged_folder(target) as staging:
        write_adapter_weights(staging, tensors)
        write_durably(
            staging / CONFIG, json.dumps(adapters.config, indent=2, sort_keys=True).encode()
        )
        again = load_file(staging / WEIGHTS)
        if wrong := [
            name
            for name in tensors
            if name not in again or not torch.equal(again[name], tensors[name])
        ]:
            raise CheckpointCorruptError(
                f"{target}: {wrong[0]} is not what was read; look at the disk, and try again"
            )
    return time.monotonic() - began


def _sum(
    weight: LazyTensor, a: LazyTensor, b: LazyTensor, scaling: float, transposed: bool
) -> LazyTensor:
    """``W + scaling * B @ A``, in float32 or in W's dtype if that is wider."""
    pair = read_whole(a), read_whole(b)
    adapter = Adapter("", *pair, scaling, transposed)
    dtype = torch.promote_types(weight.dtype, torch.float32)

    def rows(first: int, last: int) -> torch.Tensor:
        return weight.rows(first, last).to(dtype, copy=True) + adapter.rows(first, last, *pair)

    return LazyTensor(weight.shape, dtype, rows)
