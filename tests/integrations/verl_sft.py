"""verl's own SFT trainer on a CPU, for tests to kill.

verl has a registry of platforms, and none without a GPU. `CPU` adds one with gloo. Everything else
is verl's code.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from examples.integrations.tiny import digest, sums, tiny_model, tiny_tokenizer

EPOCHS, ROWS, BATCH = 2, 24, 4


def use_cpu() -> None:
    """Register the platform before verl asks for one."""
    from verl.plugin.platform.platform_cuda import PlatformCUDA  # type: ignore[import-not-found]
    from verl.plugin.platform.platform_manager import PlatformRegistry, set_platform  # type: ignore[import-not-found]

    device = ModuleType("cpu_device")
    vars(device).update(
        is_available=lambda: False,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (0, 0),
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        get_device_name=lambda *_: "cpu",
        ipc_collect=_nothing,
        reset_peak_memory_stats=_nothing,
        empty_cache=_nothing,
        synchronize=_nothing,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    class CPU(PlatformCUDA):
        device_name, device_module = "cpu", device
        is_available = is_platform_available = lambda *_, **__: True
        current_device = lambda *_: "cpu"  # noqa: E731
        communication_backend_name = lambda *_: "gloo"  # noqa: E731
        set_device = synchronize = empty_cache = manual_seed = manual_seed_all = (
            set_allocator_settings
        ) = _nothing

    os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # selects the FSDP engine
    PlatformRegistry.register(platform="cpu")(CPU)
    set_platform(CPU())


def _nothing(*_: Any, **__: Any) -> None:
    pass


def prepare(folder: Path) -> None:
    """Write the trainer's texts, and a model without dropout.

    With dropout, a run killed inside an epoch ends with other weights, with either manager: verl's
    new loader draws from torch's generator after the checkpoint was loaded.
    """
    import pandas as pd

    model = tiny_model()
    model.config.attention_dropout = 0.0
    model.save_pretrained(folder / "model")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    texts = [text.partition("=") for text in sums(ROWS)]
    rows = [
        {
            "messages": [
                {"role": "user", "content": sum_ + equals},
                {"role": "assistant", "content": result},
            ]
        }
        for sum_, equals, result in texts
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")


def main(folder: Path, inputs: Path, kill: str = "", plain: bool = False, n_keep: int = 2) -> None:
    """Train like ``python -m verl.trainer.sft_trainer``, and end with SIGKILL on rank 0 at
    ``where:step``.

    Args:
        folder: folder of the run.
        inputs: folder written by `prepare`.
        kill: ``saved``: the model is saved and the tracker names the previous step. ``named``: it
            names this step.
        plain: use verl's own checkpoint manager.
        n_keep: ``max_ckpt_to_keep``.
    """
    torch.set_num_threads(1)
    use_cpu()
    dist.init_process_group("gloo")
    from hydra import compose, initialize_config_module  # type: ignore[import-not-found]
    from verl.trainer.sft_trainer import SFTTrainer  # type: ignore[import-not-found]

    options = {
        "model.path": inputs / "model",
        "model.enable_gradient_checkpointing": False,
        "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "sdpa",
        "engine.strategy": "fsdp2",
        "engine.model_dtype": "fp32",
        "engine.use_torch_compile": False,
        "optim.lr": 1e-2,
        "data.train_files": inputs / "train.parquet",
        "data.train_batch_size": BATCH,
        "data.micro_batch_size_per_gpu": 2,
        "data.use_dynamic_bsz": False,
        "data.num_workers": 0,
        "trainer.default_local_dir": folder,
        "trainer.total_epochs": EPOCHS,
        "trainer.logger": "[console]",
        "trainer.save_freq": 1,
        "trainer.device": "cpu",
        "trainer.max_ckpt_to_keep": n_keep,
    }
    if not plain:
        options["model.external_lib"] = "holdfast.integrations.verl"
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "sft_trainer_engine", overrides=[f"{name}={value}" for name, value in options.items()]
        )
    torch.manual_seed(dist.get_rank())
    trainer = SFTTrainer(config)
    where, _, step = kill.partition(":")
    for place, owner in (
        ("saved", trainer.engine.checkpoint_manager),
        ("named", trainer.ckpt_handler),
    ):
        if place == where:
            owner.save_checkpoint = _killing(owner.save_checkpoint, folder / f"global_step_{step}")
    trainer.fit()
    found = digest(trainer.engine.module, trainer.engine.optimizer)
    if dist.get_rank() == 0:
        (folder / "digest.txt").write_text(found)
    dist.destroy_process_group()


def _killing(save: Callable[..., None], step: Path) -> Callable[..., None]:
    def save_and_die(*args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        if dist.get_rank() == 0 and step.exists():
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    return save_and_die
