# The public names and where they are; `lazy_loader` imports each when it is first used.

from .sglang import SGLangServer as SGLangServer
from .transformers_serve import TransformersServer as TransformersServer
from .vllm import VLLMServer as VLLMServer
