"""``holdfast export``: write a generation as a Hugging Face or PEFT folder."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from ...utils.errors import CheckpointNotFoundError
from ...utils.files import is_free
from ...utils.manifest import require_outside_commits
from .folders import Folder, local_copy
from .output import dtype_option, json_option, print_json, seconds_text, size_text
from .runs import generation_argument, read_generation

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("export", short_help="Write a generation as a Hugging Face folder.")
@generation_argument
@click.option(
    "--to", "target", required=True, type=click.Path(path_type=Path), help="Folder to create."
)
@dtype_option("the dtype in config.json; adapters keep theirs")
@click.option("--config", type=_FOLDER,
              help="Folder with config.json, tokenizer ...  [default: an export of the same run, "
              "else the files in GEN]")  # fmt: skip
@click.option("--engine", help="Engine to export. Required if the generation has several.")
@click.option("--adapters", type=click.Choice(("merged", "peft")), help="How to export LoRA adapters: merged into all "
              "weights of the base, or as a PEFT folder.  [default: merged]")  # fmt: skip
@click.option("--base", type=_FOLDER, help="Folder of the model that the adapters were trained on.  [default: the "
              "folder that the generation names]")  # fmt: skip
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
    where, seconds = read_generation(generation, partial(_export, target=target, **options))
    files = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    seconds = round(seconds, 3)
    if as_json:
        print_json(
            {"to": str(target), "bytes": sum(files), "files": len(files), "seconds": seconds}
        )
    else:
        size, took = size_text(sum(files)), seconds_text(seconds)
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
    from ..convert.adapters import write_peft
    from ..convert.dcp import engine_folder, stored_adapters

    if not is_free(target):
        raise click.UsageError(
            f"{target} exists already and is never written over; choose another --to"
        )
    require_outside_commits(target)
    with local_copy(folder) as path:
        stored = stored_adapters(engine_folder(path, engine))
        if stored is None and (adapters or base):
            raise click.UsageError(
                f"{folder.where} holds all weights, no adapters: --adapters and --base say "
                "nothing of it"
            )
        if stored is not None and adapters == "peft":
            if config or base:
                raise click.UsageError(
                    "--config and --base are of merged weights: adapters are exported as they are"
                )
            seconds = write_peft(path, stored, target, dtype)
        else:
            seconds = _write_model(path, folder, target, dtype, config, engine, base, stored)
    return folder.where, seconds


def _write_model(
    path: Path,
    folder: Folder,
    target: Path,
    dtype: str | None,
    config: Path | None,
    engine: str | None,
    base: Path | None,
    stored: Any,
) -> float:
    """Write all weights of the generation at ``path``, a copy of ``folder``. Return the seconds
    that this took.
    """
    from ...engine.hf.dtypes import base_dtype
    from ..convert import convert
    from ..convert.checkpoint import Architecture
    from ..convert.dcp import engine_folder
    from ..saving.model_files import unpacked_model_files

    with unpacked_model_files(path, engine_folder(path, engine).name) as own:
        model = config or (
            _config_of(folder.path, own) if stored is None else stored.base_folder(base)
        )
        # As the run itself exports: in the dtype of the folder that its model was made from.
        if dtype is None and own is not None and model == own[0]:
            dtype = own[1]
        dtype = dtype or str(base_dtype(Architecture.read(model).model, model)).removeprefix(
            "torch."
        )
        given: dict[str, Any] = {
            "config": model,
            "engine": engine,
            "merge": stored is not None,
            "base": base,
        }
        return convert(path, target, to="hf", dtype=dtype, **given).seconds


def _config_of(path: Path | None, own: tuple[Path, str | None] | None) -> Path:
    """The newest folder of the same run that has a ``config.json``, else the files in the
    generation itself.
    """
    where = "the generation"
    if path is not None:
        trial = path.absolute().parent.parent
        where = f"the generation, nor in hf/, weights/ or base_model/ of {trial}"
        for pattern in (
            "hf/[!.]*/config.json",
            "weights/[!.]*/config.json",
            "base_model/config.json",
        ):
            if found := [config.parent for config in trial.glob(pattern)]:
                return max(found, key=lambda export: (len(export.name), export.name))
    if own is not None:
        return own[0]
    raise CheckpointNotFoundError(
        f"there is no config.json in {where}; name a folder that has the model's with --config, "
        "as the one that the run was started from"
    )
