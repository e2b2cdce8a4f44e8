"""Resume with another number of ranks: equal bits, each sample once, generators of new ranks by a
fixed rule.
"""

import os
import random
import signal
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from holdfast.engine.memory.tensors import flatten
from holdfast.utils.rng import capture_rng, derive_rng, seed_rng
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.recover.ledger import (
    Counting,
    Life,
    Run,
    Step,
    assert_counted_once,
    assert_trained_once,
    handler_of,
    history,
    live,
    newest_step,
    random_run,
)
from tests.recover.runs import Job, make_handler, make_loader, newest, step_info, stream

pytestmark = pytest.mark.timeout(180)

WORLD_SIZES = (2, 1, 3, 4, 2)


def _values(job: Job) -> dict[str, bytes]:
    """Everything but generators: whole parameters and moments, bytes of schedule, hyperparameters
    and counters.
    """
    found, engine = {}, job.engines["default"]
    engine.counters.mesh = {}  # the one entry that says how many ranks there are
    for name, tensor in flatten(engine.dcp_state().state_dict()):
        if not name.startswith("rng."):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = whole.detach().contiguous().numpy().tobytes()
    return found


def _generators() -> dict[str, bytes]:
    return _as_bytes(capture_rng())


def _as_bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


def _stage(rank: int, world_size: int, model: str, root: str, step: int) -> dict[str, Any]:
    """Resume, record the state, train a step, take a snapshot."""
    seed_rng(1000 * step, rank)
    loader, job, handler = make_loader("own", rank, world_size), Job(model), make_handler(root)
    handler.register("meter", job.meter)
    info = handler.load(job.engine, loader)
    assert (info.last_step_info.next().global_step if info else 0) == step
    loaded = {"values": _values(job), "generators": _generators(), "meter": list(job.meter.seen)}
    ids = next(stream(loader))
    job.train(ids)
    generators = _generators()
    assert handler.dump(job.engine, step_info(step), loader, force=True)
    handler.wait()
    assert _generators() == generators, "taking a snapshot drew a number"
    saved = {"values": _values(job), "generators": generators, "meter": list(job.meter.seen)}
    handler.close()
    return {"loaded": loaded, "saved": saved, "ids": ids}


