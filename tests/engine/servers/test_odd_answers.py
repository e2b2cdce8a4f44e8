"""Trouble between a client and its server: gateways, certificates, names that move, and answers of
other parties.
"""

import asyncio
import errno
import os
import re
import resource
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import web
from tenacity import wait_none

from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer, http
from holdfast.engine.servers.api import (
    GenerationHyperparameters,
    ModelRequest,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import (
    ConfigError,
    NoServerError,
    PublishError,
    RolloutError,
    ServerError,
    UnreachableServerError,
)
from tests.engine.rollouts.servers import make_executor
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import publish_hashed
from tests.engine.servers.gateway import Gateway
from tests.limits import stretched, wait_until

pytestmark = pytest.mark.timeout(60)

REQUEST = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=1), seed=1)


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer("vllm", tmp_path_factory.mktemp("record")) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return publish_hashed(tmp_path / "w", 1)


def check_use(server: VLLMServer, folder: str) -> None:
    """Update the server and ask it for two completions."""
    assert server.update_weights_from_disk(folder, 1) == 1
    assert server.status() == ServerStatus(weights_label(folder, 1), paused=False)

    async def twice() -> None:
        for _ in range(2):
            assert (await server.agenerate(REQUEST)).output_versions == [1]
            await asyncio.sleep(0.05)

    asyncio.run(twice())


@pytest.mark.parametrize(
    "options", [{"prefix": "/a/b"}, {"host": "::1"}, {"compress": True}, {"close": True}], ids=str
)
def test_a_server_may_stand_behind_a_gateway(options: Any, fake: FakeServer, folder: str) -> None:
    if options == {"host": "::1"} and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with Gateway(fake.url, **options) as gateway:
        check_use(VLLMServer(f"{gateway.url}/"), folder)


@pytest.mark.slow
def test_a_certificate_that_is_not_trusted_is_told_from_a_server_that_is_gone(
    fake: FakeServer, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj "
        "/CN=localhost"
    )
    names = [
        "-addext",
        "subjectAltName=IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with Gateway(fake.url, tls=tls) as gateway:
        server = VLLMServer(gateway.url)
        for ask in (server.status, lambda: asyncio.run(server.agenerate(REQUEST))):
            with pytest.raises(
                UnreachableServerError,
                match=r"certificate is not trusted .* variable SSL_CERT_FILE",
            ):
                ask()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        check_use(VLLMServer(gateway.url), folder)


def test_a_name_that_leads_elsewhere_after_a_restart_is_followed(
    fake: FakeServer, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses, resolve = ["127.0.0.1"], socket.getaddrinfo

    def moved(host: Any, *rest: Any, **options: Any) -> Any:
        return resolve(
            addresses[0] if host in ("server.test", b"server.test") else host, *rest, **options
        )

    monkeypatch.setattr(socket, "getaddrinfo", moved)

    async def before_and_after() -> None:
        with Gateway(fake.url) as first:
            server = VLLMServer(f"http://server.test:{first.port}")
            await asyncio.to_thread(server.update_weights_from_disk, folder, 1)
            await server.agenerate(REQUEST)
        addresses[0] = "127.0.0.2"
        with Gateway(fake.url, host="127.0.0.2", port=first.port) as second:
            assert (await server.agenerate(REQUEST)).output_versions == [1]
            assert second.asked
            assert (await asyncio.to_thread(server.status)).label == weights_label(folder, 1)

    asyncio.run(before_and_after())


async def html(_: web.Request) -> web.Response:
    return web.Response(text="<html>please log in</html>", content_type="text/html")


async def no_such_page(_: web.Request) -> web.Response:
    page = (
        "<html><head><style>h1 { color: red }</style></head><body><h1>Not Found</h1></body></html>"
    )
    return web.Response(status=404, text=page, content_type="text/html")


async def bad_gateway(_: web.Request) -> web.Response:
    return web.Response(
        status=502, text="<html>" + "bad gateway " * 1_000_000, content_type="text/html"
    )


async def masked(_: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "upstream failed"}})


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPPermanentRedirect("https://user:secret@elsewhere:8443/")


