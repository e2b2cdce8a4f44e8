"""Folders of models, and the model that a folder or a config becomes."""
