"""Consequences of damage for a run: it resumes from the previous generation. Without a valid one it
never starts over.

tests/faults/test_rotten.py shows that every kind of damage is found.
"""

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.utils.errors import CheckpointCorruptError, CheckpointMismatchError, ConfigError
from holdfast.utils.manifest import MANIFEST_NAME, encode_manifest
from tests.faults.generations import reseal
from tests.recover.runs import Tiny, hidden, make_handler, names, newest, run_until, step_info

pytestmark = pytest.mark.timeout(60)


def _rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Rewrite the manifest with a valid self-checksum."""
    document = json.loads((folder / MANIFEST_NAME).read_text())
    del document["digest"]
    (folder / MANIFEST_NAME).write_bytes(encode_manifest(document | changes))


def test_a_damaged_generation_is_set_aside_and_its_step_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digests = run_until(tmp_path, 3)
    os.truncate(newest(tmp_path) / "state" / "rank_00000.pt", 99)
    tiny, handler = Tiny(), make_handler(tmp_path)
    with caplog.at_level(logging.WARNING):
        info = handler.load(tiny.state)
    handler.close()
    assert info and info.last_step_info.global_step == 1 and tiny.digest() == digests[1]
    assert names(tmp_path) == ["global_step_1"]
    (rejected,) = hidden(tmp_path)
    assert rejected.startswith(".rejected-global_step_2-state-rank-00000-pt-has-99-bytes")
    assert f"global_step_2 as {rejected}: " in caplog.text
    assert run_until(tmp_path, 4, first=2)[0] == digests[2]
    assert names(tmp_path) == ["global_step_2", "global_step_3"]


@pytest.mark.parametrize("mode", ["auto", "must"])
def test_a_run_with_nothing_usable_left_never_starts_over(tmp_path: Path, mode: str) -> None:
    run_until(tmp_path, 2)
    for folder in (tmp_path / "e" / "t" / "recover").glob("global_step_*"):
        os.truncate(folder / "default" / "__0_0.distcp", 1000)
    for _ in range(2):  # the second time only the quarantined one is left
        handler = make_handler(tmp_path, mode=mode, freq_steps=1)
        with pytest.raises(
            CheckpointCorruptError,
            match=r"no usable generation left: \.rejected-global_step_0-default",
        ):
            handler.load(Tiny().state)
        with pytest.raises(ConfigError, match="before load"):
            handler.dump(Tiny().state, step_info(0))
        handler.close()
    assert len(hidden(tmp_path)) == 2


def test_a_generation_of_a_newer_format_stays_and_stops_the_run(tmp_path: Path) -> None:
    run_until(tmp_path, 2)
    _rewrite_manifest(newest(tmp_path), format_version=99, files="in another way")
    for _ in range(2):
        handler = make_handler(tmp_path)
        with pytest.raises(
            CheckpointMismatchError, match="has format version 99; this Holdfast reads version"
        ):
            handler.load(Tiny().state)
        handler.close()
    assert names(tmp_path) == ["global_step_0", "global_step_1"]


def test_a_generation_of_a_format_that_never_was_is_set_aside(tmp_path: Path) -> None:
    digests = run_until(tmp_path, 2)
    _rewrite_manifest(newest(tmp_path), format_version="2")
    assert run_until(tmp_path, 2, first=1) == digests[1:]
    (rejected,) = hidden(tmp_path)
    assert rejected.startswith(".rejected-global_step_1-manifest-json-has-format-version-2")


def test_a_renamed_generation_and_a_stray_file_are_not_resumed_from(tmp_path: Path) -> None:
    run_until(tmp_path, 1)
    newest(tmp_path).rename(newest(tmp_path).with_name("global_step_8"))
    (newest(tmp_path).parent / "global_step_9").write_text("not a folder")
    with pytest.raises(CheckpointCorruptError, match="was-renamed-it-holds-step-0"):
        make_handler(tmp_path).load(Tiny().state)


def test_a_generation_lacking_tensors_is_set_aside_although_its_digests_fit(tmp_path: Path) -> None:
    """The result of a bug in a writer."""
    digests = run_until(tmp_path, 2)
    folder = newest(tmp_path)
    metadata = FileSystemReader(folder / "default").read_metadata()
    name, entry = next(
        (n, e) for n, e in metadata.state_dict_metadata.items() if len(getattr(e, "size", ())) == 2
    )
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.pop()
    (folder / "default" / ".metadata").write_bytes(pickle.dumps(metadata))
    reseal(folder)
    assert run_until(tmp_path, 2, first=1) == digests[1:], name
    (rejected,) = hidden(tmp_path)
    assert "do-not-cover-it" in rejected
