"""Read configuration classes from an AReaL file, as AReaL would read it: see docs/areal.md."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from ...utils.config import build_config, read_yaml, resolve
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from .keys import DEFAULTS, FILE, KEYS, NOTHING, SECTIONS, Fate
from .rules import RULES

logger = get_logger(__name__)

T = TypeVar("T")

_PLACE = ("experiment_name", "trial_name", "fileroot")


def load_areal(
    cls: type[T], path: str | os.PathLike[str], overrides: Sequence[str] = (), *, section: str | None = None
) -> T:
    """Read an instance of ``cls`` from a whole AReaL file.

    What has a meaning here works, keys of Holdfast's own may stand beside AReaL's, and a key that is absent has AReaL's
    default wherever that changes what is computed. Keys that say nothing about what is computed (schedulers, Megatron,
    servers) are named in one warning. Interpolations (``${actor.path}``) are resolved in the whole file.

    Args:
        cls: `TrainEngineConfig`, `PPOActorConfig`, `PPOCriticConfig`, `RecoverConfig` or a class derived from one,
            which is read from its section; or a dataclass with fields of these types, each read from the section of its
            name. A field of another type is read from the key of its name, as it is.
        path: YAML file.
        overrides: ``section.key=value`` strings that win over the file, as AReaL's command line has them.
        section: of the file, in place of that of the class (``actor``, ``critic``, ``recover``): ``"ref"``.

    Raises:
        ConfigError: a key would change what is computed and has nothing like it here, or is in neither AReaL nor
            Holdfast; or as `load_config`. The message names the key, and what to do.
    """
    overrides = [override.removeprefix("+") for override in overrides]  # as Hydra has new keys
    source = f"{path} with overrides {overrides}" if overrides else f"{path}"
    reader = _Reader(read_yaml(path, overrides, source), source)
    if _tables_of(cls):
        name = section or next(SECTIONS[base.__name__] for base in cls.__mro__ if base.__name__ in SECTIONS)
        keys = reader.section(cls, name)
        if keys is None:
            raise ConfigError(f"{source} has no section {name!r}; it has {', '.join(sorted(map(str, reader.file)))}")
    elif section is not None:
        raise ConfigError(f"section is {section!r}, but {cls.__name__} takes several; leave it out")
    else:
        keys = reader.job(cls)
    reader.warn()
    return build_config(cls, keys, source)


class _Reader:
    """Translates sections of one file, and remembers what there is to tell about them."""

    def __init__(self, file: DictConfig, source: str) -> None:
        self.file = file
        self._with_defaults: Any = OmegaConf.merge(OmegaConf.create(dict(DEFAULTS)), file)
        self._source = source
        self._without_effect: dict[str, list[str]] = {}
        self._remarks: list[str] = []

    def job(self, cls: type) -> dict[str, Any]:
        """The keys of a class that takes several sections."""
        types, keys = _field_types(cls), {}
        for name in (name for name in types if name in self.file):
            if _tables_of(types[name]):
                keys[name] = self.section(types[name], name)
            else:
                keys[name] = self._resolved(name)
        taken = {*keys, *(("saver",) if any("RecoverConfig" in _names(types[name]) for name in keys) else ())}
        unread = [str(name) for name in self.file if name not in taken and name not in _roots(FILE)]
        self._note(f"not read by {cls.__name__}", unread)
        return keys

    def section(self, cls: type, name: str) -> dict[str, Any] | None:
        """The keys of ``cls`` that section ``name`` says; None if the file has no such section, or null."""
        found = self._resolved(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise ConfigError(f"{self._source}: {name} is {found!r}; expected a section of keys")
        keys = self._translate(_tables_of(cls), cls, name, found)
        if "RecoverConfig" in _names(cls) and (saver := self._resolved("saver")):
            said = {key: value for key, value in saver.items() if key not in _PLACE or found.get(key) != value}
            keys |= self._translate(KEYS["saver"], None, "saver", said)
        self._add_from_file(cls, found, keys)
        for key, fate in _tables_of(cls).items():
            if fate.absent is not NOTHING and key not in found:
                keys[key] = fate.absent
        for rule in (rule for base in _names(cls) for rule in RULES.get(base, ())):
            self._remarks += [f"{name}: {remark}" for remark in rule(keys, found)]
        return keys

    def warn(self) -> None:
        """Tell everything at once."""
        parts = [f"{', '.join(names)} ({why})" for why, names in self._without_effect.items()]
        ignored = [f"without effect here: {'; '.join(parts)}"] if parts else []
        if remarks := ignored + self._remarks:
            logger.warning(
                "AReaL's file %s. %s. docs/areal.md has what becomes of each key", self._source, ". ".join(remarks)
            )

    def _resolved(self, name: str) -> Any:
        value = OmegaConf.select(self._with_defaults, name) if name in self.file else None
        return resolve(value, self._source) if isinstance(value, (DictConfig, ListConfig)) else value

    def _note(self, why: str, names: Sequence[str]) -> None:
        if names:
            self._without_effect.setdefault(why, []).extend(names)

    def _translate(
        self, table: Mapping[str, Fate], cls: type | None, section: str, found: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = set(_own_keys(cls)) if cls is not None else set()
        keys: dict[str, Any] = {}
        for key, value in _leaves(found, table):
            fate = _fate(key, table)
            if fate is None and key not in own:
                self._refuse_unknown(f"{section}.{key}", {f"{section}.{known}" for known in {*table, *own}})
            elif fate is None or (fate.kind == "same"):
                _set(keys, key, value)
            elif fate.kind == "renamed":
                if fate.value is NOTHING:
                    _set(keys, fate.to, value)
                elif value:
                    _set(keys, fate.to, fate.value)
            elif not _says_nothing(value, fate):
                if fate.kind == "refused":
                    self._refuse(f"{section}.{key}", value, fate)
                self._note(fate.why, [f"{section}.{key}"])
        return keys

    def _add_from_file(self, cls: type, found: Mapping[str, Any], keys: dict[str, Any]) -> None:
        """What keys outside of the section say about it."""
        own = _own_keys(cls)
        for key, fate in FILE.items():
            value = OmegaConf.select(self.file, key, default=NOTHING)
            if value is NOTHING or value is None:
                continue
            if fate.kind == "renamed" and fate.to in own and fate.to not in found:
                keys[fate.to] = value
            elif fate.kind == "refused" and "PPOActorConfig" in _names(cls) and not _says_nothing(value, fate):
                self._refuse(key, "set" if OmegaConf.is_config(value) else value, fate)

    def _refuse(self, key: str, value: Any, fate: Fate) -> None:
        advice = "" if fate.neutral is NOTHING else f"; expected {fate.neutral!r}, or nothing"
        raise ConfigError(f"config key {key!r} in {self._source} is {value!r}: {fate.why}{advice}")

    def _refuse_unknown(self, key: str, known: set[str]) -> None:
        near = get_close_matches(key, sorted(known), n=3) or sorted(known)
        raise ConfigError(
            f"config key {key!r} in {self._source} is neither AReaL's nor Holdfast's; did you mean {', '.join(near)}?"
        )


def _names(cls: type) -> list[str]:
    return [base.__name__ for base in getattr(cls, "__mro__", ())]


def _tables_of(cls: type) -> dict[str, Fate]:
    """What becomes of the keys of the section that ``cls`` is; empty for another class."""
    tables = [KEYS[name] for name in reversed(_names(cls)) if name in KEYS]
    if "TrainEngineConfig" in _names(cls):
        of_algorithms = Fate("ignored", f"of an algorithm, which {cls.__name__} has not")
        others = (key for table in ("PPOActorConfig", "PPOCriticConfig") for key in KEYS[table] if "." not in key)
        tables.insert(0, dict.fromkeys(others, of_algorithms))
    return {key: fate for table in tables for key, fate in table.items()}


def _fate(key: str, table: Mapping[str, Fate]) -> Fate | None:
    """That of the key itself, or of what it is in if that has one with everything in it."""
    if key in table:
        return table[key]
    parents = (key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1))
    return next((table[parent] for parent in parents if parent in table and table[parent].kind != "same"), None)


def _leaves(found: Mapping[str, Any], table: Mapping[str, Fate], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)``; of what the table knows as a whole the whole."""
    for name, value in found.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and (key not in table or _has_rows_in(key, table)):
            yield from _leaves(value, table, f"{key}.")
        else:
            yield key, value


def _has_rows_in(key: str, table: Mapping[str, Fate]) -> bool:
    return any(other.startswith(f"{key}.") for other in table)


def _roots(table: Mapping[str, Fate]) -> set[str]:
    return {key.partition(".")[0] for key in table}


def _says_nothing(value: Any, fate: Fate) -> bool:
    return fate.neutral is not NOTHING and value == fate.neutral


def _set(keys: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        keys = keys.setdefault(parent, {})
    keys[last] = value


def _field_types(cls: type) -> dict[str, Any]:
    """Field -> its class; of ``X | None``, X."""
    hints = get_type_hints(cls)
    return {field.name: _unwrapped(hints[field.name]) for field in fields(cls)}


def _unwrapped(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        return next((arg for arg in get_args(hint) if is_dataclass(arg)), hint)
    return hint


def _own_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a dataclass, and of the sections in it."""
    for name, kind in _field_types(cls).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _own_keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
