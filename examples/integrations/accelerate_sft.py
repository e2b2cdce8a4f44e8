"""A script with Accelerate: ``python examples/integrations/accelerate_sft.py runs/accelerate``,
again after a kill.

With more ranks: ``torchrun --nproc-per-node 2 examples/integrations/accelerate_sft.py
runs/accelerate``.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny import tiny_model, token_rows, write_digest
from torch.utils.data import DataLoader

from holdfast.engine import FinetuneSpec
from holdfast.integrations.accelerate import recoverable
from holdfast.recover import RecoverConfig, RecoverHandler


def main(folder: Path, epochs: int = 4) -> None:
    """Train on 40 texts, two batches per step."""
    # With one thread the arithmetic repeats exactly.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    # As without Holdfast.
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    rows: Any = token_rows(40)
    loader = DataLoader(rows, batch_size=2, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared

    # Holdfast: the loader knows its position, and the handler what to save.
    loader = recoverable(loader, gradient_accumulation_steps=2)
    trained = (model, optimizer, scheduler)
    config = RecoverConfig(fileroot=str(folder), freq_steps=3)
    spec = FinetuneSpec(epochs, loader.steps_per_epoch, 1)
    with RecoverHandler(config, spec) as handler:
        handler.load(trained, dataloader=loader)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

                # After the last batch of a step. The handler decides whether a snapshot is due.
                if accelerator.sync_gradients:
                    handler.dump(trained, loader.step, dataloader=loader)

    write_digest(folder, f"{epochs} epochs", model, optimizer)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
