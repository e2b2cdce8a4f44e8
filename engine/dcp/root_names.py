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

# Prefixes of Holdfast's own names.
_MODEL = f"{ROOT}.model."
_OPTIM = f"{ROOT}.optim."

_OPTIMIZERS = ("optim", "optimizer")
_BESIDE = {
    *_OPTIMIZERS,
    "lr_scheduler",
    "scheduler",
    "lr_schedulers",
    "train_state",
    "dataloader",
    "data_loader",
    "step",
    "epoch",
    "module_state",
    "param_groups",
    "optim_plain",
    "optim_local",
    "counters",
    "rng",
    "rng_state",
    "extra_state",
    "global_step",
    "trainer",
    "progress",
    "args",
    "config",
    "metadata",
    "scaler",
    "extra",
    "meta",
}
"""Names next to a model in the dicts that people save. Any other name is taken for a part of the
model.
"""


class Root(NamedTuple):
    """Place of one training state in a folder."""

    name: str  # the ``root`` argument of `load_dcp`. "" is the top
    model: str  # prefix of parameter names
    optim: str | None  # prefix of ``state.<parameter>.<entry>``. None without optimizer state

    def canonical(self, name: str) -> str:
        """Holdfast's name for ``name``, or ``name`` itself if that is no part of the state."""
        if self.optim is not None and name.startswith(self.optim):
            return f"{_OPTIM}{name.removeprefix(self.optim)}"
        if not name.startswith(self.model):
            return name

        # Without a prefix of its own, the model is next to other things.
        first = name.removeprefix(_prefix_of(self.name)).partition(".")[0]
        if first in _BESIDE and not self.model.endswith("model."):
            return name
        return f"{_MODEL}{name.removeprefix(self.model)}"


def find_roots(names: Iterable[str]) -> list[Root]:
    """Return the roots in ``names``, the keys of a DCP folder: ``app`` for ``app.model.w`` and
    ``app.optim.w``.
    """
    return sorted(_roots_below("", sorted(names)))


def choose_root(
    names: Collection[str],
    name: str,
    parameters: Iterable[str],
) -> Root:
    """Find the root called ``name`` for a model with these ``parameters``.

    Both ``<name>.model.<parameter>`` and ``<name>.<parameter>`` are tried, because some models
    begin every name with ``model.`` themselves. The prefix under which more parameters are found
    wins. Raises CheckpointMismatchError, which lists the folder's roots, if there is no part of the
    model.
    """
    prefix = _prefix_of(name)
    wanted = list(parameters)
    found = {}
    for model in (f"{prefix}model.", prefix):
        found[model] = sum(f"{model}{parameter}" in names for parameter in wanted)
    best = max(found, key=found.__getitem__)

    # A root without any parameter of this model is another model. Its error comes later.
    if not found[best]:
        best = f"{prefix}model."
        if best not in {root.model for root in find_roots(names)}:
            raise CheckpointMismatchError(f"no model under {name!r}; {describe_roots(names)}")
    return Root(name, best, _optim_below(prefix, names))


def describe_roots(names: Iterable[str]) -> str:
    """Describe the roots for a message."""
    # Each root with a parameter as an example.
    names = sorted(names)
    roots = []
    for root in find_roots(names):
        of_model = (name for name in names if root.canonical(name).startswith(_MODEL))
        roots.append(f"{root.name!r} ({next(of_model, '')})")
    if not roots:
        return f"its keys are {names[:4]} ..., in which no model is to be seen"
    return f"it has a model under {', '.join(roots)}: give it as root"


def under_root(
    layout: FolderLayout,
    root: Root,
) -> FolderLayout:
    """``layout`` with Holdfast's names, with tensors of the model and the optimizer alone."""
    if root == Root(ROOT, _MODEL, _OPTIM):
        return layout
    tensors = _renamed(layout.tensors, root)
    objects = _renamed(layout.objects, root)
    return FolderLayout(layout.files, tensors, objects)


def _renamed(
    stored: Mapping[str, T],
    root: Root,
) -> dict[str, T]:
    renamed = {}
    for name, value in stored.items():
        own = root.canonical(name)
        if own.startswith((_MODEL, _OPTIM)):
            renamed[own] = value
    return renamed


def _roots_below(
    prefix: str,
    names: list[str],
) -> list[Root]:
    # Parts of a state that may be a model. "base" alone may be a part of a model.
    heads = {name.removeprefix(prefix).partition(".")[0] for name in names}
    rest = heads - _BESIDE
    if {BASE, BASE_SAMPLE} <= heads:
        rest -= {BASE, BASE_SAMPLE}
    name = prefix.removesuffix(".")
    optim = _optim_below(prefix, names)
    if rest == {"model"}:
        return [Root(name, f"{prefix}model.", optim)]

    # Parts with a model inside are roots.
    roots = []
    for head in rest:
        inside = f"{prefix}{head}."
        below = [each for each in names if each.startswith(inside)]
        if not any(each.startswith(f"{inside}model.") for each in below):
            return [Root(name, prefix, optim)]
        roots += _roots_below(inside, below)
    return roots


def _optim_below(
    prefix: str,
    names: Iterable[str],
) -> str | None:
    for optimizer in _OPTIMIZERS:
        optim = f"{prefix}{optimizer}."
        if any(name.startswith(optim) for name in names):
            return optim
    return None


def _prefix_of(name: str) -> str:
    return f"{name}." if name else ""
