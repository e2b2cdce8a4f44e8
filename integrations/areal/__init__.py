"""AReaL's configuration files: a table of what becomes of each key, and the function that reads by it."""

from .load import load_areal

__all__ = ["load_areal"]
