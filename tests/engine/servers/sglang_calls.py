"""The calls of `SGLangServer`, for an SGLang that was started with `FLAGS`.

``sleep`` needs ``torch_memory_saver``, which is for CUDA. On CPUs a stand-in for it shows that the
order of the calls is right, and not that memory is freed.
"""

from functools import partial
from typing import Any

import torch
from safetensors.torch import load_file

from holdfast.engine.servers.groups import GlooGroup
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
from tests.limits import stretched

API_KEY = "KEY"
ADMIN_KEY = "ADMIN"
PLAIN_FLAGS = (
    "--context-length",
    str(CONTEXT),
    "--api-key",
    API_KEY,
    "--admin-api-key",
    ADMIN_KEY,
)
FLAGS = (
    *PLAIN_FLAGS,
    "--enable-lora",
    "--max-lora-rank",
    "8",
    "--lora-target-modules",
    "all",
    "--max-loras-per-batch",
    "2",
    "--enable-memory-saver",
    "--enable-weights-cpu-backup",
)
"""Flags of the server, beside those for CPUs. ``--model-path`` is `Folders.base`."""
PLAIN = "PLAIN_FLAGS"
"""``needs`` of a call to a server that was started with them, and not with `FLAGS`."""

STOP = 9
TABLE = Table()
CALLS = TABLE.calls
call = TABLE.call


def generate(server: Server, ids: list[int] = PROMPT, new: int = 4, **options: Any) -> Answer:
    """Complete a prompt. Names of sampling parameters go there, all others into the body."""
    params: Json = {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True}
    body: Json = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
    for name, value in options.items():
        (body if name in _OF_BODY else params)[name] = value
    return server.post("/generate", body)


_OF_BODY = ("logprob_start_len", "top_logprobs_num", "lora_path", "rid")


def finish(answer: Answer) -> Json:
    """The end of a completion: status, reason, token at which it stopped, and number of tokens."""
    if answer.status != 200:
        return {"status": answer.status}
    meta = answer.body["meta_info"]
    reason = meta["finish_reason"]
    tokens = [token for _, token, *_ in meta["output_token_logprobs"]]
    assert tokens == answer.body["output_ids"]
    return {
        "status": answer.status,
        "type": reason["type"],
        "matched": reason.get("matched"),
        "tokens": len(tokens),
    }


def pause(server: Server) -> Answer:
    return server.administer("/pause_generation", {"mode": "retract"})


def go_on(server: Server) -> Answer:
    return server.administer("/continue_generation", {})


def label(server: Server) -> str:
    return server.get("/model_info").body["weight_version"]


def load(server: Server, folder: object, name: str, timeout_s: float = 120.0) -> Answer:
    body: Json = {
        "model_path": str(folder),
        "weight_version": name,
        "flush_cache": True,
        "abort_all_requests": False,
    }
    return server.administer("/update_weights_from_disk", body, timeout_s)


def load_paused(server: Server, folder: object, name: str) -> Answer:
    pause(server)
    answer = load(server, folder, name)
    go_on(server)
    return answer


def checksums(server: Server) -> Any:
    return server.administer("/weights_checker", {"action": "checksum"}).body["ranks"]


# A server that was just started


@call("/model_info", answer={"status": 200, "weight_version": "default"}, fresh=True)
def a_new_server_has_the_label_default(server: Server) -> Json:
    return server.get("/model_info").has("weight_version")


@call("/v1/models", answer={"status": 200, "models": [["base", None, CONTEXT]]}, fresh=True)
def a_new_server_lists_the_folder_and_the_context_of_its_model(server: Server) -> Json:
    answer = server.get("/v1/models")
    cards = answer.body["data"]
    assert cards[0]["root"] == str(server.folders.base)
    kind = [["base", card.get("parent"), card["max_model_len"]] for card in cards]
    return {"status": answer.status, "models": kind}


