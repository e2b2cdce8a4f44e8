"""Every Python that a test starts imports this first: what would break with the next release fails there too.

pytest's ``filterwarnings`` hold for its own process only. `tests.conftest` puts this folder on ``PYTHONPATH``, which
ranks, Ray's workers and whole jobs inherit.
"""

import warnings

for category in (DeprecationWarning, FutureWarning):
    warnings.filterwarnings("error", category=category, module=r"holdfast\b")
