"""Tests of ``holdfast-weights``."""
