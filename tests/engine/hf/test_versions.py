"""Finding the versions of the weights in a folder."""

from pathlib import Path

from holdfast.engine.hf.versions import published_versions, version_path


def test_published_versions_sees_only_complete_ones_in_order_of_number(tmp_path: Path) -> None:
    assert published_versions(tmp_path / "nowhere") == []
    for name in (
        "v00000010",
        "v00000009",
        "v100000000",
        ".staging-v00000011-ab",
        "v3",
        "notes",
        "v00000012.tmp",
    ):
        (tmp_path / name).mkdir()
    assert published_versions(tmp_path) == [9, 10, 100_000_000]
    assert version_path(tmp_path, 100_000_000).name == "v100000000"
