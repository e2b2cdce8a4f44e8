"""JSON Lines: torn lines, and parts of a file."""

import json
import logging
import os
import random
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from holdfast.utils.json_lines import find_back, read_lines


def to_line(entry: Any) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def test_lines_come_back_in_order_and_torn_ones_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(
        to_line({"step": 0})
        + b'{"ste\n'
        + to_line({"other": 1})
        + to_line({"step": 2})
        + b'{"step": 3'
    )
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert list(read_lines(path, "step")) == [{"step": 0}, {"step": 2}]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: line 2 is torn and left out",
        f"{path}: line 3 is torn and left out",
    ]


def test_only_the_lines_that_are_wanted_are_parsed(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(
        b"".join(to_line({"event": kind, "n": n}) for n, kind in enumerate(("a", "b", "a", "ab")))
    )
    assert [
        line["n"] for line in read_lines(path, "event", like=re.compile(rb'\{"event": "a"'))
    ] == [0, 2]


@pytest.mark.parametrize("last_bytes", [1, 15, 25, 10_000])
def test_the_end_of_a_file_has_whole_lines_only(last_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"".join(to_line({"step": step}) for step in range(10)))
    found = [line["step"] for line in read_lines(path, "step", last_bytes=last_bytes)]
    assert found == list(range(10))[10 - len(found) :] and len(found) == min(10, last_bytes // 12)


def test_lines_that_are_nested_or_endless_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    deep, endless = b'{"step": ' + b"[" * 200_000, b"x" * 3_000_000
    path.write_bytes(b"\n".join((to_line({"step": 0}) + deep, endless, to_line({"step": 1}))))
    assert list(read_lines(path, "step")) == [{"step": 0}, {"step": 1}]


@pytest.mark.slow
def test_a_long_file_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(to_line({"event": "a"}) + to_line({"event": "step"}) * 1_000_000)
    begins, step = re.compile(rb'\{"event": "a"'), re.compile(rb'\{"event": "step"')
    tracemalloc.start()
    try:
        assert list(read_lines(path, "event", like=begins)) == [{"event": "a"}]
        assert [next(find_back(path, b'{"event": "a"'))] == [0]
        assert len(list(read_lines(path, "event", like=step, ends_of=step))) == 2
        assert tracemalloc.get_traced_memory()[1] < 6 << 20 < path.stat().st_size
    finally:
        tracemalloc.stop()


def test_a_special_file_blocks_no_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(OSError, match="no regular file"):
        list(read_lines(tmp_path / "lines", "step"))


def test_only_the_first_and_last_of_lines_in_a_row_are_read(tmp_path: Path) -> None:
    path, rng = tmp_path / "lines", random.Random(0)
    like, row = re.compile(rb'\{"event": "[ab]"'), re.compile(rb'\{"event": "a"')
    for _ in range(200):
        kinds = rng.choices("abc", (6, 1, 2), k=rng.randrange(12))
        path.write_bytes(
            b"".join(to_line({"event": kind, "n": n}) for n, kind in enumerate(kinds))
            + b'{"event": "a"'
        )
        wanted = [(n, kind) for n, kind in enumerate(kinds) if kind != "c"]
        ends = [
            n
            for at, (n, kind) in enumerate(wanted)
            if kind == "b"
            or {one for _, one in wanted[max(at - 1, 0) : at + 2]} != {"a"}
            or at in (0, len(wanted) - 1)
        ]
        assert [line["n"] for line in read_lines(path, "event", like=like, ends_of=row)] == ends


@pytest.mark.parametrize("block", [1, 7, 10_000])
def test_lines_are_found_from_the_end(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.utils.json_lines._BLOCK_BYTES", block)
    path = tmp_path / "lines"
    path.write_bytes(b"ab\nac\nbab\nab\n\nab")
    assert list(find_back(path, b"ab")) == [14, 10, 0] and not list(find_back(path, b"b\n"))


def test_a_part_of_a_file_ends_before_the_line_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step}) + "\n" for step in range(5)]
    path.write_text("".join(lines))
    begin = len(lines[0])
    end = begin + 2 * len(lines[1])
    found = [entry["step"] for entry in read_lines(path, "step", since=begin, until=end)]
    assert found == [1, 2]
    assert list(read_lines(path, "step", until=0)) == []
