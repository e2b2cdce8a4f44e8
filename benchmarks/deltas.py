"""Publications of all weights and of the changes alone, in turns: ``python -m benchmarks.deltas``.

Two ranks train a model of 127 million parameters in float32 and publish it in bfloat16 after every step, once with all
weights and once as a delta, to folders next to each other. Not a part of ``make bench``, because what matters, the time
of the bytes on a network, is computed here and not measured.

docs/servers-reference.md has the results.
"""

import argparse
import resource
import statistics
import tempfile
from pathlib import Path

from holdfast.engine import FSDPEngine, PublishedCopy, WeightUpdateMeta
from holdfast.engine.hf.versions import write_version
from holdfast.engine.rl import count_loss_tokens, sft_loss_fn

from .harness import Options
from .model import build_engine, dense_batch
from .ranks import Session, on_ranks

GBIT_PER_S = 1e9 / 8
WARM_UP = 25  # steps at a larger rate, so that the moments are those of a run
COLUMNS = ("rate, steps", "changed", "delta MB", "full MB", "ratio", "delta s", "full s", "delta CPU s", "full CPU s")


def measure(session: Session, rate: float, steps: int) -> list[dict[str, float]]:
    """Publish after every ``steps`` optimizer steps at ``rate``, in both ways."""
    engine = build_engine(session)
    for _ in range(2 if session.options.quick else WARM_UP):
        _step(engine, 1e-4)
    copy, rounds = PublishedCopy(), []
    for version in range(session.options.rounds + 2):  # the first delta is a full version, the second a warm-up
        for _ in range(steps):
            _step(engine, rate)
        row = dict[str, float]()
        for kind in ("full", "delta") if version % 2 else ("delta", "full"):
            row |= {f"{kind} {key}": value for key, value in _publish(session, engine, kind, version, copy).items()}
        rounds.append(row)
    return rounds[2:]


def _publish(session: Session, engine: FSDPEngine, kind: str, version: int, copy: PublishedCopy) -> dict[str, float]:
    meta = WeightUpdateMeta("disk", str(session.options.scratch / kind), delta=kind == "delta", dtype="bfloat16")
    cpu_s, figures = 0.0, dict[str, float]()

    def publish() -> None:
        nonlocal cpu_s
        before_s = _cpu_s()
        figures.update(write_version(engine.model, meta, version, session.group, copy=copy).figures)
        cpu_s = _cpu_s() - before_s

    seconds = session.seconds(publish)
    found = {"s": seconds, "CPU s": sum(session.all(cpu_s)), "MB": figures["bytes"] / 1e6}
    return found | {"changed": figures.get("changed", 0.0), "alone": figures["delta"]}


def _step(engine: FSDPEngine, rate: float) -> None:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] = rate
    engine.train_batch(dense_batch(engine), sft_loss_fn, count_loss_tokens)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a row for each rate and number of steps."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.deltas", description=__doc__)
    parser.add_argument("--parameters", type=float, default=127e6)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5])
    parser.add_argument("--steps", type=int, nargs="+", default=[1])
    parser.add_argument("--folder", type=Path, help="where to publish; /dev/shm is memory", default=Path.cwd())
    parser.add_argument("--quick", action="store_true", help="only check that everything works")
    args = parser.parse_args()
    print(" | ".join(COLUMNS))
    for rate in args.rates:
        for steps in args.steps:
            with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
                options = Options(int(args.parameters), 2, args.rounds, "cpu", Path(scratch), args.quick)
                rounds = on_ranks(measure, options, rate, steps)
            _report(f"{rate:g}, {steps}", rounds)


def _report(name: str, rounds: list[dict[str, float]]) -> None:
    median = {key: statistics.median(row[key] for row in rounds) for key in rounds[0]}
    worst = {key: max(row[key] for row in rounds) for key in rounds[0]}
    ratio = median["delta MB"] / median["full MB"]
    cells = [f"{median[key]:.3g} (worst {worst[key]:.3g})" for key in COLUMNS[5:]]
    sizes = [
        f"{100 * median['delta changed']:.2f} %",
        f"{median['delta MB']:.2f}",
        f"{median['full MB']:.1f}",
        f"{ratio:.4f}",
    ]
    print(" | ".join([name, *sizes, *cells]), flush=True)
    network = {kind: median[f"{kind} s"] + median[f"{kind} MB"] * 1e6 / GBIT_PER_S for kind in ("delta", "full")}
    print(f"  over 1 Gbit/s, computed: delta {network['delta']:.2f} s, full {network['full']:.2f} s; "
          f"{sum(row['delta alone'] for row in rounds):.0f} of {len(rounds)} were deltas")  # fmt: skip
    if not name.startswith("1e-06"):
        return
    for what, limit, value in (
        ("bytes", 1 / 20, ratio),
        ("seconds over 1 Gbit/s", 1 / 5, network["delta"] / network["full"]),
    ):
        print(f"  {what}: {value:.3f} of full, limit {limit:g}: {'met' if value < limit else 'NOT met'}")


if __name__ == "__main__":
    main()
