"""Inference servers: told of published weights, checked, kept up to date, and asked to generate.

The names are in ``__init__.pyi`` and imported when they are used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
