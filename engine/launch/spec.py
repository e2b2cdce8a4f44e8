"""`ServerSpec`: what a server is started with, and the client that fits.

Holdfast needs some flags of every server (docs/servers-reference.md has the reasons), and sets them
here. Each start gets a random model name and random keys, so that no other server at the same
address is taken for this one, and no client of an earlier life is answered.
"""

import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ...utils.config import require_at_least, require_choice
from ...utils.errors import ConfigError
from ..servers.client import ServerClient
from ..servers.content_check import DTYPES
from ..servers.routes import FLAG as RETURN_ROUTES
from ..servers.sglang import SGLangServer
from ..servers.vllm import VLLMServer

Flags = dict[str, tuple[str, ...]]

_KINDS = ("vllm", "sglang")
_DEVICES = ("cuda", "cpu")
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of vLLM's ``--max-lora-rank``."""
_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_SEQUENCES_ON_CPU = 16
_OTHER_NAMES = {
    "-tp": "--tensor-parallel-size",
    "--tp": "--tp-size",
    "-q": "--quantization",
    "--context-len": "--context-length",
}
_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, because otherwise vLLM takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Identity(NamedTuple):
    """What tells one start of a server from all others."""

    name: str
    key: str
    admin_key: str

    @staticmethod
    def new() -> "Identity":
        """Return a new one."""
        return Identity(f"holdfast-{uuid.uuid4().hex[:12]}", uuid.uuid4().hex, uuid.uuid4().hex)


