"""DCP folders of torch's own ``dcp.save``, under any root: loaded directly, and converted."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from holdfast_convert import convert
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.root_names import Root, find_roots
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from tests.helpers import run_ranks
from tests.plugins.convert.hosts import Host, assert_same, tiny_config
from tests.tiers import slow_but

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


class ArealState(Stateful):
    """The state that AReaL's engine saves and loads: torch's own state of model and optimizer."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.host.model, self.host.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.host.model,
            self.host.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def save_areal(host: Host, folder: Path) -> None:
    dcp.save({"dcp": ArealState(host)}, checkpoint_id=str(folder))


def save_app(host: Host, folder: Path) -> None:
    model, optim = get_state_dict(host.model, host.optimizer)
    dcp.save({"app": {"model": model, "optim": optim}}, checkpoint_id=str(folder))


def save_plain(host: Host, folder: Path) -> None:
    """Save like a plain script: the model's names in one place, the optimizer by numbers."""
    state = {"model": host.model.state_dict(), "optimizer": host.optimizer.state_dict(), "step": 3}
    dcp.save(state, checkpoint_id=str(folder))


def save_titan(host: Host, folder: Path) -> None:
    """Save in torchtitan's layout: parameters at the top, a flattened optimizer, the schedule, its
    step.
    """
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = {
        **get_model_state_dict(host.model),
        "optimizer": get_optimizer_state_dict(host.model, host.optimizer, options=options),
        "lr_scheduler": host.scheduler.state_dict(),
        "train_state": {"step": torch.tensor(3, dtype=torch.int32)},
        "dataloader": {"dp_rank_0": b"opaque"},
    }
    dcp.save(state, checkpoint_id=str(folder))


@pytest.mark.parametrize(
    ("save", "root"), [(save_areal, "dcp"), (save_app, "app"), (save_titan, ""), (save_plain, "")]
)
def test_a_folder_of_any_root_is_loaded_directly(save: Any, root: str, tmp_path: Path) -> None:
    host = Host(groups=True).train(3)
    save(host, tmp_path / "c")
    expected, other = host.tensors(), Host(5, groups=True)
    with_optim = save is not save_plain
    state = other.state if with_optim else DCPState(other.model)
    load_dcp(tmp_path / "c", state, root=root)
    wanted = {
        name: tensor for name, tensor in expected.items() if with_optim or name.startswith("model.")
    }
    assert_same({name: tensor.clone() for name, tensor in state.live_tensors().items()}, wanted)


def test_a_root_that_is_not_there_is_an_error_that_lists_those_that_are(tmp_path: Path) -> None:
    host = Host().train(1)
    save_app(host, tmp_path / "app")
    before = host.digest()
    with pytest.raises(
        CheckpointMismatchError,
        match=r"no model under 'dcp'.* a model under 'app' \(app\.model\.lm_head",
    ):
        load_dcp(tmp_path / "app", host.state)
    with pytest.raises(
        CheckpointMismatchError, match=r"no model under 'model'; it has a model under 'app'"
    ):
        load_dcp(tmp_path / "app", host.state, root="model")
    dcp.save(
        {"notes": {"a": torch.ones(1)}, "optim": {"b": torch.ones(1)}},
        checkpoint_id=str(tmp_path / "none"),
    )
    with pytest.raises(CheckpointMismatchError, match=r"no model under 'x'"):
        load_dcp(tmp_path / "none", host.state, root="x")
    assert host.digest() == before


def test_a_model_whose_own_names_begin_with_model_is_found_at_the_top_and_below_model(
    tmp_path: Path,
) -> None:
    host, other = Host().train(1), Host(3)
    dcp.save(dict(host.model.state_dict()), checkpoint_id=str(tmp_path / "top"))
    load_dcp(tmp_path / "top", DCPState(other.model), root="")
    weights = {name: t for name, t in host.tensors().items() if name.startswith("model.")}
    assert_same({f"model.{n}": p.detach() for n, p in other.model.named_parameters()}, weights)


def test_roots_are_recognised_by_the_entries_next_to_a_model() -> None:
    assert find_roots(["app.model.w", "app.optim.state.w.step", "app.rng"]) == [
        Root("app", "app.model.", "app.optim.")
    ]
    assert find_roots(["model.w", "optimizer.state.0.step"]) == [Root("", "model.", "optimizer.")]
    assert find_roots(["a.model.w", "b.model.w"]) == [
        Root("a", "a.model.", None),
        Root("b", "b.model.", None),
    ]
    assert find_roots(["model.layers.0.w", "lm_head.w"]) == [Root("", "", None)]
    assert find_roots(["layers.w", "optimizer.state.layers.w.step"]) == [Root("", "", "optimizer.")]
    assert find_roots(["optimizer.state.0.step"]) == []


@pytest.mark.parametrize(
    ("save", "beside"),
    [
        (save_app, ["optim"]),
        (save_titan, ["dataloader", "lr_scheduler", "optimizer", "train_state"]),
        (save_plain, ["optimizer", "step"]),
    ],
)
def test_the_weights_of_every_root_convert_without_being_named(
    save: Any, beside: list[str], tmp_path: Path
) -> None:
    host = Host().train(3)
    save(host, tmp_path / "c")
    done = convert(tmp_path / "c", tmp_path / "d", to="dcp", config=config_folder(tmp_path))
    assert not done.optimizer and done.ignored == beside
    other = Host(5).model
    load_dcp(tmp_path / "d", DCPState(other))
    assert_same(dict(other.named_parameters()), dict(host.model.named_parameters()))


