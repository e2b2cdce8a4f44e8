"""Tests of `holdfast.engine.training`."""
