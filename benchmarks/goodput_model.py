"""``python -m benchmarks.goodput_model``: computed goodput of jobs on 8 and 64 GPUs, by the way of
recovery, with the best interval between snapshots.

Nothing here is a measurement of such a job. `INPUTS` says of each number whether it was measured,
on what, or published, or is assumed. Change an assumed one with ``name=value``.

With exponential failures of mean distance M, a step that counts takes
``M e^(R/M) (e^((t + d)/M) - 1) / t`` of wall time for each second of its own (J. T. Daly, A higher
order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22, 2006):

- t is the time between two snapshots, and d the time for which a snapshot blocks.
- R is the time from a failure to the first new step. A snapshot that is written in the background
  is of use only when it is committed, so the time until then is added to R.

The best t is searched over whole steps. For small d it is near ``sqrt(2 d M)`` (J. W. Young, A
first order approximation to the optimum checkpoint interval, CACM 17, 1974).
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from holdfast.utils.errors import ConfigError

Origin = Literal["measured", "published", "assumed"]
MOST_STEPS = 2000
"""Longest interval between snapshots that is considered."""


class Input(NamedTuple):
    """A number that the model needs, and where it is from."""

    value: float
    unit: str
    origin: Origin
    note: str


INPUTS: dict[str, Input] = {
    "stall": Input(
        0.017 / 1.28,
        "s/GB",
        "measured",
        "later snapshots of one H100, a rank",
    ),
    "write": Input(
        1.28 / 0.954,
        "GB/s",
        "measured",
        "snapshot until commit of one H100, a rank",
    ),
    "read": Input(
        4.34,
        "GB/s",
        "measured",
        "load from the page cache of one H100, a rank",
    ),
    "detect": Input(
        0.0624,
        "s",
        "measured",
        "detect and tear down under Ray, on two CPU cores",
    ),
    "storage": Input(
        10.0,
        "GB/s",
        "assumed",
        "shared storage, all ranks together",
    ),
    "network": Input(
        25.0,
        "GB/s",
        "assumed",
        "to the memory of a peer, a rank",
    ),
    "step": Input(
        60.0,
        "s",
        "assumed",
        "a step of GRPO",
    ),
    "start": Input(
        30.0,
        "s",
        "assumed",
        "trainers: processes, imports, NCCL (CPU: 4.9, measured)",
    ),
    "join": Input(
        2.0,
        "s",
        "assumed",
        "a standby worker takes the place of a dead one",
    ),
    "server": Input(
        120.0,
        "s",
        "assumed",
        "start of an inference server",
    ),
    "launcher": Input(
        15.0,
        "s",
        "assumed",
        "a launcher notices, and starts the job again",
    ),
    "publish": Input(
        10.0,
        "s",
        "assumed",
        "weights to all servers",
    ),
    "bytes": Input(
        12.0,
        "bytes",
        "assumed",
        "state of a parameter: float32 and two moments",
    ),
}
FAILURES: dict[str, Input] = {
    "as Llama 3": Input(
        54 * 24 * 16384 / 419,
        "GPU hours",
        "published",
        "419 unexpected interruptions in 54 days on 16,384 GPUs",
    ),
    "spot nodes": Input(50.0, "GPU hours", "assumed", "preemptions and errors of software"),
}
"""GPU hours from one failure to the next."""


@dataclass(frozen=True)
class Job:
    """A job: half of its GPUs train, and each of the others serves."""

    n_gpus: int
    parameters: float

    @property
    def n_trainers(self) -> int:
        """GPUs that train. As many serve."""
        return self.n_gpus // 2


JOBS = (Job(8, 7e9), Job(64, 32e9))


@dataclass(frozen=True)
class Way:
    """What a way of recovery does.

    Attributes:
        blocks: whether training waits until a snapshot is written.
        whole: whether every failure ends the whole job, with its servers and the prompts in flight.
        standby: whether spare workers have started already.
        memory: whether snapshots go to the memory of peers, and come from there.
    """

    name: str
    blocks: bool = False
    whole: bool = False
    standby: bool = False
    memory: bool = False


WAYS = (
    Way("whole job again, blocking", blocks=True, whole=True),
    Way("Holdfast, blocking", blocks=True),
    Way("Holdfast"),
    Way("Holdfast + standby workers", standby=True),
    Way("Holdfast + memory tier", memory=True),
    Way("Holdfast + both", standby=True, memory=True),
)


@dataclass(frozen=True)
class Costs:
    """Seconds that a way takes in a job.

    Attributes:
        stall_s: for which a snapshot blocks training.
        commit_s: from then until it is committed.
        trainer_s: from the death of a trainer to the first new step.
        server_s: lost by the death of a server.
    """

    stall_s: float
    commit_s: float
    trainer_s: float
    server_s: float


def costs_of(job: Job, way: Way, values: Mapping[str, float]) -> Costs:
    """Compute the costs from the values of `INPUTS`."""
    shard_gb = values["bytes"] * job.parameters / job.n_trainers / 1e9

    # Ranks share the storage, and each has a network of its own.
    if way.memory:
        write_gb_s = read_gb_s = values["network"]
    else:
        share_gb_s = values["storage"] / job.n_trainers
        write_gb_s = min(values["write"], share_gb_s)
        read_gb_s = min(values["read"], share_gb_s)

    # Training waits for a copy in memory, or for the write.
    write_s = shard_gb / write_gb_s
    copy_s = shard_gb * values["stall"]
    stall_s = write_s if way.blocks else copy_s
    commit_s = 0.0 if way.blocks else write_s

    # A dead server costs its share of the sampling while it is started.
    load_s = shard_gb / read_gb_s
    start_s = values["join"] if way.standby else values["start"]
    trainer_s = values["detect"] + start_s + load_s + values["publish"]
    server_s = values["server"] / job.n_trainers
    # The whole job starts servers, too, and samples again what was in flight: one step ahead.
    if way.whole:
        start_s = max(values["start"], values["server"])
        trainer_s = values["launcher"] + start_s + load_s + values["publish"] + values["step"]
        server_s = trainer_s
    return Costs(stall_s, commit_s, trainer_s, server_s)


@dataclass(frozen=True)
class Result:
    """The best interval between snapshots.

    Attributes:
        n_steps: the interval in steps.
        young: Young's estimate of it, in steps.
        goodput: share of the time on steps that count, 0 to 1.
    """

    n_steps: int
    young: float
    goodput: float


def goodput_at(interval_s: float, costs: Costs, mean_s: float) -> float:
    """Share of time on steps that count, by Daly's formula, for failures of trainers."""
    recovery_s = costs.trainer_s + costs.commit_s
    lost = math.exp(recovery_s / mean_s) * math.expm1((interval_s + costs.stall_s) / mean_s)
    return interval_s / (mean_s * lost)


