"""Configuration classes from an AReaL file, with AReaL's meaning of each key. See docs/areal.md."""

import os
import re
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
    cls: type[T],
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    section: str | None = None,
) -> T:
    """Read an instance of ``cls`` from an AReaL file.

    Holdfast's keys may stand next to AReaL's. An absent key gets AReaL's default if that changes
    the result. One warning names the keys without effect (schedulers, servers). Interpolations
    (``${actor.path}``) are resolved in the whole file.

    Args:
        cls: `TrainEngineConfig`, `PPOActorConfig`, `PPOCriticConfig`, `DPOConfig`, `RolloutConfig`,
            `GenerationHyperparameters`, `RecoverConfig` or a subclass of one, which is read from
            its section. Or a dataclass whose fields have these types, each read from the section of
            its name. Fields of other types are read from the key of their name.
        path: YAML file.
        overrides: ``section.key=value`` strings that win over the file, as on AReaL's command line.
        section: section to read instead of that of the class (``actor``, ``critic`` ...):
            ``"ref"``.

    Raises:
        ConfigError: ``cls`` is none of these, a key changes the result or the memory of the job and
            is not supported, a key is known to neither AReaL nor Holdfast, or as for `load_config`.
            The message names the key and the remedy.

    Example:
        ``load_areal(PPOActorConfig, "gsm8k_grpo.yaml", ["actor.path=Qwen/Qwen3-0.6B"])``
    """
    _require_class_of_a_file(cls)
    overrides = [override.removeprefix("+") for override in overrides]  # Hydra's mark of new keys
    source = f"{path} with overrides {overrides}" if overrides else f"{path}"
    reader = _Reader(read_yaml(path, overrides, source), source)
    if _tables_of(cls):
        name = section or next(
            SECTIONS[base.__name__] for base in cls.__mro__ if base.__name__ in SECTIONS
        )
        keys = reader.section(cls, name)
        if keys is None:
            raise ConfigError(
                f"{source} has no section {name!r}; it has "
                f"{', '.join(sorted(map(str, reader.file)))}"
            )
    elif section is not None:
        raise ConfigError(f"section is {section!r}, but {cls.__name__} takes several; leave it out")
    else:
        keys = reader.job(cls)
    reader.warn()
    return build_config(cls, keys, source)


