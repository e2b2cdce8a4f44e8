"""The calls of `VLLMServer`, for a vLLM that was started with `FLAGS` and `ENVIRONMENT`.

The backend ``nccl`` of vLLM needs GPUs, so its calls are those of ``holdfast_gloo`` here.
"""

from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file

from holdfast.engine.servers.groups import GlooGroup
from holdfast.utils.files import bytes_digest
from holdfast.utils.manifest import manifest_digest
from holdfast.utils.threads import on_daemon_thread
from tests.engine.servers.call_table import (
    CONTEXT,
    END,
    PROMPT,
    VOCABULARY,
    Answer,
    Json,
    Later,
    Server,
    Table,
)
from tests.engine.servers.fake_adapters import MODULES
from tests.limits import stretched

FLAGS = (
    "--max-model-len",
    str(CONTEXT),
    "--enable-scale-out",
    "--logprobs-mode",
    "processed_logprobs",
    "--weight-transfer-config",
    '{"backend": "holdfast_disk"}',
)
"""Flags of the server, beside those for CPUs. ``--model`` is `Folders.base`."""
GLOO_FLAGS = (*FLAGS[:-1], '{"backend": "holdfast_gloo"}')
ADAPTER_FLAGS = (
    *FLAGS[:-2],
    "--enable-lora",
    "--max-lora-rank",
    "8",
    "--max-loras",
    "2",
    "--lora-target-modules",
    *MODULES,
)
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}

GLOO = "GLOO_FLAGS"
ADAPTERS = "ADAPTER_FLAGS"
"""``needs`` of a call to a server that was started with these flags instead of `FLAGS`."""

STOP = 9
TABLE = Table()
CALLS = TABLE.calls
call = TABLE.call


