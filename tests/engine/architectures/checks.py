"""What is checked of one architecture: by two gloo ranks, against the unsharded transformers model.

A check returns a `Verdict`, or raises what Holdfast (or transformers) raised; all ranks run the same checks.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

from holdfast.engine import FinetuneSpec, FSDPEngine, SaveLoadMeta, TrainEngineConfig, full_state_dict
from holdfast.engine.api import Batch
from holdfast.engine.config import OptimizerConfig
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.rl.sft import sft_loss_fn
from holdfast.engine.training.counters import EngineCounters
from holdfast.engine.training.optimizer import build_optimizer, build_scheduler
from holdfast.utils.distributed import gather_objects
from holdfast.utils.errors import ConfigError
from tests.engine.architectures.tiny import FIRST_TOKEN, LAST_TOKEN, tiny_config

TIMEOUT_S = 30.0
"""Longest wait of a rank for the other."""

YES, NO, REFUSED, NONE = "yes", "no", "refused", "-"
"""A check passed, found a difference or an error, was refused by Holdfast in words, or has no subject."""

PADDED = "padded"
"""Packing was refused, as it should be, and the model runs on padded rows."""

SILENT = "SILENT"
"""How the reason of a verdict begins that nothing but the comparison would have told."""

_LENGTHS = (12, 7, 9, 3)
_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=4, train_batch_size=4)
_SGD = OptimizerConfig(type="sgd", lr=1.0, momentum=0.9, weight_decay=0.0, gradient_clipping=1.0)
_LOGPROB_LIMIT = 2e-5
"""Largest difference of a log-probability; rounding makes 1e-6, sequences that see each other 1e-4."""

_UPDATE_LIMIT = 1e-3
"""Largest difference of an update, as a share of the largest update."""

_BF16_LIMIT = 0.1
"""Largest difference of the loss (about 5) with bfloat16 compute."""


class Unsupported(Exception):
    """Transformers itself cannot do what the check compares with."""


@dataclass(frozen=True)
class Verdict:
    """What a check came to.

    Attributes:
        word: one of the words above.
        why: what there is to say about any other word than yes; no paths, no figures that differ between runs.
    """

    word: str
    why: str = ""


def rows_of(first: int, last: int) -> Batch:
    """Rows of the batch that everything is done with, of ragged lengths, padded on the right."""
    ids = torch.randint(FIRST_TOKEN, LAST_TOKEN + 1, (len(_LENGTHS), max(_LENGTHS)), generator=_generator(1))
    mask = torch.arange(max(_LENGTHS)) < torch.tensor(_LENGTHS)[:, None]
    batch = {"input_ids": ids * mask, "attention_mask": mask.long(), "loss_mask": mask.long()}
    return {key: tensor[first:last] for key, tensor in batch.items()}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Case:
    """One architecture in this process.

    Attributes:
        model_type: its name.
        root: a folder of this architecture, the same on both ranks.
        rank: of this process.
    """

    model_type: str
    root: Path
    rank: int

    @property
    def folder(self) -> Path:
        """The model folder that everything starts from."""
        return self.root / "model"

    @property
    def rows(self) -> Batch:
        """This rank's half of the batch."""
        return rows_of(2 * self.rank, 2 * self.rank + 2)

    def write_folder(self) -> None:
        """Make the model folder, of random float32 weights: all of a multimodal model, where there is more than text.

        Raises:
            Unsupported: transformers does not build, save or load the model again.
        """
        torch.manual_seed(0)
        try:
            model = _whole_model(tiny_config(self.model_type))
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    if tensor.is_floating_point():
                        tensor.add_(torch.randn_like(tensor) * 0.03)
            model.save_pretrained(self.folder)
            # A few models set some weights anew in every load (a padding row to zero): then they are so in the file.
            type(model).from_pretrained(self.folder).save_pretrained(self.folder)
            with torch.no_grad():
                _padded_logprobs(self.reference(), rows_of(0, len(_LENGTHS)))
        except Unsupported:
            raise
        except Exception as error:
            raise Unsupported(f"transformers itself fails: {type(error).__name__}: {error}") from error

    def reference(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The unsharded model, of transformers alone."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()

    def new_engine(self, **options: object) -> FSDPEngine:
        """An engine with the model; without packing where that is refused."""
        config = TrainEngineConfig(
            path=str(self.folder), dtype="float32", device="cpu", optimizer=_SGD, timeout_s=TIMEOUT_S
        )
        for key, value in options.items():
            setattr(config, key, value)
        engine = FSDPEngine(config)
        engine.create_process_group()
        try:
            engine.initialize(None, _SPEC)
        except ConfigError as error:
            if "pack_sequences" not in str(error):
                raise
            config.pack_sequences = False
            engine.initialize(None, _SPEC)
        return engine

    @cached_property
    def engine(self) -> FSDPEngine:
        """The engine most checks share: float32, no step taken until `check_step`."""
        return self.new_engine()


def _whole_model(config: PreTrainedConfig) -> PreTrainedModel:
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if model_class.config_class is not type(config) and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        model_class = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
        return model_class._from_config(config, dtype=torch.float32)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _reference_logprobs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """``[batch, seqlen]`` log-probabilities of the tokens, 0 at the first and at padding.

    Raises:
        Unsupported: the model does not run on tokens alone, or gives a row by itself other ones than a padded one.
    """
    logprobs = _padded_logprobs(model, batch)
    with torch.no_grad():
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            alone = _padded_logprobs(model, {key: tensor[row : row + 1, :length] for key, tensor in batch.items()})
            if not torch.allclose(alone[0], logprobs[row, :length], rtol=0, atol=_LOGPROB_LIMIT):
                raise Unsupported("transformers' own log-probabilities change when a row is padded")
    return logprobs


def _padded_logprobs(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    ids, mask = batch["input_ids"], batch["attention_mask"]
    try:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    except Exception as error:
        raise Unsupported(f"transformers' own forward fails: {type(error).__name__}: {error}") from error
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0)) * mask


