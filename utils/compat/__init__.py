"""Private names of other libraries that Holdfast needs, one file per library, checked at import.

If a release removes such a name or changes its parameters, the import fails with the library, its
version, the name and its use, instead of a failure in the middle of a run. A test checks that no
other file uses private names.
"""

import inspect
import pkgutil
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..errors import UnsupportedVersionError


@dataclass(frozen=True)
class Private:
    """Private name of another library."""

    name: str  # location as `pkgutil.resolve_name` takes it: ``package.module:Class.attribute``
    use: str  # purpose, which completes the sentence "Holdfast needs it to ..."
    # Parameters that Holdfast passes. None if the name is not called.
    parameters: tuple[str, ...] | None = None


def privates(names_by_use: Mapping[str, Sequence[str]]) -> list[Private]:
    """List the names of a table. A name that Holdfast calls ends with its parameters:
    ``module:function(a, b)``.
    """
    found = []
    for use, names in names_by_use.items():
        for name, bracket, parameters in (text.partition("(") for text in names):
            called = tuple(re.findall(r"\w+", parameters)) if bracket else None
            found.append(Private(name, use, called))
    return found


def require(library: str, names: Iterable[Private]) -> None:
    """Check that all ``names`` exist.

    Raises:
        UnsupportedVersionError: a name is missing or has other parameters.
    """
    for private in names:
        try:
            found = _find(private.name)
        except (ImportError, AttributeError):
            raise _unsupported(library, private, "is not there") from None
        if private.parameters is None:
            continue
        # A name that is called has to take what Holdfast passes.
        known = _parameters(found)
        if known is None:
            continue
        lacking = [name for name in private.parameters if name not in known]
        if lacking:
            raise _unsupported(library, private, f"has no parameter {lacking[0]!r}")


def require_attributes(library: str, thing: Any, names: Iterable[str], use: str) -> None:
    """Check attributes that only ``__init__`` sets, which the class does not show. ``use`` is as in
    `Private`.

    Raises:
        UnsupportedVersionError: an attribute is missing.
    """
    lacking = [name for name in names if not hasattr(thing, name)]
    if lacking:
        raise UnsupportedVersionError(
            f"{library} {metadata.version(library)} does not fit: its {type(thing).__name__} has "
            f"no {lacking[0]!r}, which Holdfast needs to {use}. Install another version of "
            f"{library}"
        )


def _find(name: str) -> Any:
    """Resolve a name. Returns None for an attribute that a class only annotates, because only its
    objects have it.
    """
    is_in_class = "." in name.partition(":")[2]
    owner, _, attribute = name.rpartition("." if is_in_class else ":")
    found = pkgutil.resolve_name(owner)
    if attribute in getattr(found, "__annotations__", {}):
        return None
    return getattr(found, attribute)


def _parameters(found: Any) -> Collection[str] | None:
    """Names of the parameters. None if they are not known, as of some classes that are written in
    C++.
    """
    try:
        return inspect.signature(found).parameters
    except ValueError:
        return None


def _unsupported(library: str, private: Private, problem: str) -> UnsupportedVersionError:
    # The range in pyproject.toml, without the extra that it belongs to.
    supported = library
    for entry in metadata.requires("holdfast") or []:
        if entry.startswith(library):
            supported = entry.split(";")[0]
            break
    return UnsupportedVersionError(
        f"{library} {metadata.version(library)} does not fit: {private.name} {problem}, which "
        f"Holdfast needs to {private.use}. Install another version of {library} (supported: "
        f"{supported.strip()})"
    )
