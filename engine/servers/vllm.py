"""A vLLM server (0.32 or newer) that serves published weights, and completes prompts of token ids.

One update is pause, load, reset the prefix cache, label, resume, read back, and compare contents. It is always the
whole cycle, whatever the label says: a publisher that was killed leaves the server paused. Requests in flight are kept;
their KV cache is computed again by the new weights, and the server records which label sampled which token.

A load that failed leaves layers without weights, and the next completion would kill the server. So it stays paused. The
next good load repairs it, unless a part of the bad folder had been read already: the server may then fail once more, or
serve a mixture, which the comparison of contents finds, and has to be restarted.

Adapters are loaded beside the base under a name for each version, while requests go on (`adapted`, `vllm_adapters`).

The server needs ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``; see docs/servers.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from tenacity import RetryError, Retrying, retry_if_result, stop_after_attempt, wait_fixed

from ...utils.config import require_choice
from .adapted import AdaptedServer
from .adapters import AdapterFacts, refuse_adapters
from .api import ModelRequest, ModelResponse, ServerStatus, labelled_version, weights_label
from .checked import unexpected
from .completions import adapter_spans, response_of
from .http import Calls, Json
from .vllm_adapters import list_adapters, load_adapter, require_room, unload_adapter
from .vllm_loading import TRANSFERS, load_folder, send_folder

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"
_SCALE_OUT = "start the server with --enable-scale-out, and give the client its api_key if it has one"
_NO_LABEL = "default"
"""What a server that has just been started says of its weights."""


@dataclass(eq=False, repr=False)
class VLLMServer(AdaptedServer):
    """A client of one vLLM server: an `ObservableServer`, `BroadcastServer`, `AdapterServer` and `GenerationServer`;
    picklable. A copy does not know which adapters the server was told of: let the client that tells it also ask it.

    Attributes:
        url: of the server, ``http://host:port``; a user and password in it are sent, and shown nowhere.
        api_key: what the server was given as ``--api-key``.
        timeout_s: longest time that one update, or `check_generation`, may take; None: as long as the publication
            allows (`WeightUpdateMeta.timeout_s`), and 300 s without one.
        status_timeout_s: longest time that `status` may take.
        generation_timeout_s: longest time that one completion may take, waiting on a paused server included.
        dtype: what the server computes in (``float32``, ``float16`` or ``bfloat16``), where that is coarser than the
            dtype that folders are stored in; None: the same.
        transfer: how it loads a folder. None: by vLLM's ``reload_weights``. ``"holdfast_disk"``, where it was started
            with this backend of ``plugins/vllm``: the folder is compared with its manifest first.
    """

    _: KW_ONLY
    transfer: str | None = None

    _how_to_temper: ClassVar[str] = "start the server with --logprobs-mode processed_logprobs"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("transfer", self.transfer, TRANSFERS)
        self._salt: str | None = None

    def update_weights_from_disk(self, path: str, version: int) -> int:
        """Have the server serve the published folder ``path``, and see that it does; returns ``version``.

        Raises:
            UnreachableServerError: it could not be reached, or the connection broke.
            SlowServerError: it did not finish within ``timeout_s``.
            PoisonedServerError: it failed to load; it stays paused until a load succeeds.
            WrongContentError: it answers by other weights; it was paused again.
            PublishError: it refused, or says something else than expected; it may be paused. What the plugin refused
                leaves it as it was.
        """
        label = weights_label(path, version)
        return self._serve(path, version, label, lambda calls: load_folder(calls, path, label, self.transfer))

    def update_weights_from_distributed(self, path: str, version: int) -> int:
        """Do as `update_weights_from_disk` does, but send it the weights: it need not see the folder.

        It must have been started with the backend ``holdfast_broadcast`` of ``plugins/vllm``, and reach any port of
        this host.
        """
        label = weights_label(path, version)
        return self._serve(path, version, label, lambda calls: send_folder(calls, path, self._update_limit_s))

    def _serve(self, path: str, version: int, label: str, load: Callable[[Calls], None]) -> int:
        refuse_adapters(path)
        probe = self._read_probe(path)
        with self._update(path, version) as calls:
            calls.post("pause", "/pause", params={"mode": "keep", "clear_cache": "true"}, advice=_DEV_MODE)
            load(calls)
            self._reset_prefix_cache(calls)
            calls.post("label", "/update_weight_version", {"new_version": label})
            calls.post("resume", "/resume")
            if (status := self._status(calls)) != ServerStatus(label, paused=False):
                raise self._withdrawn(calls, unexpected(status, label))
            self._check_content(calls, path, probe)
            self._leave_adapters(calls)
        return version

    async def agenerate(self, request: ModelRequest) -> ModelResponse:
        """Complete one prompt; a completion ends at ``stop_token_ids``, not at the model's own end-of-sequence token.

        Log-probabilities are those of the sampled distribution only if the server was started so: `check_generation`.

        Raises:
            PromptError: the prompt is empty, too long, or has token ids that the model has not; it was not sent.
            ServerError: the server could not be reached, failed, aborted the request, or has not been told weights.
        """
        await self._require_fit(request)
        body: Json = {"token_ids": list(request.input_ids), "sampling_params": _sampling_params(request)}
        if request.rid:
            body["request_id"] = request.rid
        with self._adapters.request() as adapter:
            if adapter is not None:  # cached blocks are found under its name and folder only
                body["model"] = adapter
            elif self._salt is not None:  # cached blocks that other weights computed are not found under it
                body["cache_salt"] = self._salt
            answer = await self._ask("/inference/v1/generate", body)
        with self._reading("a completion"):
            choice = answer["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            spans = choice["weight_versions"]
            own = spans if adapter is None else adapter_spans(adapter, answer["model"], spans)
            response = response_of(request, choice["token_ids"], logprobs, own, choice["finish_reason"])
            if adapter is None:
                self._salt = spans[-1]["version"]
            return response

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

    def _require_room(self, calls: Calls, facts: AdapterFacts) -> None:
        require_room(calls, facts)

    def _loaded_adapters(self, calls: Calls) -> list[str]:
        return list_adapters(calls, self.api_key)

    def _load_adapter(self, calls: Calls, name: str, path: str) -> None:
        load_adapter(calls, name, path, self.api_key)

    def _unload_adapter(self, calls: Calls, name: str) -> None:
        unload_adapter(calls, name, self.api_key)

    def _generate(self, calls: Calls, ids: Sequence[int], adapter: str | None = None, **sampling: Any) -> Json:
        body: Json = {"token_ids": list(ids), "sampling_params": {"max_tokens": 1, "detokenize": False, **sampling}}
        if adapter is not None:
            body["model"] = adapter
        return calls.post("check", "/inference/v1/generate", body, key=self.api_key, advice=_SCALE_OUT)

    def _prompt_logprobs(self, calls: Calls, ids: Sequence[int], adapter: str | None = None) -> list[float]:
        answer = self._generate(calls, ids, adapter, prompt_logprobs=0)  # for which the prefix cache is not read
        with calls.reading("its log-probabilities of the prompt"):
            entries = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in entries]

    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        answer = self._generate(calls, [1], temperature=temperature, logprobs=5)
        with calls.reading("its log-probabilities"):
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return {entry["token_id"]: entry["logprob"] for entry in entries}

    def _withdraw(self, calls: Calls, adapter: str | None) -> None:
        if adapter is not None:
            return self._unload_adapter(calls, adapter)
        calls.post("withdraw", "/pause", params={"mode": "abort", "clear_cache": "true"})
        calls.post("withdraw", "/update_weight_version", {"new_version": _NO_LABEL})


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