def _mean_loss(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return -logprobs.sum() / (batch["attention_mask"].sum() - len(logprobs))


def _count_loss_tokens(data: Batch) -> torch.Tensor:
    return data["loss_mask"].sum()


def check_starts(case: Case) -> Verdict:
    """An engine is built from the folder, packed or not."""
    assert case.engine.model is not None
    return Verdict(YES)


def check_packed(case: Case) -> Verdict:
    """Whether rows are packed; `check_logprobs` judges what that does."""
    return Verdict(YES if case.engine.config.pack_sequences else PADDED)


@torch.no_grad()
def check_logprobs(case: Case) -> Verdict:
    """Log-probabilities are those of the padded, unsharded model."""
    expected, reason = None, None
    try:
        expected = _reference_logprobs(case.reference(), case.rows)
    except Unsupported as error:
        reason = error
    if reasons := [seen for seen in gather_objects(reason) if seen]:  # of any rank: the others would wait for it
        raise reasons[0]
    assert expected is not None
    difference = float((case.engine.forward_batch(case.rows) - expected).abs().max())
    return (
        Verdict(YES)
        if difference <= _LOGPROB_LIMIT
        else Verdict(NO, f"{SILENT}: log-probabilities {_size(difference)}")
    )


def check_hf(case: Case, dtype: str) -> Verdict:
    """All files of an export are those of ``save_pretrained`` of the unsharded model in ``dtype``."""
    ours, theirs = case.root / f"ours_{dtype}", case.root / f"theirs_{dtype}"
    case.engine.save(SaveLoadMeta(str(ours), "hf", False, dtype=dtype))
    if case.rank > 0:
        return Verdict(YES)
    reference = case.reference(getattr(torch, dtype))
    for part in (reference.config, reference.config.get_text_config(decoder=True)):
        if hasattr(part, "use_cache"):
            part.use_cache = True  # in every export
    try:
        reference.save_pretrained(theirs)
    except Exception as error:
        raise Unsupported(f"save_pretrained itself fails: {type(error).__name__}: {error}") from error
    found, expected = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (ours, theirs))
    for folder in (ours, theirs):
        shutil.rmtree(folder)
    differ = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return Verdict(NO, f"{SILENT}: other bytes in {', '.join(differ)}") if differ else Verdict(YES)


def check_step(case: Case) -> Verdict:
    """One step of SGD changes every weight as it does unsharded and padded."""
    if not _repeats_in_training(case):
        raise Unsupported("the model's own forward draws random numbers in training, dropout aside")
    reference, batch = case.reference(), rows_of(0, len(_LENGTHS))
    loss = _mean_loss(_reference_logprobs(reference, batch), batch)
    loss.backward()
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    torch.nn.utils.clip_grad_norm_(reference.parameters(), _SGD.gradient_clipping)
    build_optimizer(reference.parameters(), _SGD).step()
    stats = case.engine.train_batch(case.rows, sft_loss_fn, _count_loss_tokens)
    after = full_state_dict(case.engine.model, group=case.engine.control_group)
    if case.rank > 0:
        return Verdict(YES)
    expected = {name: param.detach() for name, param in reference.named_parameters()}
    largest = max(float((param - before[name]).abs().max()) for name, param in expected.items())
    difference = max(float((after[name] - param).abs().max()) for name, param in expected.items())
    if abs(stats["loss"] - float(loss)) > _LOGPROB_LIMIT:
        return Verdict(NO, f"{SILENT}: the loss of a step {_size(abs(stats['loss'] - float(loss)))}")
    if not difference <= _UPDATE_LIMIT * largest:
        return Verdict(NO, f"{SILENT}: the update of a step {_size(difference / largest)} of the largest one")
    return Verdict(YES)


