"""``holdfast convert``: the command of the distribution ``holdfast-convert``, if it is there."""

import click

from ...utils.errors import ConfigError

_HOW = "pip install holdfast-convert, or from a checkout pip install -e plugins/convert"


@click.command(
    "convert",
    short_help="Convert a checkpoint. Needs holdfast-convert.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def _not_installed(arguments: tuple[str, ...]) -> None:
    """Convert a checkpoint from or to another trainer.

    This command is in a distribution of its own: pip install holdfast-convert, or from a checkout
    pip install -e plugins/convert.
    """
    raise ConfigError(f"the converter is not installed: {_HOW}")


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
