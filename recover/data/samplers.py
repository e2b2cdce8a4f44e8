"""Seeds, generators and ``__iter__`` of samplers and datasets, for any class that keeps them in
attributes.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from ...utils.errors import CheckpointMismatchError
from ...utils.logging import get_logger

logger = get_logger(__name__)


def is_torchdatas(sampler: Any) -> bool:
    """Whether torchdata iterates over a sampler with an iterator of its own, and so saves where it
    is. A subclass with another ``__iter__`` does not count.
    """
    module = getattr(getattr(type(sampler), "__iter__", None), "__module__", None) or ""
    return module.partition(".")[0] == "torchdata"


def draws_of(source: Any) -> dict[str, Any]:
    """Seeds and generator states among the attributes of a sampler, as plain values by name.

    A seed is an integer attribute whose name ends with ``seed``, such as
    ``DistributedSampler.seed`` and ``SeedableRandomSampler.initial_seed``. A generator is one of
    torch, numpy or Python. A sampler with ``shuffle`` False has neither.
    """
    if not getattr(source, "shuffle", True):
        return {}
    found = {}
    for name, value in getattr(source, "__dict__", {}).items():
        draw = _draw(name, value)
        if draw is not None:
            found[name] = draw
    return found


def restore_draws(source: Any, draws: Mapping[str, Any]) -> None:
    """Restore the result of `draws_of`. Names that ``source`` does not have are ignored.

    Raises:
        CheckpointMismatchError: the attribute is another kind of generator than in the saved run.
    """
    for name, draw in draws.items():
        # The attribute as it is here must be of the saved kind.
        value = getattr(source, name, None)
        here = _draw(name, value)
        if here is None:
            continue
        if _kind(here) != _kind(draw):
            raise CheckpointMismatchError(
                f"{name} of {type(source).__name__} is {value!r}, and was another kind of "
                "generator or seed when the run was saved: samples would be lost or repeated. "
                "Resume with the sampler of the run"
            )
        # A generator is changed in place, because others may hold it too. A seed is replaced.
        match value:
            case torch.Generator():
                value.set_state(draw)
            case np.random.Generator():
                value.bit_generator.state = draw
            case np.random.RandomState():
                value.set_state(draw)
            case random.Random():
                version, words, gauss = draw
                value.setstate((version, tuple(words), gauss))
            case _ if value != draw:
                logger.info(
                    "%s.%s is %s here: the run goes on with its own, %s",
                    type(source).__name__,
                    name,
                    here,
                    draw,
                )
                setattr(source, name, draw)


def _kind(draw: Any) -> Any:
    # States of all of numpy's generators are dicts.
    return draw.get("bit_generator") if isinstance(draw, dict) else type(draw)


def _draw(name: str, value: Any) -> Any:
    match value:
        case torch.Generator():
            return value.get_state()
        case np.random.Generator():
            return _plain(value.bit_generator.state)
        case np.random.RandomState():
            return _plain(value.get_state(legacy=False))
        case random.Random() if not isinstance(value, random.SystemRandom):
            return _plain(value.getstate())
        case int() if name.endswith("seed") and not isinstance(value, bool):
            return value
        case _:
            return None


def _plain(state: Any) -> Any:
    # Plain values can be saved: no tuples, no arrays.
    match state:
        case Mapping():
            return {key: _plain(each) for key, each in state.items()}
        case tuple():
            return [_plain(each) for each in state]
        case np.ndarray():
            return state.tolist()
        case _:
            return state


def replace_iter(source: Any, iterate: Callable[[Any], Iterator[Any]], **attributes: Any) -> None:
    """Make ``iter(source)`` return ``iterate(source)``, for this object only.

    The object gets a subclass of its class with these ``attributes``, because Python looks up
    ``__iter__`` in the class. Pickles and copies of the object have its original class, so worker
    processes and ``copy.deepcopy`` get the sampler as the user made it.
    """
    own: Any = type(source)

    # A pickle names the original class wherever it would name the subclass.
    def reduce(self: Any, protocol: int) -> Any:
        make, given, *state = own.__reduce_ex__(self, protocol)
        call = [own if part is type(self) else part for part in (make, *given)]
        return (_make, tuple(call), *state)

    body: dict[str, Any] = {
        "__iter__": iterate,
        "__reduce_ex__": reduce,
        "__module__": own.__module__,
        "__doc__": own.__doc__,
    }
    source.__class__ = type(own.__name__, (own,), body | attributes)


def _make(make: Callable[..., Any], *given: Any) -> Any:
    return make(*given)
