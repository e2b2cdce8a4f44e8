"""The HTTP side of ``mirror`` and ``serve``, protected by a token.

Requests carry a version and its label, or the path of a file of a version. Without a token only
loopback addresses are listened on.
"""

import errno
import hmac
import ipaddress
import json
import logging
import os
import re
import socket
import stat
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, BinaryIO
from urllib.parse import unquote

from .errors import FolderError
from .manifest import stays_inside
from .mirror import Mirror
from .source import version_of
from .versions import LABEL

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 20
_ROUTES = {"error": "there are POST /prepare and GET /status"}
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
"""Errors of a path that leads to no regular file, or over a link. Of others nothing is known."""


class Server(ThreadingTCPServer):
    """A server on ``host:port``.

    Raises:
        FolderError: the address is not one, or needs a token.
        OSError: it cannot be listened on.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        listen: str,
        token: str | None,
        handler: type["_Handler"],
        subject: Any,
    ) -> None:
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdecimal():
            raise FolderError(
                f"{listen!r} is not an address to listen on, such as 127.0.0.1:9000 or [::1]:9000"
            )
        if not token and not _is_loopback(host):
            raise FolderError(
                f"{listen} can be reached by other machines: set HOLDFAST_WEIGHTS_TOKEN, or "
                "listen on 127.0.0.1"
            )

        # The first address that the host has.
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        self.address_family, *_, address = found[0]
        self.token = token
        self.subject = subject
        super().__init__(address[:2], handler)  # type: ignore[arg-type]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a connection that broke."""
        logger.debug("%s broke off", client_address, exc_info=True)

    @property
    def url(self) -> str:
        """Its address, with the real port if 0 was given."""
        host, port = self.server_address[:2]
        if self.address_family == socket.AF_INET6:
            host = f"[{host}]"
        return f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "holdfast-weights"
    sys_version = ""

    # seconds without a byte from the client
    timeout = 60

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)

    def _is_allowed(self) -> bool:
        if self.server.token is None:
            return True
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            return True
        self._answer(
            HTTPStatus.UNAUTHORIZED,
            {"error": "the token of HOLDFAST_WEIGHTS_TOKEN is missing or wrong"},
        )
        return False

    def _answer(self, status: HTTPStatus, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(
        self,
        status: HTTPStatus,
        data: bytes,
        kind: str,
    ) -> None:
        self.send_response(status)
        if status >= HTTPStatus.BAD_REQUEST and self.command == "POST":
            # A body may be unread.
            self.send_header("Connection", "close")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class MirrorHandler(_Handler):
    """``POST /prepare`` and ``GET /status`` of a `Mirror`."""

    def do_GET(self) -> None:
        """Answer ``/status``."""
        if self._is_allowed():
            if self.path == "/status":
                self._answer(HTTPStatus.OK, self.server.subject.status())
            else:
                self._answer(HTTPStatus.NOT_FOUND, _ROUTES)

    def do_POST(self) -> None:
        """Answer ``/prepare`` when the version is there."""
        # The body is read before any answer, so that the connection can be used again.
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= _MAX_BODY_BYTES:
                raise ValueError(f"a body of {length} bytes")
            body = self.rfile.read(length)
            if not self._is_allowed():
                return
            if self.path != "/prepare":
                self._answer(HTTPStatus.NOT_FOUND, _ROUTES)
                return
            version, label = _parse_request(body)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            message = f"expected a version and its label: {error}"
            self._answer(HTTPStatus.BAD_REQUEST, {"error": message})
            return

        # A version that cannot be made is a conflict. Any other error is a defect of the mirror.
        mirror: Mirror = self.server.subject
        try:
            path = mirror.prepare(version, label)
        except (FolderError, OSError) as error:
            message = f"{label} was not prepared: {error}"
            logger.warning("%s", message)
            self._answer(HTTPStatus.CONFLICT, {"error": message})
        except Exception as error:
            logger.exception("%s was not prepared", label)
            message = f"{type(error).__name__}: {error}"
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": message})
        else:
            self._answer(HTTPStatus.OK, {"path": str(path)})


def _parse_request(body: bytes) -> tuple[int, str]:
    document = json.loads(body)
    version = document["version"]
    label = document["label"]
    match = LABEL.fullmatch(label)
    if type(version) is not int or match is None or int(match[1]) != version:
        raise ValueError(f"{version!r} and {label!r} do not belong together")
    return version, label


class FileHandler(_Handler):
    """The files of the versions below a folder, and a page that lists the versions for fsspec."""

    def do_GET(self) -> None:
        """Answer with a file, or a part of it."""
        if not self._is_allowed():
            return
        root = self.server.subject
        path, _, _ = self.path.partition("?")
        path = unquote(path).removeprefix("/")

        file: BinaryIO | None = None
        names: list[str] = []
        try:
            if path:
                file = _open_below(root, path)
            else:
                names = sorted(entry.name for entry in os.scandir(root) if _is_version(entry))
        except (OSError, FolderError) as error:
            # A mirror takes what is not found for a version that was removed.
            status = HTTPStatus.NOT_FOUND
            if isinstance(error, OSError) and error.errno not in _ABSENT:
                logger.warning("%s cannot be read: %s", path or root, error)
                status = HTTPStatus.INTERNAL_SERVER_ERROR
            self._answer(status, {"error": f"{path}: {error}"})
            return

        # The page of versions, or a file.
        if file is None:
            links = "".join(f'<a href="{name}">{name}</a>\n' for name in names)
            self._send(HTTPStatus.OK, links.encode(), "text/html")
            return
        with file:
            self._send_file(file)

    do_HEAD = do_GET

    def _send_file(self, file: BinaryIO) -> None:
        size = os.fstat(file.fileno()).st_size
        start = 0
        stop = size
        status = HTTPStatus.OK
        wanted = self.headers.get("Range")
        if wanted is not None:
            status = HTTPStatus.PARTIAL_CONTENT
            start, stop = _parse_range(wanted, size)
            if start >= stop:
                self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                self.send_header("Content-Range", f"bytes */{size}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return

        self.send_response(status)
        if wanted is not None:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        if self.command != "HEAD" and stop > start:
            sent = self.connection.sendfile(file, start, stop - start)
            # If the file became shorter, the client waits for the rest.
            self.close_connection |= sent < stop - start


def _parse_range(text: str, size: int) -> tuple[int, int]:
    """First byte, and the byte after the last one. Equal if empty or not understood."""
    match = _RANGE.fullmatch(text)
    if match is None:
        return size, size
    first, last = match.groups()
    if first and last:
        return int(first), min(size, int(last) + 1)
    if first:
        return int(first), size
    if last:
        # The last bytes of the file.
        return max(0, size - int(last)), size
    return size, size


def _is_version(entry: os.DirEntry[str]) -> bool:
    return version_of(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _open_below(root: Path, path: str) -> BinaryIO:
    """Open a regular file of a version without following a link. OSError or FolderError if there is
    none.
    """
    *folders, name = path.split("/")
    version, _, _ = path.partition("/")
    if not stays_inside(path) or version_of(version) is None:
        raise FolderError("not the file of a version")

    # Folder by folder, so that none of them may be a link.
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise FolderError("not a regular file")
    return open(fd, "rb", buffering=0)
