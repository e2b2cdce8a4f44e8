"""Adapters of a fake server: names, slots in memory and in a batch, and endpoints after vLLM's
source.
"""

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.engine.servers.fake_weights import Weights, load_adapters

MODULES = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


@dataclass(eq=False)
class LoadedAdapter:
    """One load of an adapter, which running requests keep even if its name is unloaded."""

    name: str
    path: str
    number: int
    lies_as: "tuple[str, Weights] | None" = None

    @property
    def key(self) -> str:
        """Key of cached prefixes."""
        return f"{self.name} {self.path}"


@dataclass(eq=False)
class FakeAdapters:
    """Adapters of one server.

    Attributes:
        loaded: name -> adapter, in the order of the loads.
        unloaded: those that SGLang would load again for a request.
        slots: number of adapters in a batch (``--max-loras``).
        memory: number of adapters in memory (``--max-cpu-loras``). The least recently used one is
            dropped.
    """

    base: str | None
    dtype: str | None
    of_version: bool
    loaded: dict[str, LoadedAdapter] = field(default_factory=dict)
    unloaded: dict[str, LoadedAdapter] = field(default_factory=dict)
    slots: int = 2
    memory: int = 2
    _read: dict[LoadedAdapter, tuple[str, Weights]] = field(default_factory=dict)
    _running: dict[Any, LoadedAdapter] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)

    def load(self, name: str, path: str, lie: bool) -> None:
        adapter = LoadedAdapter(name, path, next(self._numbers))
        read = load_adapters(path, self.base, self.dtype, self.of_version)
        if lie and self.loaded:
            adapter.lies_as = self.use(list(self.loaded.values())[-1])
        self._keep(adapter, adapter.lies_as or read)
        self.loaded[name] = adapter

    def named(self, name: str | None) -> LoadedAdapter | None:
        """The adapter of a request to SGLang, which is loaded again if it was unloaded."""
        if name in self.unloaded:
            self.loaded[name] = self.unloaded.pop(name)
        return self.loaded.get(name or "")

    def use(self, adapter: LoadedAdapter) -> tuple[str, Weights]:
        """Return the weights. Raises OSError if the adapter must be read again and its folder is
        gone.
        """
        read = self._read.pop(adapter, None) or adapter.lies_as
        return self._keep(
            adapter, read or load_adapters(adapter.path, self.base, self.dtype, self.of_version)
        )

    def _keep(self, adapter: LoadedAdapter, read: tuple[str, Weights]) -> tuple[str, Weights]:
        while len(self._read) >= self.memory:
            del self._read[next(iter(self._read))]
        self._read[adapter] = read
        return read

    def begin(self, adapter: LoadedAdapter | None, request: Any) -> bool:
        """Whether a request may join the batch, in which it stays until `end`."""
        if adapter is None or request in self._running:
            return True
        used = set(self._running.values())
        if adapter not in used and len(used) >= self.slots:
            return False
        self._running[request] = adapter
        return True

    def end(self, request: Any) -> None:
        self._running.pop(request, None)

    def used(self, adapter: LoadedAdapter) -> bool:
        """Whether a request in the batch uses the adapter."""
        return adapter in self._running.values()

    def cards(self, max_model_len: int, model: str = "/model") -> list[dict[str, Any]]:
        """The models that ``GET /v1/models`` lists."""
        base = {"id": model, "root": model, "parent": None, "max_model_len": max_model_len}
        return [
            base,
            *({"id": a.name, "root": a.path, "parent": model} for a in self.loaded.values()),
        ]


def vllm_adapter_routes(
    engine: Any, config: dict[str, Any] | None, updating: bool, others: dict[str, Any]
) -> list[web.RouteDef]:
    """Routes of a vLLM server for adapters.

    Args:
        engine: a `FakeEngine`.
        config: ``lora_config`` as reported by the server. None without ``--enable-lora``.
        updating: VLLM_ALLOW_RUNTIME_LORA_UPDATING.
        others: the rest of ``vllm_config``.
    """
    if config is not None:
        engine.adapters.slots = config["max_loras"]
        engine.adapters.memory = config["max_cpu_loras"]

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {**others, "lora_config": config}, "vllm_env": {}})

    async def load_lora_adapter(request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], body["lora_path"]
        if name in engine.adapters.loaded:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        if config is None:
            return _error(
                500,
                "Worker failed with error 'LoRA is not enabled. Use --enable-lora to enable LoRA.'",
            )
        try:
            engine.load_adapter(name, path)
        except FileNotFoundError:
            return _error(404, f"Loading lora {name} failed: No adapter found for <path>")
        except Exception as error:
            return _error(
                500, f"Call to add_lora method failed: Worker failed with error '{error}'"
            )
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_lora_adapter(request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if engine.adapters.loaded.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    posts = [load_lora_adapter, unload_lora_adapter] if updating else []
    routes = [web.post(f"/v1/{handler.__name__}", handler) for handler in posts]
    return [*routes, web.get("/server_info", server_info)]


def sglang_adapter_routes(engine: Any, check: Any, enabled: bool) -> list[web.RouteDef]:
    """Routes of an SGLang server for adapters. ``check`` verifies the key of a request."""

    async def load_lora_adapter(request: web.Request) -> web.Response:
        check(request)
        body = await request.json()
        name = body["lora_name"]
        if not enabled:
            return _done("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
        try:
            if name in engine.adapters.loaded:
                raise ValueError(f"LoRA with name {name} already exists.")
            engine.load_adapter(name, body["lora_path"])
        except Exception as error:
            return _done(f"{error}")
        return _done("")

    async def unload_lora_adapter(request: web.Request) -> web.Response:
        check(request)
        name = (await request.json())["lora_name"]
        adapter = engine.adapters.loaded.pop(name, None)
        if adapter is None:
            return _done(f"LoRA with name {name} does not exist.")
        engine.adapters.unloaded[name] = adapter
        while engine.adapters.used(adapter):
            await asyncio.sleep(0.002)
        return _done("")

    posts = [load_lora_adapter, unload_lora_adapter]
    return [web.post(f"/{handler.__name__}", handler) for handler in posts]


def _done(problem: str) -> web.Response:
    body = {"success": not problem, "error_message": problem}
    return web.json_response(body, status=400 if problem else 200)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
