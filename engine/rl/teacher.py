"""Teachers for on-policy distillation: models that score the tokens of the student's rollouts.

A teacher is a second engine (`EngineTeacher`) or inference servers (`ServerTeacher`). `PPOActor`
asks it in `compute_advantages` and saves its identity with the engine, so that a run does not go on
with another teacher unnoticed.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from ...utils.distributed import all_ranks_succeed, gather_objects, rank_zero_decides
from ...utils.errors import BatchError, CheckpointMismatchError, ConfigError, ServerError
from ...utils.logging import get_logger
from ..api import Batch
from ..dcp.base_model import base_fingerprint, sample_base
from ..servers.api import ScoringServer
from ..training.batch import IMAGES
from ..training.logprobs import token_logprobs

logger = get_logger(__name__)

_REQUESTS_PER_SERVER = 32  # at a time


class Teacher(Protocol):
    """A model that scores tokens. All ranks of the student call both methods."""

    def identity(self) -> dict[str, str]:
        """What a generation keeps of the teacher: ``model`` for messages, and ``fingerprint``."""
        ...

    def compute_logp(self, batch: Batch, temperature: float) -> Tensor:
        """Log-probability of every token: ``[B, S]`` float32, aligned as
        `PPOActor.compute_logp`.
        """
        ...


class EngineTeacher:
    """A teacher in the processes of the student: an initialized engine without an optimizer.

        teacher_config = PPOActorConfig(path="Qwen/Qwen3-8B", optimizer=None)
        engine = FSDPEngine(teacher_config)
        engine.create_process_group()
        engine.initialize(None, spec)
        actor = PPOActor(config, student, EngineTeacher(engine))

    It needs the vocabulary of the student. Its identity is the bits of its weights, whatever the
    world size.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def identity(self) -> dict[str, str]:
        """See `Teacher`."""
        # Each rank has the fingerprint of its part.
        parameters = dict(self.engine.model.named_parameters())
        share = sample_base(parameters)
        shares = gather_objects(share, self.engine.control_group)
        return {
            "model": self.engine.config.path,
            "fingerprint": base_fingerprint(shares),
        }

    def compute_logp(self, batch: Batch, temperature: float) -> Tensor:
        """See `Teacher`."""

        def logprobs(output: Any, micro_batch: Batch) -> Tensor:
            input_ids = micro_batch["input_ids"]
            cu_seqlens = micro_batch["cu_seqlens"]
            return token_logprobs(output, input_ids, cu_seqlens, temperature)[0]

        return self.engine.forward_batch(batch, logprobs)


