"""Commands and exports with URLs of real servers."""

from pathlib import Path

import pytest
import torch

from holdfast.engine import FSDPEngine, SaveLoadMeta
from holdfast.utils.errors import CheckpointExistsError
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.recover.cli.commands import answer, holdfast
from tests.recover.mirrors import contents, listing, storage
from tests.recover.runs import make_engine, run_until
from tests.storage.conftest import Place

pytestmark = pytest.mark.timeout(200)
ALL = pytest.mark.parametrize("place", ["hdfs", "webhdfs", "s3"], indirect=True)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> FSDPEngine:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder, tiny_qwen3())
    return make_engine(str(folder))


@ALL
def test_an_export_to_a_url_has_the_bytes_of_one_to_a_folder(
    place: Place, engine: FSDPEngine, tmp_path: Path
) -> None:
    url = f"{place.url}/hf"
    for path in (str(tmp_path / "hf"), url):
        engine.save(SaveLoadMeta(path, "hf", with_optim=False))
    fs, root = storage(url)
    there = {name: fs.cat_file(f"{root}/{name}") for name in listing(url)}
    assert there == contents(tmp_path / "hf")
    with pytest.raises(CheckpointExistsError, match=f"{url} has a config.json"):
        engine.save(SaveLoadMeta(url, "hf", with_optim=False))


@ALL
def test_commands_take_its_urls(place: Place, tmp_path: Path) -> None:
    digests = run_until(tmp_path, 4, mirror_url=place.url)
    run = tmp_path / "e" / "t"
    url = f"{place.url}/e/t"

    # The run knows its mirror, with its host.
    found = answer("mirror", "ls", run)
    assert found["url"] == url
    assert found["copies"][0] == {"step": 3, "copy": "complete", "here": True}
    listed = answer("ls", url)
    assert listed["generations"][0]["step"] == 3
    code, out, err = holdfast("show", f"{url}@3")
    assert code == 0 and f"{url}/global_step_3" in out, err
    code, out, err = holdfast("verify", url)
    assert code == 0 and "3" in out, err
    assert holdfast("diff", f"{url}@3", f"{run}@3")[0] == 0

    # Another place for all, and back from it.
    other = f"{place.url}/backup"
    assert len(answer("mirror", "push", run, "--all", "--url", other)["copied"]) >= 2
    pulled = answer("mirror", "pull", other, tmp_path / "new" / "e" / "t")
    assert pulled["fetched"][0]["step"] == 3
    folder = tmp_path / "new" / "e" / "t" / "recover" / "global_step_3"
    assert contents(folder) == contents(run / "recover" / "global_step_3")
    assert run_until(tmp_path / "new", 5, first=4) and digests
