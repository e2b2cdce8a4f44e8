"""`RecoverInfo`: the JSON file of a generation with everything besides tensors, readable for people."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..engine.steps import StepInfo
from ..utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from ..utils.typed_json import from_json

INFO_NAME = "recover_info.json"
DRIVER_STATE = "state/driver.pt"


def rank_state_name(rank: int) -> str:
    """Return the file of a rank's generators and user objects: ``state/rank_00001.pt``."""
    return f"state/rank_{rank:05d}.pt"


@dataclass(frozen=True)
class EngineFacts:
    """Facts about one engine that are the same at any world size.

    Attributes:
        optimizer_steps: number of updates. None without an optimizer.
        lr: learning rate of the first parameter group. None without an optimizer.
        schedule_step: number of schedule steps, or the epoch if the schedule advances by fractions of an epoch. None
            without a schedule.
        fingerprints: sampled fingerprint in hex of ``model`` and, with an optimizer, of ``optim``.
        moved: whether any sampled moment is not zero. Before that, a step may leave everything unchanged.
    """

    optimizer_steps: int | None
    lr: float | None
    schedule_step: float | None
    fingerprints: dict[str, str]
    moved: bool


@dataclass(frozen=True)
class RecoverInfo:
    """Where the run was, and which run it was.

    Attributes:
        last_step_info: last step that is in the generation. The run continues with ``last_step_info.next()``.
        run_id: id of the run, made at its very first start and kept by every resume.
        world_size: number of ranks that wrote the generation.
        weight_versions: engine name -> version of its weights.
        resume_path: ``resume_path`` of the run. With it, a restart recognises its own generations.
        resume_origin: digest of the manifest of the generation at ``resume_path``.
        metrics: metrics given to ``dump``, used by retention.
        engines: engine name -> facts to check after a restore.
        save_s: seconds that the snapshot took up to its commit. A deadline is judged by it after a restart.
        rng: process (``rank_00000`` ..., ``driver``) -> digest of its random generators.
        meshes: engine name -> sizes d, r, c, t and e of its mesh, if it is an `FSDPEngine`. Any other mesh can load it.
        switches: torch setting, or ``trained parameters of <engine>``, -> its value in rank 0. Empty in generations of
            older versions.
        converted: None if a run wrote the generation. If it was converted from another trainer: ``from`` -> source
            format, and missing part (``data``, ``generators``, ``schedule``, ``epochs``) -> how the run starts without
            it.
    """

    last_step_info: StepInfo
    run_id: str
    world_size: int
    weight_versions: dict[str, int] = field(default_factory=dict)
    resume_path: str | None = None
    resume_origin: str | None = None
    save_s: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    engines: dict[str, EngineFacts] = field(default_factory=dict)
    rng: dict[str, str] = field(default_factory=dict)
    switches: dict[str, str] = field(default_factory=dict)
    meshes: dict[str, dict[str, int]] = field(default_factory=dict)
    converted: dict[str, str] | None = None

    def lacks(self, part: str) -> bool:
        """Whether the generation was converted from a checkpoint without this part."""
        return self.converted is not None and part in self.converted

    def to_json(self) -> bytes:
        """Encode as UTF-8 JSON for `parse`.

        Raises:
            ConfigError: a value does not have the type of its field, so that a resume would have to refuse it.
        """
        try:
            data = json.dumps(asdict(self), indent=1).encode()
            from_json(RecoverInfo, json.loads(data), "info")
        except TypeError as error:
            raise ConfigError(
                f"the snapshot of step {self.last_step_info.global_step} could not be resumed from: {error}. Look at "
                "the StepInfo that dump was given, the engines' get_version() and their schedulers' last_epoch"
            ) from error
        return data

    @classmethod
    def read(cls, generation: Path) -> "RecoverInfo":
        """Read the info of a generation folder. Fields that a newer Holdfast has added are ignored.

        Raises:
            CheckpointCorruptError: the file is missing, or `to_json` did not write it.
            CheckpointMismatchError: a value has a type that this version does not use. The file itself is undamaged.
        """
        path = generation / INFO_NAME
        try:
            return cls.parse(path.read_bytes(), path)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    @classmethod
    def parse(cls, data: bytes, path: str | os.PathLike[str]) -> "RecoverInfo":
        """Parse the contents of the file. Errors name it ``path``. Raises as `read`."""
        try:
            info = from_json(cls, document := json.loads(data), "info")
            if "engines" not in document:  # a restore could not be checked
                raise ValueError("info.engines is missing")
            return info
        except TypeError as error:  # no damage, because its digest was compared before
            raise CheckpointMismatchError(
                f"{path}: {error}; another version of Holdfast wrote it. Resume with that one, or move the generation "
                "away to go on from the one before it"
            ) from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
