"""Names of stored tensors: wrappers' prefixes are removed, and two tensors never share a name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import ConfigError


class Holder(nn.Module):
    """Two layers under any names, with other values in each."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


def sums(model: nn.Module) -> list[float]:
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


def layer(value: float) -> nn.Linear:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    nn.init.constant_(made.bias, value)
    return made


def test_a_module_whose_own_name_ends_like_a_wrappers_keeps_it(tmp_path: Path) -> None:
    saved = Holder(my_orig_mod=layer(1), my=layer(2), my_fsdp_wrapped_module=layer(3))
    save_dcp(tmp_path / "c", DCPState(saved))
    loaded = Holder(my_orig_mod=layer(0), my=layer(0), my_fsdp_wrapped_module=layer(0))
    load_dcp(tmp_path / "c", DCPState(loaded))
    assert sums(loaded) == sums(saved)
    assert "model.my_orig_mod.weight" in DCPState(saved).live_tensors()


def test_name_prefixes_of_wrappers_are_left_out(tmp_path: Path) -> None:
    save_dcp(tmp_path / "plain", DCPState(Holder(a=layer(1), b=layer(2))))
    compiled: Any = torch.compile(layer(0))
    wrapped = Holder(a=checkpoint_wrapper(layer(0)), b=compiled)
    load_dcp(tmp_path / "plain", DCPState(wrapped))
    assert sums(wrapped) == [4, 2, 8, 4]


@pytest.mark.parametrize("kind", ["parameters", "buffers", "a parameter and a buffer"])
def test_two_tensors_that_end_up_with_one_name_are_refused_and_named(
    kind: str, tmp_path: Path
) -> None:
    model = Holder(a=layer(1), _orig_mod=Holder(a=layer(2)))
    if kind != "parameters":
        model = Holder(a=nn.Module(), _orig_mod=Holder(a=nn.Module()))
        model.get_submodule("a").register_buffer("weight", torch.ones(1))
        inner = model.get_submodule("_orig_mod.a")
        if kind == "buffers":
            inner.register_buffer("weight", torch.zeros(1))
        else:
            inner.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match=r"both be called a\.weight") as refused:
        save_dcp(tmp_path / "c", DCPState(model))
    assert {"a.weight", "_orig_mod.a.weight"} <= set(str(refused.value).split())
    assert list(tmp_path.iterdir()) == []
