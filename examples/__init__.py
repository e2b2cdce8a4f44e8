"""Runnable jobs, smallest first."""
