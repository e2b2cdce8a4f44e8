"""``holdfast plan``: what a training step of a model takes on each GPU, from its config alone."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...utils.errors import ConfigError
from .output import json_option, print_json, print_table, seconds_text, size_text

if TYPE_CHECKING:
    from ...engine.config import TrainEngineConfig
    from ...engine.model.memory_plan import MemoryPlan, ModelSizes

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


class _Bytes(click.ParamType):
    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?(/S)?", str(value).upper())
        size = 0 if match is None else int(float(match[1]) * _UNITS.get(match[2], 0))
        if size == 0:
            self.fail(f"{value!r} is no size above 0; expected for instance 80GB", param, ctx)
        return size


class _Share(click.ParamType):
    name = "server:share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        match = re.fullmatch(r"(?:vllm|sglang):(0?\.[0-9]+)", str(value))
        if match is None:
            self.fail(
                f"{value!r} is no server with its share of the memory; expected for instance vllm:0.4",
                param,
                ctx,
            )
        return float(match[1])


@click.command("plan", short_help="Compute the memory of a training step.")
@click.argument("model")
@click.option(
    "--backend", default="fsdp", show_default=True, help="The mesh: fsdp, fsdp:d8, fsdp:d4c2 ..."
)
@click.option(
    "--replicate", default=1, show_default=True, help="Copies of the sharded model (HSDP)."
)
@click.option(
    "--gpus",
    default=8,
    show_default=True,
    type=click.IntRange(1),
    help="Number of GPUs, one rank on each.",
)
@click.option(
    "--gpus-per-node", default=8, show_default=True, type=click.IntRange(1), help="GPUs of a node."
)
@click.option("--memory", default="80GB", show_default=True, type=_Bytes(), help="Memory of a GPU.")
@click.option(
    "--tokens",
    default=16384,
    show_default=True,
    type=click.IntRange(1),
    help="Tokens of a micro-batch.",
)
@click.option("--optimizer", default="adam", show_default=True, help="As optimizer.type.",
              type=click.Choice(("adam", "adam_bf16", "adam8bit", "muon", "sgd")))  # fmt: skip
@click.option(
    "--checkpointing", is_flag=True, help="Recompute activations (gradient_checkpointing: true)."
)
@click.option(
    "--selective", is_flag=True, help="Recompute some of them (gradient_checkpointing: selective)."
)
@click.option("--lora", type=click.IntRange(1), help="Train adapters of this rank.")
@click.option("--vision", is_flag=True, help="Train on images and text (train_vision).")
@click.option("--offload", type=click.Choice(("optimizer", "params")),
              help="Keep state in host memory: optimizer.offload or fsdp.offload_params.")  # fmt: skip
@click.option("--colocate", type=_Share(), help="A server that takes turns with training on the same GPUs, with this "
              "share of their memory: vllm:0.4")  # fmt: skip
@click.option(
    "--bandwidth",
    default="2GB/s",
    show_default=True,
    type=_Bytes(),
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

    config = TrainEngineConfig(
        path=_folder_of(model),
        backend=asked["backend"],
        fsdp=FSDPConfig(
            replicate_size=asked["replicate"], offload_params=asked["offload"] == "params"
        ),
        optimizer=OptimizerConfig(type=asked["optimizer"], offload=asked["offload"] == "optimizer"),
        gradient_checkpointing="selective" if asked["selective"] else asked["checkpointing"],
        train_vision=asked["vision"],
        use_lora=asked["lora"] is not None,
        lora_rank=asked["lora"] or 32,
    )
    share, left = asked["colocate"], asked["memory"] - CONTEXT_BYTES
    usable = left if share is None else left - CONTEXT_BYTES  # the server sleeps
    case = _Case(
        config,
        asked["gpus"],
        asked["gpus_per_node"],
        asked["tokens"],
        asked["memory"],
        share is not None,
    )
    changes = _changes_until_it_fits(case, usable)
    found = _found(case, usable, changes, asked["bandwidth"])
    if share is not None:
        found["bytes_for_server"] = {"asked": int(share * asked["memory"]), "usable": left}
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
    sizes: "ModelSizes | None" = None

    def __post_init__(self) -> None:
        from ...engine.model.memory_plan import measure_model, plan_step

        self.strategy = self.config.parallel_strategy.for_world(self.gpus)
        self.sizes = self.sizes or measure_model(self.config, self.tokens)
        self.step: MemoryPlan = plan_step(
            self.sizes, self.config, self.strategy, self.tokens, self.memory
        )

    @property
    def staged(self) -> int:
        """Bytes of copies in the host memory of a node, for snapshots and `FSDPEngine.offload`."""
        moved = (
            self.step.weights + self.step.moments if self.leaves else 0
        )  # adapters are staged without their base
        return self.on_node * max(self.step.staged, moved)

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


def _changes_until_it_fits(case: _Case, usable: int) -> list[tuple[str, _Case]]:
    """The changes, each on top of those before. The last one fits, or nothing more helps.

    State moves to host memory only if no other changes are enough, because that makes steps slower.
    """
    found = [list(_faster_changes(case, usable))]
    for change, other in _offloads(case) if _last_of(found[0], case).step.peak > usable else ():
        found.append([(change, other), *_faster_changes(other, usable)])
    return min(found, key=lambda changes: max(usable, _last_of(changes, case).step.peak))


def _last_of(changes: list[tuple[str, _Case]], case: _Case) -> _Case:
    return changes[-1][1] if changes else case


def _faster_changes(case: _Case, usable: int) -> Iterator[tuple[str, _Case]]:
    """Yield changes that keep state on the devices, each time the one that saves most."""
    while case.step.peak > usable:
        options = dict(_options(case))
        best = min(options, key=lambda change: options[change].step.peak, default=None)
        if best is None or options[best].step.peak > 0.98 * case.step.peak:
            return
        case = options[best]
        yield best, case


def _options(case: _Case) -> Iterator[tuple[str, _Case]]:
    config, strategy, sizes = case.config, case.strategy, case.sizes
    assert sizes is not None and config.optimizer is not None
    if config.gradient_checkpointing is not True:
        yield "gradient_checkpointing: true", case.changed(gradient_checkpointing=True)
    if config.optimizer.type == "adam" and not config.use_lora:
        yield (
            "optimizer.type: adam_bf16",
            case.changed(optimizer=replace(config.optimizer, type="adam_bf16")),
        )
    for name in "cte":
        larger = strategy.sizes | {name: 2 * strategy.sizes[name]}
        ranks = larger["c"] * larger["t"]
        if name == "e" and not any(unit.experts for unit in sizes.blocks):
            continue
        if (
            (config.use_lora and name != "c")
            or case.gpus % ranks
            or (name != "e" and sizes.key_value_heads % ranks)
        ):
            continue
        shape = "".join(f"{key}{larger[key]}" for key in "cte" if larger[key] > 1)
        backend = f"fsdp:d{case.gpus // ranks}{shape}"
        with suppress(ConfigError):
            yield f"backend: {backend}", case.changed(backend=backend)


def _offloads(case: _Case) -> Iterator[tuple[str, _Case]]:
    """State in host memory, the change that costs less time first."""
    config = case.config
    assert config.optimizer is not None
    if not config.parts_on_host:
        yield (
            "optimizer.offload: true",
            case.changed(optimizer=replace(config.optimizer, offload=True)),
        )
    if not config.fsdp.offload_params:
        instead = ", optimizer.offload: false" * config.optimizer.offload
        stays = replace(config.optimizer, offload=False)  # the params take the optimizer along
        fsdp = replace(config.fsdp, offload_params=True)
        yield f"fsdp.offload_params: true{instead}", case.changed(fsdp=fsdp, optimizer=stays)


def _found(
    case: _Case, usable: int, changes: list[tuple[str, _Case]], bandwidth: int
) -> dict[str, Any]:
    """The whole answer as one JSON document."""
    from ...engine.model.memory_plan import UNCOUNTED, moment_bytes

    sizes, step = case.sizes, case.step
    assert sizes is not None and case.config.optimizer is not None
    moments = moment_bytes(case.config.optimizer, sizes.n_trained, sizes.n_in_matrices)
    generation = 4 * sizes.n_trained + moments
    export = 2 * (sizes.n_trained if case.config.use_lora else sizes.n_parameters)
    return {
        "parameters": sizes.n_parameters,
        "trained_parameters": sizes.n_trained,
        "mesh": case.strategy.sizes,
        "tokens": case.tokens,
        "bytes_per_gpu": {**step.on_device, "peak": step.peak, "usable": usable},
        "uncounted": [UNCOUNTED] if case.config.train_vision else [],
        "fits": step.peak <= usable,
        "changes": [
            {
                "change": change,
                "peak_bytes": other.step.peak,
                "host_bytes_per_node": other.on_host + other.staged,
            }
            for change, other in changes
        ],
        "fits_after_changes": bool(changes) and changes[-1][1].step.peak <= usable,
        "bytes_on_disk": {"generation": generation, "export": export},
        "bytes_in_host_memory_per_node": {"state": case.on_host, "snapshots": case.staged},
        "seconds": {"snapshot": generation / bandwidth, "publication": export / bandwidth},
    }


def _print(model: str, case: _Case, found: dict[str, Any]) -> None:
    per_gpu, disk, seconds = found["bytes_per_gpu"], found["bytes_on_disk"], found["seconds"]
    mesh = "".join(
        f"{name}{size}" for name, size in found["mesh"].items() if size > 1 or name == "d"
    )
    rows = [(text, size_text(per_gpu[name])) for name, text in _PARTS.items() if per_gpu[name]]
    verdict = "fits" if found["fits"] else "does not fit"
    rows.append(
        ("peak", f"{size_text(per_gpu['peak'])} of {size_text(per_gpu['usable'])}: {verdict}")
    )
    if server := found.get("bytes_for_server"):
        verdict = "fits" if server["asked"] <= server["usable"] else "does not fit"
        text = f"{size_text(server['asked'])} of {size_text(server['usable'])}: {verdict}"
        rows.append(("server, while the trainer is offloaded", text))
    gpus = f"{case.gpus} GPU{'s' * (case.gpus > 1)}"
    title = f"{model}, {found['parameters'] / 1e9:.3g}B parameters, {gpus} ({mesh}), {case.tokens} tokens"
    print_table(("on each GPU", ">"), rows, title)
    for what in found["uncounted"]:
        click.echo(f"{what[0].upper()}{what[1:]}.\n")
    before, lines = per_gpu["peak"], []
    for change in found["changes"]:
        sizes = (before - change["peak_bytes"], change["peak_bytes"], change["host_bytes_per_node"])
        lines.append((change["change"], *map(size_text, sizes)))
        before = change["peak_bytes"]
    if lines:
        print_table(
            ("change, one after the other", "saves>", "peak>", "host memory of a node>"), lines
        )
    if not (found["fits"] or found["fits_after_changes"]):
        click.echo(
            "No change of the mesh, the optimizer, checkpointing or offload is enough: use more "
            "GPUs, fewer tokens or LoRA.\n"
        )
    host = found["bytes_in_host_memory_per_node"]
    rows = [
        *([("host memory of a node for state", size_text(host["state"]))] if host["state"] else []),
        ("host memory of a node for snapshots", size_text(host["snapshots"])),
        (
            "disk for a generation",
            f"{size_text(disk['generation'])}, {seconds_text(seconds['snapshot'])}",
        ),
        (
            "disk for a publication",
            f"{size_text(disk['export'])}, {seconds_text(seconds['publication'])}",
        ),
    ]
    print_table(("", ""), rows)


def _folder_of(model: str) -> str:
    """A folder with the model's config.json, fetched from the hub if ``model`` is no folder."""
    from ...engine.model.model_folder import fetch_config

    return str(model if Path(model).exists() else fetch_config(model))
