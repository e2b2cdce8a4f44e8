"""A script with Accelerate: ``python examples/integrations/accelerate_sft.py runs/accelerate``,
again after a kill.

With more ranks: ``torchrun --nproc-per-node 2 examples/integrations/accelerate_sft.py
runs/accelerate``.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.integrations.tiny import digest, tiny_model, token_rows
from holdfast.engine import FinetuneSpec
from holdfast.integrations.accelerate import recoverable
from holdfast.recover import RecoverConfig, RecoverHandler


def main(folder: Path, epochs: int = 4) -> None:
    """Train on 40 texts, two batches per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    rows: list[torch.Tensor] = token_rows(40)
    loader = DataLoader(rows, batch_size=2, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    loader, trained = (
        recoverable(loader, gradient_accumulation_steps=2),
        (model, optimizer, scheduler),
    )
    config = RecoverConfig(fileroot=str(folder), freq_steps=3)
    with RecoverHandler(config, FinetuneSpec(epochs, loader.steps_per_epoch, 1)) as handler:
        handler.load(trained, dataloader=loader)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(input_ids=batch, labels=batch).loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    handler.dump(trained, loader.step, dataloader=loader)
    found = digest(model, optimizer)
    if accelerator.is_main_process:
        (folder / "digest.txt").write_text(found)
        print(f"weights and moments after {epochs} epochs: {found}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
