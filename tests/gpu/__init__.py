"""Tests for a machine with a GPU (``make gpu``): whole jobs on CUDA and NCCL, and the figures for
docs/performance.md.

Every test is a job with a given device. With ``HOLDFAST_GPU_TESTS_DEVICE=cpu`` the whole list runs
on the CPU and over gloo, in small sizes, to check the jobs themselves.
"""
