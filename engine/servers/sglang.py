"""`SGLangServer`: the HTTP calls that update an SGLang server (0.5.23 or newer) and complete
prompts of token ids.

An update is pause, load (which flushes the cache and sets the label), continue, read back, content
check. Requests in flight are retracted: they continue afterwards, and the new weights compute their
KV cache again.

The server answers 400 also if it loaded the weights and could not flush the cache. So after any
refusal it stays paused until a load succeeds. After a failed load it rolls back to the path that
has just failed, and dies if that cannot be read. So the client looks at the files before it tells
the server of them.

Adapters are loaded next to the base, one name per version, while requests go on. An unload waits
for the last request of the adapter, so the client asks for it only after that request.
"""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open

from ...utils.errors import CheckpointError, PoisonedServerError, PublishError, ServerError
from ...utils.logging import get_logger
from ...utils.manifest import check_listing
from .api import ModelRequest, ModelResponse
from .client import NO_LABEL, ServerClient
from .generation import adapter_spans, response_of
from .groups import GlooGroup, SenderGroup, connected, send_bucket
from .http import Calls, Json
from .sleep import KV_CACHE, NO_MEMORY, Sleep
from .stream import BucketReader

logger = get_logger(__name__)

_POISONED = (
    "its weights may be in pieces or its cache that of older ones, and it stays paused. Check "
    "that it sees the folder, and tell it again; a good load repairs it"
)
_REFUSED = "it goes on with the adapters it has"
_GRAPHS = "cuda_graph"  # a third part, which sleeps and wakes with the KV cache here
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
        url, timeout_s, status_timeout_s, generation_timeout_s, dtype, mirror: as for `VLLMServer`.
        api_key: the server's ``--api-key``.
        admin_key: the server's ``--admin-api-key``. A server with this key accepts no other key for
            updates.
    """

    _how_to_temper: ClassVar[str] = "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB"
    _key_advice: ClassVar[str] = _KEYS
    _kept_free: ClassVar[int] = 6
    _: KW_ONLY
    admin_key: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._paused = False
        self._group_name = ""
        self._last_label: str | None = None
        self._warned_of_end = False

    def _load_weights(self, calls: Calls, path: str, label: str) -> None:
        if (
            self.mirror is None
        ):  # a mirror has compared everything, and its folder may be on another host
            _require_readable(calls, path)
        self._pause(calls, "pause")
        asleep, half = self._wake_weights(calls), Sleep((KV_CACHE,), label)
        load: Json = {
            "model_path": path,
            "weight_version": half.label if asleep else label,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        loaded = self._administer(
            calls,
            "load",
            "/update_weights_from_disk",
            load,
            error=PoisonedServerError,
            advice=_POISONED,
        )
        if loaded.get("success") is not True:
            raise calls.refuse(
                f"the load was answered with {loaded}; {_POISONED}", PoisonedServerError
            )
        self._awake(calls, half, asleep)

    def _send_weights(self, buckets: BucketReader, calls: Calls, path: str, label: str) -> None:
        serving = self._status(calls).label
        with self._group.open(
            label, serving, lambda: self._form_group(calls, buckets), buckets, calls
        ) as group:
            self._pause(calls, "pause")
            asleep, half = self._wake_weights(calls), Sleep((KV_CACHE,), label)
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
            self._set_label(calls, half.label if asleep else label)
            self._awake(calls, half, asleep)

    def _awake(self, calls: Calls, half: Sleep, asleep: bool) -> None:
        """Serve the loaded weights. If the KV cache sleeps, it wakes up first, and ``half`` was the
        label until now.
        """
        if asleep:
            self._wake(calls, KV_CACHE, half)
            self._set_label(calls, half.weights)
        self._go_on(calls)

    def _begin_update(self, calls: Calls) -> None:
        try:
            self._command(calls, "/begin_weight_update", {"selector": "all"})
        except PoisonedServerError:  # a failed update or a killed publisher left its session open
            self._command(calls, "/end_weight_update", {})
            self._command(calls, "/begin_weight_update", {"selector": "all"})

    def _form_group(self, calls: Calls, buckets: BucketReader) -> SenderGroup:
        told = calls.get("join", "/server_info", key=self.api_key, advice=_KEYS)
        with calls.reading("what GET /server_info says of its workers"):
            workers, apart = (
                int(told["tp_size"]),
                {key: told[key] for key in ("dp_size", "pp_size") if told[key] != 1},
            )
        if apart:
            raise calls.refuse(
                f"it was started with {apart}, and weights are sent to servers that have 1 of each"
            )
        if self._group_name:
            with suppress(
                PublishError
            ):  # else the server keeps it. A restarted server does not have it
                self._administer(
                    calls, "join", "/destroy_weights_update_group", {"group_name": self._group_name}
                )
        self._group_name = name = f"holdfast-{uuid.uuid4().hex[:12]}"
        group = GlooGroup(calls.url, workers, buckets.patience_s, (name, f"{name}/", "cpu/"))

        def join(info: Json) -> None:
            self._command(
                calls,
                "/init_weights_update_group",
                {**info, "group_name": name, "backend": "gloo"},
                None,
            )

        return connected(group, calls, join)

    def _command(
        self,
        calls: Calls,
        path: str,
        body: Json,
        error: type[ServerError] | None = PoisonedServerError,
    ) -> None:
        """Send a request of an update by buckets, and raise ``error`` if it was not carried out."""
        advice = _KEYS if error is None else _POISONED
        done = self._administer(
            calls, "join" if error is None else "load", path, body, error=error, advice=advice
        )
        if done.get("success") is not True:
            raise calls.refuse(f"POST {path} was answered with {done}; {advice}", error)

    def _completion(self, request: ModelRequest, adapter: str | None) -> tuple[str, Json]:
        body = _generation(request.input_ids, _sampling_params(request))
        if (images := request.images) is not None:
            body |= {
                "input_ids": list(images.token_ids),
                "image_data": images.urls,
                "return_prompt_token_ids": True,
            }
            body["sampling_params"]["logit_bias"] = images.logit_bias
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
        if adapter is not None:  # the answer names no adapter, but SGLang refuses an unknown one
            spans = adapter_spans(adapter, adapter, spans)
        tokens = [token for _, token, *_ in meta["output_token_logprobs"]]
        logprobs = [logprob for logprob, *_ in meta["output_token_logprobs"]]
        finish = meta["finish_reason"]
        if finish["type"] == "stop":
            self._require_stop(request, tokens, finish["matched"])
        response = response_of(request, tokens, logprobs, spans, finish["type"])
        return (
            response
            if request.images is None
            else replace(response, input_tokens=list(answer["prompt_token_ids"]))
        )

    def _require_stop(self, request: ModelRequest, tokens: Sequence[int], matched: object) -> None:
        """Raise ValueError unless a completion stopped at its last token.

        SGLang replaces a token outside the vocabulary by a stop token, and then says that a text
        was found.
        """
        if matched != tokens[-1]:
            raise ValueError(f"it stopped at {matched!r}; expected its last token, {tokens[-1]}")
        wanted = request.gconfig.stop_token_ids
        if matched not in wanted and not self._warned_of_end:
            self._warned_of_end = True
            logger.warning(
                "%s ends completions at token %d, an end-of-sequence token of its model, although "
                "stop_token_ids is %s. Such completions count as complete. List the token there, "
                "because vLLM would go on",
                *(self.name, matched, list(wanted)),
            )

    def _label(self, calls: Calls) -> str:
        label = calls.get("read back", "/model_info", key=self.api_key, advice=_KEYS).get(
            "weight_version"
        )
        if not isinstance(label, str):
            raise calls.refuse(f"the server says that its label is {label!r}")
        if label == NO_LABEL and self._last_label not in (None, NO_LABEL):
            self._paused = False  # it was restarted
        self._last_label = label
        return label

    def _set_label(self, calls: Calls, label: str) -> None:
        self._administer(
            calls,
            "label",
            "/update_weight_version",
            {"new_version": label, "abort_all_requests": False},
        )

    def _is_paused(self, calls: Calls) -> bool:
        return (
            self._paused
        )  # SGLang does not report it, so this client remembers how it left the server

    def _pause(self, calls: Calls, phase: str) -> None:
        self._paused = True
        self._administer(calls, phase, "/pause_generation", {"mode": "retract"}, advice=_KEYS)

    def _go_on(self, calls: Calls) -> None:
        self._administer(calls, "resume", "/continue_generation", {})
        self._paused = False

    def _keeps_weights(self, calls: Calls) -> bool:
        told = calls.get("sleep", "/server_info", key=self.api_key, advice=_KEYS)
        with calls.reading("what GET /server_info says of sleep"):
            if not told["enable_memory_saver"]:
                raise calls.refuse(
                    "it would free no memory while it sleeps; start it with --enable-memory-saver"
                )
            return bool(told["enable_weights_cpu_backup"])

    def _sleep_now(self, calls: Calls) -> Sleep:
        asleep = super()._sleep_now(calls)
        if asleep.changing:
            raise calls.refuse(
                f"its label is {asleep.label}: it was cut off while it fell asleep or woke up, "
                "and SGLang does not say which parts are awake; restart it"
            )
        return asleep

    def _put_to_sleep(self, calls: Calls, before: Sleep, asleep: Sleep, level: int) -> None:
        self._pause(calls, "sleep")
        if tags := [
            tag for tag in asleep.tags if tag not in before.tags
        ]:  # SGLang dies of a second release
            self._set_label(calls, replace(asleep, changing=True).label)
            self._tell_memory(calls, "sleep", "/release_memory_occupation", tags, _KEYS)
        self._set_label(calls, asleep.label)

    def _wake(self, calls: Calls, tag: str, asleep: Sleep) -> None:
        self._set_label(calls, replace(asleep, changing=True).label)
        self._tell_memory(calls, "wake", "/resume_memory_occupation", [tag], NO_MEMORY)

    def _tell_memory(
        self, calls: Calls, phase: str, path: str, tags: list[str], advice: str
    ) -> None:
        named = [*tags, _GRAPHS] if KV_CACHE in tags else tags
        calls.tell(phase, path, {"tags": named}, key=self.admin_key or self.api_key, advice=advice)

    def _administer(self, calls: Calls, phase: str, path: str, body: Json, **options: Any) -> Json:
        return calls.post(phase, path, body, key=self.admin_key or self.api_key, **options)

    def _generate(
        self, calls: Calls, ids: Sequence[int], temperature: float, **options: Any
    ) -> Json:
        body = _generation(ids, {"max_new_tokens": 1, "temperature": temperature}) | options
        return calls.post("check", "/generate", body, key=self.api_key, advice=_KEYS)

    def _prompt_logprobs(
        self, calls: Calls, ids: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        named = {} if adapter is None else {"lora_path": adapter}
        answer = self._generate(calls, ids, 1.0, logprob_start_len=0, **named)
        with calls.reading("its log-probabilities of the prompt"):
            entries = zip(ids[1:], answer["meta_info"]["input_token_logprobs"][1:], strict=True)
            return [_logprob_of(token, entry) for token, entry in entries]

    def _ask_checksums(self, calls: Calls) -> Json:
        return self._administer(calls, "checksums", "/weights_checker", {"action": "checksum"})

    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        answer = self._generate(calls, [1], temperature, top_logprobs_num=5)
        with calls.reading("its log-probabilities"):
            return {
                token: logprob
                for logprob, token, *_ in answer["meta_info"]["output_top_logprobs"][0]
            }

    def _load_adapter(self, calls: Calls, name: str, path: str) -> None:
        self._tell_adapter(
            calls, "load", "/load_lora_adapter", {"lora_name": name, "lora_path": path}
        )

    def _unload_adapter(self, calls: Calls, name: str) -> None:
        self._tell_adapter(calls, "unload", "/unload_lora_adapter", {"lora_name": name})

    def _tell_adapter(self, calls: Calls, phase: str, path: str, body: Json) -> None:
        answer = self._administer(calls, phase, path, body, error=PublishError, advice=_REFUSED)
        if answer.get("success") is not True:
            raise calls.refuse(f"POST {path} was answered with {answer}; {_REFUSED}")

    def _withdraw(self, calls: Calls, adapter: str | None) -> None:
        if adapter is not None:
            return self._unload_adapter(calls, adapter)
        self._paused = True
        self._administer(calls, "withdraw", "/pause_generation", {"mode": "abort"})


def _generation(ids: Sequence[int], sampling_params: Json) -> Json:
    return {"input_ids": list(ids), "sampling_params": sampling_params, "return_logprob": True}


def _logprob_of(token: int, entry: Sequence[Any]) -> float:
    if entry[1] != token:
        raise ValueError(f"a log-probability of token {entry[1]} where {token} was asked for")
    return float(entry[0])


def _require_readable(calls: Calls, path: str) -> None:
    """Raise PublishError if a file of a published folder is missing, cut, or has no readable
    header.
    """
    file = path
    try:
        for name in check_listing(path)["files"]:
            file = f"{path}/{name}"
            if name.endswith(".safetensors"):
                with safe_open(file, framework="pt"):
                    pass
    except (CheckpointError, OSError, SafetensorError) as error:
        raise calls.refuse(
            f"it was not told of {file}, which would end it: {error}; publish again"
        ) from error


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
    return params if request.seed is None else params | {"sampling_seed": request.seed}
