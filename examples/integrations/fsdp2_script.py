"""A training loop with ``fully_shard``, like torchtitan's: ``torchrun --nproc-per-node 2
examples/integrations/fsdp2_script.py runs/fsdp2``, again after a kill.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.integrations.tiny import digest, tiny_model, token_rows
from holdfast.engine import FinetuneSpec
from holdfast.integrations.accelerate import recoverable
from holdfast.recover import RecoverConfig, RecoverHandler


def main(folder: Path, epochs: int = 4) -> None:
    """Train on 40 texts, four per rank and step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows, model = token_rows(40), tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(rows, shuffle=True)  # type: ignore[arg-type]
    loader = recoverable(DataLoader(rows, batch_size=4, sampler=sampler))  # type: ignore[arg-type]

    config = RecoverConfig(fileroot=str(folder), freq_steps=3)
    with RecoverHandler(config, FinetuneSpec(epochs, len(loader), 1)) as handler:
        handler.load((model, optimizer), dataloader=loader)
        for _ in range(loader.epoch, epochs):
            for batch in loader:
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                handler.dump((model, optimizer), loader.step, dataloader=loader)
    found = digest(model, optimizer)
    if dist.get_rank() == 0:
        (folder / "digest.txt").write_text(found)
        print(f"weights and moments after {epochs} epochs: {found}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
