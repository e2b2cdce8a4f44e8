"""Checkpoints of models on meshes of several dimensions: each loads into every other, and nothing
is gathered.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

from holdfast.engine.api import SaveLoadMeta
from holdfast.engine.dcp.base_model import sums_of
from holdfast.engine.dcp.fingerprint import combine_samples, sample_state
from holdfast.engine.dcp.load import load_dcp
from holdfast.engine.dcp.save import save_dcp
from holdfast.engine.dcp.save_plan import agree_on, describe_state, vote_on
from holdfast.engine.dcp.state import DCPState
from holdfast.engine.hf.load import load_hf
from holdfast.engine.hf.save import save_hf
from holdfast.engine.hf.shard_ranges import whole_tensor
from holdfast.engine.memory.tensors import flatten, local_tensor
from holdfast.engine.staging.background_save import BackgroundSave
from holdfast.utils.compat.torch_private import TorchDispatchMode, tree_leaves
from holdfast.utils.distributed import gather_objects, new_background_group
from holdfast.utils.errors import CheckpointMismatchError, ConfigError
from tests.engine.hf_models import sharded, tiny_config
from tests.engine.models import NEEDS_PLANS
from tests.helpers import run_ranks
from tests.tiers import slow_but

pytestmark = [pytest.mark.timeout(180), NEEDS_PLANS]


def by_transformers(**sizes: Any) -> Callable[[Path], Any]:
    """Build a model that transformers shards itself."""

    def build(folder: Path) -> Any:
        from transformers import DistributedConfig  # newer than the oldest supported release

        config = DistributedConfig(**sizes)
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=config
        )

    return build


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def replicated(folder: Path) -> Any:
    mesh = init_device_mesh(
        "cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")
    )
    return fully_shard(plain(folder), mesh=mesh)


COLUMNS, ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")


def by_hand(folder: Path) -> Any:
    """Shard as torchtitan does: a flattened slice of a mesh for FSDP, experts along their
    columns.
    """
    ranks = dist.get_world_size()
    mesh, model = (
        init_device_mesh("cpu", (1, ranks // 2, 2), mesh_dim_names=("dp", "cp", "tp")),
        plain(folder),
    )
    fsdp = mesh["dp", "cp"]._flatten("fsdp")
    for name, module in model.named_modules():
        if name.endswith(COLUMNS):
            parallelize_module(module, mesh["tp"], ColwiseParallel())
        elif name.endswith(ROWS):
            parallelize_module(module, mesh["tp"], RowwiseParallel())
        elif name.endswith("experts"):
            for own, param in list(module.named_parameters()):
                placed = distribute_tensor(
                    param.detach(), mesh["tp"], [Shard(0)], src_data_rank=None
                )
                module.register_parameter(own, nn.Parameter(placed))
            fully_shard(module, mesh=fsdp, shard_placement_fn=lambda _: Shard(2))
    return fully_shard(model, mesh=fsdp)


LAYOUTS: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "alone": (1, plain),
    "fsdp2": (2, lambda folder: sharded(plain(folder))),
    "tp2": (2, by_transformers(tp_size=2)),
    "fsdp3": (3, lambda folder: sharded(plain(folder))),
    "fsdp4": (4, lambda folder: sharded(plain(folder))),
    "hsdp": (4, replicated),
    "fsdp2 tp2": (4, by_transformers(fsdp_size=2, tp_size=2)),
    "replicas2 tp2": (4, by_transformers(dp_replicate_size=2, tp_size=2)),
    "tp4": (4, by_transformers(tp_size=4)),
    "by hand": (4, by_hand),
}
EXPERTS: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "fsdp2": LAYOUTS["fsdp2"],
    "ep2": (2, by_transformers(fsdp_size=2, ep_size=2)),
    "fsdp4": LAYOUTS["fsdp4"],
    "ep2 efsdp2": (4, by_transformers(fsdp_size=4, ep_size=2)),
    "ep4": (4, by_transformers(fsdp_size=4, ep_size=4)),
    "fsdp2 tp2 ep2": (4, by_transformers(fsdp_size=2, tp_size=2, ep_size=2)),
    "by hand": (4, by_hand),
}
MODELS = {"qwen3_tied": LAYOUTS, "llama": LAYOUTS, "qwen3_moe": EXPERTS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("boxes")
    for name in MODELS:
        config: Any = tiny_config(name)
        config.vocab_size, config.num_attention_heads, config.num_key_value_heads = 512, 4, 4
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    return root


class Bytes(TorchDispatchMode):
    """Counts the bytes of the tensors that go through collectives on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            leaves = tree_leaves(args)
            self.total += sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        return func(*args, **(kwargs or {}))


