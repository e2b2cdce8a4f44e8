"""Whole jobs to run, and scripts that kill them (`demo`, `serve_demo`, `learn`, `chaos`)."""
