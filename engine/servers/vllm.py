"""`VLLMServer`: the HTTP calls that update a vLLM server (0.32 or newer) and complete prompts of
token ids.

An update is pause, load, reset of the prefix cache, label, resume, read back, content check. It
always runs in full, because a killed publisher leaves the server paused whatever its label says.
Requests in flight are kept: the new weights compute their KV cache again, and the server records
which label sampled which token.

A failed load leaves layers without weights, and the next completion would kill the server, so it
stays paused. The next good load repairs it, unless vLLM had read a part of the bad folder already.
The server may then fail once more or mix weights. The content check detects a mixture, and the
server has to be restarted.

vLLM's ``reload_weights`` dismantles the model before it reads. The backends of ``plugins/vllm``
check everything first: a refusal changes nothing, and the next good load repairs a later failure.

Adapters (``--enable-lora``) are loaded next to the base, one name per version, while requests go
on. A load reads the whole folder first, and a failed one changes nothing. Unloading forgets the
name, and requests in flight go on. The engine keeps the ``--max-cpu-loras`` last used adapters in
memory. It reads others again from their folders, and dies if a folder is gone. It computes with
``--max-loras`` adapters at once, and requests for another one wait.

The server needs ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out``, see
docs/servers-reference.md.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...utils.config import require_choice
from ...utils.errors import PoisonedServerError, PublishError
from .adapters import AdapterFacts
from .api import KV_CACHE, WEIGHTS, ModelRequest, ModelResponse
from .client import NO_LABEL, ServerClient
from .completions import adapter_spans, response_of
from .groups import GlooGroup, SenderGroup, connected, send_bucket
from .http import Calls, Json
from .routes import decode_file
from .server_calls import DROPPED, NO_MEMORY, Sleep
from .stream import BucketReader

_DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1"
_SLEEP_MODE = "start the server with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
_SCALE_OUT = (
    "start the server with --enable-scale-out, and give the client its api_key if it has one"
)
_DISK = "holdfast_disk"
_GLOO = "holdfast_gloo"
_NCCL = "nccl"
_TRANSFERS = (None, _DISK, _GLOO, _NCCL)
"""Weight-transfer backends that a server is started with: of ``plugins/vllm``, or vLLM's own
``nccl``.
"""
# First version of vLLM that takes a unique id, without a store whose objects it unpickles.
_NCCL_SINCE = (0, 32)
_POISONED = (
    "its weights are in pieces, and it stays paused: do not resume it, a completion would kill "
    "it. Check that it sees the folder, and tell it again; if that fails too, restart it"
)
_NO_PLUGIN = (
    "install holdfast-vllm beside vLLM and start the server with --weight-transfer-config "
    """'{{"backend": "{}"}}'; without it publish by type "disk", and leave out transfer"""
)
# Answer of the plugin if it refuses weights before it loads any.
_REFUSED = "refused, the weights stay as they are"
_STAYS_PAUSED = "it stays paused as before, because its weights may be newer than its label"
_HEAD = "lm_head"
_NOT_SEEN = "No adapter found"  # answer of vLLM, with status 404, if the folder does not exist


@dataclass(eq=False, repr=False)
class VLLMServer(ServerClient):
    """A client of one vLLM server. It updates weights and adapters, reports the status, and
    completes prompts.

    It can be pickled. A copy does not know which adapters were loaded, so use one client to load
    them and to generate.

        server = VLLMServer("http://10.0.0.5:8000", api_key=key)
        engine.connect_engine([server], WeightUpdateMeta("disk", "/shared/weights"))
        engine.update_weights()
        response = await server.agenerate(ModelRequest(input_ids=[1, 2, 3]))

    Attributes:
        url: URL of the server, ``http://host:port``. A user and password in it are sent and never
            shown.
        api_key: the server's ``--api-key``.
        timeout_s: longest duration of an update or of `check_generation`. None: the limit of the
            publication (`WeightUpdateMeta.timeout_s`), or 300 s without one.
        status_timeout_s: longest duration of `status`.
        generation_timeout_s: longest duration of a completion, including the time that the server
            is paused.
        dtype: dtype that the server computes in (``float32``, ``float16`` or ``bfloat16``) if it is
            coarser than the dtype of the published folders. None: the same.
        mirror: URL of the `holdfast-weights mirror` next to the server, which makes the folders
            that the server loads (docs/servers.md). The environment variable
            ``HOLDFAST_WEIGHTS_TOKEN`` has its token, if it needs one. None: the server reads the
            published folders.
        served_name: the server's ``--served-model-name``, by which the client tells its server from
            another one at the same URL. That one gets no update. None: any name.
        transfer: the backend in the server's ``--weight-transfer-config``. ``"holdfast_disk"`` of
            ``plugins/vllm`` compares a folder with its manifest before it loads it. ``"nccl"`` of
            vLLM and ``"holdfast_gloo"`` of ``plugins/vllm`` receive weights of type ``"xccl"``.
            None: ``holdfast_gloo`` for these, and vLLM's ``reload_weights`` for folders, as with
            the other two.
    """

    _: KW_ONLY
    transfer: str | None = None

    _how_to_temper: ClassVar[str] = "start the server with --logprobs-mode processed_logprobs"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("transfer", self.transfer, _TRANSFERS)
        self._salt: str | None = None  # label of the weights that answered last

    # Updates of all weights

    @contextmanager
    def _replacing_weights(self, calls: Calls, label: str) -> Iterator[bool]:
        """Replace the weights in this block, which gets whether the KV cache sleeps.

        After an error the server stays paused, and its KV cache asleep.
        """
        self._pause(calls, "pause")
        asleep = self._wake_weights(calls)
        yield asleep

        # Requests must find no cached blocks of the old weights. And vLLM goes on with them as soon
        # as it is awake, so the label comes before.
        self._reset_prefix_cache(calls)
        if asleep:
            half = Sleep((KV_CACHE,), label)
            self._set_label(calls, half.label)
            self._wake(calls, KV_CACHE, half)
        self._set_label(calls, label)
        self._go_on(calls)

    @contextmanager
    def _transferring(
        self, calls: Calls, backend: str, label: str
    ) -> Iterator[Callable[[Json], None]]:
        """Replace the weights in this block, which gets the call that has ``backend`` load some."""
        # The weights of an update that was cut off may be whole, and others than the label says.
        was_paused = self._is_paused(calls)
        with self._replacing_weights(calls, label) as asleep:
            _open_transfer(calls, backend)
            stays = None
            if asleep:
                stays = "its KV cache goes on sleeping"
            elif was_paused:
                stays = _STAYS_PAUSED
            yield partial(self._transfer, calls, stays)

    def _load_weights(self, calls: Calls, path: str, label: str) -> None:
        if self.transfer != _DISK:
            with self._replacing_weights(calls, label):
                load = {"method": "reload_weights", "kwargs": {"weights_path": path}}
                _post_load(calls, "/collective_rpc", load)
            return
        with self._transferring(calls, _DISK, label) as transfer:
            manifest = label.partition("-")[2]
            transfer({"path": path, "manifest": manifest})
            calls.post("load", "/finish_weight_update", {})

    def _send_weights(
        self, group: SenderGroup, buckets: BucketReader, calls: Calls, label: str
    ) -> None:
        backend = _NCCL if self.transfer == _NCCL else _GLOO
        with self._transferring(calls, backend, label) as transfer:
            for bucket in buckets:
                info: Json = {
                    "names": bucket.names,
                    "dtype_names": bucket.dtype_names,
                    "shapes": bucket.shapes,
                }
                if backend == _GLOO:
                    info |= {"digest": bucket.digest, "last": bucket.last}
                send_bucket(group, buckets, bucket, calls, partial(transfer, info))
            _post_load(calls, "/finish_weight_update", {})

    def _form_group(self, calls: Calls, buckets: BucketReader) -> SenderGroup:
        told = calls.get("join", "/get_world_size", params={"include_dp": "true"})
        workers = int(told["world_size"])

        group: SenderGroup
        further: Json = {}
        if self.transfer == _NCCL:
            _require_version(calls)
            with suppress(PublishError):  # the communicator of an earlier group would stay
                calls.post("join", "/shutdown_weight_transfer_engine")
            from .nccl import NcclGroup  # only where there are GPUs

            group = NcclGroup(workers, buckets.patience_s, buckets.largest_bytes)
        else:
            group = GlooGroup(calls.url, workers, buckets.patience_s)
            further["timeout_s"] = buckets.patience_s

        def join(info: Json) -> None:
            body = {"init_info": {**info, **further}}
            calls.post("join", "/init_weight_transfer_engine", body, advice=_DEV_MODE)

        return connected(group, calls, join)

    def _transfer(self, calls: Calls, stays: str | None, info: Json) -> None:
        """Have the backend load some weights. If it refuses them, the server goes on, unless it
        ``stays`` as it is.
        """
        try:
            _post_load(calls, "/update_weights", {"update_info": info})
        except PoisonedServerError as error:
            if _REFUSED not in str(error):
                raise

            # The server can serve what it served before, because nothing was changed.
            if stays is None:
                self._go_on(calls)
                stays = "it goes on with the weights it has"
            raise calls.refuse(f"{stays}: {error}") from error

    def _reset_prefix_cache(self, calls: Calls) -> None:
        for attempt in range(5):
            time.sleep(0.2 if attempt else 0.0)
            if calls.post("reset cache", "/reset_prefix_cache").get("success") is True:
                return
        raise calls.refuse(
            "the prefix cache could not be reset, so that tokens would come from blocks that the "
            "old weights computed; the server stays paused: tell it again"
        )

    # Label and pause

    def _ask_label(self, calls: Calls) -> Json:
        return calls.get("read back", "/weight_info", advice=_DEV_MODE)

    def _set_label(self, calls: Calls, label: str) -> None:
        calls.post("label", "/update_weight_version", {"new_version": label})

    def _is_paused(self, calls: Calls) -> bool:
        paused = calls.get("read back", "/is_paused", advice=_DEV_MODE).get("is_paused")
        if not isinstance(paused, bool):
            raise calls.refuse(f"the server says that paused is {paused!r}")
        return paused

    def _pause(self, calls: Calls, phase: str) -> None:
        # Without clear_cache, an image from before a reload would kill the server, which still
        # counts it as encoded.
        params = {"mode": "keep", "clear_cache": "true"}
        calls.post(phase, "/pause", params=params, advice=_DEV_MODE)

    def _go_on(self, calls: Calls) -> None:
        calls.post("resume", "/resume")

    def _withdraw(self, calls: Calls) -> None:
        calls.post("withdraw", "/pause", params={"mode": "abort", "clear_cache": "true"})
        self._set_label(calls, NO_LABEL)

    # Sleep

    def _keeps_weights(self, calls: Calls) -> bool:
        told = _server_info(calls, "sleep", _SLEEP_MODE)
        with calls.reading("what GET /server_info says of sleep"):
            config = told["vllm_config"]
            frees = config["model_config"]["enable_sleep_mode"]
            device = config["device_config"]["device"]

        # On CPUs, vLLM sleeps in all respects but the memory.
        if not frees and device != "cpu":
            raise calls.refuse(f"it would free no memory while it sleeps; {_SLEEP_MODE}")
        return True

    def _put_to_sleep(self, calls: Calls, before: Sleep, asleep: Sleep, level: int) -> None:
        # A kill after a pause would look like that of an update. But no token may be sampled under
        # the other label.
        if asleep.weights == DROPPED:
            self._pause(calls, "sleep")
        self._set_label(calls, asleep.label)
        self._sleep(calls, level)

    def _sleep(self, calls: Calls, level: int) -> None:
        params = {"level": str(level), "mode": "keep"}
        calls.post("sleep", "/sleep", params=params, advice=_SLEEP_MODE)

    def _wake(self, calls: Calls, tag: str, asleep: Sleep) -> None:
        # If a kill left it awake in spite of its label, vLLM would go on with requests.
        if tag == WEIGHTS:
            self._sleep(calls, level=1)

        told = calls.post("wake", "/wake_up", params={"tags": tag}, advice=NO_MEMORY)
        status = told.get("status")
        if tag == KV_CACHE and status != "awake":
            raise calls.refuse(f"it was woken up, and says {status!r}; restart it")

    # Adapters

    def _require_room(self, calls: Calls, facts: AdapterFacts) -> None:
        # The answer to a load is not enough: vLLM silently leaves out adapters of modules without
        # the flag. And if the head can be adapted, log-probabilities of a prompt kill the engine
        # (on CPUs) when it has other requests.
        told = _server_info(calls, "look")
        named = " ".join(facts.modules)
        flags = f"--enable-lora --max-lora-rank {facts.rank} --lora-target-modules {named}"
        with calls.reading("what GET /server_info says of adapters"):
            limits = told.get("vllm_config")["lora_config"]  # type: ignore[index]
            if limits is None:
                raise calls.refuse(f"it was started without adapters; start it with {flags}")
            if facts.rank > limits["max_lora_rank"]:
                raise calls.refuse(
                    f"the adapters have rank {facts.rank}, it takes ranks up to "
                    f"{limits['max_lora_rank']}; start it with {flags} (or the next larger rank "
                    "that vLLM takes)"
                )
            if _HEAD in facts.modules:
                raise calls.refuse(
                    "the adapters are of the head, too, and with such vLLM cannot tell "
                    "log-probabilities of a prompt beside other requests; publish merged weights "
                    "(type 'disk'), or leave lm_head out of target_modules"
                )

            # Without the flag, vLLM adapts all modules.
            adapted = limits["target_modules"]
            shown = "all modules, its head too"
            if adapted is not None:
                shown = ", ".join(sorted(adapted))
                if _HEAD not in adapted and set(facts.modules) <= set(adapted):
                    return
            raise calls.refuse(
                f"it adapts {shown}, the adapters are of {', '.join(facts.modules)}; start it "
                f"with {flags}"
            )

    def _load_adapter(self, calls: Calls, name: str, path: str) -> None:
        body = {"lora_name": name, "lora_path": path}
        try:
            calls.tell("load", "/v1/load_lora_adapter", body, key=self.api_key)
        except PublishError as error:
            # An answer says what to do. A broken connection has its own advice.
            text = str(error)
            if _NOT_SEEN in text:
                advice = "let the server see the folder under the same path"
            elif "was answered with 404" in text:
                advice = "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            elif "was answered with" in text:
                advice = "it goes on with the adapters it has; see its log"
            else:
                raise
            raise type(error)(f"{error}; {advice}") from error

    def _unload_adapter(self, calls: Calls, name: str) -> None:
        calls.tell("unload", "/v1/unload_lora_adapter", {"lora_name": name}, key=self.api_key)

    # Completions and content checks

    def _completion(self, request: ModelRequest, adapter: str | None) -> tuple[str, Json]:
        body: Json = {
            "token_ids": list(request.input_ids),
            "sampling_params": _sampling_params(request),
        }
        images = request.images
        if images is not None:
            body["token_ids"] = list(images.token_ids)
            body["return_token_ids"] = True
            body["content_parts"] = [{"type": "image_url", "url": url} for url in images.urls]
            body["sampling_params"]["logit_bias"] = images.logit_bias
        if request.rid:
            body["request_id"] = request.rid
        # Another server at this URL refuses the name. Cached blocks of adapters are found under
        # their name and folder only. The salt hides cached blocks that other weights computed.
        model = adapter or self.served_name
        if model is not None:
            body["model"] = model
        if adapter is None and self._salt is not None:
            body["cache_salt"] = self._salt
        return "/inference/v1/generate", body

    def _read_completion(
        self, request: ModelRequest, answer: Json, adapter: str | None
    ) -> ModelResponse:
        choice = answer["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        spans = choice["weight_versions"]
        own_spans = spans
        if adapter is not None:
            own_spans = adapter_spans(adapter, answer["model"], spans)
        response = response_of(
            request, choice["token_ids"], logprobs, own_spans, choice["finish_reason"]
        )
        if adapter is None:
            self._salt = spans[-1]["version"]
        return response

    async def _read_routes(self, answer: Json) -> np.ndarray:
        return await decode_file(answer["choices"][0].get("routed_experts"))

    def _returns_routes(self, calls: Calls) -> object:
        told = _server_info(calls, "look")
        with calls.reading("what GET /server_info says of the model"):
            return told["vllm_config"]["model_config"].get("enable_return_routed_experts")

    def _generate(
        self, calls: Calls, ids: Sequence[int], adapter: str | None = None, **sampling: Any
    ) -> Json:
        params = {"max_tokens": 1, "detokenize": False, **sampling}
        body: Json = {"token_ids": list(ids), "sampling_params": params}
        model = adapter or self.served_name
        if model is not None:
            body["model"] = model
        path = "/inference/v1/generate"
        return calls.post("check", path, body, key=self.api_key, advice=_SCALE_OUT)

    def _prompt_logprobs(
        self, calls: Calls, ids: Sequence[int], adapter: str | None = None
    ) -> list[float]:
        # vLLM then ignores the prefix cache.
        answer = self._generate(calls, ids, adapter, prompt_logprobs=0)

        # The first token has no log-probability.
        with calls.reading("its log-probabilities of the prompt"):
            pairs = zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)
            return [float(entry[str(token)]["logprob"]) for token, entry in pairs]

    def _ask_checksums(self, calls: Calls) -> Json:
        return calls.post("checksums", "/weight_checker", {"action": "checksum"})

    def _top_logprobs(self, calls: Calls, temperature: float) -> dict[int, float]:
        answer = self._generate(calls, [1], temperature=temperature, logprobs=5)
        with calls.reading("its log-probabilities"):
            entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            return {entry["token_id"]: entry["logprob"] for entry in entries}


def _server_info(calls: Calls, phase: str, advice: str = "") -> Json:
    return calls.get(phase, "/server_info", params={"config_format": "json"}, advice=advice)


def _post_load(calls: Calls, path: str, body: Json) -> None:
    """Send a request after whose failure the weights may be in pieces."""
    calls.post("load", path, body, error=PoisonedServerError, advice=_POISONED)


def _open_transfer(calls: Calls, backend: str) -> None:
    advice = _NO_PLUGIN.format(backend)
    try:
        calls.post("load", "/start_weight_update", advice=advice)
    except PublishError:
        # A killed publisher left its update open, or the next call states another reason.
        calls.post("load", "/finish_weight_update", {}, advice=advice)
        calls.post("load", "/start_weight_update", advice=advice)


def _require_version(calls: Calls) -> None:
    version = str(calls.get("join", "/version").get("version"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _NCCL_SINCE:
        since = ".".join(map(str, _NCCL_SINCE))
        raise calls.refuse(
            f"it is vLLM {version}, whose 'nccl' backend cannot be joined from here; expected "
            f"{since} or newer"
        )


def _sampling_params(request: ModelRequest) -> Json:
    gconfig = request.gconfig
    params: Json = {
        "n": 1,
        "max_tokens": gconfig.max_new_tokens,
        "min_tokens": gconfig.min_new_tokens if gconfig.stop_token_ids else 0,
        "temperature": gconfig.temperature,
        "top_p": gconfig.top_p,
        "top_k": gconfig.top_k,
        "stop_token_ids": list(gconfig.stop_token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    if request.seed is not None:
        params["seed"] = request.seed
    if request.routes_from is not None:
        params["routed_experts_prompt_start"] = request.routes_from
    return params
