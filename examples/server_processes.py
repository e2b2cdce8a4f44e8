"""Inference servers and their mirrors as child processes, restarted whenever they end.

They get the weights of a run like any other server: with the next publication, or from the prober
of a `ServerFleet`. They always end with this process, and so do the processes that they start.
"""

import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.servers import VLLMServer
from holdfast.utils.errors import ConfigError, ServerError
from holdfast.utils.guard import end_guarded, guarded_pid, start_guarded

VLLM_COMMAND = (
    "{python} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port "
    "{port} --enable-scale-out --logprobs-mode processed_logprobs --skip-tokenizer-init "
    "--enforce-eager --dtype float32 "
    # the CPU build crashes on chunked prompts
    "--max-model-len 64 --max-num-seqs 64 --max-num-batched-tokens 4096"
)
"""Command that starts vLLM for the examples. Any command with ``{model}`` and ``{port}`` may
replace it.
"""

VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, because otherwise the CPU build takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Environment of each server. Values of this process take precedence."""

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Allowed values of ``--max-lora-rank``."""
_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear layers of the example models."""
_MIRROR = Path(sys.executable).with_name("holdfast-weights")
_AGAIN_AFTER_S = 1.0
_LOG_LINES = 20


def adapter_flags(rank: int, modules: Sequence[str], versions: int) -> str:
    """Return flags that let vLLM load adapters.

    Args:
        rank: rank of the adapters.
        modules: their ``target_modules``. If empty, or with ``all-linear``: all linear layers.
        versions: number of versions that may answer requests at the same time.
    """
    if not modules or "all-linear" in modules:
        modules = _LINEAR_LAYERS
    room = min((size for size in _LORA_RANKS if size >= rank), default=rank)
    return (
        f"--enable-lora --max-lora-rank {room} --max-loras {versions} "
        f"--lora-target-modules {' '.join(modules)}"
    )


@dataclass
class _Program:
    """A command that is kept running.

    Attributes:
        name: name for people.
        log: file for its output.
        command: the command, in which ``{model}`` stands for a folder.
        models: folders, of which the first existing one is taken.
    """

    name: str
    log: Path
    command: list[str]
    models: tuple[Path, ...] = ()

    def start(self) -> subprocess.Popen[bytes]:
        existing = [str(path) for path in self.models if path.exists()]
        model = existing[0] if existing else ""
        command = [part.replace("{model}", model) for part in self.command]
        with open(self.log, "ab") as log:
            return start_guarded(command, log, env=VLLM_ENVIRONMENT | os.environ)

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])


class ServerProcesses:
    """Context manager that runs vLLM processes, each with its own port and log, and optionally a
    mirror for each.

    Args:
        command: see `VLLM_COMMAND`. ``{python}`` stands for ``python``.
        python: Python of an environment with vLLM.
        model: a model folder.
        count: number of servers.
        logs: folder for ``server_<n>.log``, and for the logs and folders of mirrors.
        published: folder of published weights, of which each server gets a mirror. A restarted
            server begins with the newest version of its mirror. None: servers read the published
            folders themselves.

    Attributes:
        servers: one client per server.

    Raises:
        ConfigError: the command cannot be started.
    """

    def __init__(
        self,
        command: str,
        python: str,
        model: Path,
        count: int,
        logs: Path,
        published: Path | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.servers: list[VLLMServer] = []
        self._programs: list[_Program] = []
        mirrors: list[_Program] = []
        ports = _free_ports(2 * count)
        for number in range(count):
            # A server starts with the model of its mirror, if there is one.
            models = (model,)
            mirror = None
            if published is not None:
                local = logs / f"mirror_{number}"
                models = (local / "current", model)
                address = f"127.0.0.1:{ports[count + number]}"
                mirror = f"http://{address}"
                line = [str(_MIRROR), "mirror", str(published), str(local), "--listen", address]
                log = logs / f"mirror_{number}.log"
                mirrors.append(_Program(f"mirror {number}", log, line))

            port = ports[number]
            line = command.format(python=shlex.quote(python), model="{model}", port=port)
            log = logs / f"server_{number}.log"
            name = f"inference server {number}"
            self._programs.append(_Program(name, log, shlex.split(line), models))
            self.servers.append(VLLMServer(f"http://127.0.0.1:{port}", mirror=mirror))

        # `pids` has all servers first.
        self._programs += mirrors
        self._processes: list[subprocess.Popen[bytes]] = []
        self._restarts = [0] * len(self._programs)
        self._closed = threading.Event()
        self._started = threading.Event()
        self._problem: OSError | None = None
        self._keeper = threading.Thread(
            target=self._keep, name="inference server processes", daemon=True
        )

    def __enter__(self) -> "ServerProcesses":
        self._keeper.start()
        self._started.wait()
        if self._problem is not None:
            raise ConfigError(
                f"the inference servers cannot be started: {self._problem}; name the Python of an "
                "environment with vLLM, or the servers' URLs"
            ) from self._problem
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._keeper.join()

    def pids(self) -> list[int]:
        """Return the current process ids: by number of the server, then by number of the mirror."""
        return [guarded_pid(process) for process in self._processes]

    def require_started(self) -> None:
        """Check that no server and no mirror has ended since its first start.

        Raises:
            ConfigError: one has ended. The message has the end of its log.
        """
        for program, restarts in zip(self._programs, self._restarts, strict=True):
            if restarts:
                raise ConfigError(
                    f"{program.name} ended before it answered; {program.log} ends with\n"
                    f"{program.log_tail()}"
                )

    def _keep(self) -> None:
        # Whoever waits for the start must also hear of its failure.
        try:
            for program in self._programs:
                self._processes.append(program.start())
        except OSError as error:
            self._problem = error
        finally:
            self._started.set()
        while self._problem is None and not self._closed.wait(_AGAIN_AFTER_S):
            for number, process in enumerate(self._processes):
                if process.poll() is None:
                    continue
                program = self._programs[number]
                print(f"{program.name} has ended; it is started again", flush=True)
                # Also its remaining child processes, if its guard was killed.
                end_guarded(process)
                self._restarts[number] += 1
                self._processes[number] = program.start()
        end_guarded(*self._processes)


def wait_for_servers(
    servers: list[VLLMServer], timeout_s: float, processes: ServerProcesses | None = None
) -> None:
    """Wait until all servers answer.

    Raises:
        ServerError: a server does not answer within ``timeout_s``.
        ConfigError: one of ``processes`` has ended.
    """
    # Loading a model may take minutes.
    end = time.monotonic() + timeout_s
    for server in servers:
        while True:
            try:
                server.status()
                break
            except ServerError:
                if processes is not None:
                    processes.require_started()
                if time.monotonic() > end:
                    raise
            time.sleep(0.5)


def _free_ports(count: int) -> list[int]:
    # All at once, or the kernel would give the same port twice.
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
