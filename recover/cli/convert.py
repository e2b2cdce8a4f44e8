"""``holdfast convert``: the command of the distribution ``holdfast-convert``, if it is there."""

import click

from ...utils.errors import ConfigError


@click.command(
    "convert",
    short_help="Convert a checkpoint. Needs holdfast-convert.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _not_installed(arguments: tuple[str, ...]) -> None:
    """Convert a checkpoint from or to another trainer.

    This command is in the distribution holdfast-convert. From a checkout of Holdfast: pip install
    ./plugins/convert
    """
    raise ConfigError(
        "the converter is not installed; from a checkout of Holdfast: pip install ./plugins/convert"
    )


def _find_command() -> click.Command:
    try:
        from holdfast_convert.command import convert_command
    except ModuleNotFoundError as error:
        # A module that the converter itself lacks is another matter.
        if error.name != "holdfast_convert":
            raise
        return _not_installed
    return convert_command


convert_command = _find_command()
