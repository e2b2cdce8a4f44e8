"""Plugins for other programs, as far as they can be tested without these programs."""
