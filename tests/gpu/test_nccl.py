"""Buckets of weights over NCCL, to a worker that joins by the unique id alone, as vLLM's do. Never
run so far.
"""

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch.cuda import nccl

from holdfast.engine.servers.nccl import NcclGroup
from holdfast.utils.files import bytes_digest
from holdfast.utils.threads import on_daemon_thread
from tests.gpu.conftest import IS_GPU, Machine
from tests.gpu.figures import Figures

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BUCKETS = (1 << 20, 3, 256 << 20)
LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def real_gpus(two_gpus: Machine) -> None:
    """Skip without two real GPUs: NCCL takes no two ranks on one device."""
    if not IS_GPU:
        pytest.skip("needs two real GPUs: NCCL runs nowhere else")


def _receive(told: dict[str, Any], sizes: tuple[int, ...], hang: bool, pipe: Connection) -> None:
    """Join as PyNccl does, receive buckets, and answer with their digests. With ``hang``, receive
    only the first.
    """
    torch.cuda.set_device(1)
    comm = nccl.init_rank(
        told["world_size"], base64.b64decode(told["nccl_unique_id_b64"]), told["rank_offset"]
    )
    warm = torch.zeros(1, device="cuda")
    nccl.all_reduce([warm], [warm], comms=[comm])
    torch.cuda.synchronize()
    for number, size in enumerate(sizes):
        if hang and number:
            time.sleep(600)
        data = torch.empty(size, dtype=torch.uint8, device="cuda")
        nccl.broadcast([data], comms=[comm])
        torch.cuda.synchronize()
        pipe.send(bytes_digest(data.cpu().numpy().tobytes()))


@contextmanager
def _joined(limit_s: float, hang: bool = False) -> Iterator[tuple[NcclGroup, Connection]]:
    torch.cuda.set_device(0)
    group = NcclGroup(1, limit_s, max(BUCKETS))
    connected = on_daemon_thread(group.connect, "weight sender")
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    worker = context.Process(
        target=_receive, args=(group.init_info, BUCKETS, hang, theirs), daemon=True
    )
    worker.start()
    try:
        connected.result(LIMIT_S)
        yield group, ours
    finally:
        group.abort()
        worker.kill()
        worker.join()


def _bucket(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory()


def test_buckets_arrive_and_their_memory_may_change_after_the_send(figures: Figures) -> None:
    with _joined(LIMIT_S) as (group, answers):
        memory = _bucket(max(BUCKETS))
        for size in BUCKETS:
            memory[:size] = _bucket(size)
            sent = bytes_digest(memory[:size].numpy().tobytes())
            begin = time.monotonic()
            group.send(memory[:size])
            seconds = time.monotonic() - begin
            memory.zero_()
            assert answers.poll(LIMIT_S) and answers.recv() == sent
        figures.add(
            "a bucket of 256 MiB from host memory to a GPU over NCCL",
            max(BUCKETS) / seconds / 1e9,
            "GB/s",
            "",
        )


def test_a_worker_that_hangs_costs_the_limit_and_harms_neither_the_device_nor_the_next_group() -> (
    None
):
    with _joined(5.0, hang=True) as (group, _):
        group.send(_bucket(BUCKETS[0]))
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="did not take part within 5 s"):
            group.send(_bucket(BUCKETS[2]))
        assert time.monotonic() - begin < 20
        ones = torch.ones(64, 64, device="cuda:0")
        assert (ones @ ones).sum().item() == 64**3
        torch.cuda.synchronize()
    with _joined(LIMIT_S) as (group, answers):
        group.send(_bucket(BUCKETS[0]))
        assert answers.poll(LIMIT_S)
