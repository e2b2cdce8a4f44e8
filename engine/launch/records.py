"""Records of keepers: ``<folder>/<host>.json`` of each host that runs servers for a job.

A keeper (`ServerProcesses`) replaces its file atomically at each change, and at least every few
seconds. Only its owner may read the file, because it has the keys. A file that was not replaced for
a while is that of a keeper that is gone.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...utils.errors import ConfigError
from ...utils.logging import get_logger

logger = get_logger(__name__)

Record = dict[str, Any]

SERVERS = "servers"
"""Name of the folder in the folder of a run."""
BEAT_S = 5.0
"""Seconds after which a keeper replaces its file even without a change."""
_SUSPECTS = ".suspect"
_LOG_LINES = 20
_LOG_BYTES = 64 << 10


def write_private(path: Path, record: Record) -> None:
    """Replace a file that only its owner may read. A crash leaves the old contents or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        with open(os.open(temporary, flags, 0o600), "w") as file:
            json.dump(record, file)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_records(folder: Path) -> dict[str, Record]:
    """Return the contents of all ``<host>.json`` by host. Unreadable ones are left out, with a
    warning.
    """
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = json.loads(path.read_text())
            if not isinstance(record["servers"], list):
                raise ValueError("its servers are no list")
            float(record["beat"])
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("%s cannot be read: %s", path, error)
            continue
        records[path.stem] = record
    return records


@contextmanager
def known_format(folder: Path, host: str) -> Iterator[None]:
    """Raise ConfigError if the block does not find in a record what this version writes."""
    try:
        yield
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the record of host {host} in {folder} has another format "
            f"({type(error).__name__}: {error}). Does another version of Holdfast keep it?"
        ) from error


def suspect_file(folder: Path, host: str, server: str) -> Path:
    """The file by which a job says that a server did not answer several requests in a row."""
    return folder / f"{host}.{server}{_SUSPECTS}"


def log_tail(log: Path | None, keys: Iterable[str] = ()) -> str:
    """The last lines of a log, with ``***`` for ``keys``. Empty if it cannot be read."""
    if log is None:
        return ""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    text = "\n".join(text.splitlines()[-_LOG_LINES:])
    return without_keys(text, keys)


def without_keys(text: str, keys: Iterable[str]) -> str:
    """``text`` with ``***`` for each of ``keys``."""
    for key in keys:
        text = text.replace(key, "***")
    return text
