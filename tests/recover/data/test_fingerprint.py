"""A fingerprint depends only on the values of a dataset, in every process."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.recover.data.dataset_fingerprint import dataset_fingerprint
from holdfast.utils.errors import ConfigError


@dataclass
class Prompt:
    text: str
    tokens: torch.Tensor


SAMPLES = [
    {
        "prompt": f"p{i}",
        "ids": np.arange(i),
        "t": torch.full((2, i), 1.5, dtype=torch.bfloat16),
        "ok": i % 2 == 0,
    }
    for i in range(100)
] + [(1, 2.5, None, b"x"), Prompt("a", torch.tensor(3)), np.float32(2.0)]


@pytest.mark.slow
def test_fingerprint_is_the_same_in_another_process_with_other_hashes(tmp_path: Path) -> None:
    script = (
        "from tests.recover.data.test_fingerprint import *; print(dataset_fingerprint(SAMPLES), "
        "end='')"
    )
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": root, "PYTHONHASHSEED": "77"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == dataset_fingerprint(SAMPLES)
    assert result.stdout.startswith("103 samples, xxh3_128:")


def test_fingerprint_tells_values_apart_that_look_alike() -> None:
    values: list[Any] = [
        1,
        1.0,
        True,
        "1",
        b"1",
        None,
        [1],
        [[1]],
        [1, 1],
        {"a": 1},
        {"a": "1"},
        {"b": 1},
        np.int64(1),
        np.array([1]),
        torch.tensor(1),
        torch.tensor([1]),
        torch.tensor([[1]]),
        torch.tensor([1], dtype=torch.int32),
        ["ab", "c"],
        ["a", "bc"],
        Prompt("a", torch.tensor(1)),
        {},
        [],
    ]
    assert len({dataset_fingerprint([value]) for value in values}) == len(values)
    assert dataset_fingerprint([{"a": 1, "b": 2}]) == dataset_fingerprint([{"b": 2, "a": 1}])
    assert dataset_fingerprint([(1, 2)]) == dataset_fingerprint([[1, 2]])


def test_fingerprint_reads_the_first_and_the_last_sample_and_few_between() -> None:
    class Counting(list):
        read: list[int] = []  # noqa: RUF012

        def __getitem__(self, index: Any) -> Any:
            self.read.append(index)
            return super().__getitem__(index)

    dataset = Counting(range(100_000))
    dataset_fingerprint(dataset)
    assert len(dataset.read) == 64 and {0, 99_999} < set(dataset.read)


def test_a_dataset_brings_its_fingerprint_when_samples_have_no_canonical_bytes() -> None:
    with pytest.raises(ConfigError, match=r"holds a builtins.object.*`fingerprint` attribute"):
        dataset_fingerprint([{"image": object()}])

    class Images(list):
        fingerprint = "images-v2"

    assert dataset_fingerprint(Images([object()])) == "1 samples, images-v2"
