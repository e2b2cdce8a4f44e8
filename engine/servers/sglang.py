"""`SGLangServer`: the HTTP calls that update an SGLang server (0.5.23 or newer) and complete
prompts of token ids.

An update is pause, load (which flushes the cache and sets the label), continue, read back, content
check. Requests in flight are retracted: they continue afterwards, and the new weights compute their
KV cache again.

The server answers 400 also if it loaded the weights and could not flush the cache. So after any
refusal it stays paused until a load succeeds. A folder that is not there is refused, too, and
changes nothing. After a load that failed in the middle, the server rolls back to the path that has
just failed, and dies if that fails again. So the client compares all bytes of the folder with its
manifest before it tells the server of it.

Adapters are loaded next to the base, one name per version, while requests go on. An unload waits
for the last request of the adapter, so the client asks for it only after that request.
"""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...utils.errors import PoisonedServerError, PublishError, ServerError
from ..hf.versions import published_file
from .api import KV_CACHE, ModelRequest, ModelResponse
from .client import ServerClient
from .completions import adapter_spans, response_of
from .content_check import ExpectedAnswer
from .groups import GlooGroup, SenderGroup, connected, send_bucket
from .http import Calls, Json, require_key
from .routes import RoutedLayers, decode_flat
from .server_calls import NO_MEMORY, Sleep
from .stream import BucketReader
from .whole_folders import require_whole

_POISONED = (
    "its weights may be in pieces or its cache that of older ones, and it stays paused. Check "
    "that it sees the folder, and tell it again; a good load repairs it"
)
_REFUSED = "it goes on with the adapters it has"
_GRAPHS = "cuda_graph"  # a third part, which sleeps and wakes with the KV cache here
_YES = 200
_NOT_NOW = 503
_KEYS = "is it an SGLang server, and has the client its api_key and admin_key?"


