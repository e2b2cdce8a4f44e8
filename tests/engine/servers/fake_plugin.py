"""Weight-transfer routes of a fake vLLM: vLLM's session, with the plugin's checks or vLLM's own
``nccl`` backend.
"""

import asyncio
import math
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from aiohttp import web
from holdfast_vllm.published import FolderError, check_files, read_manifest

from tests.engine.servers.fake_engine import FakeEngine

Tensors = dict[str, torch.Tensor]


def weight_transfer_routes(
    engine: FakeEngine, stock: bool, tell_version: str
) -> list[web.RouteDef]:
    """Routes with ``--weight-transfer-config '{"backend": "holdfast_disk"}'`` or ``holdfast_gloo``.

    With ``stock`` they are those of the backend ``nccl``: it dismantles the model at the start, has
    no digests, packs as vLLM does, and does not put layers back. Its collectives run over gloo.
    """
    active = False
    group: dist.ProcessGroupGloo | None = None
    chunk_bytes = 0

    async def get_world_size(_: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": tell_version})

    async def init_weight_transfer_engine(request: web.Request) -> web.Response:
        nonlocal group, chunk_bytes
        told = (await request.json())["init_info"]
        group, chunk_bytes = (
            await asyncio.to_thread(join, told),
            told.get("packed_buffer_size_bytes", 0),
        )
        return web.json_response({"message": "Weight transfer initialized"})

    async def shutdown_weight_transfer_engine(_: web.Request) -> web.Response:
        nonlocal group
        if active:
            return _failed("Cannot release a trainer connection during a weight update")
        group = None
        return web.json_response({"message": "Weight transfer shut down"})

    async def start_weight_update(_: web.Request) -> web.Response:
        nonlocal active
        if active:
            return _failed("start_weight_update called while a weight update is already active.")
        active = True
        if stock:
            engine.dismantle()
        return web.json_response({"message": "Weight update started"})

    async def update_weights(request: web.Request) -> web.Response:
        nonlocal active
        if not active:
            return _failed("start_weight_update must be called before update_weights.")
        info = (await request.json())["update_info"]
        try:
            if "path" in info:
                check_files(info["path"], read_manifest(info["path"], info["manifest"]))
                engine.load(info["path"])
            else:
                assert group is not None
                await receive_and_load(group, info)
        except FolderError as error:
            active = False
            stay = "are still mixed" if engine.mixed else "stay as they are"
            return _failed(f"refused, the weights {stay}: FolderError: {error}")
        except Exception as error:
            active = False
            return _failed(f"old and new weights are mixed, load a sound version: {error}")
        return web.json_response({"message": "Weights updated"})

    async def receive_and_load(group: dist.ProcessGroupGloo, info: dict[str, Any]) -> None:
        try:
            tensors, digest = await asyncio.to_thread(
                receive, group, info, chunk_bytes if stock else math.inf
            )
            if not stock and digest != info["digest"]:
                raise FolderError(
                    f"the tensors that arrived have digest {digest}, sent were {info['digest']}"
                )
        except (FolderError, RuntimeError) as error:
            if stock:
                raise
            engine.put_back()
            raise FolderError(str(error)) from error
        engine.dismantle()
        engine.take(tensors)
        if info.get("last"):
            engine.assemble()

    async def finish_weight_update(_: web.Request) -> web.Response:
        nonlocal active
        if not active:
            return _failed("finish_weight_update called without a matching start_weight_update.")
        active = False
        if stock:  # layers that miss a tensor get uninitialised memory
            engine.assemble() if engine.is_complete() else engine.put_back()
        else:
            engine.put_back()
        return web.json_response({"message": "Weight update finished"})

    posts = (start_weight_update, init_weight_transfer_engine, update_weights, finish_weight_update)
    posts = (*posts, shutdown_weight_transfer_engine)
    gets = [web.get("/get_world_size", get_world_size), web.get("/version", version)]
    return [*(web.post(f"/{route.__name__}", route) for route in posts), *gets]


def join(told: dict[str, Any]) -> dist.ProcessGroupGloo:
    """Join the group given to ``/init_weight_transfer_engine``, as the server's only worker."""
    limit = timedelta(seconds=told["timeout_s"])
    store = dist.TCPStore(
        told["master_address"], told["master_port"], is_master=False, timeout=limit
    )
    return dist.ProcessGroupGloo(store, told["rank_offset"], told["world_size"], limit)


def receive(
    group: dist.ProcessGroupGloo, info: dict[str, Any], chunk_bytes: float
) -> tuple[Tensors, str]:
    """Receive the tensors that ``info`` describes in chunks, as vLLM packs them, and the digest of
    all their bytes.
    """
    tensors, digest = Tensors(), xxhash.xxh3_128()
    facts = zip(info["names"], info["dtype_names"], info["shapes"], strict=True)
    described = [(name, getattr(torch, dtype), torch.Size(shape)) for name, dtype, shape in facts]
    sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in described]
    places = iter(described)
    for some in _chunks(sizes, chunk_bytes):
        flat = torch.empty(sum(some), dtype=torch.uint8)
        group.broadcast([flat], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
        digest.update(flat.numpy())  # type: ignore[arg-type]
        for part, (name, dtype, shape) in zip(flat.split(some), places, strict=False):
            tensors[name] = part.view(dtype).view(shape)
    return tensors, f"xxh3_128:{digest.hexdigest()}"


def _chunks(sizes: list[int], chunk_bytes: float) -> Iterator[list[int]]:
    """Cut after the tensor with which a chunk exceeds ``chunk_bytes``."""
    some: list[int] = []
    for size in sizes:
        some.append(size)
        if sum(some) > chunk_bytes:
            yield some
            some = []
    if some:
        yield some


def _failed(message: str) -> web.Response:
    text = (
        f"Call to collective_rpc method failed: Worker failed with error '{message}', please "
        "check the stack trace"
    )
    return web.json_response(
        {"error": {"message": text, "type": "InternalServerError", "code": 500}}, status=500
    )
