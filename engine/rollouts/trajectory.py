"""Trajectories: results of episodes, their check, and their concatenation to a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ...utils.errors import BatchError
from ..api import Batch
from ..servers.api import ModelResponse
from ..training.batch import IMAGES, ROUTES, fill_routes, join_images, validate_batch, with_images

Trajectory = dict[str, Tensor]
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
    """One growing sequence: a prompt, completions, and answers of tools or users between them."""

    input_ids: list[int] = field(default_factory=list)
    # 1 for sampled tokens
    loss_mask: list[int] = field(default_factory=list)
    # 0 for tokens that were not sampled
    logprobs: list[float] = field(default_factory=list)
    # version of the weights, -1 for tokens that were not sampled
    versions: list[int] = field(default_factory=list)
    # the last completion ended at a length limit
    truncated: bool = False
    # experts of all tokens but those since the last sampled one: [tokens, layers, k] of each turn
    routed_experts: list[np.ndarray] = field(default_factory=list)

    @property
    def n_routed(self) -> int:
        """Number of tokens with routed experts: ``routes_from`` of the next request."""
        return sum(len(routes) for routes in self.routed_experts)

    def extend_given(self, ids: Sequence[int]) -> None:
        """Append tokens that were not sampled, such as a prompt or the answer of a tool."""
        n = len(ids)
        self.input_ids += ids
        self.loss_mask += [0] * n
        self.logprobs += [0.0] * n
        self.versions += [-1] * n

    def extend_sampled(self, response: ModelResponse) -> None:
        """Append a completion."""
        ids = response.output_tokens
        self.input_ids += ids
        self.loss_mask += [1] * len(ids)
        self.logprobs += response.output_logprobs
        self.versions += response.output_versions
        self.truncated = response.stop_reason == "length"
        if response.routed_experts is not None:
            self._add_routes(response.routed_experts)

    def _add_routes(self, routes: np.ndarray) -> None:
        # The last token was no input. Tokens keep the experts of the weights that sampled them.
        start = len(self.input_ids) - 1 - len(routes)
        n_known = self.n_routed
        if start > n_known:
            raise BatchError(
                f"routed experts of a sequence are known up to token {n_known}, and the next ones "
                f"begin at {start}; ask with ModelRequest(routes_from=sequence.n_routed)"
            )
        # A view would keep all that the server sent.
        self.routed_experts.append(routes[n_known - start :].copy())


def to_trajectory(
    sequences: Sequence[TokenSequence],
    rewards: Sequence[float],
) -> Trajectory:
    """Pad sequences to tensors: int32 tokens and versions, bool masks and ``truncated``, float32
    values.
    """
    lengths = [len(sequence.input_ids) for sequence in sequences]
    longest = max(lengths)

    def padded(name: str, dtype: torch.dtype) -> Tensor:
        padding = _PADDING.get(name, 0)
        rows = []
        for sequence in sequences:
            values = getattr(sequence, name)
            n_missing = longest - len(values)
            rows.append([*values, *[padding] * n_missing])
        return torch.tensor(rows, dtype=dtype)

    # In a row of the mask, as many ones as the sequence has tokens.
    ends = torch.tensor(lengths)[:, None]
    truncated = [sequence.truncated for sequence in sequences]
    trajectory = {
        "input_ids": padded("input_ids", torch.int32),
        "attention_mask": torch.arange(longest) < ends,
        "loss_mask": padded("loss_mask", torch.bool),
        "logprobs": padded("logprobs", torch.float32),
        "versions": padded("versions", torch.int32),
        "rewards": torch.tensor(rewards, dtype=torch.float32),
        _TRUNCATED: torch.tensor(truncated, dtype=torch.bool),
    }
    routes = _padded_routes(sequences, longest)
    if routes is not None:
        trajectory[ROUTES] = routes
    return trajectory


def _padded_routes(sequences: Sequence[TokenSequence], length: int) -> Tensor | None:
    found = [routes for sequence in sequences for routes in sequence.routed_experts]
    if not found:
        return None
    of_tokens = {routes.shape[1:] for routes in found}
    if len(of_tokens) > 1:
        raise BatchError(
            f"the answers of an episode have routed experts of [layers, k] {sorted(of_tokens)}; "
            "expected the same. Do all servers have the same model?"
        )
    shape = (len(sequences), length, *of_tokens.pop())
    padded = np.zeros(shape, np.result_type(*found))
    for row, sequence in enumerate(sequences):
        if sequence.routed_experts:
            known = padded[row, : sequence.n_routed]
            np.concatenate(sequence.routed_experts, out=known)
    return torch.from_numpy(padded)


def check_trajectory(trajectory: Trajectory) -> None:
    """Raise BatchError if a trajectory is no dict, or lacks an entry of `Trajectory` in the right
    shape.
    """
    if not isinstance(trajectory, dict):
        raise BatchError(
            f"the workflow returned a {type(trajectory).__name__}; expected a dict of tensors, or "
            "None"
        )
    missing = {*_PER_TOKEN, "rewards"} - trajectory.keys()
    if missing:
        raise BatchError(f"the trajectory has no {sorted(missing)}; it has {sorted(trajectory)}")
    validate_batch(trajectory)

    # Values per token are [n, S], values per sequence [n].
    per_token = trajectory["input_ids"].shape
    expected: dict[str, torch.Size] = dict.fromkeys(_PER_TOKEN, per_token)
    per_sequence = per_token[:1]
    for name in {"rewards", _TRUNCATED} & trajectory.keys():
        expected[name] = per_sequence
    for name, shape in expected.items():
        found = trajectory[name].shape
        if found != shape:
            raise BatchError(f"{name!r} has shape {list(found)}; expected {list(shape)}")


def sampled_versions(trajectory: Trajectory) -> Tensor:
    """Versions of the weights that sampled the tokens in the loss, ``[tokens]``."""
    versions = trajectory["versions"]
    in_loss = trajectory["loss_mask"].bool()
    sampled = versions >= 0
    return versions[in_loss & sampled]


def rewards_differ(trajectory: Trajectory) -> bool:
    """Whether the sequences of a prompt have different rewards. GRPO learns nothing from equal
    rewards, see dynamic sampling in Yu et al., "DAPO", 2025.
    """
    rewards = trajectory["rewards"]
    return bool(rewards.max() > rewards.min())


def concat_trajectories(trajectories: Sequence[Trajectory]) -> Batch:
    """Concatenate all sequences, in order, to one batch. Integers and masks become int64, but for
    ``routed_experts``, which would take 8 times the memory.

    Ledgers of older versions lack ``truncated``, so a trajectory without it counts as complete.
    Those of a run that did not ask for routed experts lack them, so their tokens have no choice.
    Raises BatchError if the trajectories differ in other entries, or in layers or k.
    """
    if any(_TRUNCATED in each for each in trajectories):
        trajectories = [_with_truncated(each) for each in trajectories]
    trajectories = fill_routes(trajectories)

    # All have the entries of the first one.
    names = trajectories[0].keys()
    for each in trajectories:
        if each.keys() != names:
            raise BatchError(
                "the trajectories of a batch have different entries: "
                f"{sorted(names)} and {sorted(each)}"
            )

    # Rows are padded to the longest trajectory of the batch. Images are lists, not tensors.
    lengths = [each["input_ids"].shape[1] for each in trajectories]
    longest = max(lengths)
    joined = {}
    for name in names:
        if name != IMAGES:
            widened = [_widened(name, each, longest) for each in trajectories]
            joined[name] = torch.cat(widened)
    return with_images(joined, join_images(trajectories))


def _with_truncated(trajectory: Trajectory) -> Trajectory:
    n_rows = len(trajectory["rewards"])
    complete = torch.zeros(n_rows, dtype=torch.bool)
    return {_TRUNCATED: complete, **trajectory}


def without_choice(trajectory: Trajectory) -> Trajectory:
    """The trajectory with empty ``routed_experts``, so that the model routes its tokens, unless it
    has some.
    """
    if ROUTES in trajectory:
        return trajectory
    shape = trajectory["input_ids"].shape
    return {**trajectory, ROUTES: torch.zeros((*shape, 0, 0), dtype=torch.uint8)}


def _widened(name: str, trajectory: Trajectory, length: int) -> Tensor:
    tensor = trajectory[name]
    if not tensor.is_floating_point() and name != ROUTES:
        tensor = tensor.long()

    # An entry per token starts with the shape [n, S]. All others are not padded.
    shape = trajectory["input_ids"].shape
    if tensor.shape[:2] != shape:
        return tensor
    n_rows, n_tokens = shape
    filler_shape = (n_rows, length - n_tokens, *tensor.shape[2:])
    filler = tensor.new_full(filler_shape, _PADDING.get(name, 0))
    return torch.cat([tensor, filler], dim=1)
