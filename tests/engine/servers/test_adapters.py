"""Adapters published alone: requests end with the version they began with, and no failure takes it
away.
"""

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx2
import pytest

from holdfast.engine.hf.versions import delete_old
from holdfast.engine.servers import ServerFleet, SGLangServer, VLLMServer
from holdfast.engine.servers.adapters import adapter_name, amplified
from holdfast.engine.servers.api import (
    AdapterServer,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    ServerStatus,
    weights_label,
)
from holdfast.utils.errors import (
    ConfigError,
    PublishError,
    ServerError,
    SlowServerError,
    WrongContentError,
)
from tests.engine.servers.fakes import FakeServer
from tests.engine.servers.folders import (
    PROMPT,
    adapted_model,
    model_logprobs,
    publish_adapters,
    publish_hashed,
    publish_hashed_adapters,
    publish_model,
    step_adapters,
    tiny_model,
)
from tests.engine.servers.scripted import PlainServer
from tests.limits import stretched
from tests.tiers import slow_but

pytestmark = pytest.mark.timeout(60)

CLIENTS: dict[str, Any] = {"vllm": VLLMServer, "sglang": SGLangServer}
NOISE = 7e-3
"""Difference between two answers of a busy server in bfloat16."""
both = pytest.mark.parametrize("kind", slow_but(["vllm"], CLIENTS))
UPDATE = [
    "GET /weight_info",
    "GET /is_paused",
    "GET /server_info?config_format=json",
    "GET /v1/models",
    "POST /v1/load_lora_adapter",
    "GET /v1/models",
    "POST /inference/v1/generate",
    "GET /v1/models",
]


def request(max_new_tokens: int = 8) -> ModelRequest:
    return ModelRequest(
        [1, 2, 3], GenerationHyperparameters(max_new_tokens=max_new_tokens), seed=1, rid="r"
    )


def complete(server: Any, max_new_tokens: int = 8) -> ModelResponse:
    return asyncio.run(server.agenerate(request(max_new_tokens)))


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + stretched(20)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def name_of(folder: str, version: int) -> str:
    return adapter_name(weights_label(folder, version))


def serves(server: Any, folder: str, version: int) -> bool:
    versions = set(complete(server).output_versions)
    return server.status() == ServerStatus(
        weights_label(folder, version), paused=False
    ) and versions == {version}


