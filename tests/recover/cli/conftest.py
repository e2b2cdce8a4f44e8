"""One run for all tests of the command line. Tests that change it take a copy."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.recover.storage.generations import GenerationStore
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.once import make_once
from tests.recover.mirrors import BUCKET, S3Server
from tests.recover.runs import Job, make_handler, make_loader, step_info, stream


def _train(rank: int, world_size: int, root: str, first: int, steps: int) -> None:
    options = {
        "freq_steps": 2,
        "hf_freq_steps": 4,
        "keep_every_steps": 4,
        "keep_best": 1,
        "best_metric": "reward",
    }
    loader, job = make_loader("own", rank, world_size), Job(f"{root}/model")
    handler = make_handler(root, mirror_url=f"file://{root}/mirror", **options)
    handler.register("meter", job.meter)
    handler.load(job.engine, loader)
    batches = stream(loader)
    for step in range(first, first + steps):
        job.train(next(batches))
        handler.dump(job.engine, step_info(step), loader, metrics={"reward": 1.0 / (1 + step)})
    if first:
        handler.close()
    else:
        # the ranks end here as if killed, one step after the last generation
        handler._saver.settle()


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks, killed after step 4 and resumed from 3, with generations 1,
    3, 5 and 7.
    """

    def make(root: Path) -> Path:
        write_model_folder(root / "model", tiny_qwen3())
        for first, steps in ((0, 5), (4, 4)):
            run_ranks(_train, 2, str(root), first, steps)
        return root / "e" / "t"

    return make_once(tmp_path_factory, "cli", make)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, which may be changed."""
    return Path(shutil.copytree(finished, tmp_path / "e" / "t"))


@pytest.fixture
def store(run: Path) -> GenerationStore:
    return GenerationStore(run / "recover")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def at_s3(finished: Path, s3: S3Server) -> str:
    """The URL of copies of all generations of the run."""
    from tests.recover.cli.commands import holdfast

    url = f"s3://{BUCKET}/cli/e/t"
    assert holdfast("mirror", "push", finished, "--all", "--url", url)[0] == 0
    return url
