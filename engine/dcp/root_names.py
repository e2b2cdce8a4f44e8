"""Roots: the names under which a DCP folder keeps a model and its optimizer state.

Every trainer nests them in its own dict: Holdfast and AReaL under ``dcp``, many scripts under
``app``, Accelerate and plain scripts under ``model`` and ``optimizer`` at the top. Newer torchtitan
has the parameters themselves at the top. A root is the prefix of those names, and "" is the top.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, TypeVar

from ...utils.errors import CheckpointMismatchError
from .base_model import BASE, BASE_SAMPLE
from .format import FolderLayout
from .state import ROOT

T = TypeVar("T")

_OPTIMIZERS = ("optim", "optimizer")
_BESIDE = {
    *_OPTIMIZERS,
    *(
        "lr_scheduler",
        "scheduler",
        "lr_schedulers",
        "train_state",
        "dataloader",
        "data_loader",
        "step",
        "epoch",
    ),
    *(
        "module_state",
        "param_groups",
        "optim_plain",
        "optim_local",
        "counters",
        "rng",
        "rng_state",
        "extra_state",
    ),
    *(
        "global_step",
        "trainer",
        "progress",
        "args",
        "config",
        "metadata",
        "scaler",
        "extra",
        "meta",
    ),
}
"""Names next to a model in the dicts that people save. Any other name is taken for a part of the
model.
"""


class Root(NamedTuple):
    """Where a folder keeps one training state."""

    name: str  # the ``root`` argument of `load_dcp`. "" is the top
    model: str  # prefix of parameter names
    optim: str | None  # prefix of ``state.<parameter>.<entry>``. None without optimizer state

    def canonical(self, name: str) -> str:
        """Holdfast's name for ``name``. A name that is no part of the state is returned as it is."""
        if self.optim is not None and name.startswith(self.optim):
            return f"{ROOT}.optim.{name.removeprefix(self.optim)}"
        beside = name.removeprefix(f"{self.name}." if self.name else "").partition(".")[0]
        if name.startswith(self.model) and (self.model.endswith("model.") or beside not in _BESIDE):
            return f"{ROOT}.model.{name.removeprefix(self.model)}"
        return name


def find_roots(names: Iterable[str]) -> list[Root]:
    """Return the roots in ``names``, the keys of a DCP folder: ``app`` for ``app.model.w`` and
    ``app.optim.w``.
    """
    return sorted(_roots_below("", sorted(names)))


def choose_root(names: Collection[str], name: str, parameters: Iterable[str]) -> Root:
    """Find the root called ``name`` for a model with these ``parameters``.

    Both ``<name>.model.<parameter>`` and ``<name>.<parameter>`` are tried, because some models
    begin every name with ``model.`` themselves. The prefix under which more parameters are found
    wins. Raises CheckpointMismatchError, which lists the folder's roots, if there is no part of the
    model.
    """
    prefix, wanted = f"{name}." if name else "", list(parameters)
    found = {
        model: sum(f"{model}{parameter}" in names for parameter in wanted)
        for model in (f"{prefix}model.", prefix)
    }
    model = max(found, key=found.__getitem__)
    if not found[model] and (model := f"{prefix}model.") not in {
        root.model for root in find_roots(names)
    }:
        raise CheckpointMismatchError(f"no model under {name!r}; {describe_roots(names)}")
    return Root(name, model, _optim_below(prefix, names))


def describe_roots(names: Iterable[str]) -> str:
    """Describe the roots for a message."""
    names = sorted(names)
    roots = []
    for root in find_roots(names):
        example = next(
            (name for name in names if root.canonical(name).startswith(f"{ROOT}.model.")), ""
        )
        roots.append(f"{root.name!r} ({example})")
    if not roots:
        return f"its keys are {names[:4]} ..., in which no model is to be seen"
    return f"it has a model under {', '.join(roots)}: give it as root"


def under_root(layout: FolderLayout, root: Root) -> FolderLayout:
    """``layout`` with Holdfast's names, without tensors that are no part of the model or optimizer."""
    if root == Root(ROOT, f"{ROOT}.model.", f"{ROOT}.optim."):
        return layout
    return FolderLayout(
        layout.files, _renamed(layout.tensors, root), _renamed(layout.objects, root)
    )


def _renamed(stored: Mapping[str, T], root: Root) -> dict[str, T]:
    names = {name: root.canonical(name) for name in stored}
    kept = f"{ROOT}.model.", f"{ROOT}.optim."
    return {own: stored[name] for name, own in names.items() if own.startswith(kept)}


def _roots_below(prefix: str, names: list[str]) -> list[Root]:
    heads = {name.removeprefix(prefix).partition(".")[0] for name in names}
    ours = (
        {BASE, BASE_SAMPLE} if {BASE, BASE_SAMPLE} <= heads else set()
    )  # "base" alone may be a part of a model
    rest, name, optim = (
        heads - _BESIDE - ours,
        prefix.removesuffix("."),
        _optim_below(prefix, names),
    )
    if rest == {"model"}:
        return [Root(name, f"{prefix}model.", optim)]
    below = {head: [each for each in names if each.startswith(f"{prefix}{head}.")] for head in rest}
    nested = [
        head
        for head in rest
        if any(each.startswith(f"{prefix}{head}.model.") for each in below[head])
    ]
    if nested and len(nested) == len(rest):
        return [root for head in nested for root in _roots_below(f"{prefix}{head}.", below[head])]
    return [Root(name, prefix, optim)] if rest else []


def _optim_below(prefix: str, names: Iterable[str]) -> str | None:
    found = (f"{prefix}{optim}." for optim in _OPTIMIZERS)
    return next((optim for optim in found if any(name.startswith(optim) for name in names)), None)
