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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...utils.distributed import (
    RankGroup,
    gather_objects,
    get_group_ranks,
    get_rank,
    get_world_size,
)
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ...utils.logging import get_logger
from ...utils.plain_values import pack_json, unpack_json
from ..memory.per_model import PerModel
from ..memory.tensors import counts_here, local_box, local_tensor, ranks_of
from .fingerprint import bit_sum, sample_state
from .format import PathLike, Tensors

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
        config = getattr(model, "config", None)
        path = getattr(config, "name_or_path", None)
        if isinstance(path, str) and path:
            return cls(path)
        return cls()


class FrozenBase:
    """Frozen parameters (name -> parameter) that the start of a job has just made, watched for
    changes.

    Attributes:
        sums: name -> sum over the bits of this rank's part of a parameter that checkpoints leave
            out.
    """

    def __init__(self, named: Tensors) -> None:
        self.sums = _part_sums(named)

    def changed(self, frozen: Tensors) -> list[str]:
        """Names of the ``frozen`` parameters whose part on this rank has changed, or was never
        noted. Cost: one pass over this rank's part of the base.
        """
        watched = {name: tensor for name, tensor in frozen.items() if name in self.sums}
        now = _part_sums(watched)
        unchanged = {name for name, bits in now.items() if bits == self.sums[name]}
        return sorted(frozen.keys() - unchanged)

    def drop(
        self,
        frozen: Collection[str],
        own: list[str],
        group: RankGroup,
    ) -> None:
        """Forget parameters that have ``changed`` on any rank or are no longer ``frozen``, so that
        checkpoints hold them.

        All ranks of the model call it, each with its ``own`` changed ones. Cost: one small
        exchange.
        """
        stored = set[str]().union(*gather_objects(own, group))
        changed = sorted(self.sums.keys() & stored)
        left_out = set(frozen) - stored
        self.sums = {name: bits for name, bits in self.sums.items() if name in left_out}
        if changed and get_rank(group) == 0:
            logger.warning(
                "%s (%d such) is frozen, but not what it was at the start of this job: "
                "checkpoints hold it from now on",
                changed[0],
                len(changed),
            )


frozen_bases = PerModel[FrozenBase](
    "frozen_base",
    "Bits of the frozen parameters at the start of a job. Set by `DCPState.record_frozen_base`, "
    "before anything changes them. Ends with the model.",
)


def sums_of(
    named: Tensors,
    group: RankGroup = None,
) -> dict[str, int]:
    """Name -> this rank's share of the `bit_sum` of a parameter. Only the first rank of ``group``
    that holds a part counts it.
    """
    return dict.fromkeys(named, 0) | _part_sums(_counted(named, group))


def _part_sums(named: Tensors) -> dict[str, int]:
    sums = {}
    for name, tensor in named.items():
        offsets = local_box(tensor).offsets
        sums[name] = bit_sum(f"model.{name}", local_tensor(tensor), offsets)
    return sums


def _counted(
    named: Tensors,
    group: RankGroup,
) -> dict[str, Tensor]:
    ranks = None if group is None else get_group_ranks(group)
    return {name: tensor for name, tensor in named.items() if counts_here(tensor, ranks)}


def describe_base(
    frozen: Tensors,
    folder: BaseFolder,
    group: RankGroup = None,
    adapters: Mapping[str, Any] | None = None,
) -> Tensor:
    """Describe frozen parameters that a checkpoint leaves out, as JSON in uint8. The same on every
    rank of ``group``.

    ``adapters`` is the result of `describe_adapters` for the adapters trained on them, for tools
    without the model.
    """
    n_bytes = 0
    dtypes = Counter[str]()
    for tensor in frozen.values():
        n_bytes += tensor.numel() * tensor.element_size()
        dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
    described: dict[str, Any] = {
        "tensors": len(frozen),
        "bytes": n_bytes,
        "dtypes": dict(sorted(dtypes.items())),
        "ranks": get_world_size(group),
    }

    # Told only if it is not the usual one.
    cuts = _cuts_of(frozen, group)
    if cuts:
        described["cuts"] = cuts

    described["path"] = folder.path
    described["index"] = folder.index
    described["adapters"] = adapters
    return pack_json(described, BASE)


def sample_base(
    frozen: Tensors,
    group: RankGroup = None,
    base: FrozenBase | None = None,
) -> Tensor:
    """This rank's share of the fingerprint of frozen parameters that the ranks of ``group`` hold
    (see `pack_share`).

    The sums of ``base`` are taken as they are, without another pass.
    """
    counted = _counted(frozen, group)
    sums = _part_sums(counted) if base is None else base.sums
    sampled = sample_state({f"model.{name}": tensor for name, tensor in frozen.items()}, group)
    total = sum(sums[name] for name in counted)
    return pack_share(int(sampled["model"]), total)


