"""A training loop with ``fully_shard``, like torchtitan's: ``torchrun --nproc-per-node 2
examples/integrations/fsdp2_script.py runs/fsdp2``, again after a kill.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny_model, token_rows, write_digest
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from holdfast.engine import FinetuneSpec
from holdfast.integrations.accelerate import recoverable
from holdfast.recover import RecoverConfig, RecoverHandler


def main(folder: Path, epochs: int = 4) -> None:
    """Train on 40 texts, four per rank and step."""
    # With one thread the arithmetic repeats exactly.
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    # The ranks draw different dropout.
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows: Any = token_rows(40)
    sampler = DistributedSampler(rows, shuffle=True)
    plain = DataLoader(rows, batch_size=4, sampler=sampler)

    # Holdfast: the loader knows its position, and the handler what to save.
    loader = recoverable(plain)
    trained = (model, optimizer)
    config = RecoverConfig(fileroot=str(folder), freq_steps=3)
    spec = FinetuneSpec(epochs, len(loader), 1)
    with RecoverHandler(config, spec) as handler:
        handler.load(trained, dataloader=loader)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                handler.dump(trained, loader.step, dataloader=loader)

    write_digest(folder, f"{epochs} epochs", model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
