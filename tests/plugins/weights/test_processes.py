"""Real mirrors over HTTP: kills at every step, tokens, many requests, a slow source, a full disk,
bounded memory.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from holdfast_weights.service import FileHandler, Server

from tests.limits import stretched
from tests.plugins.weights.killed import STEPS
from tests.plugins.weights.processes import COMMAND, Running
from tests.plugins.weights.publisher import SHAPES, Publisher, assert_same
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(120)

LARGE = {**SHAPES, "large": ("BF16", (300_000,))}


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "source")


def mirror(tmp_path: Path, *options: object, **more: Any) -> Running:
    """A mirror that does not poll."""
    return Running("mirror", tmp_path / "source", tmp_path / "local", "--poll", 0, *options, **more)


def test_a_version_is_prepared_and_reported(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish_chain((1, 2))
    with mirror(tmp_path) as running:
        for version in (1, 2, 1, 2, 2):
            answer = running.prepare(version, publisher.label(version))
            assert answer == (200, {"path": str(tmp_path / "local" / f"v0000000{version}")})
            assert_same(Path(answer[1]["path"]), publisher, version)
        status, found = running.request("/status")
        assert (status, found["current"], found["doing"]) == (200, 2, "idle")
        assert found["held"] == {"1": publisher.label(1), "2": publisher.label(2)}
        code, answer = running.prepare(3, "3-xxh3_128:" + "0" * 32)
        assert code == 409 and "v00000003/manifest.json is missing" in answer["error"]


def test_polling_moves_current(publisher: Publisher, tmp_path: Path) -> None:
    with Running("mirror", tmp_path / "source", tmp_path / "local", "--poll", 0.05):
        previous = None
        for version in range(1, 6):
            publisher.train()
            publisher.publish(version, previous)
            previous = version
            deadline = time.monotonic() + stretched(20)
            while not (tmp_path / "local" / "current" / "manifest.json").exists() or (
                os.readlink(tmp_path / "local" / "current") != f"v0000000{version}"
            ):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            assert_same(tmp_path / "local" / "current", publisher, version)


QUICK = ("fetching", "patching", "rename", "current")


@pytest.mark.parametrize("step", slow_but(QUICK, STEPS))
def test_a_mirror_killed_at_any_step_goes_on(
    step: str, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish_chain((1, 2, 3), share=0.2)
    armed, local = tmp_path / "armed", tmp_path / "local"
    command = (sys.executable, "-m", "tests.plugins.weights.killed", step, armed)
    with mirror(tmp_path, command=command) as running:
        for version in (1, 2):
            assert running.prepare(version, publisher.label(version))[0] == 200
        armed.touch()
        with pytest.raises((OSError, ValueError)):
            running.prepare(3, publisher.label(3))
        assert running.process.wait(stretched(20)) == -signal.SIGKILL
    for folder in local.glob("v*"):
        assert_same(folder, publisher, int(folder.name[1:]))
    assert os.readlink(local / "current") == (
        "v00000003" if step in ("current", "done") else "v00000002"
    )
    with mirror(tmp_path) as running:
        held = {int(version) for version in running.request("/status")[1]["held"]}
        assert held == {int(folder.name[1:]) for folder in local.glob("v*")}
        assert running.prepare(3, publisher.label(3))[0] == 200
        assert_same(local / "current", publisher, 3)
        assert [name for name in os.listdir(local) if name[0] == "."] == [".mirror"]


@pytest.mark.parametrize(
    "step", slow_but(["verified"], ["fetching", "verified", "renamed", "current"])
)
def test_a_mirror_killed_in_its_first_version_goes_on(
    step: str, publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(1)
    (tmp_path / "armed").touch()
    command = (sys.executable, "-m", "tests.plugins.weights.killed", step, tmp_path / "armed")
    with mirror(tmp_path, command=command) as running, pytest.raises((OSError, ValueError)):
        running.prepare(1, publisher.label(1))
    assert (tmp_path / "local" / "v00000001").exists() == (step in ("renamed", "current"))
    with mirror(tmp_path) as running:
        assert os.path.lexists(tmp_path / "local" / "current") == (step in ("renamed", "current"))
        assert running.prepare(1, publisher.label(1))[0] == 200
        assert_same(tmp_path / "local" / "current", publisher, 1)


def test_many_requests_at_once(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish_chain(range(1, 7))
    with mirror(tmp_path) as running, ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(lambda n: running.prepare(n % 2 + 5, publisher.label(n % 2 + 5)), range(48))
        )
        assert {status for status, _ in answers} == {200}
        assert_same(tmp_path / "local" / "v00000005", publisher, 5)
        assert_same(tmp_path / "local" / "v00000006", publisher, 6)


TOKEN = {"HOLDFAST_WEIGHTS_TOKEN": "sesame"}
BEARER = {"Authorization": "Bearer sesame"}


@pytest.mark.slow
def test_a_token_protects_everything(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(1)
    body = {"version": 1, "label": publisher.label(1)}
    with Running("serve", tmp_path / "source", env=TOKEN) as served:
        for headers in (
            {},
            {"Authorization": "Bearer sesam"},
            {"Authorization": "sesame"},
            {"Authorization": "é"},
        ):
            assert served.request("/v00000001/manifest.json", headers=headers)[0] == 401
            assert served.request("/", headers=headers)[0] == 401
        local = tmp_path / "local"
        with Running("mirror", served.url, local, "--poll", 0, env=TOKEN) as running:
            for headers in ({}, {"Authorization": "Bearer other"}):
                assert running.request("/prepare", body, headers)[0] == 401
                assert running.request("/status", headers=headers)[0] == 401
            assert list(local.glob("v*")) == []
            assert running.request("/prepare", body, BEARER) == (
                200,
                {"path": str(local / "v00000001")},
            )
            assert_same(local / "v00000001", publisher, 1)
        with Running("mirror", served.url, tmp_path / "other", "--poll", 0) as running:
            status, answer = running.request("/prepare", body)
            assert status == 409 and "401" in answer["error"], "a refusal is no missing file"


@pytest.mark.parametrize(
    "listen",
    slow_but(["0.0.0.0:0"], ["0.0.0.0:0", "[::]:0", "example.com:0", "10.0.0.5:0"]),
)
def test_other_machines_need_a_token(listen: str, publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(1)
    environment = {name: value for name, value in os.environ.items() if name not in TOKEN}
    for args in (
        ["serve", tmp_path / "source"],
        ["mirror", tmp_path / "source", tmp_path / "local"],
    ):
        command = [*map(str, [COMMAND, *args]), "--listen", listen]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=stretched(30)
        )
        assert (
            done.returncode == 1
            and "set HOLDFAST_WEIGHTS_TOKEN, or listen on 127.0.0.1" in done.stderr
        )


def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path) -> None:
    command = [*map(str, [COMMAND, "serve", tmp_path]), "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "HOLDFAST_WEIGHTS_TOKEN": "sesame\n"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=stretched(30)
    )
    assert done.returncode == 1 and "sesame" not in done.stderr
    assert "HOLDFAST_WEIGHTS_TOKEN has white space" in done.stderr


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "localhost:0", "[::1]:0"])
def test_addresses_are_listened_on(listen: str, publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish(1)
    try:
        socket.getaddrinfo(listen[:-2].strip("[]"), 0)
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no such address")
    with Running("serve", tmp_path / "source", env=TOKEN, listen=listen) as served:
        served.url = served.url.replace("0.0.0.0", "127.0.0.1")
        assert served.request("/v00000001/none", headers=BEARER)[0] == 404


BAD: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "no label": b'{"version": 1}',
    "label of another version": json.dumps(
        {"version": 2, "label": "1-xxh3_128:" + "0" * 32}
    ).encode(),
    "a path": json.dumps({"version": 1, "label": "../../etc"}).encode(),
    "true": json.dumps({"version": True, "label": "1-xxh3_128:" + "0" * 32}).encode(),
    "deep": b"[" * 60_000,
    "long": b" " * 70_000,
}


@pytest.mark.parametrize("name", slow_but(["nothing", "a path", "deep"], BAD))
def test_bad_requests_are_refused(name: str, tmp_path: Path) -> None:
    with mirror(tmp_path) as running:
        status, answer = running.request("/prepare", BAD[name])
        assert status == 400 and "expected a version and its label" in answer["error"]
        assert running.request("/status")[0] == 200


def test_odd_bytes_on_the_wire_disturb_nobody(tmp_path: Path) -> None:
    with mirror(tmp_path) as running:
        host, port = running.url.removeprefix("http://").split(":")
        for data in (
            b"\0" * 1000,
            b"GET\r\n\r\n",
            b"POST /prepare HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /prepare HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n{",
            b"POST /prepare HTTP/1.1\r\nContent-Length: 100\r\n\r\n{",
            b"G" * 70_000,
        ):
            with socket.create_connection((host, int(port)), timeout=stretched(20)) as connection:
                connection.sendall(data)
        assert running.request("/other")[0] == 404
        assert running.request("/other", b"{}")[0] == 404
        assert running.request("/status")[0] == 200


@pytest.mark.slow
def test_mirrors_feed_mirrors(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish_chain((1, 2))
    with mirror(tmp_path) as first, Running("serve", tmp_path / "local") as served:
        with Running("mirror", served.url, tmp_path / "second", "--poll", 0) as second:
            for version in range(1, 5):
                if version > 2:
                    publisher.train()
                    publisher.publish(version, version - 1)
                label = publisher.label(version)
                assert second.prepare(version, label)[0] == 409
                assert first.prepare(version, label)[0] == 200
                assert second.prepare(version, label)[0] == 200
                assert_same(tmp_path / "second" / "current", publisher, version)
        assert "fetched" in "".join(second.log) and "in 1 deltas and 0 full" in second.log[-1]


class _Slow(FileHandler):
    delay_s = 0.0

    def _send_file(self, file: Any) -> None:
        time.sleep(self.delay_s)
        super()._send_file(file)


@contextmanager
def slow_source(folder: Path, delay_s: float) -> Iterator[str]:
    """``serve`` that waits before each answer."""
    with Server(
        "127.0.0.1:0", None, type("Slow", (_Slow,), {"delay_s": delay_s}), folder
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_a_slow_source_holds_up_no_status_and_is_finished_after_a_request_gave_up(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish_chain((1, 2))
    with (
        slow_source(tmp_path / "source", stretched(0.2)) as url,
        Running("mirror", url, tmp_path / "local", "--poll", 0) as running,
    ):
        with pytest.raises(TimeoutError):
            running.prepare(2, publisher.label(2), timeout_s=1)
        began = time.monotonic()
        status, found = running.request("/status")
        assert time.monotonic() - began < stretched(1)
        assert status == 200 and found["doing"] != "idle" and found["held"] == {}
        assert running.prepare(2, publisher.label(2))[0] == 200
        assert_same(tmp_path / "local" / "v00000002", publisher, 2)


@pytest.mark.slow
def test_a_source_that_comes_back_is_used_again(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish_chain((1, 2))
    with (
        Running("serve", tmp_path / "source") as served,
        Running("mirror", served.url, tmp_path / "local", "--poll", 0) as running,
    ):
        assert running.prepare(1, publisher.label(1))[0] == 200
        served.process.kill()
        served.process.wait(stretched(20))
        status, answer = running.prepare(2, publisher.label(2))
        assert (
            status == 409 and "cannot read" in answer["error"] and "missing" not in answer["error"]
        )
        assert running.prepare(1, publisher.label(1))[0] == 200
        port = served.url.rpartition(":")[2]
        command = [str(COMMAND), "serve", str(tmp_path / "source"), "--listen", f"127.0.0.1:{port}"]
        again = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            assert again.stdout is not None and b"listening" in again.stdout.readline()
            assert running.prepare(2, publisher.label(2))[0] == 200
        finally:
            again.kill()
            again.communicate()


def small_disk(path: Path, size: int) -> list[object]:
    """Command that runs another one with a tmpfs of ``size`` bytes at ``path``, which only that one
    sees.
    """
    script = f'mount -t tmpfs -o size={size} none {path} && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh"]


@pytest.mark.parametrize("room", [0, 100_000, 500_000, 1_000_000])
def test_a_full_disk_leaves_the_old_version(room: int, tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "source", LARGE, piece_elements=50_000)
    publisher.publish_chain((1, 2))
    local = tmp_path / "local"
    local.mkdir()
    command = small_disk(local, 4 << 20)
    if subprocess.run([*map(str, command), "true"], capture_output=True).returncode:
        pytest.skip("the kernel allows no mount")
    with mirror(tmp_path, command=(*command, COMMAND)) as running:
        inside = Path(f"/proc/{running.process.pid}/root{local}")
        assert running.prepare(1, publisher.label(1))[0] == 200
        free = os.statvfs(inside).f_bavail * os.statvfs(inside).f_bsize
        (inside / ".ballast").write_bytes(bytes(max(0, free - room)))
        status, answer = running.prepare(2, publisher.label(2))
        if room == 1_000_000:
            assert status == 200
        else:
            assert status == 409 and "No space left on device" in answer["error"], answer
            assert sorted(os.listdir(inside)) == [".ballast", ".mirror", "current", "v00000001"]
            assert_same(inside / "v00000001", publisher, 1)
            assert os.readlink(inside / "current") == "v00000001"
            assert running.request("/status")[1]["held"] == {"1": publisher.label(1)}
        (inside / ".ballast").unlink()
        assert running.prepare(2, publisher.label(2))[0] == 200
        assert_same(inside / "v00000002", publisher, 2)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_versions(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(1)
    with mirror(tmp_path) as running:
        after: dict[int, int] = {}
        for version in range(1, 121):
            if version > 1:
                publisher.train()
                publisher.publish(version, version - 1)
                shutil.rmtree(publisher.folder(version - 1))
            assert running.prepare(version, publisher.label(version))[0] == 200
            after[version] = running.memory()
        assert_same(tmp_path / "local" / "current", publisher, 120)
        print(
            f"peak memory: {after[20] >> 10} KiB after 20 versions, {after[120] >> 10} KiB after "
            "120"
        )
        assert after[120] - after[20] < 4 << 20


TWO_THREADS = "import os; os.cpu_count = lambda: 2; from holdfast_weights.cli import main; main()"


@pytest.mark.slow
@pytest.mark.parametrize("over_http", [False, True])
def test_memory_does_not_grow_with_the_model(over_http: bool, tmp_path: Path) -> None:
    def peak(megabytes: int) -> int:
        root = tmp_path / str(megabytes)
        shapes = {f"layer.{i}": ("BF16", (1 << 20,)) for i in range(megabytes // 2 - 8)}
        shapes["large"] = ("BF16", (8 << 20,))
        publisher = Publisher(root / "source", shapes, ranks=1, piece_elements=2 << 20)
        publisher.publish_chain((1, 2, 3), share=0.05)
        with Running("serve", root / "source") as served:
            source = served.url if over_http else root / "source"
            command = (sys.executable, "-c", TWO_THREADS)
            with Running("mirror", source, root / "local", "--poll", 0, command=command) as running:
                for version in (1, 2, 3):
                    assert running.prepare(version, publisher.label(version))[0] == 200
                assert_same(root / "local" / "v00000003", publisher, 3)
                found = running.memory()
        shutil.rmtree(root)
        return found

    small, large = peak(40), peak(240)
    print(f"peak memory: {small >> 20} MiB for 40 MB, {large >> 20} MiB for 240 MB")
    assert large - small < 48 << 20


@pytest.mark.slow
def test_verify_reads_full_versions_and_deltas(publisher: Publisher, tmp_path: Path) -> None:
    publisher.publish_chain((1, 2, 3), anchors=(3,))

    def verify(version: int) -> tuple[int, str]:
        command = [COMMAND, "verify", publisher.folder(version)]
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=stretched(30)
        )
        return done.returncode, done.stdout + done.stderr

    assert verify(1) == (
        0,
        (
            f"{publisher.folder(1)}: {publisher.label(1)}, 5 files with {total(publisher, 1)} "
            "bytes are complete\n"
        ),
    )
    (tmp_path / "current").symlink_to(publisher.folder(1))
    command = [str(COMMAND), "verify", str(tmp_path / "current")]
    assert (
        "are complete"
        in subprocess.run(command, capture_output=True, text=True, timeout=stretched(30)).stdout
    )
    code, text = verify(2)
    assert (
        code == 0
        and f"from {publisher.label(1)} to {publisher.label(2)}\n" in text
        and "complete" not in text
    )
    code, text = verify(3)
    assert code == 0 and "complete" in text and f"from {publisher.label(2)}\n" in text
    data = bytearray((publisher.folder(2) / "delta" / "rank_00001.safetensors").read_bytes())
    data[-1] ^= 1
    (publisher.folder(2) / "delta" / "rank_00001.safetensors").write_bytes(data)
    code, text = verify(2)
    assert code == 1 and "rank_00001.safetensors has digest" in text
    (publisher.folder(1) / "config.json").unlink()
    code, text = verify(1)
    assert code == 1 and text.startswith("Error: ") and "config.json is missing" in text
    assert verify(9)[0] == 1


def total(publisher: Publisher, version: int) -> int:
    return sum(map(len, publisher.contents[version].values()))


def test_a_mirror_says_what_is_wrong_with_its_arguments(
    publisher: Publisher, tmp_path: Path
) -> None:
    publisher.publish(1)

    def run(*args: object) -> str:
        done = subprocess.run(
            [str(COMMAND), *map(str, args)], capture_output=True, text=True, timeout=stretched(30)
        )
        assert done.returncode in (1, 2)
        return done.stderr

    local, listen = tmp_path / "local", ("--listen", "127.0.0.1:0")
    assert "overlap" in run("mirror", tmp_path / "source", tmp_path / "source", *listen)
    assert "is not an address" in run("mirror", tmp_path / "source", local, "--listen", "nowhere")
    assert "cannot be opened" in run("mirror", "nothing://x", local, *listen)
    assert "no such" in run("serve", tmp_path / "none", *listen).lower() or "does not exist" in run(
        "serve", tmp_path / "none", *listen
    )


def test_bits_of_floats_come_out_as_they_are(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "source", {"w": ("F32", (100,)), "v": ("BF16", (100,))})
    publisher.publish(1)
    publisher.values["w"][[0, 1, 98, 99]] = np.array([-0.0, np.nan, np.inf, -np.nan], "<f4").view(
        "<u4"
    )
    publisher.values["v"][[0, 99]] = [0x8000, 0xFFC1]
    publisher.publish(2, 1)
    with mirror(tmp_path) as running:
        for version in (1, 2):
            assert running.prepare(version, publisher.label(version))[0] == 200
        assert_same(tmp_path / "local" / "v00000002", publisher, 2)
