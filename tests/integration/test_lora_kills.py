"""GRPO with adapters on Ray: runs killed at different moments end like an undisturbed run."""

import hashlib
from pathlib import Path

import pytest

from examples.chaos import GrpoRun, sha256
from examples.copy_task import write_model_folder
from tests.integration.killed_jobs import (
    finish,
    finish_killed,
    last_generation,
    published_versions,
    stats_of,
)

STEPS = 14
SETTINGS = (f"total_steps={STEPS}", "n_prompts=40", "batch_size=4", "n_samples=4", "trackers=[]")
LORA = ("actor.use_lora=true", "actor.lora_rank=4", "actor.lora_alpha=8", "actor.kl_loss_coef=0.01")
MOMENTS = ((2, 5, 0.0), (3, 6, 0.15), (4, 8, 0.4))
"""Steps after which the trainer and the driver are killed, and the delay."""


def job(folder: Path) -> GrpoRun:
    """A run with a shared base, because a generation names the base's folder."""
    base = folder.parent / "base"
    settings = (
        *SETTINGS,
        *LORA,
        f"actor.path={base}",
        "actor.init_from_scratch=true",
        "recover.freq_steps=2",
    )
    return GrpoRun(folder, *settings)


def adapters_and_moments(run: GrpoRun) -> str:
    """SHA-256 over the files of the engine in the last generation."""
    root = run.trial_root / "recover" / f"global_step_{STEPS - 1}"
    engine = sorted(
        path for path in root.glob("*/*") if path.is_file() and path.parent.name != "state"
    )
    assert any(path.suffix == ".distcp" for path in engine)
    return hashlib.sha256(
        "".join(f"{path.relative_to(root)} {sha256(path)}\n" for path in engine).encode()
    ).hexdigest()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_adapters_moments_and_published_versions_are_the_same_after_kills_at_different_moments(
    tmp_path: Path,
) -> None:
    write_model_folder(tmp_path / "base")
    reference = job(tmp_path / "reference")
    with published_versions(reference) as expected:
        finish(reference)
    assert sorted(expected) == list(range(STEPS)) and all(
        len(digests) == 1 for digests in expected.values()
    )
    assert len({digest for digests in expected.values() for digest in digests}) == STEPS, (
        "each version is another"
    )
    digest, stats = adapters_and_moments(reference), stats_of(reference)
    print(f"untouched: {digest}")
    for trainer_after, driver_after, delay_s in MOMENTS:
        run = job(tmp_path / f"killed_{trainer_after}")
        with published_versions(run) as published:
            finish_killed(run, trainer_after, driver_after, delay_s)
        starts = [attempt["step"] for attempt in run.attempts()]
        print(
            f"killed after {trainer_after} and {driver_after}, began at {starts}: "
            f"{adapters_and_moments(run)}"
        )
        assert starts[1] > 0 and starts[2] > 0, "both were resumed"
        assert adapters_and_moments(run) == digest
        assert last_generation(run, STEPS - 1) == last_generation(reference, STEPS - 1)
        assert sha256(run.final_weights()) == sha256(reference.final_weights())
        assert stats_of(run) == stats
        assert published == expected, "a version is the same weights whenever it is published"
