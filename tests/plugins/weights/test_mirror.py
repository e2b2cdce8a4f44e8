"""A mirror makes, byte for byte, the folders of full publications, or says why not and keeps its
versions.
"""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from holdfast_weights import mirror as mirror_module
from holdfast_weights.errors import FolderError
from holdfast_weights.mirror import Mirror
from holdfast_weights.source import Source

from tests.plugins.weights.publisher import (
    CODES,
    SHAPES,
    Publisher,
    assert_same,
    read_files,
    safetensors,
    seal,
    write_files,
)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "source")


def open_mirror(tmp_path: Path) -> Mirror:
    mirror = Mirror(Source(str(tmp_path / "source")), tmp_path / "local")
    mirror.open()
    return mirror


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return open_mirror(tmp_path)


def versions(tmp_path: Path) -> dict[str, str]:
    """The visible folders of the mirror, and the target of ``current``."""
    local = tmp_path / "local"
    assert [name for name in os.listdir(local) if name.startswith(".")] == [".mirror"]
    folders = sorted(path.name for path in local.glob("v*"))
    return {"folders": " ".join(folders), "current": os.readlink(local / "current")}


@pytest.mark.parametrize("code", [*CODES, None])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_a_chain_of_deltas_gives_the_bytes_of_a_full_publication(
    length: int, code: str | None, publisher: Publisher, mirror: Mirror
) -> None:
    publisher.force, publisher.ranks, publisher.piece_elements = code, 1 + length % 4, 7 * length
    publisher.publish_chain(range(1, length + 2))
    assert_same(mirror.prepare(length + 1, publisher.label(length + 1)), publisher, length + 1)


def test_every_version_of_a_chain_is_made_from_the_one_before(
    publisher: Publisher, mirror: Mirror, tmp_path: Path
) -> None:
    publisher.publish_chain(range(1, 21), share=0.3, anchors=(8, 15))
    for version in range(1, 21):
        assert_same(mirror.prepare(version, publisher.label(version)), publisher, version)
        shutil.rmtree(publisher.folder(version - 1), ignore_errors=True)
        assert set(mirror.status()["held"]) == {str(n) for n in (version - 1, version) if n}
    assert versions(tmp_path) == {"folders": "v00000019 v00000020", "current": "v00000020"}


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_pieces_of_any_size_and_any_number_of_ranks(
    ranks: int, size: int, publisher: Publisher, mirror: Mirror
) -> None:
    publisher.ranks, publisher.piece_elements = ranks, size
    publisher.publish_chain(range(1, 4), share=0.5)
    assert_same(mirror.prepare(3, publisher.label(3)), publisher, 3)


def test_versions_without_pieces_are_followed(publisher: Publisher, mirror: Mirror) -> None:
    publisher.format_version = 2
    publisher.publish_chain(range(1, 5))
    for version in (1, 4):
        assert_same(mirror.prepare(version, publisher.label(version)), publisher, version)


