"""Tests of holdfast.integrations: other people's trainers, killed and started again."""