@call(
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/v1/models",
    "/generate",
    answer={
        "load": {"status": 200, "success": True},
        "again": {"status": 400, "success": False},
        "listed": [["v1", True]],
        "changed": True,
        "unload": {"status": 200, "success": True},
        "gone": [],
        "unload again": {"status": 400, "success": False},
        "asked for again": {"status": 200, "type": "length", "matched": None, "tokens": 4},
        "listed again": [["v1", True]],
        "unknown": {"status": 400},
        "no folder": {"status": 400, "success": False},
    },
    fresh=True,
)
def adapters_are_loaded_listed_used_and_unloaded(server: Server) -> Json:
    """SGLang loads an unloaded adapter again if a request names it."""
    folder = str(server.folders.adapters)
    body = {"lora_name": "v1", "lora_path": folder}

    def listed() -> list[Any]:
        cards = server.get("/v1/models").body["data"]
        return [
            [card["id"], card["root"] == folder] for card in cards if card.get("parent") is not None
        ]

    def logprobs(**options: Any) -> Any:
        answer = generate(server, logprob_start_len=0, **options)
        return [entry[0] for entry in answer.body["meta_info"]["input_token_logprobs"][1:]]

    told: Json = {}
    told["load"] = server.administer("/load_lora_adapter", body).has("success")
    told["again"] = server.administer("/load_lora_adapter", body).has("success")
    told["listed"] = listed()
    pairs = zip(logprobs(), logprobs(lora_path="v1"), strict=True)
    told["changed"] = max(abs(base - adapted) for base, adapted in pairs) > 1e-3
    name = {"lora_name": "v1"}
    told["unload"] = server.administer("/unload_lora_adapter", name).has("success")
    told["gone"] = listed()
    told["unload again"] = server.administer("/unload_lora_adapter", name).has("success")
    told["asked for again"] = finish(generate(server, lora_path="v1"))
    told["listed again"] = listed()
    server.administer("/unload_lora_adapter", name)
    told["unknown"] = finish(generate(server, lora_path="v0"))
    missing = {"lora_name": "v2", "lora_path": str(server.folders.missing)}
    told["no folder"] = server.administer("/load_lora_adapter", missing).has("success")
    return told


# What it says of itself


@call(
    "/server_info",
    answer={
        "status": 200,
        "tp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": True,
        "max_req_input_len": CONTEXT - 6,
    },
)
def the_server_tells_its_flags(server: Server) -> Json:
    return server.get("/server_info").has(
        "tp_size",
        "dp_size",
        "pp_size",
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "max_req_input_len",
    )


@call(
    "/model_info",
    "/generate",
    "/pause_generation",
    "/ready",
    answer={"look": 401, "complete": 401, "administer": 401, "ready": 200},
)
def keys_are_needed_and_the_api_key_is_not_enough_for_updates(server: Server) -> Json:
    retract = {"mode": "retract"}
    return {
        "look": server.get("/model_info", key="wrong").status,
        "complete": server.post("/generate", {"input_ids": PROMPT}, key="wrong").status,
        "administer": server.post("/pause_generation", retract, key=server.api_key).status,
        "ready": server.get("/ready", key="wrong").status,
    }


# Completions


@call(
    "/generate",
    answer={"status": 200, "type": "length", "matched": None, "tokens": 8, "spans": [[0, 8, True]]},
)
def a_completion_has_tokens_log_probabilities_and_the_label_of_each_token(server: Server) -> Json:
    answer = generate(server, new=8)
    meta = answer.body["meta_info"]
    own = label(server)
    spans = [
        [span["start"], span["end"], span["version"] == own] for span in meta["weight_versions"]
    ]
    return finish(answer) | {"spans": spans}


@call("/generate", answer={"status": 200, "type": "stop", "matched": STOP, "tokens": 1})
def a_completion_stops_at_a_stop_token(server: Server) -> Json:
    forced = {str(STOP): 100.0}
    return finish(generate(server, ignore_eos=False, stop_token_ids=[STOP], logit_bias=forced))


@call("/generate", answer={"status": 200, "type": "length", "matched": None, "tokens": 4})
def ignore_eos_switches_stop_tokens_off(server: Server) -> Json:
    return finish(generate(server, stop_token_ids=[STOP], logit_bias={str(STOP): 100.0}))


