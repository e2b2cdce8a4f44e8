"""The harness can fail: safeguards are removed one at a time, and the oracles notice.

Fsyncs are removed from a recorded trace. Renames, agreement and checks are switched off in the
product, in the test's processes only. A removal that no oracle notices counts as undetected: either
the harness is too weak, or the safeguard is unnecessary.
"""

import errno
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.engine.dcp import format as dcp_format
from holdfast.engine.hf import save as hf_save
from holdfast.recover import GenerationStore
from holdfast.recover.resuming import check as rank_reading
from holdfast.recover.saving.snapshot import SnapshotWriter
from holdfast.recover.storage import generations as store
from holdfast.recover.storage.episodes import EpisodeLogs
from holdfast.utils import atomic_folder, files, manifest
from holdfast.utils.errors import CheckpointCorruptError, CheckpointWriteError
from holdfast.utils.manifest import MANIFEST_NAME, FileEntry
from holdfast.utils.record_log import RecordLog, new_id
from tests.faults.fsync_purposes import (
    EARLIER_LIFE,
    IN_MIRROR,
    IN_STAGING,
    MANIFEST_MOVED,
    fsync_purposes,
)
from tests.faults.generations import (
    NEWER,
    OLDER,
    Victim,
    copy_generations,
    files_of,
    quiet,
    replace_bytes,
    reseal,
)
from tests.faults.payloads import Call as Payload
from tests.faults.power_loss import QUICK, PowerLoss
from tests.faults.power_traces import (
    DELTA,
    FIRST_WITH_LOG,
    MIRRORED,
    POWER_SCENARIOS,
    REPLACING,
    Recorded,
    record,
    record_second_life,
    survey,
)
from tests.faults.scenarios import WITH_LOG
from tests.faults.shim import Call
from tests.faults.tally import Tally
from tests.faults.workshop import Workshop, perform
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(600)

KIND = "safeguard taken away"
Notice = Callable[[object, str], None]


@pytest.fixture
def notice(tally: Tally) -> Notice:
    """Count a removed safeguard, and fail unless an oracle has noticed."""

    def judge(noticed: object, what: str) -> None:
        tally.add(KIND, injected=1, survived=int(bool(noticed)), undetected=int(not noticed))
        assert noticed, f"nothing noticed: {what}"

    return judge


# Fsyncs

TWICE = {
    "first snapshot": (
        "a folder above the first snapshot",
    ),  # by every process that creates a name in it
    "export": ("the weights",),  # by every rank that wrote some, as NFS needs
    "publication": (
        "the weights",
        "a small file of a model",
    ),  # again by the process that lists them
    # For every caller that waits, and after every new file.
    WITH_LOG: ("the records of a log", "the folder of a log"),
    FIRST_WITH_LOG: (
        "the records of a log",
        "the folder of a log",
        "a folder above the first snapshot",
    ),
    MIRRORED: (
        "a folder of a copy",
        "the folder of copies",
    ),  # after each name that is created in it
}
"""Scenario -> files that are fsynced more than once."""
_CHANGES = ("the changes of a rank", "the manifest of the changes", "the folder of the changes")
_SNAPSHOT = (*list(IN_STAGING)[:8], "the staging folder", "the folder with the new name")
_LOG = ("the records of a log", "the folder of a log")
_MODEL = (
    "the weights",
    "a small file of a model",
    "the staging folder",
    "the folder with the new name",
)
PURPOSES = {
    "first snapshot": (*_SNAPSHOT, "a folder above the first snapshot"),
    "snapshot that retires": (*_SNAPSHOT, "the folder with a retired name"),
    WITH_LOG: (*_SNAPSHOT, "the folder with a retired name", *_LOG),
    FIRST_WITH_LOG: (
        *_SNAPSHOT,
        "a folder above the first snapshot",
        "a folder above the first log",
        *_LOG,
    ),
    REPLACING: (*_SNAPSHOT, "the folder with a retired name"),
    MIRRORED: (*_SNAPSHOT, "the folder with a retired name", *IN_MIRROR, MANIFEST_MOVED),
    "export": _MODEL,
    "publication": (*_MODEL, "the manifest", "the folder with a retired name"),
    DELTA: (
        *_CHANGES,
        "a small file of a model",
        "the manifest",
        "the staging folder",
        "the folder with the new name",
    ),
}
"""Scenario -> purposes of its fsyncs."""
COVERED = {
    # The fsync after the deletion also precedes the promise, and the deleted folder is not the only
    # one.
    ("snapshot that retires", "the folder with the new name"),
    (MIRRORED, "the folder with the new name"),
    (WITH_LOG, "the folder with the new name"),
    # Needed if a run that went back copies a step again over an incomplete copy.
    (MIRRORED, "the marker of a copy"),
    # Described, and removed before the rename.
    (DELTA, "a small file of a model"),
}
"""Fsyncs without which nothing is lost in this scenario, and the reason why they are needed all the
same.
"""
EACH = [(name, purpose) for name, purposes in PURPOSES.items() for purpose in purposes]


