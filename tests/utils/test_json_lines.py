"""JSON Lines: torn lines, and parts of a file."""

import logging
import re
from pathlib import Path

import pytest

from holdfast.utils.json_lines import read_lines, to_line


def test_lines_come_back_in_order_and_torn_ones_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "lines"
    path.write_bytes(to_line({"step": 0}) + b'{"ste\n' + to_line({"other": 1}) + to_line({"step": 2}) + b'{"step": 3')
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert list(read_lines(path, "step")) == [{"step": 0}, {"step": 2}]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: line 2 is torn and left out",
        f"{path}: line 3 is torn and left out",
    ]


def test_only_the_lines_that_are_wanted_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(to_line({"event": kind, "n": n}) for n, kind in enumerate(("a", "b", "a", "ab"))))
    assert [line["n"] for line in read_lines(path, "event", like=re.compile(rb'\{"event": "a"'))] == [0, 2]


@pytest.mark.parametrize("last_bytes", [1, 15, 25, 10_000])
def test_the_end_of_a_file_has_whole_lines_only(last_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(to_line({"step": step}) for step in range(10)))
    found = [line["step"] for line in read_lines(path, "step", last_bytes=last_bytes)]
    assert found == list(range(10))[10 - len(found) :] and len(found) == min(10, last_bytes // 12)
