"""Trainers of transformers and TRL that resume exactly.

Example:
    >>> config = RecoverConfig(fileroot="runs", freq_steps=10)
    >>> trainer = recoverable(GRPOTrainer)(recover=config, model=..., args=...)
    >>> trainer.train()  # the same command resumes
"""

from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from ..engine.api import FinetuneSpec, Stateful
from ..recover import RecoverConfig, RecoverHandler
from ..utils.compat.trainer_private import TrainerSeam, is_exportable
from ..utils.compat.trl_private import is_trls, kept_by
from ..utils.distributed import control_group, get_world_size
from ..utils.errors import ConfigError
from ..utils.logging import get_logger
from .trainer_run import TrainerRun

logger = get_logger(__name__)

T = TypeVar("T", bound=Trainer)


class _Recoverable(TrainerSeam):
    """Mixin that `recoverable` adds to a trainer class."""

    _holdfast_attributes: tuple[str, ...] | None = None

    def __init__(
        self, *args: Any, recover: RecoverConfig, epochs_may_change: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.recover = recover
        self._epochs_may_change = epochs_may_change

        # What TRL's classes keep is known. A subclass of the user names its own attributes.
        own = self._holdfast_attributes or ()
        for name in own:
            if not hasattr(self, name):
                raise ConfigError(
                    f"{type(self).__name__} has no attribute {name!r}, of those that are to be "
                    "saved"
                )
        self._kept = (*kept_by(self), *own)
        _refuse(self)
        if recover.mode != "off" and self.is_world_process_zero():
            for gap in gaps(self, told=self._holdfast_attributes is not None):
                logger.warning("%s", gap)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train like Trainer, from the newest generation of the run.

        ``resume_from_checkpoint``, a checkpoint of Trainer, is used only while there is no
        generation.
        """
        if trial is not None:
            raise ConfigError(
                "hyperparameter_search trains many runs, and a folder holds one: use a plain "
                "trainer"
            )

        # A generation wins over a checkpoint of Trainer. Here it is only looked for.
        spec = FinetuneSpec(1, 1, 1)
        group = control_group()
        found = RecoverHandler(self.recover, spec, group=group, epochs_may_change=True).peek()
        if found is not None and resume_from_checkpoint:
            logger.info(
                "there is a generation of step %d: %s is not used",
                found.global_step,
                resume_from_checkpoint,
            )
            resume_from_checkpoint = None
        elif found is None and not resume_from_checkpoint and self.recover.mode != "off":
            _warn_of_checkpoints(Path(str(self.args.output_dir)))
        run = TrainerRun(self, self.recover, found, self._kept, self._epochs_may_change)
        with run as self.recovery:
            try:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
            finally:
                self.recovery = None


@cache
def recoverable(base: type[T], attributes: tuple[str, ...] | None = None) -> type[T]:
    """Make a subclass of a Trainer whose ``train`` saves snapshots, and resumes when it is called
    again.

    The subclass takes the arguments of ``base`` and two keywords. ``recover`` is a `RecoverConfig`.
    ``epochs_may_change`` (False) also resumes if another batch size, number of processes or dataset
    has changed the steps per epoch. The run then continues at the same fraction of the epoch, not
    bit-identically.

    Args:
        base: ``Trainer``, ``SFTTrainer``, ``GRPOTrainer`` ..., or a subclass.
        attributes: names of attributes of your own subclass that training changes, to be saved with
            every generation. They may hold tensors, numbers, strings, lists and dicts. () means
            none, None means unknown.

    Raises:
        UnsupportedVersionError: the installed transformers or TRL lacks a method or attribute that
            is needed.
        ConfigError: ``base`` is not a Trainer. Creating a trainer also raises it, for options that
            cannot be resumed exactly (see docs/integrations.md).
    """
    if not issubclass(base, Trainer):
        raise ConfigError(
            f"{base!r} is not a Trainer of transformers; expected one, as GRPOTrainer or SFTTrainer"
        )
    body = {
        "_holdfast_attributes": attributes,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
    }
    return type(f"Recoverable{base.__name__}", (_Recoverable, base), body)  # type: ignore[return-value]


def gaps(trainer: Any, told: bool = False) -> list[str]:
    """List what will not resume exactly in a trainer's run, one sentence each.

    ``told``: the caller named the attributes of the trainer to save, so the trainer's own
    attributes are no gap.
    """
    args = trainer.args
    found = []

    # Samplers.
    if getattr(args, "use_vllm", False):
        found.append(
            "vLLM samples from a state that cannot be saved: a resumed run trains on all that was "
            "sampled before the snapshot, and samples other completions after it than a run that "
            "was not interrupted"
        )
        if args.vllm_mode == "server":
            found.append(
                "a trainer that is killed while it sends weights may leave the vLLM server "
                "waiting for the rest: start the server anew then. One that was not receiving is "
                "given the restored weights before it samples"
            )

    # Attributes of the class that `recoverable` was given, and of callbacks.
    classes = type(trainer).__mro__
    base = classes[classes.index(TrainerSeam) + 1]
    if not (told or base.__module__.startswith("transformers.") or is_trls(base)):
        found.append(
            f"{base.__name__} is a class of your own: what it keeps between steps is not saved. "
            f"Name those attributes, "
            f'recoverable({base.__name__}, attributes=("_buffer", ...)), or () for none'
        )
    for callback in trainer.callback_handler.callbacks:
        if not _is_covered(callback) and vars(callback):
            some = sorted(vars(callback))[:4]
            found.append(
                f"callback {type(callback).__name__} has attributes "
                f"({', '.join(some)}) and says nothing of its state: it "
                "starts anew at a resume. Give it state_dict and load_state_dict, or "
                "transformers' ExportableState"
            )

    # The data.
    collator = trainer.data_collator
    if args.dataloader_num_workers and _may_draw(collator):
        name = getattr(collator, "__name__", type(collator).__name__)
        found.append(
            f"{name} may draw random numbers in the {args.dataloader_num_workers} processes of "
            "dataloader_num_workers, whose generators cannot be saved: if it does, or the dataset "
            "does, set that to 0"
        )
    if trainer.train_dataset is not None and not hasattr(trainer.train_dataset, "__len__"):
        found.append(
            "the dataset is a stream: a resumed run reads it from the beginning of the epoch to "
            "its place, which takes time, and is only exact if it gives the same samples in the "
            "same order again"
        )
    return found


def _may_draw(collator: Any) -> bool:
    module = getattr(collator, "__module__", None) or type(collator).__module__
    is_own = module.split(".")[0] not in ("transformers", "trl")
    return is_own or bool(getattr(collator, "mlm", False))


def _is_covered(callback: TrainerCallback) -> bool:
    """Whether a callback is saved, or has nothing that a run depends on."""
    if isinstance(callback, Stateful) or is_exportable(callback):
        return True
    kind = type(callback)
    return kind.__module__.startswith("transformers.") or kind.__name__ == "SyncRefModelCallback"


def _refuse(trainer: Any) -> None:
    """Raise ConfigError for options with which a run cannot be resumed exactly."""
    args = trainer.args
    config = args.accelerator_config
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    sizes = getattr(getattr(trainer.model, "config", None), "distributed_config", None)

    # Dispatching: rank 0 reads the batches of all ranks, and accelerate skips batches of a dataset
    # with a length without reading them.
    has_length = hasattr(trainer.train_dataset, "__len__")
    is_dispatched = config.dispatch_batches and has_length and get_world_size() > 1
    reason = None
    if trainer.is_deepspeed_enabled:
        reason = "DeepSpeed keeps weights and optimizer in a form of its own; use DDP or FSDP2"
    elif plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        reason = "FSDP1 is not supported; set fsdp_version: 2 in fsdp_config"
    elif getattr(sizes, "pp_size", 1) > 1:
        reason = (
            "pp_size gives each rank other layers, which is not supported; use fsdp_size, tp_size "
            "or ep_size"
        )
    elif args.ignore_data_skip:
        reason = (
            "ignore_data_skip begins the epoch anew at a resume: samples would be trained on "
            "twice; leave it False"
        )
    elif is_dispatched and not config.split_batches:
        reason = (
            "with dispatch_batches accelerate skips too few batches of the epoch at a resume; "
            "leave it None, or set split_batches and dataloader_drop_last too"
        )
    elif is_dispatched and not args.dataloader_drop_last:
        reason = (
            "with dispatch_batches accelerate completes the last batch of the epoch with samples "
            "of the first one that it reads, which is another one after a resume; leave it None, "
            "or set dataloader_drop_last"
        )
    elif args.dataloader_num_workers > 1 and not args.dataloader_in_order:
        reason = (
            "with dataloader_in_order=False batches come in the order in which the "
            f"{args.dataloader_num_workers} workers finish, which no state holds; leave it "
            "True, or set dataloader_num_workers to 1"
        )
    elif args.auto_find_batch_size:
        reason = (
            "auto_find_batch_size changes the batches while the run goes on; set "
            "per_device_train_batch_size"
        )
    if reason is not None:
        raise ConfigError(f"{type(trainer).__name__} cannot be resumed exactly: {reason}")


def _warn_of_checkpoints(output: Path) -> None:
    if not output.is_dir():
        return
    last = get_last_checkpoint(str(output))
    if last is not None:
        logger.warning(
            "there is no generation yet, but %s: training starts at step 0. "
            "train(resume_from_checkpoint=True) begins with that checkpoint, and goes on from "
            "generations after it",
            last,
        )
