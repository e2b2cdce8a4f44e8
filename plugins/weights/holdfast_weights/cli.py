"""The command ``holdfast-weights``."""

import logging
import os
import signal
import threading
from pathlib import Path

import click

from .errors import FolderError
from .mirror import Mirror
from .service import FileHandler, MirrorHandler, Server
from .source import Source
from .versions import check_version

TOKEN = "HOLDFAST_WEIGHTS_TOKEN"

_listen = click.option(
    "--listen", required=True, metavar="HOST:PORT", help="Address, such as 127.0.0.1:9000."
)


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (FolderError, OSError) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=_Commands)
@click.version_option(package_name="holdfast-weights")
def main() -> None:
    """Keep the weights that Holdfast publishes next to inference servers.

    Other machines need the token in the environment variable HOLDFAST_WEIGHTS_TOKEN.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # An end at any point leaves nothing to clean up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _token() -> str | None:
    """The token in the environment, which must be one that a header can carry."""
    token = os.environ.get(TOKEN) or None
    if token is not None and not all("!" <= letter <= "~" for letter in token):
        raise FolderError(
            f"{TOKEN} has white space, or characters that are not printable ASCII, and cannot be "
            "sent. If it was read from a file, strip its line break"
        )
    return token


@main.command()
@click.argument("source")
@click.argument("local", type=click.Path(path_type=Path))
@_listen
@click.option(
    "--poll",
    default=2.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Seconds between looks for a new version. 0: only when a trainer asks.",
)
def mirror(
    source: str,
    local: Path,
    listen: str,
    poll: float,
) -> None:
    """Keep the newest versions of SOURCE, complete and verified, in the folder LOCAL.

    SOURCE is the trainer's folder, a URL such as s3://bucket/weights, or http://host:port of
    `serve`.
    """
    token = _token()
    kept = Mirror(Source(source, token), local)

    # The address is taken first: an error of it comes before the work of `open`.
    with Server(listen, token, MirrorHandler, kept) as server:
        kept.open()
        if poll:
            threading.Thread(target=kept.follow, args=(poll,), daemon=True).start()
        click.echo(f"listening on {server.url}")
        server.serve_forever()


@main.command()
@click.argument("root", type=click.Path(exists=True, file_okay=False, path_type=Path))
@_listen
def serve(root: Path, listen: str) -> None:
    """Serve the files of the versions in the folder ROOT over HTTP, for mirrors without a shared
    folder.
    """
    with Server(listen, _token(), FileHandler, root) as server:
        click.echo(f"listening on {server.url}")
        server.serve_forever()


@main.command()
@click.argument("folder", type=click.Path(resolve_path=True, path_type=Path))
def verify(folder: Path) -> None:
    """Compare the version in FOLDER with its manifests, every byte."""
    manifest, delta, full = check_version(folder)
    if full:
        click.echo(
            f"{folder}: {manifest.label}, {len(manifest.files)} files with {manifest.bytes} bytes "
            "are complete"
        )
    if delta is not None:
        facts = delta.manifest.facts
        message = (
            f"{folder}: a delta of {delta.manifest.bytes} bytes, "
            f"{facts['changed']} of {facts['elements']} elements, from {delta.base_label}"
        )
        if not full:
            message += f" to {manifest.label}"
        click.echo(message)
