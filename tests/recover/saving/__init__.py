"""Tests of `holdfast.recover.saving`."""
