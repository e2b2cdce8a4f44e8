"""Samples generated while training goes on, with bounded staleness, and none of them lost.

`RolloutExecutor` runs a workflow for every ticket that it hands out, and gives the batch of a step once all tickets of
that step are finished. The names are in ``__init__.pyi`` and imported when they are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
