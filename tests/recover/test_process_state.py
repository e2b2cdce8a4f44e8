"""The files of process state: plain values only, nothing that runs, and a fallback for new
processes.
"""

import logging
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.recover.engines import RankEngines, engines_of
from holdfast.recover.info import DRIVER_STATE, rank_state_name
from holdfast.recover.resuming.restore import ProcessState
from holdfast.recover.saving.snapshot import capture_process, write_process
from holdfast.utils.errors import CheckpointCorruptError, ConfigError
from holdfast.utils.files import file_digest
from holdfast.utils.plain_values import pack_nested, pack_plain, read_plain, unpack_plain
from holdfast.utils.rng import rng_digest, seed_rng
from tests.recover.runs import Meter, Tiny, draw


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", None, True, b"bytes"], "b": {3: (4, 5)}},
        OrderedDict(t=torch.arange(3), bf=torch.ones(2, dtype=torch.bfloat16)),
        {"nan": float("inf"), "long": 2**80, "empty": [], "set": {1, 2}},
    ],
)
def test_plain_values_and_tensors_come_back(value: Any) -> None:
    again = unpack_plain(pack_plain("it", value), "x")
    assert repr(again) == repr(value)
    outer = unpack_plain(pack_plain("it", {"part": pack_nested("part", value)}), "x")
    assert repr(unpack_plain(outer["part"], "x")) == repr(value)


@pytest.mark.parametrize("part", [3, torch.zeros(3), torch.zeros((2, 2), dtype=torch.uint8), None])
def test_a_part_of_another_kind_is_corrupt(part: Any) -> None:
    with pytest.raises(CheckpointCorruptError, match=r"x cannot be read: it is a .*expected bytes"):
        unpack_plain(part, "x")


class Evil:
    """Unpickling it would run code."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('code was run')",)


@pytest.mark.parametrize(
    "value", [lambda: 1, Path("x"), np.random.default_rng(), Evil(), open, Meter()]
)
def test_values_that_need_code_to_be_read_are_refused_when_written(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"state of 'x' cannot be saved: .*may hold tensors, numbers"
    ):
        pack_plain("state of 'x'", {"deep": [value]})


@pytest.mark.parametrize(
    "content", [b"", b"garbage", pickle.dumps(Evil()), b"PK\x03\x04 half a zip"]
)
def test_a_file_that_is_not_plain_is_corrupt_and_not_run(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"state\.pt cannot be read"):
        read_plain(tmp_path / "state.pt")
    with pytest.raises(CheckpointCorruptError, match=r"gone\.pt cannot be read: No such file"):
        read_plain(tmp_path / "gone.pt")


def test_a_process_reads_back_its_objects_and_generators(tmp_path: Path) -> None:
    meter = Meter()
    meter.seen, meter.mean = [1, 2], torch.tensor([0.5, 0.25])
    seed_rng(4)
    state, rng = capture_process({"meter": meter})
    entry = write_process(tmp_path, rank_state_name(0), state)
    expected, again = draw(), Meter()
    file = tmp_path / "state" / "rank_00000.pt"
    assert (entry.name, entry.bytes, entry.digest) == (
        "state/rank_00000.pt",
        file.stat().st_size,
        file_digest(file),
    )
    seed_rng(5)
    assert ProcessState.read(tmp_path, 0).restore({"meter": again}) == rng_digest(rng)
    assert (again.seen, again.mean.tolist(), draw()) == ([1, 2], [0.5, 0.25], expected)
    assert random.random() and np.random.rand()


def test_a_new_process_takes_objects_from_rank_zero_then_the_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def meter(number: int) -> Meter:
        made = Meter()
        made.seen = [number]
        return made

    seed_rng(4)
    write_process(
        tmp_path, rank_state_name(0), capture_process({"both": meter(0), "rank": meter(1)})[0]
    )
    write_process(
        tmp_path, DRIVER_STATE, capture_process({"both": meter(2), "driver": meter(3)})[0]
    )
    taken = draw()
    things = {name: meter(9) for name in ("both", "rank", "driver", "new")}
    draws = []
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            assert ProcessState.read(tmp_path, 7).restore(things) is None
        draws.append(draw())
    assert {name: thing.seen for name, thing in things.items()} == {
        "both": [0],
        "rank": [1],
        "driver": [3],
        "new": [9],
    }
    assert draws[0] == draws[1] != taken, "derived, and the same after every restart"
    assert "no state for 'new'; it starts anew" in caplog.text
    ProcessState.read(tmp_path, None).restore(things)
    assert {name: thing.seen for name, thing in things.items()} == {
        "both": [2],
        "rank": [1],
        "driver": [3],
        "new": [9],
    }


def test_objects_that_were_packed_as_bytes_come_back(tmp_path: Path) -> None:
    meter = Meter()
    meter.seen = [1, 2]
    contents = unpack_plain(capture_process({"meter": meter})[0], "it")
    contents["user"]["meter"] = contents["user"]["meter"].numpy().tobytes()
    write_process(tmp_path, rank_state_name(0), pack_plain("it", contents))
    again = Meter()
    ProcessState.read(tmp_path, 0).restore({"meter": again})
    assert again.seen == [1, 2]


def test_a_plain_file_not_of_a_process_is_corrupt_changing_nothing(tmp_path: Path) -> None:
    write_process(tmp_path, rank_state_name(0), capture_process({})[0])
    (tmp_path / DRIVER_STATE).write_bytes(pack_plain("it", [1, 2]))
    before = torch.get_rng_state()
    with pytest.raises(CheckpointCorruptError, match=r"driver\.pt is not the state of a process"):
        ProcessState.read(tmp_path, None)
    assert torch.equal(before, torch.get_rng_state())


def test_a_holder_shows_its_engines_in_one_of_four_ways() -> None:
    state = Tiny().state

    class Worker:
        engine = state
        stateful: dict[str, Any] = {"meter": Meter()}  # noqa: RUF012

    class Many:
        engines = {"a": state, "b": state}  # noqa: RUF012

    assert engines_of(state).engines == {"default": state}
    assert engines_of({"x": state}).engines == {"x": state}
    assert engines_of(Worker()).engines == {"default": state} and engines_of(
        Worker()
    ).stateful.keys() == {"meter"}
    assert engines_of(Many()).engines == {"a": state, "b": state}
    target = RankEngines({"y": state})
    assert engines_of(target) is target
    for holder in (object(), None, "path"):
        with pytest.raises(ConfigError, match="has neither 'engines' nor 'engine'"):
            engines_of(holder)
