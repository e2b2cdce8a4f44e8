"""``holdfast show``: describe a generation without its model, its trainer or a GPU."""

import contextlib
import io
import math
import re
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import click

from ...utils.errors import CheckpointCorruptError
from ...utils.files import bytes_digest
from ..info import INFO_NAME, RecoverInfo
from .folders import Folder
from .output import (
    json_option,
    number_text,
    print_json,
    print_table,
    size_text,
)
from .runs import generation_argument, read_generation

if TYPE_CHECKING:
    from ...engine.dcp.format import FolderLayout

Facts = dict[str, Any]
"""A part of the JSON document."""

_METADATA = "/.metadata"
_TEXT = ".language_model."
_OF_PROCESS = re.compile(r"state/(rank_\d+|driver)\.pt")
_PLAIN = (bool, int, float, str, type(None))


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
    read = partial(describe, list_tensors=tensors)
    found = read_generation(generation, read)
    if as_json:
        print_json(found)
        return

    # Of the generation as a whole. What it lacks is left out.
    facts: list[tuple[str, str]] = []
    for key, value in found["generation"].items():
        if value not in (None, {}, []):
            facts.append((key, _fact(value)))
    print_table(("", ""), facts, found["where"])

    for name, engine in found["engines"].items():
        _print_engine(name, engine)

    # Rows of its parts.
    rows: list[tuple[str, str, str]] = []
    for process, part in found["processes"].items():
        objects = ", ".join(part["objects"])
        rows.append((process, part["generators"] or "", objects))
    columns = ("process", "digest of its generators", "objects of the user")
    print_table(columns, rows, "Generators and objects")

    if found["data"] is not None:
        states = found["data"]["states"]
        places = [(f"loader {at}", _fact(state)) for at, state in enumerate(states)]
        print_table(("", "place"), places, "Data")


def describe(folder: Folder, list_tensors: bool) -> Facts:
    """Describe a generation. Raises `CheckpointCorruptError` if a part that is read is damaged."""
    manifest = folder.manifest()
    info = folder.info()
    files = manifest["files"]
    last = info.last_step_info
    small = _SmallFiles(folder, files)
    small.read(INFO_NAME)

    # The parts that are files of their own.
    engines: dict[str, Facts] = {}
    processes = _describe_processes(small, info)
    for file in sorted(files):
        if file.endswith(_METADATA):
            name = file.removesuffix(_METADATA)
            facts = info.engines.get(name)
            engines[name] = _describe_engine(small, name, facts, list_tensors)
    data: Facts | None = None
    if "data.pt" in files:
        data = _describe_data(small.load("data.pt"))

    # Sizes of the dims of each mesh, as in a backend: d4c2.
    meshes: dict[str, str] = {}
    for name, sizes in info.meshes.items():
        dims = [f"{dim}{size}" for dim, size in sizes.items()]
        meshes[name] = "".join(dims)
    return {
        "where": folder.where,
        "generation": {
            "step": last.global_step,
            "epoch": last.epoch,
            "step in the epoch": f"{last.epoch_step} of {last.steps_per_epoch}",
            "run_id": info.run_id,
            "world_size": info.world_size,
            "mesh": meshes,
            "bytes": sum(entry["bytes"] for entry in files.values()),
            "files": len(files),
            "metrics": info.metrics,
            "save_s": info.save_s,
            "weight_versions": info.weight_versions,
            "resume_path": info.resume_path,
            "libraries": manifest.get("libraries", {}),
        },
        "engines": engines,
        "processes": processes,
        "data": data,
    }


class _SmallFiles:
    """Reads whole files of a generation and compares each with its digest."""

    def __init__(self, folder: Folder, files: dict[str, Any]) -> None:
        self.folder = folder
        self.files = files

    def read(self, name: str) -> bytes:
        data = self.folder.read(name)
        if bytes_digest(data) != self.files[name]["digest"]:
            raise CheckpointCorruptError(
                f"{self.folder.where}: {name} is not what the manifest says"
            )
        return data

    def load(self, name: str) -> Any:
        from ...utils.plain_values import unpack_plain

        data = self.read(name)
        return unpack_plain(data, f"{self.folder.where}/{name}")


