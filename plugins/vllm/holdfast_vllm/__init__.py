"""vLLM plugin: weight-transfer engines that check weights before they dismantle a layer of the
model.

    vllm serve MODEL --weight-transfer-config '{"backend": "holdfast_disk"}'

``holdfast_disk`` loads published folders, ``holdfast_gloo`` receives tensors over a process group.
vLLM's own ``reload_weights`` dismantles the model before it reads. After an unreadable folder the
next completion ends the server.
"""

# pyright: reportMissingImports=false

_ENGINES = {
    "holdfast_disk": ("holdfast_vllm.disk", "DiskWeightTransferEngine"),
    "holdfast_gloo": ("holdfast_vllm.gloo", "GlooWeightTransferEngine"),
}


def register() -> None:
    """Entry point ``vllm.general_plugins``. vLLM calls it once in every process of a server."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    for name, (module, engine) in _ENGINES.items():
        WeightTransferEngineFactory.register_engine(name, module, engine)
