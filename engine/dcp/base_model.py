"""Frozen parameters that checkpoints leave out, and the fingerprint that stands in their place.

The base model under LoRA comes from its folder, or from a seed, each time a job starts. A
checkpoint may leave it out as long as it still has the bits of that start. `FrozenBase` compares
every bit before each save. A parameter that has changed is stored from then on, so a checkpoint
leaves out only parameters that the next start makes again.

A checkpoint holds the fingerprint of the parameters that it leaves out, and a load on another base
is refused before anything changes. The fingerprint depends on the bits, so a base in another dtype
is another base. It has two halves, both the same at every world size: a sample of each tensor, and
a sum over every bit (see `fingerprint`). Older folders have only the sample.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ...utils.distributed import gather_objects, get_rank, get_world_size
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ...utils.logging import get_logger
from ...utils.plain_values import pack_json, unpack_json
from ..memory.tensors import counts_here, local_box, local_tensor, ranks_of
from .fingerprint import bit_sum, sample_state
from .format import PathLike

logger = get_logger(__name__)

BASE = "base"
"""Name of the tensor that holds the result of `describe_base`."""
BASE_SAMPLE = "base_sample"
"""Name under which each rank has its share of the fingerprint, two numbers of 8 bytes. Older
folders have the first.
"""
_HALF = 8
_MODULUS = 2**64


@dataclass(frozen=True)
class BaseFolder:
    """Source of the frozen parameters, for messages only.

    Attributes:
        path: folder, or id of a model on the hub. None if unknown.
        index: digest of the folder's index. None if unknown, or if the weights were drawn from a
            seed.
    """

    path: str | None = None
    index: str | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "BaseFolder":
        """The folder that a transformers model, or a PeftModel around one, names as its source."""
        path = getattr(getattr(model, "config", None), "name_or_path", None)
        return cls(path if isinstance(path, str) and path else None)


class FrozenBase:
    """Frozen parameters (name -> parameter) that the start of a job has just made, watched for
    changes.

    Attributes:
        sums: name -> this rank's share of the sum over the bits of a parameter that checkpoints
            leave out.
    """

    _of_models: ClassVar[WeakKeyDictionary[nn.Module, "FrozenBase"]] = WeakKeyDictionary()

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        self.sums = sums_of(named)

    @classmethod
    def of(cls, model: nn.Module, named: Mapping[str, torch.Tensor]) -> "FrozenBase":
        """The base of ``model``. Every call returns the object of the first call, whose parameters
        count.
        """
        if model not in cls._of_models:
            cls._of_models[model] = cls(named)
        return cls._of_models[model]

    def drop_changed(
        self, frozen: Mapping[str, torch.Tensor], group: dist.ProcessGroup | None
    ) -> None:
        """Forget parameters that have changed on any rank or are no longer ``frozen``, so that
        checkpoints hold them.

        All ranks of the model call it. Cost: one pass over this rank's part of the base, and one
        small exchange.
        """
        now = sums_of({name: frozen[name] for name in frozen.keys() & self.sums.keys()})
        own = sorted(frozen.keys() - {name for name in now if now[name] == self.sums[name]})
        stored = {name for names in gather_objects(own, group) for name in names}
        changed = sorted(self.sums.keys() & stored)
        self.sums = {
            name: bits for name, bits in self.sums.items() if name in frozen and name not in stored
        }
        if changed and get_rank(group) == 0:
            logger.warning(
                "%s (%d such) is frozen, but not what it was at the start of this job: checkpoints hold it from now on",
                changed[0], len(changed),
            )  # fmt: skip


def sums_of(named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name -> this rank's share of the `bit_sum` of a parameter. Only the first rank that holds a
    part counts it.
    """
    counted = {name: tensor for name, tensor in named.items() if counts_here(tensor)}
    sums = {
        n: bit_sum(f"model.{n}", local_tensor(t), local_box(t).offsets) for n, t in counted.items()
    }
    return dict.fromkeys(named, 0) | sums


