"""State that belongs to a model and lives as long as the model.

Several parts of the engine must find something again that they noted about a model, and get no
more than the model: its cuts by tensor parallelism, copies of offloaded weights, buffers for
snapshots. Each kind of state is one `PerModel`, so that a reader or a debugger finds all of them.
"""

from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

_kinds: list["PerModel[Any]"] = []


class PerModel(Generic[T]):
    """One kind of state, by model. A model that is garbage collected takes its state along.

        tensor_cuts = PerModel[Cut]("tensor_cuts", "How tensor parallelism cut the model.")
        tensor_cuts.set(model, cut)
        tensor_cuts.of(model)

    The owner is a model or another object that lives long, like a mesh.

    Args:
        name: key of this kind in the result of `attached`.
        what: the state in words, with the function that sets it and when it ends.
    """

    def __init__(
        self,
        name: str,
        what: str,
    ) -> None:
        self.name = name
        self.what = what
        self._values: WeakKeyDictionary[Any, T] = WeakKeyDictionary()
        _kinds.append(self)

    def of(self, model: object) -> T | None:
        """The state of ``model``. None if it was never set."""
        return self._values.get(model)

    def set(
        self,
        model: object,
        value: T,
    ) -> T:
        """Keep ``value`` as the state of ``model``, instead of the former one. Returns it."""
        self._values[model] = value
        return value

    def items(self) -> list[tuple[Any, T]]:
        """All models with state of this kind, and their state."""
        return list(self._values.items())


def attached(model: object) -> dict[str, Any]:
    """State of every kind that ``model`` has, by the kind's name. For a debugger."""
    return {kind.name: kind.of(model) for kind in _kinds if kind.of(model) is not None}
