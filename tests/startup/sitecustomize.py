"""Imported first by every Python that a test starts, so that deprecations are errors there too.

pytest's ``filterwarnings`` apply only to its own process. `tests.conftest` puts this folder on ``PYTHONPATH``, which
ranks, Ray's workers and whole jobs inherit.
"""

import warnings

for category in (DeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=category, module=r"holdfast\b")
