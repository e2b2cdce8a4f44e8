"""The command group, and how errors end a command.

A command's module is imported when the command is called or listed. A command imports torch inside
its function, and only if it needs torch.
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
from .output import DAMAGED, FAILED, INTERRUPTED

_COMMANDS = {
    "convert": "convert",
    "diff": "diff",
    "export": "export",
    "goodput": "goodput",
    "ls": "ls",
    "mirror": "mirror",
    "pin": "manage",
    "plan": "plan",
    "resume-from": "manage",
    "rm": "manage",
    "serve": "serve",
    "show": "show",
    "status": "status",
    "top": "top",
    "unpin": "manage",
    "verify": "verify",
    "why": "why",
}
"""Name of a command -> its module in this package. The function of ``resume-from`` is
``resume_from_command``.
"""


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        # Only now: `holdfast ls` must not wait for the imports of other commands.
        module = importlib.import_module(f".{_COMMANDS[cmd_name]}", __package__)
        function = cmd_name.replace("-", "_")
        return getattr(module, f"{function}_command")

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command. A reader that closes the pipe is no error: `holdfast ls RUN | head`."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except BrokenPipeError:
            # click would exit with 1, which means damage here. Nothing more can be written.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            return 0

    def main(
        self,
        args: Sequence[str] | None = None,
        *rest: Any,
        **options: Any,
    ) -> NoReturn:
        """Run a command and end the process, without a traceback for errors of users, files or
        networks.
        """
        options["standalone_mode"] = False
        try:
            code = super().main(args, *rest, **options)
        except click.Abort:  # Ctrl-C
            code = INTERRUPTED
            click.echo("aborted", err=True)
        except click.ClickException as error:
            code = FAILED
            error.show()
        except CheckpointCorruptError as error:
            code = DAMAGED
            click.echo(f"damaged: {error}", err=True)
        except (HoldfastError, OSError) as error:
            code = FAILED
            click.echo(f"error: {error}", err=True)

        # A command that ends well may return anything.
        if not isinstance(code, int):
            code = 0
        sys.exit(code)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 success, 1 damage was found, 2 the command failed; status has its own. "
    "Completion in bash: "
    'eval "$(_HOLDFAST_COMPLETE=bash_source holdfast)". Use zsh_source or fish_source for other '
    "shells.",
)
@click.version_option(package_name="holdfast")
@click.option("-v", "--verbose", is_flag=True, help="Log each action to stderr.")
def cli(verbose: bool) -> None:
    """Inspect and manage the checkpoints of Holdfast runs.

    RUN is the folder of a run, <fileroot>/<experiment>/<trial>, or the URL of its mirror,
    s3://bucket/experiment/trial.

    GEN is one generation, that is one committed checkpoint: RUN@120, RUN@newest, or the folder or
    URL that ends with global_step_120.

    No command executes anything that it reads: neither pickles nor the code of a model.
    """
    level = logging.INFO if verbose else logging.ERROR
    click.get_current_context().with_resource(_logging(level))


@contextmanager
def _logging(level: int) -> Iterator[None]:
    """Send the ``holdfast`` log to stderr while a command runs."""
    # Output is for stdout, so that it can be piped.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s | %(message)s"))
    logger = logging.getLogger("holdfast")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def main() -> NoReturn:
    """Run the command ``holdfast``."""
    cli.main()
