"""Holdfast in other people's trainers; each file is a whole job that can be killed at any moment and started again."""
