"""The device of a rank: never silently the CPU on a machine with GPUs, never one GPU for two ranks.
All ranks agree.

There is no GPU here: the functions that decide get made-up reports of GPUs.
"""

import logging
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from holdfast.engine import FSDPEngine, TrainEngineConfig
from holdfast.engine.training.process_groups import ProcessGroups, close_process_groups
from holdfast.utils.devices import (
    DeviceReport,
    agree_on_device,
    choose_device,
    require_devices_of_their_own,
)
from holdfast.utils.distributed import gather_objects
from holdfast.utils.errors import ConfigError, HoldfastError, PeerError
from tests.helpers import free_port, run_ranks

pytestmark = pytest.mark.timeout(60)
CPU, CUDA = torch.device("cpu"), partial(torch.device, "cuda")


@pytest.mark.parametrize(
    ("wanted", "visible", "local_rank", "device"),
    [
        ("auto", 0, 3, CPU),
        ("cpu", 8, 3, CPU),
        ("auto", 8, 3, CUDA(3)),
        ("cuda", 8, 3, CUDA(3)),
        ("auto", 1, 3, CUDA(0)),  # the launcher shows each task one GPU
        ("cuda", 1, 0, CUDA(0)),
    ],
)
def test_a_rank_takes_its_places_device_or_the_only_one_it_sees(
    wanted: str, visible: int, local_rank: int, device: torch.device
) -> None:
    assert choose_device(wanted, visible=visible, local_rank=local_rank) == device


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_rank_without_a_visible_device_is_refused_not_computed_on_cpu(wanted: str) -> None:
    with pytest.raises(
        ConfigError,
        match="LOCAL_RANK is 3 and torch sees 2 CUDA devices: show each rank one device",
    ):
        choose_device(wanted, visible=2, local_rank=3)


def test_cuda_without_a_device_is_refused_with_what_hides_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"sees no CUDA device here .CUDA_VISIBLE_DEVICES is ''"):
        choose_device("cuda", visible=0, local_rank=0)


def test_a_default_group_without_nccl_means_the_cpu_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose_device("auto", visible=2, local_rank=1, has_nccl=False) == CPU
    assert "training on the CPU, although there are 2 CUDA device(s)" in caplog.text
    with pytest.raises(
        ConfigError, match="default process group has no nccl; make the group with backend"
    ):
        choose_device("cuda", visible=2, local_rank=1, has_nccl=False)


def test_a_default_group_that_is_bound_to_a_device_decides() -> None:
    assert choose_device("auto", visible=4, local_rank=0, bound=CUDA(2)) == CUDA(2)
    assert choose_device("cpu", visible=4, local_rank=0, bound=CUDA(2)) == CPU


def test_ranks_of_two_kinds_or_with_one_gpu_are_refused_and_named() -> None:
    def on(gpu: str) -> DeviceReport:
        return DeviceReport("node1", f"cuda:{gpu}" if gpu else "cpu", gpu and f"GPU-{gpu}")

    for fine in (["", ""], ["0", "1"], [""]):
        require_devices_of_their_own([on(gpu) for gpu in fine])
    with pytest.raises(ConfigError, match=r"rank\(s\) \[1\] on node1 see no GPU, the other 2 do"):
        require_devices_of_their_own([on("0"), on(""), on("1")])
    with pytest.raises(
        ConfigError, match=r"ranks \[0, 2\] on node1 have chosen the same GPU, GPU-0: start no more"
    ):
        require_devices_of_their_own([on("0"), on("1"), on("0")])


def _disagree(rank: int, world_size: int, ports: list[int]) -> list[str]:
    """Rank 1 asks for an impossible device: before there is a group, and inside one."""
    said = []
    dist.destroy_process_group()
    for device, port in zip(("cuda" if rank == 1 else "auto", "cpu"), ports, strict=True):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        engine = FSDPEngine(TrainEngineConfig(device=device, timeout_s=40))
        try:
            engine.create_process_group()
        except HoldfastError as error:
            said.append(f"{type(error).__name__}: {error}")
    joining = FSDPEngine(TrainEngineConfig(device="cuda" if rank == 1 else "auto"))
    with pytest.raises(HoldfastError) as caught:
        joining.create_process_group()
    said.append(f"{type(caught.value).__name__}: {caught.value}")
    assert gather_objects(rank) == [0, 1], "the group that was there goes on"
    engine.destroy()
    return said


def test_a_rank_without_a_device_is_an_error_on_all_ranks() -> None:
    if torch.cuda.is_available():
        pytest.skip("rank 1 has a device here")
    first, second = run_ranks(_disagree, 2, [free_port(), free_port()], timeout_s=50)
    assert len(first) == len(second) == 2
    for theirs, own in zip(first, second, strict=True):
        assert theirs.startswith(
            "PeerError: choosing a device failed on rank 1: ConfigError: config key 'device' is"
        )
        assert own.startswith(
            "ConfigError: config key 'device' is 'cuda', but torch sees no CUDA device here"
        )


def _fail_in_cuda(rank: int, world_size: int) -> str:
    def choose() -> torch.device:
        if rank == 0:
            raise RuntimeError("CUDA error: device is busy")
        return CPU

    with pytest.raises(RuntimeError if rank == 0 else PeerError, match="device is busy"):
        agree_on_device(choose, gather_objects)
    return "told"


def test_an_error_of_cuda_itself_reaches_all_ranks() -> None:
    assert run_ranks(_fail_in_cuda, 2, timeout_s=30) == ["told"] * 2


def test_each_rank_logs_its_device(caplog: pytest.LogCaptureFixture) -> None:
    engine = FSDPEngine(TrainEngineConfig(device="cpu"))
    with caplog.at_level(logging.INFO, "holdfast"):
        engine.create_process_group()
    engine.destroy()
    assert f"computing on cpu of {os.uname().nodename}" in caplog.text


def _leave(rank: int, world_size: int, folder: str, dies: bool) -> str:
    """Groups where the engine owns the default one and takes it for NCCL's. gloo shows which rank
    waits for another.
    """
    logging.getLogger("holdfast").addHandler(logging.FileHandler(f"{folder}/{rank}.log"))
    control: Any = dist.new_group(backend="gloo")
    gather_objects(None, control)
    if dies and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    close_process_groups(
        ProcessGroups(control, owns_default=True, device=CUDA(0), meshes=cast(Any, None))
    )
    assert not dist.is_initialized()
    logging.getLogger("holdfast").warning("left")
    return "left"


def test_ranks_that_leave_together_destroy_their_groups(tmp_path: Path) -> None:
    assert run_ranks(_leave, 2, str(tmp_path), False, timeout_s=30) == ["left"] * 2
    assert (tmp_path / "0.log").read_text() == (tmp_path / "1.log").read_text() == "left\n"


def test_a_rank_whose_peer_is_dead_aborts_its_groups(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1\nthe process died") as caught:
        run_ranks(_leave, 2, str(tmp_path), True, timeout_s=30)
    assert "rank 0" not in str(caught.value)
    why, end = (tmp_path / "0.log").read_text().splitlines()
    assert why.startswith("not all ranks leave together, so NCCL is aborted: ") and end == "left"
