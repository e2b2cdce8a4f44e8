"""Ray actors: one process per rank, called as a group, with detection of deaths and hangs."""

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ModuleNotFoundError(
        "worker groups and the supervisor need the package ray: pip install 'holdfast[ray]'",
        name="ray",
    )
