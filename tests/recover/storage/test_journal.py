"""The journal of a run: a disk that is temporarily full loses lines, but neither the run nor later
lines.
"""

import errno
import os
from pathlib import Path

import pytest

from holdfast.recover.storage.journal import Journal, last_start, read_journal


def test_lines_are_written_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    journal, write = Journal(tmp_path), os.write
    journal.open()

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    journal.note("step", step=0)
    for patched, steps in (
        (full, (1, 2)),
        (lambda fd, data: write(fd, data[:5]), (3,)),
        (write, (4, 5)),
    ):
        monkeypatch.setattr(os, "write", patched)
        for step in steps:
            journal.note("step", step=step)
    journal.close()
    assert [event["step"] for event in read_journal(tmp_path, ["step"])] == [0, 4, 5]
    assert len(caplog.records) == 1, "one warning, however long the disk is full"


def test_the_end_names_an_error_whose_text_cannot_be_made(tmp_path: Path) -> None:
    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    journal = Journal(tmp_path)
    journal.open()
    journal.start(step=None)
    with pytest.raises(Unspeakable):
        try:
            raise Unspeakable
        finally:
            journal.close()
    assert [event["error"] for event in read_journal(tmp_path, ["end"])] == ["Unspeakable"]


def test_a_journal_that_is_a_pipe_blocks_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "journal.jsonl")
    journal = Journal(tmp_path)
    journal.open()
    journal.note("step", step=0)
    journal.close()
    assert list(read_journal(tmp_path, ["step"])) == [] and last_start(tmp_path) is None
    assert "no regular file" in caplog.text


def test_the_last_start_that_is_whole_is_found_behind_damaged_ones(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.open()
    for step in (1, 2):
        journal.start(step=step)
        journal.note("step", step=step)
    journal.note("start", step="three")
    journal.close()
    found = last_start(tmp_path)
    assert found is not None and found[1]["step"] == 2
    assert [
        event["event"] for event in read_journal(tmp_path, ["start", "step"], since=found[0])
    ] == ["start", "step"]