@dataclass(frozen=True)
class ServerSpec:
    """How to start a server.

        spec = ServerSpec("vllm", "/models/base", python=".venv-vllm/bin/python", dtype="bfloat16")

    Attributes:
        kind: ``vllm`` (0.32 or newer) or ``sglang`` (0.5.23 or newer).
        model: folder, or id on the hub, of the model that the training starts from. The server
            loads published weights later.
        python: Python of the environment in which vLLM or SGLang is installed.
        tensor_parallel_size: number of GPUs of a server.
        dtype: dtype of the published folders (`WeightUpdateMeta.dtype`).
        max_model_len: most tokens of prompt and completion together. None: of the model.
        max_num_seqs: most requests that are computed at the same time. None: the server's default,
            and 16 on a CPU.
        lora_rank: rank of published adapters. 0: the server takes none.
        lora_modules: their ``target_modules``. If empty, or ``all-linear``: all linear layers.
        lora_versions: versions of adapters that may answer at the same time
            (``max_head_offpolicyness`` + 1).
        sleeps: whether the server can free its GPUs' memory, for turns with the trainer.
        transfer: see `VLLMServer.transfer`. The environment needs the plugin.
        images: whether prompts have images.
        routed_experts: whether the server returns the experts that it chose, for ``router_replay:
            {mode: R3}``.
        device: ``cuda``, or ``cpu`` for tests with vLLM.
        extra_flags: further flags, in the server's own notation. Those that Holdfast sets itself
            may not have other values.
        environment: further environment variables.

    Raises:
        ConfigError: a value is out of range, a flag or variable contradicts one that Holdfast
            needs, or the server does not support it.
    """

    kind: Literal["vllm", "sglang"]
    model: str
    python: str = sys.executable
    tensor_parallel_size: int = 1
    dtype: str = "bfloat16"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    lora_rank: int = 0
    lora_modules: Sequence[str] = ()
    lora_versions: int = 2
    sleeps: bool = False
    transfer: str | None = None
    images: bool = False
    routed_experts: bool = False
    device: Literal["cuda", "cpu"] = "cuda"
    extra_flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, _KINDS)
        require_choice("device", self.device, _DEVICES)
        require_choice("dtype", self.dtype, tuple(DTYPES))
        require_at_least(
            self,
            tensor_parallel_size=1,
            max_model_len=1,
            max_num_seqs=1,
            lora_rank=0,
            lora_versions=1,
        )
        if self.kind == "sglang":
            if self.device == "cpu":
                raise ConfigError("device is 'cpu'; SGLang is started on GPUs only, take vLLM")
            if self.transfer is not None:
                raise ConfigError("transfer is an option of vLLM; leave it out for SGLang")
        elif self.device == "cpu":
            if self.max_model_len is None:
                raise ConfigError("device is 'cpu', where vLLM needs max_model_len")
            if self.routed_experts:
                raise ConfigError("device is 'cpu', where vLLM returns no routed_experts")

        # Contradictions come up before anything is started.
        identity = Identity("", "", "")
        self.command("127.0.0.1", 0, identity, "")
        self.variables(identity, "")

    def command(self, host: str, port: int, identity: Identity, config: str) -> list[str]:
        """Return the command that starts a server at an address. ``config`` is the path of a file
        with the contents of `config`, if there are any.
        """
        if self.kind == "vllm":
            module = "vllm.entrypoints.openai.api_server"
            own = self._vllm_flags()
            own["--model"] = (self.model,)
        else:
            module = "sglang.launch_server"
            own = self._sglang_flags()
            own["--model-path"] = (self.model,)
            own["--config"] = (config,)
        own["--host"] = (host,)
        own["--port"] = (str(port),)
        own["--served-model-name"] = (identity.name,)

        # The extra flags come last.
        extra = _read_flags(self.extra_flags)
        _refuse_contradictions(own, self.config(identity), extra)
        command = [self.python, "-m", module]
        for flag, values in own.items():
            command += [flag, *values]
        for flag, *given in extra:
            if flag not in own:
                command += [flag, *given]
        return command

    def config(self, identity: Identity) -> dict[str, str]:
        """Return the flags that no other user of the host may see. Empty: the keys are in the
        environment.
        """
        if self.kind == "vllm":
            return {}
        return {"api-key": identity.key, "admin-api-key": identity.admin_key}

    def variables(self, identity: Identity, cache: str) -> dict[str, str]:
        """Return the variables to add to the environment, with a folder for compiled code."""
        if self.kind == "vllm":
            own = {
                "VLLM_SERVER_DEV_MODE": "1",
                "VLLM_API_KEY": identity.key,
                "VLLM_CACHE_ROOT": cache,
            }
            if self.lora_rank:
                own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        else:
            own = {"TORCHINDUCTOR_CACHE_DIR": cache}
            if self.images:
                own["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
        for name, value in self.environment.items():
            if own.get(name, value) != value:
                raise ConfigError(
                    f"environment variable {name} is {value!r}, and Holdfast starts the server "
                    f"with another value; leave it out of environment"
                )
        defaults = _ON_CPU if self.device == "cpu" else {}
        return {**defaults, **self.environment, **own}

    def client(self, url: str, identity: Identity, mirror: str | None = None) -> ServerClient:
        """Return a client of a server that was started with this identity."""
        if self.kind == "vllm":
            return VLLMServer(
                url,
                api_key=identity.key,
                served_name=identity.name,
                mirror=mirror,
                transfer=self.transfer,
            )
        return SGLangServer(
            url,
            api_key=identity.key,
            admin_key=identity.admin_key,
            served_name=identity.name,
            mirror=mirror,
        )

    def _vllm_flags(self) -> Flags:
        flags: Flags = {
            "--enable-scale-out": (),
            "--logprobs-mode": ("processed_logprobs",),
            "--dtype": (self.dtype,),
            "--tensor-parallel-size": (str(self.tensor_parallel_size),),
        }
        sequences = self.max_num_seqs
        if self.device == "cpu" and self.max_model_len is not None:
            # The CPU build dies of prompts that are computed in parts, so all must fit at once.
            sequences = sequences or _SEQUENCES_ON_CPU
            flags["--enforce-eager"] = ()
            flags["--max-num-batched-tokens"] = (str(sequences * self.max_model_len),)
        if self.max_model_len is not None:
            flags["--max-model-len"] = (str(self.max_model_len),)
        if sequences is not None:
            flags["--max-num-seqs"] = (str(sequences),)
        if not self.images:
            flags["--skip-tokenizer-init"] = ()
        if self.sleeps:
            flags["--enable-sleep-mode"] = ()
        if self.routed_experts:
            # It finds them again by the hashes of cached blocks.
            flags[RETURN_ROUTES] = ()
            flags["--enable-prefix-caching"] = ()
        if self.transfer is not None:
            flags["--weight-transfer-config"] = (json.dumps({"backend": self.transfer}),)
        if self.lora_rank:
            room = min((rank for rank in _LORA_RANKS if rank >= self.lora_rank), default=0)
            flags["--enable-lora"] = ()
            flags["--max-lora-rank"] = (str(room or self.lora_rank),)
            flags["--max-loras"] = (str(self.lora_versions),)
            flags["--lora-target-modules"] = self._adapted
        return flags

    def _sglang_flags(self) -> Flags:
        flags: Flags = {
            "--dtype": (self.dtype,),
            "--tp-size": (str(self.tensor_parallel_size),),
        }
        if self.max_model_len is not None:
            flags["--context-length"] = (str(self.max_model_len),)
        if self.max_num_seqs is not None:
            flags["--max-running-requests"] = (str(self.max_num_seqs),)
        if self.sleeps:
            flags["--enable-memory-saver"] = ()
        if self.routed_experts:
            flags[RETURN_ROUTES] = ()
        if self.lora_rank:
            flags["--enable-lora"] = ()
            flags["--max-lora-rank"] = (str(self.lora_rank),)
            flags["--max-loras-per-batch"] = (str(self.lora_versions),)
            flags["--lora-target-modules"] = self._adapted
        return flags

    @property
    def _adapted(self) -> tuple[str, ...]:
        if not self.lora_modules or "all-linear" in self.lora_modules:
            return _LINEAR_LAYERS
        return tuple(self.lora_modules)


def _read_flags(given: Sequence[str]) -> list[list[str]]:
    """The flags in their order, each as its full name and its values. A flag may be given twice."""
    flags: list[list[str]] = []
    for text in given:
        is_flag = re.match(r"--?[A-Za-z]", text) is not None
        if is_flag:
            name, equals, value = text.partition("=")
            flags.append([_full_name(name)])
            if equals:
                flags[-1].append(value)
        elif not flags:
            raise ConfigError(f"extra_flags begin with {text!r}; expected a flag, --name")
        else:
            flags[-1].append(text)
    return flags


def _full_name(name: str) -> str:
    # Behind a dot is a key of a JSON value, whose underscores vLLM keeps.
    flag, dot, key = _OTHER_NAMES.get(name, name).partition(".")
    return flag.replace("_", "-") + dot + key


def _refuse_contradictions(
    own: Flags, private: Mapping[str, str], extra: Sequence[Sequence[str]]
) -> None:
    for name, *values in extra:
        if name.removeprefix("--") in private:
            raise ConfigError(
                f"extra_flags have {name}, and Holdfast gives each start keys of its own; leave "
                "the flag out"
            )
        positive = name.replace("--no-", "--", 1)
        same = own.get(name) == tuple(values)
        if positive in own and not same:
            given = " ".join([name, *values])
            needed = " ".join([positive, *own[positive]])
            raise ConfigError(
                f"extra_flags have {given!r}, and Holdfast starts the server with {needed!r}; "
                "leave the flag out, or set the field of ServerSpec that decides it"
            )