@call("/generate", answer={"status": 200, "type": "stop", "matched": END, "tokens": 1})
def a_completion_also_stops_at_the_end_of_sequence_token_of_the_model(server: Server) -> Json:
    forced = {str(END): 100.0}
    return finish(generate(server, ignore_eos=False, stop_token_ids=[STOP], logit_bias=forced))


@call("/generate", answer={"status": 200, "type": "length", "matched": None, "tokens": 4})
def ignore_eos_goes_on_after_the_end_of_sequence_token(server: Server) -> Json:
    return finish(generate(server, logit_bias={str(END): 100.0}))


@call("/generate", answer={"status": 200, "type": "stop", "matched": STOP, "tokens": 4})
def min_new_tokens_delays_a_stop_token(server: Server) -> Json:
    forced = {str(STOP): 100.0}
    options: Json = {"stop_token_ids": [STOP], "logit_bias": forced, "min_new_tokens": 3}
    return finish(generate(server, new=8, ignore_eos=False, **options))


@call(
    "/generate",
    answer={
        "more than the room": {"status": 400, "Requested token count exceeds": True},
        "the whole context": {"status": 400, "is longer than the model's context": True},
        "six tokens less": {"status": 400, "exceeds the maximum allowed length": True},
        "seven tokens less": {"status": 200, "type": "length", "matched": None, "tokens": 5},
    },
)
def prompts_need_seven_tokens_of_room_and_completions_end_two_before_the_context(
    server: Server,
) -> Json:
    def fill(left: int, new: int) -> Answer:
        return generate(server, ids=[5] * (CONTEXT - left), new=new)

    more = fill(20, 21)
    whole = fill(0, 1)
    six = fill(6, 1)
    return {
        "more than the room": more.says("Requested token count exceeds"),
        "the whole context": whole.says("is longer than the model's context"),
        "six tokens less": six.says("exceeds the maximum allowed length"),
        "seven tokens less": finish(fill(7, 7)),
    }


@call("/generate", answer={"ids": PROMPT, "first": None, "numbers": True, "repeat": True})
def log_probabilities_of_a_prompt_begin_with_its_second_token(server: Server) -> Json:
    def entries() -> Any:
        answer = generate(server, new=1, logprob_start_len=0)
        return answer.body["meta_info"]["input_token_logprobs"]

    told = entries()
    return {
        "ids": [token for _, token, *_ in told],
        "first": told[0][0],
        "numbers": all(entry[0] < 0 for entry in told[1:]),
        "repeat": entries() == told,
    }


@call("/generate", answer={"count": 5, "ordered": True, "factor": 2.0})
def log_probabilities_of_the_most_likely_tokens_follow_the_temperature(server: Server) -> Json:
    def top(temperature: float) -> Any:
        answer = generate(server, new=1, top_logprobs_num=5, temperature=temperature)
        return answer.body["meta_info"]["output_top_logprobs"][0]

    plain = top(1.0)
    tempered = top(0.5)
    values = [logprob for logprob, *_ in plain]
    spread = [entries[0][0] - entries[-1][0] for entries in (plain, tempered)]
    return {
        "count": len(plain),
        "ordered": values == sorted(values, reverse=True),
        "factor": round(spread[1] / spread[0], 2),
    }


# Updates


@call(
    "/pause_generation",
    "/continue_generation",
    "/ready",
    "/ping",
    "/model_info",
    "/generate",
    answer={
        "before": [200, 200],
        "pause": 200,
        "paused": [503, 200],
        "still tells its label": 200,
        "answered while paused": False,
        "continue": 200,
        "then": {"status": 200, "type": "length", "matched": None, "tokens": 4},
        "after": [200, 200],
    },
)
def a_paused_server_keeps_a_request_until_it_continues_and_is_not_ready(server: Server) -> Json:
    def state() -> list[int]:
        return [server.get("/ready").status, server.get("/ping").status]

    told: Json = {"before": state()}
    told["pause"] = pause(server).status
    told["paused"] = state()
    told["still tells its label"] = server.get("/model_info").status
    waiting = Later(partial(generate, server))
    told["answered while paused"] = waiting.answered_within(1.0)
    told["continue"] = go_on(server).status
    told["then"] = finish(waiting.answer())
    told["after"] = state()
    return told


