"""Other people's trainers: transformers and TRL, Accelerate, verl, and scripts with a loop of their own.

Each file is for one host and imports that alone, when it is imported itself: `holdfast.integrations.transformers`,
`holdfast.integrations.accelerate`, `holdfast.integrations.verl`. The package itself has no names.
"""

__all__: list[str] = []
