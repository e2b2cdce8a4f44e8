"""Information for a host before and after `load`: the step to be restored, and the restored
generators.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from holdfast.engine.api import FinetuneSpec
from holdfast.recover import RecoverHandler
from holdfast.utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
)
from holdfast.utils.rng import seed_rng
from tests.helpers import run_ranks
from tests.limits import stretched
from tests.recover.runs import SPEC, Tiny, draw, make_handler, names, newest, run_until, step_info

pytestmark = pytest.mark.timeout(60)


def files(root: Path) -> dict[str, tuple[bytes, int]]:
    """Path -> bytes and modification time of every file."""
    found = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return {
        str(path.relative_to(root)): (path.read_bytes(), path.stat().st_mtime_ns) for path in found
    }


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def mirrored(root: Path, **options: Any) -> RecoverHandler:
    return make_handler(root / "run", mirror_url=f"file://{root}/mirror", **options)


# peek


def test_the_step_that_load_restores_is_known_before_there_is_an_engine(tmp_path: Path) -> None:
    assert make_handler(tmp_path).peek() is None and list(tmp_path.iterdir()) == []
    run_until(tmp_path, 3)
    before = files(tmp_path)
    handler = make_handler(tmp_path)
    assert handler.peek() == step_info(2) and files(tmp_path) == before
    info = handler.load(Tiny().state)
    assert info and info.last_step_info == step_info(2)


def test_peek_knows_the_mode_and_the_generation_to_go_back_to(tmp_path: Path) -> None:
    run_until(tmp_path, 4, max_ckpt_to_keep=None)
    wanted = str(newest(tmp_path).with_name("global_step_1"))
    assert make_handler(tmp_path, mode="off").peek() is None
    assert make_handler(tmp_path, resume_path=wanted).peek() == step_info(1)
    run_until(tmp_path, 3, first=2, resume_path=wanted)
    assert make_handler(tmp_path, resume_path=wanted).peek() == step_info(2), (
        "it has gone on from there"
    )
    with pytest.raises(CheckpointNotFoundError, match="mode is 'must', but"):
        make_handler(tmp_path / "elsewhere", mode="must").peek()
    with pytest.raises(CheckpointNotFoundError, match=r"no generation at .*gone"):
        make_handler(tmp_path, resume_path=str(tmp_path / "gone")).peek()
    with pytest.raises(CheckpointMismatchError, match="6 steps an epoch, this one has 10"):
        RecoverHandler(make_handler(tmp_path).config, FinetuneSpec(1, 40, 4)).peek()
    handler = make_handler(tmp_path)
    handler.close()
    with pytest.raises(ConfigError, match="is closed"):
        handler.peek()


def test_generations_with_bad_names_or_sizes_are_skipped_and_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_until(tmp_path, 3)
    (newest(tmp_path) / "default" / "__0_0.distcp").unlink()
    handler = make_handler(tmp_path)
    assert handler.peek() == step_info(1) and names(tmp_path) == ["global_step_1", "global_step_2"]
    info = handler.load(Tiny().state)
    assert info and info.last_step_info == step_info(1)
    handler.close()
    (newest(tmp_path) / "recover_info.json").write_text("{}")
    before = files(tmp_path)
    with pytest.raises(
        CheckpointCorruptError, match=r"holds nothing usable: global_step_1 are damaged"
    ):
        make_handler(tmp_path).peek()
    assert "recover_info.json has 2 bytes" in caplog.text
    assert files(tmp_path) == before


@pytest.mark.parametrize("peeked", [True, False])
def test_a_load_never_restores_another_step_than_peek_has_named(
    tmp_path: Path, peeked: bool
) -> None:
    run_until(tmp_path, 3)
    flip(newest(tmp_path) / "default" / "__0_0.distcp")
    handler, tiny = make_handler(tmp_path), Tiny()
    before = tiny.digest()
    if not peeked:
        info = handler.load(tiny.state)
        assert info and info.last_step_info == step_info(1)
        return
    assert handler.peek() == step_info(2)
    with pytest.raises(
        CheckpointMismatchError, match=r"peek told step 2, .* is step 1.* start again"
    ):
        handler.load(tiny.state)
    assert tiny.digest() == before and names(tmp_path) == ["global_step_1"], "quarantined as usual"
    handler.close()
    with make_handler(tmp_path) as again:
        assert again.peek() == step_info(1) and again.load(tiny.state) is not None


def test_a_run_that_has_begun_since_peek_is_not_resumed_by_surprise(tmp_path: Path) -> None:
    handler = make_handler(tmp_path)
    assert handler.peek() is None
    run_until(tmp_path, 1)
    with pytest.raises(
        CheckpointMismatchError, match=r"peek told that there is nothing, .* is step 0"
    ):
        handler.load(Tiny().state)
    assert handler.peek() == step_info(0) and handler.load(Tiny().state) is not None
    assert handler.load(Tiny().state) is not None, "what was told counts for one load"


def test_a_fresh_run_that_peeked_can_load_once_it_has_snapshots(tmp_path: Path) -> None:
    with make_handler(tmp_path, freq_steps=1) as handler:
        tiny = Tiny()
        assert handler.peek() is None and handler.load(tiny.state) is None
        handler.dump(tiny.state, step_info(0))
        info = handler.load(tiny.state)
        assert info and info.last_step_info == step_info(0)


def test_a_newer_copy_at_the_mirror_is_reported_and_not_fetched(tmp_path: Path) -> None:
    run_until(tmp_path / "run", 3, mirror_url=f"file://{tmp_path}/mirror", mirror_max_to_keep=None)
    for name in names(tmp_path / "run"):
        shutil.rmtree(newest(tmp_path / "run").with_name(name))
    before = files(tmp_path)
    handler = mirrored(tmp_path)
    assert handler.peek() == step_info(2) and files(tmp_path) == before
    info = handler.load(Tiny().state)
    assert info and info.last_step_info == step_info(2)


def test_a_damaged_copy_that_peek_took_for_good_is_not_taken_again(tmp_path: Path) -> None:
    run_until(tmp_path / "run", 2, mirror_url=f"file://{tmp_path}/mirror", mirror_max_to_keep=None)
    copies = tmp_path / "mirror" / "e" / "t"
    assert sorted(path.name for path in copies.iterdir()) == ["global_step_0", "global_step_1"]
    shutil.rmtree(tmp_path / "run")
    flip(copies / "global_step_1" / "default" / "__0_0.distcp")
    with mirrored(tmp_path) as handler:
        assert handler.peek() == step_info(1)
        with pytest.raises(CheckpointMismatchError, match=r"peek told step 1, .* is step 0"):
            handler.load(Tiny().state)
    with mirrored(tmp_path, freq_steps=1) as handler:
        tiny = Tiny()
        assert handler.peek() == step_info(0) and handler.load(tiny.state) is not None
        tiny.step()
        handler.dump(tiny.state, step_info(1))
    shutil.rmtree(tmp_path / "run")
    with mirrored(tmp_path) as handler:
        again = Tiny()
        assert handler.peek() == step_info(1), "the copy that replaced it is good"
        assert handler.load(again.state) is not None and again.digest() == tiny.digest()


def _peeks_before_and_with_a_group(rank: int, world_size: int, root: str) -> list[int]:
    dist.destroy_process_group()
    seen = []
    handler = make_handler(root)
    for _ in range(2):
        step = handler.peek()
        assert step is not None
        seen.append(step.global_step)
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{root}/store", rank=rank, world_size=world_size
            )
            os.chdir("/" if rank else root)
    info = handler.load(Tiny().state)
    assert info is not None
    return [*seen, info.last_step_info.global_step]


def test_peek_works_without_torch_distributed_and_with_it(tmp_path: Path) -> None:
    run_until(tmp_path, 3)
    assert run_ranks(_peeks_before_and_with_a_group, 2, str(tmp_path)) == [[2, 2, 2]] * 2


# restore_rng


def test_a_host_that_draws_after_load_has_the_generators_put_back(tmp_path: Path) -> None:
    seed_rng(3)
    with make_handler(tmp_path, freq_steps=1) as handler:
        tiny = Tiny()
        handler.load(tiny.state)
        handler.dump(tiny.state, step_info(0))
    expected = [draw(), draw()]
    seed_rng(4)
    with make_handler(tmp_path, freq_steps=1) as handler:
        with pytest.raises(ConfigError, match="restore_rng was called before load"):
            handler.restore_rng()
        handler.load(tiny.state)
        for _ in range(2):
            draw()
            handler.restore_rng()
        assert draw() == expected[0]
        handler.dump(tiny.state, step_info(1))
        assert draw() == expected[1]
    with pytest.raises(ConfigError, match="is closed"):
        handler.restore_rng()


def test_a_fresh_run_keeps_the_generators_it_has(tmp_path: Path) -> None:
    for options in ({}, {"mode": "off"}):
        with make_handler(tmp_path, **options) as handler:
            handler.load(Tiny().state)
            seed_rng(5)
            expected = draw()
            seed_rng(5)
            handler.restore_rng()
            assert draw() == expected


def _restored_draws(rank: int, world_size: int, root: str) -> list[Any]:
    seed_rng(7, rank)
    handler, tiny = make_handler(root, freq_steps=1), Tiny()
    seed_rng(7, rank)
    if handler.load(tiny.state) is None:
        handler.dump(tiny.state, step_info(0))
    elif rank == 0:  # each rank for itself
        draw()
        handler.restore_rng()
    return [draw(), draw()]


def test_each_rank_gets_its_generators_back_and_so_does_new_ones(tmp_path: Path) -> None:
    saved = run_ranks(_restored_draws, 1, str(tmp_path))
    first, second = (run_ranks(_restored_draws, 2, str(tmp_path)) for _ in range(2))
    assert first == second and first[0] == saved[0] and first[1] not in (saved[0], first[0])


@pytest.mark.slow
def test_peek_is_quick_enough_for_the_top_of_a_script(tmp_path: Path) -> None:
    """It neither needs nor starts a process group, in a process without other imports."""
    run_until(tmp_path, 1)
    script = f"""
import torch
from holdfast.engine.api import FinetuneSpec
from holdfast.recover import RecoverConfig, RecoverHandler
config = RecoverConfig(experiment_name="e", trial_name="t", fileroot={str(tmp_path)!r})
print(RecoverHandler(config, FinetuneSpec({SPEC.total_train_epochs}, 24, 4)).peek())
assert not torch.distributed.is_initialized()
"""
    found = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=stretched(50),
        check=True,
    )
    assert "global_step=0" in found.stdout