@call(
    "/pause_generation",
    "/update_weights_from_disk",
    "/continue_generation",
    "/generate",
    answer={
        "load": {"status": 200, "success": True},
        "label": "1-one",
        "again": {"status": 200, "success": True},
        "changed": True,
    },
)
def a_load_while_paused_replaces_weights_and_label(server: Server) -> Json:
    def logprobs() -> list[float]:
        answer = generate(server, new=1, logprob_start_len=0)
        return [entry[0] for entry in answer.body["meta_info"]["input_token_logprobs"][1:]]

    told: Json = {"load": load_paused(server, server.folders.first, "1-one").has("success")}
    told["label"] = label(server)
    first = logprobs()
    told["again"] = load_paused(server, server.folders.second, "2-two").has("success")
    pairs = zip(first, logprobs(), strict=True)
    told["changed"] = max(abs(before - after) for before, after in pairs) > 1e-3
    return told


@call(
    "/update_weights_from_disk",
    answer={"load": {"status": 400, "success": False}, "label kept": True, "answers": 200},
)
def a_missing_folder_is_refused_and_the_server_goes_on(server: Server) -> Json:
    before = label(server)
    told = load_paused(server, server.folders.missing, "9-nine").has("success")
    return {
        "load": told,
        "label kept": label(server) == before,
        "answers": generate(server).status,
    }


@call("/update_weight_version", answer={"status": 200, "success": True, "label": "5 (any text)"})
def a_label_is_any_text(server: Server) -> Json:
    body = {"new_version": "5 (any text)", "abort_all_requests": False}
    told = server.administer("/update_weight_version", body).has("success")
    return told | {"label": label(server)}


@call("/weights_checker", answer={"status": 200, "success": True, "repeats": True, "changes": True})
def checksums_change_with_the_weights(server: Server) -> Json:
    load_paused(server, server.folders.first, "1-one")
    before = checksums(server)
    repeated = checksums(server) == before
    load_paused(server, server.folders.second, "2-two")
    answer = server.administer("/weights_checker", {"action": "checksum"})
    changed = answer.body["ranks"] != before
    return answer.has("success") | {"repeats": repeated, "changes": changed}


@call(
    "/begin_weight_update",
    "/end_weight_update",
    "/destroy_weights_update_group",
    answer={
        "begin": {"status": 200, "success": True},
        "begin again": {"status": 400, "success": False},
        "end": {"status": 200, "success": True},
        "end again": {"status": 400, "success": False},
        "unknown group": {"status": 400, "success": False},
    },
)
def a_session_of_an_update_is_opened_once_and_closed_once(server: Server) -> Json:
    body = {"selector": "all"}
    told: Json = {}
    pause(server)
    told["begin"] = server.administer("/begin_weight_update", body).has("success")
    told["begin again"] = server.administer("/begin_weight_update", body).has("success")
    told["end"] = server.administer("/end_weight_update", {}).has("success")
    told["end again"] = server.administer("/end_weight_update", {}).has("success")
    go_on(server)
    group = {"group_name": "no-such-group"}
    told["unknown group"] = server.administer("/destroy_weights_update_group", group).has("success")
    load_paused(server, server.folders.first, "1-one")
    return told


