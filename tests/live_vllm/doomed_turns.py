"""``examples/grpo_servers.py``, whose driver or trainer is killed after calls of a turn with the
servers.

``HOLDFAST_KILLS`` names a file with a list of ``[call, victim]``. A call is a method of the
trainers (``offload``) or a request to a server (``POST /sleep``). A kill that is done leaves the
list, so the next start goes on with the next one.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from examples import grpo_servers
from holdfast.engine.servers.http import Calls
from holdfast.engine.worker_group import WorkerGroup

_KILLS = Path(os.environ["HOLDFAST_KILLS"])


class _Killer:
    """Kills the next victim when its call has returned, but only after this process has trained a
    step.
    """

    def __init__(self) -> None:
        self._trainer: WorkerGroup | None = None
        self._trained = False

    def after(self, call: str) -> None:
        kills = json.loads(_KILLS.read_text())
        if not self._trained or not kills or kills[0][0] != call:
            return
        _KILLS.write_text(json.dumps(kills[1:]))
        print(f"SIGKILL to the {kills[0][1]} after {call}", flush=True)
        assert self._trainer is not None
        os.kill(
            self._trainer.pids()[1] if kills[0][1] == "trainer" else os.getpid(), signal.SIGKILL
        )

    def watch(self) -> None:
        call_all, send = WorkerGroup.call_all, Calls._send

        def watched_call(group: WorkerGroup, method: str, *args: Any, **options: Any) -> Any:
            answers = call_all(group, method, *args, **options)
            self._trainer = group
            self.after(method)
            self._trained |= method == "train_step"
            return answers

        def watched_request(
            calls: Calls, phase: str, method: str, path: str, *args: Any, **options: Any
        ) -> Any:
            answer = send(calls, phase, method, path, *args, **options)
            self.after(f"{method} {path}")
            return answer

        WorkerGroup.call_all, Calls._send = watched_call, watched_request  # type: ignore[method-assign]


if __name__ == "__main__":
    _Killer().watch()
    grpo_servers.exit_with(grpo_servers.main)
