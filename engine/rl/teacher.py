"""Teachers for on-policy distillation: models that score the tokens of the student's rollouts.

A teacher is a second engine (`EngineTeacher`) or inference servers (`ServerTeacher`). `PPOActor`
asks it in `compute_advantages` and saves its identity with the engine, so that a run does not go on
with another teacher unnoticed.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from ...utils.distributed import (
    all_ranks_succeed_slowly,
    gather_objects,
    get_world_size,
    rank_zero_decides,
)
from ...utils.errors import (
    BatchError,
    CheckpointMismatchError,
    ConfigError,
    ServerError,
    SlowServerError,
)
from ...utils.logging import get_logger
from ..api import Batch, StateDict, TrainEngine
from ..dcp.base_model import base_fingerprint, sample_base
from ..memory.offloaded import MODEL, with_host_copies
from ..memory.tensors import by_clean_name, reshard
from ..servers.api import ScoringServer
from ..training.batch import IMAGES
from ..training.logprobs import token_logprobs
from .update import loss_mask_of

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

    It needs the vocabulary of the student. Its ranks may share data only if they do in the student,
    too (see `check_student`). Its identity is the bits of its weights, whatever the world size.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def check_student(self, student: TrainEngine) -> None:
        """Raise ConfigError if ranks with the same data in the teacher have different data in the
        student.
        """
        world_size = get_world_size()
        own = world_size // self.engine.data_parallel_world_size
        of_student = world_size // student.data_parallel_world_size
        if of_student % own:
            raise ConfigError(
                f"{own} ranks of the teacher share their data, and {of_student} of the student; "
                "the first must divide the second. Set config key 'backend' of the teacher to "
                f"'fsdp:d{world_size}', which shards it over the same ranks"
            )

    def identity(self) -> dict[str, str]:
        """See `Teacher`."""
        # Each rank has the fingerprint of its part. Offloaded parameters are in host memory.
        model = self.engine.model
        reshard(model)
        named = by_clean_name(model.named_parameters())
        parameters = with_host_copies(model, named, MODEL)
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

    Rows are spread over the servers, and a row whose server fails goes to the next one. A server
    that does not answer is left out until the next batch. The identity is the name of their model.

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
        self._model: str | None = None

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

        identity = rank_zero_decides(ask, self.engine.control_group)
        self._model = identity["model"]
        return identity

    def compute_logp(self, batch: Batch, temperature: float) -> Tensor:
        """See `Teacher`. Rows without a loss token get 0.

        Raises:
            BatchError: the batch has images.
            ConfigError: a server serves another model than before.
            PromptError: a row does not fit the context or the vocabulary of the servers.
            ServerError: every server failed for a row.
            PeerError: another rank failed.
        """
        scored: Tensor | None = None

        def score() -> None:
            nonlocal scored
            if IMAGES in batch:
                raise BatchError(
                    f"the batch has {IMAGES!r}, but servers score text alone; take an EngineTeacher"
                )
            if self.engine.is_data_parallel_head():
                scored = self._score(batch)

        # Servers may take longer than the timeout of the group.
        all_ranks_succeed_slowly("asking the teacher", score, self.engine.control_group)

        # Ranks with the same data must train on the same numbers, and a server may not repeat them.
        peers = self.engine.context_and_model_parallel_group
        if peers is not None:
            scored = rank_zero_decides(lambda: scored, peers)
        assert scored is not None
        return scored.to(batch["input_ids"].device)

    def _score(self, batch: Batch) -> Tensor:
        # Servers get rows without padding, and only those with a loss token.
        attended = batch["attention_mask"].bool().cpu()
        input_ids = batch["input_ids"].cpu()
        numbers = loss_mask_of(batch).any(1).nonzero().flatten().tolist()
        rows = [input_ids[row][attended[row]].tolist() for row in numbers]

        result = torch.zeros(attended.shape)
        n_threads = _REQUESTS_PER_SERVER * len(self.servers)
        with ThreadPoolExecutor(n_threads, "teacher") as threads:
            usable = _UsableServers(self.servers)
            list(threads.map(self._check_model, self.servers, repeat(usable)))
            answers = threads.map(usable.score, numbers, rows)
            for row, logprobs in zip(numbers, answers, strict=True):
                # The first token has no log-probability.
                scores = torch.tensor([0.0, *logprobs])
                result[row, attended[row]] = scores
        return result

    def _check_model(self, server: ScoringServer, usable: "_UsableServers") -> None:
        # The server may have been restarted.
        try:
            model = server.served_model()
        except ServerError as error:
            usable.leave_out(server, error)
            return
        if self._model is not None and model != self._model:
            raise ConfigError(
                f"{server.name} serves {model}, but the teacher is {self._model}; start the "
                "server with that model"
            )


class _UsableServers:
    """The servers that score a batch, without those that did not answer."""

    def __init__(self, servers: Sequence[ScoringServer]) -> None:
        self._servers = list(servers)
        self._lock = Lock()  # rows are scored at the same time
        self._failure: ServerError | None = None  # the last

    def leave_out(self, server: ScoringServer, error: ServerError) -> None:
        """Ask a server no more."""
        with self._lock:
            self._failure = error
            if server in self._servers:
                self._servers.remove(server)
                logger.warning("%s is left out until the next batch: %s", server.name, error)

    def score(self, row: int, ids: list[int]) -> list[float]:
        """`ScoringServer.prompt_logprobs` of the first server that succeeds, or its last error."""
        servers = list(self._servers)
        first = row % max(1, len(servers))
        failure = self._failure
        for server in servers[first:] + servers[:first]:
            # Another row may have found out that it does not answer.
            if server not in self._servers:
                continue
            try:
                return server.prompt_logprobs(ids)
            except SlowServerError as error:
                self.leave_out(server, error)
                failure = error
            except ServerError as error:
                logger.warning("row %d goes to the next server of the teacher: %s", row, error)
                failure = error
        failure = failure or self._failure
        assert failure is not None
        raise failure


class KnownTeacher:
    """The identity of a teacher, as the engine saves it. Refuses a generation that another one
    taught.
    """

    def __init__(self, identity: dict[str, str], allow_other: bool) -> None:
        self._identity = identity
        self._allow_other = allow_other

    def state_dict(self) -> StateDict:
        """The identity."""
        return self._identity

    def check_state_dict(self, state_dict: StateDict) -> None:
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

    def load_state_dict(self, state_dict: StateDict) -> None:
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
