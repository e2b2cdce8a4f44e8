"""A fake of ``transformers serve``, after its source: it loads a model on request, and tells how that goes."""

import json

from aiohttp import web

from tests.engine.servers.fake_engine import FakeEngine


def application(engine: FakeEngine) -> web.Application:
    """The HTTP of a fake ``transformers serve``."""
    loaded: set[str] = set()

    async def reset(_: web.Request) -> web.Response:
        loaded.clear()
        return web.json_response({"status": "ok"})

    async def load_model(request: web.Request) -> web.Response:
        folder = (await request.json())["model"]
        model = f"{folder}@main"
        events = [{"status": "ready", "model": model, "cached": True}]
        if folder not in loaded:
            try:
                engine.load(folder)
                loaded.add(folder)
                events = [{"status": "loading", "model": model}, {"status": "ready", "model": model, "cached": False}]
            except Exception as error:
                events = [{"status": "error", "model": model, "message": str(error)}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    app = web.Application(middlewares=[engine.with_faults])
    app.add_routes([web.post("/reset", reset), web.post("/load_model", load_model)])
    return app