@pytest.mark.parametrize("name", POWER_SCENARIOS)
def test_every_fsync_has_a_purpose_that_is_tested_and_only_one(
    name: str, recorded: Callable[[str], Recorded]
) -> None:
    calls = recorded(name).loss.calls
    made = [(calls[i].path, purpose) for i, purpose in fsync_purposes(calls).items()]
    twice = {purpose for path, purpose in made if made.count((path, purpose)) > 1} - {EARLIER_LIFE}
    assert twice <= {*TWICE.get(name, ())}, f"fsynced twice: {twice}"
    assert {purpose for _, purpose in made} - {EARLIER_LIFE} == {*PURPOSES[name]}


LOSSES = [each for each in EACH if each not in COVERED]


@pytest.mark.parametrize(("name", "purpose"), slow_but(LOSSES[::10], LOSSES))
def test_a_power_cut_loses_something_without_the_fsync_of(
    name: str, purpose: str, recorded: Callable[[str], Recorded], notice: Notice
) -> None:
    whole = recorded(name)
    by_path: dict[str, list[int]] = {}
    for i, found in fsync_purposes(whole.loss.calls).items():
        if found == purpose:
            by_path.setdefault(whole.loss.calls[i].path, []).append(i)
    assert by_path, f"{name} fsyncs no such thing"
    for path, indices in by_path.items():
        noticed = survey(whole.without(*indices), QUICK, until_first_loss=True).losses
        notice(noticed, f"{name} without the fsync of {purpose}: {path}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "killed_after"),
    [("first snapshot", r"e"), (REPLACING, r".*/global_step_1"), (REPLACING, r".*/\.retired-.*")],
)
def test_after_a_kill_power_cuts_lose_something_without_fsync_of_earlier_names(
    name: str,
    killed_after: str,
    shop: Workshop,
    recorded: Callable[[str], Recorded],
    notice: Notice,
) -> None:
    first = recorded(name)
    made = [
        call.target or call.path if call.name in ("mkdir", "rename") else ""
        for call in first.loss.calls
    ]
    n_calls = next(i for i, path in enumerate(made) if re.fullmatch(killed_after, path)) + 1
    second = record_second_life(shop, first, n_calls)
    # The remaining fsyncs of the first life, and those of the second before it creates names.
    purposes = fsync_purposes(second.loss.calls[n_calls:])
    earlier = [n_calls + i for i, purpose in purposes.items() if purpose == EARLIER_LIFE]
    noticed = survey(second.without(*earlier), QUICK, since=n_calls, until_first_loss=True).losses
    notice(earlier and noticed, f"{name}: a second life trusts names that may not be on the disk")


# Renames


