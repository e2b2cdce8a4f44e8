"""Tests of servers that a job starts."""
