"""``shelf://``: a store for tests, shared by all ranks, on a local disk but written like any other
fsspec backend.
"""

from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem


class Shelf(DirFileSystem):
    """Files have their final names from the first byte on. Nothing is discarded, nothing is
    durable.
    """

    protocol = "shelf"

    def __init__(self, **options: Any) -> None:
        super().__init__("/", LocalFileSystem(), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("shelf://").strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"shelf:///{name}"


def shelf_url(folder: Path) -> str:
    """The URL of a folder. Also registers the backend in this process."""
    fsspec.register_implementation("shelf", Shelf, clobber=True)
    return f"shelf://{folder}"
