"""Supervised fine-tuning under torchrun: a script with its own loop around the engine and the
recovery handler.

    torchrun --standalone --nproc_per_node=2 examples/sft.py trainer.save_freq=10

Kill it at any time. The same command continues from the last snapshot and ends with the same bytes.
``python examples/sft.py`` runs the job on one rank, and ``srun python examples/sft.py`` runs it on
the tasks of a SLURM job. It uses one GPU per rank if there are GPUs, unless ``engine.device=cpu``.
*Every* rank runs this script and calls every method, and rank 0 decides for all. The ``trainer``
options mean the same as in verl. ``recover`` has the options that verl lacks, for example
``recover.must_save_by=slurm``. All files of a run are in one folder:

    <trainer.default_local_dir>/
        recover/global_step_19/     snapshots: model, optimizer, schedule, generators, data cursor
        hf/global_step_99/          the result, for from_pretrained
        stats.jsonl  tensorboard/   one entry per step, even if the run was killed
        model/                      the tiny model's config and tokenizer, without ``engine.path``
"""

import argparse
import sys
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import torch
from copy_task import CopyPrompts, require_copy_tokenizer, sft_collate, write_model_folder
from transformers import AutoTokenizer

from holdfast.engine import FinetuneSpec, FSDPEngine, SaveLoadMeta, TrainEngineConfig
from holdfast.engine.model_folder import require_model_folder
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn
from holdfast.recover import RecoverConfig, RecoverHandler, ResumableDataLoader
from holdfast.utils.config import load_config, require_choice
from holdfast.utils.distributed import get_rank, rank_zero_decides
from holdfast.utils.errors import ConfigError, HoldfastError, JobRefusedError
from holdfast.utils.logging import configure_logging
from holdfast.utils.metrics import StatsLogger
from holdfast.utils.remote import require_local
from holdfast.utils.rng import seed_rng
from holdfast.utils.timing import PhaseTimes
from holdfast.utils.trackers import require_trackers


@dataclass
class DataConfig:
    """The copy task's prompts."""

    train_samples: int = 640
    """Size of the dataset."""
    train_batch_size: int = 64
    """Samples per step, over all ranks."""
    seed: int = 1
    """Seed of the samples and of their order."""


@dataclass
class TrainerConfig:
    """Options that verl calls ``trainer``."""

    default_local_dir: str = "runs/examples/sft_copy"
    """Folder of the run."""
    total_epochs: int = 10
    """Number of epochs."""
    save_freq: int = 20
    """Steps between snapshots. -1 takes one only at the end."""
    max_ckpt_to_keep: int | None = 2
    """Number of newest snapshots to keep. None keeps all."""
    resume_mode: str = "auto"
    """``auto``: from the newest snapshot, if there is one. ``disable``: from step 0, in a folder
    without snapshots.
    ``resume_path``: from ``resume_from_path``.
    """
    resume_from_path: str | None = None
    """A ``.../recover/global_step_N`` folder."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Trackers in addition to ``stats.jsonl``, by their names in docs/examples.md."""

    def __post_init__(self) -> None:
        require_trackers(self.trackers)
        require_choice("trainer.resume_mode", self.resume_mode, ("auto", "disable", "resume_path"))
        key = "config key 'trainer.default_local_dir'"
        self.default_local_dir = str(
            require_local(self.default_local_dir, "a run", "give one all ranks see", key)
        )
        if (self.resume_mode == "resume_path") != (self.resume_from_path is not None):
            raise ConfigError(
                f"config key 'trainer.resume_from_path' is {self.resume_from_path!r} with "
                f"resume_mode {self.resume_mode!r}; give a path with resume_mode 'resume_path', "
                "and only then"
            )

    def recover_config(self, others: RecoverConfig) -> RecoverConfig:
        """Translate to Holdfast's options, and add ``others``. The last two parts of the folder
        become experiment and trial.
        """
        folder = Path(self.default_local_dir).absolute()
        # A ``save_freq`` of -1 means no snapshot but the last.
        config = replace(
            others,
            fileroot=str(folder.parent.parent),
            experiment_name=folder.parent.name,
            trial_name=folder.name,
            resume_path=self.resume_from_path,
            freq_steps=self.save_freq if self.save_freq > 0 else None,
            max_ckpt_to_keep=self.max_ckpt_to_keep,
        )
        if self.resume_mode == "disable" and any(config.recover_root.glob("global_step_*")):
            raise ConfigError(
                f"config key 'trainer.resume_mode' is 'disable', but {config.recover_root} holds "
                "snapshots, which are never written over; choose another default_local_dir, or "
                "remove them"
            )
        return config


OPTIONS_OF_TRAINER = (
    "fileroot",
    "experiment_name",
    "trial_name",
    "mode",
    "resume_path",
    "freq_steps",
    "max_ckpt_to_keep",
)
"""Options of recovery that `TrainerConfig` sets."""