class _Reader:
    """Translate sections of one file, and collect remarks about them."""

    def __init__(self, file: DictConfig, source: str) -> None:
        self.file = file
        self._with_defaults: Any = OmegaConf.merge(OmegaConf.create(dict(DEFAULTS)), file)
        self._source = source
        self._without_effect: dict[str, list[str]] = {}
        self._remarks: list[str] = []

    def job(self, cls: type) -> dict[str, Any]:
        """The keys of a class with a field for each section."""
        types = {name: kind for name, kind in _field_types(cls).items() if name in self.file}
        keys = {
            name: self.section(kind, name) if _tables_of(kind) else self._resolved(name)
            for name, kind in types.items()
        }
        read = {*keys, *(key.partition(".")[0] for key in FILE)}
        if any("RecoverConfig" in _names(kind) for kind in types.values()):
            read.add("saver")
        self._note(
            f"not read by {cls.__name__}", [str(name) for name in self.file if name not in read]
        )
        return keys

    def section(self, cls: type, name: str) -> dict[str, Any] | None:
        """The keys of ``cls`` in section ``name``. None if the file has no such section, or null."""
        found = self._resolved(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise ConfigError(f"{self._source}: {name} is {found!r}; expected a section of keys")
        mode = self._resolved("allocation_mode") if "TrainEngineConfig" in _names(cls) else None
        if (
            mode is not None
        ):  # AReaL's older key for the backends of servers and trainer: "sglang:d4+d4t2"
            backend = re.split(r"[+]|[|](?![^(]*[)])", str(mode))[-1]
            if backend.startswith(("eval", "cpu", "vllm", "sglang")):  # it names no trainer
                backend = "fsdp"
            named = backend.startswith(("fsdp", "megatron", "archon"))
            found.setdefault("backend", backend if named else f"fsdp:{backend}")
        keys = self._translate(_tables_of(cls), cls, name, found)
        if "RecoverConfig" in _names(cls) and (saver := self._resolved("saver")):
            said = {
                key: value
                for key, value in saver.items()
                if key not in _PLACE or found.get(key) != value
            }
            keys |= self._translate(KEYS["saver"], None, "saver", said)
        self._add_from_file(cls, found, keys)
        for key, fate in _tables_of(cls).items():
            if fate.absent is not NOTHING and key not in found:
                keys[key] = fate.absent
        for rule in (rule for base in _names(cls) for rule in RULES.get(base, ())):
            try:
                self._remarks += [f"{name}: {remark}" for remark in rule(keys, found)]
            except ConfigError as error:
                raise ConfigError(f"section {name!r} of {self._source}: {error}") from None
        return keys

    def warn(self) -> None:
        """Log one warning with all remarks."""
        parts = [f"{', '.join(names)} ({why})" for why, names in self._without_effect.items()]
        remarks = [f"without effect here: {'; '.join(parts)}"] if parts else []
        if told := ". ".join(remarks + self._remarks):
            logger.warning(
                "AReaL's file %s. %s. docs/areal.md has what becomes of each key",
                self._source,
                told,
            )

    def _resolved(self, name: str) -> Any:
        value = OmegaConf.select(self._with_defaults, name) if name in self.file else None
        return (
            resolve(value, self._source) if isinstance(value, (DictConfig, ListConfig)) else value
        )

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
                full, known = (
                    f"{section}.{key}",
                    sorted(f"{section}.{each}" for each in {*table, *own}),
                )
                near = ", ".join(get_close_matches(full, known, n=3) or known)
                raise ConfigError(
                    f"config key {full!r} in {self._source} is neither AReaL's nor Holdfast's; "
                    f"did you mean {near}?"
                )
            elif fate is None or (fate.kind == "same"):
                _set(keys, key, value)
            elif fate.kind == "renamed":
                if fate.value is NOTHING:
                    _set(keys, fate.to, value)
                elif value:
                    _set(keys, fate.to, fate.value)
            elif value not in fate.neutral:
                if fate.kind == "refused":
                    self._refuse(f"{section}.{key}", value, fate)
                self._note(fate.why, [f"{section}.{key}"])
        return keys

    def _add_from_file(self, cls: type, found: Mapping[str, Any], keys: dict[str, Any]) -> None:
        """Add the keys outside of the section that decide about it."""
        own = _own_keys(cls)
        for key, fate in FILE.items():
            value = OmegaConf.select(self.file, key, default=NOTHING)
            if value is NOTHING or value is None:
                continue
            if fate.kind == "renamed" and fate.to in own and fate.to not in found:
                keys[fate.to] = value
            elif fate.of in _names(cls) and value not in fate.neutral:
                if fate.kind == "refused":
                    self._refuse(key, "set" if OmegaConf.is_dict(value) else value, fate)
                if key not in self._without_effect.get(fate.why, ()):
                    self._note(fate.why, [key])

    def _refuse(self, key: str, value: Any, fate: Fate) -> None:
        advice = (
            f"; expected {' or '.join(map(repr, fate.neutral))}, or no such key"
            if fate.neutral
            else ""
        )
        raise ConfigError(f"config key {key!r} in {self._source} is {value!r}: {fate.why}{advice}")


def _require_class_of_a_file(cls: type) -> None:
    if _tables_of(cls) or (
        is_dataclass(cls) and any(_tables_of(kind) for kind in _field_types(cls).values())
    ):
        return
    raise ConfigError(
        f"{cls.__name__} is no section of AReaL's files; expected {', '.join(SECTIONS)}, a class "
        "derived from one, or a dataclass with fields of these"
    )


def _names(cls: type) -> list[str]:
    return [base.__name__ for base in getattr(cls, "__mro__", ())]


def _tables_of(cls: type) -> dict[str, Fate]:
    """The fate of each key of the section that ``cls`` is read from. Empty for a class without a
    section.
    """
    tables = [KEYS[name] for name in reversed(_names(cls)) if name in KEYS]
    if "TrainEngineConfig" in _names(cls):
        fate = Fate("ignored", f"of an algorithm, which {cls.__name__} has not")
        algorithms = ("PPOActorConfig", "PPOCriticConfig", "DPOConfig")
        tables.insert(
            0, {key: fate for table in algorithms for key in KEYS[table] if "." not in key}
        )
    return {key: fate for table in tables for key, fate in table.items()}


def _fate(key: str, table: Mapping[str, Fate]) -> Fate | None:
    """The fate of the key, or of its nearest parent section if that fate covers the whole section."""
    if key in table:
        return table[key]
    parents = (key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1))
    return next(
        (table[parent] for parent in parents if parent in table and table[parent].kind != "same"),
        None,
    )


def _leaves(
    found: Mapping[str, Any], table: Mapping[str, Fate], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of each key. A section that the table knows as a whole is one key."""
    for name, value in found.items():
        key = f"{prefix}{name}"
        has_rows = any(other.startswith(f"{key}.") for other in table)
        if isinstance(value, dict) and value and (key not in table or has_rows):
            yield from _leaves(value, table, f"{key}.")
        else:
            yield key, value


def _set(keys: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        keys = keys.setdefault(parent, {})
        if keys is None:  # the file has null for the section
            return
    keys[last] = value


def _field_types(cls: type) -> dict[str, Any]:
    """Maps each field to its class, and ``X | None`` to X."""
    hints, found = get_type_hints(cls), {}
    for name in (field.name for field in fields(cls)):
        either = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else ()
        found[name] = next((kind for kind in either if is_dataclass(kind)), hints[name])
    return found


def _own_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a dataclass, and of the sections in it."""
    for name, kind in _field_types(cls).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _own_keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
