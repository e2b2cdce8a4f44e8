"""Published weights served by real vLLM servers: `make test-vllm`."""
