"""Tests of other projects, read from a checkout at run time, with Holdfast's save and load instead
of theirs.
"""