def _describe_processes(small: _SmallFiles, info: RecoverInfo) -> dict[str, Facts]:
    """Name of a process -> digest of its generators, and names of the objects of the user."""
    found: dict[str, Facts] = {}
    for name, digest in sorted(info.rng.items()):
        found[name] = {"generators": digest, "objects": []}
    for file in small.files:
        if not _OF_PROCESS.fullmatch(file):
            continue
        state = small.load(file)
        user = state.get("user") if isinstance(state, dict) else None
        objects: list[str] = []
        if isinstance(user, dict):
            objects = [_describe_object(str(key), user[key], info) for key in sorted(user, key=str)]
        name = PurePath(file).stem
        process = found.setdefault(name, {"generators": None})
        process["objects"] = objects
    return found


def _describe_object(name: str, packed: Any, info: RecoverInfo) -> str:
    """Name of an object of the user. If it follows a log, with its recorded answers."""
    if name not in info.logs:
        return name
    from ...engine.rollouts.recorded import split_records
    from ...utils.plain_values import unpack_plain
    from ...utils.record_log import split_payload

    state = unpack_plain(packed, name)
    records: Any = None
    if isinstance(state, dict):
        records = state.get("records")
    n_answers = 0
    with contextlib.suppress(AttributeError, ValueError):  # of another object than an executor
        for record in split_records(records.numpy().tobytes()):
            head, _ = split_payload(record)
            n_answers += head.get("kind") == "answer"
    return f"{name} ({n_answers} recorded answers of unfinished tickets)"


def _describe_engine(
    small: _SmallFiles,
    engine: str,
    facts: Any,
    list_tensors: bool,
) -> Facts:
    from ...engine.dcp.format import parse_metadata
    from ...engine.dcp.state import PACKED, ROOT

    layout = parse_metadata(small.read(f"{engine}{_METADATA}"))
    found: Facts = {}
    for key in ("optimizer_steps", "lr", "schedule_step"):
        found[key] = getattr(facts, key, None)
    found["kinds"] = _sum_by_kind(layout)

    # Small values that are stored as JSON in tensors.
    for key in PACKED:
        name = f"{ROOT}.{key}"
        if name in layout.tensors:
            found[key] = _read_packed(small.folder, engine, layout, name)

    if list_tensors:
        listed: list[Facts] = []
        for key, stored in layout.tensors.items():
            elements = math.prod(stored.shape)
            listed.append(
                {
                    "name": key.removeprefix(f"{ROOT}."),
                    "dtype": str(stored.dtype).removeprefix("torch."),
                    "shape": list(stored.shape),
                    "bytes": elements * stored.dtype.itemsize,
                    "shards": len(stored.files),
                }
            )
        found["tensors"] = listed
    return found


def _sum_by_kind(layout: "FolderLayout") -> dict[str, dict[str, int]]:
    """Kind -> number of tensors, their elements and bytes. The kind of
    ``optim.state.layers.0.weight.exp_avg`` is ``optim exp_avg``.
    """
    from ...engine.dcp.state import ROOT

    # The prefix of a multimodal model: its towers and its language model are told apart.
    body = ""
    model = f"{ROOT}.model."
    for key in layout.tensors:
        name = key.removeprefix(model)
        if key.startswith(model) and _TEXT in name:
            body = name.partition(_TEXT)[0]
            break

    kinds: dict[str, dict[str, int]] = {}
    for key, stored in layout.tensors.items():
        name = key.removeprefix(f"{ROOT}.")
        kind, _, rest = name.partition(".")
        is_of_model = kind in ("model", "optim")
        if name.startswith("optim.state."):
            entry = rest.rpartition(".")[2]
            kind = f"optim {entry}"
        if body and is_of_model:
            inner = rest.removeprefix("state.")
            inner = inner.removeprefix(f"{body}.")
            tower, dot, _ = inner.partition(".")
            if dot:
                kind += f", {tower}"

        sums = kinds.setdefault(kind, {"tensors": 0, "elements": 0, "bytes": 0})
        elements = math.prod(stored.shape)
        sums["tensors"] += 1
        sums["elements"] += elements
        sums["bytes"] += elements * stored.dtype.itemsize
    return kinds


