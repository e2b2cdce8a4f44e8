"""Tests of `holdfast.engine.dcp`."""
