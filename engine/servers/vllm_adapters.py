"""Adapters of a vLLM server: its endpoints, and how it has to be started for them (facts of vLLM 0.32).

A load reads all of the folder before anything else goes, and a failed one changes nothing. To unload is to forget the
name: requests in flight go on. The engine keeps ``--max-cpu-loras`` adapters in memory, those used last, and reads one
again from its folder when a request needs it; it dies if the folder is gone by then. It computes with ``--max-loras``
of them at the same time: a request that needs one more waits until all requests of another have ended.
"""

from ...utils.errors import PublishError
from .adapted import listed_adapters
from .adapters import AdapterFacts
from .http import Calls

_HEAD = "lm_head"
_NOT_SEEN = "No adapter found"
"""What vLLM says, with 404, of a folder that is not there."""


def require_room(calls: Calls, facts: AdapterFacts) -> None:
    """See that the server, as it was started, takes such adapters.

    The flags are looked at, not only the answer to a load: adapters of modules that it was not told to adapt are left
    out without a word, and beside other requests, log-probabilities of a prompt kill the engine (on CPUs) as long as
    its head can be adapted.

    Raises:
        PublishError: it does not; the message has the flag to start it with.
    """
    told = calls.get("look", "/server_info", params={"config_format": "json"}).get("vllm_config")
    rank, modules = facts.rank, facts.modules
    with calls.reading("what GET /server_info says of adapters"):
        limits = told["lora_config"]  # type: ignore[index]
        flags = f"--enable-lora --max-lora-rank {rank} --lora-target-modules {' '.join(modules)}"
        if limits is None:
            raise calls.refuse(f"it was started without adapters; start it with {flags}")
        if rank > limits["max_lora_rank"]:
            raise calls.refuse(
                f"the adapters have rank {rank}, it takes ranks up to {limits['max_lora_rank']}; start it with {flags} "
                "(or the next larger rank that vLLM takes)"
            )
        if _HEAD in modules:
            raise calls.refuse(
                "the adapters are of the head, too, and with such vLLM cannot tell log-probabilities of a prompt "
                "beside other requests; publish merged weights (type 'disk'), or leave lm_head out of target_modules"
            )
        adapted = limits["target_modules"]
        if adapted is None or _HEAD in adapted or not set(modules) <= set(adapted):
            raise calls.refuse(
                f"it adapts {'all modules, its head too' if adapted is None else ', '.join(sorted(adapted))}, the "
                f"adapters are of {', '.join(modules)}; start it with {flags}"
            )


def list_adapters(calls: Calls, key: str | None) -> list[str]:
    """Names of the adapters that the server has."""
    models = calls.get("look", "/v1/models", key=key)
    with calls.reading("its list of models"):
        return listed_adapters(models)


def load_adapter(calls: Calls, name: str, path: str, key: str | None) -> None:
    """Load the folder ``path`` as ``name``.

    Raises:
        PublishError: the server refused; it goes on as before.
    """
    try:
        calls.tell("load", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, key=key)
    except PublishError as error:
        if _NOT_SEEN in str(error):
            advice = "let the server see the folder under the same path"
        elif "was answered with 404" in str(error):
            advice = "start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        elif "was answered with" in str(error):
            advice = "it goes on with the adapters it has; see its log"
        else:
            raise
        raise type(error)(f"{error}; {advice}") from error


def unload_adapter(calls: Calls, name: str, key: str | None) -> None:
    """Forget ``name``; requests in flight go on."""
    calls.tell("unload", "/v1/unload_lora_adapter", {"lora_name": name}, key=key)
