"""Tests of the benchmarks' harness; no figure is judged here."""
