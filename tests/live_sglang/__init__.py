"""Tests against real SGLang servers on the CPU (``make test-sglang``)."""
