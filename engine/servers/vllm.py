"""A vLLM server (0.32 or newer) that serves published weights, and completes prompts of token ids.

One update is pause, load, reset the prefix cache, label, resume, read back, and compare contents. It is always the
whole cycle, whatever the label says: a publisher that was killed leaves the server paused. Requests in flight are kept;
their KV cache is computed again by the new weights, and the server records which label sampled which token.

A load that failed leaves layers without weights, and the next completion would kill the server. So it stays paused, and
the next good load repairs it.

The server needs ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``; see docs/servers.md.
"""

import os
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from tenacity import RetryError, Retrying, retry_if_result, stop_after_attempt, wait_fixed

from ...utils.config import require_choice
from ...utils.errors import PoisonedServerError, PublishError, ServerError, WrongContentError
from ...utils.logging import get_logger
from .api import GenerationHyperparameters, ModelRequest, ModelResponse, ServerStatus, labelled_version, weights_label
from .completions import response_of, samples_plainly, untempered
from .http import Calls, HTTPServer, Json
from .probe import ContentCheck

logger = get_logger(__name__)

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"
_POISONED = (
    "its weights are in pieces, and it stays paused: do not resume it, a completion would kill it. Check that it sees "
    "the folder, and tell it again; a good load repairs it"
)
_SCALE_OUT = "start the server with --enable-scale-out, and give the client its api_key if it has one"
HOLDFAST_DISK = "holdfast_disk"
"""The weight-transfer backend of ``plugins/vllm`` that checks a folder before it loads it."""
_NO_PLUGIN = (
    "install holdfast-vllm beside vLLM and start the server with --weight-transfer-config "
    """'{"backend": "holdfast_disk"}', or leave out transfer"""
)
_REFUSED = "refused, the weights stay as they are"
"""What the plugin says of a folder that it has not begun to load."""
_NO_LABEL = "default"
"""What a server that has just been started says of its weights."""


