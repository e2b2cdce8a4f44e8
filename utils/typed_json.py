"""Dataclasses from untrusted JSON, with every value checked against the type of its field."""

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints


def from_json(kind: Any, value: Any, name: str) -> Any:
    """Convert ``value``, a result of ``json.loads``, to ``kind``.

    Args:
        kind: a dataclass, ``dict[str, ...]``, ``... | None``, int, float, str or bool. Whole numbers are converted
            between int and float. Unknown keys of a dataclass are ignored, because a newer writer may have added them.
        value: may hold NaN and infinities as floats, as Python's JSON allows.
        name: name of ``value`` in errors.

    Raises:
        TypeError: a value has another type. The message names it.
        ValueError: a field without a default is missing. The message names it.
        OverflowError: an int is too large for a float.
    """
    if isinstance(kind, UnionType):
        (some,) = (each for each in get_args(kind) if each is not NoneType)
        return None if value is None else from_json(some, value, name)
    if get_origin(kind) is dict:
        _require(isinstance(value, dict), kind, value, name)
        return {key: from_json(get_args(kind)[1], item, f"{name}.{key}") for key, item in value.items()}
    if isinstance(kind, type) and is_dataclass(kind):
        _require(isinstance(value, dict), kind, value, name)
        kinds = get_type_hints(kind)
        for field in fields(kind):
            if field.name not in value and field.default is field.default_factory is MISSING:
                raise ValueError(f"{name}.{field.name} is missing")
        known = [field.name for field in fields(kind) if field.name in value]
        return kind(**{key: from_json(kinds[key], value[key], f"{name}.{key}") for key in known})
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    _require(type(value) is kind, kind, value, name)
    return value


def _require(fits: bool, kind: Any, value: Any, name: str) -> None:
    if not fits:
        raise TypeError(f"{name} is {value!r}; expected {getattr(kind, '__name__', kind)}")
