"""Tests of `holdfast_convert`."""
