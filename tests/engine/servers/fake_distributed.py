"""Routes of a fake SGLang for weights over a process group: a session, and buckets. They follow
SGLang's source.
"""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from torch.distributed import distributed_c10d

from tests.engine.servers.fake_engine import FakeEngine

_JOIN_S = 20.0


def sglang_distributed_routes(
    engine: FakeEngine, check: Callable[[web.Request], None]
) -> list[web.RouteDef]:
    """Routes for groups, sessions and updates. ``check`` refuses requests with a wrong key."""
    groups: dict[str, dist.ProcessGroup] = {}
    open_session = False

    async def init_weights_update_group(request: web.Request) -> web.Response:
        check(request)
        told = await request.json()
        try:
            groups[told["group_name"]] = await asyncio.to_thread(_join, told)
        except Exception as error:
            return _answer(f"Failed to initialize custom process group: {error}.")
        return _answer(None)

    async def destroy_weights_update_group(request: web.Request) -> web.Response:
        check(request)
        gone = groups.pop((await request.json())["group_name"], None)
        if gone is None:
            return _answer("The group to be destroyed does not exist.")
        dist.destroy_process_group(gone)
        return _answer(None)

    async def begin_weight_update(request: web.Request) -> web.Response:
        nonlocal open_session
        check(request)
        assert (await request.json())["selector"] == "all"
        if open_session:
            return _answer(
                "a weight-update session is already open; call end_weight_update() first"
            )
        open_session = True
        engine.dismantle()
        return _answer(None)

    async def update_weights_from_distributed(request: web.Request) -> web.Response:
        check(request)
        body = await request.json()
        if not open_session:
            return _answer(
                "update_weights_from_distributed is called outside of a weight update session"
            )
        if not engine.paused:
            await engine.drained()
        try:
            engine.take(await asyncio.to_thread(_receive, groups[body["group_name"]], body))
        except Exception as error:
            return _answer(
                f"Failed to update parameter online: {error}. Please discard the whole weights."
            )
        if body["flush_cache"] and not engine.reset_prefixes():
            return _answer("Cache flush failed after updating weights")
        if body.get("weight_version"):
            engine.set_label(body["weight_version"])
        return _answer(None)

    async def end_weight_update(request: web.Request) -> web.Response:
        nonlocal open_session
        check(request)
        if not open_session:
            return _answer("end_weight_update without begin_weight_update")
        open_session = False
        engine.assemble() if engine.is_complete() else engine.put_back()  # whatever is missing
        return _answer(None)

    posts = (
        init_weights_update_group,
        begin_weight_update,
        update_weights_from_distributed,
        end_weight_update,
    )
    posts = (*posts, destroy_weights_update_group)
    return [web.post(f"/{route.__name__}", route) for route in posts]


def _join(told: dict[str, Any]) -> dist.ProcessGroup:
    """Form a group next to the default group as SGLang's ``init_custom_process_group`` does."""
    limit, name, world_size = timedelta(seconds=_JOIN_S), told["group_name"], told["world_size"]
    store = dist.TCPStore(
        told["master_address"], told["master_port"], world_size, is_master=False, timeout=limit
    )
    group, _ = distributed_c10d._new_process_group_helper(
        world_size,
        told["rank_offset"],
        [],
        told["backend"],
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=limit,
    )
    assert isinstance(group, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
    return group


def _receive(group: dist.ProcessGroup, body: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Receive a ``flattened_bucket``: all tensors as one tensor of bytes."""
    assert body["load_format"] == "flattened_bucket"
    dtypes, shapes = (
        [getattr(torch, name) for name in body["dtypes"]],
        [torch.Size(shape) for shape in body["shapes"]],
    )
    sizes = [shape.numel() * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.broadcast(flat, 0).wait()
    parts = zip(body["names"], flat.split(sizes), dtypes, shapes, strict=True)
    return {name: part.view(dtype).view(shape) for name, part, dtype, shape in parts}


def _answer(problem: str | None) -> web.Response:
    body = {"success": problem is None, "message": problem or "ok"}
    return web.json_response(body, status=200 if problem is None else 400)