def describe_base(
    frozen: Mapping[str, torch.Tensor],
    folder: BaseFolder,
    adapters: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Describe frozen parameters that a checkpoint leaves out, as JSON in uint8. The same on every
    rank.

    ``adapters`` is the result of `describe_adapters` for the adapters trained on them, for tools
    without the model.
    """
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in frozen.values())
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in frozen.values())
    counts = {"tensors": len(frozen), "bytes": n_bytes, "dtypes": dict(sorted(dtypes.items()))}
    counts["ranks"] = get_world_size()
    if cuts := _cuts_of(frozen):
        counts["cuts"] = cuts
    return pack_json(
        {**counts, "path": folder.path, "index": folder.index, "adapters": adapters}, BASE
    )


def sample_base(
    frozen: Mapping[str, torch.Tensor], sums: Mapping[str, int] | None = None
) -> torch.Tensor:
    """This rank's share of the fingerprint of frozen parameters (see `pack_share`). ``sums`` if
    they are known.
    """
    sums = sums_of(frozen) if sums is None else sums
    sample = int(
        sample_state({f"model.{name}": tensor for name, tensor in frozen.items()})["model"]
    )
    return pack_share(sample, sum(sums[name] for name in frozen))


def pack_share(*numbers: int) -> torch.Tensor:
    """The sample and the sum over every bit of a rank's parameters: ``[16]`` uint8, little-endian."""
    packed = b"".join((number % _MODULUS).to_bytes(_HALF, "little") for number in numbers)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def check_base(
    path: PathLike,
    saved: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    own: torch.Tensor,
    folder: BaseFolder,
    group: dist.ProcessGroup | None,
) -> None:
    """Compare live frozen parameters with the checkpoint ``path``. All ranks of ``group`` call it.

    Args:
        path: the checkpoint, for messages.
        saved: dotted name -> tensor of the checkpoint: `BASE`, and the `BASE_SAMPLE` of every rank
            that saved.
        frozen: live parameters that the checkpoint left out, with their source ``folder``.
        own: their `sample_base` on this rank.

    Raises:
        CheckpointMismatchError: the parameters differ. Raised on every rank.
    """
    shares = [tensor for name, tensor in saved.items() if name.startswith(f"{BASE_SAMPLE}.")]
    _compare(path, saved[BASE], shares, frozen, folder, gather_objects(own, group))


def check_own_base(
    saved: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    folder: BaseFolder,
    own: str,
) -> None:
    """`check_base` of this rank's share alone, whose name is ``own``. Only if this rank held the
    same part then.
    """
    if BASE not in saved or own not in saved:
        return
    there = unpack_json(saved[BASE], BASE)
    if (there.get("ranks"), there.get("cuts", [])) == (get_world_size(), _cuts_of(frozen)):
        _compare("the state", saved[BASE], [saved[own]], frozen, folder, [sample_base(frozen)])


def _compare(
    path: PathLike,
    base: torch.Tensor,
    shares: Sequence[torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    folder: BaseFolder,
    own: Sequence[torch.Tensor],
) -> None:
    there: Any = unpack_json(base, BASE)
    here: Any = unpack_json(describe_base(frozen, folder), BASE)
    if not isinstance(there, dict) or not here.keys() - {"adapters", "cuts"} <= there.keys():
        raise CheckpointCorruptError(f"{path}: {BASE!r} does not describe frozen parameters")
    if (sizes := {len(share) for share in shares}) not in ({_HALF}, {2 * _HALF}):
        raise CheckpointCorruptError(
            f"{path}: {BASE_SAMPLE!r} of a rank has {sorted(sizes)} bytes; expected {2 * _HALF}, "
            f"or {_HALF} on all"
        )
    fingerprints = base_fingerprint(shares), base_fingerprint(own)
    if same_base(*fingerprints):
        return
    if (there["tensors"], there["bytes"]) != (here["tensors"], here["bytes"]):
        advice = "It left out other parameters, or keeps them in another dtype; freeze and load them as that run did"
    elif there["index"] != here["index"]:
        advice = "The files of the folders differ, too; start from the base that the run began with"
    else:
        advice = (
            "Start from the base that the run began with, in the same dtype, or with the same seed"
        )
    raise CheckpointMismatchError(
        f"{path} holds what was trained on another base model: its "
        f"{_told(there, fingerprints[0])}, those here {_told(here, fingerprints[1])}. {advice}"
    )


def _cuts_of(frozen: Mapping[str, torch.Tensor]) -> list[str]:
    """Meshes and placements of parameters that are not simply cut by rows over all ranks."""
    sharded = [tensor for tensor in frozen.values() if isinstance(tensor, DTensor)]
    cuts = {f"{list(ranks_of(tensor.device_mesh).shape)} {tensor.placements}" for tensor in sharded}
    return sorted(cuts - {f"{[1, get_world_size()]} {(Shard(0),)}"})


def base_fingerprint(shares: Iterable[torch.Tensor]) -> str:
    """The fingerprint of frozen parameters, from every rank's `sample_base`: 32 hex digits, 16 for
    an older folder.
    """
    data = [bytes(share.tolist()) for share in shares]
    numbers = [
        [int.from_bytes(share[at : at + _HALF], "little") for at in range(0, len(share), _HALF)]
        for share in data
    ]
    return "".join(f"{sum(halves) % _MODULUS:016x}" for halves in zip(*numbers, strict=False))


def same_base(saved: str, here: str) -> bool:
    """Whether two `base_fingerprint`s agree in the digits that both have. An empty one agrees with
    nothing.
    """
    known = min(len(saved), len(here))
    return known > 0 and saved[:known] == here[:known]


def _told(base: Mapping[str, Any], fingerprint: str) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in base["dtypes"].items()) or "none"
    source = f" of {base['path']}" if base["path"] else ""
    return f"frozen parameters{source} ({dtypes}) have the fingerprint {fingerprint}"
