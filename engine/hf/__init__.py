"""Hugging Face folders: export, load and publish the weights of a sharded model."""
