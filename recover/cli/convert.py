"""``holdfast convert``: a checkpoint of one trainer as a checkpoint of another. See `holdfast.recover.convert`.

torch is imported when a conversion begins, so that ``--help`` is there at once.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .dtypes import dtype_option
from .output import json_option, print_json

if TYPE_CHECKING:
    from ..convert import Conversion

_FORMATS = ("hf", "generation", "dcp", "areal")


@click.command("convert", short_help="Convert a checkpoint of another trainer, or into one.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option("--to", type=click.Choice(_FORMATS), required=True, help="What to make of it; see below.")
@dtype_option("as they are")
@click.option("--root", metavar="NAME", help='Where DCP data has the model: app, "" ...  [default: the only one]')
@click.option("--config", type=click.Path(path_type=Path), help="Folder with the model's config.json, if SRC has none.")
@click.option("--engine", metavar="NAME", help="Which of several in SRC; what to call it in a generation.")
@click.option("--step", type=int, help="Of a generation: its last step, counted from 0, if SRC does not say it.")
@click.option("--steps-per-epoch", type=int, help="Of a generation, if SRC does not say it.")
@json_option
def convert_command(source: str, target: str, as_json: bool, **options: Any) -> None:
    """Make DST of the checkpoint in SRC: complete and compared with SRC, or not at all.

    SRC is a folder of verl (model_world_size_*_rank_*.pt), AReaL or Holdfast, with optimizer state; or of weights: a
    Hugging Face model, a checkpoint of Trainer or TRL, save_state of Accelerate, or torch.distributed.checkpoint under
    any root. The files in it say which. Nothing in it is run.

    \b
    --to hf          weights that from_pretrained loads
    --to generation  DST is the folder of a run, FILEROOT/EXPERIMENT/TRIAL, that RecoverHandler resumes
    --to dcp         model, optimizer and schedule for load_dcp, at any number of ranks
    --to areal       what AReaL's engine loads, optimizer included

    Memory is a block of 64 MiB; a conversion that was killed starts again with the same command.
    """
    from ..convert import convert

    done = convert(source, target, progress=not as_json, **options)
    if as_json:
        print_json(asdict(done))
    else:
        click.echo(_described(done))


def _described(done: "Conversion") -> str:
    what = "with" if done.optimizer else "without"
    lines = [
        f"{done.target}: {done.format} as {done.to}, {what} optimizer state",
        f"  {done.tensors} tensors, {done.bytes} bytes, read back and equal to the source; {done.seconds:.1f} s",
        *(f"  {note}" for note in done.notes),
        *(f"  no {part}: {outcome}" for part, outcome in done.lacks.items()),
    ]
    if done.ignored:
        lines.append(f"  not converted: {', '.join(done.ignored)}")
    return "\n".join(lines)
