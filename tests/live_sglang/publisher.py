"""A trainer in a process of its own, which sends its weights over gloo: ``python -m
tests.live_sglang.publisher MODEL WEIGHTS URL VERSION [BUCKET]``.

It trains ``VERSION`` steps, and publishes the last one. With ``BUCKET`` it is killed before it
sends the bucket of that number, while the server waits for it.
"""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch

from holdfast.engine import WeightUpdateMeta
from holdfast.engine.servers import SGLangServer
from holdfast.engine.servers.groups import GlooGroup
from tests.engine.servers.sglang_calls import ADMIN_KEY, API_KEY
from tests.limits import stretched
from tests.live.trainer import small_buckets, started_trainer

_ENTERS_S = 1.0
"""Time that a server needs to begin to receive a bucket."""


def die_in_bucket(number: int) -> None:
    """Let this process be killed in place of sending that bucket."""
    send = GlooGroup.send
    numbers = count()

    def send_or_die(group: GlooGroup, data: torch.Tensor) -> None:
        if next(numbers) < number:
            return send(group, data)
        time.sleep(_ENTERS_S)
        os.kill(os.getpid(), signal.SIGKILL)

    GlooGroup.send = send_or_die  # type: ignore[method-assign]


def main() -> None:
    """Publish, or die."""
    model, weights, url, version, *bucket = sys.argv[1:]
    if bucket:
        die_in_bucket(int(bucket[0]))
    meta = WeightUpdateMeta("xccl", weights, timeout_s=stretched(120))
    client = SGLangServer(url, api_key=API_KEY, admin_key=ADMIN_KEY, timeout_s=stretched(60))
    with small_buckets(), started_trainer(Path(model), meta) as trainer:
        for _ in range(int(version) - 1):
            trainer.train()
        trainer.publish([client])


if __name__ == "__main__":
    main()