def _write_in_place() -> None:
    """Write generations under their final name."""

    def open_in_place(self: GenerationStore, step: int) -> Path:
        final = self.root / f"global_step_{step}"
        files.make_durably(self.root)
        final.mkdir()
        return final

    def commit_in_place(_: Path, final: Path) -> None:
        files.fsync_tree(final)
        files.fsync_dir(Path(final).parent)

    patch(GenerationStore, "open_staging", open_in_place)
    patch(store, "commit_folder", commit_in_place)


def _write_versions_in_place() -> None:
    """Write weights under their final name."""

    def open_in_place(final: Path) -> Path:
        final.mkdir()
        return final

    patch(atomic_folder, "open_staging", open_in_place)
    patch(
        atomic_folder,
        "commit_folder",
        lambda _, final: (files.fsync_tree(final), files.fsync_dir(Path(final).parent)),
    )


def _rename_before_the_manifest() -> None:
    """Rename a generation before it gets its manifest."""

    def commit(
        self: GenerationStore, staged: Path, step: int, entries: list[FileEntry], facts: Any
    ) -> Any:
        generation = self.adopt(staged, step)
        manifest.write_manifest(generation.path, entries, facts)
        files.fsync_dir(generation.path)
        return generation

    patch(GenerationStore, "commit", commit)


def _remove_in_place() -> None:
    """Delete old folders without renaming them first."""
    patch(files, "remove_folder", shutil.rmtree)


def _rotate_late() -> None:
    """Name the next file of the log before the capture, and begin it afterwards."""
    rotate = RecordLog.rotate
    capture = SnapshotWriter.capture
    named: list[RecordLog] = []

    def name_next(log: RecordLog) -> str:
        named.append(log)
        log._id = new_id()
        return log.id

    def capture_first(self: SnapshotWriter, *args: Any) -> Any:
        patch(RecordLog, "rotate", name_next)
        captured = capture(self, *args)
        patch(RecordLog, "rotate", rotate)
        for log in named:
            log.rotate()
        named.clear()
        return captured

    patch(SnapshotWriter, "capture", capture_first)


def _delete_early() -> None:
    """Delete the older files of the log when the next one is begun."""
    rotate = EpisodeLogs.rotate

    def rotate_and_delete(self: EpisodeLogs) -> dict[str, str]:
        ids = rotate(self)
        for log in self._logs.values():
            log.sync(log.append(b"the file is there"))
            log.delete_before(log.id)
        return ids

    patch(EpisodeLogs, "rotate", rotate_and_delete)


def _name_an_unused_log() -> None:
    """Begin files that do not descend from each other."""
    rotate = RecordLog.rotate

    def forget_parent(log: RecordLog) -> str:
        log._id = new_id()
        return rotate(log)

    patch(RecordLog, "rotate", forget_parent)


def patch(owner: Any, name: str, value: Any) -> None:
    """Replace an existing attribute for the rest of this process."""
    assert hasattr(owner, name), f"there is no {name} to switch off"
    setattr(owner, name, value)


RENAMES: dict[str, tuple[str, Callable[[], None]]] = {
    "a first snapshot is written under its final name": ("first snapshot", _write_in_place),
    "a snapshot is written under its final name": ("snapshot that retires", _write_in_place),
    "an export is written under its final name": ("export", _write_versions_in_place),
    "a version is written under its final name": ("publication", _write_versions_in_place),
    "the manifest is written after the rename": (
        "snapshot that retires",
        _rename_before_the_manifest,
    ),
    "a snapshot is deleted under its final name": ("snapshot that retires", _remove_in_place),
    "a version is deleted under its final name": ("publication", _remove_in_place),
    "a file of the log is begun after the capture": (WITH_LOG, _rotate_late),
    "files of the log are deleted before the commit": (WITH_LOG, _delete_early),
    "a descendant of a log is not read": (WITH_LOG, _name_an_unused_log),
}


