"""The checks of one architecture, by two gloo ranks against the unsharded transformers model.

A check returns a `Verdict`, or raises the error of Holdfast or transformers. All ranks run the same
checks.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from holdfast.engine import FSDPEngine, SaveLoadMeta, full_state_dict
from holdfast.engine.api import Batch
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.rl.losses import sft_loss_fn
from holdfast.engine.training.counters import EngineCounters
from holdfast.engine.training.optimizer import build_optimizer, build_scheduler
from holdfast.utils.distributed import gather_objects
from holdfast.utils.errors import ConfigError
from tests.engine.architectures import released
from tests.engine.architectures.case import (
    LOGPROB_LIMIT,
    SGD,
    SPEC,
    Case,
    Unsupported,
    alone_logits,
    half,
    logprobs_of,
    reference_logprobs,
    rows_of,
)

YES, NO, REFUSED, NONE = "yes", "no", "refused", "-"
"""A check passed, found a difference or an error, was refused by Holdfast in words, or has no
subject.
"""

PADDED = "padded"
"""Packing was refused, as it should be, and the model runs on padded rows."""

LOGITS = "logits"
"""The model changes what its head returns, so that log-probabilities come from whole logits, as
they should.
"""

DENSE = "dense"
"""The model has no experts."""

GOOD = (YES, PADDED, LOGITS, DENSE)
"""The words of a check that found nothing wrong."""

SILENT = "SILENT"
"""First word of a reason that only the comparison could reveal."""

_UPDATE_LIMIT = 1e-3
"""Largest difference of an update, as a share of the largest update of that tensor."""

_UPDATE_NOISE = 1e-5
"""Largest difference of an update that counts as rounding, as a share of the largest update of all.
"""

_BF16_LIMIT = 0.1
"""Largest difference of the loss (about 5) with bfloat16 compute."""

_CHUNK = 5
"""Tokens that the head scores at a time, so that a batch takes several chunks."""


@dataclass(frozen=True)
class Verdict:
    """The result of a check.

    Attributes:
        word: one of the words above.
        why: the reason for a word other than yes, without paths and figures that differ between
            runs.
    """

    word: str
    why: str = ""


Check = Callable[[Case], Verdict]


def _mean_loss(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    return -logprobs.sum() / (batch["attention_mask"].sum() - len(logprobs))


def _count_loss_tokens(data: Batch) -> torch.Tensor:
    return data["loss_mask"].sum()


def check_starts(case: Case) -> Verdict:
    """An engine is built from the folder, packed or not."""
    assert case.engine.model is not None
    return Verdict(YES)


def check_packed(case: Case) -> Verdict:
    """Whether rows are packed. `check_alone` judges the results."""
    return Verdict(YES if case.engine.config.pack_sequences else PADDED)


@torch.no_grad()
def check_alone(case: Case) -> Verdict:
    """Log-probabilities equal those of transformers for each sequence alone."""
    reference, expected, reason = case.reference(), None, None
    try:
        if not case.engine.config.pack_sequences:  # the model gets padded rows
            reference_logprobs(reference, case.rows)
        expected = logprobs_of(alone_logits(reference, case.rows), case.rows)
    except Unsupported as error:
        reason = error
    # of any rank, because the others would wait for it
    if reasons := [seen for seen in gather_objects(reason) if seen]:
        raise reasons[0]
    assert expected is not None
    return _compared(case.engine.forward_batch(case.rows), expected, "log-probabilities")


@torch.no_grad()
def check_context(case: Case) -> Verdict:
    """Log-probabilities of sequences on both sides of the original context length, with and without
    long neighbours.

    The reference computes each sequence alone, like an inference server with ``max_model_len``. One
    rank has a long sequence and a short one, the other has only short ones.
    """
    boundary = released.context_boundary(case.name)
    most = boundary + 16
    batch = half(rows_of((most, boundary - 4, 5, boundary - 7)), case.rank)
    expected = logprobs_of(alone_logits(case.served_reference(most), batch), batch)
    engine = case.new_engine(max_model_len=most)
    return _compared(engine.forward_batch(batch), expected, "log-probabilities")


@torch.no_grad()
def check_head(case: Case) -> Verdict:
    """Log-probabilities and entropies of a head that scores tokens in chunks equal those of
    transformers' logits.
    """
    logits, is_changed = _logits_and_whether_they_are_changed(case)
    engine = case.engine
    found = {}
    before, engine.config.logprobs_chunk_size = engine.config.logprobs_chunk_size, _CHUNK
    try:
        found["log-probabilities"] = engine.forward_batch(
            case.rows, lambda output, _: output.logprobs
        )
        found["entropies"] = engine.forward_batch(case.rows, lambda output, _: output.entropy)
    finally:
        engine.config.logprobs_chunk_size = before
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    expected = {
        "log-probabilities": logprobs_of(logits, case.rows),
        "entropies": torch.nn.functional.pad(entropy, (1, 0)) * case.rows["attention_mask"],
    }
    for what, values in expected.items():
        if (verdict := _compared(found[what], values, what)).word != YES:
            return verdict
    if is_changed == (engine._scoring_head is not None):
        how = (
            "scores tokens, though the model changes its output"
            if is_changed
            else "is not asked for scores"
        )
        return Verdict(NO, f"the head {how}")
    return Verdict(LOGITS if is_changed else YES)


def _logits_and_whether_they_are_changed(case: Case) -> tuple[torch.Tensor, bool]:
    model = case.reference()
    outputs: list[torch.Tensor] = []
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Linear)
    hook = head.register_forward_hook(lambda *call: outputs.append(call[-1]))
    ids = case.rows["input_ids"][:1]
    changed = not torch.equal(model(input_ids=ids, use_cache=False).logits, outputs[0])
    hook.remove()
    return alone_logits(model, case.rows), changed


def _compared(found: torch.Tensor, expected: torch.Tensor, what: str) -> Verdict:
    difference = float((found - expected).abs().max())
    return (
        Verdict(YES)
        if difference <= LOGPROB_LIMIT
        else Verdict(NO, f"{SILENT}: {what} {_size(difference)}")
    )


def check_hf(case: Case, dtype: str) -> Verdict:
    """All files of an export equal those that ``save_pretrained`` writes for the unsharded model in
    ``dtype``.
    """
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
        raise Unsupported(
            f"save_pretrained itself fails: {type(error).__name__}: {error}"
        ) from error
    found, expected = (
        {path.name: path.read_bytes() for path in folder.iterdir()} for folder in (ours, theirs)
    )
    for folder in (ours, theirs):
        shutil.rmtree(folder)
    differ = sorted(
        name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
    )
    return Verdict(NO, f"{SILENT}: other bytes in {', '.join(differ)}") if differ else Verdict(YES)


def check_gradients(case: Case) -> Verdict:
    """One step of SGD changes every weight as it does unsharded and padded."""
    if not _repeats_in_training(case):
        raise Unsupported("the model's own forward draws random numbers in training, dropout aside")
    return _takes_the_step(case, case.engine, case.rows)


def _takes_the_step(case: Case, engine: FSDPEngine, rows: Batch) -> Verdict:
    reference, batch = case.reference(), case.whole
    loss = _mean_loss(reference_logprobs(reference, batch), batch)
    loss.backward()
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    torch.nn.utils.clip_grad_norm_(reference.parameters(), SGD.gradient_clipping)
    build_optimizer(reference.parameters(), SGD).step()
    stats = engine.train_batch(rows, sft_loss_fn, _count_loss_tokens)
    after = full_state_dict(engine.model, group=engine.control_group)
    if case.rank > 0:
        return Verdict(YES)
    expected = {name: param.detach() for name, param in reference.named_parameters()}
    if abs(stats["loss"] - float(loss)) > LOGPROB_LIMIT:
        return Verdict(
            NO, f"{SILENT}: the loss of a step {_size(abs(stats['loss'] - float(loss)))}"
        )
    updates = {name: float((param - before[name]).abs().max()) for name, param in expected.items()}
    wrong = [
        name
        for name, param in expected.items()
        if not float((after[name] - param).abs().max())
        <= _UPDATE_LIMIT * updates[name] + _UPDATE_NOISE * max(updates.values())
    ]
    if wrong:
        return Verdict(
            NO,
            (
                f"{SILENT}: the updates of {len(wrong)} of {len(updates)} tensors differ, as "
                f"{wrong[0]}"
            ),
        )
    return Verdict(YES)


@torch.no_grad()
def _repeats_in_training(case: Case) -> bool:
    tokens = {key: case.rows[key] for key in ("input_ids", "attention_mask")}
    case.engine.train()
    first, *others = [case.engine.model(**tokens, use_cache=False).logits for _ in range(4)]
    return all(
        gather_objects(
            all(torch.equal(first, other) for other in others), case.engine.control_group
        )
    )


def check_bf16(case: Case) -> Verdict:
    """A step with bfloat16 compute is finite, and its loss is close to the float32 loss."""
    batch = case.whole
    with torch.no_grad():
        expected = float(_mean_loss(reference_logprobs(case.reference(), batch), batch))
    engine = case.new_engine(dtype="bfloat16")
    stats = engine.train_batch(case.rows, sft_loss_fn, _count_loss_tokens)
    finite = all(bool(param.to_local().isfinite().all()) for param in engine.model.parameters())  # type: ignore[operator]
    if stats["update_skipped"] or not finite:
        return Verdict(NO, "the step is not finite")
    if abs(stats["loss"] - expected) > _BF16_LIMIT:
        return Verdict(NO, f"{SILENT}: the loss {_size(abs(stats['loss'] - expected))}")
    return Verdict(YES)


def check_dcp(case: Case) -> Verdict:
    """One rank loads the checkpoint of two ranks: every bit of weights and optimizer state."""
    engine = case.engine
    engine.train_batch(case.rows, sft_loss_fn, _count_loss_tokens)
    engine.save(SaveLoadMeta(str(case.root / "dcp"), "dcp", True))
    expected = {name: _whole(tensor) for name, tensor in engine.dcp_state().live_tensors().items()}
    model = case.auto.from_config(AutoConfig.from_pretrained(case.folder), dtype=torch.float32)
    optimizer = build_optimizer(model.parameters(), SGD)
    scheduler = build_scheduler(optimizer, SGD, SPEC.total_train_steps)
    state = DCPState(model, optimizer, scheduler, EngineCounters())
    groups = [dist.new_group([rank], backend="gloo") for rank in range(dist.get_world_size())]
    own = groups[case.rank]
    assert isinstance(own, dist.ProcessGroup)
    load_dcp(case.root / "dcp", state, own)
    loaded = state.live_tensors()
    differ = sorted(
        name
        for name in expected.keys() | loaded.keys()
        if not _same(expected.get(name), loaded.get(name))
    )
    return (
        Verdict(NO, f"{SILENT}: {len(differ)} tensors differ, as {differ[0]}")
        if differ
        else Verdict(YES)
    )


def check_critic(case: Case) -> Verdict:
    """A critic starts from the folder: the body has its weights, values are finite, a step is
    taken.
    """
    engine = case.new_engine(is_critic=True)
    values = engine.forward_batch(case.rows)
    reference = case.reference()
    body = full_state_dict(engine.model, group=engine.control_group)
    stats = engine.train_batch(case.rows, _value_loss, _count_loss_tokens)
    if not values.isfinite().all() or stats["update_skipped"]:
        return Verdict(NO, "values or gradients are not finite")
    # A multimodal model has the language model one module further in.
    body = {name.replace(".language_model.", "."): value for name, value in body.items()}
    given = {
        name.replace(".language_model.", "."): value for name, value in reference.named_parameters()
    }
    differ = [
        name for name in body.keys() & given.keys() if not torch.equal(body[name], given[name])
    ]
    if case.rank == 0 and (differ or not body.keys() & given.keys()):
        return Verdict(
            NO, f"{SILENT}: the body has not the weights of the folder ({len(differ)} tensors)"
        )
    return Verdict(YES)


def check_context_parallel(case: Case) -> Verdict:
    """Two ranks that share every row do the checks of log-probabilities and of a step."""
    try:
        engine = case.new_engine(backend="fsdp:c2")
    except ConfigError:
        if case.engine.config.pack_sequences:
            raise
        return Verdict(PADDED)
    return _computes_alike(case, engine, case.whole)


def check_tensor_parallel(case: Case) -> Verdict:
    """Two ranks that share every matrix do the checks of log-probabilities and of a step."""
    return _computes_alike(case, case.new_engine(backend="fsdp:t2"), case.whole)


def check_expert_parallel(case: Case) -> Verdict:
    """Two ranks that share the experts do the checks of log-probabilities and of a step."""
    settings = vars(case.engine.model.config.get_text_config(decoder=True)).items()
    if not any("expert" in key and isinstance(value, int) and value > 1 for key, value in settings):
        return Verdict(DENSE)
    return _computes_alike(case, case.new_engine(backend="fsdp:d2e2"), case.rows)


def _computes_alike(case: Case, engine: FSDPEngine, batch: Batch) -> Verdict:
    """``batch`` is this rank's share of `Case.whole`, or all of it."""
    whole = case.whole
    with torch.no_grad():
        expected = logprobs_of(alone_logits(case.reference(), whole), whole)
    if batch["input_ids"].shape != whole["input_ids"].shape:
        expected = half({"logprobs": expected}, case.rank)["logprobs"]
    verdict = _compared(engine.forward_batch(batch), expected, "log-probabilities")
    return (
        _takes_the_step(case, engine, batch)
        if verdict.word == YES and _repeats_in_training(case)
        else verdict
    )


