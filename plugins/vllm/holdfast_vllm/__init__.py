"""vLLM plugin: weight-transfer engines that check everything before they take a layer of the model apart.

``--weight-transfer-config '{"backend": "holdfast_disk"}'`` loads published folders, ``"holdfast_broadcast"`` receives
tensors over a process group. vLLM's own ``reload_weights`` takes the model apart first and reads after that: a folder
that cannot be read leaves a server whose next completion ends it.
"""

# pyright: reportMissingImports=false

_ENGINES = {
    "holdfast_disk": ("holdfast_vllm.disk", "DiskWeightTransferEngine"),
    "holdfast_broadcast": ("holdfast_vllm.broadcast", "BroadcastWeightTransferEngine"),
}


def register() -> None:
    """Entry point ``vllm.general_plugins``: called once in every process of a server."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for name, (module, engine) in _ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, module, engine)
