"""Tests of `holdfast.recover.data`."""
