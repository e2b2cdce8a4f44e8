"""What trains, and what it reads and writes: the sharded engine, its checkpoints, and the weights it publishes.

`WorkerGroup` needs the ``ray`` extra and is imported from `holdfast.engine.worker_group`.
"""

from .api import (
    Batch,
    FinetuneSpec,
    InferenceServer,
    ParallelStrategy,
    SaveLoadMeta,
    Stateful,
    StepInfo,
    TrainEngine,
    WeightUpdateMeta,
)
from .config import FSDPConfig, MicroBatchSpec, OptimizerConfig, TrainEngineConfig
from .dcp_checkpoint import load_dcp, save_dcp
from .dcp_staging import changing_weights
from .dcp_state import DCPState
from .fsdp_engine import FSDPEngine
from .hf_checkpoint import full_state_dict, save_hf
from .hf_import import load_hf
from .publish import publish_weights

__all__ = [
    "Batch",
    "DCPState",
    "FSDPConfig",
    "FSDPEngine",
    "FinetuneSpec",
    "InferenceServer",
    "MicroBatchSpec",
    "OptimizerConfig",
    "ParallelStrategy",
    "SaveLoadMeta",
    "Stateful",
    "StepInfo",
    "TrainEngine",
    "TrainEngineConfig",
    "WeightUpdateMeta",
    "changing_weights",
    "full_state_dict",
    "load_dcp",
    "load_hf",
    "publish_weights",
    "save_dcp",
    "save_hf",
]
