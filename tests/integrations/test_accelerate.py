"""A script with Accelerate, killed on two ranks, for every way of distributing samples."""

import json
import os
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("accelerate")

from tests.integrations.processes import run_killed

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

EPOCHS = 3


class Stream(IterableDataset):
    """Texts in an order that depends on the epoch, without a length."""

    def __init__(self, rows: list[torch.Tensor]) -> None:
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        first = 7 * self.epoch
        return iter(self.rows[first:] + self.rows[:first])


def draw(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask labels at random, in the process that trains."""
    ids = torch.stack(rows)
    return ids, torch.where(torch.rand(ids.shape) < 0.7, ids, -100)


def keep(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.stack(rows)
    return ids, ids


def job(folder: Path, kill: int = 0, options: dict[str, Any] | None = None) -> None:
    """Train, and end with SIGKILL on rank 0 after batch ``kill``."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from examples.integrations.tiny import digest, tiny_model, token_rows
    from holdfast.engine import FinetuneSpec
    from holdfast.integrations.accelerate import recoverable
    from holdfast.recover import RecoverConfig, RecoverHandler

    given = dict(options or {})
    rows: Any = token_rows(given.pop("rows", 40))
    accumulated, stream, workers = (
        given.pop(name, 0) for name in ("accumulated", "stream", "num_workers")
    )
    drop_last, collate = given.pop("drop_last", False), draw if given.pop("draw", True) else keep
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulated or 1,
        dataloader_config=DataLoaderConfiguration(**given),
    )
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(
        Stream(rows) if stream else rows,
        batch_size=4,
        shuffle=None if stream else True,
        collate_fn=collate,
        drop_last=drop_last,
        num_workers=workers,
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loader, trained = (
        recoverable(loader, gradient_accumulation_steps=accumulated or 1),
        (model, optimizer),
    )
    steps = 100 if stream else loader.steps_per_epoch
    with RecoverHandler(
        RecoverConfig(fileroot=str(folder), freq_steps=1), FinetuneSpec(EPOCHS, steps, 1)
    ) as handler:
        info, count = handler.load(trained, dataloader=loader), 0
        step = 0 if info is None else info.last_step_info.global_step + 1
        for _ in range(loader.epoch, EPOCHS):
            for ids, labels in loader:
                count += 1
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=ids, labels=labels).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    handler.dump(trained, step if stream else loader.step, dataloader=loader)
                    step += 1
                if count == kill and accelerator.is_main_process:
                    handler.wait()
                    os.kill(os.getpid(), signal.SIGKILL)
    found = digest(model, optimizer)
    if accelerator.is_main_process:
        (folder / "digest.txt").write_text(found)


@cache
def untouched(options: str, ranks: int) -> str:
    run_killed(job, folder := Path(mkdtemp()), [], 0, json.loads(options), ranks=ranks)
    return (folder / "digest.txt").read_text()


WAYS = [
    pytest.param({"accumulated": 2}, id="gradient accumulation, a short last step"),
    pytest.param(
        {"accumulated": 3, "use_seedable_sampler": True, "data_seed": 5},
        id="seedable, accumulation",
    ),
    pytest.param({"split_batches": True}, id="split_batches"),
    pytest.param({"dispatch_batches": True}, id="dispatch_batches"),
    pytest.param({"dispatch_batches": True, "split_batches": True}, id="dispatch and split"),
    pytest.param(
        {"dispatch_batches": True, "rows": 38, "drop_last": True}, id="dispatch, drop_last"
    ),
    pytest.param({"dispatch_batches": True, "rows": 37}, id="dispatch, an uneven end"),
    pytest.param(
        {"dispatch_batches": True, "split_batches": True, "rows": 39},
        id="dispatch and split, an uneven end",
    ),
    pytest.param({"even_batches": False, "rows": 40}, id="even_batches=False"),
    pytest.param({"rows": 38}, id="an uneven end"),
    pytest.param({"stream": 1}, id="a stream, dispatched"),
    pytest.param({"stream": 1, "dispatch_batches": False}, id="a stream, sharded"),
    pytest.param({"num_workers": 1, "draw": False}, id="workers"),
]


@pytest.mark.parametrize("options", WAYS)
def test_two_ranks_killed_end_with_the_weights_and_moments_of_two_left_alone(
    options: dict[str, Any], tmp_path: Path
) -> None:
    run_killed(job, tmp_path, [(kill, options) for kill in (3, 4)], 0, options, ranks=2)
    assert (tmp_path / "digest.txt").read_text() == untouched(json.dumps(options), 2)
