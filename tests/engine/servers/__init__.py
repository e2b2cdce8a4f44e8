"""Tests of `holdfast.engine.servers`."""
