"""``python -m vllm.entrypoints.openai.api_server`` with the fake vLLM of the tests.

Variables: ``FAKE_VLLM_RECORD`` is a folder for the record of its calls and tokens.
``FAKE_VLLM_HASHED`` stands for weights without a model. ``FAKE_VLLM_ENDS`` is a file: while it
exists, a start ends with its text on stderr. ``FAKE_VLLM_SLOW`` has the seconds that a start takes.
"""

import argparse
import asyncio
import os
import sys
import time
import uuid
from pathlib import Path

from aiohttp import web


def main() -> None:
    """Serve until the process is killed."""
    args = _parser().parse_args()
    of_torchrun = [name for name in os.environ if "RANK" in name or "TORCHELASTIC" in name]
    if of_torchrun:
        sys.exit(f"torch would take its rank from {of_torchrun}")
    ends = Path(os.environ.get("FAKE_VLLM_ENDS", "/nowhere"))
    if ends.exists():
        print(ends.read_text(), file=sys.stderr, flush=True)
        sys.exit(3)
    if not Path(args.model).exists():
        sys.exit(f"{args.model} is no model")
    time.sleep(float(os.environ.get("FAKE_VLLM_SLOW", "0")))
    print(f"the fake serves {args.model} on port {args.port}", flush=True)
    asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> None:
    from tests.engine.servers import fake_vllm
    from tests.engine.servers.fake_engine import FakeEngine

    record = Path(os.environ.get("FAKE_VLLM_RECORD", "/dev"))
    log = record / (f"{uuid.uuid4().hex}.jsonl" if record != Path("/dev") else "null")
    dtype = None if "FAKE_VLLM_HASHED" in os.environ else args.dtype
    folder = args.model if args.enable_lora else None
    engine = FakeEngine(str(log), dtype=dtype, folder=folder)
    engine.note(started=args.served_model_name, pid=os.getpid(), port=args.port)
    app = fake_vllm.application(
        engine,
        scale_out=args.enable_scale_out,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
        processed_logprobs=args.logprobs_mode == "processed_logprobs",
        api_key=os.environ.get("VLLM_API_KEY"),
        sleep_mode=args.enable_sleep_mode,
        max_model_len=args.max_model_len,
        lora=args.enable_lora,
        lora_updating="VLLM_ALLOW_RUNTIME_LORA_UPDATING" in os.environ,
        max_lora_rank=args.max_lora_rank,
        max_loras=args.max_loras,
        lora_modules=args.lora_target_modules,
        served_name=args.served_model_name,
    )
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    await asyncio.Event().wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model", "host", "served-model-name", "logprobs-mode", "dtype"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--lora-target-modules", nargs="+")
    counts = {"tensor-parallel-size": 1, "max-model-len": 100_000, "max-num-seqs": 256}
    counts |= {"max-num-batched-tokens": 8192, "max-lora-rank": 8, "max-loras": 2}
    for name, default in counts.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    switches = ("enable-scale-out", "skip-tokenizer-init", "enforce-eager", "enable-sleep-mode")
    for name in (*switches, "enable-lora"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser


if __name__ == "__main__":
    main()