def pack_share(*numbers: int) -> Tensor:
    """Pack sample and sum over every bit of a rank's parameters: ``[16]`` uint8, little-endian."""
    halves = [(number % _MODULUS).to_bytes(_HALF, "little") for number in numbers]
    packed = b"".join(halves)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def check_base(
    path: PathLike,
    saved: Tensors,
    frozen: Tensors,
    own: Tensor,
    folder: BaseFolder,
    group: RankGroup,
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
    # One share of each rank that saved, and one of each rank that loads.
    shares = [tensor for name, tensor in saved.items() if name.startswith(f"{BASE_SAMPLE}.")]
    _compare(path, saved[BASE], shares, frozen, folder, gather_objects(own, group))


def check_own_base(
    saved: Tensors,
    frozen: Tensors,
    folder: BaseFolder,
    own: str,
    group: RankGroup,
) -> None:
    """`check_base` of this rank's share alone, whose name is ``own``. Only if this rank of
    ``group`` held the same part then.
    """
    if BASE not in saved or own not in saved:
        return

    # Another cut gives a rank other parts, which have another fingerprint.
    there = unpack_json(saved[BASE], BASE)
    same_ranks = there.get("ranks") == get_world_size(group)
    if same_ranks and there.get("cuts", []) == _cuts_of(frozen, group):
        shares_here = [sample_base(frozen, group)]
        _compare("the state", saved[BASE], [saved[own]], frozen, folder, shares_here)


def _compare(
    path: PathLike,
    base: Tensor,
    shares: Sequence[Tensor],
    frozen: Tensors,
    folder: BaseFolder,
    own: Sequence[Tensor],
) -> None:
    there: Any = unpack_json(base, BASE)
    here: Any = unpack_json(describe_base(frozen, folder), BASE)

    # The checkpoint may come from an older version, or be damaged.
    required = here.keys() - {"adapters", "cuts"}
    if not isinstance(there, dict) or not required <= there.keys():
        raise CheckpointCorruptError(f"{path}: {BASE!r} does not describe frozen parameters")
    sizes = {len(share) for share in shares}
    if sizes not in ({_HALF}, {2 * _HALF}):
        raise CheckpointCorruptError(
            f"{path}: {BASE_SAMPLE!r} of a rank has {sorted(sizes)} bytes; expected {2 * _HALF}, "
            f"or {_HALF} on all"
        )

    saved_bits = base_fingerprint(shares)
    own_bits = base_fingerprint(own)
    if same_base(saved_bits, own_bits):
        return

    # Counts that differ are a more likely reason than another folder.
    if there["tensors"] != here["tensors"] or there["bytes"] != here["bytes"]:
        advice = (
            "It left out other parameters, or keeps them in another dtype; freeze and load them as "
            "that run did"
        )
    elif there["index"] != here["index"]:
        advice = "The files of the folders differ, too; start from the base that the run began with"
    else:
        advice = (
            "Start from the base that the run began with, in the same dtype, or with the same seed"
        )
    raise CheckpointMismatchError(
        f"{path} holds what was trained on another base model: its "
        f"{_told(there, saved_bits)}, those here {_told(here, own_bits)}. {advice}"
    )


def _cuts_of(
    frozen: Tensors,
    group: RankGroup,
) -> list[str]:
    """Meshes and placements of parameters that are not simply cut by rows over all ranks."""
    cuts = set()
    for tensor in frozen.values():
        if isinstance(tensor, DTensor):
            mesh_shape = list(ranks_of(tensor.device_mesh).shape)
            cuts.add(f"{mesh_shape} {tensor.placements}")
    usual = f"{[1, get_world_size(group)]} {(Shard(0),)}"
    return sorted(cuts - {usual})


def base_fingerprint(shares: Iterable[Tensor]) -> str:
    """The fingerprint of frozen parameters, from every rank's `sample_base`: 32 hex digits, 16 for
    an older folder.
    """
    numbers = []
    for share in shares:
        data = bytes(share.tolist())
        halves = [data[at : at + _HALF] for at in range(0, len(data), _HALF)]
        numbers.append([int.from_bytes(half, "little") for half in halves])

    # Each half is added up over the ranks. Older folders have only the first.
    digits = ""
    for of_ranks in zip(*numbers, strict=False):
        digits += f"{sum(of_ranks) % _MODULUS:016x}"
    return digits


def same_base(
    saved: str,
    here: str,
) -> bool:
    """Whether two `base_fingerprint`s agree in the digits that both have. An empty one agrees with
    nothing.
    """
    known = min(len(saved), len(here))
    return known > 0 and saved[:known] == here[:known]


def _told(
    base: Mapping[str, Any],
    fingerprint: str,
) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in base["dtypes"].items())
    source = ""
    if base["path"]:
        source = f" of {base['path']}"
    return f"frozen parameters{source} ({dtypes or 'none'}) have the fingerprint {fingerprint}"
