# The public names and where they are; `lazy_loader` imports each when it is first used.

from .api import GenerationHyperparameters as GenerationHyperparameters
from .api import ModelRequest as ModelRequest
from .colocated import colocated as colocated
from .fleet import ServerFleet as ServerFleet
from .sglang import SGLangServer as SGLangServer
from .vllm import VLLMServer as VLLMServer
