"""Functions as users write them for a `CallPool`: good, slow, raising and fatal."""

import os
import subprocess
import time
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import numpy


def add(one: int, other: int) -> int:
    return one + other


def slow_process_id() -> int:
    time.sleep(0.2)
    return os.getpid()


def process_id() -> int:
    return os.getpid()


def slow_number_of_numpy() -> float:
    number = float(numpy.random.random())
    time.sleep(0.2)
    return number


def hang(started: str) -> None:
    with open(started, "a") as file:
        file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(0.01)


def die(*_: Any, **__: Any) -> NoReturn:
    os._exit(7)


def die_once(marker: str) -> str:
    if not Path(marker).exists():
        Path(marker).touch()
        os._exit(7)
    return "done"


def refuse(value: int) -> NoReturn:
    raise ValueError(f"{value} is no good")


def run_program(started: str) -> int:
    """Wait for a program that sleeps. Its process id is added to the file ``started``."""
    program = subprocess.Popen(["sleep", "3600"])
    with open(started, "a") as file:
        file.write(f"{program.pid}\n")
    return program.wait()


class Odd(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__("odd")


def raise_odd() -> None:
    raise Odd(1, 2)


def length_reward(
    prompt: str | None,
    completion: str | None,
    prompt_ids: list[int],
    completion_ids: list[int],
    answer: int,
    **_: Any,
) -> float:
    assert prompt is None and completion is None
    return float(100 * answer + len(completion_ids))


def any_reward(*_: Any, answer: int, **__: Any) -> float:
    return float(answer)


def even_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **_: Any
) -> float:
    return float(completion_ids[0] % 2 == 0)


def fussy_reward(*_: Any, answer: int, **__: Any) -> float:
    """No number for every second prompt."""
    if answer % 2:
        raise ValueError(f"{answer} is odd")
    return float("nan") if answer == 2 else 1.0


def text_reward(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **_: Any
) -> float:
    return float(
        prompt == "<user>2+2</user><assistant>" and completion == " ".join(map(str, completion_ids))
    )


def say_answer(
    conversation: str | None,
    completion: str | None,
    conversation_ids: list[int],
    completion_ids: list[int],
    **_: Any,
) -> list[int] | None:
    """Return ``[77, number of tokens so far]`` until there are more than 20 tokens."""
    length = len(conversation_ids) + len(completion_ids)
    return None if length > 14 else [77, length]


def say_seven(*_: Any, **__: Any) -> list[int]:
    return [7]


def say_text(*_: Any, **__: Any) -> str:
    return "abc"


class Said(StrEnum):
    ABC = "abc"


def say_enum(*_: Any, **__: Any) -> str:
    return Said.ABC


def zero_reward(*_: Any, **__: Any) -> float:
    return 0.0


def counted_reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    counter: str,
    **_: Any,
) -> float:
    _count(counter, f"reward {completion_ids}")
    return 1.0


def counted_tool(
    conversation: str,
    completion: str,
    conversation_ids: list[int],
    completion_ids: list[int],
    counter: str,
    **_: Any,
) -> list[int]:
    _count(counter, f"tool {conversation_ids + completion_ids}")
    return [7]


def _count(counter: str, name: str) -> None:
    with open(counter, "a") as file:
        file.write(f"{name}\n")


def sum_of(ids: list[int]) -> int:
    return sum(ids) % 9


def note_effect(file: str, name: str) -> None:
    """Write a line that outlives the driver."""
    fd = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, f"{name}\n".encode())
    os.close(fd)