async def no_gzip(_: web.Request) -> web.Response:
    return web.Response(body=b"plain", headers={"Content-Encoding": "gzip"})


async def a_list(_: web.Request) -> web.Response:
    return web.json_response([1, 2, 3])


ODD = {
    html: (
        r"with 'a web page: please log in'; expected a JSON object; is an inference server at "
        r"this URL"
    ),
    no_such_page: (
        r"with 404 \(a web page: Not Found\);.* is an inference server at this URL, or "
        r"a proxy"
    ),
    bad_gateway: r"with 502 \(a web page: bad gateway bad",
    masked: r"with 200 and an error \(.*upstream failed",
    elsewhere: r"with 308: it has moved to https://elsewhere:8443/; give the URL of that",
    no_gzip: r"broke off \(DecodingError",
    a_list: r"with '\[1, 2, 3\]'; expected a JSON object",
}


@pytest.mark.parametrize("answer", ODD, ids=lambda answer: answer.__name__)
def test_an_unexpected_answer_is_quoted_and_ends_the_update(answer: Any, folder: str) -> None:
    with Gateway(answer=answer) as gateway:
        server = VLLMServer(gateway.url)
        with pytest.raises(PublishError, match=ODD[answer]) as caught:
            server.update_weights_from_disk(folder, 1)
        assert gateway.asked == ["POST /pause"] and len(str(caught.value)) < 800
        with pytest.raises(ServerError, match=ODD[answer]):
            server.status()
        with pytest.raises(ServerError, match=ODD[answer]):
            asyncio.run(server.agenerate(REQUEST))


@pytest.mark.slow
def test_an_answer_that_trickles_in_is_no_answer_in_time(folder: str) -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b" ")
            await asyncio.sleep(0.05)

    with Gateway(answer=trickle) as gateway:
        server = VLLMServer(
            gateway.url, timeout_s=0.5, status_timeout_s=0.5, generation_timeout_s=0.5
        )
        began = time.monotonic()
        for ask in (
            server.status,
            lambda: server.update_weights_from_disk(folder, 1),
            lambda: asyncio.run(server.agenerate(REQUEST)),
        ):
            with pytest.raises(ServerError, match=r"was not answered, all together within 0\.5 s"):
                ask()
        assert time.monotonic() - began < stretched(5)


def test_a_server_that_is_busy_has_not_failed_and_is_asked_again_when_it_says(
    fake: FakeServer, folder: str
) -> None:
    refused = []

    async def busy(request: web.Request) -> web.Response | None:
        if (
            request.path != "/inference/v1/generate" or len(refused) == 5
        ):  # more often than a request may fail
            return None
        refused.append(time.monotonic())
        return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")

    with Gateway(fake.url, answer=busy) as gateway:
        server = VLLMServer(gateway.url)
        server.update_weights_from_disk(publish_hashed(Path(folder).parent, 0), 0)
        with make_executor([server], request_attempts=2, max_concurrent_rollouts=1) as executor:
            executor.set_version(0)
            assert len(executor.next_batch(0)["input_ids"]) == 4
            assert len(refused) == 5 and executor.stats()["rollouts/retried"] == 0


def test_a_server_that_stays_busy_is_given_up(fake: FakeServer) -> None:
    async def busy(request: web.Request) -> web.Response | None:
        return (
            web.Response(status=503, headers={"Retry-After": "3600"})
            if "generate" in request.path
            else None
        )

    with Gateway(fake.url, answer=busy) as gateway:
        options: Any = {"request_attempts": 1, "server_wait_s": 0.2}
        with make_executor([VLLMServer(gateway.url)], **options) as executor:
            executor.set_version(0)
            with pytest.raises(
                RolloutError,
                match=r"no server took a request for 0\.2 s: .* answered with 503: it is busy",
            ):
                executor.next_batch(0)


