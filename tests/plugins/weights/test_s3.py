"""A mirror of a bucket, with moto's S3 server."""

import re
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.plugins.weights.processes import Running
from tests.plugins.weights.publisher import Publisher, assert_same
from tests.recover.mirrors import BUCKET, S3Server

pytestmark = pytest.mark.timeout(120)


def test_a_bucket_is_mirrored(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "source")
    publisher.publish_chain(range(1, 5), anchors=(3,))
    with S3Server() as store:
        options = {
            "endpoint_url": store.environment["AWS_ENDPOINT_URL"],
            "key": "key",
            "secret": "secret",
        }
        fs = fsspec.filesystem("s3", **options, skip_instance_cache=True)
        url = f"{BUCKET}/weights"
        command = ("mirror", f"s3://{url}", tmp_path / "local", "--poll", 0)
        with Running(*command, env=store.environment) as running:
            for version in range(1, 5):
                status, answer = running.prepare(version, publisher.label(version))
                assert status == 409 and "manifest.json is missing" in answer["error"]
                fs.put(f"{publisher.folder(version)}/", f"{url}/v{version:08d}/", recursive=True)
                status, answer = running.prepare(version, publisher.label(version))
                assert (status, answer) == (
                    200,
                    {"path": str(tmp_path / "local" / f"v{version:08d}")},
                )
                assert_same(tmp_path / "local" / "current", publisher, version)
        fetched = [line for line in running.log if "verified" in line]
        assert "in 1 deltas and 0 full" in fetched[-1]
        assert fs.exists(f"{url}/v00000004/delta/rank_00000.safetensors")


def _documented_upload() -> Any:
    page = (Path(__file__).parents[3] / "docs" / "servers.md").read_text()
    (code,) = re.findall(
        r"<!-- tests/plugins/weights/test_s3.py runs this -->\n```python\n(.*?)```", page, re.DOTALL
    )
    scope: dict[str, Any] = {}
    exec(compile(code, "servers.md", "exec"), scope)
    return scope["upload"]


@pytest.mark.slow
def test_the_documented_upload_feeds_a_mirror_and_removes_old_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, publisher = _documented_upload(), Publisher(tmp_path / "source")
    publisher.publish_chain(range(1, 5), anchors=(3,))
    with S3Server() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/weights"
        fs, root = fsspec.url_to_fs(url, use_listings_cache=False)
        with Running(
            "mirror", url, tmp_path / "local", "--poll", 0, env=store.environment
        ) as running:
            for version in range(1, 5):
                upload(publisher.folder(version), url)
                assert store.requests[-1] == f"PUT /{BUCKET}/weights/v{version:08d}/manifest.json"
                status, answer = running.prepare(version, publisher.label(version))
                assert (status, answer) == (
                    200,
                    {"path": str(tmp_path / "local" / f"v{version:08d}")},
                )
                assert_same(tmp_path / "local" / "current", publisher, version)
            for version in (1, 2):
                shutil.rmtree(publisher.folder(version))
            fs.put_file(
                str(publisher.folder(3) / "manifest.json"), f"{root}/v00000009/manifest.json"
            )
            fs.put_file(
                str(publisher.folder(3) / "manifest.json"), f"{root}/v00000004/of_an_older_upload"
            )
            upload(publisher.folder(4), url)
        found = {path.removeprefix(f"{root}/") for path in fs.find(root)}
        versions = [publisher.folder(version) for version in (3, 4)]
        there = {
            path.relative_to(tmp_path / "source")
            for folder in versions
            for path in folder.rglob("*")
        }
        assert found == {
            path.as_posix() for path in there if (tmp_path / "source" / path).is_file()
        }
