"""A mirror of a bucket, with moto's S3 server."""

from pathlib import Path

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
        options = {"endpoint_url": store.environment["AWS_ENDPOINT_URL"], "key": "key", "secret": "secret"}
        fs = fsspec.filesystem("s3", **options, skip_instance_cache=True)
        url = f"{BUCKET}/weights"
        command = ("mirror", f"s3://{url}", tmp_path / "local", "--poll", 0)
        with Running(*command, env=store.environment) as running:
            for version in range(1, 5):
                status, answer = running.prepare(version, publisher.label(version))
                assert status == 409 and "manifest.json is missing" in answer["error"]
                fs.put(f"{publisher.folder(version)}/", f"{url}/v{version:08d}/", recursive=True)
                status, answer = running.prepare(version, publisher.label(version))
                assert (status, answer) == (200, {"path": str(tmp_path / "local" / f"v{version:08d}")})
                assert_same(tmp_path / "local" / "current", publisher, version)
            name = f"{url}/v00000004/delta/rank_00000.safetensors"
            assert "in 1 deltas and 0 full" in running.log[-1] and fs.exists(name)
