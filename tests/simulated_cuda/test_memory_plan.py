"""Plans with state in host memory agree with the memory of real steps, on the device and in the
host.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine import FSDPConfig, MicroBatchSpec, OptimizerConfig, ParallelStrategy
from holdfast.engine.memory.tensors import local_tensor
from holdfast.engine.model import memory_plan
from holdfast.engine.model.memory_plan import measure_model, plan_step
from holdfast.engine.training import host_optimizer
from tests.engine.model.test_memory_plan import MODELS, loss
from tests.engine.test_fsdp_engine import loss_tokens, make_engine
from tests.helpers import run_ranks

pytestmark = [pytest.mark.simulated_gpu, pytest.mark.timeout(150)]

OFFLOAD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "optimizer": {"optimizer": OptimizerConfig(offload=True)},
    "params": {"fsdp": FSDPConfig(gradient_sync="every", offload_params=True)},
    "adam8bit": {"optimizer": OptimizerConfig(type="adam8bit")},
    "optimizer, adam8bit": {"optimizer": OptimizerConfig(type="adam8bit", offload=True)},
    "params, muon": {
        "fsdp": FSDPConfig(gradient_sync="every", offload_params=True),
        "optimizer": OptimizerConfig(type="muon"),
    },
}
TOKENS = 16
"""Few, because the attention of these devices is not flash attention, and so that state is most of
the memory.
"""


def _measured_and_planned(
    rank: int, world_size: int, folder: str, block_bytes: int
) -> dict[str, Any]:
    """Setting -> ((peak of the device, state in host memory), the same as planned)."""
    host_optimizer.BLOCK_BYTES = memory_plan.BLOCK_BYTES = block_bytes
    return {name: _of_one_setting(world_size, folder, changes) for name, changes in OFFLOAD.items()}


def _of_one_setting(world_size: int, folder: str, changes: dict[str, Any]) -> Any:
    settings = {
        "init_from_scratch": True,
        "dtype": "bfloat16",
        "fsdp": FSDPConfig(gradient_sync="every"),
        **changes,
    }
    engine = make_engine(
        folder, device="cuda", mb_spec=MicroBatchSpec(max_tokens_per_mb=TOKENS), **settings
    )
    ids = torch.randint(0, 500, (4, TOKENS // 2))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "loss_mask": torch.ones_like(ids),
    }
    engine.train_batch(batch, loss, loss_tokens)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    engine.train_batch(batch, loss, loss_tokens)
    peak = torch.cuda.max_memory_allocated()
    params = list(engine.model.parameters())
    states = [
        value
        for state in engine.optimizer.state.values()
        for value in state.values()
        if value.dim() > 0
    ]
    gradients = params if engine.config.fsdp.offload_params else []
    on_host = sum(
        local_tensor(each).nbytes
        for each in (*params, *gradients, *states)
        if each.device.type == "cpu"
    )
    sizes = measure_model(engine.config, TOKENS)
    memory = torch.cuda.get_device_properties(0).total_memory
    plan = plan_step(sizes, engine.config, ParallelStrategy().for_world(world_size), TOKENS, memory)
    engine.destroy()
    return (peak, on_host), (plan.peak, plan.on_host)


@pytest.mark.parametrize("block_bytes", [1 << 20, 256 << 20])
def test_the_plan_of_a_step_is_within_a_tenth_of_the_measured_one(
    tmp_path: Path, block_bytes: int
) -> None:
    """With small blocks the peak is in the backward, with one large block it is in the step."""
    MODELS["wide"].save_pretrained(tmp_path)
    for found in run_ranks(_measured_and_planned, 2, str(tmp_path), block_bytes):
        for (peak, on_host), (planned_peak, planned_on_host) in found.values():
            assert planned_peak == pytest.approx(peak, rel=0.1)
            assert planned_on_host == pytest.approx(on_host, rel=0.001)


def _lines_of_a_start(rank: int, world_size: int, folder: str) -> list[str]:
    lines, handler = list[str](), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("holdfast.engine.model.memory_plan")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    make_engine(folder, device="cuda", init_from_scratch=True).destroy()
    return lines


def test_rank_0_logs_the_plan_at_the_start(tmp_path: Path) -> None:
    MODELS["qwen3"].save_pretrained(tmp_path)
    (line,), none = run_ranks(_lines_of_a_start, 2, str(tmp_path))
    assert line.startswith("a step of 8192 tokens per micro-batch") and line.endswith(
        "the device has 8.59 GB"
    )
    assert none == []
