"""Dataloaders that resume: their position and the order of their epochs."""
