"""One architecture in this process: a tiny folder, an engine, and the unsharded transformers model
to compare with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from holdfast.engine import FinetuneSpec, FSDPEngine, TrainEngineConfig
from holdfast.engine.api import Batch
from holdfast.engine.config import OptimizerConfig
from holdfast.engine.training.batch import IMAGES, images_of
from holdfast.utils.errors import ConfigError
from tests.engine.architectures import released, tiny
from tests.engine.architectures.tiny import FIRST_TOKEN, LAST_TOKEN
from tests.engine.seeing import image_inputs, seeing_batch

TIMEOUT_S = 30.0
"""Longest wait of a rank for the other."""

LOGPROB_LIMIT = 2e-5
"""Largest difference of a log-probability. Rounding makes 1e-6, attention between sequences 1e-4.
"""

LENGTHS = (12, 7, 9, 3)
SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=4)
SGD = OptimizerConfig(type="sgd", lr=1.0, momentum=0.9, weight_decay=0.0, gradient_clipping=1.0)


class Unsupported(Exception):
    """Transformers itself fails at the reference computation of a check."""


def rows_of(lengths: Sequence[int] = LENGTHS) -> Batch:
    """A batch of random tokens with a row of each length, padded on the right."""
    most = max(lengths)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN + 1, (len(lengths), most), generator=generator)
    mask = torch.arange(most) < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask, "attention_mask": mask.long(), "loss_mask": mask.long()}


def half(batch: Batch, rank: int) -> Batch:
    """The two rows of a rank, of a batch of four."""
    return {key: tensor[2 * rank : 2 * rank + 2] for key, tensor in batch.items()}


@dataclass
class Case:
    """One architecture in this process.

    Attributes:
        name: a model type of transformers, or the name of a released model.
        root: a folder of this architecture, the same on both ranks.
        rank: the rank of this process.
    """

    name: str
    root: Path
    rank: int

    @property
    def folder(self) -> Path:
        """The model folder that everything starts from."""
        return self.root / "model"

    @property
    def is_released(self) -> bool:
        """Whether the config is a released one."""
        return "/" in self.name

    @property
    def sees(self) -> bool:
        """Whether the model is trained on images."""
        return self.name.endswith(released.WITH_IMAGES)

    @property
    def auto(self) -> Any:
        """Class of transformers that builds the model."""
        return AutoModelForImageTextToText if self.sees else AutoModelForCausalLM

    @property
    def whole(self) -> Batch:
        """The batch: four rows. With images, the rows of the second rank have none."""
        if not self.sees:
            return rows_of()
        batch = seeing_batch(self.folder, (1, 2, 0, 0))
        return {**batch, "loss_mask": batch["attention_mask"]}

    @property
    def rows(self) -> Batch:
        """This rank's half of the batch."""
        return half(self.whole, self.rank)

    def write_folder(self) -> None:
        """Make the model folder with random float32 weights, including all parts of a multimodal
        model.

        The ``config.json`` of a released model is the released file with its reductions, not the
        output of transformers.

        Raises:
            Unsupported: transformers does not build, save or load the model again.
        """
        torch.manual_seed(0)
        try:
            config = (released if self.is_released else tiny).tiny_config(self.name)
            model = (
                self.auto.from_config(config, dtype=torch.float32)
                if self.sees
                else _whole_model(config)
            )
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    if tensor.is_floating_point():
                        tensor.add_(torch.randn_like(tensor) * 0.03)
            model.save_pretrained(self.folder)
            # A few models reset some weights in every load (a padding row to zero). This saves them
            # in that state.
            type(model).from_pretrained(self.folder).save_pretrained(self.folder)
            if self.is_released:
                values = json.dumps(released.tiny_values(self.name), indent=2)
                (self.folder / "config.json").write_text(values, encoding="utf-8")
            with torch.no_grad():
                padded_logits(self.reference(), rows_of())
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(
                f"transformers itself fails: {type(error).__name__}: {error}"
            ) from error

    def reference(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The unsharded model, of transformers alone."""
        return self.auto.from_pretrained(self.folder, dtype=dtype).eval()

    def served_reference(self, max_model_len: int) -> PreTrainedModel:
        """The unsharded model with the rotary frequencies of an inference server that runs with
        ``max_model_len``.

        vLLM takes the long factors of LongRoPE for every sequence if ``max_model_len`` exceeds the
        original length.
        """
        config = AutoConfig.from_pretrained(self.folder)
        take_long_factors(config, max_model_len)
        return self.auto.from_pretrained(self.folder, config=config, dtype=torch.float32).eval()

    def new_engine(self, **options: object) -> FSDPEngine:
        """An engine with the model, without packing if that is refused."""
        config = TrainEngineConfig(
            path=str(self.folder), dtype="float32", device="cpu", optimizer=SGD, timeout_s=TIMEOUT_S
        )
        for key, value in {"train_vision": self.sees, **options}.items():
            setattr(config, key, value)
        engine = FSDPEngine(config)
        engine.create_process_group()
        try:
            engine.initialize(None, SPEC)
        except ConfigError as error:
            if "pack_sequences" not in str(error):
                raise
            config.pack_sequences = False
            engine.initialize(None, SPEC)
        return engine

    @cached_property
    def engine(self) -> FSDPEngine:
        """The engine most checks share: float32, no step taken until the check of gradients."""
        return self.new_engine()


def take_long_factors(config: PreTrainedConfig, max_model_len: int) -> None:
    """Put the long factors of LongRoPE in the place of the short ones, if ``max_model_len`` asks
    for them.
    """
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if (
        rope.get("rope_type") == "longrope"
        and max_model_len > rope["original_max_position_embeddings"]
    ):
        for key in [
            key for key in rope if key.startswith("short_")
        ]:  # factors, and scales of Phi-3.5-MoE
            rope[key] = rope[key.replace("short_", "long_")]


def _whole_model(config: PreTrainedConfig) -> PreTrainedModel:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if (
        model_class.config_class is not type(config)
        and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    ):
        model_class = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
        return model_class._from_config(config, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def padded_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """``[batch, seqlen, vocab]`` float32 logits of padded rows. Raises the same errors as
    `alone_logits`.

    Rows with images are computed alone.
    """
    if IMAGES in batch:
        return alone_logits(model, batch)
    return _logits(model, batch["input_ids"], batch["attention_mask"])


def alone_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """``[batch, seqlen, vocab]`` float32 logits of each sequence alone, without padding, and 0 at
    padding.

    Raises:
        Unsupported: the model does not run on tokens alone.
    """
    rows, lengths = [], batch["attention_mask"].sum(1).tolist()
    images = images_of(batch) or [None for _ in lengths]
    for ids, length, pixels in zip(batch["input_ids"], lengths, images, strict=True):
        sequence = ids[None, :length]
        more = {} if pixels is None else image_inputs(model, sequence, pixels)
        logits = _logits(model, sequence, torch.ones_like(sequence), **more)[0]
        rows.append(torch.nn.functional.pad(logits, (0, 0, 0, len(ids) - length)))
    return torch.stack(rows)


def _logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, **more: torch.Tensor
) -> torch.Tensor:
    try:
        return model(input_ids=ids, attention_mask=mask, **more, use_cache=False).logits.float()
    except Exception as error:
        raise Unsupported(
            f"transformers' own forward fails: {type(error).__name__}: {error}"
        ) from error


def logprobs_of(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """``[batch, seqlen]`` log-probabilities of the tokens, 0 at the first and at padding."""
    logprobs = logits[:, :-1].log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0)) * batch["attention_mask"]


def reference_logprobs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """``[batch, seqlen]`` log-probabilities of padded rows.

    Raises:
        Unsupported: the model does not run on tokens alone, or a padded row has other
            log-probabilities than the same row alone.
    """
    logprobs = logprobs_of(padded_logits(model, batch), batch)
    with torch.no_grad():
        alone = logprobs_of(alone_logits(model, batch), batch)
    if not torch.allclose(alone, logprobs, rtol=0, atol=LOGPROB_LIMIT):
        raise Unsupported("transformers' own log-probabilities change when a row is padded")
    return logprobs
