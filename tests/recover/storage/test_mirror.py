"""Copies at a mirror: the same bytes there and back, over memory, files and a real S3 server.
Refused copies.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from holdfast.recover import GenerationStore
from holdfast.recover.storage.generations import Generation
from holdfast.recover.storage.mirror import Mirror
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointMismatchError,
    ConfigError,
    FolderInUseError,
    MirrorError,
)
from holdfast.utils.manifest import MANIFEST_NAME, FileEntry, verify_folder, write_manifest
from tests.recover.mirrors import BUCKET, S3Server, commit, contents, listing, storage
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def store(tmp_path: Path) -> GenerationStore:
    return GenerationStore(tmp_path / "recover")


@pytest.fixture
def back(tmp_path: Path) -> GenerationStore:
    """The store of a machine that has lost all files."""
    return GenerationStore(tmp_path / "back")


@pytest.fixture
def s3_url(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.clear()
    return f"s3://{BUCKET}/{tmp_path.name}/trial"


@pytest.fixture
def memory_url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/trial"


@pytest.fixture(params=["memory", "file", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        f"file://{tmp_path}/mirror/trial"
        if request.param == "file"
        else request.getfixturevalue(f"{request.param}_url")
    )


def copy(mirror: Mirror, *generations: Generation) -> None:
    for generation in generations:
        mirror.submit(generation)
        assert mirror.wait(30) and mirror.last_error is None


@pytest.mark.parametrize("confirmed", [0, 1, 2])
def test_a_mirror_that_another_job_may_write_to_is_not_completed_and_not_cleaned(
    store: GenerationStore, tmp_path: Path, confirmed: int
) -> None:
    """The lock is confirmed before a copy begins, before its manifest, and before the deletion."""
    url = f"file://{tmp_path}/mirror/trial"
    copy(Mirror(url, 1), commit(store, 0))
    answers = [True] * confirmed

    def confirm() -> None:
        if not answers:
            raise FolderInUseError("another job has it")
        answers.pop()

    mirror = Mirror(url, 1, confirm=confirm)
    mirror.submit(commit(store, 1))
    assert mirror.wait(30)
    expected = {0: "complete", 1: ["no trace", "unconfirmed", "complete"][confirmed]}
    assert {0: "complete", 1: "no trace"} | mirror.states() == expected
    assert isinstance(mirror.last_error, FolderInUseError) == (confirmed < 2)


@pytest.mark.parametrize(
    ("name", "fits"), [("trial[1]", "trial1"), ("seed-*", "seed-12"), ("lr?", "lr1")]
)
@pytest.mark.parametrize("kind", slow_but(["memory", "file"], ["memory", "file", "s3"]))
def test_a_run_whose_name_is_a_pattern_removes_its_own_copies_alone(
    kind: str, name: str, fits: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    base = f"file://{tmp_path}/mirror/trial"
    if kind != "file":
        base = request.getfixturevalue(f"{kind}_url")
    other = Mirror(f"{base}/{fits}", 2)
    copy(other, *(commit(GenerationStore(tmp_path / "other"), step) for step in (0, 1)))
    mirror = Mirror(f"{base}/{name}", 2)
    copy(mirror, *(commit(GenerationStore(tmp_path / "own"), step) for step in range(4)))
    assert other.states() == {1: "complete", 0: "complete"}
    assert mirror.states() == {3: "complete", 2: "complete"}
    assert not any("global_step_1" in path for path in listing(mirror.url))


def test_a_generation_comes_back_as_it_was(
    url: str, store: GenerationStore, back: GenerationStore
) -> None:
    mirror = Mirror(url, 2, chunk_bytes=1000)
    assert mirror.steps() == []
    generation = commit(store, 7, sizes=(0, 1, 999, 1000, 1001, 20_500))
    copy(mirror, generation)
    assert mirror.steps() == [7] and mirror.pinned() == set()
    assert listing(url) == [f"global_step_7/{name}" for name in contents(generation.path)]
    fetched = Mirror(url, 2, chunk_bytes=1000).fetch(7, back)
    assert fetched == back.generations()[0] == Generation(7, back.root / "global_step_7")
    assert contents(fetched.path) == contents(generation.path) and not list(back.root.glob(".*"))
    verify_folder(fetched.path)


@pytest.mark.slow
def test_a_large_file_travels_in_parts(
    s3_url: str, store: GenerationStore, back: GenerationStore
) -> None:
    generation = commit(store, 0, sizes=[101 << 20])  # s3fs uploads up to 100 MiB in one request
    mirror = Mirror(s3_url, 1)
    copy(mirror, generation)
    verify_folder(mirror.fetch(0, back).path)


def test_the_newest_stay_at_the_mirror(url: str, store: GenerationStore) -> None:
    generations = [commit(store, step) for step in range(4)]
    copy(mirror := Mirror(url, None), *generations[:3])
    assert mirror.steps() == [2, 1, 0]
    copy(mirror := Mirror(url, 2), generations[3])
    assert mirror.steps() == [3, 2]
    assert {name.split("/")[0] for name in listing(url)} == {"global_step_3", "global_step_2"}


@pytest.mark.slow
def test_a_copy_takes_as_many_requests_however_many_copies_there_are(
    server: S3Server, s3_url: str, store: GenerationStore
) -> None:
    mirror, requests = Mirror(s3_url, None), list[int]()
    for step in range(12):
        server.clear()
        copy(mirror, commit(store, step, sizes=[10]))
        requests.append(len(server.requests))
    assert requests[1:] == [requests[1]] * 11 and requests[1] <= requests[0] + 2, requests
    assert mirror.steps() == Mirror(s3_url, None).steps() == list(range(11, -1, -1))


def test_a_copy_that_was_marked_as_damaged_meanwhile_makes_room_for_sound_ones(
    s3_url: str, store: GenerationStore
) -> None:
    copy(mirror := Mirror(s3_url, 2), commit(store, 0), commit(store, 1))
    fs, root = storage(s3_url)
    fs.pipe_file(
        f"{root}/.damaged-global_step_1", fs.cat_file(f"{root}/global_step_1/manifest.json")
    )
    copy(mirror, commit(store, 2))
    assert mirror.steps() == [2, 0] and mirror.steps(damaged=True) == []


def test_a_sound_copy_makes_no_room_for_a_newer_unusable_one(
    url: str, store: GenerationStore, back: GenerationStore
) -> None:
    older, newer = commit(store, 10), commit(store, 20)
    copy(mirror := Mirror(url, 1), newer)
    fs, root = storage(url)
    fs.rm_file(f"{root}/global_step_20/default/shard_0")
    copy(mirror, older, commit(store, 15))
    assert mirror.steps() == [20, 15]
    verify_folder(mirror.fetch(15, back).path)
    copy(mirror, commit(store, 25))
    assert mirror.steps() == [25]


def test_steps_are_numbers_and_other_names_are_left_alone(url: str, store: GenerationStore) -> None:
    fs, root = storage(url)
    others = ["global_step_007/a", "global_step_1.old/a", "notes"]
    for name in others:
        fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", b"mine")
    mirror = Mirror(url, 2)
    copy(mirror, *(commit(store, step) for step in (9, 10, 100)))
    assert mirror.steps() == [100, 10]
    mirror.forget_newer(0)
    assert mirror.steps() == [] and listing(url) == others


def test_existing_files_are_not_uploaded_again(
    s3_url: str, server: S3Server, store: GenerationStore
) -> None:
    generation = commit(store, 3)
    copy(Mirror(s3_url, 2), generation)
    server.clear()
    copy(Mirror(s3_url, 2), generation)
    assert server.requests and server.puts() == []


def test_a_file_lost_at_the_mirror_is_put_again(
    url: str, store: GenerationStore, back: GenerationStore
) -> None:
    generation = commit(store, 3)
    copy(mirror := Mirror(url, 2), generation)
    fs, root = storage(url)
    fs.rm_file(f"{root}/global_step_3/default/shard_2")
    copy(mirror, generation)
    assert contents(mirror.fetch(3, back).path) == contents(generation.path)


def test_a_step_that_was_trained_again_is_replaced(
    url: str, store: GenerationStore, back: GenerationStore, tmp_path: Path
) -> None:
    copy(Mirror(url, 2), commit(store, 3))
    again = commit(GenerationStore(tmp_path / "again"), 3, sizes=(1000, 30_000), seed=1)
    copy(mirror := Mirror(url, 2), again)
    assert contents(mirror.fetch(3, back).path) == contents(again.path)
    assert len(listing(url)) == 3


def test_the_manifest_comes_last_and_goes_first(
    s3_url: str, server: S3Server, store: GenerationStore
) -> None:
    mirror = Mirror(s3_url, 1)
    copy(mirror, commit(store, 0))
    assert server.puts()[0] == ".copying-global_step_0"
    assert server.puts()[-1] == f"global_step_0/{MANIFEST_NAME}" and len(server.puts()) == 5
    server.clear()
    copy(mirror, commit(store, 1))
    requests = [
        request.replace(f"/{s3_url.removeprefix('s3://')}", "") for request in server.requests
    ]
    order = [
        requests.index(f"PUT /global_step_1/{MANIFEST_NAME}"),
        requests.index(f"DELETE /global_step_0/{MANIFEST_NAME}"),
        requests.index(f"POST /{BUCKET}"),  # DeleteObjects
    ]
    assert order == sorted(order) and mirror.steps() == [1]


def test_a_run_that_went_back_leaves_nothing_newer(url: str, store: GenerationStore) -> None:
    mirror = Mirror(url, None)
    mirror.forget_newer(0)
    copy(mirror, *(commit(store, step) for step in range(4)))
    mirror.forget_newer(1)
    assert mirror.steps() == [1, 0] and not any("global_step_3" in name for name in listing(url))


def damage_flip(data: bytes) -> bytes:
    return data[:500] + bytes([data[500] ^ 1]) + data[501:]


DAMAGES = {
    "a flipped bit": ("default/shard_0", damage_flip, "shard_0 has digest"),
    "a shorter file": (
        "default/shard_2",
        lambda data: data[:-1],
        "shard_2 has 29999 bytes, the manifest says 30000",
    ),
    "a longer file": (
        "default/shard_1",
        lambda data: data + b"x",
        "shard_1 has 1 bytes, the manifest says 0",
    ),
    "a missing file": ("default/shard_1", None, "shard_1 is missing"),
    "a missing manifest": (
        MANIFEST_NAME,
        None,
        "manifest.json is missing: the copy was never complete",
    ),
    "a shorter manifest": (MANIFEST_NAME, lambda data: data[:-1], "manifest.json is"),
    "a flipped manifest": (
        MANIFEST_NAME,
        lambda data: data.replace(b"run 0", b"run 1"),
        "manifest.json is",
    ),
    "no manifest at all": (MANIFEST_NAME, lambda data: b"", "manifest.json is"),
}


@pytest.mark.parametrize("damage", slow_but(("a flipped bit", "a missing manifest"), DAMAGES))
def test_a_damaged_copy_is_refused_and_an_older_one_serves(
    url: str, store: GenerationStore, back: GenerationStore, damage: str
) -> None:
    name, change, message = DAMAGES[damage]
    copy(mirror := Mirror(url, 2), commit(store, 0), commit(store, 1))
    fs, root = storage(url)
    path = f"{root}/global_step_1/{name}"
    if change is None:
        fs.rm_file(path)
    else:
        fs.pipe_file(path, change(fs.cat_file(path)))
    with pytest.raises(CheckpointCorruptError, match=message):
        mirror.fetch(1, back)
    assert back.generations() == [] and not list(back.root.glob(".*"))
    verify_folder(mirror.fetch(0, back).path)


def test_files_outside_of_the_manifest_are_not_fetched(
    url: str, store: GenerationStore, back: GenerationStore
) -> None:
    generation = commit(store, 0)
    copy(mirror := Mirror(url, 1), generation)
    fs, root = storage(url)
    fs.pipe_file(f"{root}/global_step_0/extra", b"from elsewhere")
    assert contents(mirror.fetch(0, back).path) == contents(generation.path)


def forge(
    url: str, step: int, folder: Path, facts: dict[str, int], names: Iterable[str] = ()
) -> None:
    """Put a well-formed manifest in place of the manifest of a copy."""
    folder.mkdir()
    write_manifest(folder, [FileEntry(name, 0, f"xxh3_128:{0:032x}") for name in names], facts)
    fs, root = storage(url)
    fs.pipe_file(
        f"{root}/global_step_{step}/{MANIFEST_NAME}", (folder / MANIFEST_NAME).read_bytes()
    )


@pytest.mark.parametrize(
    "name", ["../planted", "/tmp/planted", "a/../../planted", "", ".", "./a", "a/", MANIFEST_NAME]
)
def test_a_manifest_cannot_name_a_file_of_this_machine(
    memory_url: str, store: GenerationStore, back: GenerationStore, tmp_path: Path, name: str
) -> None:
    copy(mirror := Mirror(memory_url, 1), commit(store, 0))
    forge(memory_url, 0, tmp_path / "forged", {}, [name])
    with pytest.raises(CheckpointCorruptError, match="which is no file of a generation"):
        mirror.fetch(0, back)
    assert not list(tmp_path.rglob("planted")) and not Path("/tmp/planted").exists()


def test_a_newer_format_is_not_called_damage(
    memory_url: str, store: GenerationStore, back: GenerationStore, tmp_path: Path
) -> None:
    copy(mirror := Mirror(memory_url, 1), commit(store, 0))
    forge(memory_url, 0, tmp_path / "forged", {"format_version": 99})
    with pytest.raises(CheckpointMismatchError, match="Upgrade Holdfast"):
        mirror.fetch(0, back)
    assert back.generations() == [] and not list(back.root.glob(".*"))


def test_a_fetch_overwrites_no_existing_generation(url: str, store: GenerationStore) -> None:
    copy(mirror := Mirror(url, 1), commit(store, 0))
    with pytest.raises(CheckpointExistsError, match="global_step_0 exists already"):
        mirror.fetch(0, store)


def test_a_locally_corrupted_file_does_not_reach_the_mirror(
    url: str, store: GenerationStore
) -> None:
    mirror, generation = Mirror(url, 1), commit(store, 0)
    path = generation.path / "default" / "shard_0"
    path.write_bytes(damage_flip(path.read_bytes()))
    mirror.submit(generation)
    assert mirror.wait(30) and mirror.steps() == []
    assert isinstance(mirror.last_error, CheckpointCorruptError) and "shard_0 has digest" in str(
        mirror.last_error
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/mnt/runs", "it has no protocol"),
        ("nosuch://bucket/runs", "nosuch"),
        pytest.param(
            "gs://bucket/runs",
            "install gcsfs",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed"
            ),
        ),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"'recover.mirror_url' .*{message}"):
        Mirror(url, 1)


def leave(url: str, kind: str, generation: Generation) -> None:
    """Leave of a copy of the generation what a kill or a deletion leaves."""
    fs, root = storage(url)
    step = generation.step
    folder = f"{root}/global_step_{step}"
    manifest = (generation.path / MANIFEST_NAME).read_bytes()

    # Files first: all of them, all but one, or none.
    names = sorted(set(contents(generation.path)) - {MANIFEST_NAME})
    if kind == "incomplete":
        names = names[:1]
    if kind in ("a marker alone", "empty", "an object with the name of a folder"):
        names = []
    for name in names:
        fs.makedirs(f"{folder}/default", exist_ok=True)
        fs.pipe_file(f"{folder}/{name}", (generation.path / name).read_bytes())

    # Then what describes them.
    if kind in ("incomplete", "unconfirmed", "a marker alone"):
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(f"{root}/.copying-global_step_{step}", manifest)
    if kind == "a cut marker":
        fs.pipe_file(f"{root}/.copying-global_step_{step}", manifest[:100])
    if kind == "empty":
        fs.makedirs(f"{folder}/default", exist_ok=True)
    if kind == "an object with the name of a folder":
        fs.pipe_file(f"{folder}/", b"")


STATES = {
    "incomplete": "incomplete",
    "a marker alone": "incomplete",
    "unconfirmed": "unconfirmed",
    "no manifest": "no manifest",
    "a cut marker": "no manifest",
    "empty": "empty",
}


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("url", ["memory", "file"], indirect=True)
def test_what_is_left_of_a_copy_is_called_what_it_is(
    url: str, store: GenerationStore, kind: str
) -> None:
    copy(Mirror(url, None), commit(store, 1))
    leave(url, kind, commit(store, 2))
    mirror = Mirror(url, None)
    assert mirror.states() == {2: STATES[kind], 1: "complete"} and mirror.steps() == [1]


@pytest.mark.parametrize("kind", ["an object with the name of a folder", "incomplete"])
def test_what_is_left_at_an_object_store_is_called_what_it_is(
    s3_url: str, store: GenerationStore, kind: str
) -> None:
    leave(s3_url, kind, commit(store, 2))
    assert Mirror(s3_url, None).states() == {2: STATES.get(kind, "empty")}


def test_a_copy_that_lacks_only_its_manifest_is_fetched_and_completed(
    url: str, store: GenerationStore, back: GenerationStore
) -> None:
    generation = commit(store, 2)
    leave(url, "unconfirmed", generation)
    mirror = Mirror(url, None)
    fetched = mirror.fetch(2, back)
    assert contents(fetched.path) == contents(generation.path)
    copy(mirror, fetched)
    assert mirror.states() == {2: "complete"}
    assert listing(url) == [f"global_step_2/{name}" for name in contents(generation.path)]


def test_a_copy_that_was_never_confirmed_is_not_marked_as_damaged(
    url: str, store: GenerationStore, back: GenerationStore
) -> None:
    leave(url, "unconfirmed", commit(store, 2))
    fs, root = storage(url)
    path = f"{root}/global_step_2/default/shard_0"
    fs.pipe_file(path, damage_flip(fs.cat_file(path)))
    mirror = Mirror(url, None)
    with pytest.raises(CheckpointCorruptError, match="the copy was never confirmed"):
        mirror.fetch(2, back)
    assert mirror.states() == {2: "unconfirmed"}


def test_a_part_that_cannot_be_listed_is_an_error_not_an_empty_copy(
    memory_url: str, store: GenerationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(memory_url, "no manifest", commit(store, 2))
    mirror = Mirror(memory_url, None, attempts=1)
    remote = mirror._remote
    ls = remote._fs.ls

    def lose_the_connection(path: str, **options: object) -> object:
        if "global_step_2" in path:
            raise ConnectionError("lost")  # which fsspec's `find` may pass over
        return ls(path, **options)

    monkeypatch.setattr(remote._fs, "ls", lose_the_connection)
    with pytest.raises(MirrorError, match="ConnectionError: lost"):
        mirror.states()
