"""Sample rollouts while training goes on, with bounded staleness and without losing any.

`RolloutExecutor` runs a workflow for every prompt and returns the batch of a step once all its
samples are there. The names are in ``__init__.pyi`` and imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
