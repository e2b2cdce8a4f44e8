"""How a vLLM server is told to load a published folder, between pause and resume.

Its own ``reload_weights`` takes the model apart first and reads after that. A load that fails then leaves layers
without weights, and the next completion kills the server; when it failed in the middle of a layer, the next good load
fails too, and the one after that may leave wrong weights (vLLM 0.32). The backends of ``plugins/vllm`` check everything
first: what they refuse changes nothing, and what fails after that the next good load repairs.
"""

import os
from concurrent.futures import Future

from ...utils.errors import PoisonedServerError, PublishError
from ...utils.threads import on_daemon_thread
from .http import Calls, Json
from .sending import WeightSender

TRANSFERS = (None, "holdfast_disk")
"""How a server loads a folder: vLLM's own way, or by a weight-transfer backend of ``plugins/vllm``."""
_BROADCAST = "holdfast_broadcast"
"""The backend that receives weights."""

_POISONED = (
    "its weights are in pieces, and it stays paused: do not resume it, a completion would kill it. Check that it sees "
    "the folder, and tell it again; if that fails too, restart it"
)
_NO_PLUGIN = (
    "install holdfast-vllm beside vLLM and start the server with --weight-transfer-config "
    """'{{"backend": "{}"}}'; without it publish by type "disk", and leave out transfer"""
)
_REFUSED = "refused, the weights stay as they are"
"""What the plugin says of weights that it has not begun to load."""


def load_folder(calls: Calls, path: str, label: str, transfer: str | None) -> None:
    """Have a paused server load ``path``; it is not resumed.

    Args:
        calls: of the update.
        path: the published folder.
        label: its `weights_label`.
        transfer: one of `TRANSFERS`.

    Raises:
        PoisonedServerError: the load failed.
        PublishError: the plugin refused, and the server was resumed with the weights it has; or there is no plugin.
    """
    if transfer is None:
        load: Json = {"method": "reload_weights", "kwargs": {"weights_path": os.fspath(path)}}
        calls.post("load", "/collective_rpc", load, error=PoisonedServerError, advice=_POISONED)
    else:
        _open_update(calls, transfer)
        _update(calls, {"path": os.fspath(path), "manifest": label.partition("-")[2]})


def send_folder(calls: Calls, path: str, timeout_s: float) -> None:
    """Send the weights in ``path`` to a paused server with the backend ``holdfast_broadcast``; it is not resumed.

    Args:
        calls: of the update.
        path: the published folder.
        timeout_s: how long either end waits for the other.

    Raises:
        PoisonedServerError: the load failed.
        PublishError: the weights did not arrive, or the plugin refused them and the server was resumed with those it
            has; or there is no plugin.
    """
    _open_update(calls, _BROADCAST)
    workers = int(calls.get("load", "/get_world_size")["world_size"])
    sender = WeightSender(path, calls.url, workers, timeout_s)
    joined = on_daemon_thread(sender.connect, "weight sender")
    calls.post("load", "/init_weight_transfer_engine", {"init_info": sender.init_info})
    _require_done(calls, joined, timeout_s)
    sent = on_daemon_thread(sender.send, "weight sender")
    _update(calls, sender.update_info)
    _require_done(calls, sent, timeout_s)


def _open_update(calls: Calls, transfer: str) -> None:
    advice = _NO_PLUGIN.format(transfer)
    try:
        calls.post("load", "/start_weight_update", advice=advice)
    except PublishError:  # a publisher that was killed has left its update open; if not, this says why
        calls.post("load", "/finish_weight_update", {}, advice=advice)
        calls.post("load", "/start_weight_update", advice=advice)


def _update(calls: Calls, info: Json) -> None:
    try:
        calls.post("load", "/update_weights", {"update_info": info}, error=PoisonedServerError, advice=_POISONED)
    except PoisonedServerError as error:
        if _REFUSED not in str(error):
            raise
        calls.post("resume", "/resume")
        raise calls.refuse(f"it goes on with the weights it has: {error}") from error
    calls.post("load", "/finish_weight_update", {})


def _require_done(calls: Calls, work: "Future[None]", timeout_s: float) -> None:
    try:
        work.result(timeout_s)
    except (RuntimeError, TimeoutError) as error:
        raise calls.refuse(f"the weights could not be sent: {type(error).__name__}: {error}") from error
