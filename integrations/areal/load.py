"""Configuration classes from an AReaL file, with AReaL's meaning of each key. See docs/areal.md."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from ...utils.config import build_config, read_yaml, resolve
from ...utils.errors import ConfigError
from ...utils.logging import get_logger
from .keys import DEFAULTS, FILE, KEYS, NOTHING, SECTIONS, Fate, Keys, Section, Table
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
    # Hydra marks new keys with a plus.
    overrides = [override.removeprefix("+") for override in overrides]
    source = f"{path}"
    if overrides:
        source += f" with overrides {overrides}"
    reader = _Reader(read_yaml(path, overrides, source), source)
    if _tables_of(cls):
        # A subclass is read from the section of its nearest base.
        name = section or next(SECTIONS[base] for base in _names(cls) if base in SECTIONS)
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

    def __init__(
        self,
        file: DictConfig,
        source: str,
    ) -> None:
        self.file = file
        # Interpolations may name keys that only AReaL's defaults have.
        defaults = OmegaConf.create(dict(DEFAULTS))
        self._with_defaults: Any = OmegaConf.merge(defaults, file)
        self._source = source
        self._without_effect: dict[str, list[str]] = {}
        self._remarks: list[str] = []

    def job(self, cls: type) -> Keys:
        """The keys of a class with a field for each section."""
        types = _field_types(cls)
        types = {name: kind for name, kind in types.items() if name in self.file}
        keys: Keys = {}
        for name, kind in types.items():
            if _tables_of(kind):
                keys[name] = self.section(kind, name)
            else:
                keys[name] = self._resolved(name)

        # Exports are settings of recovery here, so its section also reads the one of the saver.
        read = {key.partition(".")[0] for key in FILE}
        read.update(keys)
        for kind in types.values():
            if "RecoverConfig" in _names(kind):
                read.add("saver")
        unread = [str(name) for name in self.file if name not in read]
        self._note(f"not read by {cls.__name__}", unread)
        return keys

    def section(
        self,
        cls: type,
        name: str,
    ) -> Keys | None:
        """The keys of ``cls`` in section ``name``. None if the file has null or no such section."""
        found = self._resolved(name)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise ConfigError(f"{self._source}: {name} is {found!r}; expected a section of keys")
        classes = _names(cls)
        if "TrainEngineConfig" in classes:
            self._set_backend(found)

        # Keys of the section itself, and of those that belong to it here.
        table = _tables_of(cls)
        keys = self._translate(table, cls, name, found)
        if "RecoverConfig" in classes:
            keys |= self._exports(found)
        self._add_from_file(cls, found, keys)

        # Absent keys whose default differs.
        for key, fate in table.items():
            if fate.absent is not NOTHING and key not in found:
                keys[key] = fate.absent

        # Rules come last, because they compare values, also defaults of absent keys.
        rules = [rule for base in classes for rule in RULES.get(base, ())]
        try:
            for rule in rules:
                self._remarks += [f"{name}: {remark}" for remark in rule(keys, found)]
        except ConfigError as error:
            raise ConfigError(f"section {name!r} of {self._source}: {error}") from None
        return keys

    def _set_backend(self, found: Keys) -> None:
        """Take an absent backend from ``allocation_mode``, AReaL's older key for the backends of
        servers and trainer: "sglang:d4+d4t2".
        """
        mode = self._resolved("allocation_mode")
        if mode is None:
            return

        # The trainer is the last one. A bar in brackets is part of its backend.
        parts = re.split(r"[+]|[|](?![^(]*[)])", str(mode))
        backend = parts[-1]
        if backend.startswith(("eval", "cpu", "vllm", "sglang")):  # it names no trainer
            backend = "fsdp"
        if not backend.startswith(("fsdp", "megatron", "archon")):
            backend = f"fsdp:{backend}"
        found.setdefault("backend", backend)

    def _exports(self, found: Section) -> Keys:
        """The keys that recovery takes from AReaL's saver. A place that both share is no news."""
        said = dict(self._resolved("saver") or {})
        for key in _PLACE:
            if key in said and said[key] == found.get(key):
                del said[key]
        return self._translate(KEYS["saver"], None, "saver", said)

    def warn(self) -> None:
        """Log one warning with all remarks."""
        remarks = list(self._remarks)
        if self._without_effect:
            # Keys with the same reason stand together.
            parts = [f"{', '.join(names)} ({why})" for why, names in self._without_effect.items()]
            remarks.insert(0, f"without effect here: {'; '.join(parts)}")
        if remarks:
            logger.warning(
                "AReaL's file %s. %s. docs/areal.md has what becomes of each key",
                self._source,
                ". ".join(remarks),
            )

    def _resolved(self, name: str) -> Any:
        """The value of a section or key, with interpolations. None if the file has none."""
        if name not in self.file:
            return None
        value = OmegaConf.select(self._with_defaults, name)
        if isinstance(value, (DictConfig, ListConfig)):
            return resolve(value, self._source)
        return value

    def _note(
        self,
        why: str,
        names: Sequence[str],
    ) -> None:
        if names:
            self._without_effect.setdefault(why, []).extend(names)

    def _translate(
        self,
        table: Table,
        cls: type | None,
        section: str,
        found: Section,
    ) -> Keys:
        """The keys here of the values ``found`` in ``section``. Refuses and notes others."""
        own = set[str]()
        if cls is not None:
            own.update(_own_keys(cls))
        keys: Keys = {}
        for key, value in _leaves(found, table):
            full = f"{section}.{key}"
            fate = _fate(key, table)
            if fate is None:
                # Keys of Holdfast may stand next to AReaL's.
                if key not in own:
                    known = own.union(table)
                    raise self._unknown(full, [f"{section}.{each}" for each in known])
                _set(keys, key, value)
            elif fate.kind == "same":
                _set(keys, key, value)
            elif fate.kind == "renamed":
                # A switch of AReaL's may be a value of another key here.
                if fate.value is NOTHING:
                    _set(keys, fate.to, value)
                elif value:
                    _set(keys, fate.to, fate.value)
            elif value not in fate.neutral:
                if fate.kind == "refused":
                    self._refuse(full, value, fate)
                self._note(fate.why, [full])
        return keys

    def _unknown(
        self,
        key: str,
        known: list[str],
    ) -> ConfigError:
        known.sort()
        near = get_close_matches(key, known, n=3) or known
        return ConfigError(
            f"config key {key!r} in {self._source} is neither AReaL's nor Holdfast's; "
            f"did you mean {', '.join(near)}?"
        )

    def _add_from_file(
        self,
        cls: type,
        found: Section,
        keys: Keys,
    ) -> None:
        """Add the keys outside of the section that decide about it."""
        own = set(_own_keys(cls))
        for key, fate in FILE.items():
            value = OmegaConf.select(self.file, key, default=NOTHING)
            if value is NOTHING and OmegaConf.select(self.file, key.rpartition(".")[0]):
                value = fate.absent
            if value is NOTHING or value is None:
                continue

            # The section's own value wins over the file's.
            is_missing = fate.to in own and fate.to not in found
            if fate.kind == "renamed" and is_missing:
                keys[fate.to] = value
            elif fate.of in _names(cls) and value not in fate.neutral:
                if fate.kind == "refused":
                    if OmegaConf.is_dict(value):  # a whole section, too long for a message
                        value = "set"
                    self._refuse(key, value, fate)

                # Several sections of a job may meet this key. It is named once.
                if key not in self._without_effect.get(fate.why, ()):
                    self._note(fate.why, [key])

    def _refuse(
        self,
        key: str,
        value: Any,
        fate: Fate,
    ) -> None:
        advice = ""
        if fate.neutral:
            expected = " or ".join(map(repr, fate.neutral))
            advice = f"; expected {expected}, or no such key"
        raise ConfigError(f"config key {key!r} in {self._source} is {value!r}: {fate.why}{advice}")


