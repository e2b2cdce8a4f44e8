"""Dataclasses from a YAML file with ``key=value`` overrides, or one error that names the key.

OmegaConf merges and checks types. The dataclasses check values in ``__post_init__``, so that a bad
configuration fails before any process starts.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import ScalarEvent, YAMLError

from .errors import ConfigError
from .files import StrPath

T = TypeVar("T")

_BASE_60 = re.compile(r"[-+]?[1-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?")


def load_config(cls: type[T], path: StrPath | None = None, overrides: Sequence[str] = ()) -> T:
    """Read an instance of the dataclass ``cls``.

    Args:
        cls: dataclass of the configuration. Nested dataclasses are sections.
        path: YAML file, or None for the defaults.
        overrides: ``section.key=value`` strings that win over the file.

    Raises:
        ConfigError: the file does not exist or is not YAML, a key is unknown, a value is missing or
            has the wrong type, or a ``__post_init__`` refused it. The message names the key.

    Example:
        >>> load_config(TrainEngineConfig, "train.yaml", ["optimizer.lr=1e-6"])
    """
    # The source that messages name.
    source = f"{path}"
    if path is None:
        source = f"the defaults of {cls.__name__}"
    if overrides:
        source = f"{source} with overrides {list(overrides)}"
    keys = read_yaml(path, overrides, source)
    return build_config(cls, keys, source)


def read_yaml(path: StrPath | None, overrides: Sequence[str], source: str) -> DictConfig:
    """Read the keys of a file and merge the overrides into them, without resolving interpolations.

    Raises:
        ConfigError: the file does not exist or is not YAML with a mapping of keys, or an override
            is malformed. The message names ``source``, or quotes the file or override.
    """
    with _as_config_error(source):
        # The file. Its text is checked before OmegaConf has turned it into numbers.
        loaded: Any = OmegaConf.create()
        if path is not None:
            if not Path(path).is_file():
                raise ConfigError(f"config file {path} does not exist")
            _refuse_base_60(Path(path).read_text())
            loaded = OmegaConf.load(Path(path))
            if not isinstance(loaded, DictConfig):
                raise ConfigError(f"config file {path} holds a list; expected a mapping of keys")

        # The overrides, whose values are YAML too.
        for override in overrides:
            _, sign, value = override.partition("=")
            if not sign:
                raise ConfigError(f"override {override!r} is not of the form key=value")
            _refuse_base_60(value)
        given = OmegaConf.from_dotlist(list(overrides))
        return OmegaConf.merge(loaded, given)  # type: ignore[return-value]


def build_config(cls: type[T], keys: Mapping[str, Any] | DictConfig, source: str) -> T:
    """Build an instance of the dataclass ``cls`` from ``keys``.

    Raises:
        ConfigError: a key is unknown, a value is missing or has the wrong type, or a
            ``__post_init__`` refused it. The message names the key and ``source``.
    """
    with _as_config_error(source):
        # The dataclass gives types and defaults.
        merged = OmegaConf.merge(OmegaConf.structured(cls), keys)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]


def resolve(config: DictConfig | ListConfig, source: str) -> Any:
    """Convert to plain dicts and lists, with interpolations resolved.

    Raises:
        ConfigError: an interpolation leads nowhere, or a value is missing (``???``). The message
            names the key.
    """
    with _as_config_error(source):
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


@contextmanager
def _as_config_error(source: str) -> Iterator[None]:
    try:
        yield
    except OmegaConfBaseException as error:
        # The first line is the reason. The others repeat the key and name OmegaConf's types.
        key = getattr(error, "full_key", None) or getattr(error, "key", None)
        reason = str(error).splitlines()[0]
        raise ConfigError(f"config key {key!r} in {source}: {reason}") from error
    except (YAMLError, OSError, UnicodeError) as error:
        raise ConfigError(f"{source} is not YAML with a mapping of keys: {error}") from error


def _refuse_base_60(text: str) -> None:
    """Refuse ``1:00:30:00``, which YAML 1.1 reads as the base-60 number 217800."""
    for event in yaml.parse(text):
        # Only a scalar without quotes can be a number.
        if not isinstance(event, ScalarEvent) or not event.implicit[0]:
            continue
        text = event.value
        if _BASE_60.fullmatch(text):
            raise ConfigError(f"{text} is a number in base 60 to YAML; put it in quotes: '{text}'")


def require_choice(key: str, value: object, choices: Sequence[object]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``. For use in ``__post_init__``."""
    if value not in choices:
        expected = ", ".join(map(repr, choices))
        raise ConfigError(f"config key {key!r} is {value!r}; expected one of {expected}")


def require_numbers(config: Any, section: str = "") -> None:
    """Raise ConfigError if a field of the dataclass ``config`` that takes numbers is a text, or one
    that takes whole numbers has a fraction.

    For use in ``__post_init__``. ``section`` is where the fields are in a file, for example
    ``optimizer.``.
    """
    for field in fields(config):
        # The members of a union, or the type itself.
        kinds = get_args(field.type) or [field.type]
        if set(kinds) <= {int, float, NoneType}:
            value = getattr(config, field.name)
            _refuse_text(f"{section}{field.name}", value)
            if isinstance(value, float) and float not in kinds:
                raise ConfigError(
                    f"config key '{section}{field.name}' is {value}; expected a whole number, "
                    "without a point"
                )


def _refuse_text(key: str, value: object) -> None:
    if isinstance(value, str):
        raise ConfigError(
            f"config key {key!r} is {value!r}, a text; expected a number. YAML reads 1e-5 as "
            "text, and 1.0e-5 as a number: write it so, convert it with float(), or read the file "
            "with load_config"
        )


def require_range(key: str, value: float | None, *, low: float, high: float = float("inf")) -> None:
    """Raise ConfigError unless ``value`` is None or within ``[low, high]``. For use in
    ``__post_init__``.
    """
    _refuse_text(key, value)
    if value is None:
        return
    if not low <= value <= high:
        raise ConfigError(f"config key {key!r} is {value!r}; expected a value from {low} to {high}")


def require_at_least(config: Any, section: str = "", **lows: float) -> None:
    """`require_range` for fields of the dataclass ``config``, by name: the smallest value of each.

    ``section`` as for `require_numbers`.
    """
    for name, low in lows.items():
        value = getattr(config, name)
        require_range(f"{section}{name}", value, low=low)