def _value_loss(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (((output - 1) ** 2) * batch["loss_mask"]).sum() / batch["loss_mask"].sum().clamp(min=1)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return (
        one is not None
        and other is not None
        and one.dtype == other.dtype
        and torch.equal(one, other)
    )


def _size(difference: float) -> str:
    """An order of magnitude, the same in every run."""
    return "are not finite" if difference != difference else f"differ by about {difference:.0e}"


CHECKS: Mapping[str, Check] = {
    "starts": check_starts,
    "packed": check_packed,
    "packed = alone": check_alone,
    "HF float32": lambda case: check_hf(case, "float32"),
    "HF bfloat16": lambda case: check_hf(case, "bfloat16"),
    "gradients": check_gradients,
    "DCP": check_dcp,
    "bfloat16 step": check_bf16,
    "critic": check_critic,
    "c = 2": check_context_parallel,
    "t = 2": check_tensor_parallel,
    "e = 2": check_expert_parallel,
}
"""Checks of a model type by the name of their column, in the order in which they run."""

RELEASED_CHECKS: Mapping[str, Check] = {
    "starts": check_starts,
    "packed": check_packed,
    "packed = alone": check_alone,
    "long = alone": check_context,
    "head": check_head,
    **CHECKS,
}
"""Checks of a released model by the name of their column, in the order in which they run."""
