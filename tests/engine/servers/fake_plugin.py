"""Weight-transfer routes of a fake vLLM with the plugin: vLLM's session, and the check of the plugin itself."""

import asyncio
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from holdfast_vllm.published import FolderError, check_files, read_manifest

from tests.engine.servers.fake_engine import FakeEngine


def weight_transfer_routes(engine: FakeEngine) -> list[web.RouteDef]:
    """Routes with ``--weight-transfer-config '{"backend": "holdfast_disk"}'``, or ``holdfast_broadcast``."""
    active = False
    group: dist.ProcessGroupGloo | None = None

    async def get_world_size(_: web.Request) -> web.Response:
        return web.json_response({"world_size": 1})

    async def init_weight_transfer_engine(request: web.Request) -> web.Response:
        nonlocal group
        group = await asyncio.to_thread(join, (await request.json())["init_info"])
        return web.json_response({"message": "Weight transfer initialized"})

    async def start_weight_update(_: web.Request) -> web.Response:
        nonlocal active
        if active:
            return _failed("start_weight_update called while a weight update is already active.")
        active = True
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
                tensors, _ = await asyncio.to_thread(receive, group, info)
                engine.take(tensors)
        except FolderError as error:
            active = False
            return _failed(f"refused, the weights stay as they are: FolderError: {error}")
        except Exception as error:
            active = False
            return _failed(f"old and new weights are mixed, load a sound version: {error}")
        return web.json_response({"message": "Weights updated"})

    async def finish_weight_update(_: web.Request) -> web.Response:
        nonlocal active
        if not active:
            return _failed("finish_weight_update called without a matching start_weight_update.")
        active = False
        return web.json_response({"message": "Weight update finished"})

    posts = (start_weight_update, init_weight_transfer_engine, update_weights, finish_weight_update)
    return [*(web.post(f"/{route.__name__}", route) for route in posts), web.get("/get_world_size", get_world_size)]


def join(told: dict[str, Any]) -> dist.ProcessGroupGloo:
    """Join the group given to ``/init_weight_transfer_engine``, as the server's only worker."""
    limit = timedelta(seconds=told["timeout_s"])
    store = dist.TCPStore(told["master_address"], told["master_port"], is_master=False, timeout=limit)
    return dist.ProcessGroupGloo(store, told["rank_offset"], told["world_size"], limit)


def receive(group: dist.ProcessGroupGloo, info: dict[str, Any]) -> tuple[dict[str, torch.Tensor], bytes]:
    """Receive a broadcast described by ``info``: the tensors, and the digest at the end."""

    def next_tensor(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        flat = torch.empty(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
        group.broadcast([flat], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
        return flat.view(dtype).view(shape)

    facts = zip(info["names"], info["shapes"], info["dtype_names"], strict=True)
    tensors = {name: next_tensor(shape, getattr(torch, dtype)) for name, shape, dtype in facts}
    return tensors, bytes(next_tensor([16], torch.uint8).tolist())


def _failed(message: str) -> web.Response:
    text = f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace"
    return web.json_response({"error": {"message": text, "type": "InternalServerError", "code": 500}}, status=500)