def _require_class_of_a_file(cls: type) -> None:
    if _tables_of(cls):
        return
    if is_dataclass(cls):
        kinds = _field_types(cls).values()
        if any(_tables_of(kind) for kind in kinds):
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
    found: dict[str, Fate] = {}
    if "TrainEngineConfig" in _names(cls):
        # A section may have keys of all algorithms. Tables of the class itself come after these.
        fate = Fate("ignored", f"of an algorithm, which {cls.__name__} has not")
        for algorithm in ("PPOActorConfig", "PPOCriticConfig", "DPOConfig"):
            found |= {key: fate for key in KEYS[algorithm] if "." not in key}
    for name in reversed(_names(cls)):
        found |= KEYS.get(name, {})
    return found


def _fate(key: str, table: Table) -> Fate | None:
    """The fate of the key, or of its nearest parent section if that covers the whole section."""
    if key in table:
        return table[key]
    parent = key
    while "." in parent:
        parent = parent.rpartition(".")[0]
        if parent in table and table[parent].kind != "same":
            return table[parent]
    return None


def _leaves(
    found: Section,
    table: Table,
    prefix: str = "",
) -> Iterator[tuple[str, Any]]:
    """``(dotted key, value)`` of each key. A section that the table knows as a whole is one key."""
    for name, value in found.items():
        key = f"{prefix}{name}"
        is_section = isinstance(value, dict) and bool(value)
        has_rows = any(other.startswith(f"{key}.") for other in table)
        if is_section and (has_rows or key not in table):
            yield from _leaves(value, table, f"{key}.")
        else:
            yield key, value


def _set(
    keys: Keys,
    dotted: str,
    value: Any,
) -> None:
    *parents, last = dotted.split(".")
    for parent in parents:
        keys = keys.setdefault(parent, {})
        if keys is None:  # the file has null for the section
            return
    keys[last] = value


def _field_types(cls: type) -> Keys:
    """Maps each field to its class, and ``X | None`` to X."""
    hints = get_type_hints(cls)
    found = {}
    for name in (field.name for field in fields(cls)):
        found[name] = hints[name]
        if get_origin(hints[name]) in (Union, UnionType):
            either = get_args(hints[name])
            found[name] = next((kind for kind in either if is_dataclass(kind)), hints[name])
    return found


def _own_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a dataclass, and of the sections in it."""
    for name, kind in _field_types(cls).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from _own_keys(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