@pytest.mark.parametrize("change", slow_but(["the manifest is written after the rename"], RENAMES))
def test_the_oracle_sees_something_that_is_not_whole_when(
    change: str, shop: Workshop, notice: Notice
) -> None:
    broken = record(shop, *RENAMES[change])
    notice(survey(broken, QUICK, until_first_loss=True).losses, change)


def test_a_rename_before_all_ranks_have_fsynced_is_noticed(
    recorded: Callable[[str], Recorded], notice: Notice
) -> None:
    whole = recorded("snapshot that retires")
    early = PowerLoss(whole.loss.before, _renamed_early(whole.loss.calls))
    notice(
        survey(replace(whole, loss=early), QUICK, until_first_loss=True).losses,
        "rank 0 renames too early",
    )


def _renamed_early(calls: list[Call]) -> list[Call]:
    """Rename and fsync on rank 0 while rank 1 still writes the last of its files."""
    at = next(
        i for i, call in enumerate(calls) if re.search(r"/global_step_\d+$", call.target or "")
    )
    last = max(i for i, call in enumerate(calls[:at]) if call.rank == 1 and call.name == "fsync")
    old, new = calls[at].path, calls[at].target or ""
    later = [replace(call, path=call.path.replace(old, new)) for call in calls[last:at]]
    return calls[:last] + calls[at : at + 3] + later + calls[at + 3 :]


# Agreement between ranks


@contextmanager
def _no_agreement(what: str, group: Any = None) -> Iterator[None]:
    """No agreement: every rank proceeds alone."""
    yield


def _export_without_agreement(scenario: Any, root: str, rank: int) -> None:
    patch(atomic_folder, "all_ranks_succeed", _no_agreement)
    patch(hf_save, "all_ranks_succeed", _no_agreement)
    patch(hf_save, "gather_objects", lambda own, group: [own])
    patch(
        hf_save, "require_whole", lambda pieces, n_bytes: None
    )  # it would find that the other rank's are missing
    try:
        _export_with_a_full_disk(scenario, root, rank)
    except (
        CheckpointWriteError,
        OSError,
    ):  # the process goes on, because its end would tell the other rank
        end = time.monotonic() + stretched(20)
        while not (Path(root) / "hf" / "global_step_2").exists() and time.monotonic() < end:
            time.sleep(0.01)
        raise


def _export_with_a_full_disk(scenario: Any, root: str, rank: int) -> None:
    perform(scenario, root, {1: _disk_full}, rank)


def _disk_full(call: Call) -> None:
    if call.name == "pwrite":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_agreement_between_ranks_an_export_that_failed_on_one_becomes_visible(
    shop: Workshop, recorded: Callable[[str], Recorded], notice: Notice
) -> None:
    built = shop.build(recorded("export").scenario)
    for stage, expected in ((_export_with_a_full_disk, 0), (_export_without_agreement, 1)):
        root = built.copy()
        assert any(shop.ranks.run(partial(stage, built.scenario, str(root))).ends), (
            "the full disk went unnoticed"
        )
        torn = [path for path in (root / "hf").glob("global_step_2") if files_of(path)]
        if expected:
            checked = shop.ranks.run(partial(_check, built.scenario, str(root)))
            notice(torn and any(checked.ends), "ranks that do not agree")
        else:
            assert not torn


def _check(scenario: Any, root: str, rank: int) -> None:
    scenario.check(rank, root)


# Checks of written and read data


def _loads(victim: Victim, good: Path, root: Path, strike: Callable[[Path], object]) -> bool:
    """Whether a damaged or forged generation is loaded."""
    strike(copy_generations(good, root, OLDER, NEWER) / NEWER)
    with quiet():
        try:
            return victim.load(root).step == 1
        except Exception:  # any error of a reader without safeguards
            return False
        finally:
            shutil.rmtree(root)


def _flip(name: str, at: int, folder: Path) -> None:
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1
    replace_bytes(folder / name, data)


