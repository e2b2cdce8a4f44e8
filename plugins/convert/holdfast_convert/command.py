"""``holdfast convert``: convert a checkpoint from or to another trainer."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from holdfast.recover.cli.output import dtype_option, json_option, print_json


@click.command("convert", short_help="Convert a checkpoint from or to another trainer.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to",
    type=click.Choice(("hf", "generation", "dcp", "areal")),
    required=True,
    help="Format of DST, see above.",
)
@dtype_option("unchanged")
@click.option(
    "--root",
    metavar="NAME",
    help='Root of the model in DCP data: app, "" ...  [default: the only one]',
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Folder with the model's config.json, if SRC has none.",
)
@click.option(
    "--engine",
    metavar="NAME",
    help="Engine to read if SRC has several, or its name in a new generation.",
)
@click.option(
    "--step",
    type=int,
    help="Last trained step of a generation, counted from 0, if SRC does not say it.",
)
@click.option(
    "--steps-per-epoch",
    type=int,
    help="Steps per epoch of a generation, if SRC does not say it.",
)
@json_option
def convert_command(source: str, target: str, as_json: bool, **options: Any) -> None:
    """Convert the checkpoint in SRC to DST. DST appears only after it was read back and compared
    with SRC.

    SRC is a folder of verl (model_world_size_*_rank_*.pt), AReaL or Holdfast, with optimizer state.
    Or it holds weights only: a Hugging Face model, a checkpoint of Trainer or TRL, save_state of
    Accelerate, or a folder of torch.distributed.checkpoint with any root. The format is detected
    from the files. Nothing in SRC is executed.

    \b
    --to hf          weights that from_pretrained loads
    --to generation  DST is the folder of a run, FILEROOT/EXPERIMENT/TRIAL, that
                     RecoverHandler resumes
    --to dcp         model, optimizer and schedule for load_dcp, at any number of ranks
    --to areal       a folder that AReaL's engine loads, optimizer included

    The conversion holds one block of 64 MiB in memory. If it is killed, run the same command again.
    """
    # Here, because it imports torch, which takes seconds.
    from .conversion import convert

    done = convert(source, target, progress=not as_json, **options)
    if as_json:
        print_json(asdict(done))
        return

    # The result, and how it was checked.
    what = "with" if done.optimizer else "without"
    click.echo(f"{done.target}: {done.format} as {done.to}, {what} optimizer state")
    click.echo(
        f"  {done.tensors} tensors, {done.bytes} bytes, read back and equal to the source; "
        f"{done.seconds:.1f} s"
    )

    # Notes for a user of the target.
    for note in done.notes:
        click.echo(f"  {note}")
    for part, outcome in done.lacks.items():
        click.echo(f"  no {part}: {outcome}")
    if done.ignored:
        click.echo(f"  not converted: {', '.join(done.ignored)}")
