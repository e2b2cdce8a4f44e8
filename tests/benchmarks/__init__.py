"""Tests of the benchmarks' harness, without judging any figure."""