def test_the_only_server_of_a_list_is_waited_for_while_it_is_not_there(
    fake: FakeServer, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Gateway(fake.url) as gateway:
        server = VLLMServer(gateway.url)
        server.update_weights_from_disk(publish_hashed(Path(folder).parent, 0), 0)
    with make_executor([server], request_attempts=1) as executor:
        executor.set_version(0)
        wait_until(lambda: "requests wait for" in caplog.text)
        with Gateway(fake.url, port=gateway.port):
            assert len(executor.next_batch(0)["input_ids"]) == 4
        assert executor.stats()["rollouts/retried"] == 0
    assert caplog.text.count("requests wait for") == 1


def test_a_list_of_models_of_another_program_is_a_refusal(fake: FakeServer) -> None:
    async def theirs(request: web.Request) -> web.Response:
        return web.json_response({"data": ["x"]})

    with Gateway(fake.url, answer=theirs) as gateway:
        server = VLLMServer(gateway.url, served_name="mine")
        with pytest.raises(ServerError, match="its list of models cannot be used"):
            server.require_name(stretched(5))


def test_a_server_that_does_not_say_its_name_is_a_refusal(fake: FakeServer) -> None:
    async def theirs(request: web.Request) -> web.Response:
        return web.json_response({})

    with Gateway(fake.url, answer=theirs) as gateway:
        server = SGLangServer(gateway.url, served_name="mine")
        with pytest.raises(ServerError, match="does not say which model it serves"):
            server.require_name(stretched(5))


@pytest.mark.slow
def test_a_server_that_never_comes_back_is_given_up() -> None:
    with Gateway() as gateway:
        pass
    with make_executor([VLLMServer(gateway.url)], server_wait_s=0.2) as executor:
        executor.set_version(0)
        with pytest.raises(
            RolloutError, match=r"no server took a request for 0\.2 s: .* found no server there"
        ):
            executor.next_batch(0)


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process can open no more sockets."""

    def connect(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def connect_on_loop(*_: object, **__: object) -> NoReturn:
        connect()

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect_on_loop)
    monkeypatch.setattr("holdfast.engine.servers.http.wait_exponential", lambda _: wait_none())


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_lack_of_files_is_told_from_a_server_that_is_down(host: str) -> None:
    server = VLLMServer(f"http://{host}:9")
    with pytest.raises(
        UnreachableServerError, match=r"Too many open files\); raise their limit \(ulimit -n\)"
    ) as caught:
        asyncio.run(server.agenerate(REQUEST))
    assert not isinstance(caught.value, NoServerError)


@pytest.mark.usefixtures("no_files")
def test_a_server_that_cannot_be_told_to_sleep_for_lack_of_files_may_have_its_memory() -> None:
    fleet = ServerFleet([VLLMServer("http://127.0.0.1:9")], probe_interval_s=None)
    with pytest.raises(ServerError, match=r"may still have the memory of their GPUs: .*ulimit -n"):
        fleet.sleep(stretched(5))


def test_a_client_lets_its_process_open_many_files_but_never_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr(http, "_MANY_FILES", 1000)
    try:
        for before, after in ((512, 1000), (1000, 1000), (1024, 1024)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))
            VLLMServer("http://127.0.0.1:9")
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (after, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_a_request_that_ends_its_server_is_not_taken_for_one_that_was_never_sent(
    tmp_path: Path,
) -> None:
    with FakeServer("vllm", tmp_path) as fake:
        server = VLLMServer(fake.url)
        server.update_weights_from_disk(publish_hashed(tmp_path / "w", 1), 1)

        async def kill_in_flight() -> None:
            long = ModelRequest([1], GenerationHyperparameters(max_new_tokens=100_000), seed=1)
            task = asyncio.create_task(server.agenerate(long))
            while not fake.tokens():
                await asyncio.sleep(0.01)
            fake.kill()
            await task

        with pytest.raises(UnreachableServerError, match="broke off") as caught:
            asyncio.run(kill_in_flight())
        assert not isinstance(caught.value, NoServerError)


@pytest.mark.slow
def test_a_publication_limits_servers_that_have_no_time_limit(tmp_path: Path) -> None:
    with FakeServer("vllm", tmp_path) as fake:
        folder = publish_hashed(tmp_path / "w", 1)
        patient, hasty = VLLMServer(fake.url), VLLMServer(fake.url, timeout_s=0.3)
        for server, limit in ((patient, "1.2"), (hasty, "0.3")):
            fleet = ServerFleet([server], probe_interval_s=None)
            fake.tell(at_call=0, does="stop", when="before")
            with pytest.raises(PublishError):
                fleet.update(folder, 1, timeout_s=1.2)
            expected = f"was not answered, all together within {limit} s"
            wait_until(
                lambda fleet=fleet, expected=expected: expected in str(fleet.states()[0].error)
            )
            fake.wake()


def test_a_trainer_that_finds_the_label_of_another_one_pauses_the_server(
    fake: FakeServer, tmp_path: Path
) -> None:
    """The client cannot know whose weights the server has then."""
    mine, theirs = (
        publish_hashed(tmp_path / name, version) for name, version in (("a", 1), ("b", 2))
    )
    failures: list[PublishError] = []

    def publish(folder: str, version: int) -> None:
        try:
            VLLMServer(fake.url).update_weights_from_disk(folder, version)
        except PublishError as error:
            failures.append(error)

    # The first one resumes when the label of the second one is set.
    fake.tell(slow={"/resume": stretched(20)})
    before = fake.calls().count("POST /resume")
    publishers = [threading.Thread(target=publish, args=args) for args in ((mine, 1), (theirs, 2))]
    for number, publisher in enumerate(publishers, 1):
        publisher.start()
        wait_until(lambda number=number: fake.calls().count("POST /resume") == before + number)
    fake.tell()
    for publisher in publishers:
        publisher.join(stretched(20))
    expected = (
        r"expected the label 1-\S+ not paused. If another job publishes to it, nobody knows whose "
        r"weights it has"
    )
    assert any(re.search(expected, str(failure)) for failure in failures)
    assert fake.state()["paused"] and VLLMServer(fake.url).status() == ServerStatus(
        None, paused=True
    )


def test_an_sglang_server_with_the_label_of_another_trainer_is_paused_too(
    folder: str, tmp_path: Path
) -> None:
    async def theirs(request: web.Request) -> web.Response | None:
        return (
            web.json_response({"weight_version": "7-0123456789abcdef"})
            if request.path == "/model_info"
            else None
        )

    with FakeServer("sglang", tmp_path) as fake, Gateway(fake.url, answer=theirs) as gateway:
        server = SGLangServer(gateway.url)
        with pytest.raises(
            PublishError, match="If another job publishes to it, nobody knows whose weights it has"
        ):
            server.update_weights_from_disk(folder, 1)
        assert fake.state()["paused"] and server.status().paused


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "http://",
        "ftp://host",
        "http://:80",
        "http://[::1",
        "http://h:99999",
        "http://h:8000?key=1",
    ],
)
def test_an_invalid_server_url_is_refused_before_it_is_used(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        VLLMServer(url)


@pytest.mark.parametrize("key", ["SECRET\n", "SECR\u00c9T", "SECR\u2019T", "SEC RET", "SECRET\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_at_once_and_not_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = re.search("[^!-~]", key)
    assert odd is not None
    message = rf"cannot be sent: its character {odd.end()} of {len(key)} is white space"

    def made(make: Callable[[], object], what: str) -> None:
        with pytest.raises(ConfigError, match=what + message) as caught:
            make()
        assert "SEC" not in str(caught.value)

    url = "http://127.0.0.1:9"
    made(lambda: VLLMServer(url, api_key=key), f"^api_key of {url} ")
    made(lambda: SGLangServer(url, admin_key=key), f"^admin_key of {url} ")
    monkeypatch.setenv("HOLDFAST_WEIGHTS_TOKEN", key)
    made(lambda: VLLMServer(url, mirror=url), "^HOLDFAST_WEIGHTS_TOKEN ")
    made(lambda: http.bearer(key), "^a key ")


@pytest.mark.parametrize("proxy", ["socks5://me:SECRET@127.0.0.1:9", "odd://me:SECRET@127.0.0.1:9"])
def test_a_proxy_that_cannot_be_used_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("ALL_PROXY", proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)
    server = VLLMServer("http://10.0.0.1:9")
    for ask in (server.status, lambda: asyncio.run(server.agenerate(REQUEST))):
        with pytest.raises(ConfigError, match=r"correct the proxy in .*ALL_PROXY") as caught:
            ask()
        assert "SECRET" not in str(caught.value)