@pytest.mark.slow
def test_a_run_moves_between_one_to_four_ranks_bit_for_bit(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", tiny_qwen3())
    stages, derivation_of = [], {}
    for step, size in enumerate(WORLD_SIZES):
        stages.append(run_ranks(_stage, size, str(tmp_path / "model"), str(tmp_path), step))
        first = torch.load(newest(tmp_path) / "state" / "rank_00000.pt", weights_only=True)["rng"]
        derivation_of[step] = [_as_bytes(derive_rng(first, rank)) for rank in range(4)]
    whole = stream(make_loader("own", 0, 1))
    for stage in stages:
        assert [i for rank in stage for i in rank["ids"]] == next(whole)
    for step, (before, after) in enumerate(pairwise(stages)):
        saved = before[0]["saved"]["values"]
        assert {name.split(".")[0] for name in saved} == {
            "model",
            "optim",
            "param_groups",
            "scheduler",
            "counters",
        }
        for rank, there in enumerate(after):
            assert there["loaded"]["values"].keys() == saved.keys()
            wrong = [
                name for name, value in there["loaded"]["values"].items() if value != saved[name]
            ]
            assert wrong == [], f"rank {rank} after step {step}"
            was_there = rank < len(before)
            expected = (
                before[rank]["saved"]["generators"] if was_there else derivation_of[step][rank]
            )
            assert there["loaded"]["generators"] == expected
            assert there["loaded"]["meter"] == before[rank if was_there else 0]["saved"]["meter"]
        for one, other in pairwise(
            sorted(there["loaded"]["generators"]["torch"] for there in after)
        ):
            assert one != other, "two ranks draw the same numbers"


def test_a_thousand_random_restarts_of_the_loader_lose_and_repeat_nothing() -> None:
    draw, restarts = random.Random(1), 0
    while restarts < 1000:
        run, lives = random_run(draw)
        trained: list[Step] = []
        saved: tuple[int, dict[str, Any]] = (0, run.loaders()[0].state_dict())
        for life in lives:
            restarts += 1
            trained = trained[: saved[0]]
            group = run.loaders(range(life.world_size), life.world_size)
            for loader in group:
                loader.load_state_dict(saved[1])
            for taken, shares in enumerate(zip(*map(run.batches, group), strict=True), start=1):
                assert all(shares), "a rank got no sample"
                trained.append(Step(group[0].epoch, list(chain(*shares))))
                if taken != life.steps and len(trained) % life.freq_steps == 0:
                    saved = (len(trained), group[-1].state_dict())
                if taken == life.steps:
                    break
            else:
                break  # the run is over
        assert_trained_once(run, trained)


def _random_kills(rank: int, world_size: int, root: str, seed: int, kills_wanted: int) -> None:
    """Each life is a process that plays all ranks of a group and is really killed."""
    dist.destroy_process_group()
    draw, kills = random.Random(seed), 0
    for folder in (Path(root) / f"{number:03d}" for number in count()):
        if kills >= kills_wanted:
            return
        folder.mkdir()
        run, lives = random_run(draw)
        for number, life in enumerate(lives):
            start = newest_step(folder) + 1
            status = _in_a_child(run, life, str(folder), number)
            if status == 0:
                break
            assert status == signal.SIGKILL and life.steps is not None, (
                f"a life ended with status {status}"
            )
            assert newest_step(folder) in _possible_outcomes(life, start)
            kills += 1
        steps, counting = history(folder), Counting(run)
        handler_of(run, folder).load(counting.state, *run.loaders())
        assert_trained_once(run, steps)
        assert_counted_once(run, steps, counting.counts())


def _in_a_child(run: Run, life: Life, root: str, number: int) -> int:
    """Run ``life`` in a process and return its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    code = 1
    try:
        live(run, life, root, number, list(range(life.world_size)))
        code = 0
    finally:
        os._exit(code)


def _possible_outcomes(life: Life, start: int) -> set[int]:
    """The steps that may be committed after the kill of a life that began at step ``start``: one,
    or one of two.
    """
    assert life.steps is not None
    last = start + life.steps - 1
    due = [step for step in range(start, last + 1) if (step + 1) % life.freq_steps == 0]
    without = max((step for step in due if step < last), default=start - 1)
    outcomes = {"trained": {without}, "dumping": {without, last}, "dumped": {last}}
    return outcomes[life.moment] if last in due else {without}


@pytest.mark.slow
def test_random_kills_and_restarts_on_other_ranks_train_every_sample_once(tmp_path: Path) -> None:
    run_ranks(_random_kills, 1, str(tmp_path), 5, 40)


def _live_rank(
    rank: int, world_size: int, run: Run, life: Life, root: str, number: int
) -> list[float]:
    assert world_size == life.world_size
    return live(run, life, root, number, [rank])


@pytest.mark.slow
@pytest.mark.parametrize("drop_last", [True, False])
def test_killed_ranks_come_back_in_other_numbers_and_train_samples_once(
    drop_last: bool, tmp_path: Path
) -> None:
    run = Run(samples=29, epochs=3, batch_size=5, seed=11, drop_last=drop_last)  # 29 = 5 x 5 + 4
    lives = [
        Life(2, freq_steps=2, steps=3, moment="trained", victim=1),
        Life(1, freq_steps=1, steps=5, moment="dumping", calls=7),
        Life(3, freq_steps=1, steps=4, moment="dumped", victim=2),
        Life(4, freq_steps=1, steps=3, moment="dumping", calls=4, victim=3),
        Life(2, freq_steps=2),
    ]
    for number, life in enumerate(lives):
        start = newest_step(tmp_path) + 1
        if life.steps is None:
            counts = run_ranks(_live_rank, life.world_size, run, life, str(tmp_path), number)
        else:
            with pytest.raises(
                AssertionError, match=rf"--- rank {life.victim}\nthe process died without a word"
            ):
                run_ranks(
                    _live_rank, life.world_size, run, life, str(tmp_path), number, timeout_s=60
                )
            assert newest_step(tmp_path) in _possible_outcomes(life, start)
    steps = history(tmp_path)
    assert_trained_once(run, steps)
    for rank_counts in counts:
        assert_counted_once(run, steps, rank_counts)