def _no_check(*_: object) -> None: ...


@pytest.mark.slow
def test_without_digests_a_flipped_bit_is_loaded(
    good: Path, victim: Victim, tmp_path: Path, notice: Notice
) -> None:
    name, root = "state/rank_00000.pt", tmp_path / "root"
    flips = [partial(_flip, name, at) for at in range(0, (good / NEWER / name).stat().st_size, 499)]
    with pytest.MonkeyPatch.context() as switches:
        for module in (manifest, rank_reading):
            switches.setattr(module, "verify_file", _no_check)
        loaded = [flip for flip in flips if _loads(victim, good, root, flip)]
    notice(
        loaded and not any(_loads(victim, good, root, flip) for flip in loaded),
        "digests are not compared",
    )


class _EqualToAll(bytes):
    """A self-checksum that is equal to everything."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = bytes.__hash__


def test_without_the_self_checksum_of_the_manifest_another_weight_version_is_believed(
    good: Path, victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    def forge(folder: Path) -> None:
        data = (folder / MANIFEST_NAME).read_bytes()
        changed = data.replace(b'"world_size": 2', b'"world_size": 3')
        assert changed != data
        replace_bytes(folder / MANIFEST_NAME, changed)

    assert not _loads(victim, good, tmp_path / "root", forge)
    monkeypatch.setattr(manifest, "_self_checksum", _EqualToAll)
    notice(
        _loads(victim, good, tmp_path / "root", forge), "the manifest's own digest is not compared"
    )


def test_without_the_look_at_sizes_an_unreported_short_file_becomes_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    generations = GenerationStore(tmp_path / "recover")
    entry = FileEntry("data.pt", 100, f"xxh3_128:{0:032x}")

    def commit_what_is_short() -> None:
        staged = generations.open_staging(0)
        (staged / "data.pt").write_bytes(b"short")
        generations.commit(staged, 0, [entry], {})

    with pytest.raises(CheckpointWriteError, match=r"data\.pt has 5 bytes"):
        commit_what_is_short()
    assert generations.generations() == []
    monkeypatch.setattr(store, "check_listing", _no_check)
    commit_what_is_short()
    (generation,) = generations.generations()
    with pytest.raises(CheckpointCorruptError) as refusal:
        manifest.verify_folder(generation.path)
    notice("data.pt has 5 bytes" in str(refusal.value), "sizes are not looked at before the rename")


def _plant(name: str, forge: Callable[[Path], object], folder: Path) -> None:
    """Replace the contents of a file, and write the manifest again."""
    (folder / name).unlink()
    forge(folder / name)
    reseal(folder)


def test_without_the_restricted_unpickler_code_in_the_metadata_runs(
    good: Path, victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    marker = tmp_path / "ran"
    code = pickle.dumps(Payload(os.mkdir, str(marker)))
    plant = partial(_plant, "actor/.metadata", lambda path: path.write_bytes(code))
    assert not _loads(victim, good, tmp_path / "root", plant) and not marker.exists()
    monkeypatch.setattr(dcp_format, "_MetadataUnpickler", pickle.Unpickler)
    _loads(victim, good, tmp_path / "root", plant)
    notice(marker.exists(), "the metadata is unpickled as it comes")


def test_without_weights_only_code_in_the_state_of_a_rank_runs(
    good: Path, victim: Victim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: Notice
) -> None:
    marker, load = tmp_path / "ran", torch.load
    code = Payload(os.mkdir, str(marker))
    plant = partial(_plant, "state/rank_00000.pt", lambda path: torch.save(code, path))
    assert not _loads(victim, good, tmp_path / "root", plant) and not marker.exists()
    monkeypatch.setattr(
        torch, "load", lambda *args, **options: load(*args, **options | {"weights_only": False})
    )
    _loads(victim, good, tmp_path / "root", plant)
    notice(marker.exists(), "weights_only is off")
