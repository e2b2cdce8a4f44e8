"""verl's FSDP engine with Holdfast's checkpoint manager, called like verl's trainer does. Needs
verl.
"""

import os
import signal
import sys
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

pytest.importorskip("verl")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.workers.engine.fsdp import transformer_impl  # type: ignore[import-not-found]

from examples.integrations.tiny import digest as digest_of
from examples.integrations.tiny import tiny_model, tiny_tokenizer
from examples.integrations.verl_fsdp import main
from holdfast.utils.errors import ConfigError
from tests.integrations.processes import run_job, run_killed

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

STEPS = 6


def job(
    folder: Path, kill: str = "", plain: bool = False, n_keep: int = 2, steps: int = STEPS
) -> None:
    """Train, and end with SIGKILL at ``where:count`` on rank 0."""
    where, _, count = kill.partition(":")
    left = [int(count or 0)]

    def at(found: str) -> None:
        if found == where and os.environ["RANK"] == "0":
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    main(folder, plain, n_keep, steps, at)


def digest(folder: Path) -> str:
    return (folder / "digest.txt").read_text()


@cache
def untouched() -> str:
    run_killed(job, folder := Path(mkdtemp()), [], ranks=2)
    return digest(folder)


def saved(folder: Path) -> list[int]:
    return sorted(
        int(path.parent.parent.name.rpartition("_")[2])
        for path in folder.glob("global_step_*/actor/dcp")
    )


@pytest.mark.parametrize("kills", [["named:3"], ["saved:3"], ["saved:2", "saved:1", "named:2"]])
def test_an_engine_killed_ends_with_the_weights_and_moments_of_one_left_alone(
    kills: list[str], tmp_path: Path
) -> None:
    run_killed(job, tmp_path, [(kill,) for kill in kills], ranks=2)
    assert digest(tmp_path) == untouched()
    assert saved(tmp_path) == [STEPS - 2, STEPS - 1]
    assert (
        "writes actor, critic, data.pt and the tracker one after another"
        in (tmp_path / "log").read_text()
    )


def test_the_step_that_the_tracker_names_is_never_removed(tmp_path: Path) -> None:
    """The control: with one step to keep, every start of verl's own manager fails, because it has
    removed that step.
    """
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    run_killed(job, ours, [("saved:4", False, 1)], "", False, 1, ranks=2)
    assert digest(ours) == untouched()
    assert run_job(job, theirs, "saved:4", True, 1, ranks=2) != [0, 0]
    for _ in range(2):
        assert 1 in run_job(job, theirs, "", True, 1, ranks=2)
    assert "FileNotFoundError" in (theirs / "log").read_text()


