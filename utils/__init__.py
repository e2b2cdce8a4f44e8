"""Small things the engine and recovery both need, none of which knows about training.

Nothing is exported here: import from the modules, `from holdfast.utils.errors import HoldfastError`.
"""

__all__: list[str] = []
