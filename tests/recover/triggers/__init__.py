"""Tests of `holdfast.recover.triggers`."""
