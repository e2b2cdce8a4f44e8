"""Generations on disk and their copies at a mirror: stage, commit, list, verify, quarantine,
delete. Imports no torch.
"""
