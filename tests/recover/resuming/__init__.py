"""Tests of `holdfast.recover.resuming`."""
