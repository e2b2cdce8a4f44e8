"""``holdfast export``: a Hugging Face folder from a generation, without its trainer, its model's code or a GPU."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from ...utils.errors import CheckpointNotFoundError
from ...utils.files import is_free
from ...utils.manifest import require_outside_commits
from .dtypes import dtype_option
from .folders import Folder
from .output import json_option, print_json, seconds_text, size_text
from .places import generation_argument, read_generation


@click.command("export", short_help="A Hugging Face folder from a generation.")
@generation_argument
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@dtype_option("that of config.json, of adapters their own")
@click.option("--config", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder with config.json, tokenizer ...; default: an export of the same run.")  # fmt: skip
@click.option("--engine", help="Which engine; needed where the generation holds several.")
@click.option("--adapters", type=click.Choice(("merged", "peft")), help="Of a generation with adapters: all weights, "
              "with the adapters added, or a folder of PEFT.  [default: merged]")  # fmt: skip
@click.option("--base", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of the model that "
              "adapters were trained on; default: the one that the generation names.")  # fmt: skip
@json_option
def export_command(
    generation: str,
    target: Path,
    dtype: str | None,
    config: Path | None,
    engine: str | None,
    adapters: str | None,
    base: Path | None,
    as_json: bool,
) -> None:
    """Write the weights in GEN as a folder that from_pretrained loads, equal to what the run itself would export.

    Every byte that is read is compared with its digest first, and what was written is read back. The folder appears
    when it is complete. A copy at a URL is fetched into the folder for temporary files (TMPDIR) first.

    How a model is made of the weights, no generation knows: config.json says it, which any export of the run has, or
    the folder that the run began with. Tokenizer and other files beside it are copied. Python code in it is never run;
    transformers must know the architecture.

    A generation with LoRA adapters has no base. With --adapters merged that is read from the folder that the run began
    with, compared with the digest in GEN, and has the adapters added; --adapters peft needs no base.
    """
    options = {"dtype": dtype, "config": config, "engine": engine, "adapters": adapters, "base": base}
    where, seconds = read_generation(generation, partial(_export, target=target, **options))
    files = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    report = {"to": str(target), "bytes": sum(files), "files": len(files), "seconds": round(seconds, 3)}
    if as_json:
        print_json(report)
    else:
        click.echo(
            f"exported {where} to {target}: {size_text(report['bytes'])} in {report['files']} files, "
            f"{seconds_text(report['seconds'])}"
        )


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
    from ..convert import convert
    from ..convert.adapters import write_peft
    from ..convert.dcp import engine_folder, stored_adapters
    from .copies import local_copy

    if not is_free(target):
        raise click.UsageError(f"{target} exists already and is never written over; choose another --to")
    require_outside_commits(target)
    with local_copy(folder) as path:
        stored = stored_adapters(engine_folder(path, engine))
        if stored is None and (adapters or base):
            raise click.UsageError(
                f"{folder.where} holds all weights, no adapters: --adapters and --base say nothing of it"
            )
        if stored is not None and adapters == "peft":
            if config or base:
                raise click.UsageError("--config and --base are of merged weights: adapters are exported as they are")
            seconds = write_peft(path, stored, target, dtype)
        else:
            model = config or (_config_of(folder.path) if stored is None else stored.base_folder(base))
            given: dict[str, Any] = {"config": model, "engine": engine, "merge": stored is not None, "base": base}
            seconds = convert(path, target, to="hf", dtype=dtype or _own_dtype(model), **given).seconds
    return folder.where, seconds


def _config_of(path: Path | None) -> Path:
    """The newest folder of the same run that has a ``config.json``.

    Raises:
        CheckpointNotFoundError: it has none.
    """
    trial = None if path is None else path.absolute().parent.parent
    found = [] if trial is None else list(_exports(trial))
    if not found:
        where = "the generation" if trial is None else f"hf/, weights/ or base_model/ of {trial}"
        raise CheckpointNotFoundError(
            f"there is no config.json in {where}; name a folder that has the model's with --config, as the one that "
            "the run was started from"
        )
    return found[0]


def _exports(trial: Path) -> Iterator[Path]:
    for kind in ("hf", "weights"):
        exports = [path.parent for path in trial.glob(f"{kind}/[!.]*/config.json")]
        yield from sorted(exports, key=lambda export: (len(export.name), export.name), reverse=True)
    yield from (path.parent for path in trial.glob("base_model/config.json"))


def _own_dtype(base: Path) -> str:
    """What the run itself exports as: the dtype of the folder that its model was made from."""
    from ...engine.hf.dtypes import base_dtype
    from ..convert.checkpoint import Architecture

    return str(base_dtype(Architecture.read(base).model, base)).removeprefix("torch.")