@torch.no_grad()
def _repeats_in_training(case: Case) -> bool:
    tokens = {key: case.rows[key] for key in ("input_ids", "attention_mask")}
    case.engine.train()
    first, *others = [case.engine.model(**tokens, use_cache=False).logits for _ in range(4)]
    return all(gather_objects(all(torch.equal(first, other) for other in others), case.engine.control_group))


def check_bf16(case: Case) -> Verdict:
    """A step with bfloat16 compute is finite, and its loss near that of float32."""
    batch = rows_of(0, len(_LENGTHS))
    with torch.no_grad():
        expected = float(_mean_loss(_reference_logprobs(case.reference(), batch), batch))
    engine = case.new_engine(dtype="bfloat16")
    stats = engine.train_batch(case.rows, sft_loss_fn, _count_loss_tokens)
    finite = all(bool(param.to_local().isfinite().all()) for param in engine.model.parameters())  # type: ignore[operator]
    if stats["update_skipped"] or not finite:
        return Verdict(NO, "the step is not finite")
    if abs(stats["loss"] - expected) > _BF16_LIMIT:
        return Verdict(NO, f"{SILENT}: the loss {_size(abs(stats['loss'] - expected))}")
    return Verdict(YES)


def check_dcp(case: Case) -> Verdict:
    """What two ranks saved one rank loads, every bit of weights and optimizer state."""
    engine = case.engine
    engine.train_batch(case.rows, sft_loss_fn, _count_loss_tokens)
    engine.save(SaveLoadMeta(str(case.root / "dcp"), "dcp", True))
    expected = {name: _whole(tensor) for name, tensor in engine.dcp_state().live_tensors().items()}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(case.folder), dtype=torch.float32)
    optimizer = build_optimizer(model.parameters(), _SGD)
    scheduler = build_scheduler(optimizer, _SGD, _SPEC.total_train_steps)
    state = DCPState(model, optimizer, scheduler, EngineCounters())
    groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    own = groups[case.rank]
    assert isinstance(own, dist.ProcessGroup)
    load_dcp(case.root / "dcp", state, own)
    loaded = state.live_tensors()
    differ = sorted(name for name in expected.keys() | loaded.keys() if not _same(expected.get(name), loaded.get(name)))
    return Verdict(NO, f"{SILENT}: {len(differ)} tensors differ, as {differ[0]}") if differ else Verdict(YES)


def check_critic(case: Case) -> Verdict:
    """A critic starts from the folder: the body has its weights, values are finite, a step is taken."""
    engine = case.new_engine(is_critic=True)
    values = engine.forward_batch(case.rows)
    reference = case.reference()
    body = full_state_dict(engine.model, group=engine.control_group)
    stats = engine.train_batch(case.rows, _value_loss, _count_loss_tokens)
    if not values.isfinite().all() or stats["update_skipped"]:
        return Verdict(NO, "values or gradients are not finite")
    # A multimodal model has the language model one module further in.
    body = {name.replace(".language_model.", "."): value for name, value in body.items()}
    given = {name.replace(".language_model.", "."): value for name, value in reference.named_parameters()}
    differ = [name for name in body.keys() & given.keys() if not torch.equal(body[name], given[name])]
    if case.rank == 0 and (differ or not body.keys() & given.keys()):
        return Verdict(NO, f"{SILENT}: the body has not the weights of the folder ({len(differ)} tensors)")
    return Verdict(YES)


def _value_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (((output - 1) ** 2) * batch["loss_mask"]).sum() / batch["loss_mask"].sum().clamp(min=1)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def _size(difference: float) -> str:
    """An order of magnitude, the same in every run."""
    return "are not finite" if difference != difference else f"differ by about {difference:.0e}"


CHECKS: Mapping[str, Callable[[Case], Verdict]] = {
    "starts": check_starts,
    "packed": check_packed,
    "log-probs": check_logprobs,
    "HF float32": lambda case: check_hf(case, "float32"),
    "HF bfloat16": lambda case: check_hf(case, "bfloat16"),
    "step": check_step,
    "DCP": check_dcp,
    "bfloat16 step": check_bf16,
    "critic": check_critic,
}
"""By the name of their column, in the order in which they run."""