def test_a_version_without_changes_and_one_with_all_changed(
    publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish(1)
    publisher.publish(2, 1)
    publisher.train(1.0)
    publisher.publish(3, 2)
    for version in (1, 2, 3):
        assert_same(mirror.prepare(version, publisher.label(version)), publisher, version)


def test_small_files_come_go_and_come_back(publisher: Publisher, mirror: Mirror) -> None:
    publisher.publish(1)
    added = publisher.small.pop("config.json")
    publisher.small["custom_generate/generate.py"] = b"pass"
    publisher.publish(2, 1)
    publisher.publish(3, 2)
    publisher.small |= {"config.json": added}
    del publisher.small["custom_generate/generate.py"]
    publisher.publish(4, 3)
    mirror.prepare(1, publisher.label(1))
    assert_same(mirror.prepare(4, publisher.label(4)), publisher, 4)


def test_a_mirror_without_a_base_begins_with_the_newest_full_version(
    publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish_chain(range(1, 9), anchors=(5,))
    shutil.rmtree(publisher.folder(2))
    fetched = record(mirror.source, "fetch")
    assert_same(mirror.prepare(7, publisher.label(7)), publisher, 7)
    assert fetched == ["v00000006/delta", "v00000007/delta", "v00000005"]


def test_the_way_with_fewer_bytes_is_taken(mirror: Mirror) -> None:
    publisher = Publisher(
        mirror.local.parent / "source",
        {**SHAPES, "large": ("BF16", (20_000,))},
        piece_elements=5000,
    )
    publisher.publish_chain(range(1, 5), share=0.01, anchors=(4,))
    mirror.prepare(1, publisher.label(1))
    fetched = record(mirror.source, "fetch")
    mirror.prepare(4, publisher.label(4))
    assert fetched == [f"v0000000{n}/delta" for n in (2, 3, 4)]
    publisher.train(0.6)
    publisher.publish(5, 4)
    publisher.train(0.6)
    publisher.publish(6, 5, full=True)
    mirror.prepare(6, publisher.label(6))
    assert fetched[3:] == ["v00000006"]
    assert_same(mirror.local / "v00000006", publisher, 6)


def record(target: Any, name: str) -> list[Any]:
    """Record the first argument of every call of a method."""
    calls, method = [], getattr(target, name)

    def call(first: Any, *rest: Any) -> Any:
        calls.append(first)
        return method(first, *rest)

    setattr(target, name, call)
    return calls


def test_a_trainer_that_went_back_is_followed(
    publisher: Publisher, mirror: Mirror, tmp_path: Path
) -> None:
    publisher.publish_chain(range(1, 5))
    for version in (3, 4):
        mirror.prepare(version, publisher.label(version))
    old = publisher.label(4)
    for version in (3, 4):
        shutil.rmtree(publisher.folder(version))
    publisher.train()
    publisher.publish(3)
    mirror.prepare_newest()
    assert_same(tmp_path / "local" / "current", publisher, 3)
    publisher.train()
    publisher.publish(4, 3)
    assert_same(mirror.prepare(4, publisher.label(4)), publisher, 4)
    with pytest.raises(
        FolderError, match=f"has the label {publisher.label(4)}, expected was {old}"
    ):
        mirror.prepare(4, old)
    assert versions(tmp_path) == {"folders": "v00000003 v00000004", "current": "v00000004"}


def test_the_same_version_with_other_weights_replaces_the_old_one(
    publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish(1)
    mirror.prepare(1, publisher.label(1))
    shutil.rmtree(publisher.folder(1))
    publisher.train()
    publisher.publish(1)
    assert_same(mirror.prepare(1, publisher.label(1)), publisher, 1)


def test_polling_prepares_the_newest_version(
    publisher: Publisher, mirror: Mirror, tmp_path: Path
) -> None:
    mirror.prepare_newest()  # the source does not exist yet
    publisher.publish_chain((1, 2))
    mirror.prepare_newest()
    assert mirror.status() == {
        "source": str(tmp_path / "source"),
        "held": {"2": publisher.label(2)},
        "current": 2,
        "doing": "idle",
        "error": None,
    }
    made = record(mirror, "_make")
    mirror.prepare_newest()
    assert mirror.prepare(2, publisher.label(2)) == tmp_path / "local" / "v00000002"
    assert made == []


def test_polling_passes_over_a_version_without_a_manifest(
    publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish_chain((1, 2))
    publisher.folder(3).mkdir()
    (publisher.folder(3) / "config.json").touch()
    mirror.prepare_newest()
    assert mirror.status()["current"] == 2


@pytest.mark.parametrize(
    "lost", ["v00000002", "v00000002/manifest.json", "v00000002/model-00001-of-00002.safetensors"]
)
def test_a_local_folder_that_others_removed_is_made_again(
    lost: str, publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish_chain((1, 2, 3))
    mirror.prepare(2, publisher.label(2))
    path = mirror.local / lost
    path.unlink() if path.is_file() else shutil.rmtree(path)
    assert_same(mirror.prepare(3, publisher.label(3)), publisher, 3)
    path = mirror.local / "v00000003"
    shutil.rmtree(path)
    assert_same(mirror.prepare(3, publisher.label(3)), publisher, 3)


def test_polling_keeps_a_version_that_a_server_may_still_load(
    publisher: Publisher, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish_chain((1, 2))
    mirror.prepare(1, publisher.label(1))
    mirror.prepare_newest()
    publisher.train()
    publisher.publish(3, 2)
    mirror.prepare_newest()
    assert versions(tmp_path) == {"folders": "v00000001 v00000002", "current": "v00000002"}
    assert_same(mirror.prepare(3, publisher.label(3)), publisher, 3)
    publisher.train()
    publisher.publish(4, 3)
    mirror.prepare_newest()
    publisher.train()
    publisher.publish(5, 4)
    monkeypatch.setattr(mirror_module, "_LOAD_S", 0)
    mirror.prepare_newest()
    assert versions(tmp_path) == {"folders": "v00000004 v00000005", "current": "v00000005"}


def test_polling_waits_longer_after_every_error(
    publisher: Publisher,
    mirror: Mirror,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    publisher.publish(1)
    flip(publisher.folder(1) / "config.json")
    fetched, waits = record(mirror.source, "fetch"), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 7:
            assert "config.json has digest" in mirror.status()["error"]
            flip(publisher.folder(1) / "config.json")
        if len(waits) == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        mirror.follow(2.0)
    assert waits == [4, 8, 16, 32, 60, 60, 60, 2, 2]
    assert (
        len(fetched) == 8 and mirror.status()["current"] == 1 and mirror.status()["error"] is None
    )
    assert "config.json has digest" in caplog.text and "Traceback" not in caplog.text


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def rank_file(publisher: Publisher, version: int) -> Path:
    return publisher.folder(version) / "delta" / "rank_00000.safetensors"


def reseal(publisher: Publisher, version: int, **changes: Any) -> None:
    """Change facts or files of a delta, with right digests."""
    files = publisher.delta(version, version - 1)
    document = parse(files.pop("manifest.json"))
    files |= changes.pop("files", {})
    write_files(publisher.folder(version) / "delta", seal(files, document | changes))


def parse(manifest: bytes) -> dict[str, Any]:
    import json

    document = json.loads(manifest)
    return {key: value for key, value in document.items() if key not in ("files", "digest")}


def wrong_value(publisher: Publisher, version: int) -> None:
    """A delta with right digests, whose last value differs by one bit from the trained one."""
    path = rank_file(publisher, version)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    reseal(publisher, version, files={path.name: bytes(data)})


LABEL = "1-xxh3_128:" + "0" * 32
DAMAGES: dict[str, tuple[Callable[[Publisher], object], str]] = {
    "a byte of a rank file": (lambda p: flip(rank_file(p, 3)), "rank_00000.safetensors has digest"),
    "a value": (lambda p: wrong_value(p, 3), "model-0000[12]-of-00002.safetensors has digest"),
    "a rank file is cut": (
        lambda p: os.truncate(rank_file(p, 3), 9),
        "has 9 bytes, the manifest says",
    ),
    "a rank file is gone": (
        lambda p: rank_file(p, 3).unlink(),
        "rank_00000.safetensors is missing",
    ),
    "a small file": (
        lambda p: flip(p.folder(3) / "delta/files/weights_probe.json"),
        "weights_probe.json has digest",
    ),
    "a link": (lambda p: link(rank_file(p, 3)), "is not a regular file with a size"),
    "a pipe": (lambda p: pipe(rank_file(p, 3)), "is not a regular file with a size"),
    "the manifest of the delta": (
        lambda p: flip(p.folder(3) / "delta/manifest.json", 99),
        "is damaged",
    ),
    "the delta": (
        lambda p: shutil.rmtree(p.folder(3) / "delta"),
        "its files are not there, and it has no delta",
    ),
    "the manifest": (lambda p: flip(p.folder(3) / "manifest.json", 99), "is damaged"),
    "the version": (lambda p: shutil.rmtree(p.folder(3)), "v00000003/manifest.json is missing"),
    "of another version": (lambda p: reseal(p, 3, weight_version=2), "has the weight version 2"),
    "of another format": (lambda p: reseal(p, 3, format_version=9), "format version 9"),
    "no base": (lambda p: reseal(p, 3, base=None), "has the base None"),
    "base is itself": (
        lambda p: reseal(p, 3, base={"version": 3, "label": p.label(3)}),
        "not older than 3",
    ),
    "base is newer": (
        lambda p: reseal(p, 3, base={"version": 4, "label": "4" + LABEL[1:]}),
        "not older than 3",
    ),
    "base of two versions": (
        lambda p: reseal(p, 3, base={"version": 1, "label": p.label(2)}),
        "a base of version 1",
    ),
    "base of no label": (
        lambda p: reseal(p, 3, base={"version": 1, "label": "../../1"}),
        "a base of version 1",
    ),
    "unknown base": (
        lambda p: reseal(p, 3, base={"version": 1, "label": LABEL}),
        f"needs its base {LABEL}",
    ),
    "counts": (lambda p: reseal(p, 3, changed=True), "has True of"),
    "another count": (lambda p: reseal(p, 3, changed=3), "counts 3 changed elements"),
    "a file of another kind": (
        lambda p: reseal(p, 3, files={"run.sh": b""}),
        "names 'run.sh', which is no file",
    ),
    "a file that leaves": (
        lambda p: reseal(p, 3, files={"files/../../x": b""}),
        "no file of its folder",
    ),
    "a small file too many": (
        lambda p: reseal(p, 3, files={"files/x": b""}),
        "has files/x as .*, which is not as in",
    ),
    "another config": (
        lambda p: reseal(p, 3, files={"files/config.json": b"{}"}),
        "which is not as in",
    ),
    "a change of nothing": (
        lambda p: reseal(
            p, 3, files={"rank_00009.safetensors": safetensors({"x@0.bits": ("U8", [0], b"")})}
        ),
        "'x@0.bits' is no change of a tensor",
    ),
}


def link(path: Path) -> None:
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_delta_changes_nothing(
    name: str, publisher: Publisher, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish_chain((1, 2, 3), share=0.2)
    for version in (1, 2):
        mirror.prepare(version, publisher.label(version))
    DAMAGES[name][0](publisher)
    with pytest.raises(FolderError, match=DAMAGES[name][1]):
        mirror.prepare(3, publisher.label(3))
    assert "v00000002" in versions(tmp_path)["folders"]
    assert versions(tmp_path)["current"] == "v00000002"
    assert_same(tmp_path / "local" / "current", publisher, 2)


@pytest.mark.parametrize(
    "damage", ["a byte of a rank file", "a value", "another count", "unknown base", "the delta"]
)
def test_a_damaged_delta_of_a_full_version_is_not_needed(
    damage: str, publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish_chain((1, 2, 3), share=0.2, anchors=(3,))
    mirror.prepare(2, publisher.label(2))
    DAMAGES[damage][0](publisher)
    assert_same(mirror.prepare(3, publisher.label(3)), publisher, 3)


def test_a_base_that_rotted_here_is_replaced_from_a_full_version(
    publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish_chain((1, 2, 3))
    flip(mirror.prepare(2, publisher.label(2)) / "model-00001-of-00002.safetensors")
    assert_same(mirror.prepare(3, publisher.label(3)), publisher, 3)


def test_a_delta_to_another_layout_is_refused(publisher: Publisher, mirror: Mirror) -> None:
    publisher.publish(1)
    label = publisher.label(1)
    other = Publisher(publisher.root, {**SHAPES, "model.norm.weight": ("F32", (34,))})
    other.contents, other.manifests = publisher.contents, publisher.manifests
    files = publisher.delta(1, 1)
    other.publish(2)
    for path in other.folder(2).glob("*.safetensors"):
        path.unlink()
    facts = parse(files.pop("manifest.json")) | {
        "weight_version": 2,
        "base": {"version": 1, "label": label},
    }
    write_files(other.folder(2) / "delta", seal(files, facts))
    with pytest.raises(
        FolderError, match=r"model-00001-of-00002.safetensors has \d+ bytes in the base, \d+ in the"
    ):
        mirror.prepare(2, other.label(2))


def test_a_loop_of_bases_ends(publisher: Publisher, mirror: Mirror) -> None:
    publisher.publish_chain(range(1, 5))
    shutil.rmtree(publisher.folder(1))
    with pytest.raises(
        FolderError,
        match=f"needs its base {publisher.label(1)}, which is not held here and not there",
    ):
        mirror.prepare(4, publisher.label(4))


def test_the_folder_of_a_mirror_feeds_another(
    publisher: Publisher, mirror: Mirror, tmp_path: Path
) -> None:
    second = Mirror(Source(str(tmp_path / "local")), tmp_path / "second")
    second.open()
    publisher.publish_chain(range(1, 7), anchors=(4,))
    fetched = record(second.source, "fetch")
    for version in range(1, 7):
        mirror.prepare(version, publisher.label(version))
        second.prepare_newest()
        assert_same(tmp_path / "second" / "current", publisher, version)
    assert fetched == ["v00000001", *(f"v0000000{n}/delta" for n in range(2, 7))]


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 3), Path.unlink, link])
def test_a_start_verifies_and_removes_damaged_versions(
    damage: Callable[[Path], object], publisher: Publisher, mirror: Mirror, tmp_path: Path
) -> None:
    publisher.publish_chain((1, 2))
    for version in (1, 2):
        mirror.prepare(version, publisher.label(version))
    damage(tmp_path / "local" / "current" / "config.json")
    (tmp_path / "local" / ".staging-v00000003-0123456789ab").mkdir()
    (tmp_path / "local" / ".retired-v00000003-0123456789ab").mkdir()
    (tmp_path / "local" / ".current-0123456789ab").symlink_to("v00000001")
    os.close(mirror._lock_fd)
    again = open_mirror(tmp_path)
    assert versions(tmp_path) == {"folders": "v00000001", "current": "v00000001"}
    assert_same(again.prepare(2, publisher.label(2)), publisher, 2)


def test_a_start_with_nothing_whole_has_no_current(
    publisher: Publisher, mirror: Mirror, tmp_path: Path
) -> None:
    publisher.publish(1)
    flip(mirror.prepare(1, publisher.label(1)) / "config.json")
    os.close(mirror._lock_fd)
    again = open_mirror(tmp_path)
    assert os.listdir(tmp_path / "local") == [".mirror"]
    again.prepare_newest()
    assert versions(tmp_path) == {"folders": "v00000001", "current": "v00000001"}


def test_a_folder_that_is_no_mirrors_is_left_alone(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(1)
    elsewhere = Source(str(tmp_path))
    with pytest.raises(FolderError, match="has files that no mirror made"):
        Mirror(Source(str(tmp_path / "other")), tmp_path / "source")
    for local in (tmp_path / "source", tmp_path / "source" / "x", tmp_path):
        with pytest.raises(FolderError, match="overlap"):
            Mirror(Source(str(tmp_path / "source")), local)
    (tmp_path / "link").symlink_to("source")
    with pytest.raises(FolderError, match="overlap"):
        Mirror(Source(f"file://{tmp_path}/source"), tmp_path / "link")
    assert elsewhere.versions() == [] and sorted(os.listdir(tmp_path / "source")) == ["v00000001"]


def test_one_mirror_uses_a_folder(mirror: Mirror, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="used by another mirror"):
        open_mirror(tmp_path)


def test_files_are_durable_before_they_are_visible(
    publisher: Publisher, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish_chain((1, 2))
    mirror.prepare(1, publisher.label(1))
    events: list[tuple[str, str]] = []
    checked = mirror_module.check_folder

    def watch(
        name: str, function: Callable[..., Any], path_of: Callable[..., Any]
    ) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            events.append((name, os.fspath(path_of(*args))))
            return function(*args)

        return call

    monkeypatch.setattr(
        os, "fsync", watch("fsync", os.fsync, lambda fd: os.readlink(f"/proc/self/fd/{fd}"))
    )
    monkeypatch.setattr(os, "rename", watch("rename", os.rename, lambda old, new: new))
    monkeypatch.setattr(os, "replace", watch("replace", os.replace, lambda old, new: new))
    monkeypatch.setattr(
        mirror_module, "check_folder", watch("check", checked, lambda folder: folder)
    )
    mirror.prepare(2, publisher.label(2))
    local, final = tmp_path / "local", tmp_path / "local" / "v00000002"
    renamed = events.index(("rename", str(final)))
    (check,) = (event for event in events if event[0] == "check")
    synced = {
        path.removeprefix(check[1])
        for name, path in events[events.index(check) : renamed]
        if name == "fsync"
    }
    tree = [final, *final.rglob("*")]
    assert synced == {str(path).removeprefix(str(final)) for path in tree}
    last = [("fsync", str(local)), ("replace", str(local / "current")), ("fsync", str(local))]
    assert events[renamed + 1 :] == [("fsync", os.path.dirname(check[1])), *last], (
        "both folders of the rename first"
    )


def test_a_version_is_never_written_after_it_became_visible(
    publisher: Publisher, mirror: Mirror
) -> None:
    publisher.publish_chain((1, 2, 3), share=0.5)
    files = [
        open(path, "rb")  # noqa: SIM115
        for path in mirror.prepare(1, publisher.label(1)).iterdir()
        if path.is_file()
    ]
    before = [file.read() for file in files]
    for version in (2, 3):
        mirror.prepare(version, publisher.label(version))
    for file, data in zip(files, before, strict=True):
        file.seek(0)
        assert file.read() == data
        file.close()


def test_many_threads_prepare_one_version_once(publisher: Publisher, mirror: Mirror) -> None:
    publisher.publish_chain((1, 2, 3))
    fetched, answers = record(mirror.source, "fetch"), []
    threads = [
        threading.Thread(target=lambda: answers.append(mirror.prepare(3, publisher.label(3))))
        for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert answers == [mirror.local / "v00000003"] * 20
    assert len(fetched) == 3


def test_a_local_file_with_the_mirrors_name_of_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "outside").touch()
    (tmp_path / "local" / ".mirror").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError):
        Mirror(Source(str(tmp_path / "source")), tmp_path / "local")


def test_the_delta_stays_with_the_version(publisher: Publisher, mirror: Mirror) -> None:
    publisher.publish_chain((1, 2))
    mirror.prepare(1, publisher.label(1))
    folder = mirror.prepare(2, publisher.label(2))
    assert read_files(folder / "delta") == read_files(publisher.folder(2) / "delta")
