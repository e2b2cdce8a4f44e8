"""Inference servers: told of published weights, checked, kept up to date, and asked to generate."""
