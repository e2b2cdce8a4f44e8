"""The logs of episodes, for ``ls`` and ``verify``. Only the heads of their records are decoded."""

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...utils.errors import CheckpointError
from ...utils.record_log import (
    NO_PARENT,
    LogFile,
    ReadCounts,
    descendants,
    log_files,
    read_records,
    split_payload,
)
from ..info import RecoverInfo
from ..storage.episodes import FOLDER, registered_name
from ..storage.generations import GenerationStore
from .output import number_of, seconds_text, size_text


@dataclass
class LogFacts:
    """A log, as in the JSON document. Counts are those of the files that were read."""

    name: str  # under which the object is registered
    files: int = 0
    bytes: int = 0
    answers: int = 0
    tokens: int = 0  # in the answers
    calls: int = 0  # results of calls
    since: int | None = None  # step of the generation that it follows. None: the start of the run
    last: float | None = None  # when the newest file was written, in seconds since the epoch
    damaged: int = 0
    torn: int = 0
    seconds: float = 0.0  # that reading took
    problems: list[str] = field(default_factory=list)  # files that cannot be read

    @property
    def where(self) -> str:
        """Path relative to the folder of the generations."""
        return f"{FOLDER}/{self.name}"


def newest_logs(store: GenerationStore) -> list[LogFacts]:
    """Describe what would be read after the newest sound generation, of each log."""
    since, logs = _newest_names(store)
    found = []
    for name, files in _all_logs(store):
        # Before the first generation a log begins with no parent.
        log_id = logs.get(name)
        if since is None:
            log_id = NO_PARENT

        chosen: list[LogFile] = []
        if log_id is not None:
            chosen = descendants(files, log_id)
        facts = read_log(name, chosen)
        facts.since = since
        found.append(facts)
    return found


def whole_logs(store: GenerationStore) -> list[LogFacts]:
    """Describe all files of each log."""
    return [read_log(name, files) for name, files in _all_logs(store)]


def read_log(name: str, files: list[LogFile]) -> LogFacts:
    """Read files of a log. A file that the run deletes meanwhile is left out."""
    began_s = time.monotonic()
    facts = LogFacts(name)
    counts = ReadCounts()
    for file in files:
        try:
            for payload in read_records(file.path, counts):
                _count(facts, payload)
            written = os.stat(file.path).st_mtime
        except FileNotFoundError:
            continue
        except OSError as error:
            facts.problems.append(f"{file.path.name}: {error.strerror or error}")
            continue
        facts.files += 1
        facts.last = max(written, facts.last or 0.0)
    facts.bytes = counts.bytes
    facts.damaged = counts.damaged
    facts.torn = counts.torn
    facts.seconds = round(time.monotonic() - began_s, 4)
    return facts


def _count(facts: LogFacts, payload: bytes) -> None:
    # Other objects of a user may write other records.
    head: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        head, _ = split_payload(payload)
    match head.get("kind"):
        case "answer":
            facts.answers += 1
            tokens = head.get("tokens")
            if type(tokens) is int:
                facts.tokens += tokens
        case "call":
            facts.calls += 1


def _all_logs(store: GenerationStore) -> list[tuple[str, list[LogFile]]]:
    root = store.root / FOLDER
    folders: list[Path] = []
    with contextlib.suppress(FileNotFoundError):
        folders = sorted(path for path in root.iterdir() if path.is_dir())
    found = [(registered_name(folder.name), log_files(folder)) for folder in folders]
    return [(name, files) for name, files in found if files]


def _newest_names(store: GenerationStore) -> tuple[int | None, dict[str, str]]:
    """Step of the newest readable generation, and the ids of the logs that follow it."""
    for generation in store.generations():
        with contextlib.suppress(CheckpointError, OSError):
            return generation.step, RecoverInfo.read(generation.path).logs
    return None, {}


def log_line(facts: LogFacts) -> str:
    """Describe a log for people."""
    plural = ""
    if facts.files != 1:
        plural = "s"
    begin = "the start"
    if facts.since is not None:
        begin = f"step {facts.since}"

    # How recent the newest record is tells whether the run still records.
    line = (
        f"{facts.where}: {facts.files} file{plural}, {size_text(facts.bytes)}, {facts.answers} "
        f"answers ({number_of(facts.tokens)} tokens) and {facts.calls} calls since {begin}"
    )
    if facts.last is not None:
        line += f", the last {seconds_text(max(0.0, time.time() - facts.last))} ago"
    return line
