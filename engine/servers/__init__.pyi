# The public names and where they are; `lazy_loader` imports each when it is first used.

from .vllm import VLLMServer as VLLMServer