def best(job: Job, way: Way, mean_s: float, values: Mapping[str, float]) -> Result:
    """Search the best interval.

    Args:
        job: its GPUs fail one at a time, trainers as often as servers.
        way: of recovery.
        mean_s: mean time between failures of the job.
        values: of `INPUTS`.

    Raises:
        ConfigError: a snapshot takes longer than the longest interval.
        ArithmeticError: a number is too large or too small for the formula.
    """
    costs = costs_of(job, way, values)
    # Failures of servers cost the same whatever the interval, unless they end the job.
    of_trainers_s = mean_s if way.whole else 2 * mean_s
    of_servers = 0.0 if way.whole else costs.server_s / (2 * mean_s)

    # The next snapshot cannot begin before the last one is committed.
    step_s = values["step"]
    first = max(1, math.ceil(costs.commit_s / step_s))
    if first >= MOST_STEPS:
        raise ConfigError(
            f"a snapshot of {way.name!r} on {job.n_gpus} GPUs is committed after {first} steps; "
            f"expected less than {MOST_STEPS}: give a longer step or faster storage"
        )
    young = math.sqrt(2 * costs.stall_s * of_trainers_s) / step_s
    found: list[Result] = []
    for n_steps in range(first, MOST_STEPS):
        share = goodput_at(n_steps * step_s, costs, of_trainers_s)
        share *= max(0.0, 1 - of_servers)
        found.append(Result(n_steps, young, share))
    return max(found, key=lambda result: result.goodput)


def lines(values: Mapping[str, float]) -> Iterator[str]:
    """The inputs and the results in Markdown."""
    # The inputs.
    yield "| input | value | origin | of |"
    yield "|---|---:|---|---|"
    for name, given in {**INPUTS, **FAILURES}.items():
        value = values.get(name, given.value)
        origin = given.origin if value == given.value else "given"
        yield f"| {name} | {value:.3g} {given.unit} | {origin} | {given.note} |"
    yield ""
    # The results, with the rarest failures first.
    yield "| failures | GPUs | mean h between them | way | best interval | Young's | goodput |"
    yield "|---|---:|---:|---|---:|---:|---:|"
    for failures, given in FAILURES.items():
        for job in JOBS:
            mean_h = given.value / job.n_gpus
            for way in WAYS:
                result = best(job, way, mean_h * 3600, values)
                about = f"| {failures} | {job.n_gpus} | {mean_h:.3g} | {way.name} "
                found = f"| {result.n_steps} | {result.young:.1f} | {result.goodput:.2%} |"
                yield about + found


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput_model", description=__doc__)
    parser.add_argument("given", nargs="*", metavar="name=value", help="another value of an input")
    # Other values of inputs replace those of the table.
    values = {name: each.value for name, each in INPUTS.items()}
    for argument in parser.parse_args(argv).given:
        name, _, value = argument.partition("=")
        if name not in values:
            parser.error(f"there is no input {name!r}; there are {', '.join(values)}")
        try:
            values[name] = float(value)
        except ValueError:
            parser.error(f"{name} is {value!r}; expected a number")
        if not 0 < values[name] < math.inf:
            parser.error(f"{name} is {value!r}; expected a number above 0 that is finite")
    try:
        text = "\n".join(lines(values))
    except ConfigError as error:
        parser.error(str(error))
    except ArithmeticError as error:
        parser.error(f"the inputs are too extreme for the formula: {error}")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
