"""Host memory of snapshots: one piece, pinned as a whole, freed with the last tensor in it."""

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.dcp.state import DCPState
from holdfast.engine.memory.pinned import host_copies_of
from holdfast.engine.memory.tensors import flatten, local_tensor
from holdfast.engine.staging.staged_state import Staging
from holdfast.recover import RecoverConfig, RecoverHandler
from tests.engine.hf_models import tiny_model
from tests.recover.runs import SPEC, step_info

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.complex128,
    torch.bool,
    torch.float8_e4m3fn,
    torch.int64,
)
SHAPES = ((), (3,), (0, 4), (5, 7), (1,))


def rss_bytes() -> int:
    gc.collect()  # so that leftovers of other tests do not go away during this test
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


def is_mapped(address: int) -> bool:
    ranges = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_copies_have_their_shapes_and_dtypes_and_lie_apart() -> None:
    tensors = {
        f"{shape}{dtype}": torch.ones(shape).to(dtype) for shape in SHAPES for dtype in DTYPES
    }
    tensors["across"] = torch.ones(4, 3).t()
    copies = host_copies_of(tensors)
    for name, tensor in tensors.items():
        assert copies[name].shape == tensor.shape and copies[name].dtype == tensor.dtype
        assert copies[name].is_contiguous() and copies[name].data_ptr() % tensor.itemsize == 0
        copies[name].copy_(tensor)
    assert all(
        torch.equal(copies[name].to(torch.complex128), t.to(torch.complex128))
        for name, t in tensors.items()
    )
    places = sorted((copy.data_ptr(), copy.nbytes) for copy in copies.values() if copy.numel())
    span = places[-1][0] + places[-1][1] - places[0][0]
    assert span <= sum(n_bytes for _, n_bytes in places) + 512 * len(places)


def test_memory_goes_back_to_the_system_with_the_last_tensor_in_it() -> None:
    copies = host_copies_of({name: torch.empty(25 << 20, dtype=torch.uint8) for name in "abcd"})
    addresses = [copy.data_ptr() for copy in copies.values()]
    last = copies["a"][:1]
    del copies
    gc.collect()
    assert all(map(is_mapped, addresses)), "someone still reads it"
    del last
    gc.collect()
    assert not any(map(is_mapped, addresses))


def test_staging_takes_one_piece_and_gives_it_back_when_released() -> None:
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(6)))
    state = DCPState(model, torch.optim.AdamW(model.parameters()))
    shard_bytes = sum(tensor.nbytes for tensor in state.live_tensors().values())
    staging, before = Staging(model), rss_bytes()
    staged = staging.stage(state)
    staging.finish()
    places = sorted((tensor.data_ptr(), tensor.nbytes) for _, tensor in flatten(staged))
    assert places[-1][0] + places[-1][1] - places[0][0] < 1.01 * shard_bytes + (1 << 20)
    assert rss_bytes() - before < 1.05 * shard_bytes + (4 << 20)
    del staged
    staging.release()
    gc.collect()
    assert rss_bytes() - before < 0.1 * shard_bytes


def test_a_forked_process_sees_zeros_and_cannot_change_the_memory() -> None:
    copy = host_copies_of({"a": torch.empty(8 << 20, dtype=torch.uint8)})["a"]
    copy.fill_(7)
    if (
        pid := os.fork()
    ) == 0:  # like a dataloader's workers, because the kernel copies pinned pages for a child
        values = copy.numpy()  # torch's threads exist only in the parent
        wiped = not values.any()
        values[:] = 1
        os._exit(not wiped)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((copy == 7).all())


class Cudart:
    """The requests to CUDA's runtime, and whether it grants them."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.calls = error, list[tuple[str, int, int]]()
        self.last_error = 0

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, n_bytes))
        self.last_error = self.error
        return self.error

    def launch(self, *size: int, device: torch.device) -> None:
        """Do what torch does after a kernel launch: ask for the last error of any call, and clear
        it.
        """
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def cudaHostUnregister(self, address: int) -> int:
        mapped = Path("/proc/self/maps").read_text()
        self.calls.append(
            (
                "unregister",
                address,
                any(line.startswith(f"{address:x}-") for line in mapped.splitlines()),
            )
        )
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cudart]:
    cuda = Cudart()
    fake = SimpleNamespace(cudart=lambda: cuda, device=lambda device: nullcontext())
    monkeypatch.setattr(torch, "cuda", fake)
    yield cuda


def on_gpu(tensor: torch.Tensor) -> Any:
    """Wrap a tensor so that it reports a GPU as its device to the allocation. No GPU is needed."""
    return SimpleNamespace(
        device=torch.device("cuda", 0), nbytes=tensor.nbytes, dtype=tensor.dtype, shape=tensor.shape
    )


def test_it_is_pinned_once_and_unpinned_before_it_is_unmapped(cudart: Cudart) -> None:
    tensors = {"a": torch.ones(3 << 20), "b": torch.ones(5), "c": torch.ones(0, 2)}
    copies = host_copies_of(
        {name: on_gpu(tensor) for name, tensor in tensors.items()} | {"host": torch.ones(2)}
    )
    ((_, address, n_bytes),) = cudart.calls
    assert address == copies["a"].data_ptr() and 12 << 20 <= n_bytes < (12 << 20) + 8192
    assert address <= copies["b"].data_ptr() < address + n_bytes
    assert not address <= copies["host"].data_ptr() < address + n_bytes
    if (pid := os.fork()) == 0:  # like a dataloader's workers
        copies.clear()
        os._exit(len(cudart.calls) != 1)
    assert os.waitpid(pid, 0)[1] == 0
    last = copies["b"]
    del copies
    gc.collect()
    assert len(cudart.calls) == 1
    del last
    gc.collect()
    assert cudart.calls[1:] == [("unregister", address, True)]


def test_memory_that_cuda_cannot_pin_is_reported_and_fails_no_later_kernel(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    cudart.error, wanted = 2, on_gpu(torch.ones(2))
    monkeypatch.setattr(torch, "ones", cudart.launch)
    with pytest.raises(RuntimeError, match=r"cannot pin 4096 bytes.*cudaError 2.*async_save"):
        host_copies_of({"a": wanted})
    gc.collect()
    assert [call for call, *_ in cudart.calls] == ["register"]
    cudart.launch(device=wanted.device)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"freq_steps": 2}, ("model.", "optim.")),
        ({"hf_freq_steps": 2}, ("model.",)),
        ({}, ()),
        ({"freq_steps": 2, "hf_freq_steps": 2, "async_save": False}, ()),
    ],
)
def test_a_handler_takes_memory_when_it_loads_and_none_at_dumps(
    options: dict[str, Any], expected: tuple[str, ...], tmp_path: Path
) -> None:
    model = tiny_model("llama")
    state = DCPState(model, torch.optim.AdamW(model.parameters()))
    with RecoverHandler(RecoverConfig("e", "t", str(tmp_path), **options), SPEC) as handler:
        handler.load(state)
        before = memory_of(handler)
        wanted = (
            {name for name in state.live_tensors() if name.startswith(expected)}
            if expected
            else set()
        )
        assert {name for name in before if name.startswith(("model.", "optim."))} == wanted
        for step in range(2):
            handler.dump(state, step_info(step))
        assert memory_of(handler) == before


def memory_of(handler: RecoverHandler) -> dict[str, int]:
    stagings = [staging for _, staging in handler._sessions.own._stagings.values()]
    kept = [buffers.tensors for staging in stagings for buffers in staging._kept]
    return {
        name: local_tensor(buffer).data_ptr()
        for tensors in kept
        for name, buffer in tensors.items()
    }
