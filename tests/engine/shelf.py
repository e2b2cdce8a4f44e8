"""``shelf://``: a store for tests that all ranks reach, on a local disk but written as any other fsspec backend is."""

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Shelf(DirFileSystem):
    """Files under their names from the first byte on, no discarding, no durability."""

    protocol = "shelf"

    def __init__(self, **options: Any) -> None:
        super().__init__("/", LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("shelf://").strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"shelf:///{name}"


def shelf_url(folder: Path) -> str:
    """The URL of a folder, for this process and the backend it now knows."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    return f"shelf://{folder}"
