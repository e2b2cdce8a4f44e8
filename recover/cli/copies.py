"""Generations at a URL as folders of this machine, for commands that read all of one."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..storage.generations import GenerationStore
from .folders import Folder


@contextmanager
def local_copy(folder: Folder) -> Iterator[Path]:
    """A generation as a folder of this machine; of one at a URL a verified copy, which is removed afterwards."""
    if folder.path is not None:
        yield folder.path
        return
    from .mirror import open_mirror

    root, _, name = folder.where.rpartition("/")
    with tempfile.TemporaryDirectory(prefix="holdfast-") as temporary:
        yield open_mirror(root).fetch(int(name.rpartition("_")[2]), GenerationStore(Path(temporary))).path