def test_older_steps_are_removed_after_a_restart_too(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, plain in ((ours, False), (theirs, True)):
        run_killed(job, folder, [("named:4", plain)], "", plain, ranks=2)
    assert saved(ours) == [4, 5]
    left = sorted(path.name for path in theirs.glob("global_step_*") if (path / "actor").exists())
    assert left == [f"global_step_{step}" for step in (2, 3, 4, 5)]


def test_a_flipped_bit_is_refused_where_verls_own_loads_it(tmp_path: Path) -> None:
    for plain, pattern in ((False, "*.distcp"), (True, "model_*rank_0.pt")):
        folder = tmp_path / str(plain)
        run_killed(job, folder, [("named:2", plain)], "", plain, 2, 3, ranks=2)
        (file,) = sorted((folder / "global_step_2" / "actor").rglob(pattern))[:1]
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        codes = run_job(partial(job, plain=plain), folder, ranks=2)
        text = (folder / "log").read_text()
        assert (codes == [0, 0]) == plain and ("CheckpointCorruptError" in text) != plain


def _save_with_tokenizer(folder: Path, names: tuple[str, ...]) -> None:
    manager_of = transformer_impl.FSDPCheckpointManager
    for name in names:
        model = tiny_model()
        fully_shard(model)
        manager = manager_of(
            model=model,
            checkpoint_config={"save_contents": ["model"], "load_contents": ["model"]},
            **{name: tiny_tokenizer()},
        )
        manager.save_checkpoint(str(folder / name / "global_step_0" / "actor"), None, 0, None)


def _save_as_verl_and_as_holdfast(folder: Path) -> None:
    dist.init_process_group("gloo")
    _save_with_tokenizer(folder / "theirs", ("tokenizer",))
    import holdfast.integrations.verl  # noqa: F401

    _save_with_tokenizer(folder / "ours", ("tokenizer", "processing_class"))
    dist.destroy_process_group()


def test_a_tokenizer_under_its_older_name_is_saved_as_verl_saves_it(tmp_path: Path) -> None:
    assert run_job(_save_as_verl_and_as_holdfast, tmp_path, ranks=2) == [0, 0], (
        tmp_path / "log"
    ).read_text()
    theirs = tmp_path / "theirs" / "tokenizer" / "global_step_0" / "actor" / "huggingface"
    names = {path.name for path in theirs.glob("tokenizer*")}
    assert names
    for name in ("tokenizer", "processing_class"):
        ours = tmp_path / "ours" / name / "global_step_0" / "actor" / "huggingface"
        assert names <= {path.name for path in ours.iterdir()}
        for file in names:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes()


def test_the_export_loads_and_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run_killed(job, tmp_path, [("named:2",)], "", False, 2, 4, ranks=2)
    AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_3" / "actor" / "huggingface")
    run_killed(partial(job), tmp_path, [], "", False, 2, 5, ranks=3)
    assert saved(tmp_path) == [3, 4]


VEOMNI = [
    *(
        "arguments",
        "distributed",
        "distributed.parallel_state",
        "distributed.torch_parallelize",
        "models",
    ),
    *(
        "models.auto",
        "models.checkpoint_tensor_loading",
        "optim",
        "utils",
        "utils.seqlen_pos_transform_utils",
    ),
]


def _veomni_saves_and_loads(folder: Path) -> None:
    """VeOmni's engine, with stand-ins for what it imports from there and with VeOmni's mesh: a
    flattened slice.
    """
    dist.init_process_group("gloo")
    sys.modules["veomni"] = MagicMock()
    for name in VEOMNI:
        sys.modules[f"veomni.{name}"] = MagicMock()
    parallel_state: Any = sys.modules["veomni.distributed.parallel_state"]
    parallel_state.get_parallel_state = lambda: state
    state = SimpleNamespace(ep_enabled=False, ep_size=1)
    from verl.workers.engine.veomni import transformer_impl as veomni_impl  # type: ignore[import-not-found]

    veomni_impl.log_gpu_memory_usage = lambda *_, **__: None

    import holdfast.integrations.verl  # noqa: F401

    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_shard", "ulysses", "cp"))
    flat = mesh["dp_shard", "ulysses"]._flatten("dp_shard_sp")

    class Engine(veomni_impl.VeOmniEngine):
        def __init__(self) -> None:
            self.checkpoint_config = {
                "save_contents": ["model", "optimizer"],
                "load_contents": ["model", "optimizer"],
            }
            self.model_config = MagicMock(trust_remote_code=False)
            self.model_config.get_processor.return_value = None
            self.enable_routing_replay = self._is_offload_param = self._is_offload_optimizer = False

        def _build_model_optimizer(self) -> None:
            self.module: Any = fully_shard(tiny_model(), mesh=flat)
            self.optimizer = torch.optim.AdamW(self.module.parameters())
            self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(self.optimizer)

        def to(self, **_: object) -> None:
            pass

    engines = [Engine(), Engine()]
    for engine in engines:
        engine.initialize()
    for param in engines[0].module.parameters():
        param.grad = param.detach() + 1
    engines[0].optimizer.step()
    path = str(folder / "global_step_0" / "actor")
    engines[0].checkpoint_manager.save_checkpoint(path, None, 0, None)
    engines[1].checkpoint_manager.load_checkpoint(path)
    assert digest_of(engines[0].module, engines[0].optimizer) == digest_of(
        engines[1].module, engines[1].optimizer
    )
    state.ep_enabled, state.ep_size = True, 2
    with pytest.raises(ConfigError, match="deals the experts to 2 ranks under the same names"):
        engines[0].initialize()
    dist.destroy_process_group()


def test_veomnis_engine_saves_and_loads_unless_it_deals_out_experts(tmp_path: Path) -> None:
    assert run_job(_veomni_saves_and_loads, tmp_path, ranks=2) == [0, 0], (
        tmp_path / "log"
    ).read_text()
