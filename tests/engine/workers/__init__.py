"""Tests of `holdfast.engine.workers`."""
