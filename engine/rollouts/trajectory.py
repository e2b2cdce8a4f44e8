"""Trajectories: results of episodes, their check, and their concatenation to a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...utils.errors import BatchError
from ..api import Batch
from ..servers.api import ModelResponse
from ..training.batch import IMAGES, join_images, validate_batch, with_images

Trajectory = dict[str, torch.Tensor]
"""The sequences of one ticket, right-padded: ``input_ids``, ``attention_mask``, ``loss_mask``,
``logprobs`` and ``versions`` of ``[n, S]``, ``rewards`` of ``[n]``. More entries of either shape
may follow. ``truncated``, ``[n]`` bool, marks sequences that ended at a length limit. Values per
token are aligned with the token itself, as in `Batch`. ``versions`` are -1 for tokens that were not
sampled.
"""

_PER_TOKEN = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
_PADDING = {"versions": -1}
_TRUNCATED = "truncated"
IMAGE_DIGEST = "image_digest"
"""Entry ``[n]`` of a trajectory whose images can be made again: digest of the image files, from 0
to 2**63 - 1.
"""


@dataclass
class TokenSequence:
    """One growing sequence: a prompt, then completions with answers of tools or users between them."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)  # 1 for sampled tokens
    logprobs: list[float] = field(default_factory=list)  # 0 for tokens that were not sampled
    versions: list[int] = field(
        default_factory=list
    )  # version of the weights, -1 for tokens that were not sampled
    truncated: bool = False  # the last completion ended at a length limit

    def extend_given(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled, such as a prompt or the answer of a tool."""
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
    """Pad sequences to tensors: int32 tokens and versions, bool masks and ``truncated``, float32
    values.
    """
    longest = max(len(sequence.input_ids) for sequence in sequences)

    def padded(
        rows: Sequence[Sequence[float]], dtype: torch.dtype, padding: float = 0
    ) -> torch.Tensor:
        return torch.tensor(
            [[*row, *[padding] * (longest - len(row))] for row in rows], dtype=dtype
        )

    return {
        "input_ids": padded([sequence.input_ids for sequence in sequences], torch.int32),
        "attention_mask": padded(
            [[1] * len(sequence.input_ids) for sequence in sequences], torch.bool
        ),
        "loss_mask": padded([sequence.loss_mask for sequence in sequences], torch.bool),
        "logprobs": padded([sequence.logprobs for sequence in sequences], torch.float32),
        "versions": padded(
            [sequence.versions for sequence in sequences], torch.int32, _PADDING["versions"]
        ),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        _TRUNCATED: torch.tensor([sequence.truncated for sequence in sequences], dtype=torch.bool),
    }


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise BatchError if a trajectory is no dict, or lacks an entry of `Trajectory` in the right
    shape.
    """
    if not isinstance(trajectory, dict):
        raise BatchError(
            f"the workflow returned a {type(trajectory).__name__}; expected a dict of tensors, or "
            "None"
        )
    if missing := {*_PER_TOKEN, "rewards"} - trajectory.keys():
        raise BatchError(f"the trajectory has no {sorted(missing)}; it has {sorted(trajectory)}")
    validate_batch(trajectory)
    expected = trajectory["input_ids"].shape
    for name in _PER_TOKEN:
        if trajectory[name].shape != expected:
            raise BatchError(
                f"{name!r} has shape {list(trajectory[name].shape)}; expected {list(expected)}"
            )
    for name in {"rewards", _TRUNCATED} & trajectory.keys():
        if trajectory[name].shape != expected[:1]:
            raise BatchError(
                f"{name!r} has shape {list(trajectory[name].shape)}; expected {list(expected[:1])}"
            )


def sampled_versions(trajectory: Trajectory) -> torch.Tensor:
    """Versions of the weights that sampled the tokens in the loss, ``[tokens]``."""
    versions = trajectory["versions"]
    return versions[trajectory["loss_mask"].bool() & (versions >= 0)]


def rewards_differ(trajectory: Trajectory) -> bool:
    """Whether the sequences of a prompt have different rewards. GRPO learns nothing from equal
    rewards, see dynamic sampling in Yu et al., "DAPO", 2025.
    """
    return bool(trajectory["rewards"].max() > trajectory["rewards"].min())


def concat_trajectories(trajectories: Sequence[Trajectory]) -> Batch:
    """Concatenate all sequences, in order, to one batch. Integers and masks become int64.

    Ledgers of older versions lack ``truncated``, so a trajectory without it counts as complete.
    Raises BatchError if the trajectories differ in other entries.
    """
    if any(_TRUNCATED in each for each in trajectories):
        complete = [torch.zeros(len(each["rewards"]), dtype=torch.bool) for each in trajectories]
        trajectories = [
            {_TRUNCATED: no, **each} for no, each in zip(complete, trajectories, strict=True)
        ]
    names = trajectories[0].keys()
    if other := [sorted(each) for each in trajectories if each.keys() != names]:
        raise BatchError(
            f"the trajectories of a batch have different entries: {sorted(names)} and {other[0]}"
        )
    longest = max(each["input_ids"].shape[1] for each in trajectories)
    tensors = [name for name in names if name != IMAGES]
    joined = {
        name: torch.cat([_widened(name, each, longest) for each in trajectories])
        for name in tensors
    }
    return with_images(joined, join_images(trajectories))


def _widened(name: str, trajectory: Trajectory, length: int) -> torch.Tensor:
    tensor, shape = trajectory[name], trajectory["input_ids"].shape
    if not tensor.is_floating_point():
        tensor = tensor.long()
    if tensor.shape[:2] != shape:
        return tensor
    filler = tensor.new_full(
        (shape[0], length - shape[1], *tensor.shape[2:]), _PADDING.get(name, 0)
    )
    return torch.cat([tensor, filler], dim=1)
