"""When the gradients of several micro-batches travel between ranks.

With replicas (HSDP) each backward reduce-scatters inside of a replica, and FSDP2 keeps the sum of the micro-batches.
The all-reduce between replicas, which crosses nodes, runs in the last backward alone. The sharded sums take no more
memory than the gradients.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...utils.compat.torch_private import drop_partial_gradients


@contextmanager
def accumulating(model: nn.Module, n_backwards: int, replicas: int = 1) -> Iterator[Callable[[int], None]]:
    """Accumulate the gradients of several micro-batches. Call the yielded function with the number of each, from 0,
    before its backward.

    If the block raises, what was accumulated is dropped, so that the next step does not add it.
    """
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    last = n_backwards - 1

    def before(number: int) -> None:
        if replicas > 1 and last > 0 and number in (0, last):
            for module in modules:
                module.set_requires_all_reduce(number == last, recurse=False)

    try:
        yield before
    except BaseException:
        before(last)
        for module in modules:
            drop_partial_gradients(module)
        raise
