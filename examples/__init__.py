"""Whole jobs to run, and what kills them (`demo`, `chaos`)."""
