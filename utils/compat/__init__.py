"""What Holdfast uses of other libraries without their promise to keep it: one file a library, checked at import.

A release that takes such a name away, or gives it other parameters, is found when the file is imported and not in the
middle of a run: the error names the library, its version, the name, and what it is needed for. No other file of the
packages uses a private name; a test looks.
"""

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..errors import UnsupportedVersionError


@dataclass(frozen=True)
class Private:
    """A name without a promise.

    Attributes:
        name: where it is, as `pkgutil.resolve_name` takes it: ``package.module:Class.attribute``.
        use: what it is needed for, to end the sentence "Holdfast needs it to ...".
        parameters: those that a call from here gives it by name or position; None for what is not called.
    """

    name: str
    use: str
    parameters: tuple[str, ...] | None = None


def require(library: str, names: Iterable[Private]) -> None:
    """See that all of ``names`` are there.

    Raises:
        UnsupportedVersionError: one is not, or takes other parameters.
    """
    for private in names:
        try:
            found = _find(private.name)
        except (ImportError, AttributeError):
            raise _unsupported(library, private, "is not there") from None
        if private.parameters is not None and (lacking := _lacking(found, private.parameters)):
            raise _unsupported(library, private, f"has no parameter {lacking!r}")


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


def _find(name: str) -> Any:
    """What has this name; None for an attribute that a class only announces, since its objects have it."""
    owner, _, attribute = name.rpartition("." if "." in name.partition(":")[2] else ":")
    found = pkgutil.resolve_name(owner)
    return None if attribute in getattr(found, "__annotations__", {}) else getattr(found, attribute)


def _lacking(found: Any, parameters: Iterable[str]) -> str | None:
    signature = inspect.signature(found)
    return next((name for name in parameters if name not in signature.parameters), None)


def _unsupported(library: str, private: Private, problem: str) -> UnsupportedVersionError:
    required = metadata.requires("holdfast") or []
    supported = next((entry.split(";")[0] for entry in required if entry.startswith(library)), library)
    return UnsupportedVersionError(
        f"{library} {metadata.version(library)} does not fit: {private.name} {problem}, which Holdfast needs to "
        f"{private.use}. Install another version of {library} (supported: {supported.strip()})"
    )
