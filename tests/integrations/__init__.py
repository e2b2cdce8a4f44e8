"""Tests of holdfast.integrations: trainers of other libraries, killed and started again."""