@dataclass(eq=False, repr=False)
class VLLMServer(HTTPServer):
    """A client of one vLLM server: an `ObservableServer` and a `GenerationServer`; picklable.

    Attributes:
        url: of the server, ``http://host:port``; a user and password in it are sent, and shown nowhere.
        api_key: what the server was given as ``--api-key``.
        timeout_s: longest time that one update, or one question, may take.
        generation_timeout_s: longest time that one completion may take, waiting on a paused server included.
        dtype: what the server computes in (``float32``, ``float16`` or ``bfloat16``), where that is coarser than the
            dtype that folders are stored in; None: the same.
        transfer: how it loads: `HOLDFAST_DISK`, where the server was started with this backend of the plugin
            ``holdfast-vllm``; None: by vLLM's ``reload_weights``.
    """

    _: KW_ONLY
    dtype: str | None = None
    transfer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("transfer", self.transfer, (None, HOLDFAST_DISK))
        self._content = ContentCheck(self.dtype)
        self._salt: str | None = None

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Have the server serve the published folder ``path``, and see that it does; returns ``version``.

        Raises:
            UnreachableServerError: it could not be reached, or the connection broke.
            SlowServerError: it did not finish within ``timeout_s``.
            PoisonedServerError: it failed to load; it stays paused until a load succeeds.
            WrongContentError: it answers by other weights; it was paused again.
            PublishError: it refused, or says something else than expected; it may be paused. Refused by
                ``holdfast_disk`` it goes on with the weights it has.
        """
        label, probe = weights_label(path, version), self._probe(path)
        with self._update(path, version) as calls:
            calls.post("pause", "/pause", params={"mode": "keep", "clear_cache": "true"}, advice=_DEV_MODE)
            self._load(calls, path, label)
            self._reset_prefix_cache(calls)
            calls.post("label", "/update_weight_version", {"new_version": label})
            calls.post("resume", "/resume")
            if (status := self._status(calls)) != ServerStatus(label, paused=False):
                raise calls.refuse(f"after it, the server says {status}; expected the label {label}, not paused")
            if probe is not None:
                answer = self._prompt_logprobs(calls, probe.prompt_ids)
                if problem := self._content.problem(path, probe, answer):
                    self._withdraw(calls)
                    raise calls.refuse(
                        f"{problem}. It was paused again: tell it again, or restart it", WrongContentError
                    )
        return version

    def status(self) -> ServerStatus:
        """What the server says that it serves.

        Raises:
            ServerError: it could not be reached, or did not answer as expected.
        """
        with self._calls("", self.timeout_s, ServerError) as calls:
            return self._status(calls)

    def _load(self, calls: Calls, path: str, label: str) -> None:
        if self.transfer == HOLDFAST_DISK:
            self._load_checked(calls, path, label)
            return
        load = {"method": "reload_weights", "kwargs": {"weights_path": os.fspath(path)}}
        calls.post("load", "/collective_rpc", load, error=PoisonedServerError, advice=_POISONED)

    def _load_checked(self, calls: Calls, path: str, label: str) -> None:
        """Load by the plugin, which takes no layer apart before it has compared every file with the manifest."""
        start = partial(calls.post, "load", "/start_weight_update", advice=_NO_PLUGIN)
        try:
            start()
        except PublishError:  # a publisher that was killed has left its update open; if not, this says why
            calls.post("load", "/finish_weight_update", {}, advice=_NO_PLUGIN)
            start()
        folder = {"path": os.fspath(path), "manifest": label.partition("-")[2]}
        try:
            calls.post("load", "/update_weights", {"update_info": folder}, error=PoisonedServerError, advice=_POISONED)
        except PoisonedServerError as error:
            if _REFUSED not in str(error):
                raise
            calls.post("resume", "/resume")
            raise calls.refuse(f"it goes on with the weights it has: {error}") from error
        calls.post("load", "/finish_weight_update", {})

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt; a completion ends at ``stop_token_ids``, not at the model's own end-of-sequence token.

        Log-probabilities are those of the sampled distribution only if the server was started so: `check_generation`.

        Raises:
            ServerError: the server could not be reached, failed, aborted the request, or has not been told weights.
        """
        body: Json = {"token_ids": list(request.input_ids), "sampling_params": _sampling_params(request)}
        if request.rid:
            body["request_id"] = request.rid
        if self._salt is not None:  # blocks of the prefix cache that other weights computed are not found under it
            body["cache_salt"] = self._salt
        answer = await self._ask("/inference/v1/generate", body)
        try:
            choice = answer["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            spans = choice["weight_versions"]
            response = response_of(request, choice["token_ids"], logprobs, spans, choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerError(f"{self.name}: a completion cannot be used: {type(error).__name__}: {error}") from error
        self._salt = spans[-1]["version"]
        return response

    def check_generation(self, gconfig: GenerationHyperparameters) -> None:
        """See that the server completes prompts of token ids, and tells the log-probabilities of what it samples from.

        To be called once, before the first completion. It samples two tokens.

        Raises:
            ServerError: it does not; the message says how to start it.
        """
        with self._calls(", asked for two tokens", self.timeout_s, ServerError) as calls:
            plain = self._top_logprobs(calls, 1.0)
            if not samples_plainly(gconfig) and (problem := untempered(plain, self._top_logprobs(calls, 0.5))):
                raise calls.refuse(f"{problem}; start the server with --logprobs-mode processed_logprobs")

    def _status(self, calls: Calls) -> ServerStatus:
        label = calls.get("read back", "/weight_info", advice=_DEV_MODE).get("weight_version")
        paused = calls.get("read back", "/is_paused", advice=_DEV_MODE).get("is_paused")
        if not isinstance(label, str) or not isinstance(paused, bool):
            raise calls.refuse(f"the server says that its label is {label!r} and paused is {paused!r}")
        return ServerStatus(None if labelled_version(label) is None else label, paused)

    def _reset_prefix_cache(self, calls: Calls) -> None:
        retrying = Retrying(
            retry=retry_if_result(lambda done: not done), stop=stop_after_attempt(5), wait=wait_fixed(0.2)
        )
        try:
            retrying(lambda: calls.post("reset cache", "/reset_prefix_cache").get("success") is True)
        except RetryError:
            raise calls.refuse(
                "the prefix cache could not be reset, so that tokens would come from blocks that the old weights "
                "computed; the server stays paused: tell it again"
            ) from None

    def _generate(self, calls: Calls, ids: Sequence[int], **sampling: Any) -> Json:
        body = {"token_ids": list(ids), "sampling_params": {"max_tokens": 1, "detokenize": False, **sampling}}
        return calls.post("check", "/inference/v1/generate", body, key=self.api_key, advice=_SCALE_OUT)

    def _prompt_logprobs(self, calls: Calls, ids: Sequence[int]) -> list[float]:
        """Those of all but the first token; the prefix cache is not read for them."""
        answer = self._generate(calls, ids, prompt_logprobs=0)
        try:
            entries = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in entries]
        except (KeyError, TypeError, ValueError) as error:
            raise calls.refuse(
                f"no log-probabilities of the prompt came back ({type(error).__name__}: {error})"
            ) from error

    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        """The most likely first tokens behind some prompt, with their log-probabilities."""
        answer = self._generate(calls, [1], temperature=temperature, logprobs=5)
        try:
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return {entry["token_id"]: entry["logprob"] for entry in entries}
        except (KeyError, IndexError, TypeError) as error:
            raise calls.refuse(f"no log-probabilities came back ({type(error).__name__}: {error})") from error

    def _withdraw(self, calls: Calls) -> None:
        """Have the server answer nothing, and abort what it has begun: those tokens are of other weights."""
        try:
            calls.post("withdraw", "/pause", params={"mode": "abort", "clear_cache": "true"})
            calls.post("withdraw", "/update_weight_version", {"new_version": _NO_LABEL})
        except ServerError as error:
            logger.warning("could not be paused after wrong content was found: %s", error)


def _sampling_params(request: ModelRequest) -> Json:
    gconfig = request.gconfig
    params: Json = {
        "n": 1,
        "max_tokens": gconfig.max_new_tokens,
        "min_tokens": gconfig.min_new_tokens,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k,
        "stop_token_ids": list(gconfig.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    return params if request.seed is None else params | {"seed": request.seed}
