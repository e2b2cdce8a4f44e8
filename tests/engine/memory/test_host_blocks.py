"""Blocks between files and a device, used in turn: all values arrive, whenever the device
copies.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.engine.dcp import reader, save
from holdfast.engine.memory import host_blocks
from holdfast.engine.memory.host_blocks import HostBlocks
from holdfast.engine.memory.tensors import Box

DEVICE = torch.device("meta")  # takes two blocks, which are not pinned


class Stream:
    """Runs operations in order, at once or only when awaited. Correct code works with both."""

    def __init__(self, lazy: bool) -> None:
        self.waiting, self._lazy, self._done = list[Callable[[], object]](), lazy, 0

    def begin_copy(
        self, target: torch.Tensor, source: torch.Tensor
    ) -> tuple[torch.device, "Event"]:
        self.waiting.append(lambda: target.copy_(source))
        event = Event(self, self._done + len(self.waiting))
        if not self._lazy:
            event.synchronize()
        return DEVICE, event

    def run(self, until: int) -> None:
        while self._done < until:
            self.waiting.pop(0)()
            self._done += 1


class Event:
    def __init__(self, stream: Stream, at: int) -> None:
        self._stream, self._at = stream, at

    def synchronize(self) -> None:
        self._stream.run(self._at)


@pytest.fixture(params=["at once", "late"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    found = Stream(request.param == "late")
    monkeypatch.setattr(host_blocks, "_begin_copy", found.begin_copy)
    yield found


@pytest.mark.parametrize(
    "sizes", [[7], [3, 3, 3, 3, 3, 3, 3], [8] * 6, [1, 8, 2, 20, 3, 4, 0, 5, 8, 8], [0], []]
)
def test_values_from_a_device_are_complete_and_in_order(stream: Stream, sizes: list[int]) -> None:
    pieces = [torch.randn(n, dtype=torch.float64) for n in sizes]
    blocks, found, ahead = HostBlocks(8 * 4, DEVICE), b"", list[bool]()
    for block in blocks.pack(iter(pieces), torch.float32):
        ahead.append(bool(stream.waiting))
        found += bytes(block)
    assert found == torch.cat([torch.empty(0), *pieces]).float().numpy().tobytes()
    if stream._lazy and len(ahead) > 1:
        assert ahead == [True] * (len(ahead) - 1) + [False], (
            "nothing was copied while a block was written"
        )


def test_values_reach_a_device_although_blocks_are_reused(stream: Stream) -> None:
    blocks, targets, ahead = (
        HostBlocks(16, DEVICE),
        [torch.zeros(n) for n in (4, 4, 1, 9, 4, 4)],
        list[int](),
    )
    for number, target in enumerate(targets):
        block = blocks.take(target.nbytes).view(torch.float32)
        ahead.append(len(stream.waiting))
        blocks.copy(target, block.fill_(number + 1))
    blocks.drain()
    assert [set(target.tolist()) for target in targets] == [{number + 1} for number in range(6)]
    if stream._lazy:
        assert ahead == [0, 1, 1, 1, 1, 1], "one is copied while the next is read"


def test_on_the_cpu_there_is_one_block() -> None:
    blocks = HostBlocks(16, torch.device("cpu"))
    assert len({blocks.take(n).data_ptr() for n in (16, 3, 16, 7)}) == 1
    pieces = [torch.arange(number, number + 3) for number in range(5)]
    found = b"".join(bytes(block) for block in blocks.pack(pieces, torch.float32))
    assert found == torch.cat(pieces).float().numpy().tobytes()


def test_a_data_file_is_packed_into_even_blocks(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "BLOCK_BYTES", 1000)
    tensors = [
        torch.randn(700),
        torch.tensor(3.0),
        torch.randn(30, 20).t(),
        torch.randn(0, 2),
        torch.ones(3).bool(),
    ]
    blocks = HostBlocks(1000, DEVICE).pack(save._pieces(save._archived(tensors)), torch.uint8)
    found = [bytes(block) for block in blocks]
    assert {len(block) for block in found[:-1]} == {1000}
    assert b"".join(found) == b"".join(piece.numpy().tobytes() for piece in save._archived(tensors))


def test_rows_of_a_stored_tensor_come_to_a_part_of_another(
    stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 60)  # two rows
    stored, whole = torch.randn(9, 7), torch.zeros(5, 11)
    (tmp_path / "a").write_bytes(b"before" + stored.numpy().tobytes())
    target, blocks = whole[:, 2:5], HostBlocks(60, DEVICE)
    read = reader._Read("a", 6, (9, 7), Box((3, 1), (5, 3)), target)
    with open(tmp_path / "a", "rb", buffering=0) as file:
        read.copy_rows(file, blocks)
    blocks.drain()
    assert torch.equal(target, stored[3:8, 1:4]) and whole.count_nonzero() == 15