class ServerTeacher:
    """A teacher on vLLM or SGLang servers, which all serve the same model.

        teacher = ServerTeacher([VLLMServer("http://10.0.0.7:8000")], student)
        actor = PPOActor(config, student, teacher)

    Rows are spread over the servers, and a row whose server fails goes to the next one. The
    identity is the name of their model.

    Args:
        servers: at least one. They are told of no weights.
        engine: the student. Each row is scored once, also if several ranks share it.

    Raises:
        ConfigError: there is no server, or the student samples at another temperature than 1, at
            which servers score.
    """

    def __init__(
        self,
        servers: Sequence[ScoringServer],
        engine: Any,
    ) -> None:
        if not servers:
            raise ConfigError("a teacher needs at least one server; there is none")
        temperature = engine.config.temperature
        if temperature != 1.0:
            raise ConfigError(
                f"config key 'temperature' is {temperature}, but servers score tokens at "
                "temperature 1; sample at 1, or take an EngineTeacher"
            )
        self.servers = list(servers)
        self.engine = engine

    def identity(self) -> dict[str, str]:
        """See `Teacher`.

        Raises:
            ConfigError: the servers serve different models.
            ServerError: one of them does not answer.
        """

        def ask() -> dict[str, str]:
            models = {server.name: server.served_model() for server in self.servers}
            names = sorted(set(models.values()))
            if len(names) > 1:
                raise ConfigError(f"the servers of a teacher must serve one model; found {models}")
            name = names[0]
            return {
                "model": name,
                "fingerprint": f"served as {name}",
            }

        return rank_zero_decides(ask, self.engine.control_group)

    def compute_logp(self, batch: Batch, temperature: float) -> Tensor:
        """See `Teacher`.

        Raises:
            BatchError: the batch has images.
            PromptError: a row does not fit the context or the vocabulary of the servers.
            ServerError: every server failed for a row.
            PeerError: another rank failed.
        """
        if IMAGES in batch:
            raise BatchError(
                f"the batch has {IMAGES!r}, but servers score text alone; take an EngineTeacher"
            )
        scored: Tensor | None = None
        with all_ranks_succeed("asking the teacher", self.engine.control_group):
            if self.engine.is_data_parallel_head():
                scored = self._score(batch)

        # Ranks with the same data must train on the same numbers, and a server may not repeat them.
        peers = self.engine.context_and_model_parallel_group
        if peers is not None:
            scored = rank_zero_decides(lambda: scored, peers)
        assert scored is not None
        return scored.to(batch["input_ids"].device)

    def _score(self, batch: Batch) -> Tensor:
        # Servers get rows without padding.
        attended = batch["attention_mask"].bool().cpu()
        input_ids = batch["input_ids"].cpu()
        rows = []
        for ids, mask in zip(input_ids, attended, strict=True):
            rows.append(ids[mask].tolist())

        result = torch.zeros(attended.shape)
        n_threads = _REQUESTS_PER_SERVER * len(self.servers)
        with ThreadPoolExecutor(n_threads, "teacher") as threads:
            numbers = range(len(rows))
            answers = threads.map(self._score_row, numbers, rows)
            for row, logprobs in enumerate(answers):
                # The first token has no log-probability.
                scores = torch.tensor([0.0, *logprobs])
                result[row, attended[row]] = scores
        return result

    def _score_row(
        self,
        row: int,
        ids: list[int],
    ) -> list[float]:
        failure: ServerError | None = None
        for server in self._in_turn(row):
            try:
                return server.prompt_logprobs(ids)
            except ServerError as error:
                logger.warning("row %d goes to the next server of the teacher: %s", row, error)
                failure = error
        assert failure is not None
        raise failure

    def _in_turn(self, row: int) -> Iterator[ScoringServer]:
        n_servers = len(self.servers)
        for place in range(n_servers):
            yield self.servers[(row + place) % n_servers]


class KnownTeacher:
    """The identity of a teacher, as the engine saves it. Refuses a generation that another one
    taught.
    """

    def __init__(self, identity: dict[str, str], allow_other: bool) -> None:
        self._identity = identity
        self._allow_other = allow_other

    def state_dict(self) -> dict[str, Any]:
        """The identity."""
        return self._identity

    def check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raise CheckpointMismatchError if the generation is of another teacher."""
        if state_dict["fingerprint"] == self._identity["fingerprint"]:
            return
        differ = (
            f"the run was taught by {_told(state_dict)}, and this job has the teacher "
            f"{_told(self._identity)}"
        )
        if not self._allow_other:
            raise CheckpointMismatchError(
                f"{differ}; start it with the teacher of before, or set config key "
                "'allow_other_teacher' to true"
            )
        logger.warning("%s, as 'allow_other_teacher' allows", differ)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the own identity, which the next generation has."""


def _told(identity: dict[str, Any]) -> str:
    return f"{identity['model']} ({identity['fingerprint']})"


def distill_advantages(
    teacher_logp: Tensor,
    logprobs: Tensor,
    loss_mask: Tensor,
) -> Tensor:
    """``log p_teacher - log p_student`` of every loss token: ``[B, S]`` float32, 0 at others.

    With it as advantage, the gradient of the policy is that of the reverse KL to the teacher at
    each token, without the effect on later tokens. Lu and Thinking Machines Lab, "On-Policy
    Distillation", 2025, https://thinkingmachines.ai/blog/on-policy-distillation/.
    """
    log_ratio = teacher_logp.float() - logprobs.float()
    return torch.where(loss_mask.bool(), log_ratio, 0.0)
