"""Inference servers that a job starts, watches, restarts and ends.

The names are in ``__init__.pyi`` and imported when they are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
