"""Model of the benchmarks: a Qwen3 of about the requested size, sharded by the engine, in the
middle of training.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3Config

from holdfast.engine import (
    DCPState,
    FinetuneSpec,
    FSDPConfig,
    FSDPEngine,
    OptimizerConfig,
    TrainEngineConfig,
)
from holdfast.engine.api import Batch
from holdfast.engine.memory.tensors import local_tensor
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn

from .harness import Options
from .ranks import Session

HEAD_DIM = 64
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=10**6, train_batch_size=1)


def model_config(
    parameters: int,
    *,
    tied: bool = False,
    vocabulary: int | None = None,
) -> Qwen3Config:
    """Return the smallest Qwen3 of a growing series with at least ``parameters`` parameters."""
    if vocabulary is None:
        vocabulary = 32000 if parameters >= 20e6 else 2048
    # Width and layers grow together.
    width = HEAD_DIM
    while _count(width, vocabulary, tied) < parameters:
        width += HEAD_DIM
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=_layers(width),
        num_attention_heads=width // HEAD_DIM,
        num_key_value_heads=width // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=8192,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def _layers(width: int) -> int:
    return max(2, width // HEAD_DIM)


def _count(
    width: int,
    vocabulary: int,
    tied: bool,
) -> int:
    """Count embedding, head, and the four attention and three MLP matrices per layer, without
    norms.
    """
    embeddings = 1 if tied else 2
    layer = 16 * width * width
    return embeddings * vocabulary * width + _layers(width) * layer


@dataclass(frozen=True)
class TrainingSize:
    """Sizes for measurements of training steps, which keep the device busy.

    Attributes:
        parameters: most parameters of a model.
        longer: factor for the lengths of sequences.
        dtype: dtype of the computation.
    """

    parameters: int
    longer: int
    dtype: str


def training_size(
    options: Options,
    parameters: int,
    longer: int = 4,
) -> TrainingSize:
    """Return ``parameters`` in float32 for a CPU. For a GPU, 20 times as many in bfloat16, and
    ``longer`` sequences.
    """
    if options.device == "cpu" or options.quick:
        size = min(options.parameters, parameters)
        return TrainingSize(size, 1, "float32")

    # A GPU is idle between the kernels of a small model.
    size = min(options.parameters, 20 * parameters)
    return TrainingSize(size, longer, "bfloat16")


def checkpoint_bytes(parameters: int) -> int:
    """Estimate the size of a checkpoint: float32 weights and two moments."""
    return 12 * parameters


def build_engine(
    session: Session,
    *,
    tied: bool = False,
    parameters: int | None = None,
    vocabulary: int | None = None,
    pack_sequences: bool = True,
    attn_impl: str | None = None,
    gradient_sync: str = "auto",
    dtype: str = "float32",
    compiled: bool = False,
    shares_prompts: bool = False,
) -> FSDPEngine:
    """Build the engine of this rank and train one step, so that there are moments to save."""
    # Rank 0 writes the model's configuration, which all ranks read.
    if parameters is None:
        parameters = session.options.parameters
    model = model_config(parameters, tied=tied, vocabulary=vocabulary)
    folder = session.options.scratch / "config"
    if session.rank == 0:
        model.save_pretrained(folder)
    session.barrier()

    config = TrainEngineConfig(
        path=str(folder),
        init_from_scratch=True,
        dtype=dtype,
        device=session.options.device,
        pack_sequences=pack_sequences,
        attn_impl=attn_impl,
        compile=compiled,
        enable_tree_training=shares_prompts,
        fsdp=FSDPConfig(gradient_sync=gradient_sync),
        optimizer=OptimizerConfig(lr=1e-5),
    )
    engine = FSDPEngine(config)
    engine.create_process_group()
    engine.initialize(None, SPEC)
    train(engine, dense_batch(engine))
    return engine


def dense_batch(
    engine: FSDPEngine,
    rows: int = 2,
    length: int = 32,
) -> Batch:
    """A batch without padding."""
    return ragged_batch(engine, [length] * rows)


def ragged_batch(engine: FSDPEngine, lengths: list[int]) -> Batch:
    """A padded batch of sequences of these lengths."""
    # A row for each sequence, which is True up to its length.
    positions = torch.arange(max(lengths))[None, :]
    mask = positions < torch.tensor(lengths)[:, None]

    words = torch.randint(0, engine.model.config.vocab_size, mask.shape)
    return {
        "input_ids": words * mask,
        "attention_mask": mask.long(),
        "loss_mask": mask.long(),
    }


def train(engine: FSDPEngine, batch: Batch) -> None:
    """Run one optimizer step."""
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    engine.step_lr_scheduler()


def training_tensors(engine: FSDPEngine) -> list[torch.Tensor]:
    """List this rank's shards of weights and optimizer state."""
    return _shards(engine.dcp_state())


def weight_tensors(engine: FSDPEngine) -> list[torch.Tensor]:
    """List this rank's shards of the weights."""
    return _shards(engine.dcp_state(with_optim=False))


def _shards(state: DCPState) -> list[torch.Tensor]:
    return [local_tensor(tensor).detach() for tensor in state.live_tensors().values()]


def bytes_of(tensors: list[torch.Tensor]) -> int:
    """Total size of the tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def folder_bytes(folder: Path) -> int:
    """Total size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
