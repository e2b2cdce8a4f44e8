"""Integrations with other trainers: transformers and TRL, Accelerate, verl, plain scripts, and
AReaL's configuration files.

Each module is for one host and imports only that host: `holdfast.integrations.transformers`,
`holdfast.integrations.accelerate`, `holdfast.integrations.verl`, `holdfast.integrations.areal`. The
package exports nothing.
"""

__all__: list[str] = []
