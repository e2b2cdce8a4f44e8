"""Generations on disk and at a mirror: stage, commit, list, verify, quarantine, delete. Imports no
torch.
"""
