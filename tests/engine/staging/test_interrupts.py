"""Ctrl-C in `offload` and `onload`, and at the start of a save in the background: no bit is lost,
and until the next `onload` every use is right or refused.
"""

import gc
import itertools
import os
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from holdfast.engine import FSDPEngine, SaveLoadMeta, changing_weights
from holdfast.engine.memory import offloaded
from holdfast.engine.memory.tensors import local_tensor
from holdfast.engine.staging import (
    background_save,
    host_buffers,
    offload,
    staged_model,
    staged_state,
)
from holdfast.engine.staging.staged_model import exportable_model
from holdfast.utils.errors import EngineOffloadedError
from tests.engine.lora.engines import write_base
from tests.engine.staging.test_offload import contents, make_engine, same, step, values_of
from tests.helpers import run_ranks

OFFLOAD_FILES = {
    module.__file__ for module in (offload, offloaded, host_buffers, staged_model, staged_state)
}
SAVE_FILES = {background_save.__file__}


Line = tuple[str, int]


def trace_lines(
    call: Callable[[], object],
    at_line: Callable[[Line], None],
    opcodes: bool,
    files: Container[object],
) -> None:
    """Call ``at_line`` before each line (or bytecode) of ``files`` that ``call`` runs."""
    wanted = "opcode" if opcodes else "line"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = opcodes
        if event == wanted:
            at_line((frame.f_code.co_filename, frame.f_lasti if opcodes else frame.f_lineno))
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)


def moments_of(
    call: Callable[[], object],
    opcodes: bool = False,
    files: Container[object] = OFFLOAD_FILES,
) -> list[int]:
    """Numbers of the lines that ``call`` runs: of each distinct line the first time and the last
    time.
    """
    lines = list[Line]()
    trace_lines(call, lines.append, opcodes, files)
    times = defaultdict[Line, list[int]](list)
    for number, line in enumerate(lines):
        times[line].append(number)
    return sorted({some[index] for some in times.values() for index in (0, -1)})


def interrupt(
    call: Callable[[], object],
    moment: int,
    opcodes: bool = False,
    files: Container[object] = OFFLOAD_FILES,
) -> bool:
    """Raise KeyboardInterrupt before the line of this number that ``call`` runs. Returns whether it
    came so far.
    """
    count = itertools.count()

    def at_line(_: Line) -> None:
        if next(count) == moment:
            raise KeyboardInterrupt

    try:
        trace_lines(call, at_line, opcodes, files)
    except KeyboardInterrupt:
        return True
    return False


