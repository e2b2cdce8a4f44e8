"""A fit of Lightning's, two lines from a plain one: ``python -m examples.integrations.lightning_fit runs/lightning``,
again after a kill."""

import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl  # type: ignore[import-not-found]
import torch
from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found]
from torch.utils.data import DataLoader, DistributedSampler

from examples.integrations.tiny import digest, tiny_model, token_rows
from holdfast.integrations.lightning import Recover, recoverable
from holdfast.recover import RecoverConfig


class Module(pl.LightningModule):  # type: ignore[misc]
    """A language model; the rate falls where the validation no longer improves."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """The loss of a batch."""
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        """What the schedule looks at."""
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """AdamW, and a schedule that is not one of steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss", "strict": False}}


def main(folder: Path, callbacks: tuple[Any, ...] = (), plain: bool = False, **options: Any) -> None:
    """Train four epochs over 40 texts, two batches a step, with a validation in the middle of an epoch too.

    Args:
        folder: of the run.
        callbacks: more of them.
        plain: Lightning's own way: a checkpoint after every step, and the last one at a start.
        options: of the Trainer.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows: Any = token_rows(40)
    devices = options.get("devices", 1)
    shared = DistributedSampler(rows, devices, int(os.environ["LOCAL_RANK"])) if devices > 1 else None
    loader = DataLoader(rows, batch_size=4, shuffle=shared is None, sampler=shared)
    recover: Any = Recover(RecoverConfig(fileroot=str(folder), freq_steps=2))
    if plain:
        recover = ModelCheckpoint(folder / "lightning", every_n_train_steps=1, save_last=True)
    given: dict[str, Any] = {
        "max_epochs": 4, "accumulate_grad_batches": 2, "val_check_interval": 0.5, "accelerator": "cpu", "logger": False,
        "enable_checkpointing": plain, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = pl.Trainer(callbacks=[*callbacks, recover], **(given | options))
    last = "last" if plain else None
    module = Module()
    trainer.fit(module, loader if plain else recoverable(loader), DataLoader(rows[:8], batch_size=4), ckpt_path=last)
    found = digest(module, trainer.optimizers[0])
    if trainer.is_global_zero:
        (folder / "digest.txt").write_text(found)
        print(f"weights and moments after step {trainer.global_step - 1}: {found}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
