"""Meshes for tests that run the same on each of them, and checks of the checkpoints that they
share.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.engine import FSDPConfig, OptimizerConfig, SaveLoadMeta
from holdfast.engine.api import Batch
from holdfast.engine.dcp.fingerprint import combine_samples, sample_state
from holdfast.utils.distributed import gather_objects
from tests.engine.test_fsdp_engine import (
    loss_tokens,
    make_batch,
    make_engine,
    nll,
    rows,
    same,
    whole,
)
from tests.helpers import run_ranks

SGD = OptimizerConfig(type="sgd", lr=0.0, gradient_clipping=1e9)
"""Changes nothing, so that many steps can be compared with one reference."""


class Mesh(NamedTuple):
    """A number of ranks, and what they share."""

    ranks: int
    backend: str = "fsdp"
    replicas: int = 1

    def __str__(self) -> str:
        return f"{self.backend} on {self.ranks}" + (
            f" in {self.replicas} copies" if self.replicas > 1 else ""
        )


def mesh_options(backend: str, replicas: int = 1) -> dict[str, Any]:
    """Options of `TrainEngineConfig` for a mesh."""
    return {"backend": backend, "fsdp": FSDPConfig(replicate_size=replicas)}


def engine_on(folder: str | Path, mesh: Mesh, sync: str = "every", **changes: Any) -> Any:
    fsdp = FSDPConfig(replicate_size=mesh.replicas, gradient_sync=sync)
    return make_engine(folder, backend=mesh.backend, fsdp=fsdp, **changes)


def share(rank: int, world_size: int) -> slice:
    """The rows of one of the ranks with different data, of a batch of eight. The first one of
    several has one row, so that it adds dummies.
    """
    cuts = (
        [0, *(1 + 7 * number // (world_size - 1) for number in range(world_size))]
        if world_size > 1
        else [0, 8]
    )
    return slice(cuts[rank], cuts[rank + 1])


def own_rows(engine: Any, batch: Batch | None = None) -> Batch:
    """The rows of this rank."""
    part = share(engine.data_parallel_rank, engine.data_parallel_world_size)
    return rows(make_batch() if batch is None else batch, part)


def fingerprint(engine: Any) -> dict[str, Any]:
    return combine_samples(gather_objects(sample_state(engine.dcp_state().live_tensors())))


# Checkpoints


def metas(out: Path, kind: str) -> list[SaveLoadMeta]:
    """A DCP checkpoint with the state of the optimizer, and a Hugging Face folder."""
    return [
        SaveLoadMeta(str(out / f"{kind}_dcp"), "dcp", with_optim=True),
        SaveLoadMeta(str(out / f"{kind}_hf"), "hf", with_optim=False),
    ]


def weights(engine: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in whole(engine).items() if name.startswith("model.")}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _saves(
    rank: int, world_size: int, folder: str, out: Path, mesh: Mesh, changes: dict[str, Any]
) -> dict[str, Any]:
    """Save after a step, blocking and in the background, and load both again."""
    engine = engine_on(folder, mesh, **changes)
    engine.train_batch(own_rows(engine), nll, loss_tokens)
    engine.set_version(3)
    for meta, later in zip(metas(out, "now"), metas(out, "later"), strict=True):
        engine.save(meta)
        engine.save(later, blocking=False)
        engine.wait_for_save()
    found = {"whole": whole(engine), "fingerprint": fingerprint(engine)}
    _check_loaded(found, _loads(rank, world_size, folder, out, mesh, changes))
    return found


def _loads(
    rank: int, world_size: int, folder: str, out: Path, mesh: Mesh, changes: dict[str, Any]
) -> list[dict[str, Any]]:
    """Load both, each time over another state."""
    engine, exported = (engine_on(folder, mesh, **changes) for _ in range(2))
    found = []
    for kind in ("now", "later"):
        for each, meta in zip((engine, exported), metas(out, kind), strict=True):
            each.train_batch(own_rows(each), nll, loss_tokens)
            each.load(meta)
        assert same(weights(exported), weights(engine)) and engine.get_version() == 3
        found.append({"whole": whole(engine), "fingerprint": fingerprint(engine)})
    return found


def _check_loaded(saved: dict[str, Any], loaded: list[dict[str, Any]]) -> None:
    for found in loaded:
        assert same(found["whole"], saved["whole"]) and found["fingerprint"] == saved["fingerprint"]


def check_loads(
    folder: str | Path, out: Path, saved_by: Mesh, loaded_by: Iterable[Mesh], **changes: Any
) -> None:
    """Save on one mesh, and load on that and on others: every bit is the same, as are both
    exports.
    """
    saved = run_ranks(_saves, saved_by.ranks, str(folder), out, saved_by, changes)[0]
    assert contents(out / "now_hf") == contents(out / "later_hf")
    for mesh in loaded_by:
        for loaded in run_ranks(_loads, mesh.ranks, str(folder), out, mesh, changes):
            _check_loaded(saved, loaded)
