"""State that belongs to a model: found again, listed, and gone with the model."""

import gc

from torch import nn

from holdfast.engine.memory.per_model import PerModel, attached

colors = PerModel[str]("colors", "A colour, set by these tests.")
sizes = PerModel[int]("sizes", "A size, set by these tests.")


def test_each_model_has_its_own_state_of_each_kind() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    assert colors.set(first, "red") == "red"
    sizes.set(second, 0)
    assert (colors.of(first), colors.of(second)) == ("red", None)
    assert attached(first) == {"colors": "red"}
    assert attached(second) == {"sizes": 0}


def test_state_goes_with_its_model() -> None:
    model = nn.Linear(1, 1)
    colors.set(model, "green")
    assert "green" in [color for _, color in colors.items()]
    del model
    gc.collect()
    assert "green" not in [color for _, color in colors.items()]
