"""A stand-in for vLLM, which is started by the same command and refuses flags that vLLM has not."""
