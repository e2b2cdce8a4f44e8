# The public names and where they are; `lazy_loader` imports each when it is first used.

from .api import Batch as Batch
from .api import FinetuneSpec as FinetuneSpec
from .api import ParallelStrategy as ParallelStrategy
from .api import SaveLoadMeta as SaveLoadMeta
from .api import Stateful as Stateful
from .api import StepInfo as StepInfo
from .api import TrainEngine as TrainEngine
from .api import WeightUpdateMeta as WeightUpdateMeta
from .config import FSDPConfig as FSDPConfig
from .config import MicroBatchSpec as MicroBatchSpec
from .config import OptimizerConfig as OptimizerConfig
from .config import TrainEngineConfig as TrainEngineConfig
from .dcp.load import load_dcp as load_dcp
from .dcp.save import save_dcp as save_dcp
from .dcp.state import DCPState as DCPState
from .fsdp_engine import FSDPEngine as FSDPEngine
from .hf.deltas import PublishedCopy as PublishedCopy
from .hf.load import load_hf as load_hf
from .hf.save import full_state_dict as full_state_dict
from .hf.save import save_hf as save_hf
from .memory.weight_changes import changing_weights as changing_weights
from .servers.api import InferenceServer as InferenceServer
from .servers.fleet import ServerFleet as ServerFleet
from .servers.publish import publish_weights as publish_weights
from .servers.sglang import SGLangServer as SGLangServer
from .servers.vllm import VLLMServer as VLLMServer
