"""A real engine that trains a step and publishes, and log-probabilities computed from published
folders.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from holdfast.engine import (
    FinetuneSpec,
    FSDPEngine,
    OptimizerConfig,
    TrainEngineConfig,
    WeightUpdateMeta,
)
from holdfast.engine.api import Batch, UpdateType
from holdfast.engine.hf import buckets
from holdfast.engine.servers import ServerFleet
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    InferenceServer,
    ModelRequest,
    ModelResponse,
)
from holdfast.engine.servers.client import ServerClient
from tests.engine.test_fsdp_engine import loss_tokens, make_batch, nll

PROMPT = list(range(3, 43))
TOLERANCE = 1e-4
BUCKET_BYTES = 100_000


class Trainer:
    """An engine and its folder of versions, which count from 1."""

    def __init__(self, engine: FSDPEngine, meta: WeightUpdateMeta) -> None:
        self.engine, self.meta = engine, meta
        self.version = 0

    def train(self) -> None:
        """Run one step that changes the model's answers."""
        batch: Batch = make_batch(seed=self.version)
        self.engine.train_batch(batch, nll, loss_tokens)
        self.version += 1
        self.engine.set_version(self.version)

    def publish(self, servers: Iterable[InferenceServer]) -> Path:
        """Train a step, publish it as the next version and return its folder. Raises like
        `update_weights`.
        """
        return self.publish_to(ServerFleet(servers, probe_interval_s=None))

    def publish_to(self, fleet: ServerFleet) -> Path:
        """`publish` to the servers of a fleet."""
        self.train()
        self.engine.connect_engine(fleet, self.meta)
        self.engine.update_weights()
        return self.folder

    @contextmanager
    def publishing_by(self, way: UpdateType) -> Iterator[None]:
        """Publish in another way in the block. Versions are also written to the folder."""
        own = self.meta
        self.meta = replace(own, type=way)
        try:
            yield
        finally:
            self.meta = own

    @property
    def folder(self) -> Path:
        """Folder of the last version."""
        return self.folder_of(self.version)

    def folder_of(self, version: int) -> Path:
        """Folder of a version."""
        assert self.meta.path is not None
        return Path(self.meta.path) / f"v{version:08d}"

    def error(self, response: ModelResponse) -> float:
        """Largest difference between a response's log-probabilities and those computed from its
        versions' folders.
        """
        ids = response.input_tokens + response.output_tokens
        expected = {
            v: folder_logprobs(self.folder_of(v), ids) for v in set(response.output_versions)
        }
        start = len(response.input_tokens)
        return max(
            abs(logprob - expected[version][start + i])
            for i, (logprob, version) in enumerate(
                zip(response.output_logprobs, response.output_versions, strict=True)
            )
        )


@contextmanager
def started_trainer(model: Path, meta: WeightUpdateMeta, **config: Any) -> Iterator[Trainer]:
    """One rank in this process that has published nothing yet.

    Args:
        model: initial model folder.
        meta: how it publishes.
        config: fields of `TrainEngineConfig` in addition.
    """
    torch.set_num_threads(1)
    optimizer = OptimizerConfig(lr=1e-2)
    engine = FSDPEngine(
        TrainEngineConfig(path=str(model), dtype="float32", optimizer=optimizer, **config)
    )
    engine.create_process_group()
    engine.initialize(
        None, FinetuneSpec(total_train_epochs=1, dataset_size=1000, train_batch_size=1)
    )
    yield Trainer(engine, meta)
    engine.destroy()


@contextmanager
def small_buckets() -> Iterator[None]:
    """Send tiny models in several buckets in the block."""
    cut = partial(buckets.cut_buckets, limit_bytes=BUCKET_BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "cut_buckets", lambda tensors, _: cut(tensors))
        yield


@lru_cache(maxsize=16)
def _model(folder: Path, mtime_ns: int) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def folder_logprobs(folder: Path, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each of ``ids`` given the previous ones, by the weights of a folder. The
    first is 0.
    """
    model = _model(folder, (folder / "config.json").stat().st_mtime_ns)
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1] / temperature
    return [0.0, *logits.log_softmax(-1)[torch.arange(len(ids) - 1), list(ids[1:])].tolist()]


def sample(
    client: ServerClient, tokens: int = 24, seed: int = 1, temperature: float = 1.0
) -> ModelResponse:
    """Sample a completion of `PROMPT`."""
    return asyncio.run(sample_later(client, tokens, seed, temperature))


async def sample_later(
    client: ServerClient, tokens: int = 24, seed: int = 1, temperature: float = 1.0
) -> ModelResponse:
    """`sample`, awaited."""
    gconfig = GenerationHyperparameters(max_new_tokens=tokens, temperature=temperature)
    return await client.agenerate(ModelRequest(PROMPT, gconfig, seed))
