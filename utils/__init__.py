"""Helpers that the engine and recovery share, none of which knows about training.

The package exports nothing. Import from the modules, as in ``from holdfast.utils.errors import
HoldfastError``.
"""

__all__: list[str] = []
