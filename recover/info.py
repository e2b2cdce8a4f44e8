"""`RecoverInfo`: the JSON file of a generation with everything besides tensors, readable for
people.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ..engine.steps import StepInfo
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ..utils.files import StrPath

INFO_NAME = "recover_info.json"
DRIVER_STATE = "state/driver.pt"
SHARED = "ranks_with_same_data"
"""Key in the file of a rank: number of consecutive ranks with the same data. Absent if every rank
has its own.
"""


def rank_state_name(rank: int) -> str:
    """Return the file of a rank's generators and user objects: ``state/rank_00001.pt``."""
    return f"state/rank_{rank:05d}.pt"


@dataclass(frozen=True)
class EngineFacts:
    """Facts about one engine that are the same at any world size."""

    optimizer_steps: int | None  # number of updates. None without an optimizer
    lr: float | None  # learning rate of the first parameter group. None without an optimizer
    # number of schedule steps, or fractions of an epoch. None without a schedule
    schedule_step: float | None
    # sampled fingerprint in hex of ``model`` and, with an optimizer, of ``optim``
    fingerprints: dict[str, str]
    # whether any sampled moment is not zero. Before that, a step may leave everything unchanged
    moved: bool


@dataclass(frozen=True)
class RecoverInfo:
    """Where the run was, and which run it was. `RecoverHandler.first_step` gives the next step."""

    last_step_info: StepInfo  # last step that is in the generation
    run_id: str  # made at the very first start of the run and kept by every resume
    world_size: int  # number of ranks that wrote the generation
    # engine name -> version of its weights
    weight_versions: dict[str, int] = field(default_factory=dict)
    resume_path: str | None = None  # of the run. With it, a restart recognises its own generations
    resume_origin: str | None = None  # digest of the manifest of the generation at ``resume_path``
    save_s: float = 0.0  # seconds up to the commit. A deadline is judged by it after a restart
    metrics: dict[str, float] = field(default_factory=dict)  # given to ``dump``, used by retention
    # engine name -> facts to check after a restore
    engines: dict[str, EngineFacts] = field(default_factory=dict)
    # process (``rank_00000`` ... in the handler's group, ``driver``) -> generators' digest
    rng: dict[str, str] = field(default_factory=dict)
    # torch setting, or ``trained parameters of <engine>``, -> its value in rank 0. Empty in older
    # generations
    switches: dict[str, str] = field(default_factory=dict)
    # `FSDPEngine` -> sizes d, r, c, t, e of its mesh
    meshes: dict[str, dict[str, int]] = field(default_factory=dict)
    # registered name -> id of the log file that follows this generation, for people. The object's
    # own state is what counts
    logs: dict[str, str] = field(default_factory=dict)
    # None if a run wrote the generation. If it was converted from another trainer: ``from`` ->
    # source format, and missing part (``data``, ``generators``, ``schedule``, ``epochs``) -> how
    # the run starts without it
    converted: dict[str, str] | None = None

    def lacks(self, part: str) -> bool:
        """Whether the generation was converted from a checkpoint without this part."""
        return self.converted is not None and part in self.converted

    def to_json(self) -> bytes:
        """Encode as UTF-8 JSON for `parse`. Raises `ConfigError` for a value that a resume would
        have to refuse.
        """
        try:
            data = json.dumps(asdict(self), indent=1).encode()
            _from_json(RecoverInfo, json.loads(data), "info")
        except TypeError as error:
            raise ConfigError(
                f"the snapshot of step {self.last_step_info.global_step} could not be resumed "
                f"from: {error}. Look at the StepInfo that dump was given, the engines' "
                "get_version() and their schedulers' last_epoch"
            ) from error
        return data

    @classmethod
    def read(cls, generation: Path) -> "RecoverInfo":
        """Read the info of a generation folder. Fields that a newer Holdfast has added are ignored.

        Raises:
            CheckpointCorruptError: the file is missing, or `to_json` did not write it.
            CheckpointMismatchError: a value has a type that this version does not use. The file
                itself is undamaged.
        """
        path = generation / INFO_NAME
        try:
            return cls.parse(path.read_bytes(), path)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(
                f"{path} cannot be read: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def parse(cls, data: bytes, path: StrPath) -> "RecoverInfo":
        """Parse the contents of the file. Errors name it ``path``. Raises as `read`."""
        try:
            document = json.loads(data)
            info = _from_json(cls, document, "info")
            if "engines" not in document:  # a restore could not be checked
                raise ValueError("info.engines is missing")
            return info
        except TypeError as error:  # no damage, because its digest was compared before
            raise CheckpointMismatchError(
                f"{path}: {error}; another version of Holdfast wrote it. Resume with that one, or "
                "move the generation away to go on from the one before it"
            ) from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{path} cannot be read: {type(error).__name__}: {error}"
            ) from error


def finite_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the finite metrics as floats, because JSON has no NaN. Raises `ConfigError` for
    anything but numbers.
    """
    numbers = {}
    for name, value in metrics.items():
        try:
            if isinstance(value, str | bytes):  # some strings would pass float()
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ConfigError(
                f"dump was given the metric {name!r} as {value!r}, a {type(value).__name__}; "
                "expected a number"
            ) from error
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def _from_json(kind: Any, value: Any, name: str) -> Any:
    """Convert ``value``, a result of ``json.loads``, to ``kind``, and check every value against the
    type of its field.

    ``kind`` is a dataclass, ``dict[str, ...]``, ``... | None``, int, float, str or bool. Whole
    numbers are converted between int and float. Unknown keys of a dataclass are ignored, because a
    newer writer may have added them.

    Raises:
        TypeError: a value has another type. The message calls it ``name``.
        ValueError: a field without a default is missing.
        OverflowError: an int is too large for a float.
    """
    # ``some | None``
    if isinstance(kind, UnionType):
        if value is None:
            return None
        (some,) = (each for each in get_args(kind) if each is not NoneType)
        return _from_json(some, value, name)

    # ``dict[str, item_kind]``
    if get_origin(kind) is dict:
        _require(isinstance(value, dict), kind, value, name)
        item_kind = get_args(kind)[1]
        return {key: _from_json(item_kind, item, f"{name}.{key}") for key, item in value.items()}

    if isinstance(kind, type) and is_dataclass(kind):
        _require(isinstance(value, dict), kind, value, name)
        kinds = get_type_hints(kind)
        known = {}
        for each in fields(kind):
            if each.name in value:
                known[each.name] = value[each.name]
            elif each.default is each.default_factory is MISSING:
                raise ValueError(f"{name}.{each.name} is missing")
        for key, item in known.items():
            known[key] = _from_json(kinds[key], item, f"{name}.{key}")
        return kind(**known)

    # A single value. JSON does not tell 1 from 1.0 everywhere.
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    _require(type(value) is kind, kind, value, name)
    return value


def _require(fits: bool, kind: Any, value: Any, name: str) -> None:
    if not fits:
        raise TypeError(f"{name} is {value!r}; expected {getattr(kind, '__name__', kind)}")
