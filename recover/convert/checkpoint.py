"""`Checkpoint`: what a reader finds in a folder and a writer makes a folder of; no values are in memory."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...engine.lazy_tensor import LazyTensor
from ...utils.rng import RngState
from .architecture import Architecture

OptimizerEntries = Mapping[str, Mapping[str, Any]]
"""Parameter -> entry -> `LazyTensor`, or a plain value."""


@dataclass
class Checkpoint:
    """The training state of one model.

    Attributes:
        format: what wrote it, for people.
        model: parameter or buffer -> values; a tied tensor once.
        optimizer: state by parameter; empty where there is none.
        groups: hyperparameters of each parameter group, and as ``params`` the names in it; None without an optimizer.
        aliases: other name of a tied tensor -> the one it has in ``model``.
        scheduler: its ``state_dict()``; None where there is none.
        step: steps that were trained, less one; None where nothing says.
        epoch_steps: steps an epoch; None where nothing says.
        rng: generators of each rank; empty where there are none.
        ranks: how many had written it.
        architecture: the model without memory; None where no config is known.
        notes: what a person should know of how it was read.
        ignored: what the folder holds besides, which is not converted.
    """

    format: str
    model: dict[str, LazyTensor]
    optimizer: OptimizerEntries = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    aliases: dict[str, str] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    step: int | None = None
    epoch_steps: int | None = None
    rng: list[RngState] = field(default_factory=list)
    ranks: int = 1
    architecture: Architecture | None = None
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReadOptions:
    """What a reader is told.

    Attributes:
        root: of DCP data (see `holdfast.engine.dcp.roots`); None: the only one there is.
        config: folder with the ``config.json`` of the model; None: that in the source, if there is one.
        parameters: names of the parameters of each group, in the order in which the optimizer was given them; None: by
            the rule of the source.
        files: closes what a reader opens.
        merge: whether adapters without their base are merged into it, which leaves out optimizer state.
        base: folder of that base; None: the one that the source names.
        engine: the only engine that is asked for; None, or one that the source does not have: all.
    """

    root: str | None
    config: Path | None
    parameters: Sequence[Sequence[str]] | None
    files: ExitStack
    merge: bool = False
    base: Path | None = None
    engine: str | None = None


class Format(NamedTuple):
    """One format of a source.

    Attributes:
        name: for messages.
        marks: what a folder of it holds, for messages.
        reader: how it is recognised and read.
    """

    name: str
    marks: str
    reader: "Reader"


class Reader(Protocol):
    """One reader; a module with these functions is one."""

    def recognises(self, folder: Path) -> bool:
        """Whether ``folder`` is of this format, by the names of its files."""
        ...

    def read(self, folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
        """Engine name -> what is in ``folder``; ``default`` where it has no names.

        Raises:
            CheckpointCorruptError, CheckpointMismatchError: files are missing, damaged, or could run code.
            ConfigError: it cannot be known what is meant; the message says what to give.
        """
        ...
