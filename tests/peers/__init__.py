"""Tests of other projects, read from a checkout at run time, with Holdfast's save and load in the place of theirs."""
