"""Stand-ins for packages that SGLang imports and that are built for CUDA. A server finds them by
``PYTHONPATH``.

Each file names the package that it replaces, and the limits of tests with it. ``triton`` needs no
stand-in: the package of PyPI can be imported beside a CPU build of torch, and no kernel of it runs.
"""
