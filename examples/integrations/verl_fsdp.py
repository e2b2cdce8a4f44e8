"""The calls of verl's trainer to the checkpoint manager of its FSDP engine, with a tiny model:
``torchrun --nproc-per-node 2 examples/integrations/verl_fsdp.py runs/verl``, again after a kill.

A real job needs one line, ``actor_rollout_ref.model.external_lib=holdfast.integrations.verl``.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import tiny_model, tiny_tokenizer, token_rows, write_digest
from torch.distributed.fsdp import fully_shard
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path  # type: ignore[import-not-found]
from verl.workers.engine.fsdp import transformer_impl  # type: ignore[import-not-found]


def main(
    folder: Path,
    plain: bool = False,
    n_keep: int = 2,
    steps: int = 12,
    at: Callable[[str], Any] = lambda _: None,
) -> None:
    """Train, and save after every step like verl's trainer.

    Args:
        folder: verl's ``default_local_dir``.
        plain: use verl's own checkpoint manager.
        n_keep: verl's ``max_actor_ckpt_to_keep``.
        steps: length of the run.
        at: called with ``saved`` (the tracker file still names the previous step) and ``named``.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if not plain:
        import holdfast.integrations.verl  # noqa: F401  (what external_lib does)

    model = tiny_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    manager = transformer_impl.FSDPCheckpointManager(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        processing_class=tiny_tokenizer(),
        checkpoint_config={"save_contents": ["model", "optimizer", "extra", "hf_model"]},
    )

    # The ranks draw different batches and dropout, unless a checkpoint has their generators.
    torch.manual_seed(dist.get_rank())
    first = 0
    actor = None
    latest = find_latest_ckpt_path(str(folder))
    if latest is not None:
        _, _, trained = latest.rpartition("_")
        first = int(trained) + 1
        actor = f"{latest}/actor"
    manager.load_checkpoint(actor, del_local_after_load=False)

    rows = torch.stack(token_rows(40))
    for step in range(first, steps):
        batch = rows[torch.randint(40, (4,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

        # As verl's trainer: the tracker file names the step after all ranks have saved.
        manager.save_checkpoint(str(folder / f"global_step_{step}/actor"), None, step, n_keep)
        at("saved")
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        at("named")
        dist.barrier()

    write_digest(folder, f"{steps} steps", model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