def generate(server: Server, ids: list[int] = PROMPT, new: int = 4, **options: Any) -> Answer:
    """Complete a prompt as the client does. Names of sampling parameters go there, all others into
    the body.
    """
    params: Json = {
        "n": 1,
        "max_tokens": new,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    body: Json = {"token_ids": ids, "sampling_params": params}
    for name, value in options.items():
        (body if name in _OF_BODY else params)[name] = value
    return server.post("/inference/v1/generate", body)


_OF_BODY = ("model", "cache_salt", "request_id")


def finish(answer: Answer) -> Json:
    """The end of a completion: status, reason, last token if it stopped, and number of tokens."""
    if answer.status != 200:
        return {"status": answer.status}
    choice = answer.body["choices"][0]
    tokens = choice["token_ids"]
    entries = choice["logprobs"]["content"]
    assert all(entry["logprob"] <= 0 for entry in entries) and len(entries) == len(tokens)
    reason = choice["finish_reason"]
    return {
        "status": answer.status,
        "type": reason,
        "matched": tokens[-1] if reason == "stop" else None,
        "tokens": len(tokens),
    }


def logprobs(server: Server, **options: Any) -> list[float]:
    """Log-probabilities of the prompt."""
    entries = generate(server, new=1, prompt_logprobs=0, **options).body["prompt_logprobs"]
    pairs = zip(PROMPT[1:], entries[1:], strict=True)
    return [entry[str(token)]["logprob"] for token, entry in pairs]


def differ(one: list[float], other: list[float]) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-3


def pause(server: Server) -> Answer:
    return server.post("/pause?mode=keep&clear_cache=true")


def go_on(server: Server) -> Answer:
    return server.post("/resume")


def label(server: Server) -> str:
    return server.get("/weight_info").body["weight_version"]


def reload_weights(server: Server, folder: object) -> Answer:
    load: Json = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return server.post("/collective_rpc", load)


def reload_paused(server: Server, folder: object) -> Answer:
    """Load a folder and serve it."""
    pause(server)
    answer = reload_weights(server, folder)
    server.post("/reset_prefix_cache")
    go_on(server)
    return answer


# A server that was just started


@call("/weight_info", answer={"status": 200, "weight_version": "default"}, fresh=True)
def a_new_server_has_the_label_default(server: Server) -> Json:
    return server.get("/weight_info").has("weight_version")


# What it says of itself


@call("/v1/models", answer={"status": 200, "models": [[None, CONTEXT]]})
def a_server_lists_the_context_of_its_model(server: Server) -> Json:
    answer = server.get("/v1/models")
    cards = [[card.get("parent"), card["max_model_len"]] for card in answer.body["data"]]
    return {"status": answer.status, "models": cards}


@call(
    "/server_info",
    "/get_world_size",
    "/version",
    answer={
        "status": 200,
        "sleep mode is told": True,
        "device": "cpu",
        "lora": None,
        "world size": 1,
        "version": "0.32",
    },
)
def the_server_tells_its_flags(server: Server) -> Json:
    answer = server.get("/server_info?config_format=json")
    config = answer.body["vllm_config"]
    size = server.get("/get_world_size?include_dp=true").body["world_size"]
    version = server.get("/version").body["version"]
    return {
        "status": answer.status,
        "sleep mode is told": "enable_sleep_mode" in config["model_config"],
        "device": config["device_config"]["device"],
        "lora": config["lora_config"],
        "world size": size,
        "version": ".".join(version.split(".")[:2]),
    }


# Completions


@call(
    "/inference/v1/generate",
    answer={"status": 200, "type": "length", "matched": None, "tokens": 8, "spans": [[0, 8, True]]},
)
def a_completion_has_tokens_log_probabilities_and_the_label_of_each_token(server: Server) -> Json:
    answer = generate(server, new=8)
    own = label(server)
    spans = answer.body["choices"][0]["weight_versions"]
    own_spans = [[span["start"], span["end"], span["version"] == own] for span in spans]
    return finish(answer) | {"spans": own_spans}


@call(
    "/inference/v1/generate",
    answer={"status": 200, "type": "stop", "matched": STOP, "tokens": 1},
)
def a_completion_stops_at_a_stop_token_in_spite_of_ignore_eos(server: Server) -> Json:
    return finish(generate(server, stop_token_ids=[STOP], logit_bias={str(STOP): 100.0}))


@call(
    "/inference/v1/generate",
    answer={"status": 200, "type": "length", "matched": None, "tokens": 4},
)
def a_completion_goes_on_after_the_end_of_sequence_token_of_the_model(server: Server) -> Json:
    return finish(generate(server, stop_token_ids=[STOP], logit_bias={str(END): 100.0}))


@call(
    "/inference/v1/generate",
    answer={"status": 200, "type": "stop", "matched": STOP, "tokens": 4},
)
def min_tokens_delays_a_stop_token(server: Server) -> Json:
    forced = {str(STOP): 100.0}
    options: Json = {"stop_token_ids": [STOP], "logit_bias": forced, "min_tokens": 3}
    return finish(generate(server, new=8, **options))


@call(
    "/inference/v1/generate",
    answer={
        "more than the room": {"status": 200, "type": "length", "matched": None, "tokens": 20},
        "the whole context": {"status": 400},
        "one token less": {"status": 200, "type": "length", "matched": None, "tokens": 1},
    },
)
def completions_end_with_the_context_and_a_prompt_needs_room_for_one_token(server: Server) -> Json:
    def fill(left: int, new: int) -> Json:
        return finish(generate(server, ids=[5] * (CONTEXT - left), new=new))

    return {
        "more than the room": fill(20, 21),
        "the whole context": fill(0, 1),
        "one token less": fill(1, 1),
    }


@call("/inference/v1/generate", answer={"tokens": len(PROMPT), "first": None, "repeat": True})
def log_probabilities_of_a_prompt_begin_with_its_second_token(server: Server) -> Json:
    answer = generate(server, new=1, prompt_logprobs=0)
    entries = answer.body["prompt_logprobs"]
    return {
        "tokens": len(entries),
        "first": entries[0],
        "repeat": not differ(logprobs(server), logprobs(server)),
    }


@call("/inference/v1/generate", answer={"count": 5, "common": True, "factor": 2.0})
def log_probabilities_of_the_most_likely_tokens_follow_the_temperature(server: Server) -> Json:
    """The sampled token is among the five, in place of the least likely one."""

    def top(temperature: float) -> dict[int, float]:
        answer = generate(server, new=1, logprobs=5, temperature=temperature)
        entries = answer.body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {entry["token_id"]: entry["logprob"] for entry in entries}

    plain = top(1.0)
    tempered = top(0.5)
    common = sorted(plain.keys() & tempered.keys(), key=plain.__getitem__)
    spread = [told[common[-1]] - told[common[0]] for told in (plain, tempered)]
    return {
        "count": len(plain),
        "common": len(common) >= 4,
        "factor": round(spread[1] / spread[0], 2),
    }


@call("/inference/v1/generate", answer={"refused": {"status": 400}, "alive": 200})
def a_token_outside_the_vocabulary_is_refused_by_a_server_with_a_tokenizer(server: Server) -> Json:
    refused = finish(generate(server, ids=[VOCABULARY + 5]))
    return {"refused": refused, "alive": generate(server).status}


# Updates


@call(
    "/pause",
    "/resume",
    "/is_paused",
    "/inference/v1/generate",
    answer={
        "before": {"status": 200, "is_paused": False},
        "pause": 200,
        "paused": {"status": 200, "is_paused": True},
        "answered while paused": False,
        "resume": 200,
        "then": {"status": 200, "type": "length", "matched": None, "tokens": 4},
        "after": {"status": 200, "is_paused": False},
    },
)
def a_paused_server_keeps_a_request_until_it_resumes(server: Server) -> Json:
    told: Json = {"before": server.get("/is_paused").has("is_paused")}
    told["pause"] = pause(server).status
    told["paused"] = server.get("/is_paused").has("is_paused")
    waiting = Later(partial(generate, server))
    told["answered while paused"] = waiting.answered_within(1.0)
    told["resume"] = go_on(server).status
    told["then"] = finish(waiting.answer())
    told["after"] = server.get("/is_paused").has("is_paused")
    return told


@call(
    "/collective_rpc",
    "/reset_prefix_cache",
    answer={
        "load": {"status": 200, "results": [None]},
        "reset": {"status": 200, "success": True},
        "changed": True,
    },
)
def a_reload_while_paused_replaces_the_weights(server: Server) -> Json:
    reload_paused(server, server.folders.first)
    before = logprobs(server)
    pause(server)
    told: Json = {"load": reload_weights(server, server.folders.second).has("results")}
    told["reset"] = server.post("/reset_prefix_cache").has("success")
    go_on(server)
    told["changed"] = differ(before, logprobs(server))
    return told


@call(
    "/collective_rpc",
    answer={"load": {"status": 500}, "repaired": {"status": 200, "results": [None]}, "then": 200},
)
def a_missing_folder_fails_and_the_next_good_reload_repairs_the_server(server: Server) -> Json:
    pause(server)
    told: Json = {"load": reload_weights(server, server.folders.missing).has()}
    told["repaired"] = reload_weights(server, server.folders.first).has("results")
    server.post("/reset_prefix_cache")
    go_on(server)
    told["then"] = generate(server).status
    return told


@call(
    "/update_weight_version",
    "/weight_info",
    answer={"status": 200, "success": True, "label": "5 (any text)"},
)
def a_label_is_any_text(server: Server) -> Json:
    told = server.post("/update_weight_version", {"new_version": "5 (any text)"}).has("success")
    return told | {"label": label(server)}


@call("/weight_checker", answer={"status": 200, "repeats": True, "changes": True})
def checksums_change_with_the_weights(server: Server) -> Json:
    def sums() -> Answer:
        return server.post("/weight_checker", {"action": "checksum"})

    reload_paused(server, server.folders.first)
    before = sums()
    repeated = sums().body == before.body
    reload_paused(server, server.folders.second)
    return before.has() | {"repeats": repeated, "changes": sums().body != before.body}


@call(
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    answer={
        "start": 200,
        "start again": 500,
        "load": 200,
        "finish": 200,
        "finish again": 500,
        "changed": True,
        "damaged": {"status": 500, "refused, the weights stay as they are": True},
        "kept": True,
    },
)
def the_plugin_loads_a_folder_in_a_session_and_refuses_a_damaged_one(server: Server) -> Json:
    def load(folder: Any) -> Answer:
        info = {"path": str(folder), "manifest": manifest_digest(folder)}
        return server.post("/update_weights", {"update_info": info})

    reload_paused(server, server.folders.first)
    before = logprobs(server)
    told: Json = {}
    pause(server)
    told["start"] = server.post("/start_weight_update").status
    told["start again"] = server.post("/start_weight_update").status
    told["load"] = load(server.folders.second).status
    told["finish"] = server.post("/finish_weight_update", {}).status
    told["finish again"] = server.post("/finish_weight_update", {}).status
    server.post("/reset_prefix_cache")
    go_on(server)
    after = logprobs(server)
    told["changed"] = differ(before, after)

    pause(server)
    server.post("/start_weight_update")
    told["damaged"] = load(server.folders.cut).says("refused, the weights stay as they are")
    server.post("/finish_weight_update", {})
    go_on(server)
    told["kept"] = not differ(after, logprobs(server))
    return told


@call(
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    answer={"join": 200, "bucket": 200, "finish": 200, "received": True},
    needs=GLOO,
)
def the_plugin_receives_weights_in_a_bucket_over_a_group(server: Server) -> Json:
    reload_paused(server, server.folders.second)
    expected = logprobs(server)
    reload_paused(server, server.folders.first)
    told: Json = {}

    # Rank 0 connects while the server joins.
    patience_s = stretched(30)
    group = GlooGroup(server.url, 1, patience_s)
    connected = on_daemon_thread(group.connect, "table")
    info = {**group.init_info, "timeout_s": patience_s}
    told["join"] = server.post("/init_weight_transfer_engine", {"init_info": info}).status
    connected.result()

    # And sends while the server receives.
    tensors = load_file(server.folders.second / "model.safetensors")
    parts = [tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors.values()]
    flat = torch.cat(parts)
    bucket = {
        "names": list(tensors),
        "dtype_names": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "digest": bytes_digest(flat.numpy().tobytes()),
        "last": True,
    }
    pause(server)
    server.post("/start_weight_update")
    sent = on_daemon_thread(partial(group.send, flat), "table")
    told["bucket"] = server.post("/update_weights", {"update_info": bucket}).status
    sent.result()
    told["finish"] = server.post("/finish_weight_update", {}).status
    server.post("/reset_prefix_cache")
    go_on(server)
    told["received"] = not differ(expected, logprobs(server))
    return told


@call(
    "/shutdown_weight_transfer_engine",
    answer={"leave": 200},
    needs=GLOO,
)
def a_server_leaves_its_group(server: Server) -> Json:
    return {"leave": server.post("/shutdown_weight_transfer_engine").status}


# Sleep


@call(
    "/sleep",
    "/wake_up",
    answer={
        "sleep": 200,
        "again": 200,
        "weights": 200,
        "cache": {"status": "awake"},
        "then": {"status": 200, "type": "length", "matched": None, "tokens": 4},
    },
)
def a_server_sleeps_and_wakes_in_two_parts(server: Server) -> Json:
    told: Json = {}
    told["sleep"] = server.post("/sleep?level=1&mode=keep").status
    told["again"] = server.post("/sleep?level=1&mode=keep").status
    told["weights"] = server.post("/wake_up?tags=weights").status
    told["cache"] = {"status": server.post("/wake_up?tags=kv_cache").body.get("status")}
    told["then"] = finish(generate(server))
    return told


# Adapters


@call(
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/models",
    "/server_info",
    "/inference/v1/generate",
    answer={
        "limits": {"max_lora_rank": 8, "target_modules": MODULES},
        "load": 200,
        "again": 400,
        "listed": ["v1"],
        "changed": True,
        "answered by": "v1",
        "unload": 200,
        "gone": [],
        "unload again": 404,
        "unknown": 404,
        "no folder": {"status": 404, "No adapter found": True},
    },
    needs=ADAPTERS,
)
def adapters_are_loaded_listed_used_and_unloaded(server: Server) -> Json:
    def listed() -> list[str]:
        cards = server.get("/v1/models").body["data"]
        return [card["id"] for card in cards if card.get("parent") is not None]

    info = server.get("/server_info?config_format=json").body["vllm_config"]["lora_config"]
    told: Json = {"limits": {"max_lora_rank": info["max_lora_rank"]}}
    told["limits"]["target_modules"] = sorted(info["target_modules"])
    body = {"lora_name": "v1", "lora_path": str(server.folders.adapters)}
    told["load"] = server.post("/v1/load_lora_adapter", body).status
    told["again"] = server.post("/v1/load_lora_adapter", body).status
    told["listed"] = listed()
    told["changed"] = differ(logprobs(server), logprobs(server, model="v1"))
    told["answered by"] = generate(server, model="v1").body["model"]
    told["unload"] = server.post("/v1/unload_lora_adapter", {"lora_name": "v1"}).status
    told["gone"] = listed()
    told["unload again"] = server.post("/v1/unload_lora_adapter", {"lora_name": "v1"}).status
    told["unknown"] = generate(server, model="v1").status
    missing = {"lora_name": "v2", "lora_path": str(server.folders.missing)}
    told["no folder"] = server.post("/v1/load_lora_adapter", missing).says("No adapter found")
    return told
