"""Compare what was written with what was read: a digest of every tensor, taken block by block."""

from collections.abc import Callable, Iterable, Mapping

import torch
import xxhash
from torch import Tensor

from ...engine.memory.tensors import bytes_of
from ...utils.errors import CheckpointCorruptError
from .stored_tensors import Tensors

Seen = Callable[[str, int, Tensor], None]
"""Called for each block with ``model.<name>`` or ``optim.state.<parameter>.<entry>``, first element
and values.
"""


class Digests:
    """One digest per tensor, from its blocks in order. ``advance`` is called with the bytes of each
    block.
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._digests: dict[str, xxhash.xxh3_128] = {}
        self._advance = advance

    def seen(
        self,
        name: str,
        first: int,
        values: Tensor,
    ) -> None:
        """Add a block, see `Seen`."""
        # A tensor that has several names is read for each, so it may begin again.
        if first == 0 or name not in self._digests:
            self._digests[name] = xxhash.xxh3_128()
        data = bytes_of(values).numpy().data
        self._digests[name].update(memoryview(data))  # type: ignore[arg-type]
        self._advance(values.nbytes)

    def add_all(self, tensors: Tensors) -> None:
        """Read all blocks of ``tensors``."""
        for name, tensor in tensors.items():
            for first, values in tensor.blocks():
                self.seen(name, first, values)
            if not tensor.numel:
                nothing = torch.empty(0)
                self.seen(name, 0, nothing)

    def values(self) -> dict[str, str]:
        """Name -> digest."""
        found: dict[str, str] = {}
        for name, digest in self._digests.items():
            found[name] = digest.hexdigest()
        return found


def require_all_written(
    what: str,
    source: Tensors,
    written: Mapping[str, str],
) -> None:
    """Raise `CheckpointCorruptError` unless every tensor of ``source`` was written.
    `require_equal` skips others.
    """
    missing: list[str] = []
    for name, tensor in source.items():
        if tensor.numel and name not in written:
            missing.append(name)
    if missing:
        raise CheckpointCorruptError(
            f"{what}: {missing[0]} of the source was not written ({len(missing)} such). Nothing "
            "was made"
        )


def require_equal(
    what: str,
    written: Mapping[str, str],
    found: Mapping[str, str],
    aliases: Iterable[str],
) -> None:
    """Raise `CheckpointCorruptError` unless the target holds the tensors of the source.

    ``written`` are the digests by name that were taken from the source while the target was
    written, ``found`` those of the target, as it was read back. ``aliases`` are names in the source
    that the target need not have.
    """
    # A tied tensor is written under all of its names, but read back under one.
    wanted = dict(written)
    for alias in aliases:
        name = f"model.{alias}"
        if name not in found:
            wanted.pop(name, None)

    # A tensor without elements may be on one side only.
    nothing = xxhash.xxh3_128().hexdigest()
    wrong: list[str] = []
    for name in {**wanted, **found}:
        before = wanted.get(name, nothing)
        after = found.get(name, nothing)
        if before != after:
            wrong.append(name)
    if wrong:
        raise CheckpointCorruptError(
            f"{what}: {wrong[0]} is not what was read from the source ({len(wrong)} of "
            f"{len(found)} differ). Nothing was made; look at the disk, and try again"
        )
