"""Weight-transfer routes of a fake vLLM with ``holdfast_disk``: vLLM's session, and the check of the plugin itself."""

from aiohttp import web
from holdfast_vllm.published import FolderError, check_files, read_manifest

from tests.engine.servers.fake_engine import FakeEngine


def weight_transfer_routes(engine: FakeEngine) -> list[web.RouteDef]:
    """Of a server with ``--weight-transfer-config '{"backend": "holdfast_disk"}'``."""
    active = False

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
            check_files(info["path"], read_manifest(info["path"], info["manifest"]))
            engine.load(info["path"])
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

    return [
        web.post(f"/{route.__name__}", route) for route in (start_weight_update, update_weights, finish_weight_update)
    ]


def _failed(message: str) -> web.Response:
    text = f"Call to collective_rpc method failed: Worker failed with error '{message}', please check the stack trace"
    return web.json_response({"error": {"message": text, "type": "InternalServerError", "code": 500}}, status=500)