@call(
    "/init_weights_update_group",
    "/begin_weight_update",
    "/update_weights_from_distributed",
    "/end_weight_update",
    "/destroy_weights_update_group",
    answer={
        "join": {"status": 200, "success": True},
        "bucket": {"status": 200, "success": True},
        "end": {"status": 200, "success": True},
        "label kept": True,
        "received": True,
        "leave": {"status": 200, "success": True},
    },
)
def weights_are_received_in_a_bucket_over_a_group_of_their_own(server: Server) -> Json:
    told: Json = {}
    load_paused(server, server.folders.second, "2-two")
    expected = checksums(server)
    load_paused(server, server.folders.first, "1-one")

    # Rank 0 connects while the server joins.
    name = "table"
    group = GlooGroup(server.url, 1, stretched(30), (name, f"{name}/", "cpu/"))
    connected = on_daemon_thread(group.connect, "table")
    body: Json = {**group.init_info, "group_name": name, "backend": "gloo"}
    told["join"] = server.administer("/init_weights_update_group", body).has("success")
    connected.result()

    # And sends while the server receives.
    tensors = load_file(server.folders.second / "model.safetensors")
    flat = torch.cat(
        [tensor.contiguous().view(torch.uint8).flatten() for tensor in tensors.values()]
    )
    pause(server)
    server.administer("/begin_weight_update", {"selector": "all"})
    sent = on_daemon_thread(partial(group.send, flat), "table")
    bucket: Json = {
        "names": list(tensors),
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
        "group_name": name,
        "load_format": "flattened_bucket",
        "flush_cache": True,
    }
    told["bucket"] = server.administer("/update_weights_from_distributed", bucket).has("success")
    sent.result()
    told["end"] = server.administer("/end_weight_update", {}).has("success")
    go_on(server)

    told["label kept"] = label(server) == "1-one"
    told["received"] = checksums(server) == expected
    leave = {"group_name": name}
    told["leave"] = server.administer("/destroy_weights_update_group", leave).has("success")
    return told


# Sleep


@call(
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/update_weight_version",
    "/generate",
    answer={
        "release": 200,
        "weights": 200,
        "cache": 200,
        "then": {"status": 200, "type": "length", "matched": None, "tokens": 4},
    },
)
def memory_is_released_once_and_resumed_in_two_parts(server: Server) -> Json:
    def tell(path: str, *tags: str) -> int:
        return server.administer(path, {"tags": list(tags)}).status

    told: Json = {}
    pause(server)
    told["release"] = tell("/release_memory_occupation", "weights", "kv_cache", "cuda_graph")
    told["weights"] = tell("/resume_memory_occupation", "weights")
    told["cache"] = tell("/resume_memory_occupation", "kv_cache", "cuda_graph")
    go_on(server)
    told["then"] = finish(generate(server))
    return told


# What must not be done


@call(
    "/health",
    "/ready",
    "/ping",
    "/generate",
    answer={
        "paused": 503,
        "continued": {"ready": 503, "ping": 503, "complete": 200},
        "once more": 200,
        "then": {"ready": 200, "ping": 200},
    },
)
def a_look_at_the_health_of_a_paused_server_waits_and_makes_it_unhealthy(server: Server) -> Json:
    """For 20 s, and until the next look at the health after it continued."""

    def state() -> Json:
        return {"ready": server.get("/ready").status, "ping": server.get("/ping").status}

    told: Json = {}
    pause(server)
    told["paused"] = server.get("/health").status
    go_on(server)
    told["continued"] = state() | {"complete": generate(server).status}
    told["once more"] = server.get("/health").status
    told["then"] = state()
    return told


@call("/update_weights_from_disk", answer={"dies": True}, ends=True)
def a_weight_file_that_is_cut_ends_the_server(server: Server) -> Json:
    pause(server)
    body: Json = {
        "model_path": str(server.folders.cut),
        "weight_version": "3-three",
        "flush_cache": True,
        "abort_all_requests": False,
    }
    return {"dies": server.dies_of("/update_weights_from_disk", body, server.admin_key)}


def outside(server: Server) -> Json:
    params = {"max_new_tokens": 1, "temperature": 0.0}
    body = {"input_ids": [VOCABULARY + 5], "sampling_params": params, "return_logprob": True}
    return {"dies": server.dies_of("/generate", body)}


@call("/generate", answer={"dies": False})
def a_token_outside_the_vocabulary_is_answered_by_a_server_with_adapters(server: Server) -> Json:
    return outside(server)


@call("/generate", answer={"dies": True}, needs=PLAIN, ends=True)
def a_token_outside_the_vocabulary_ends_the_server(server: Server) -> Json:
    return outside(server)
