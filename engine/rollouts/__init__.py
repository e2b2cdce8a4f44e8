"""Samples generated while training goes on, with bounded staleness, and none of them lost."""
