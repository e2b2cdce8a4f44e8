"""Ranks whose default group has no CPU tensors, like NCCL alone, agree over a separate gloo group.

``cuda:gloo`` is such a group without a GPU: it has no backend for the CPU.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.save import full_state_dict, save_hf
from holdfast.utils.distributed import (
    all_ranks_succeed,
    control_group,
    gather_objects,
    rank_zero_decides,
)
from holdfast.utils.metrics import reduce_stats
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.recover.runs import SPEC, Tiny, make_handler, names, step_info


def _only_cuda(rank: int, world_size: int, store: str) -> None:
    """Replace the default group by one without a CPU backend."""
    dist.destroy_process_group()
    timeout = timedelta(seconds=30)
    dist.init_process_group(
        "cuda:gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _agree(rank: int, world_size: int, store: str) -> str:
    for life in range(2):
        _only_cuda(rank, world_size, f"{store}{life}")
        assert gather_objects(rank) == [0, 1]
        assert rank_zero_decides(lambda: "decided") == "decided"
        with all_ranks_succeed("nothing"):
            pass
        assert reduce_stats({"x": float(rank)}) == {"x": 1.0}
        control = control_group()
        assert control is not None and control is control_group(dist.group.WORLD), "it is made once"
        assert control_group(control) is control, (
            "a group that carries CPU tensors is taken as it is"
        )
        one: Any = dist.new_group([rank], backend="cuda:gloo", use_local_synchronization=True)
        assert gather_objects("alone", one) == ["alone"]
    return "agreed"


def test_ranks_without_a_cpu_backend_agree_also_in_a_second_default_group(tmp_path: Path) -> None:
    assert run_ranks(_agree, 2, str(tmp_path / "store"), timeout_s=60) == ["agreed"] * 2


def _save_and_load(rank: int, world_size: int, root: str, folder: str) -> str:
    _only_cuda(rank, world_size, f"{root}/store")
    control: Any = control_group()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    fully_shard(model, mesh=DeviceMesh.from_group(control, "cpu"))
    before = full_state_dict(model)
    save_dcp(f"{root}/dcp", DCPState(model))
    save_hf(model, f"{root}/hf")
    for load in (
        lambda: load_dcp(f"{root}/dcp", DCPState(model)),
        lambda: load_hf(model, f"{root}/hf"),
    ):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        load()
        after = full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
    handler, tiny = make_handler(f"{root}/runs", freq_steps=1), Tiny()
    assert handler.load(tiny.state) is None
    tiny.step()
    assert handler.dump(tiny.state, step_info(0))
    handler.close()
    again = make_handler(f"{root}/runs").load(Tiny().state)
    assert (
        again is not None and again.last_step_info.global_step == 0 and SPEC.total_train_steps > 1
    )
    return " ".join(names(Path(f"{root}/runs")))


def test_checkpoints_and_the_handler_work_with_such_a_default_group(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    folder = str(tmp_path / "model")
    assert (
        run_ranks(_save_and_load, 2, str(tmp_path), folder, timeout_s=90) == ["global_step_0"] * 2
    )
