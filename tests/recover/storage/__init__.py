"""Tests of `holdfast.recover.storage`."""
