"""`RecoverInfo`: what a generation remembers besides tensors, as JSON that a person can read."""

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
    """What is remembered of one engine; the same at any world size.

    Attributes:
        optimizer_steps: updates made; None without an optimizer.
        lr: of the first parameter group; None without an optimizer.
        schedule_step: how often the schedule has advanced, or to which epoch if it is stepped by fractions of one; None
            without one.
        fingerprints: ``model``, and with an optimizer ``optim`` -> sampled fingerprint, in hex.
        moved: whether any sampled moment is not zero; before that steps need not change anything.
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
        last_step_info: the last step that is in the generation; the run goes on with ``last_step_info.next()``.
        run_id: made once at the very start of a run, and kept through every resume.
        world_size: number of ranks that wrote it.
        weight_versions: engine name -> version of its weights.
        resume_path: the ``resume_path`` that the run was given, so that a restart tells its own generations apart.
        resume_origin: digest of the manifest of the generation that it led to.
        metrics: what ``dump`` was given; retention goes by them.
        engines: engine name -> what it must be after a restore.
        save_s: how long the snapshot took up to its commit; a deadline is judged by it after a restart.
        rng: process (``rank_00000`` ..., ``driver``) -> digest of its generators.
        switches: setting of torch, or ``trained parameters of <engine>`` -> its value in rank 0. Empty if an older
            version wrote it.
        converted: of a generation that was made of another trainer's checkpoint: ``from``, what that was, and by the
            name of each part of a run that it had not (``data``, ``generators``, ``schedule``, ``epochs``), what
            becomes of that. None: a run wrote it.
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
    converted: dict[str, str] | None = None

    def lacks(self, part: str) -> bool:
        """Whether it was converted from what had no such part."""
        return self.converted is not None and part in self.converted

    def to_json(self) -> bytes:
        """UTF-8 JSON that `parse` takes.

        Raises:
            ConfigError: a value is not of the type of its field: who resumes would have to refuse it.
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
        """The info of a generation folder; what a newer Holdfast has added to it is left out.

        Raises:
            CheckpointCorruptError: it is missing or not what `to_json` writes.
            CheckpointMismatchError: a value has another type than this version gives it: whole, but of another one.
        """
        path = generation / INFO_NAME
        try:
            return cls.parse(path.read_bytes(), path)
        except FileNotFoundError as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

    @classmethod
    def parse(cls, data: bytes, path: str | os.PathLike[str]) -> "RecoverInfo":
        """What `read` returns of a file with ``data``, which its errors call ``path``."""
        try:
            info = from_json(cls, document := json.loads(data), "info")
            if "engines" not in document:  # what is restored could not be compared with anything
                raise ValueError("info.engines is missing")
            return info
        except TypeError as error:  # nobody's damage: its digest was compared before
            raise CheckpointMismatchError(
                f"{path}: {error}; another version of Holdfast wrote it. Resume with that one, or move the generation "
                "away to go on from the one before it"
            ) from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
