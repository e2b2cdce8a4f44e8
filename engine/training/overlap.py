"""Keys of `FSDPConfig` that let collectives of FSDP2 overlap more with computation. Their speed was
never measured.
"""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...utils.errors import ConfigError
from ..config import FSDPConfig
from ..memory.tensors import fsdp_modules

_GROUP = "set_separate_reduce_scatter_group"


def set_overlap(model: nn.Module, config: FSDPConfig) -> None:
    """Set what the keys say for a sharded model whose blocks run in the order of its modules, each
    in every forward.

    Collective with ``separate_reduce_scatter_group``.

    Raises:
        ConfigError: this torch has no separate group.
    """
    sharded = fsdp_modules(model)
    root, *blocks = sharded
    for module, following in _with_following(sharded, config.forward_prefetch):
        module.set_modules_to_forward_prefetch(following)

    # In a backward, the root comes first, too, and then the blocks from the last to the first.
    backwards = [root, *reversed(blocks)]
    for module, following in _with_following(backwards, config.backward_prefetch):
        module.set_modules_to_backward_prefetch(following)

    if config.separate_reduce_scatter_group:
        if not hasattr(root, _GROUP):
            raise ConfigError(
                "config key 'fsdp.separate_reduce_scatter_group' is True, but "
                f"FSDPModule.{_GROUP} does not exist in this torch; set it to false, or install a "
                "newer torch"
            )
        getattr(root, _GROUP)()


def _with_following(
    modules: Sequence[FSDPModule],
    count: int,
) -> Iterator[tuple[FSDPModule, list[FSDPModule]]]:
    if not count:
        return
    # The last modules have fewer than `count` after them.
    for number, module in enumerate(modules, 1):
        following = modules[number : number + count]
        yield module, list(following)
