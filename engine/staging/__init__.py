"""Saving while training goes on: a copy of the state in host memory, written by a background
thread.
"""
