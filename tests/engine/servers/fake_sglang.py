"""A fake of SGLang 0.5: its endpoints for updates and for completions of token ids, after its
source.
"""

import asyncio
import os
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import web

from tests.engine.servers.fake_adapters import sglang_adapter_routes
from tests.engine.servers.fake_distributed import sglang_distributed_routes
from tests.engine.servers.fake_engine import FakeEngine, Generation
from tests.engine.servers.fake_images import Eyes
from tests.engine.servers.fake_routes import FakeRoutes

HEALTH_LIMIT_S = 0.3
"""Time limit of ``/health``. That of SGLang is 20 s."""


def application(
    engine: FakeEngine,
    *,
    api_key: str | None = None,
    admin_key: str | None = None,
    original_logprob: bool = False,
    max_model_len: int = 100_000,
    max_total_tokens: int = 1_000_000,
    lora: bool = False,
    memory_saver: bool = True,
    cpu_backup: bool = False,
    dp_size: int = 1,
    eos: int = 7,
    eyes: Eyes = Eyes(),  # noqa: B008 - frozen
    routes: FakeRoutes | None = None,
) -> web.Application:
    """The HTTP application of a fake SGLang.

    Args:
        engine: the engine it serves.
        api_key: ``--api-key``.
        admin_key: ``--admin-api-key``. If set, the update endpoints accept no other key.
        original_logprob: ``SGLANG_RETURN_ORIGINAL_LOGPROB``: log-probabilities ignore the
            temperature.
        max_model_len: ``--context-length``. The longest prompt is seven tokens shorter, and a
            completion ends two tokens before.
        max_total_tokens: ``--max-total-tokens``, the size of its KV cache.
        lora: ``--enable-lora``.
        memory_saver: ``--enable-memory-saver``.
        cpu_backup: ``--enable-weights-cpu-backup``.
        dp_size: ``--dp-size``.
        eos: end-of-sequence token of the model's config.
        eyes: what it does with images.
        routes: ``--enable-return-routed-experts``.
    """

    def check(request: web.Request, key: str | None) -> None:
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            raise web.HTTPUnauthorized(text='{"error": "Unauthorized"}')

    async def pause_generation(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        mode = (await request.json())["mode"]
        prefixes = dict(engine.prefixes)
        engine.pause("abort" if mode == "abort" else "keep", drop_caches=mode == "retract")
        engine.prefixes.update(prefixes)  # only a flush drops them
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        engine.resume()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights_from_disk(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        body = await request.json()
        if not engine.paused:
            if body.get("abort_all_requests"):
                for generation in engine.requests:
                    generation.reason = "abort"
            await engine.drained()
        if not Path(body["model_path"]).is_dir():
            return _updated(
                False, f"Failed to get weights iterator: cannot find {body['model_path']}."
            )
        try:
            engine.load(body["model_path"])
        except (
            Exception
        ) as error:  # the rollback reads the same path once more, and nothing catches that
            die(f"a load, and then its rollback: {error}")
        if body.get("flush_cache", True):
            engine.faults.flush_fails -= 1
            if engine.faults.flush_fails >= 0 or not engine.reset_prefixes():
                return _updated(False, "Cache flush failed after updating weights")
        nonlocal model_path
        model_path = body["model_path"]
        engine.set_label(body.get("weight_version") or engine.label)
        return _updated(True, "Succeeded to update model weights.")

    async def update_weight_version(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        body = await request.json()
        assert body["abort_all_requests"] is False
        engine.set_label(body["new_version"])
        return web.json_response(
            {"success": True, "message": "...", "new_version": body["new_version"]}
        )

    async def weights_checker(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        assert (await request.json())["action"] == "checksum"
        ranks = [
            {
                "checksums": engine.checksums(),
                "per_gpu_checksum": "",
                "parallelism_info": {"tp_rank": 0},
            }
        ]
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks})

    async def release_memory_occupation(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        tags = set((await request.json())["tags"])
        if not engine.paused or "weights" in tags & engine.asleep:
            die("a release of running requests, or of weights that are not there to be read")
        engine.sleep(tags, cpu_backup)
        return web.json_response(None)

    async def resume_memory_occupation(request: web.Request) -> web.Response:
        check(request, admin_key or api_key)
        tags = set((await request.json())["tags"])
        if not tags <= engine.asleep:
            die("KeyError: a tag that was not released")
        engine.wake_up(tags)
        return web.json_response(None)

    def die(why: str) -> NoReturn:
        engine.note(died=why)
        os._exit(17)

    healthy = True
    most_tokens = min(max_model_len, max_total_tokens) - 1
    model_path = engine.folder or "/model"
    started_with = model_path

    async def server_info(request: web.Request) -> web.Response:
        check(request, api_key)
        flags: dict[str, Any] = {"max_req_input_len": most_tokens - 5}
        flags |= {"enable_memory_saver": memory_saver, "enable_weights_cpu_backup": cpu_backup}
        flags |= {"enable_return_routed_experts": routes is not None}
        flags |= {"tp_size": 1, "dp_size": dp_size, "pp_size": 1}
        flags["served_model_name"] = started_with
        return web.json_response(flags)

    async def model_info(request: web.Request) -> web.Response:
        check(request, api_key)
        return web.json_response({"model_path": model_path, "weight_version": engine.label})

    async def models(request: web.Request) -> web.Response:
        check(request, api_key)
        cards = engine.adapters.cards(max_model_len, model_path)
        return web.json_response({"object": "list", "data": cards})

    async def health(_: web.Request) -> web.Response:
        """Answer when the engine computes a token, so not while it is paused. The server counts as
        unhealthy from then on, until a later look at its health.
        """
        nonlocal healthy
        end = asyncio.get_running_loop().time() + HEALTH_LIMIT_S
        while engine.paused and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.01)
        healthy = not engine.paused
        return web.Response(status=200 if healthy else 503)

    async def ping(request: web.Request) -> web.Response:
        check(request, api_key)
        return web.Response(status=200 if healthy else 503)

    async def ready(_: web.Request) -> web.Response:
        return web.Response(status=200 if healthy and not engine.paused else 503)

    def too_long(prompt: int, new: int) -> str | None:
        if prompt >= max_model_len:
            return (
                f"The input ({prompt} tokens) is longer than the model's context length "
                f"({max_model_len} tokens)."
            )
        if prompt + new > max_model_len:
            return (
                "Requested token count exceeds the model's maximum context length of "
                f"{max_model_len} tokens."
            )
        if prompt >= most_tokens - 5:
            return (
                f"Input length ({prompt} tokens) exceeds the maximum allowed length "
                f"({most_tokens - 5} tokens)."
            )
        return None

    async def generate(request: web.Request) -> web.Response:
        check(request, api_key)
        body = await request.json()
        params, ids = body["sampling_params"], body["input_ids"]
        adapter = engine.adapters.named(body.get("lora_path"))
        if adapter is None and body.get("lora_path") is not None:
            message = f"The following requested LoRA adapters are not loaded: {body['lora_path']}"
            return web.json_response({"error": {"message": message}}, status=400)
        urls = body.get("image_data") or []
        if urls and ids.count(eyes.token) > len(urls):  # an IndexError in its processor of Qwen-VL
            return web.Response(status=500, text="Internal Server Error")
        try:
            ids = eyes.expand(ids, eyes.sizes(urls))
        except (ValueError, RuntimeError) as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        if (problem := too_long(len(ids), params["max_new_tokens"])) is not None:
            return web.json_response({"error": {"message": problem}}, status=400)
        await engine.ready()
        if any(token >= engine.weights.vocabulary for token in ids):
            if not lora:
                die("IndexError: a token outside the vocabulary")
            ids = [token if token < engine.weights.vocabulary else 0 for token in ids]
        stop = set(params.get("stop_token_ids") or ()) | {eos}
        generation = Generation(
            rid=body.get("rid", ""),
            prompt=ids,
            seed=params.get("sampling_seed") or 0,
            max_tokens=min(params["max_new_tokens"], most_tokens - 1 - len(ids)),
            stop=set() if params.get("ignore_eos") else stop,
            min_tokens=params.get("min_new_tokens", 0),
            temperature=params.get("temperature", 1.0),
            salt=None,
            adapter=adapter,
            bias=params.get("logit_bias") or {},
        )
        weights = engine.weights_of(adapter)[1]
        top = weights.top_logprobs(
            ids,
            1.0 if original_logprob else generation.temperature,
            body.get("top_logprobs_num") or 1,
        )
        asked = body.get("logprob_start_len", -1) == 0
        prompt = engine.prompt_logprobs(ids, adapter) if asked else []
        await engine.generate(generation)
        meta = {
            "id": generation.rid,
            "finish_reason": finish_reason(generation),
            "weight_version": engine.label,
            "weight_versions": generation.spans,
            "output_token_logprobs": [
                [logprob, token, None]
                for token, logprob in zip(generation.tokens, generation.logprobs, strict=True)
            ],
            "output_top_logprobs": [[[logprob, token, None] for token, logprob in top.items()]],
            "input_token_logprobs": [
                [logprob, token, None] for token, logprob in zip(ids, [None, *prompt], strict=True)
            ]
            if asked
            else [],
        }
        if routes is not None and body.get("return_routed_experts"):
            found = routes.of_generation(generation, body.get("routed_experts_start_len", 0))
            meta["routed_experts"] = routes.as_flat(found)
        answer = {"text": "", "output_ids": generation.tokens, "meta_info": meta}
        return web.json_response(
            answer | ({"prompt_token_ids": ids} if body.get("return_prompt_token_ids") else {})
        )

    app = web.Application(middlewares=[engine.with_faults], client_max_size=2**28)
    posts = [
        pause_generation,
        continue_generation,
        update_weights_from_disk,
        update_weight_version,
        generate,
    ]
    posts += [release_memory_occupation, resume_memory_occupation, weights_checker]
    app.add_routes([web.post(f"/{handler.__name__}", handler) for handler in posts])
    app.add_routes([web.get("/model_info", model_info), web.get("/server_info", server_info)])
    app.add_routes([web.get(f"/{route.__name__}", route) for route in (health, ready, ping)])
    app.add_routes([web.get("/v1/models", models)])
    app.add_routes(
        sglang_distributed_routes(engine, lambda request: check(request, admin_key or api_key))
    )
    app.add_routes(
        sglang_adapter_routes(engine, lambda request: check(request, admin_key or api_key), lora)
    )
    return app


def finish_reason(generation: Generation) -> dict[str, Any]:
    """The reason for the end, and the token at which a completion stopped."""
    if generation.reason == "stop":
        return {"type": "stop", "matched": generation.tokens[-1]}
    return {"type": generation.reason, "length": generation.max_tokens}


def _updated(success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(body, status=200 if success else 400)
