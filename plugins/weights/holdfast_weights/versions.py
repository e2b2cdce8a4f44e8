"""Plan how to make a version: which folder to begin with, and which deltas follow.

A delta names its base by version and label. The plan walks back from the target over the bases, to
a version that is held locally or to a full one, whichever is fewer bytes to fetch. A base is always
older than its version, so the walk ends. Every manifest on the way is checked before anything is
fetched.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import FolderError, MissingError
from .files import list_files
from .manifest import DELTA_NAME, MANIFEST_NAME, Manifest, check_folder, read_manifest
from .source import Source, version_name, version_of

LABEL = re.compile(r"(\d{1,18})-xxh3_128:[0-9a-f]{32}", re.ASCII)
"""Label of a version: the version, and the digest of its manifest."""
SMALL_FILES = "files/"
"""Folder in ``delta`` for the small files that changed."""

_RANK_FILE = re.compile(r"rank_\d{5,}\.safetensors", re.ASCII)


@dataclass(frozen=True)
class Delta:
    """The folder ``delta`` of a version: its changes since the base."""

    version: int
    manifest: Manifest  # of ``delta``
    base_version: int
    base_label: str

    @property
    def folder(self) -> str:
        """Path at the source."""
        return f"{version_name(self.version)}/{DELTA_NAME}"

    @property
    def small_files(self) -> set[str]:
        """Names in the full folder of the small files that changed."""
        return {
            name.removeprefix(SMALL_FILES)
            for name in self.manifest.files
            if name.startswith(SMALL_FILES)
        }


@dataclass(frozen=True)
class Plan:
    """A way to make the files of a version."""

    version: int
    target: Manifest  # of the version
    # copied if it is held, else fetched whole
    begin_version: int
    begin: Manifest
    held: bool
    deltas: Sequence[Delta]  # oldest first

    @property
    def bytes(self) -> int:
        """Bytes to fetch."""
        n_bytes = sum(delta.manifest.bytes for delta in self.deltas)
        if not self.held:
            n_bytes += self.begin.bytes
        return n_bytes

    def small_files(self) -> dict[str, Delta | None]:
        """The origin of each small file: the last delta that has it, else None for the first
        folder.
        """
        origins = {}
        for name, entry in self.target.files.items():
            if name in self.target.weights:
                continue
            origin = None
            stored = self.begin.files.get(name)
            for delta in self.deltas:
                if name in delta.small_files:
                    origin = delta
                    stored = delta.manifest.files[SMALL_FILES + name]
            origins[name] = origin
            if stored != entry:
                raise FolderError(
                    f"{self.target.where} has {name} as {entry}, its base and deltas have {stored}"
                )
        return origins


def make_plan(
    source: Source,
    version: int,
    label: str | None,
    held: Mapping[int, Manifest],
) -> Plan:
    """Find the way to a version that fetches the fewest bytes.

    Args:
        source: where the versions are.
        version: the version to make.
        label: its label, or None for the one that is there.
        held: manifests of the local versions.

    Raises:
        FolderError: there is no such version, or no way to it.
    """
    target = read_version(source, version, label)
    at = version
    content = target
    best: Plan | None = None
    deltas: tuple[Delta, ...] = ()
    while True:
        try:
            # A full version may be the first folder. An older one may need fewer bytes, but not if
            # the deltas alone are as many.
            if _is_full(source, at, content):
                best = _cheaper(best, Plan(version, target, at, content, False, deltas))
            if best and best.bytes <= sum(delta.manifest.bytes for delta in deltas):
                break

            # One step back, to the base, whose manifest may be here.
            delta = _read_delta(source, at, content)
            deltas = (delta, *deltas)
            at = delta.base_version
            is_held = at in held and held[at].label == delta.base_label
            base = held[at] if is_held else _read_base(source, delta)
            _require_same_layout(base, content, delta)
            content = base
            if is_held:
                best = _cheaper(best, Plan(version, target, at, content, True, deltas))
                break
        except FolderError:
            # The way ends here. An earlier one may do.
            if best is None:
                raise
            break
    best.small_files()
    return best


def _cheaper(one: Plan | None, other: Plan) -> Plan:
    if one is None or other.bytes < one.bytes:
        return other
    return one


def read_version(source: Source, version: int, label: str | None) -> Manifest:
    """Read the manifest of a version. FolderError if there is none, or if it has another label."""
    manifest = source.read_manifest(version_name(version))
    _require_version(manifest, version)
    if label is not None and manifest.label != label:
        raise FolderError(f"{manifest.where} has the label {manifest.label}, expected was {label}")
    return manifest


def _require_version(manifest: Manifest, version: int) -> None:
    if manifest.facts.get("weight_version") != version:
        raise FolderError(
            f"{manifest.where} has the weight version {manifest.facts.get('weight_version')!r}"
        )


def _is_full(source: Source, version: int, content: Manifest) -> bool:
    """Whether the files of a version are there, and not only its delta."""
    if not content.files:
        return True

    # The largest file is a weight file, if there are any, and a version that is only a delta has
    # none.
    largest = max(content.files, key=lambda name: content.files[name]["bytes"])
    try:
        source.size(f"{version_name(version)}/{largest}")
    except MissingError:
        return False
    return True


def _read_delta(source: Source, version: int, content: Manifest) -> Delta:
    try:
        manifest = source.read_manifest(f"{version_name(version)}/{DELTA_NAME}")
    except MissingError as error:
        raise FolderError(
            f"{content.where}: its files are not there, and it has no delta: {error}"
        ) from None
    return parse_delta(manifest, version, content)


def parse_delta(manifest: Manifest, version: int, content: Manifest) -> Delta:
    """Check the manifest of the folder ``delta`` of a version with the manifest ``content``."""
    _require_version(manifest, version)
    where = manifest.where
    facts = manifest.facts

    # The base is older, and its label is one of its version.
    base: Any = facts.get("base")
    named = isinstance(base, dict) and [type(base.get(key)) for key in ("version", "label")]
    if named != [int, str]:
        raise FolderError(f"{where} has the base {base!r}, expected a version and a label")
    match = LABEL.fullmatch(base["label"])
    if match is None or int(match[1]) != base["version"]:
        raise FolderError(
            f"{where} has a base of version {base['version']} with the label {base['label']!r}"
        )
    if not 0 <= base["version"] < version:
        raise FolderError(
            f"{where} has a base of version {base['version']}, which is not older than {version}"
        )
    if not all(type(facts.get(count)) is int for count in ("elements", "changed")):
        raise FolderError(
            f"{where} has {facts.get('changed')!r} of {facts.get('elements')!r} elements changed"
        )

    # Small files are those of the version, and all others belong to a rank.
    for name, entry in manifest.files.items():
        if name.startswith(SMALL_FILES):
            if entry != content.files.get(name.removeprefix(SMALL_FILES)):
                raise FolderError(
                    f"{where} has {name} as {entry}, which is not as in {content.where}"
                )
        elif not _RANK_FILE.fullmatch(name):
            raise FolderError(f"{where} names {name!r}, which is no file of a delta")
    return Delta(version, manifest, base["version"], base["label"])


def check_version(folder: Path) -> tuple[Manifest, Delta | None, bool]:
    """Compare a version's folder with its manifests, every byte. Raises FolderError for the first
    difference.

    Returns:
        The manifest, the delta if there is one, and whether the folder is full: not only a delta.
    """
    version = version_of(folder.name)
    if version is None:
        raise FolderError(f"{folder} is not called as a version, such as v00000121")
    manifest = read_manifest(folder)
    _require_version(manifest, version)
    delta = None
    if (folder / DELTA_NAME).exists():
        delta = parse_delta(check_folder(folder / DELTA_NAME), version, manifest)
    full = delta is None or any(
        name.split("/")[0] not in (MANIFEST_NAME, DELTA_NAME) for name in list_files(folder)
    )
    if full:
        check_folder(folder)
    return manifest, delta, full


def _read_base(source: Source, delta: Delta) -> Manifest:
    try:
        return read_version(source, delta.base_version, delta.base_label)
    except FolderError as error:
        raise FolderError(
            f"{delta.manifest.where} needs its base {delta.base_label}, which is not held here "
            f"and not there: {error}"
        ) from error


def _require_same_layout(base: Manifest, content: Manifest, delta: Delta) -> None:
    """Raise FolderError if a delta leads to other names or sizes of weight files than its base."""
    old = {name: entry["bytes"] for name, entry in base.weights.items()}
    new = {name: entry["bytes"] for name, entry in content.weights.items()}
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            raise FolderError(
                f"{delta.manifest.where}: {name} has {old.get(name)} bytes in the base, "
                f"{new.get(name)} in the target"
            )
