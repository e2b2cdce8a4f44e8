"""``holdfast export``: a Hugging Face folder from a generation, without its trainer, its model's code or a GPU."""

from collections.abc import Iterator
from pathlib import Path

import click

from ...utils.errors import CheckpointNotFoundError
from .output import json_option, print_json, seconds_text, size_text
from .places import find_generation, generation_argument

DTYPES = ("float32", "bfloat16", "float16")


@click.command("export", short_help="A Hugging Face folder from a generation.")
@generation_argument
@click.option("--to", "target", required=True, type=click.Path(path_type=Path), help="The folder to make.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of floating-point weights; default: that of config.json.")
@click.option("--config", "base", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Folder with config.json, tokenizer ...; default: an export of the same run.")  # fmt: skip
@click.option("--engine", help="Which engine; needed where the generation holds several.")
@json_option
def export_command(
    generation: str, target: Path, dtype: str | None, base: Path | None, engine: str | None, as_json: bool
) -> None:
    """Write the weights in GEN as a folder that from_pretrained loads, equal to what the run itself would export.

    Every byte that is read is compared with its digest first, and what was written is read back. The folder appears
    when it is complete. A copy at a URL is fetched into the folder for temporary files (TMPDIR) first.

    How a model is made of the weights, no generation knows: config.json says it, which any export of the run has, or
    the folder that the run began with. Tokenizer and other files beside it are copied. Python code in it is never run;
    transformers must know the architecture.
    """
    from ..convert import convert
    from .copies import local_copy

    folder = find_generation(generation)
    base = base or _config_of(folder.path)
    if target.exists():
        raise click.UsageError(f"{target} exists already and is never written over; choose another --to")
    with local_copy(folder) as path:
        done = convert(path, target, to="hf", dtype=dtype or _own_dtype(base), config=base, engine=engine)
    files = [file.stat().st_size for file in target.rglob("*") if file.is_file()]
    report = {"to": str(target), "bytes": sum(files), "files": len(files), "seconds": round(done.seconds, 3)}
    if as_json:
        print_json(report)
    else:
        click.echo(
            f"exported {folder.where} to {target}: {size_text(report['bytes'])} in {report['files']} files, "
            f"{seconds_text(report['seconds'])}"
        )


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
    from ..convert.architecture import Architecture

    return str(base_dtype(Architecture.read(base).model, base)).removeprefix("torch.")
