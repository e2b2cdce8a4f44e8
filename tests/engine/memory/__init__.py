"""Tests of `holdfast.engine.memory`."""
