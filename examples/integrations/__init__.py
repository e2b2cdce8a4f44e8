"""Holdfast in other training libraries. Each file is a whole job that can be killed at any moment
and started again.
"""