def build(folder: Path, layout: tuple[int, Callable[[Path], Any]]) -> tuple[Any, DCPState]:
    model = layout[1](folder)
    return model, DCPState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def step(state: DCPState) -> None:
    """Give every parameter a gradient that depends on its values, and take a step."""
    assert state.optimizer is not None
    for param in state.model.parameters():
        param.grad = param.detach() * 0.5 + 0.25
    state.optimizer.step()
    state.optimizer.zero_grad()


def values(state: DCPState) -> dict[str, torch.Tensor]:
    return {name: whole_tensor(tensor) for name, tensor in state.live_tensors().items()}


def fingerprint(state: DCPState) -> tuple[Any, ...]:
    """Sample, and sum over every bit."""
    tensors = state.live_tensors()
    sums = gather_objects(sums_of(tensors))
    total = {name: sum(rank[name] for rank in sums) % 2**64 for name in tensors}
    return combine_samples(gather_objects(sample_state(tensors))), total


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _saves(
    rank: int, world_size: int, folder: Path, out: Path, layouts: list[str]
) -> dict[str, dict[str, Any]]:
    """Save after a step on each mesh, blocking and in the background. Returns the values, and what
    went around.
    """
    return {layout: _save(folder, out / layout, layout) for layout in layouts}


def _save(folder: Path, out: Path, layout: str) -> dict[str, Any]:
    model, state = build(folder, MODELS[folder.name][layout])
    step(state)
    step(state)
    tensors, ranks = dict(flatten({"dcp": state.state_dict()})), dist.get_world_size()
    assert ranks == 1 or agree_on(vote_on(describe_state(tensors, None), tensors), None), (
        "no rank plans for all"
    )
    with Bytes() as moved:
        save_dcp(out / "dcp", state)
        save_hf(model, out / "hf")
    held = sum(local_tensor(tensor).nbytes for tensor in model.state_dict().values())
    assert moved.total < held / 2, "no weight goes to another rank"
    group: Any = new_background_group(None, 60)
    background = BackgroundSave(model, group, 60)
    for kind in ("dcp", "hf"):
        background.begin(
            SaveLoadMeta(str(out / f"later_{kind}"), kind, with_optim=kind == "dcp"), state
        )
        background.wait()
    background.close()
    found = {"values": values(state), "fingerprint": fingerprint(state)}
    if dist.get_rank() == 0:
        twin = plain(folder)
        weights = {
            name: value for name, value in found["values"].items() if name.startswith("model.")
        }
        twin.load_state_dict(
            {name.removeprefix("model."): value for name, value in weights.items()}, strict=False
        )
        twin.save_pretrained(out / "reference")
    return found


def _loads(rank: int, world_size: int, folder: Path, out: Path, layouts: list[str]) -> None:
    """Load what each mesh saved into each mesh, with Holdfast and with torch."""
    saved = torch.load(out / "saved.pt", weights_only=False)
    for layout in layouts:
        model, state = build(folder, MODELS[folder.name][layout])
        for saved_by, expected in saved.items():
            for kind in ("dcp", "torch", "hf"):
                for tensor in state.live_tensors().values():
                    local_tensor(tensor).detach().zero_()
                where, case = out / saved_by, (layout, saved_by, kind)
                if kind == "dcp":
                    load_dcp(where / "dcp", state)
                elif kind == "torch":
                    live = state.state_dict()
                    dcp.load(
                        {"dcp": {key: live[key] for key in ("model", "optim")}},
                        checkpoint_id=out / saved_by / "dcp",
                    )
                else:
                    load_hf(model, where / "hf")
                found = values(state)
                wrong = [
                    name
                    for name, value in expected["values"].items()
                    if not torch.equal(found[name], value)
                ]
                assert not [name for name in wrong if kind != "hf" or name.startswith("model.")], (
                    layout,
                    saved_by,
                    kind,
                )
                if kind != "hf":
                    assert fingerprint(state) == expected["fingerprint"], case


