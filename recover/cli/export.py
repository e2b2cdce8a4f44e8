"""``holdfast export``: write a generation as a Hugging Face or PEFT folder."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...utils.errors import CheckpointNotFoundError
from ...utils.files import is_free
from ...utils.manifest import require_outside_commits
from .folders import Folder, local_copy
from .output import (
    dtype_option,
    json_option,
    print_json,
    seconds_text,
    size_text,
)
from .runs import generation_argument, read_generation

if TYPE_CHECKING:
    from ..export.adapters import StoredAdapters

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_EXPORTS = ("hf/[!.]*/config.json", "weights/[!.]*/config.json", "base_model/config.json")
"""Where the folder of a run has a ``config.json``, the first choice first."""


@click.command("export", short_help="Write a generation as a Hugging Face folder.")
@generation_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder to create.",
)
@dtype_option("the dtype in config.json; adapters keep theirs")
@click.option(
    "--config",
    type=_FOLDER,
    help="Folder with config.json, tokenizer ...  [default: an export of the same run, "
    "else the files in GEN]",
)
@click.option("--engine", help="Engine to export. Required if the generation has several.")
@click.option(
    "--adapters",
    type=click.Choice(("merged", "peft")),
    help="How to export LoRA adapters: merged into all weights of the base, or as a PEFT "
    "folder.  [default: merged]",
)
@click.option(
    "--base",
    type=_FOLDER,
    help="Folder of the model that the adapters were trained on.  [default: the "
    "folder that the generation names]",
)
@json_option
def export_command(generation: str, target: Path, as_json: bool, **options: Any) -> None:
    """Write the weights of GEN as a folder that from_pretrained loads. The result equals an export
    by the run itself.

    Every file is compared with its digest before use, and the exported weights are read back. The
    folder appears only when it is complete. A copy at a URL is first fetched into the temporary
    folder (TMPDIR).

    The structure of the model comes from config.json: that of an export of the run, else the one in
    GEN. Generations of older versions have none (use --config). The tokenizer and other small files
    next to config.json are copied. Python code in that folder is never run, so transformers must
    know the architecture.

    A generation with LoRA adapters does not contain the base model. With --adapters merged, the
    base is read from the folder that the run started with, and compared with the digest in GEN.
    --adapters peft needs no base.
    """
    export = partial(_export, target=target, **options)
    where, seconds = read_generation(generation, export)
    # The result, for people and scripts.
    files = [file for file in target.rglob("*") if file.is_file()]
    n_bytes = sum(file.stat().st_size for file in files)
    seconds = round(seconds, 3)
    if as_json:
        print_json(
            {
                "to": str(target),
                "bytes": n_bytes,
                "files": len(files),
                "seconds": seconds,
            }
        )
        return
    size = size_text(n_bytes)
    took = seconds_text(seconds)
    click.echo(f"exported {where} to {target}: {size} in {len(files)} files, {took}")


def _export(
    folder: Folder,
    target: Path,
    dtype: str | None,
    config: Path | None,
    engine: str | None,
    adapters: str | None,
    base: Path | None,
) -> tuple[str, float]:
    """Export one generation. Return its path or URL, and the seconds that the export took."""
    from ..export.adapters import write_peft
    from ..export.engine_folder import engine_folder, stored_adapters

    # Before anything is read, and before a copy at a URL is fetched.
    if not is_free(target):
        raise click.UsageError(
            f"{target} exists already and is never written over; choose another --to"
        )
    require_outside_commits(target)

    # A folder of all weights, or adapters that stand for a model.
    with local_copy(folder) as path:
        source = engine_folder(path, engine)
        stored = stored_adapters(source)
        if stored is None and (adapters or base):
            raise click.UsageError(
                f"{folder.where} holds all weights, no adapters: --adapters and --base say "
                "nothing of it"
            )

        if stored is None or adapters != "peft":
            return folder.where, _write_model(
                path,
                source,
                target,
                trial=_trial_of(folder),
                stored=stored,
                dtype=dtype,
                config=config,
                base=base,
            )

        if config or base:
            raise click.UsageError(
                "--config and --base are of merged weights: adapters are exported as they are"
            )
        return folder.where, write_peft(path, stored, target, dtype)


def _write_model(
    generation: Path,
    engine: Path,
    target: Path,
    *,
    trial: Path | None,
    stored: "StoredAdapters | None",
    dtype: str | None,
    config: Path | None,
    base: Path | None,
) -> float:
    """Write all weights of an engine. Return the seconds that this took."""
    from ...engine.hf.dtypes import base_dtype
    from ..export.architecture import Architecture
    from ..export.writing import export_weights
    from ..saving.model_files import unpacked_model_files

    with unpacked_model_files(generation, engine.name) as own:
        # The first that there is: as asked, the base of the adapters, an export of the run, the
        # copy in the generation.
        if config is None and stored is not None:
            config = stored.base_folder(base)
        if config is None:
            config = _config_of(trial)
        if config is None and own is not None:
            config = own[0]
        if config is None:
            raise _no_config(trial)

        # As the run itself exports: in the dtype of the folder that its model was made from.
        architecture = Architecture.read(config)
        if dtype is None and own is not None and config == own[0]:
            dtype = own[1]
        if dtype is None:
            found = base_dtype(architecture.model, config)
            dtype = str(found).removeprefix("torch.")
        return export_weights(
            generation,
            engine,
            target,
            architecture,
            dtype,
            stored,
            base,
        )


def _trial_of(folder: Folder) -> Path | None:
    """Folder of the run of a generation. None at a URL."""
    if folder.path is None:
        return None
    return folder.path.absolute().parent.parent


def _config_of(trial: Path | None) -> Path | None:
    """The newest folder of a run that has a ``config.json``. None if no folder has one."""
    if trial is None:
        return None
    for pattern in _EXPORTS:
        exports = [config.parent for config in trial.glob(pattern)]
        if exports:
            # Sorted by length first, because step 10 comes after step 9.
            return max(exports, key=lambda export: (len(export.name), export.name))
    return None


def _no_config(trial: Path | None) -> CheckpointNotFoundError:
    where = "the generation"
    if trial is not None:
        where = f"the generation, nor in hf/, weights/ or base_model/ of {trial}"
    return CheckpointNotFoundError(
        f"there is no config.json in {where}; name a folder that has the model's with --config, "
        "as the one that the run was started from"
    )