@dataclass
class SFTConfig:
    """All options of this job."""

    engine: TrainEngineConfig = field(default_factory=TrainEngineConfig)
    """Model, optimizer and sharding. With an empty ``path``, the tiny model of the copy task is
    used.
    """
    data: DataConfig = field(default_factory=DataConfig)
    """Dataset."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Length of the run, and its snapshots."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Options of recovery that ``trainer`` does not have, such as ``must_save_by``,
    ``lock_timeout_s`` and ``mirror_url``.
    """
    backend: str | None = None
    """Mesh, for example ``fsdp:d1c2``. None: as ``engine.backend`` says."""

    def __post_init__(self) -> None:
        if self.backend is not None:
            self.engine = replace(self.engine, backend=self.backend)
        for key in OPTIONS_OF_TRAINER:
            value = getattr(self.recover, key)
            if value != getattr(RecoverConfig, key):
                raise ConfigError(
                    f"config key 'recover.{key}' is {value!r}; in this job 'trainer' decides it"
                )


def main(config: SFTConfig) -> None:
    """Train to the end of the last epoch, from a fresh start or a snapshot, and export."""
    run = Path(config.trainer.default_local_dir)
    dataset = CopyPrompts(config.data.train_samples, config.data.seed)
    spec = FinetuneSpec(config.trainer.total_epochs, len(dataset), config.data.train_batch_size)
    export = run / "hf" / f"global_step_{spec.total_train_steps - 1}"
    recover_config = config.trainer.recover_config(config.recover)
    if not config.engine.path:
        config.engine.path = str(write_model_folder(run / "model"))
        config.engine.init_from_scratch = True
    require_copy_tokenizer(require_model_folder(config.engine.path))
    engine = FSDPEngine(config.engine)
    engine.create_process_group()
    try:
        seed_rng(config.data.seed, engine.data_parallel_rank)
        # Rank 0 looks, because the disk of another may lag behind.
        if rank_zero_decides(export.exists, engine.control_group):
            if get_rank() == 0:
                print(f"this run has finished: {export}", flush=True)
            return
        engine.initialize(None, spec)
        with RecoverHandler(recover_config, spec, group=engine.control_group) as handler:
            train(engine, dataset, spec, config, handler)
            # Before the handler is closed, because then the run counts as finished.
            tokenizer = AutoTokenizer.from_pretrained(config.engine.path)
            engine.save(SaveLoadMeta(str(export), "hf", with_optim=False, tokenizer=tokenizer))
        if get_rank() == 0:
            print(f"exported {export}", flush=True)
    finally:
        engine.destroy()


def train(
    engine: FSDPEngine,
    dataset: CopyPrompts,
    spec: FinetuneSpec,
    config: SFTConfig,
    handler: RecoverHandler,
) -> None:
    """Train the remaining steps: `load` once before the first, `dump` after each."""
    # Ranks with the same data get the same rows.
    loader = ResumableDataLoader(
        dataset,
        config.data.train_batch_size,
        seed=config.data.seed,
        rank=engine.data_parallel_rank,
        world_size=engine.data_parallel_world_size,
        collate_fn=sft_collate,
    )
    total_steps = spec.total_train_steps
    info = handler.load(engine, dataloader=loader)
    step = handler.first_step(info)
    if step.global_step > total_steps:
        raise ConfigError(
            f"trainer.total_epochs asks for {total_steps} steps, the run has {step.global_step}"
        )

    # Rank 0 alone logs. Entries of steps that are trained again are replaced.
    logger = None
    if get_rank() == 0:
        logger = StatsLogger(
            config.trainer.default_local_dir, config.trainer.trackers, project="sft_copy"
        )
        logger.resume_after(info.last_step_info.global_step if info else None)

    times = PhaseTimes("training")
    for batch in islice(loader.batches(), total_steps - step.global_step):
        with times.phase("training"):
            stats = engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
            engine.step_lr_scheduler()
            engine.set_version(step.global_step + 1)

        # Log before the snapshot: a kill between the two logs the step twice.
        if logger is not None:
            seen = {name: stats[name] for name in ("loss", "lr", "grad_norm", "update_skipped")}
            logger.log(step.global_step, {**seen, **times.take(), **handler.goodput()})
        is_last = step.global_step == total_steps - 1
        saved = handler.dump(engine, step, dataloader=loader, force=is_last)
        if logger is not None:
            print(
                f"step {step.global_step:3d}/{total_steps} epoch {step.epoch}  loss "
                f"{stats['loss']:.4f}  lr {stats['lr']:.2e}  grad norm "
                f"{stats['grad_norm']:.3f}{'  saved' if saved else ''}",
                flush=True,
            )
        step = step.next()
    handler.wait()
    if logger is not None:
        logger.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning on the copy task.")
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("sft_copy.yaml"))
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="e.g. trainer.save_freq=10"
    )
    args = parser.parse_args()
    # a tiny model gains nothing from more threads, and with one the arithmetic repeats exactly
    torch.set_num_threads(1)
    configure_logging()
    try:
        main(load_config(SFTConfig, args.config, args.overrides))
    except JobRefusedError:
        raise  # was logged, and ends with code 75
    except HoldfastError as error:
        sys.exit(f"error: {error}")
