"""Generations on disk and at a mirror: stage, commit, list, verify, quarantine, delete. Knows no torch."""
