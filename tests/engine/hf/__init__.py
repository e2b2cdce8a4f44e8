"""Tests of `holdfast.engine.hf`."""