@dataclass(eq=False, repr=False)
class SGLangServer(ServerClient):
    """A client of one SGLang server. It updates weights and adapters, reports the status, and
    completes prompts.

    With SGLang, the seed of a request counts only if the server was started with
    ``--enable-deterministic-inference``. Log-probabilities include the temperature, and leave out
    top-p and top-k.

    It can be pickled. A copy does not know which adapters were loaded, so use one client to load
    them and to generate.

        server = SGLangServer("http://10.0.0.5:30000", api_key=key, admin_key=admin_key)

    Attributes:
        url, timeout_s, status_timeout_s, generation_timeout_s, dtype, mirror, served_name: as for
            `VLLMServer`.
        api_key: the server's ``--api-key``.
        admin_key: the server's ``--admin-api-key``. A server with this key accepts no other key for
            updates.
    """

    _how_to_temper: ClassVar[str] = "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB"
    _key_advice: ClassVar[str] = _KEYS
    _kept_free: ClassVar[int] = 6
    _no_memory_for: ClassVar[str | None] = "exceeds the maximum allowed length"
    _: KW_ONLY
    admin_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require_key(f"admin_key of {self.name}", self.admin_key)
        self._paused = False  # how this client left the server
        self._group_name = ""
        self._is_known = False  # whether it had its name once
        self._layers: RoutedLayers | None = None  # of the published model

    # Updates of all weights

    def _load_weights(self, calls: Calls, path: str, label: str) -> None:
        # A mirror has compared everything, and its folder may be on another host.
        if self.mirror is None:
            require_whole(calls, path)

        # The load also sets the label, and flushes the cache.
        self._pause(calls, "pause")
        asleep = self._wake_weights(calls)
        load: Json = {
            "model_path": path,
            "weight_version": _loaded_label(label, asleep),
            "flush_cache": True,
            "abort_all_requests": False,
        }
        self._require_done(calls, "load", "/update_weights_from_disk", load, what="the load")
        self._serve_loaded(calls, label, asleep)

    def _send_weights(
        self, group: SenderGroup, buckets: BucketReader, calls: Calls, label: str
    ) -> None:
        self._pause(calls, "pause")
        asleep = self._wake_weights(calls)

        # The last bucket flushes the cache.
        self._begin_update(calls)
        for bucket in buckets:
            body: Json = {
                "names": bucket.names,
                "dtypes": bucket.dtype_names,
                "shapes": bucket.shapes,
                "group_name": self._group_name,
                "load_format": "flattened_bucket",
                "flush_cache": bucket.last,
            }
            tell = partial(self._command, calls, "/update_weights_from_distributed", body)
            send_bucket(group, buckets, bucket, calls, tell)
        self._command(calls, "/end_weight_update", {})

        self._set_label(calls, _loaded_label(label, asleep))
        self._serve_loaded(calls, label, asleep)

    def _serve_loaded(self, calls: Calls, label: str, asleep: bool) -> None:
        """Serve the loaded weights. If the KV cache sleeps, it wakes up first, and the label said
        so until now.
        """
        if asleep:
            self._wake(calls, KV_CACHE, Sleep((KV_CACHE,), label))
            self._set_label(calls, label)
        self._go_on(calls)

    def _begin_update(self, calls: Calls) -> None:
        body = {"selector": "all"}
        try:
            self._command(calls, "/begin_weight_update", body)
        except PoisonedServerError:
            # A failed update or a killed publisher left its own open.
            self._command(calls, "/end_weight_update", {})
            self._command(calls, "/begin_weight_update", body)

    def _form_group(self, calls: Calls, buckets: BucketReader) -> SenderGroup:
        # A worker for each GPU of tensor parallelism, and no further ones.
        told = self._server_info(calls, "join")
        with calls.reading("what GET /server_info says of its workers"):
            workers = int(told["tp_size"])
            apart = {key: told[key] for key in ("dp_size", "pp_size") if told[key] != 1}
        if apart:
            raise calls.refuse(
                f"it was started with {apart}, and weights are sent to servers that have 1 of each"
            )

        # The server keeps an old group until it is told, unless it was restarted.
        if self._group_name:
            old = {"group_name": self._group_name}
            with suppress(PublishError):
                self._administer(calls, "join", "/destroy_weights_update_group", old)

        # SGLang looks for the group under these prefixes in the store.
        name = f"holdfast-{uuid.uuid4().hex[:12]}"
        self._group_name = name
        group = GlooGroup(calls.url, workers, buckets.patience_s, (name, f"{name}/", "cpu/"))

        def join(info: Json) -> None:
            body = {
                **info,
                "group_name": name,
                "backend": "gloo",
            }
            path = "/init_weights_update_group"
            self._require_done(calls, "join", path, body, None, _KEYS)

        return connected(group, calls, join)

    def _command(self, calls: Calls, path: str, body: Json) -> None:
        """Send a request of an update by buckets. After a refusal the weights may be in pieces."""
        self._require_done(calls, "load", path, body)

    def _require_done(
        self,
        calls: Calls,
        phase: str,
        path: str,
        body: Json,
        error: type[ServerError] | None = PoisonedServerError,
        advice: str = _POISONED,
        what: str | None = None,
    ) -> None:
        """Send a request, and raise ``error`` if it was not carried out."""
        done = self._administer(calls, phase, path, body, error=error, advice=advice)
        if done.get("success") is not True:
            what = what or f"POST {path}"
            raise calls.refuse(f"{what} was answered with {done}; {advice}", error)

    # Completions

    def _completion(self, request: ModelRequest, adapter: str | None) -> tuple[str, Json]:
        body = _request_body(request.input_ids, _sampling_params(request))
        images = request.images
        if images is not None:
            body["input_ids"] = list(images.token_ids)
            body["image_data"] = images.urls
            body["return_prompt_token_ids"] = True
            body["sampling_params"]["logit_bias"] = images.logit_bias
        start = request.routes_from
        if start is not None:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = start
        if request.rid:
            body["rid"] = request.rid
        if adapter is not None:
            body["lora_path"] = adapter
        return "/generate", body

    def _read_completion(
        self, request: ModelRequest, answer: Json, adapter: str | None
    ) -> ModelResponse:
        meta = answer["meta_info"]
        spans = meta["weight_versions"]
        if adapter is not None:
            # The answer names no adapter, but SGLang refuses an unknown one.
            spans = adapter_spans(adapter, adapter, spans)

        sampled = meta["output_token_logprobs"]
        tokens = [token for _, token, *_ in sampled]
        logprobs = [logprob for logprob, *_ in sampled]

        finish = meta["finish_reason"]
        if finish["type"] == "stop":
            self._require_stop(request, tokens, finish["matched"])
        return response_of(request, tokens, logprobs, spans, finish["type"])

    async def _read_routes(self, answer: Json) -> np.ndarray:
        text = answer["meta_info"].get("routed_experts")
        return await decode_flat(text, self._layers)

    def _returns_routes(self, calls: Calls) -> object:
        return self._server_info(calls, "look").get("enable_return_routed_experts")

    def _read_expected(self, path: str) -> ExpectedAnswer | None:
        config = published_file(path, "config.json")
        self._layers = RoutedLayers.of(config.parent) or self._layers
        return super()._read_expected(path)

    def _require_stop(self, request: ModelRequest, tokens: Sequence[int], matched: object) -> None:
        """Raise ValueError unless a completion stopped at its last token.

        SGLang replaces a token outside the vocabulary by a stop token, and then says that a text
        was found.
        """
        if matched != tokens[-1]:
            raise ValueError(f"it stopped at {matched!r}; expected its last token, {tokens[-1]}")
        wanted = request.gconfig.stop_token_ids
        if matched not in wanted:
            self._warn_once(
                "%s ends completions at token %d, an end-of-sequence token of its model, although "
                "stop_token_ids is %s. Such completions count as complete. List the token there, "
                "because vLLM would go on",
                matched,
                list(wanted),
            )

    # Name, label, pause and sleep

    def require_name(self, timeout_s: float) -> None:
        """Raise ServerError if the server of ``served_name`` does not answer. After its first
        answer, its key is enough.
        """
        # A call with this name waits until a load has ended.
        if not self._is_known:
            super().require_name(timeout_s)
            self._is_known = True
        with self._calls("", timeout_s, ServerError) as calls:
            self._models(calls)

    def _own_names(self, calls: Calls) -> list[str]:
        # A load replaces the name in the list of models by its path.
        name = self._server_info(calls, "look").get("served_model_name")
        if name is None:
            raise calls.refuse(
                "GET /server_info does not say which model it serves (served_model_name), so it "
                "may be another server"
            )
        return [str(name)]

    def _ask_label(self, calls: Calls) -> Json:
        return calls.get("read back", "/model_info", key=self.api_key, advice=_KEYS)

    def _set_label(self, calls: Calls, label: str) -> None:
        body = {
            "new_version": label,
            "abort_all_requests": False,
        }
        self._administer(calls, "label", "/update_weight_version", body)

    def _is_paused(self, calls: Calls) -> bool:
        # A healthy server that is not ready is paused. One that was found unhealthy, as by a look
        # at /health during a pause, is never ready.
        ready = calls.status_of("read back", "/ready")
        if ready == _NOT_NOW:
            healthy = calls.status_of("read back", "/ping", key=self.api_key) == _YES
            return healthy or self._paused
        return self._paused and ready != _YES

    def _pause(self, calls: Calls, phase: str) -> None:
        self._paused = True
        self._administer(calls, phase, "/pause_generation", {"mode": "retract"}, advice=_KEYS)

    def _go_on(self, calls: Calls) -> None:
        self._administer(calls, "resume", "/continue_generation", {})
        self._paused = False

    def _keeps_weights(self, calls: Calls) -> bool:
        told = self._server_info(calls, "sleep")
        with calls.reading("what GET /server_info says of sleep"):
            if not told["enable_memory_saver"]:
                raise calls.refuse(
                    "it would free no memory while it sleeps; start it with --enable-memory-saver"
                )
            return bool(told["enable_weights_cpu_backup"])

    def _read_sleep(self, calls: Calls) -> Sleep:
        asleep = super()._read_sleep(calls)
        if asleep.changing:
            raise calls.refuse(
                f"its label is {asleep.label}: it was cut off while it fell asleep or woke up, "
                "and SGLang does not say which parts are awake; restart it"
            )
        return asleep

    def _put_to_sleep(self, calls: Calls, before: Sleep, asleep: Sleep, level: int) -> None:
        self._pause(calls, "sleep")

        # SGLang dies of a second release.
        tags = [tag for tag in asleep.tags if tag not in before.tags]
        if tags:
            self._set_label(calls, replace(asleep, changing=True).label)
            self._tell_memory(calls, "sleep", "/release_memory_occupation", tags, _KEYS)
        self._set_label(calls, asleep.label)

    def _wake(self, calls: Calls, tag: str, asleep: Sleep) -> None:
        self._set_label(calls, replace(asleep, changing=True).label)
        self._tell_memory(calls, "wake", "/resume_memory_occupation", [tag], NO_MEMORY)

    def _tell_memory(
        self, calls: Calls, phase: str, path: str, tags: list[str], advice: str
    ) -> None:
        if KV_CACHE in tags:
            tags = [*tags, _GRAPHS]
        body = {"tags": tags}
        calls.tell(phase, path, body, key=self._strongest_key, advice=advice)

    def _server_info(self, calls: Calls, phase: str) -> Json:
        return calls.get(phase, "/server_info", key=self.api_key, advice=_KEYS)

    def _administer(self, calls: Calls, phase: str, path: str, body: Json, **options: Any) -> Json:
        return calls.post(phase, path, body, key=self._strongest_key, **options)

    @property
    def _strongest_key(self) -> str | None:
        return self.admin_key or self.api_key

    # Content checks

    def _generate(
        self, calls: Calls, ids: Sequence[int], temperature: float, **options: Any
    ) -> Json:
        params = {
            "max_new_tokens": 1,
            "temperature": temperature,
        }
        body = _request_body(ids, params) | options
        return calls.post("check", "/generate", body, key=self.api_key, advice=_KEYS)

    def _prompt_logprobs(
        self, calls: Calls, ids: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        options: Json = {"logprob_start_len": 0}
        if adapter is not None:
            options["lora_path"] = adapter
        answer = self._generate(calls, ids, 1.0, **options)

        # The first token has no log-probability.
        with calls.reading("its log-probabilities of the prompt"):
            entries = answer["meta_info"]["input_token_logprobs"][1:]
            pairs = zip(ids[1:], entries, strict=True)
            return [_logprob_of(token, entry) for token, entry in pairs]

    def _ask_checksums(self, calls: Calls) -> Json:
        return self._administer(calls, "checksums", "/weights_checker", {"action": "checksum"})

    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        answer = self._generate(calls, [1], temperature, top_logprobs_num=5)
        with calls.reading("its log-probabilities"):
            entries = answer["meta_info"]["output_top_logprobs"][0]
            return {token: logprob for logprob, token, *_ in entries}

    # Adapters

    def _load_adapter(self, calls: Calls, name: str, path: str) -> None:
        body = {
            "lora_name": name,
            "lora_path": path,
        }
        self._require_done(calls, "load", "/load_lora_adapter", body, PublishError, _REFUSED)

    def _unload_adapter(self, calls: Calls, name: str) -> None:
        body = {"lora_name": name}
        self._require_done(calls, "unload", "/unload_lora_adapter", body, PublishError, _REFUSED)

    def _withdraw(self, calls: Calls) -> None:
        self._paused = True
        self._administer(calls, "withdraw", "/pause_generation", {"mode": "abort"})


def _loaded_label(label: str, asleep: bool) -> str:
    """Label after a load. It notes a KV cache that goes on sleeping."""
    return Sleep((KV_CACHE,), label).label if asleep else label


def _request_body(ids: Sequence[int], sampling_params: Json) -> Json:
    return {
        "input_ids": list(ids),
        "sampling_params": sampling_params,
        "return_logprob": True,
    }


def _logprob_of(token: int, entry: Sequence[Any]) -> float:
    if entry[1] != token:
        raise ValueError(f"a log-probability of token {entry[1]} where {token} was asked for")
    return float(entry[0])


def _sampling_params(request: ModelRequest) -> Json:
    """Sampling parameters. ``ignore_eos`` also switches ``stop_token_ids`` off."""
    gconfig = request.gconfig
    stops = list(gconfig.stop_token_ids)
    params: Json = {
        "max_new_tokens": gconfig.max_new_tokens,
        "min_new_tokens": gconfig.min_new_tokens if stops else 0,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k or -1,
        "stop_token_ids": stops,
        "ignore_eos": not stops,
        "skip_special_tokens": False,
    }
    if request.seed is not None:
        params["sampling_seed"] = request.seed
    return params
