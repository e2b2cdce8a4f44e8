"""A server with the few endpoints of the Hugging Face hub that a snapshot download uses."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """A model on the hub: the commit of each revision at successive requests, and the folder of
    each commit.
    """

    commits: dict[str, Path]
    revisions: dict[str, list[str]]
    broken: str = ""
    """A file that cannot be downloaded."""
    slow: str = ""
    """A file that takes `SLOW_S` to download."""


SLOW_S = 4.0


@dataclass
class Hub:
    """The repositories of a server, its address, and the files that were fetched."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    url: str = ""
    fetched: list[str] = field(default_factory=list)

    def add(self, name: str, **folders: Path) -> Repository:
        """A repository with a commit for each branch."""
        commits = {
            hashlib.sha1(f"{name} {branch}".encode()).hexdigest(): path
            for branch, path in folders.items()
        }
        revisions = {branch: [commit] for branch, commit in zip(folders, commits, strict=True)}
        self.repositories[name] = repository = Repository(commits, revisions)
        return repository


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Serve an empty `Hub` until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/models/"):
                kind = "tree" if "/tree/" in path else "revision"
                name, _, revision = path.removeprefix("/api/models/").partition(f"/{kind}/")
                self._answer_api(name, kind, revision)
            elif "/resolve/" not in path:
                self._send(404, b"")
            else:
                name, _, rest = path.removeprefix("/").partition("/resolve/")
                commit, _, file = rest.partition("/")
                self._answer_file(name, commit, file)

        def _answer_api(self, name: str, kind: str, revision: str) -> None:
            repository = hub.repositories.get(name)
            if repository is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if kind == "tree":
                folder = repository.commits[revision]
                files = [
                    {
                        "type": "file",
                        "path": str(file.relative_to(folder)),
                        "size": file.stat().st_size,
                        "oid": "0" * 40,
                    }
                    for file in sorted(folder.rglob("*"))
                    if file.is_file()
                ]
                return self._send(200, json.dumps(files).encode())
            found = repository.revisions.get(revision)
            if found is None:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            commit = found.pop(0) if len(found) > 1 else found[0]
            siblings = [{"rfilename": file.name} for file in repository.commits[commit].iterdir()]
            self._send(
                200,
                json.dumps(
                    {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
                ).encode(),
            )

        def _answer_file(self, name: str, commit: str, file: str) -> None:
            repository = hub.repositories[name]
            if file == repository.broken:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            content = (repository.commits[commit] / file).read_bytes()
            if self.command == "GET":
                hub.fetched.append(f"{name}/{file}")
                time.sleep(SLOW_S if file == repository.slow else 0)
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}
            self._send(200, content, headers)

        def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
