"""What the integrations use of their hosts without a promise to keep it; see `holdfast.engine.compat`."""

from collections.abc import Iterable
from importlib import metadata
from typing import Any

from ...utils.errors import UnsupportedVersionError


def require_attributes(library: str, thing: Any, names: Iterable[str], use: str) -> None:
    """See that an object has attributes that only its ``__init__`` makes, which no look at its class can find.

    Args:
        library: whose class it is.
        thing: the object.
        names: of the attributes.
        use: what they are needed for, to end the sentence "Holdfast needs it to ...".

    Raises:
        UnsupportedVersionError: one is not there.
    """
    if lacking := [name for name in names if not hasattr(thing, name)]:
        raise UnsupportedVersionError(
            f"{library} {metadata.version(library)} does not fit: its {type(thing).__name__} has no {lacking[0]!r}, "
            f"which Holdfast needs to {use}. Install another version of {library}"
        )