class InFlight:
    """A completion of 2000 tokens in a separate thread. A context manager that waits for its
    end.
    """

    def __init__(self, server: Any, fake: FakeServer) -> None:
        self._server, self._fake = server, fake
        self.response: ModelResponse | None = None
        self._thread = threading.Thread(target=self._complete)

    def _complete(self) -> None:
        self.response = complete(self._server, 2000)

    def __enter__(self) -> "InFlight":
        before = len(self._fake.tokens())
        self._thread.start()
        wait_for(lambda: len(self._fake.tokens()) > before)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(stretched(40))
        assert not self._thread.is_alive()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A vLLM without a model that accepts adapters."""
    with FakeServer("vllm", tmp_path, lora=True, token_s=0.001) as server:
        yield server


@pytest.fixture(scope="module")
def with_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """A vLLM that computes the tiny model in float32."""
    root = tmp_path_factory.mktemp("served")
    base = publish_model(root / "base", 0, tiny_model(), probe=False)
    with FakeServer("vllm", root, lora=True, dtype="float32", folder=base) as server:
        yield server


@pytest.mark.slow
def test_three_versions_are_served_as_the_trainer_computes_them(
    tmp_path: Path, with_model: FakeServer
) -> None:
    model, server = adapted_model(), VLLMServer(with_model.url)
    assert isinstance(server, AdapterServer) and server.status() == ServerStatus(None, paused=False)
    for version in (1, 2, 3):
        step_adapters(model, 1e-2)
        folder, seen = publish_adapters(tmp_path / "w", version, model), len(with_model.calls())
        assert server.update_adapters_from_disk(folder, version) == version
        retired = ["POST /v1/unload_lora_adapter"] if version > 1 else []
        assert with_model.calls()[seen:] == UPDATE + retired
        assert serves(server, folder, version) and with_model.state()["adapters"] == [
            name_of(folder, version)
        ]
        with server._calls("", 30) as calls:
            answer, base = (
                server._prompt_logprobs(calls, PROMPT, a) for a in (server._adapters.current, None)
            )
        trainers = model_logprobs(model, PROMPT)
        assert max(abs(a - b) for a, b in zip(answer, trainers, strict=True)) < 1e-5
        assert max(abs(a - b) for a, b in zip(base, trainers, strict=True)) > 1e-3
    assert with_model.state()["label"] == "default" and not with_model.state()["paused"]


@pytest.mark.slow
def test_a_server_that_keeps_its_old_adapters_is_found_and_goes_on_with_them(
    tmp_path: Path, with_model: FakeServer
) -> None:
    model, server = adapted_model(), VLLMServer(with_model.url)
    step_adapters(model, 1e-2)
    first = publish_adapters(tmp_path / "w", 1, model)
    server.update_adapters_from_disk(first, 1)
    step_adapters(model, 1e-3)
    second = publish_adapters(tmp_path / "w", 2, model)
    with_model.tell(lie=1)
    with pytest.raises(
        WrongContentError, match=r"in float32 by at most 2e-05.*They were unloaded again, and"
    ):
        server.update_adapters_from_disk(second, 2)
    assert serves(server, first, 1) and with_model.state()["adapters"] == [name_of(first, 1)]
    server.update_adapters_from_disk(second, 2)
    assert serves(server, second, 2)


@pytest.mark.slow
@both
def test_a_server_that_ignores_adapters_is_found_at_once_in_16_bits(
    kind: str, tmp_path: Path
) -> None:
    """One step changes less than kernels differ by. And a busy server never gives the same answer
    twice.
    """
    base = publish_model(tmp_path / "base", 0, tiny_model(), "bfloat16", probe=False)
    model = adapted_model()
    unchanged = publish_adapters(tmp_path / "w", 1, model, base="bfloat16")
    step_adapters(model, 1e-4)
    stepped = publish_adapters(tmp_path / "w", 2, model, base="bfloat16")
    with FakeServer(kind, tmp_path, lora=True, dtype="bfloat16", folder=base) as fake:
        server, later = CLIENTS[kind](fake.url), CLIENTS[kind](fake.url)
        for noise in (NOISE, 0.0):
            fake.tell(ignores_adapters=True, noise=noise)
            server.update_adapters_from_disk(unchanged, 1)
            with pytest.raises(
                WrongContentError,
                match=r"are those of its base .*amplified.*They were unloaded again",
            ):
                server.update_adapters_from_disk(stepped, 2)
            assert fake.state()["adapters"] == [name_of(unchanged, 1)]
            with pytest.raises(WrongContentError, match="it ignores adapters"):
                later.update_adapters_from_disk(stepped, 2)
            fake.restart()
        fake.tell(noise=NOISE)
        server.update_adapters_from_disk(stepped, 2)
        loads = [call for call in fake.calls() if "/load_lora_adapter" in call]
        step_adapters(model, 1e-4)
        server.update_adapters_from_disk(
            publish_adapters(tmp_path / "w", 3, model, base="bfloat16"), 3
        )
        assert (
            len([call for call in fake.calls() if "/load_lora_adapter" in call]) == len(loads) + 1
        ), "shown once"
        assert sorted(path.name for path in (tmp_path / "w").iterdir()) == [
            f"v0000000{n}" for n in (1, 2, 3)
        ]
        fake.restart()
        fake.tell(ignores_adapters=True, noise=NOISE)
        with pytest.raises(
            WrongContentError, match="it ignores adapters"
        ):  # it was shown before the restart
            server.update_adapters_from_disk(stepped, 2)


@pytest.mark.slow
def test_adapters_that_are_stored_in_16_bits_are_compared_as_such(
    tmp_path: Path, with_model: FakeServer
) -> None:
    model, server = adapted_model(), VLLMServer(with_model.url)
    step_adapters(model, 3e-2)
    whole, rounded = (
        publish_adapters(tmp_path / "w", 1, model),
        publish_adapters(tmp_path / "r", 1, model, "bfloat16"),
    )
    answers = []
    for folder in (whole, rounded):
        server.update_adapters_from_disk(folder, 1)
        with server._calls("", 30) as calls:
            answers.append(server._prompt_logprobs(calls, PROMPT, server._adapters.current))
    apart = sum(abs(a - b) for a, b in zip(*answers, strict=True)) / len(answers[0])
    assert apart > 2e-5, "nothing was rounded that the comparison in float32 would see"


@pytest.mark.slow
def test_a_server_of_another_base_is_found(tmp_path: Path) -> None:
    base = publish_model(tmp_path / "base", 0, tiny_model(seed=1), probe=False)
    with FakeServer("vllm", tmp_path, lora=True, dtype="float32", folder=base) as fake:
        model = adapted_model()
        step_adapters(model, 1e-2)
        server, folder = VLLMServer(fake.url), publish_adapters(tmp_path / "w", 1, model)
        with pytest.raises(
            WrongContentError, match="restart it with the base model that is trained"
        ):
            server.update_adapters_from_disk(folder, 1)
        assert fake.state()["adapters"] == [] and server.status() == ServerStatus(
            None, paused=False
        )


@both
def test_a_request_in_flight_ends_on_the_adapters_it_began_with(kind: str, tmp_path: Path) -> None:
    folders = [publish_hashed_adapters(tmp_path / "w", version) for version in (1, 2, 3)]
    with FakeServer(kind, tmp_path, lora=True, token_s=0.001) as fake:
        server = CLIENTS[kind](fake.url)
        server.update_adapters_from_disk(folders[0], 1)
        with InFlight(server, fake) as old:
            server.update_adapters_from_disk(folders[1], 2)
            assert complete(server).output_versions == [2] * 8
            assert fake.state()["adapters"] == [name_of(folders[0], 1), name_of(folders[1], 2)]
            assert server.folders_in_use() == set(folders[:2])
            delete_old(str(tmp_path / "w"), 1, {Path(folder) for folder in server.folders_in_use()})
        assert old.response is not None and old.response.output_versions == [1] * 2000
        record = [token for token in fake.tokens() if token["rid"] == "r"]
        assert not any(token["mixed"] for token in record)
        assert [t["version"] for t in record if t["token"] is not None].count(1) == 2000
        assert server.folders_in_use() == {folders[1]}
        server.update_adapters_from_disk(folders[2], 3)
        assert fake.state()["adapters"] == [name_of(folders[2], 3)]


def test_amplified_adapters_stay_while_a_server_may_load_their_version(tmp_path: Path) -> None:
    model = adapted_model()
    step_adapters(model, 1e-4)
    folder = publish_adapters(tmp_path, 1, model)
    with amplified(folder, 8.0) as made:
        assert made is not None
        publish_adapters(tmp_path, 2, model)
        assert made.exists()
        publish_adapters(tmp_path, 1, model)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v00000001"]


@pytest.mark.slow
def test_the_folder_of_adapters_in_use_is_not_deleted(tmp_path: Path) -> None:
    """With room for one adapter, the fake reads each again at every turn, as vLLM does, and needs
    its folder.
    """
    root = tmp_path / "w"
    with FakeServer("vllm", tmp_path, lora=True, token_s=0.001, max_loras=1) as fake:
        fleet = ServerFleet([VLLMServer(fake.url)], probe_interval_s=None)
        fleet.update(publish_hashed_adapters(root, 1), 1, stretched(20))
        (server,) = fleet.serving()
        with InFlight(server, fake) as old:
            fleet.update(publish_hashed_adapters(root, 2), 2, stretched(20))
            delete_old(str(root), 1, fleet.folders_in_use())
            assert sorted(path.name for path in root.iterdir()) == ["v00000001", "v00000002"]
        assert old.response is not None and set(old.response.output_versions) == {1}
        delete_old(str(root), 1, fleet.folders_in_use())
        assert [path.name for path in root.iterdir()] == ["v00000002"]


@pytest.mark.slow
def test_an_update_that_waits_for_older_requests_says_what_room_it_lacks(tmp_path: Path) -> None:
    folders = [publish_hashed_adapters(tmp_path / "w", version, probe=True) for version in (1, 2)]
    with FakeServer("vllm", tmp_path, lora=True, token_s=0.001, max_loras=1) as fake:
        server = VLLMServer(fake.url)
        server.update_adapters_from_disk(folders[0], 1)
        with InFlight(server, fake):
            server.timeout_s = 0.5
            with pytest.raises(
                SlowServerError,
                match=r"was not answered.*with more versions at a time \(--max-loras",
            ):
                server.update_adapters_from_disk(folders[1], 2)
            server.timeout_s = stretched(30)
            assert server.status().label == weights_label(folders[0], 1)
        server.update_adapters_from_disk(folders[1], 2)
        assert serves(server, folders[1], 2)


def test_a_load_that_failed_leaves_the_old_adapters_serving(
    fake: FakeServer, tmp_path: Path
) -> None:
    server, good = VLLMServer(fake.url), publish_hashed_adapters(tmp_path / "w", 1)
    server.update_adapters_from_disk(good, 1)
    fake.tell(fail={"/v1/load_lora_adapter": 1})
    second = publish_hashed_adapters(tmp_path / "w", 2)
    with pytest.raises(
        PublishError, match=r"to load version 2 .*answered with 500 .*it goes on with the adapters"
    ):
        server.update_adapters_from_disk(second, 2)
    assert serves(server, good, 1)
    third = publish_hashed_adapters(tmp_path / "w", 3)
    unseen = shutil.copytree(third, tmp_path / "unseen")
    (unseen / "adapter_config.json").unlink()  # the answer of a server that does not see the folder
    with pytest.raises(PublishError, match="let the server see the folder under the same path"):
        server.update_adapters_from_disk(str(unseen), 3)
    assert serves(server, good, 1)
    with pytest.raises(
        PublishError, match=r"adapter_model.safetensors cannot be read .*publish the version again"
    ):
        server.update_adapters_from_disk(publish_hashed(tmp_path / "w", 4), 4)
    server.update_adapters_from_disk(third, 3)
    assert serves(server, third, 3)


@pytest.mark.parametrize("call", range(len(UPDATE)))  # without a probe the last call unloads
@pytest.mark.slow
def test_an_update_cut_off_at_any_call_is_completed_by_another_publisher(
    call: int, fake: FakeServer, tmp_path: Path
) -> None:
    server, good = VLLMServer(fake.url), publish_hashed_adapters(tmp_path / "w", 1)
    server.update_adapters_from_disk(good, 1)
    for version, when in enumerate(("before", "after"), start=2):
        folder = publish_hashed_adapters(tmp_path / "w", version)
        fake.tell(at_call=call, does="stop", when=when)
        # the new version is served by then, and the old one may stay
        late = pytest.raises(SlowServerError) if call < 6 else nullcontext()
        with late:
            hasty = VLLMServer(fake.url, timeout_s=stretched(0.5))
            hasty.update_adapters_from_disk(folder, version)
        fake.wake()
        fake.tell()
        later = VLLMServer(fake.url)  # a client of the publisher's next life
        later.update_adapters_from_disk(folder, version)
        assert serves(later, folder, version) and fake.state()["adapters"] == [
            name_of(folder, version)
        ]


def test_a_restarted_server_is_brought_up_by_the_prober(fake: FakeServer, tmp_path: Path) -> None:
    folder, alone = publish_hashed_adapters(tmp_path / "w", 1), VLLMServer(fake.url)
    alone.update_adapters_from_disk(folder, 1)
    fake.restart()
    with pytest.raises(
        ServerError, match="answered with 404"
    ):  # the base model does not answer instead
        complete(alone)
    fleet = ServerFleet([VLLMServer(fake.url)], probe_interval_s=0.05)
    try:
        fleet.update(folder, 1, stretched(20))
        (server,) = fleet.serving()
        fake.restart()
        wait_for(lambda: fake.state()["adapters"] and fleet.serving())
        assert serves(server, folder, 1)
    finally:
        fleet.close()


def test_the_same_number_with_other_contents_is_another_adapter(
    fake: FakeServer, tmp_path: Path
) -> None:
    server = VLLMServer(fake.url)
    server.update_adapters_from_disk(publish_hashed_adapters(tmp_path / "w", 1), 1)
    shutil.rmtree(tmp_path / "w")
    again = publish_hashed_adapters(tmp_path / "w", 1, rank=4)
    server.update_adapters_from_disk(again, 1)
    assert fake.state()["adapters"] == [name_of(again, 1)]
    seen = len(fake.calls())
    server.update_adapters_from_disk(again, 1)
    assert "POST /v1/load_lora_adapter" not in fake.calls()[seen:] and serves(server, again, 1)


def test_merged_weights_and_adapters_do_not_mix(fake: FakeServer, tmp_path: Path) -> None:
    server, adapters = VLLMServer(fake.url), publish_hashed_adapters(tmp_path / "a", 1)
    server.update_adapters_from_disk(adapters, 1)
    with pytest.raises(
        PublishError, match="holds adapters alone; tell servers of it by update_adapters_from_disk"
    ):
        server.update_weights_from_disk(adapters, 1)
    assert serves(server, adapters, 1)
    weights = publish_hashed(tmp_path / "w", 2)
    server.update_weights_from_disk(weights, 2)
    assert serves(server, weights, 2) and fake.state()["adapters"] == []
    with pytest.raises(
        PublishError,
        match=r"its base model was replaced by the published weights 2-xxh3.*restart it",
    ):
        server.update_adapters_from_disk(adapters, 1)
    fake.restart()
    httpx2.post(f"{fake.url}/pause?mode=keep")
    with pytest.raises(PublishError, match="it is paused, which no update of adapters does"):
        server.update_adapters_from_disk(adapters, 1)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {},
            (
                r"started without adapters; start it with --enable-lora --max-lora-rank 8 "
                r"--lora-target-modules d"
            ),
        ),
        (
            {"lora": True, "max_lora_rank": 1},
            r"have rank 8, it takes ranks up to 1; start it with --enable-lora --m",
        ),
        (
            {"lora": True, "lora_modules": None},
            r"it adapts all modules, its head too, the adapters are of down_proj,",
        ),
        (
            {"lora": True, "lora_modules": ["q_proj"]},
            r"it adapts q_proj, the adapters are of down_proj, gate_proj",
        ),
        (
            {"lora": True, "lora_updating": False},
            r"with 404 .*start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING",
        ),
        (
            {"lora": True, "dev_mode": False},
            r"answered with 404 .* start the server with VLLM_SERVER_DEV_MODE=1",
        ),
    ],
)
def test_a_server_started_without_a_needed_option_is_refused_with_advice(
    options: Any, expected: str, tmp_path: Path
) -> None:
    folder = publish_hashed_adapters(tmp_path / "w", 1)
    with (
        FakeServer("vllm", tmp_path, **options) as fake,
        pytest.raises(PublishError, match=expected),
    ):
        VLLMServer(fake.url).update_adapters_from_disk(folder, 1)


def test_an_sglang_server_is_told_too(tmp_path: Path) -> None:
    folder = publish_hashed_adapters(tmp_path / "w", 1)
    refused = pytest.raises(
        PublishError, match=r"answered with 400 .*Please set `--enable-lora`.*it goes on with"
    )
    with FakeServer("sglang", tmp_path) as fake, refused:
        SGLangServer(fake.url).update_adapters_from_disk(folder, 1)
    with FakeServer("sglang", tmp_path, lora=True, admin_key="admin", api_key="key") as fake:
        server = SGLangServer(fake.url, api_key="key", admin_key="admin")
        server.update_adapters_from_disk(folder, 1)
        assert serves(server, folder, 1)
        fake.tell(fail={"/load_lora_adapter": 1})
        with pytest.raises(PublishError, match="told to fail"):
            server.update_adapters_from_disk(publish_hashed_adapters(tmp_path / "w", 2), 2)
        assert serves(server, folder, 1)


def test_clients_without_adapters_are_refused(tmp_path: Path) -> None:
    folder = publish_hashed_adapters(tmp_path / "w", 1)
    with pytest.raises(
        ConfigError, match=r"a PlainServer, has no endpoint that loads adapters.*type 'disk'"
    ):
        ServerFleet([PlainServer()]).update(folder, 1, 1)
