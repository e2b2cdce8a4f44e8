"""Modules whose buffers are stored in one dtype and computed with in another, as FSDP2 has it for parameters.

The cast takes the buffer's place while the module's own ``forward`` runs, also when that runs again for a checkpointed
activation. All other code has the stored tensor: what is written to it is kept, saved and loaded.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...utils.compat.torch_private import buffers_of, n_writes


def casting_class(cls: type[nn.Module], dtypes: Mapping[str, torch.dtype]) -> type[nn.Module]:
    """``cls`` with a ``forward`` that has the named buffers in these dtypes; what it writes to them is cast back."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _cast(module, dtypes):
            return cls.forward(module, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


@contextmanager
def _cast(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> Iterator[None]:
    buffers = buffers_of(module)
    stored = {name: buffer for name in dtypes if (buffer := buffers[name]) is not None}
    casts = {name: buffer.to(dtypes[name], copy=True) for name, buffer in stored.items()}
    buffers.update(casts)
    try:
        yield
    finally:
        for name, buffer in stored.items():
            buffers[name] = _after(buffer, casts[name], buffers[name])


@torch.no_grad()
def _after(stored: torch.Tensor, cast: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor | None:
    """The buffer when ``forward`` has left ``found`` in the place of ``cast``."""
    if found is not cast:
        return None if found is None else found.to(stored.dtype)
    if n_writes(cast):
        stored.copy_(cast)
    return stored
