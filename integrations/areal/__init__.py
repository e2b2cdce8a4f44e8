"""Reader of AReaL's configuration files."""

from .load import load_areal

__all__ = ["load_areal"]
