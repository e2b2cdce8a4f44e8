"""``holdfast plan``: what a training step of a model takes on each GPU, from its config alone."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...utils.errors import ConfigError
from .output import (
    json_option,
    print_json,
    print_table,
    seconds_text,
    size_text,
)

if TYPE_CHECKING:
    from ...engine.config import OptimizerConfig, TrainEngineConfig
    from ...engine.model.memory_plan import MemoryPlan, ModelSizes

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?(/S)?")
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
}
CONTEXT_BYTES = 2 * 10**9
"""Taken for the CUDA context, libraries and NCCL's buffers of a process: 1.4 GB for one rank on an
H200. A process that sleeps keeps them.
"""
_PARTS = {
    "weights": "shard of the weights",
    "gradients": "gradients",
    "moments": "optimizer state",
    "gathered": "gathered blocks and their gradients",
    "activations": "activations",
    "head": "logits",
}


def _size(text: str) -> int:
    size = 0
    match = _SIZE.fullmatch(text.upper())
    if match is not None:
        unit = _UNITS.get(match[2], 0)
        size = int(float(match[1]) * unit)
    if size == 0:
        raise click.BadParameter(f"{text!r} is no size above 0; expected for instance 80GB")
    return size


def _share(text: str) -> float:
    match = re.fullmatch(r"(?:vllm|sglang):(0?\.[0-9]+)", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is no server with its share of the memory; expected for instance vllm:0.4"
        )
    return float(match[1])


def _group(text: str) -> tuple[int, ...]:
    match = re.fullmatch(r"([1-9][0-9]*):([1-9][0-9]*):([1-9][0-9]*)", text)
    if match is None:
        raise click.BadParameter(
            f"{text!r} is no group of answers; expected the tokens of a prompt, those of an "
            "answer, and the number of answers, for instance 7000:150:8"
        )
    return tuple(map(int, match.groups()))


@click.command(
    "plan",
    short_help="Compute the memory of a training step.",
    context_settings={"show_default": True},
)
@click.argument("model")
@click.option("--backend", default="fsdp", help="The mesh: fsdp, fsdp:d8, fsdp:d4c2 ...")
@click.option("--replicate", default=1, help="Copies of the sharded model (HSDP).")
@click.option(
    "--gpus",
    default=8,
    type=click.IntRange(1),
    help="Number of GPUs, one rank on each.",
)
@click.option("--gpus-per-node", default=8, type=click.IntRange(1), help="GPUs of a node.")
@click.option("--memory", default="80GB", type=_size, metavar="SIZE", help="Memory of a GPU.")
@click.option(
    "--tokens",
    default=16384,
    type=click.IntRange(1),
    help="Tokens of a micro-batch.",
)
@click.option(
    "--group",
    type=_group,
    metavar="PROMPT:ANSWER:SIZE",
    help="Compute each prompt once (enable_tree_training). Tokens of a prompt, tokens of an "
    "answer, answers to a prompt: 7000:150:8",
)
@click.option(
    "--optimizer",
    default="adam",
    help="As optimizer.type.",
    type=click.Choice(("adam", "adam_bf16", "adam8bit", "muon", "sgd")),
)
@click.option(
    "--checkpointing", is_flag=True, help="Recompute activations (gradient_checkpointing: true)."
)
@click.option(
    "--selective", is_flag=True, help="Recompute some of them (gradient_checkpointing: selective)."
)
@click.option("--lora", type=click.IntRange(1), help="Train adapters of this rank.")
@click.option("--vision", is_flag=True, help="Train on images and text (train_vision).")
@click.option(
    "--offload",
    type=click.Choice(("optimizer", "params")),
    help="Keep state in host memory: optimizer.offload or fsdp.offload_params.",
)
@click.option(
    "--colocate",
    type=_share,
    metavar="SERVER:SHARE",
    help="A server that takes turns with training on the same GPUs, with this "
    "share of their memory: vllm:0.4",
)
@click.option(
    "--bandwidth",
    default="2GB/s",
    type=_size,
    metavar="SIZE",
    help="Of all nodes' disk together.",
)
@json_option
def plan_command(model: str, as_json: bool, **asked: Any) -> None:
    """Compute the memory that training MODEL takes on each GPU, in hosts and on disk.

    MODEL is a folder with a config.json, or a model on the hub, of which only this file is fetched.
    No weights are read. Activations are those of a forward on tensors without memory. If the step
    does not fit, a list of changes follows that makes it fit.
    """
    from ...engine.config import FSDPConfig, OptimizerConfig, TrainEngineConfig

    # The config that a job with these options would have.
    config = TrainEngineConfig(
        path=_folder_of(model),
        backend=asked["backend"],
        fsdp=FSDPConfig(
            replicate_size=asked["replicate"], offload_params=asked["offload"] == "params"
        ),
        optimizer=OptimizerConfig(type=asked["optimizer"], offload=asked["offload"] == "optimizer"),
        gradient_checkpointing="selective" if asked["selective"] else asked["checkpointing"],
        train_vision=asked["vision"],
        enable_tree_training=asked["group"] is not None,
        use_lora=asked["lora"] is not None,
        lora_rank=asked["lora"] or 32,
    )

    # A server on the same GPUs sleeps during a step, and keeps its context.
    share = asked["colocate"]
    left = asked["memory"] - CONTEXT_BYTES
    usable = left
    if share is not None:
        usable -= CONTEXT_BYTES
    case = _Case(
        config,
        asked["gpus"],
        asked["gpus_per_node"],
        asked["tokens"],
        asked["memory"],
        leaves=share is not None,
        group=asked["group"],
    )
    # Changes that would help if the step does not fit.
    changes = _changes_until_it_fits(case, usable)
    found = _found(case, usable, changes, asked["bandwidth"])
    if share is not None:
        for_server = int(share * asked["memory"])
        found["bytes_for_server"] = {"asked": for_server, "usable": left}
    if as_json:
        print_json({"model": model, **found})
    else:
        _print(model, case, found)


@dataclass
class _Case:
    """One training set-up, and its memory."""

    config: "TrainEngineConfig"
    gpus: int
    gpus_per_node: int
    tokens: int
    memory: int
    leaves: bool
    """Whether `FSDPEngine.offload` empties the GPUs for a server."""
    group: tuple[int, ...] | None
    """Tokens of a prompt and of an answer, and the number of answers that share the prompt."""
    sizes: "ModelSizes | None" = None

    def __post_init__(self) -> None:
        from ...engine.model.memory_plan import AnswerGroup, measure_model, plan_step

        self.answers = None if self.group is None else AnswerGroup(*self.group)
        self.strategy = self.config.parallel_strategy.for_world(self.gpus)
        # A changed case keeps them, because measuring takes seconds.
        self.sizes = self.sizes or measure_model(self.config, self.tokens)
        self.step: MemoryPlan = plan_step(
            self.sizes,
            self.config,
            self.strategy,
            self.tokens,
            self.memory,
            self.answers,
        )

    @property
    def measured(self) -> "ModelSizes":
        """Sizes of the model."""
        assert self.sizes is not None
        return self.sizes

    @property
    def optimizer(self) -> "OptimizerConfig":
        """Optimizer of the config."""
        assert self.config.optimizer is not None
        return self.config.optimizer

    @property
    def peak(self) -> int:
        """Most bytes on a GPU during a step."""
        return self.step.peak

    @property
    def staged(self) -> int:
        """Bytes of copies in the host memory of a node, for snapshots and `FSDPEngine.offload`."""
        copied = self.step.staged
        if self.leaves:
            # More than a snapshot, which has adapters without their base.
            moved = self.step.weights + self.step.moments
            copied = max(copied, moved)
        return self.on_node * copied

    @property
    def on_host(self) -> int:
        """Bytes of state in the host memory of a node."""
        return self.on_node * self.step.on_host

    @property
    def on_node(self) -> int:
        """Number of GPUs of a node."""
        return min(self.gpus, self.gpus_per_node)

    def changed(self, **changes: Any) -> "_Case":
        """The same with other settings of the config. Raises ConfigError if they do not fit the
        GPUs.
        """
        return replace(self, config=replace(self.config, **changes))


class _Change(NamedTuple):
    """A change of the settings, and the case with it and all changes before."""

    text: str
    case: _Case


def _changes_until_it_fits(case: _Case, usable: int) -> list[_Change]:
    """The changes, each on top of those before. The last one fits, or nothing more helps.

    State moves to host memory only if no other changes are enough, because that makes steps slower.
    """
    faster = list(_faster_changes(case, usable))
    if _peak_after(faster, case) <= usable:
        return faster

    # Fitting ones are equal, and the first is taken: it costs the least time.
    found = [faster]
    for change in _offloads(case):
        more = _faster_changes(change.case, usable)
        found.append([change, *more])
    return min(found, key=lambda changes: max(usable, _peak_after(changes, case)))


def _peak_after(changes: list[_Change], case: _Case) -> int:
    last = changes[-1].case if changes else case
    return last.peak


def _faster_changes(case: _Case, usable: int) -> Iterator[_Change]:
    """Yield changes that keep state on the devices, each time the one that saves most."""
    while case.peak > usable:
        options = list(_options(case))
        if not options:
            return
        best = min(options, key=lambda change: change.case.peak)
        if best.case.peak > 0.98 * case.peak:
            return
        yield best
        case = best.case


def _options(case: _Case) -> Iterator[_Change]:
    config = case.config
    if config.gradient_checkpointing is not True:
        yield _Change(
            "gradient_checkpointing: true",
            case.changed(gradient_checkpointing=True),
        )
    if case.optimizer.type == "adam" and not config.use_lora:
        smaller = replace(case.optimizer, type="adam_bf16")
        yield _Change("optimizer.type: adam_bf16", case.changed(optimizer=smaller))

    # Twice the ranks that share rows (c), matrices (t) or experts (e).
    for dim in "cte":
        backend = _doubled(case, dim)
        if backend is not None:
            with suppress(ConfigError):
                yield _Change(f"backend: {backend}", case.changed(backend=backend))


def _doubled(case: _Case, dim: str) -> str | None:
    """The mesh with twice the size of ``dim``. None if the model or the GPUs do not allow it."""
    sizes = case.measured
    if dim == "e" and not any(unit.experts for unit in sizes.blocks):
        return None
    if dim != "c" and case.config.use_lora:
        return None

    # Ranks that share rows or matrices share the heads, too.
    mesh = dict(case.strategy.sizes)
    mesh[dim] *= 2
    ranks = mesh["c"] * mesh["t"]
    if case.gpus % ranks:
        return None
    if dim != "e" and sizes.key_value_heads % ranks:
        return None
    shape = "".join(f"{key}{mesh[key]}" for key in "cte" if mesh[key] > 1)
    return f"fsdp:d{case.gpus // ranks}{shape}"


def _offloads(case: _Case) -> Iterator[_Change]:
    """State in host memory, the change that costs less time first."""
    config = case.config
    optimizer = case.optimizer
    if not config.parts_on_host:
        moved = replace(optimizer, offload=True)
        yield _Change("optimizer.offload: true", case.changed(optimizer=moved))
    if not config.fsdp.offload_params:
        # The parameters take the optimizer along.
        instead = ", optimizer.offload: false" * optimizer.offload
        stays = replace(optimizer, offload=False)
        fsdp = replace(config.fsdp, offload_params=True)
        yield _Change(
            f"fsdp.offload_params: true{instead}",
            case.changed(fsdp=fsdp, optimizer=stays),
        )


def _found(
    case: _Case,
    usable: int,
    changes: list[_Change],
    bandwidth: int,
) -> dict[str, Any]:
    """The whole answer as one JSON document."""
    from ...engine.model.memory_plan import UNCOUNTED, moment_bytes

    sizes = case.measured
    peak = case.peak

    # On disk: weights in float32 and moments, or all weights in two bytes each.
    moments = moment_bytes(case.optimizer, sizes.n_trained, sizes.n_in_matrices)
    generation = 4 * sizes.n_trained + moments
    exported = sizes.n_parameters
    if case.config.use_lora:
        exported = sizes.n_trained
    export = 2 * exported

    # Each change with the memory after it and those before it.
    listed: list[dict[str, Any]] = []
    for change in changes:
        other = change.case
        listed.append(
            {
                "change": change.text,
                "peak_bytes": other.peak,
                "host_bytes_per_node": other.on_host + other.staged,
            }
        )
    return {
        "parameters": sizes.n_parameters,
        "trained_parameters": sizes.n_trained,
        "mesh": case.strategy.sizes,
        "tokens": case.tokens,
        "bytes_per_gpu": {**case.step.on_device, "peak": peak, "usable": usable},
        "uncounted": [UNCOUNTED] if case.config.train_vision else [],
        "fits": peak <= usable,
        "changes": listed,
        "fits_after_changes": bool(changes) and _peak_after(changes, case) <= usable,
        "shared_prompts": None if case.answers is None else {"factor": case.answers.factor},
        "bytes_on_disk": {"generation": generation, "export": export},
        "routed_experts_bytes_per_token": sizes.route_bytes,
        "bytes_in_host_memory_per_node": {"state": case.on_host, "snapshots": case.staged},
        "seconds": {"snapshot": generation / bandwidth, "publication": export / bandwidth},
    }


def _print(model: str, case: _Case, found: dict[str, Any]) -> None:
    _print_gpu(model, case, found)
    for what in found["uncounted"]:
        click.echo(f"{what[0].upper()}{what[1:]}.\n")
    if case.group is not None:
        prompt, answer, size = case.group
        factor = found["shared_prompts"]["factor"]
        click.echo(
            f"{size} answers of {answer} tokens to a prompt of {prompt} are {factor:.3g} times as "
            "many tokens as their row.\n"
        )
    _print_changes(found)

    # Bytes in hosts and on disk.
    host = found["bytes_in_host_memory_per_node"]
    disk = found["bytes_on_disk"]
    seconds = found["seconds"]
    rows: list[tuple[str, str]] = []
    if host["state"]:
        rows.append(("host memory of a node for state", size_text(host["state"])))
    rows.append(("host memory of a node for snapshots", size_text(host["snapshots"])))
    for what, stored, took in (
        ("generation", disk["generation"], seconds["snapshot"]),
        ("publication", disk["export"], seconds["publication"]),
    ):
        text = f"{size_text(stored)}, {seconds_text(took)}"
        rows.append((f"disk for a {what}", text))
    per_token = found["routed_experts_bytes_per_token"]
    if per_token:
        rows.append(("routed experts of a token (router_replay)", size_text(per_token)))
    print_table(("", ""), rows)


def _print_gpu(model: str, case: _Case, found: dict[str, Any]) -> None:
    per_gpu = found["bytes_per_gpu"]
    rows: list[tuple[str, str]] = []
    for name, text in _PARTS.items():
        if per_gpu[name]:
            rows.append((text, size_text(per_gpu[name])))
    rows.append(("peak", _fits_text(per_gpu["peak"], per_gpu["usable"])))
    server = found.get("bytes_for_server")
    if server:
        fits = _fits_text(server["asked"], server["usable"])
        rows.append(("server, while the trainer is offloaded", fits))

    # The set-up as the head of the table.
    dims: list[str] = []
    for name, size in found["mesh"].items():
        if size > 1 or name == "d":
            dims.append(f"{name}{size}")
    mesh = "".join(dims)
    billions = found["parameters"] / 1e9
    plural = "s" if case.gpus > 1 else ""
    title = (
        f"{model}, {billions:.3g}B parameters, {case.gpus} GPU{plural} ({mesh}), "
        f"{case.tokens} tokens"
    )
    print_table(("on each GPU", ">"), rows, title)


def _fits_text(needed: int, usable: int) -> str:
    verdict = "fits" if needed <= usable else "does not fit"
    return f"{size_text(needed)} of {size_text(usable)}: {verdict}"


def _print_changes(found: dict[str, Any]) -> None:
    rows: list[tuple[str, ...]] = []
    # Each row saves from what the rows above have left.
    before = found["bytes_per_gpu"]["peak"]
    for change in found["changes"]:
        peak = change["peak_bytes"]
        rows.append(
            (
                change["change"],
                size_text(before - peak),
                size_text(peak),
                size_text(change["host_bytes_per_node"]),
            )
        )
        before = peak
    if rows:
        columns = ("change, one after the other", "saves>", "peak>", "host memory of a node>")
        print_table(columns, rows)

    if not (found["fits"] or found["fits_after_changes"]):
        click.echo(
            "No change of the mesh, the optimizer, checkpointing or offload is enough: use more "
            "GPUs, fewer tokens or LoRA.\n"
        )


def _folder_of(model: str) -> str:
    """A folder with the model's config.json, fetched from the hub if ``model`` is no folder."""
    from ...engine.model_folder import fetch_config

    if Path(model).exists():
        return model
    return str(fetch_config(model))