def _read_packed(
    folder: Folder,
    engine: str,
    layout: "FolderLayout",
    key: str,
) -> Any:
    from ...utils.plain_values import load_plain, unpack_json

    stored = layout.tensors[key]
    name = f"{folder.where}/{engine}: {key}"
    if len(stored.files) != 1:
        raise CheckpointCorruptError(f"{name} is stored in {len(stored.files)} parts; expected one")

    # Only the archive of this tensor is read.
    files = list(layout.files)
    file = files[int(stored.files[0])]
    begin = int(stored.begins[0])
    length = int(stored.lengths[0])
    archive = folder.read_range(f"{engine}/{file}", begin, length)
    tensor = load_plain(io.BytesIO(archive), name)
    return unpack_json(tensor, name)


def _describe_data(data: Any) -> Facts:
    """Position of each loader: the plain values of its state."""
    from ...utils.plain_values import unpack_plain

    shown: list[Facts] = []
    for packed in data["states"]:
        state = unpack_plain(packed, "data.pt")
        values: Facts = {}
        if isinstance(state, dict):
            for key, value in state.items():
                if isinstance(value, _PLAIN):
                    values[str(key)] = value
        shown.append(values)
    return {"rank_independent": data.get("rank_independent"), "states": shown}


def _fact(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {number_text(item)}" for key, item in value.items())
    return number_text(value)


def _tells(key: str, value: Any) -> bool:
    """Whether a value of a scheduler or counter is for people. torch's own attributes begin with an
    underscore.
    """
    if key.startswith("_") or isinstance(value, dict):
        return False
    if isinstance(value, list):
        return not all(item in (None, {}) for item in value)
    return True


def _print_engine(name: str, engine: Facts) -> None:
    # How much there is of each kind of tensor.
    rows: list[tuple[str, ...]] = []
    for kind, sums in engine["kinds"].items():
        rows.append(
            (
                kind,
                str(sums["tensors"]),
                f"{sums['elements']:,}",
                size_text(sums["bytes"]),
            )
        )
    title = f"Engine {name}"
    if engine["optimizer_steps"] is not None:
        lr = number_text(engine["lr"])
        at = number_text(engine["schedule_step"])
        title += f": {engine['optimizer_steps']} optimizer steps, lr {lr}, schedule at {at}"
    print_table(("what", "tensors>", "elements>", "size>"), rows, title)

    # What the optimizer and its schedule hold besides tensors.
    _print_groups(engine.get("param_groups", []))
    for part in ("scheduler", "counters"):
        if not engine.get(part):
            continue
        rows = []
        for key, value in engine[part].items():
            if _tells(key, value):
                rows.append((key, number_text(value)))
        print_table(("", ""), rows, part.capitalize())

    # Every tensor, with --tensors.
    if "tensors" in engine:
        rows = []
        for tensor in engine["tensors"]:
            shape = "x".join(map(str, tensor["shape"]))
            rows.append(
                (
                    tensor["name"],
                    tensor["dtype"],
                    shape or "scalar",
                    size_text(tensor["bytes"]),
                    str(tensor["shards"]),
                )
            )
        print_table(("tensor", "dtype", "shape>", "size>", "shards>"), rows)


def _print_groups(groups: list[Facts]) -> None:
    """A row for each group, and a column for each hyperparameter that any of them has."""
    if not groups:
        return
    keys: dict[str, None] = {}  # in the order in which they appear
    for group in groups:
        keys |= dict.fromkeys(group)
    shown = [key for key in keys if key not in ("params", "initial_lr")]

    rows: list[list[str]] = []
    for group in groups:
        values = [number_text(group.get(key, "")) for key in shown]
        n_params = len(group.get("params", []))
        rows.append([str(n_params), *values])
    print_table(("parameters>", *shown), rows, "Parameter groups")
