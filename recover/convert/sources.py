"""Which format a folder is of, by the names of the files in it."""

from pathlib import Path

from ...utils.errors import CheckpointNotFoundError, ConfigError
from ...utils.manifest import MANIFEST_NAME, verify_folder
from . import accelerate, dcp, generation, trainer, verl
from .checkpoint import Checkpoint, Format, ReadOptions

FORMATS = (
    Format("verl", "model_world_size_<N>_rank_<r>.pt, in it or in its actor/ or critic/", verl),
    Format("Holdfast generation", "recover_info.json and manifest.json", generation),
    Format("transformers or TRL Trainer, Hugging Face", "trainer_state.json, or config.json with weights", trainer),
    Format(
        "Accelerate",
        "pytorch_model_fsdp_0/, or model.safetensors with optimizer.bin or random_states_0.pkl",
        accelerate,
    ),
    Format("torch.distributed.checkpoint (torchtitan, AReaL, scripts, Holdfast)", ".metadata", dcp),
)
"""In the order in which they are tried: a Trainer's folder may hold Accelerate's."""


def read_source(folder: Path, options: ReadOptions) -> dict[str, Checkpoint]:
    """Engine name -> what ``folder`` holds, which is verified first if it has a manifest.

    Raises:
        CheckpointNotFoundError: there is no such folder.
        CheckpointCorruptError: it is not what its manifest says.
        ConfigError: it is of no known format; the message says what was found and what is looked for.
        Otherwise see `checkpoint.Reader.read`.
    """
    if not folder.is_dir():
        raise CheckpointNotFoundError(f"there is no folder {folder}")
    for each in FORMATS:
        if each.reader.recognises(folder):
            if (folder / MANIFEST_NAME).is_file():
                verify_folder(folder)
            return each.reader.read(folder, options)
    found = sorted(path.name for path in folder.iterdir())[:12]
    known = "; ".join(f"{each.marks} ({each.name})" for each in FORMATS)
    raise ConfigError(f"{folder} is of no format that can be converted: it holds {found}. Looked for: {known}")