def test_the_optimizer_of_areal_converts_with_moments_and_rates(tmp_path: Path) -> None:
    host = Host(groups=True).train(3)
    save_areal(host, tmp_path / "c")
    assert convert(
        tmp_path / "c", tmp_path / "d", to="dcp", config=config_folder(tmp_path)
    ).optimizer
    other = Host(5, groups=True)
    for group in other.optimizer.param_groups:
        group["lr"] = 7.0
    load_dcp(tmp_path / "d", other.state)
    assert_same(other.tensors(), host.tensors())
    for ours, theirs in zip(other.optimizer.param_groups, host.optimizer.param_groups, strict=True):
        assert (ours["lr"], ours["weight_decay"]) == (theirs["lr"], theirs["weight_decay"])


def test_a_parameter_that_areals_optimizer_has_no_state_for_is_named(tmp_path: Path) -> None:
    host = Host().train(1)
    model, optim = get_state_dict(host.model, host.optimizer)
    state: Any = optim["state"]
    del state["model.norm.weight"]
    dcp.save({"dcp": {"model": model, "optim": optim}}, checkpoint_id=str(tmp_path / "c"))
    for to in ("generation", "dcp", "areal"):
        with pytest.raises(
            CheckpointMismatchError,
            match=r"no state for 1 of its 24 parameters \(model\.norm\.weight",
        ):
            convert(tmp_path / "c", tmp_path / to / "t", to=to, config=config_folder(tmp_path))


def config_folder(root: Path) -> Path:
    tiny_config().save_pretrained(root / "config")
    return root / "config"


def test_several_roots_must_be_told_apart(tmp_path: Path) -> None:
    model = Host().model.state_dict()
    dcp.save({"a": {"model": model}, "b": {"model": model}}, checkpoint_id=str(tmp_path / "c"))
    with pytest.raises(ConfigError, match=r"a model under 'a' .*, 'b' .*: give it as root"):
        convert(tmp_path / "c", tmp_path / "d", to="dcp")
    convert(tmp_path / "c", tmp_path / "d", to="dcp", root="b", config=config_folder(tmp_path))
    load_dcp(tmp_path / "d", DCPState(Host(2).model))


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    model = {name: tensor.clone() for name, tensor in Host().model.state_dict().items()}
    model["lm_head.weight"] += 1
    dcp.save({"model": model}, checkpoint_id=str(tmp_path / "c"))
    with pytest.raises(
        CheckpointMismatchError,
        match=r"lm_head\.weight and model\.embed_tokens\.weight have different",
    ):
        convert(tmp_path / "c", tmp_path / "d", to="dcp", config=config_folder(tmp_path))


class Bomb:
    """Pickles to a call that creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_an_object_that_would_run_code_is_refused_and_not_run(tmp_path: Path) -> None:
    host = Host().train(1)
    model, optim = get_state_dict(host.model, host.optimizer)
    groups: Any = optim["param_groups"]
    groups[0]["lr"] = Bomb(tmp_path / "hit")
    dcp.save({"dcp": {"model": model, "optim": optim}}, checkpoint_id=str(tmp_path / "c"))
    with pytest.raises(
        CheckpointCorruptError, match=r"mkdir, which could only be read by running code"
    ):
        convert(tmp_path / "c", tmp_path / "d", to="dcp")
    assert not (tmp_path / "hit").exists() and not (tmp_path / "d").exists()


def _load_as_areal(
    rank: int, world_size: int, folder: str, groups: bool
) -> tuple[dict[str, torch.Tensor], Any]:
    host = Host(6, ranks=True, groups=groups)
    dcp.load({"dcp": ArealState(host)}, checkpoint_id=folder)
    rates = [
        (group["lr"], group["weight_decay"], group["betas"])
        for group in host.optimizer.param_groups
    ]
    return host.tensors(), rates


@pytest.mark.parametrize("groups", slow_but([True], [False, True]))
def test_areals_loader_takes_what_is_made_of_a_folder_of_ours(groups: bool, tmp_path: Path) -> None:
    host = Host(groups=groups).train(3)
    save_dcp(tmp_path / "ours", host.state)
    convert(tmp_path / "ours", tmp_path / "theirs", to="areal", config=config_folder(tmp_path))
    for found, rates in run_ranks(_load_as_areal, 2, str(tmp_path / "theirs"), groups):
        assert_same(found, host.tensors())
        assert rates == [
            (g["lr"], g["weight_decay"], g["betas"]) for g in host.optimizer.param_groups
        ]


def _save_areal_on_ranks(rank: int, world_size: int, folder: str) -> dict[str, torch.Tensor]:
    host = Host(ranks=True).train(2)
    save_areal(host, Path(folder))
    return host.tensors()


def test_areals_folder_goes_to_a_folder_of_ours_and_back(tmp_path: Path) -> None:
    expected = run_ranks(_save_areal_on_ranks, 2, str(tmp_path / "areal"))[0]
    convert(tmp_path / "areal", tmp_path / "ours", to="dcp")
    host = Host(5)
    load_dcp(tmp_path / "ours", host.state)
    assert_same(host.tensors(), expected)
    convert(tmp_path / "areal", tmp_path / "back", to="areal")
    assert_same(run_ranks(_load_as_areal, 2, str(tmp_path / "back"), False)[0][0], expected)
