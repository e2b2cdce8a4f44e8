"""Helpers for the mirror: an S3 server that can be stopped at any request, small generations,
processes to kill.
"""

import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import boto3
from moto.server import ThreadedMotoServer

from holdfast.recover import GenerationStore
from holdfast.recover.storage.generations import Generation
from holdfast.recover.storage.mirror import Mirror
from holdfast.utils.errors import MirrorError
from holdfast.utils.files import walk_files, write_durably
from holdfast.utils.manifest import file_entries
from holdfast.utils.remote import RemoteFolder
from tests.helpers import PRELOAD
from tests.limits import stretched

BUCKET = "bucket"


class S3Server:
    """moto's S3 server behind a layer that records, holds or refuses requests.

    Attributes:
        requests: ``"PUT /bucket/key"`` since `clear`, with the query only if there is no key.
    """

    def __init__(self, port: int = 0) -> None:
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        self.requests: list[str] = []
        self._hold_at: int | None = None
        self._failures = 0
        self._refused: str | None = None
        self._lock = threading.Lock()
        self.held, self._released = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self._server.start()
        self.port = self._server.get_host_and_port()[1]
        server: Any = self._server._server
        self._app, server.app = server.app, self._gate
        environment = self.environment
        boto3.client(
            "s3",
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        ).create_bucket(Bucket=BUCKET)
        self.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
        self._server.stop()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that a user would set."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # one layer of retries less
        }

    def hold_at(self, number: int) -> None:
        """Hold the request with this number (from 0) and all later ones until `clear`. Sets `held`
        when it arrives.
        """
        self.clear()
        self._hold_at = number

    def fail(self, count: int) -> None:
        """Answer ``count`` requests with 500."""
        self.clear()
        self._failures = count

    def refuse(self, text: str) -> None:
        """Answer every PUT of a key with ``text`` in it with 500, until `clear`."""
        self.clear()
        self._refused = text

    def clear(self) -> None:
        """Serve again, refuse all held requests, and clear the record."""
        self._released.set()
        self._hold_at, self._failures, self._refused, self.requests = None, 0, None, []
        self.held, self._released = threading.Event(), threading.Event()

    def puts(self) -> list[str]:
        """Keys of PUT requests, in order, without the mirror's root."""
        return [key.split("/", 2)[-1] for key in self.keys_put()]

    def keys_put(self) -> list[str]:
        """Keys of PUT requests, in order."""
        return [
            request.split("/", 2)[-1] for request in self.requests if request.startswith("PUT ")
        ]

    def _gate(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self._lock:
            number, released = len(self.requests), self._released
            self.requests.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
            refused = self._refused is not None and environ["REQUEST_METHOD"] == "PUT"
            refused = refused and str(self._refused) in environ["PATH_INFO"]
            failing, self._failures = self._failures > 0 or refused, max(0, self._failures - 1)
            holding = self._hold_at is not None and number >= self._hold_at
            if holding:
                self.held.set()
        if holding:
            released.wait(60)
        if failing or holding:
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        return self._app(environ, start_response)


def commit(
    store: GenerationStore, step: int, sizes: Iterable[int] = (1000, 0, 30_000), seed: int = 0
) -> Generation:
    """Commit a generation with files of these sizes. The bytes depend on ``seed``."""
    staging, names = store.open_staging(step), []
    (staging / "default").mkdir()
    for index, size in enumerate(sizes):
        names.append(f"default/shard_{index}")
        write_durably(staging / names[-1], random.Random(f"{seed} {step} {index}").randbytes(size))
    return store.commit(
        staging, step, file_entries(staging, names), {"step": step, "run_id": f"run {seed}"}
    )


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files by name."""
    return {name: (folder / name).read_bytes() for name in walk_files(folder)}


def storage(url: str) -> tuple[Any, str]:
    """The file system of a URL without caches, and the path in it."""
    remote = RemoteFolder(url, setting="the URL of a test", error=MirrorError)
    return remote._fs, remote._root


def listing(url: str) -> list[str]:
    """Every file at a URL, relative to it."""
    fs, root = storage(url)
    return sorted(path.removeprefix(f"{root}/") for path in fs.find(root))


def block(path: Path) -> None:
    """Make all processes wait that open this file."""
    path.unlink()
    os.mkfifo(path)


def start(function: Callable[..., None], environment: dict[str, str], *args: Any) -> Any:
    """Start a process that calls a top-level function and exits."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "holdfast.recover.storage.mirror", "s3fs"])
    process = context.Process(target=_with_environment, args=(function, environment, args))
    process.start()
    return process


def _with_environment(
    function: Callable[..., None], environment: dict[str, str], args: tuple[Any, ...]
) -> None:
    os.environ.update(environment)
    function(*args)


def start_copy(
    url: str,
    generation: Generation,
    environment: dict[str, str],
    keep: int | None = None,
    attempts: int = 5,
) -> Any:
    """Start a process that copies a generation and exits, with 0 if the copy was made."""
    return start(_copy, environment, url, generation, keep, attempts)


def _copy(url: str, generation: Generation, keep: int | None, attempts: int) -> None:
    mirror = Mirror(url, keep, attempts=attempts)
    mirror.submit(generation)
    assert mirror.wait(stretched(150))
    if mirror.last_error is not None:
        raise mirror.last_error
