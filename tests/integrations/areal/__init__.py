"""Tests of `holdfast.integrations.areal`."""
