"""Tests of `holdfast.engine.model`."""
