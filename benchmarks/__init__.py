"""Where the figures come from: what Holdfast does beside what others do, over what the machine can do.

``python -m benchmarks`` (``make bench``) measures everything, ``--help`` says what else it can do; ``python -m
benchmarks.compare`` (``make bench-compare``) shows how the figures have moved. docs/performance.md explains them.
"""
