"""Tests of `holdfast.engine.staging`."""
