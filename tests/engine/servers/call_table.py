"""A table of the calls that the clients make to a server, with the answers that they count on.

The same code runs against a fake and against a real server, so that the two cannot drift apart:
`sglang_calls.CALLS` and `vllm_calls.CALLS` list the calls. `make test` runs them on the fakes,
``make test-sglang`` and ``make test-vllm`` on real servers.

    folders = write_folders(tmp_path)
    server = Server(url, folders, api_key="KEY", admin_key="ADMIN")
    for call in CALLS:  # whose ``needs`` the server meets
        assert call.run(server) == call.answer, call.name

A call leaves the server as it found it, awake and not paused, with one of the two versions in
``folders``. Only a call that ``ends`` the server leaves none.
"""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

from holdfast.utils.files import walk_files
from holdfast.utils.manifest import file_entries, write_manifest
from tests.engine.models import build_reference
from tests.engine.servers.folders import (
    adapted,
    publish_adapters,
    publish_model,
    step,
    step_adapters,
)
from tests.limits import stretched

Json = dict[str, Any]

VOCABULARY = 320
END = 256
"""End-of-sequence token of config and tokenizer."""
CONTEXT = 256
"""Tokens of prompt and completion together (``--context-length``, ``--max-model-len``)."""
PROMPT = list(range(40, 60))


@dataclass(frozen=True)
class Folders:
    """Model folders for a server of the table."""

    base: Path  # model of the start, with a tokenizer
    first: Path  # version 1: other weights
    second: Path  # version 2: other weights again
    adapters: Path  # adapters of rank 8 for the base
    cut: Path  # version 3, whose weight file lacks its last kilobyte
    missing: Path  # does not exist


@dataclass(frozen=True)
class Answer:
    """Status and parsed body of an answer. The body is empty if it is no JSON object."""

    status: int
    body: Json
    text: str

    def has(self, *keys: str) -> Json:
        """The status and these entries of the body. A missing entry is None."""
        return {"status": self.status} | {key: self.body.get(key) for key in keys}

    def says(self, *texts: str) -> Json:
        """The status, and whether the answer contains each text."""
        return {"status": self.status} | {text: text in self.text for text in texts}


@dataclass(frozen=True)
class Server:
    """A running server of the table, fake or real.

    Attributes:
        url: its URL.
        folders: the model of its start, and those that it may load.
        api_key, admin_key: its keys. A vLLM has no ``admin_key``.
    """

    url: str
    folders: Folders
    api_key: str | None = None
    admin_key: str | None = None

    def get(self, path: str, key: str | None = None, timeout_s: float = 60.0) -> Answer:
        """Send a GET request with a key, by default ``api_key``."""
        return self._send("GET", path, None, key or self.api_key, timeout_s)

    def post(
        self, path: str, body: Json | None = None, key: str | None = None, timeout_s: float = 120.0
    ) -> Answer:
        """Send a POST request with a key, by default ``api_key``."""
        return self._send("POST", path, body, key or self.api_key, timeout_s)

    def administer(self, path: str, body: Json, timeout_s: float = 120.0) -> Answer:
        """Send a POST request with the key for updates."""
        return self.post(path, body, self.admin_key, timeout_s)

    def _send(
        self, method: str, path: str, body: Json | None, key: str | None, timeout_s: float
    ) -> Answer:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = httpx2.request(
            method, self.url + path, json=body, headers=headers, timeout=stretched(timeout_s)
        )
        try:
            parsed = json.loads(answer.text)
        except ValueError:
            parsed = None
        return Answer(answer.status_code, parsed if isinstance(parsed, dict) else {}, answer.text)

    def dies_of(self, path: str, body: Json, key: str | None = None) -> bool:
        """Whether the server ends in a request and answers nothing afterwards.

        A real SGLang answers nothing for a minute, in which it waits for a core dump.
        """
        try:
            self.post(path, body, key, timeout_s=150)
        except httpx2.TransportError:
            pass
        else:
            return False
        try:
            self.get("/v1/models", timeout_s=5)
        except httpx2.TransportError:
            return True
        return False


@dataclass(frozen=True)
class Call:
    """One call, or a few that belong together.

    Attributes:
        name: what the answer shows, as a sentence.
        paths: the endpoints that it asks.
        run: sends it and returns what the clients read of the answer.
        answer: what ``run`` must return.
        needs: name of the flags of its server. Empty: ``FLAGS``.
        fresh: the server must not have been told anything since its start.
        ends: the server has ended afterwards.
    """

    name: str
    paths: Sequence[str]
    run: Callable[[Server], Json]
    answer: Json
    needs: str = ""
    fresh: bool = False
    ends: bool = False


class Table:
    """The calls to one kind of server, in the order of their definition."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(
        self, *paths: str, answer: Json, needs: str = "", fresh: bool = False, ends: bool = False
    ) -> Callable[[Callable[[Server], Json]], Callable[[Server], Json]]:
        """Decorate a function that becomes `Call.run`. Its name becomes the name of the call."""

        def add(run: Callable[[Server], Json]) -> Callable[[Server], Json]:
            name = run.__name__.replace("_", " ")
            self.calls.append(Call(name, paths, run, answer, needs, fresh, ends))
            return run

        return add


class Later:
    """A request in a thread of its own, for servers that do not answer at once."""

    def __init__(self, send: Callable[[], Answer]) -> None:
        self._answers: list[Answer] = []
        self._thread = threading.Thread(target=lambda: self._answers.append(send()), daemon=True)
        self._thread.start()

    def answered_within(self, seconds: float) -> bool:
        """Whether the answer comes within a time that is not stretched."""
        self._thread.join(seconds)
        return bool(self._answers)

    def answer(self) -> Answer:
        """Wait for the answer."""
        self._thread.join(stretched(60))
        assert self._answers, "there is no answer"
        return self._answers[0]


def write_folders(root: Path) -> Folders:
    """Write all folders of the table below ``root``: a tiny Qwen3 in float32, and a tokenizer of
    bytes.
    """
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention on CPUs accepts
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END + 1,
    )
    base = root / "base"
    model = build_reference(config)
    model.save_pretrained(base)
    _byte_tokenizer().save_pretrained(base)
    write_manifest(base, file_entries(base, list(walk_files(base))), {"weight_version": 0})

    # Adapters that change something.
    changed = adapted(build_reference(config))
    step_adapters(changed, 1e-2)
    adapters = publish_adapters(root / "adapters", 1, changed)

    # Three versions. The last one is damaged.
    versions = []
    for version in (1, 2, 3):
        step(model, 1e-2)
        versions.append(_published(root / "weights", version, model))
    file = next(versions[2].glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1024])
    return Folders(
        base, versions[0], versions[1], Path(adapters), versions[2], root / "weights" / "missing"
    )


def _published(root: Path, version: int, model: PreTrainedModel) -> Path:
    with torch.no_grad():
        return Path(publish_model(root, version, model, probe=False))


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    vocabulary |= {"<eos>": END, "<pad>": END + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