def by_ranks(layouts: Iterable[str], of: dict[str, Any]) -> dict[int, list[str]]:
    return {
        ranks: [name for name in layouts if of[name][0] == ranks]
        for ranks in {of[name][0] for name in layouts}
    }


def check(folder: Path, out: Path, saved_by: list[str], loaded_by: list[str]) -> None:
    """Save on some meshes, and load each of that on others."""
    layouts, saved = MODELS[folder.name], dict[str, Any]()
    for ranks, names in by_ranks(saved_by, layouts).items():
        reports = run_ranks(_saves, ranks, folder, out, names)
        saved |= reports[0]
        assert all(
            report[name]["fingerprint"] == saved[name]["fingerprint"]
            for report in reports
            for name in names
        )
    for name in saved_by:
        files = [contents(out / name / kind) for kind in ("hf", "later_hf", "reference")]
        assert files[0] == files[1] == files[2], name
        assert saved[name]["fingerprint"] == saved[saved_by[0]]["fingerprint"], (
            "the same steps on every mesh"
        )
    torch.save(saved, out / "saved.pt")
    for ranks, names in by_ranks(loaded_by, layouts).items():
        run_ranks(_loads, ranks, folder, out, names, timeout_s=300)


@pytest.mark.parametrize(
    ("name", "saved_by", "loaded_by"),
    [("llama", "tp2", "fsdp2"), pytest.param("qwen3_moe", "ep2", "fsdp2", marks=pytest.mark.slow)],
)
def test_checkpoints_of_a_mesh_load_into_shards_and_back(
    folders: Path, tmp_path: Path, name: str, saved_by: str, loaded_by: str
) -> None:
    check(folders / name, tmp_path, [saved_by, loaded_by], [loaded_by, saved_by])


@pytest.mark.slow
@pytest.mark.timeout(400)  # 300 loads
@pytest.mark.parametrize("name", MODELS)
def test_checkpoints_of_every_mesh_load_into_every_mesh(
    folders: Path, tmp_path: Path, name: str
) -> None:
    check(folders / name, tmp_path, list(MODELS[name]), list(MODELS[name]))


def _refusals(rank: int, world_size: int, folder: Path, out: Path) -> None:
    """Tensor parallelism of fused experts gives a rank two runs of rows of each expert."""
    model, state = build(folder, (2, by_transformers(tp_size=2)))
    words = (
        r"a tensor \[4, 16, 16\] is placed as .*_StridedShard.* several runs of rows; .*shard "
        r"experts one by one"
    )
    for action in (
        lambda: save_dcp(out / "dcp", state),
        lambda: save_hf(model, out / "hf"),
        lambda: load_hf(model, folder),
        lambda: load_dcp(out / "good", state),
    ):
        with pytest.raises(ConfigError, match=words):
            action()
    assert not (out / "dcp").exists() and not (out / "hf").exists()


def test_experts_that_are_cut_within_their_rows_are_refused_on_all_ranks(
    folders: Path, tmp_path: Path
) -> None:
    save_dcp(tmp_path / "good", build(folders / "qwen3_moe", (1, plain))[1])
    run_ranks(_refusals, 2, folders / "qwen3_moe", tmp_path)


FROZEN = {
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.norm.weight",
}


def _frozen(rank: int, world_size: int, folder: Path, out: Path, layout: str, saves: bool) -> None:
    """A base that checkpoints leave out is the same on every mesh, for Holdfast's loads and for
    torch's.
    """
    model = MODELS[folder.name][layout][1](folder)
    for name, param in model.named_parameters():
        param.requires_grad = name not in FROZEN
    state = DCPState(model, trainable_only=True)
    if saves:
        save_dcp(out, state)
        return
    load_dcp(out, state)
    dcp.load({"dcp": state}, checkpoint_id=out)
    with torch.no_grad():
        local_tensor(model.get_parameter("model.embed_tokens.weight")).add_(1)
    with pytest.raises(CheckpointMismatchError, match="trained on another base model"):
        load_dcp(out, state)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), slow_but([("fsdp2", "tp2")], [("fsdp2", "tp2"), ("tp2", "fsdp2")])
)
def test_a_frozen_base_is_known_again_on_another_mesh(
    folders: Path, tmp_path: Path, saved_by: str, loaded_by: str
) -> None:
    for layout, saves in ((saved_by, True), (loaded_by, False)):
        run_ranks(_frozen, 2, folders / "llama", tmp_path / "saved", layout, saves)
