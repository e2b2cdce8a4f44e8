"""The command group, and what every command shares: how errors end it, and which module it is in.

A command is imported when it is called (or listed), and imports torch itself, in its function, where it needs it.
Exit codes: 0; 1 damage was found; 2 the command could not do what it was told; 130 Ctrl-C.
"""

import importlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import click

from ...utils.errors import CheckpointCorruptError, HoldfastError

_COMMANDS = {
    "convert": "convert:convert_command",
    "diff": "diff:diff_command",
    "export": "export:export_command",
    "ls": "ls:ls_command",
    "mirror": "mirror:mirror_group",
    "pin": "manage:pin_command",
    "resume-from": "resume_from:resume_from_command",
    "rm": "manage:rm_command",
    "show": "show:show_command",
    "top": "top:top_command",
    "unpin": "manage:unpin_command",
    "verify": "verify:verify_command",
    "why": "why:why_command",
}
"""Name of a command -> its module here, and its name in that."""

DAMAGED, FAILED, INTERRUPTED = 1, 2, 130


class _Commands(click.Group):
    """Imports each command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        return getattr(importlib.import_module(f".{module}", __package__), name)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; nobody who reads its output any more is no error: `holdfast ls RUN | head`."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # here, because click's own answer is exit code 1, which means damage
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run a command and end the process; never a traceback for what users, files or networks do."""
        options["standalone_mode"] = False
        try:
            code = super().main(args, *rest, **options)
        except click.Abort:  # what click makes of Ctrl-C
            code = _say("aborted", INTERRUPTED)
        except click.ClickException as error:
            error.show()
            code = FAILED
        except CheckpointCorruptError as error:
            code = _say(f"damaged: {error}", DAMAGED)
        except (HoldfastError, OSError) as error:
            code = _say(f"error: {error}", FAILED)
        sys.exit(code if isinstance(code, int) else 0)


def _say(message: str, code: int) -> int:
    click.echo(message, err=True)
    return code


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0; 1 damage was found; 2 the command could not do what it was told. Completion, for bash: "
    'eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)"; zsh and fish likewise.',
)
@click.version_option(package_name="holdfast")
@click.option("-v", "--verbose", is_flag=True, help="Log what is done to stderr.")
def cli(verbose: bool) -> None:
    """Look at the runs of Holdfast, and look after them.

    RUN is the folder of a run, <fileroot>/<experiment>/<trial>, or its copy at a mirror, s3://bucket/experiment/trial.

    GEN is one generation of it: a folder or URL that ends with global_step_120, RUN@120, or RUN@newest.

    Nothing that is read is executed: neither a pickle nor a model's code.
    """
    click.get_current_context().with_resource(_logging(logging.INFO if verbose else logging.ERROR))


@contextmanager
def _logging(level: int) -> Iterator[None]:
    """Send the ``holdfast`` log to stderr while a command runs: what it finds it says itself."""
    logger, handler = logging.getLogger("holdfast"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s | %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def main() -> NoReturn:
    """The entry point."""
    cli.main()
