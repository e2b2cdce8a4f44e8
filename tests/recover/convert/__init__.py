"""Tests of `holdfast.recover.convert`."""
