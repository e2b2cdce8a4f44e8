"""What a checkpoint says of frozen parameters in the place of their values: enough to know them again.

Frozen parameters (the base model under LoRA, a body under a new head) do not change: they come from the folder that
the model was made from, or from its seed, each time a job starts. A checkpoint that leaves them out holds their
fingerprint, and for messages where they came from. A load is refused where the live ones have another fingerprint,
before anything changes. It is of bits, so a base in another dtype is another base, and it has two halves, both the same
at every world size: a sample of each tensor (see `fingerprint`), taken at every save, and a sum over every bit (see
`bit_sum`), which is computed again when something shows a change. Folders from before have the first half alone.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ...utils.distributed import gather_objects, get_world_size
from ...utils.errors import CheckpointCorruptError, CheckpointMismatchError
from ...utils.safe_json import pack_json, unpack_json
from .bit_sum import unchanging_bits
from .fingerprint import sample_state

BASE = "base"
"""Name of the tensor that holds what `describe_base` says."""
BASE_SAMPLE = "base_sample"
"""Name under which each rank has its share of the fingerprint, two numbers of 8 bytes; of older folders the first."""
_HALF = 8
_MODULUS = 2**64


@dataclass(frozen=True)
class BaseFolder:
    """Where frozen parameters came from; tells people, decides nothing.

    Attributes:
        path: folder, or id of a model on the hub; None: unknown.
        index: digest of its index; None: unknown, or drawn from a seed.
    """

    path: str | None = None
    index: str | None = None

    @classmethod
    def of(cls, model: nn.Module) -> "BaseFolder":
        """What a transformers model, or one of peft around it, says of itself."""
        path = getattr(getattr(model, "config", None), "name_or_path", None)
        return cls(path if isinstance(path, str) and path else None)


def is_mostly_frozen(model: nn.Module) -> bool:
    """Whether what is frozen outweighs what is trained: a base, and no target network or router's bias."""
    elements = {True: 0, False: 0}
    for param in model.parameters():
        elements[param.requires_grad] += param.numel()
    return 0 < elements[True] < elements[False]


def describe_base(
    frozen: Mapping[str, torch.Tensor], folder: BaseFolder, adapters: Mapping[str, Any] | None = None
) -> torch.Tensor:
    """What a checkpoint says of frozen parameters, as JSON in uint8; the same on every rank.

    Args:
        frozen: the parameters.
        folder: where they came from.
        adapters: what is trained on them, for who has the folder alone (see `lora.description`).
    """
    dtypes = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in frozen.values())
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in frozen.values())
    counts = {"tensors": len(frozen), "bytes": n_bytes, "dtypes": dict(sorted(dtypes.items()))}
    counts["ranks"] = get_world_size()
    return pack_json({**counts, "path": folder.path, "index": folder.index, "adapters": adapters}, BASE)


def sample_base(frozen: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """This rank's share of the fingerprint of frozen parameters, see `pack_share`."""
    named = {f"model.{name}": tensor for name, tensor in frozen.items()}
    sample = int(sample_state(named)["model"])
    return pack_share(sample, unchanging_bits(named, sample))


def pack_share(*numbers: int) -> torch.Tensor:
    """The sample, and the sum over every bit, of what a rank holds: ``[16]`` uint8, little-endian."""
    return torch.frombuffer(
        bytearray(b"".join(number.to_bytes(_HALF, "little") for number in numbers)), dtype=torch.uint8
    )


def check_base(
    path: str | os.PathLike[str],
    saved: Mapping[str, torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    own: torch.Tensor,
    folder: BaseFolder,
    group: dist.ProcessGroup | None,
) -> None:
    """See that live frozen parameters are those that a checkpoint was made with; all ranks of ``group`` call it.

    Args:
        path: of the checkpoint, for messages.
        saved: dotted name -> tensor of the checkpoint: `BASE`, and the `BASE_SAMPLE` of every rank that saved.
        frozen: the live ones that it left out.
        own: `sample_base` of these.
        folder: where these came from.
        group: their ranks.

    Raises:
        CheckpointMismatchError: they are others; on every rank.
    """
    if BASE not in saved:
        return
    shares = [tensor for name, tensor in saved.items() if name.startswith(f"{BASE_SAMPLE}.")]
    _compare(path, saved[BASE], shares, frozen, folder, gather_objects(own, group))


def check_own_base(
    saved: Mapping[str, torch.Tensor], frozen: Mapping[str, torch.Tensor], folder: BaseFolder, own: str
) -> None:
    """`check_base` of this rank's share alone, whose name is ``own``; only at the world size of the save."""
    if BASE in saved and own in saved and unpack_json(saved[BASE], BASE).get("ranks") == get_world_size():
        _compare("the state", saved[BASE], [saved[own]], frozen, folder, [sample_base(frozen)])


def _compare(
    path: str | os.PathLike[str],
    base: torch.Tensor,
    shares: Sequence[torch.Tensor],
    frozen: Mapping[str, torch.Tensor],
    folder: BaseFolder,
    own: Sequence[torch.Tensor],
) -> None:
    there: Any = unpack_json(base, BASE)
    here: Any = unpack_json(describe_base(frozen, folder), BASE)
    if not isinstance(there, dict) or not here.keys() - {"adapters"} <= there.keys():
        raise CheckpointCorruptError(f"{path}: {BASE!r} does not describe frozen parameters")
    if (sizes := {len(share) for share in shares}) not in ({_HALF}, {2 * _HALF}):
        raise CheckpointCorruptError(
            f"{path}: {BASE_SAMPLE!r} of a rank has {sorted(sizes)} bytes; expected {2 * _HALF}, or {_HALF} on all"
        )
    fingerprints = base_fingerprint(shares), base_fingerprint(own)
    if same_base(*fingerprints):
        return
    raise CheckpointMismatchError(
        f"{path} holds what was trained on another base model: its {_told(there, fingerprints[0])}, those "
        f"here {_told(here, fingerprints[1])}. {_advice(there, here)}"
    )


def base_fingerprint(shares: Iterable[torch.Tensor]) -> str:
    """The fingerprint of frozen parameters, of every rank's `sample_base`: 32 hex digits, of an older folder 16."""
    data = [bytes(share.tolist()) for share in shares]
    numbers = [
        [int.from_bytes(share[at : at + _HALF], "little") for at in range(0, len(share), _HALF)] for share in data
    ]
    return "".join(f"{sum(halves) % _MODULUS:016x}" for halves in zip(*numbers, strict=False))


def same_base(saved: str, here: str) -> bool:
    """Whether two `base_fingerprint`s are of the same bits, as far as both know them; one of nothing is of no base."""
    known = min(len(saved), len(here))
    return known > 0 and saved[:known] == here[:known]


def _told(base: Mapping[str, Any], fingerprint: str) -> str:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in base["dtypes"].items()) or "none"
    source = f" of {base['path']}" if base["path"] else ""
    return f"frozen parameters{source} ({dtypes}) have the fingerprint {fingerprint}"


def _advice(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    if (there["tensors"], there["bytes"]) != (here["tensors"], here["bytes"]):
        return "It left out other parameters, or keeps them in another dtype; freeze and load them as that run did"
    if there["index"] != here["index"]:
        return "The files of the folders differ, too; start from the base that the run began with"
    return "Start from the base that the run began with, in the same dtype, or with the same seed"
