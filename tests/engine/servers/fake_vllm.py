"""A fake of vLLM 0.32: its endpoints for updates and for completions of token ids, after its
source.
"""

import asyncio
import os
from typing import Any

from aiohttp import web

from tests.engine.servers.fake_adapters import MODULES, LoadedAdapter, vllm_adapter_routes
from tests.engine.servers.fake_engine import FakeEngine, Generation, Json
from tests.engine.servers.fake_images import Eyes
from tests.engine.servers.fake_plugin import weight_transfer_routes
from tests.engine.servers.fake_routes import FakeRoutes

TAGS = ("weights", "kv_cache")


def application(
    engine: FakeEngine,
    *,
    scale_out: bool = True,
    dev_mode: bool = True,
    processed_logprobs: bool = True,
    api_key: str | None = None,
    plugin: bool = False,
    sleep_mode: bool = True,
    device: str = "cuda",
    nccl: bool = False,
    version: str = "0.32.0",
    max_model_len: int = 100_000,
    lora: bool = False,
    lora_updating: bool = True,
    max_lora_rank: int = 8,
    max_loras: int = 2,
    lora_modules: list[str] | None = MODULES,
    served_name: str = "/model",
    eyes: Eyes = Eyes(),  # noqa: B008 - frozen
    routes: FakeRoutes | None = None,
) -> web.Application:
    """The HTTP application of a fake vLLM.

    Args:
        engine: the engine it serves.
        scale_out: ``--enable-scale-out``.
        dev_mode: ``VLLM_SERVER_DEV_MODE=1``.
        processed_logprobs: ``--logprobs-mode processed_logprobs``. Otherwise log-probabilities are
            raw.
        api_key: ``--api-key``.
        plugin: ``--weight-transfer-config '{"backend": "holdfast_disk"}'``, or ``holdfast_gloo``.
        nccl: the same with vLLM's own backend ``nccl``, over gloo.
        version: answer of ``/version``.
        sleep_mode: ``--enable-sleep-mode``.
        device: type of its device.
        max_model_len: ``--max-model-len``.
        lora: ``--enable-lora``.
        lora_updating: ``VLLM_ALLOW_RUNTIME_LORA_UPDATING``.
        max_lora_rank, max_loras: flags with these names.
        lora_modules: ``--lora-target-modules``. None: all, including the head.
        served_name: ``--served-model-name``.
        eyes: what it does with images.
        routes: ``--enable-return-routed-experts``.
    """
    limits = {"max_lora_rank": max_lora_rank, "max_loras": max_loras, "max_cpu_loras": max_loras}
    lora_config = {**limits, "target_modules": lora_modules} if lora else None

    async def pause(request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        engine.pause(mode, request.query.get("clear_cache", "true") == "true")
        return web.json_response({"status": "paused"})

    async def resume(_: web.Request) -> web.Response:
        engine.resume()
        return web.json_response({"status": "resumed"})

    async def is_paused(_: web.Request) -> web.Response:
        return web.json_response({"is_paused": engine.paused})

    async def sleep(request: web.Request) -> web.Response:
        level, mode = int(request.query.get("level", "1")), request.query.get("mode", "abort")
        assert level in (1, 2)
        engine.pause(mode, drop_caches=True)
        if "weights" not in engine.asleep:  # else "Executor is already sleeping."
            engine.sleep(set(TAGS), keeps_weights=level == 1)
        return web.json_response({"status": "sleeping", "level": level})

    async def wake_up(request: web.Request) -> web.Response:
        tags = set(request.query.getall("tags", []))
        if (
            tags <= engine.asleep
        ):  # else "Tag ... is not in sleeping tags" or "Executor is not sleeping."
            engine.wake_up(tags or set(engine.asleep))
        if not engine.asleep:
            engine.resume()
        return web.json_response(
            {"status": "sleeping" if engine.asleep else "awake", "tags": sorted(tags) or None}
        )

    async def is_sleeping(_: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(engine.asleep) or engine.paused})

    async def collective_rpc(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights", body
        try:
            engine.load(body["kwargs"]["weights_path"])
        except Exception as error:
            return _error(500, f"{type(error).__name__}: {error}")
        return web.json_response({"results": [None]})

    async def reset_prefix_cache(_: web.Request) -> web.Response:
        return web.json_response({"success": engine.reset_prefixes()})

    async def update_weight_version(request: web.Request) -> web.Response:
        label = (await request.json())["new_version"]
        engine.set_label(label)
        return web.json_response({"success": True, "new_version": label})

    async def weight_info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": engine.label})

    async def weight_checker(request: web.Request) -> web.Response:
        assert (await request.json())["action"] == "checksum"
        return web.json_response({"checksums": engine.checksums()})

    async def models(_: web.Request) -> web.Response:
        cards = engine.adapters.cards(max_model_len, served_name)
        return web.json_response({"object": "list", "data": cards})

    async def generate(request: web.Request) -> web.Response:
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if not scale_out:
            return _error(403, "scale-out endpoints are disabled; start with --enable-scale-out")
        body = await request.json()
        params = body["sampling_params"]
        salt = body.get("cache_salt")
        if salt is not None and (not 0 < len(salt) <= 128 or set(salt) & set("@/\\\0")):
            return _error(400, "cache_salt")
        model, adapter = (
            body.get("model") or served_name,
            engine.adapters.loaded.get(body.get("model")),
        )
        if adapter is None and model != served_name:
            return _error(404, f"The model `{model}` does not exist. Valid aliases: <path>")
        ids, parts = body["token_ids"], body.get("content_parts") or []
        if parts and body.get("features"):
            return _error(400, "content_parts and features are mutually exclusive")
        try:
            sizes = eyes.sizes([part["url"] for part in parts if part.get("type") == "image_url"])
            ids = eyes.expand(ids, sizes)
        except ValueError as error:
            return _error(400, str(error))
        except RuntimeError as error:
            return _error(500, str(error))
        if any(token >= engine.weights.vocabulary for token in ids):  # its tokenizer says so
            return _error(400, f"Token id {max(ids)} is out of vocabulary")
        if len(ids) >= max_model_len:
            return _error(
                400, f"The prompt ({len(ids)} tokens) leaves no room in {max_model_len} tokens."
            )
        await engine.ready()
        if params.get("prompt_logprobs") is not None:
            return await prompt_answer(ids, adapter)
        generation = Generation(
            rid=body.get("request_id", ""),
            prompt=ids,
            seed=params.get("seed") or 0,
            max_tokens=min(
                params["max_tokens"], max_model_len - len(ids)
            ),  # the scheduler ends it there
            stop=set(params.get("stop_token_ids") or ()),
            temperature=params["temperature"],
            salt=salt,
            adapter=adapter,
            bias=params.get("logit_bias") or {},
            min_tokens=params.get("min_tokens", 0),
        )
        top = engine.weights_of(adapter)[1].top_logprobs(
            generation.prompt,
            generation.temperature if processed_logprobs else 1.0,
            params["logprobs"] or 1,
        )
        await engine.generate(generation)
        entries = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(generation.tokens, generation.logprobs, strict=True)
        ]
        if entries:
            entries[0]["top_logprobs"] = [
                {"token_id": t, "logprob": p, "rank": 1} for t, p in top.items()
            ]
        choice: Json = {
            "index": 0,
            "token_ids": generation.tokens,
            "finish_reason": generation.reason,
            "logprobs": {"content": entries},
            "weight_versions": generation.spans,
        }
        if routes is not None:
            start = params.get("routed_experts_prompt_start", 0)
            found = routes.of_generation(generation, start)
            choice["routed_experts"] = routes.as_file(found)
        answer = {
            "request_id": generation.rid,
            "model": model,
            "choices": [choice],
            "prompt_logprobs": None,
        }
        if body.get("return_token_ids"):
            answer["prompt_token_ids"] = ids
        return web.json_response(answer)

    async def prompt_answer(ids: list[int], adapter: LoadedAdapter | None) -> web.Response:
        if lora and (lora_modules is None or "lm_head" in lora_modules) and engine.requests:
            engine.note(
                died=(
                    "log-probabilities of a prompt beside other requests, with a head that can be "
                    "adapted"
                )
            )
            os._exit(15)
        place = object()
        while not engine.adapters.begin(adapter, place):
            await asyncio.sleep(0.002)
        try:
            return web.json_response(_prompt_answer(ids, engine.prompt_logprobs(ids, adapter)))
        finally:
            engine.adapters.end(place)

    def _prompt_answer(ids: list[int], logprobs: list[float]) -> Json:
        entries: list[Any] = [None]
        for token, logprob in zip(ids[1:], logprobs, strict=True):
            entries.append({str(token): {"logprob": logprob, "rank": 1, "decoded_token": None}})
        return {
            "choices": [{"index": 0, "token_ids": [0], "finish_reason": "length"}],
            "prompt_logprobs": entries,
        }

    app = web.Application(middlewares=[engine.with_faults], client_max_size=2**28)
    app.add_routes([web.post("/inference/v1/generate", generate), web.get("/health", is_paused)])
    app.add_routes([web.get("/v1/models", models)])
    if dev_mode:
        config = {
            "model_config": {
                "enable_sleep_mode": sleep_mode,
                "enable_return_routed_experts": routes is not None,
            },
            "device_config": {"device": device},
        }
        app.add_routes(vllm_adapter_routes(engine, lora_config, lora_updating, config))
        posts = [
            pause,
            resume,
            sleep,
            wake_up,
            collective_rpc,
            reset_prefix_cache,
            update_weight_version,
        ]
        posts += [weight_checker]
        app.add_routes([web.post(f"/{handler.__name__}", handler) for handler in posts])
        app.add_routes(
            [
                web.get(f"/{handler.__name__}", handler)
                for handler in (is_paused, is_sleeping, weight_info)
            ]
        )
    if plugin or nccl:
        app.add_routes(weight_transfer_routes(engine, nccl, version))
    return app


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
