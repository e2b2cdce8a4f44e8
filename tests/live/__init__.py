"""Code that the tests against real vLLM and SGLang servers share."""
