"""Private parts of transformers' Trainer that the integration with it replaces."""