def readable(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """What a save and an export read now."""
    found = dict(staged_state.flatten(engine.dcp_state().state_dict()))
    found |= {
        f"export.{name}": tensor
        for name, tensor in exportable_model(engine.model).state_dict().items()
    }
    return {name: local_tensor(tensor).clone() for name, tensor in found.items()}


def check_unfinished(engine: FSDPEngine, expected: dict[str, torch.Tensor]) -> None:
    """After an interrupt a save and an export are right. A step is refused, unless the engine is
    here.
    """
    assert same(readable(engine), expected)
    tokens = torch.tensor([[1, 2]], device=engine.device)
    if not engine.offloaded:
        engine.model(tokens)
        return
    calls: list[Callable[[], Any]] = [lambda: step(engine), lambda: engine.model(tokens)]
    for call in calls:
        with pytest.raises(EngineOffloadedError, match="call onload first"):
            call()


def _is_interrupted(rank: int, world_size: int, base: str, kind: str, opcodes: bool) -> list[int]:
    engine = make_engine(base, kind)
    step(engine)
    gc.freeze()  # a collection in each offload would take most of the time
    counts = []
    for interrupted in (engine.offload, engine.onload):
        engine.offload()
        engine.onload()
        if interrupted == engine.onload:
            engine.offload()
        moments = moments_of(interrupted, opcodes)
        engine.onload()
        for number, moment in enumerate(moments):
            with torch.no_grad(), changing_weights(engine.model):
                trained = [
                    param for param in engine.model.parameters() if param.requires_grad
                ]  # a base never changes
                torch._foreach_add_([local_tensor(param) for param in trained], 1)
            before, expected = values_of(engine), readable(engine)
            if interrupted == engine.onload:
                engine.offload()
            assert interrupt(interrupted, moment, opcodes) or number > 0.9 * len(moments)
            check_unfinished(engine, expected)
            # Half of the interrupts are followed by another departure, such as the one of the next
            # turn.
            if number % 2:
                engine.offload()
                left = [
                    p
                    for p in engine.model.parameters()
                    if local_tensor(p).untyped_storage().nbytes()
                ]
                assert left == [], "an offload that was begun is finished"
                assert same(readable(engine), expected)
            engine.onload()
            assert engine.offloaded == frozenset()
            assert same(values_of(engine), before)
        counts.append(len(moments))
    step(engine)
    engine.destroy()
    return counts


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "opcodes"),
    [(kind, way) for kind in ("lora", "full") for way in (False, True)],
)
def test_an_interrupt_at_any_line_of_offload_and_onload_loses_no_bit(
    kind: str, opcodes: bool, tmp_path: Path
) -> None:
    write_base(tmp_path)
    [counts] = run_ranks(_is_interrupted, 1, str(tmp_path), kind, opcodes, timeout_s=280)
    assert min(counts) > 30, "many lines were interrupted"


def _save_is_interrupted(rank: int, world_size: int, base: str, root: Path) -> int:
    engine = make_engine(base, "full")
    step(engine)
    gc.freeze()

    def save(name: str) -> None:
        engine.save(SaveLoadMeta(str(root / name), "hf", False), blocking=False)

    save("first")
    engine.wait_for_save()
    moments = moments_of(partial(save, "counted"), files=SAVE_FILES)
    engine.wait_for_save()
    for moment in moments:
        assert interrupt(partial(save, f"interrupted {moment}"), moment, files=SAVE_FILES)
        engine.wait_for_save()
    save("last")
    engine.destroy()
    assert [thread.name for thread in threading.enumerate() if "save" in thread.name] == []
    for path in [root / "last", *root.glob("interrupted *")]:
        assert contents(path) == contents(root / "first")
    return len(moments)


def test_an_interrupt_at_any_line_of_the_start_of_a_save_leaves_nothing_half_written(
    tmp_path: Path,
) -> None:
    write_base(tmp_path / "base")
    [count] = run_ranks(_save_is_interrupted, 1, str(tmp_path / "base"), tmp_path)
    assert count > 20, "many lines were interrupted"


def _gets_signals(rank: int, world_size: int, base: str, root: Path) -> int:
    engine = make_engine(base, "full")
    hits = 0
    for number in range(40):
        step(engine)
        before = values_of(engine)
        engine.save(SaveLoadMeta(str(root / f"before {number}"), "hf", False))
        started = time.perf_counter()
        engine.offload()
        engine.onload()
        took = time.perf_counter() - started

        # A real signal at another time of each turn.
        timer = threading.Timer(took * (number + 1) / 40, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            engine.offload()
            engine.onload()
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            hits += 1
        engine.save(SaveLoadMeta(str(root / f"meanwhile {number}"), "hf", False))
        engine.onload()
        assert same(values_of(engine), before)
        engine.save(SaveLoadMeta(str(root / f"after {number}"), "hf", False))
        expected = contents(root / f"before {number}")
        assert contents(root / f"meanwhile {number}") == expected
        assert contents(root / f"after {number}") == expected
    engine.destroy()
    return hits


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_real_signals_during_turns_lose_no_bit(tmp_path: Path) -> None:
    write_base(tmp_path / "base")
    assert run_ranks(_gets_signals, 1, str(tmp_path / "base"), tmp_path) == [40]
