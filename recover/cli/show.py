"""``holdfast show``: describe a generation without its model, its trainer or a GPU."""

import io
import math
import re
from collections import Counter
from functools import partial
from pathlib import PurePath
from typing import Any

import click

from ...utils.errors import CheckpointCorruptError
from ...utils.files import bytes_digest
from ..info import INFO_NAME
from .folders import Folder
from .output import json_option, number_text, print_json, print_table, size_text
from .runs import generation_argument, read_generation

_METADATA = "/.metadata"
_TEXT = ".language_model."
_OF_PROCESS = re.compile(r"state/(rank_\d+|driver)\.pt")


@click.command("show", short_help="Show the contents of a generation.")
@generation_argument
@click.option("--tensors", is_flag=True, help="List every tensor.")
@json_option
def show_command(generation: str, tensors: bool, as_json: bool) -> None:
    """Show the contents of GEN: step, engines, tensors, parameter groups, learning rates,
    generators, data position.

    Only small parts are read, also at a URL. Files that are read as a whole are compared with their
    digests. Parameter groups, scheduler and counters are parts of the tensor files, whose bytes
    only `holdfast verify` compares.
    """
    found = read_generation(generation, partial(describe, list_tensors=tensors))
    if as_json:
        print_json(found)
        return
    facts = [
        (key, _fact(value))
        for key, value in found["generation"].items()
        if value not in (None, {}, [])
    ]
    print_table(("", ""), facts, found["where"])
    for name, engine in found["engines"].items():
        _print_engine(name, engine)
    rows = [
        (process, part["generators"] or "", ", ".join(part["objects"]))
        for process, part in found["processes"].items()
    ]
    print_table(
        ("process", "digest of its generators", "objects of the user"),
        rows,
        "Generators and objects",
    )
    if found["data"] is not None:
        places = [
            (f"loader {at}", _fact(state)) for at, state in enumerate(found["data"]["states"])
        ]
        print_table(("", "place"), places, "Data")


def describe(folder: Folder, list_tensors: bool) -> dict[str, Any]:
    """Describe a generation. Raises `CheckpointCorruptError` if a part that is read is damaged."""
    manifest, info = folder.manifest(), folder.info()
    files, last = manifest["files"], info.last_step_info
    small = _SmallFiles(folder, files)
    small.read(INFO_NAME)
    names = sorted(name.removesuffix(_METADATA) for name in files if name.endswith(_METADATA))
    processes = {
        process: {"generators": digest, "objects": []}
        for process, digest in sorted(info.rng.items())
    }
    for name in filter(_OF_PROCESS.fullmatch, files):
        state = small.load(name)
        user = state.get("user") if isinstance(state, dict) else None
        process = processes.setdefault(PurePath(name).stem, {"generators": None, "objects": []})
        process["objects"] = sorted(map(str, user)) if isinstance(user, dict) else []
    return {
        "where": folder.where,
        "generation": {
            "step": last.global_step,
            "epoch": last.epoch,
            "step in the epoch": f"{last.epoch_step} of {last.steps_per_epoch}",
            "run_id": info.run_id,
            "world_size": info.world_size,
            "mesh": {
                name: "".join(f"{dim}{size}" for dim, size in sizes.items())
                for name, sizes in info.meshes.items()
            },
            "bytes": sum(entry["bytes"] for entry in files.values()),
            "files": len(files),
            "metrics": info.metrics,
            "save_s": info.save_s,
            "weight_versions": info.weight_versions,
            "resume_path": info.resume_path,
            "libraries": manifest.get("libraries", {}),
        },
        "engines": {
            name: _describe_engine(small, name, info.engines.get(name), list_tensors)
            for name in names
        },
        "processes": processes,
        "data": _describe_data(small.load("data.pt")) if "data.pt" in files else None,
    }


class _SmallFiles:
    """Reads whole files of a generation and compares each with its digest."""

    def __init__(self, folder: Folder, files: dict[str, Any]) -> None:
        self.folder, self._files = folder, files

    def read(self, name: str) -> bytes:
        data = self.folder.read(name)
        if bytes_digest(data) != self._files[name]["digest"]:
            raise CheckpointCorruptError(
                f"{self.folder.where}: {name} is not what the manifest says"
            )
        return data

    def load(self, name: str) -> Any:
        from ...utils.plain_values import unpack_plain

        return unpack_plain(self.read(name), f"{self.folder.where}/{name}")


