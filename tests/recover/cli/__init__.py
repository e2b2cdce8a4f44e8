"""Tests of `holdfast.recover.cli`."""
