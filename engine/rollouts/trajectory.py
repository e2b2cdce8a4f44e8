"""Trajectories: what an episode returns, checked, and concatenated to the batch of a step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...utils.errors import BatchError
from ..api import Batch
from ..servers.api import ModelResponse
from ..training.batch import validate_batch

Trajectory = dict[str, torch.Tensor]
"""The sequences of one ticket, right-padded: ``input_ids``, ``attention_mask``, ``loss_mask``, ``logprobs`` and
``versions`` of ``[n, S]``, ``rewards`` of ``[n]``; more entries of either shape may follow, among them ``truncated``,
``[n]`` bool: which sequences ended for want of room. Everything per token is aligned with the token itself, as in
`Batch`; ``versions`` are -1 where nothing was sampled."""

_PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
_PADDING = {"versions": -1}
_TRUNCATED = "truncated"


@dataclass
class TokenSequence:
    """One sequence while it grows: a prompt, then completions and what others said between them.

    Attributes:
        input_ids: all tokens.
        loss_mask: 1 where a token was sampled.
        logprobs: log-probability of each sampled token; 0 elsewhere.
        versions: version of the weights that sampled each token; -1 elsewhere.
        truncated: whether the last completion ended for its length and not with a stop token.
    """

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    truncated: bool = False

    def extend_given(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled: a prompt, or a tool's answer."""
        self.input_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def extend_sampled(self, response: ModelResponse) -> None:
        """Append a completion."""
        self.input_ids += response.output_tokens
        self.loss_mask += [1] * len(response.output_tokens)
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions
        self.truncated = response.stop_reason == "length"


def to_trajectory(sequences: Sequence[TokenSequence], rewards: Sequence[float]) -> Trajectory:
    """Pad sequences: int32 tokens and versions, bool masks and ``truncated``, float32 log-probabilities and rewards."""
    longest = max(len(sequence.input_ids) for sequence in sequences)

    def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float = 0) -> torch.Tensor:
        return torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows], dtype=dtype)

    return {
        "input_ids": padded([sequence.input_ids for sequence in sequences], torch.int32),
        "attention_mask": padded([[1] * len(sequence.input_ids) for sequence in sequences], torch.bool),
        "loss_mask": padded([sequence.loss_mask for sequence in sequences], torch.bool),
        "logprobs": padded([sequence.logprobs for sequence in sequences], torch.float32),
        "versions": padded([sequence.versions for sequence in sequences], torch.int32, _PADDING["versions"]),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        _TRUNCATED: torch.tensor([sequence.truncated for sequence in sequences], dtype=torch.bool),
    }


def check_trajectory(trajectory: Trajectory) -> None:
    """See that a trajectory can be trained on.

    Raises:
        BatchError: it is no dict, an entry is missing, is no tensor, or has another shape than `Trajectory` says.
    """
    if not isinstance(trajectory, dict):
        raise BatchError(f"the workflow returned a {type(trajectory).__name__}; expected a dict of tensors, or None")
    if missing := {*_PER_TOKEN, "rewards"} - trajectory.keys():
        raise BatchError(f"the trajectory has no {sorted(missing)}; it has {sorted(trajectory)}")
    validate_batch(trajectory)
    expected = trajectory["input_ids"].shape
    for name in _PER_TOKEN:
        if trajectory[name].shape != expected:
            raise BatchError(f"{name!r} has shape {list(trajectory[name].shape)}; expected {list(expected)}")
    for name in {"rewards", _TRUNCATED} & trajectory.keys():
        if trajectory[name].shape != expected[:1]:
            raise BatchError(f"{name!r} has shape {list(trajectory[name].shape)}; expected {list(expected[:1])}")


def sampled_versions(trajectory: Trajectory) -> torch.Tensor:
    """``[tokens]`` versions of the weights that sampled the tokens of the loss, of those that were sampled."""
    versions = trajectory["versions"]
    return versions[trajectory["loss_mask"].bool() & (versions >= 0)]


def rewards_differ(trajectory: Trajectory) -> bool:
    """Whether the sequences of a prompt have different rewards: with equal ones GRPO has no advantage to learn from
    (Yu et al., "DAPO", 2025, dynamic sampling)."""
    return bool(trajectory["rewards"].max() > trajectory["rewards"].min())


def concat_trajectories(trajectories: Sequence[Trajectory]) -> Batch:
    """One batch of all sequences, in order, padded to the longest; integers and masks become int64.

    Where only some say which sequences are ``truncated``, those of the others count as complete: a ledger of an older
    version does not say it.

    Raises:
        BatchError: the trajectories do not all have the same other entries.
    """
    if any(_TRUNCATED in each for each in trajectories):
        complete = [torch.zeros(len(each["rewards"]), dtype=torch.bool) for each in trajectories]
        trajectories = [{_TRUNCATED: no, **each} for no, each in zip(complete, trajectories, strict=True)]
    names = trajectories[0].keys()
    if other := [sorted(each) for each in trajectories if each.keys() != names]:
        raise BatchError(f"the trajectories of a batch have different entries: {sorted(names)} and {other[0]}")
    longest = max(each["input_ids"].shape[1] for each in trajectories)
    return {name: torch.cat([_widened(name, each, longest) for each in trajectories]) for name in names}


def _widened(name: str, trajectory: Trajectory, length: int) -> torch.Tensor:
    tensor, shape = trajectory[name], trajectory["input_ids"].shape
    if not tensor.is_floating_point():
        tensor = tensor.long()
    if tensor.shape[:2] != shape:
        return tensor
    filler = tensor.new_full((shape[0], length - shape[1], *tensor.shape[2:]), _PADDING.get(name, 0))
    return torch.cat([tensor, filler], dim=1)
