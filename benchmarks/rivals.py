"""Ways of AReaL, verl and torch to save and load, written as their code does it.

Each has `save`, which blocks as long as training has to wait, `wait`, which returns when everything
is written, and in most cases `load`. None of them makes sure that its files are on the disk:
torch's writer does call fsync, but before Python's buffer is flushed. None verifies the data that
it reads.
"""

import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from holdfast.engine import FSDPEngine

from .ranks import Session


class Saver(Protocol):
    """A way to write a checkpoint."""

    def save(self, path: Path) -> None:
        """Write the new folder ``path``. Returns when training can go on."""
        ...

    def wait(self) -> None:
        """Return when the last save is written completely."""
        ...


class _TrainingState(Stateful):
    """AReaL's ``DCPState``."""

    def __init__(self, engine: FSDPEngine) -> None:
        assert engine.optimizer is not None
        self.model = engine.model
        self.optimizer = engine.optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


class _Blocking:
    def wait(self) -> None:
        """Return at once, because `save` has written everything."""


class ArealDCP(_Blocking):
    """AReaL: ``dcp.save`` and ``dcp.load`` of a Stateful over torch's ``get_state_dict``."""

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
    ) -> None:
        self._state = _TrainingState(engine)

    def save(self, path: Path) -> None:
        """Block until everything is written."""
        dcp.save({"dcp": self._state}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        """Read in place."""
        dcp.load({"dcp": self._state}, checkpoint_id=path)


class TorchAsync:
    """torch: ``dcp.async_save``, which creates a stager for every call."""

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
    ) -> None:
        self._state = _TrainingState(engine)
        # A background save over the default group would deadlock with training.
        self._group = dist.new_group(backend="gloo")
        self._stager: DefaultStager | None = None
        self._written: Future | None = None

    def save(self, path: Path) -> None:
        """Block until the state is staged."""
        written = dcp.async_save(
            {"dcp": self._state},
            checkpoint_id=path,
            process_group=self._group,  # type: ignore[arg-type]
            async_stager=self._stager,
        )
        assert isinstance(written, Future)
        self._written = written

    def wait(self) -> None:
        """Wait until the background thread has written everything."""
        assert self._written is not None
        self._written.result()


class TorchAsyncKept(TorchAsync):
    """torch: ``dcp.async_save`` with a stager that keeps its buffers, pinned if there is a GPU."""

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
    ) -> None:
        super().__init__(session, engine)
        cuda = session.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )


class VerlShards(_Blocking):
    """verl: every rank pickles its shards of model and optimizer, and some other state, into its
    own files.
    """

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
    ) -> None:
        assert engine.optimizer is not None
        self._model = engine.model
        self._optimizer = engine.optimizer
        self._suffix = f"world_size_{session.world_size}_rank_{session.rank}.pt"

    def save(self, path: Path) -> None:
        """Block until all data is handed to the operating system, without fsync."""
        # One file each for the model, the optimizer, and the rest of the state.
        path.mkdir(parents=True, exist_ok=True)
        torch.save(self._model.state_dict(), path / f"model_{self._suffix}")
        torch.save(self._optimizer.state_dict(), path / f"optim_{self._suffix}")
        rng = {
            "cpu": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "random": random.getstate(),
        }
        extra = {"lr_scheduler": None, "rng": rng}
        torch.save(extra, path / f"extra_state_{self._suffix}")
        dist.barrier()

    def load(self, path: Path) -> None:
        """Unpickle, which runs any code in the file, and copy."""
        self._model.load_state_dict(self._unpickled(path, "model"))
        self._optimizer.load_state_dict(self._unpickled(path, "optim"))
        self._unpickled(path, "extra_state")
        dist.barrier()

    def _unpickled(
        self,
        path: Path,
        what: str,
    ) -> Any:
        return torch.load(path / f"{what}_{self._suffix}", weights_only=False)


class ArealHF(_Blocking):
    """AReaL: gather everything on rank 0, which writes alone (cast to ``dtype``), or reads and
    broadcasts.
    """

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._rank = session.rank
        self._model = engine.model
        self._dtype = dtype

    def save(self, path: Path) -> None:
        """Block until rank 0 has handed all data to the operating system, without fsync."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        full: dict[str, Any] = get_model_state_dict(self._model, options=options)

        # Only rank 0 has the tensors now.
        if self._rank == 0:
            if self._dtype is not None:
                full = {name: tensor.to(self._dtype) for name, tensor in full.items()}
            self._model.save_pretrained(path, state_dict=full)
        dist.barrier()

    def load(self, path: Path) -> None:
        """Read on rank 0 and broadcast tensor by tensor."""
        full = {}
        if self._rank == 0:
            for file in sorted(path.glob("*.safetensors")):
                full |= load_file(file)

        # A file of a tied model lacks the head.
        tied = bool(self._model.config.tie_word_embeddings)
        options = StateDictOptions(
            full_state_dict=True,
            broadcast_from_rank0=True,
            strict=not tied,
        )
        set_model_state_dict(self._model, full, options=options)
        if tied:
            self._model.tie_weights()

        # torch's function leaves buffers out that are not persistent.
        for buffer in self._model.buffers():
            dist.broadcast(buffer, src=0)


class TorchHF(_Blocking):
    """torch: every rank writes its shards as safetensors, then rank 0 reads them all and writes one
    file.
    """

    def __init__(
        self,
        session: Session,
        engine: FSDPEngine,
    ) -> None:
        self._model = engine.model

    def save(self, path: Path) -> None:
        """Block until rank 0 has written everything a second time, without fsync."""
        writer = HuggingFaceStorageWriter(
            str(path),
            save_distributed=True,
            enable_consolidation=True,
        )
        dcp.save(self._state(), storage_writer=writer)

    def load(self, path: Path) -> None:
        """Read the rows of this rank, in place."""
        reader = HuggingFaceStorageReader(str(path))
        dcp.load(self._state(), storage_reader=reader)

    def _state(self) -> dict[str, Any]:
        """Drop the aliases of tied tensors, which safetensors refuses to write."""
        tied = self._model.all_tied_weights_keys or ()
        state = get_model_state_dict(self._model)
        return {name: tensor for name, tensor in state.items() if name not in tied}


TRAINING_STATE: dict[str, Callable[[Session, FSDPEngine], Saver]] = {
    "AReaL dcp.save": ArealDCP,
    "torch async_save": TorchAsync,
    "torch async_save, kept stager": TorchAsyncKept,
    "verl torch.save": VerlShards,
}
"""Ways to save a whole training state."""
