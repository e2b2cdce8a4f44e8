"""Benchmarks: Holdfast next to other implementations, each divided by what the machine can do.

``python -m benchmarks`` (``make bench``) measures everything, ``--help`` lists its options.
``python -m benchmarks.compare`` (``make bench-compare``) shows how the figures have moved.
docs/performance.md explains them.
"""
