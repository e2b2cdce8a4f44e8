"""Generations on disk and at a mirror: stage, commit, list, verify, retire. Knows no torch."""