def _describe_engine(
    small: _SmallFiles, engine: str, facts: Any, list_tensors: bool
) -> dict[str, Any]:
    from ...engine.dcp.format import parse_metadata
    from ...engine.dcp.state import PACKED, ROOT

    layout = parse_metadata(small.read(f"{engine}{_METADATA}"))
    kinds: dict[str, dict[str, int]] = {}
    weights = (
        key.removeprefix(f"{ROOT}.model.")
        for key in layout.tensors
        if key.startswith(f"{ROOT}.model.")
    )
    body = next((name.partition(_TEXT)[0] for name in weights if _TEXT in name), "")
    for key, stored in layout.tensors.items():
        name = key.removeprefix(f"{ROOT}.")
        part, _, rest = name.partition(".")
        # The kind of ``optim.state.layers.0.weight.exp_avg`` is ``optim exp_avg``.
        kind = f"optim {rest.rpartition('.')[2]}" if name.startswith("optim.state.") else part
        if body and part in (
            "model",
            "optim",
        ):  # a multimodal model: tell its tower and its language model apart
            inner = rest.removeprefix("state.").removeprefix(f"{body}.")
            kind += f", {inner.partition('.')[0]}" if "." in inner else ""
        sums = kinds.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        elements = math.prod(stored.shape)
        sums["tensors"] += 1
        sums["elements"] += elements
        sums["bytes"] += elements * stored.dtype.itemsize
    found: dict[str, Any] = {
        key: getattr(facts, key, None) for key in ("optimizer_steps", "lr", "schedule_step")
    }
    found["kinds"] = kinds
    for key in PACKED:
        if f"{ROOT}.{key}" in layout.tensors:
            found[key] = _read_packed(small.folder, engine, layout, f"{ROOT}.{key}")
    if list_tensors:
        found["tensors"] = [
            {
                "name": key.removeprefix(f"{ROOT}."),
                "dtype": str(stored.dtype).removeprefix("torch."),
                "shape": list(stored.shape),
                "bytes": math.prod(stored.shape) * stored.dtype.itemsize,
                "shards": len(stored.files),
            }
            for key, stored in layout.tensors.items()
        ]
    return found


def _read_packed(folder: Folder, engine: str, layout: Any, key: str) -> Any:
    from ...utils.plain_values import load_plain, unpack_json

    stored, name = layout.tensors[key], f"{folder.where}/{engine}: {key}"
    if len(stored.files) != 1:
        raise CheckpointCorruptError(f"{name} is stored in {len(stored.files)} parts; expected one")
    file, begin, length = (int(part[0]) for part in (stored.files, stored.begins, stored.lengths))
    tensor = load_plain(
        io.BytesIO(folder.read_range(f"{engine}/{list(layout.files)[file]}", begin, length)), name
    )
    return unpack_json(tensor, name)


def _describe_data(data: Any) -> dict[str, Any]:
    """Position of each loader: the plain values of its state."""
    from ...utils.plain_values import unpack_plain

    shown, plain = [], (bool, int, float, str, type(None))
    for state in (unpack_plain(state, "data.pt") for state in data["states"]):
        values = state.items() if isinstance(state, dict) else ()
        shown.append({str(key): value for key, value in values if isinstance(value, plain)})
    return {"rank_independent": data.get("rank_independent"), "states": shown}


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number_text(item)}" for key, item in value.items())
    return number_text(value)


def _tells(key: str, value: Any) -> bool:
    """Whether a value of a scheduler or counter is for people. torch's own attributes begin with an
    underscore.
    """
    is_empty = isinstance(value, list) and all(item in (None, {}) for item in value)
    return not (key.startswith("_") or isinstance(value, dict) or is_empty)


def _print_engine(name: str, engine: dict[str, Any]) -> None:
    kinds = engine["kinds"].items()
    rows = [
        (kind, str(n["tensors"]), f"{n['elements']:,}", size_text(n["bytes"])) for kind, n in kinds
    ]
    title = f"Engine {name}"
    if engine["optimizer_steps"] is not None:
        lr, at = number_text(engine["lr"]), number_text(engine["schedule_step"])
        title += f": {engine['optimizer_steps']} optimizer steps, lr {lr}, schedule at {at}"
    print_table(("what", "tensors>", "elements>", "size>"), rows, title)
    groups = engine.get("param_groups", [])
    if groups:
        count = Counter(key for group in groups for key in group)
        keys = [key for key in count if key not in ("params", "initial_lr")]
        rows = [
            [str(len(g.get("params", []))), *(number_text(g.get(key, "")) for key in keys)]
            for g in groups
        ]
        print_table(("parameters>", *keys), rows, "Parameter groups")
    for part in ("scheduler", "counters"):
        if engine.get(part):
            rows = [
                (key, number_text(value))
                for key, value in engine[part].items()
                if _tells(key, value)
            ]
            print_table(("", ""), rows, part.capitalize())
    if "tensors" in engine:
        rows = [
            (
                t["name"],
                t["dtype"],
                "x".join(map(str, t["shape"])) or "scalar",
                size_text(t["bytes"]),
                str(t["shards"]),
            )
            for t in engine["tensors"]
        ]
        print_table(("tensor", "dtype", "shape>", "size>", "shards>"), rows)
