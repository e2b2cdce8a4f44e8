"""`RecoverInfo`: what a generation remembers besides tensors, as JSON that a person can read."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..engine.api import StepInfo
from ..utils.errors import CheckpointCorruptError

INFO_NAME = "recover_info.json"


@dataclass(frozen=True)
class RecoverInfo:
    """Where the run was, and which run it was.

    Attributes:
        last_step_info: the last step that is in the generation; the run goes on with ``last_step_info.next()``.
        run_id: made once at the very start of a run, and kept through every resume.
        world_size: number of ranks that wrote it.
        weight_versions: engine name -> version of its weights.
        resume_path: the ``resume_path`` that the run was given, so that a restart tells its own generations apart.
    """

    last_step_info: StepInfo
    run_id: str
    world_size: int
    weight_versions: dict[str, int] = field(default_factory=dict)
    resume_path: str | None = None

    def to_json(self) -> bytes:
        """UTF-8 JSON."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def read(cls, generation: Path) -> "RecoverInfo":
        """The info of a generation folder.

        Raises:
            CheckpointCorruptError: it is missing or not what `to_json` writes.
        """
        path = generation / INFO_NAME
        try:
            fields = json.loads(path.read_bytes())
            return cls(**fields | {"last_step_info": StepInfo(**fields["last_step_info"])})
        except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
            raise CheckpointCorruptError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
