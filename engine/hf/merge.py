"""Merged weights, W + s B A, for an export: made where they are written, a tensor's own rows at a time.

Only A and B are gathered, which are small. Of W each rank has its rows, and adds the product's rows to a copy of them:
beside the model there is memory for both of A and B, and for one rank's part of one tensor.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from ..lora.layers import Adapter, plain_adapters
from .shard_ranges import LocalPart, whole_tensor


class MergedWeights:
    """What is to be added to the weights of a model that has adapters.

    Collective over the mesh of the adapters, or over ``gather_group``: A and B are gathered when it is made.

    Args:
        model: with adapters or without.
        gather_group: see `whole_tensor`.
    """

    def __init__(self, model: nn.Module, gather_group: dist.ProcessGroup | None = None) -> None:
        self._adapters: Mapping[str, list[tuple[Adapter, torch.Tensor, torch.Tensor]]] = {
            key: [(one, whole_tensor(one.a, gather_group), whole_tensor(one.b, gather_group)) for one in adapters]
            for key, adapters in plain_adapters(model).items()
        }
        self._last: tuple[str, LocalPart, LocalPart] | None = None

    def part(self, key: str, part: LocalPart, columns: int) -> LocalPart:
        """A part of the tensor ``key``, with what its adapters add; itself if it has none.

        Args:
            key: ``state_dict`` key in the plain model.
            part: whole rows of it.
            columns: elements of a row.
        """
        if key not in self._adapters or part.start == part.stop:
            return part
        if self._last is None or self._last[0] != key or self._last[1] is not part:
            first = part.start // columns
            merged = self._added(key, part.data.reshape(-1, columns), first)
            self._last = key, part, replace(part, data=merged)
        return self._last[2]

    def whole(self, key: str, values: torch.Tensor) -> torch.Tensor:
        """All of the tensor ``key``, with what its adapters add; ``values`` itself if it has none."""
        return self._added(key, values, 0) if key in self._adapters else values

    def _added(self, key: str, rows: torch.Tensor, first: int) -> torch.Tensor:
        merged = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
        for adapter, a, b in self._adapters[key]:
            delta = adapter.rows(first, first + len(rows), a.to(rows.device), b.to(rows.device))
            merged += delta
        return merged
