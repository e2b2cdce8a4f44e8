"""The README is true: its code runs, its links and its tree lead somewhere."""

import re
from pathlib import Path
from typing import Any

from examples.copy_task import CopyPrompts, sft_collate
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def _run_block(rank: int, world_size: int, code: str, folder: str) -> None:
    scope: dict[str, Any] = {
        "dataset": CopyPrompts(32, seed=0),
        "collate": sft_collate,
        "model_folder": f"{folder}/model",
        "fileroot": f"{folder}/runs",
    }
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["step"].global_step == 8


def test_the_embedding_example_runs_on_two_ranks(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    write_model_folder(tmp_path / "model", tiny_qwen3())
    run_ranks(_run_block, 2, code.replace("freq_steps=10", "freq_steps=3"), str(tmp_path))
    recover = tmp_path / "runs" / "experiment" / "trial" / "recover"
    assert sorted(path.name for path in recover.glob("global_step_*")) == ["global_step_5", "global_step_7"]
    run_ranks(_run_block, 2, code, str(tmp_path))  # the same command again: finished, and nothing is trained


def test_links_lead_to_files() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).is_file()] == []


def test_the_tree_names_every_file_of_engine_and_recover_and_no_other() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().partition("## The tree")[2]
    for package in ("engine", "recover"):
        section = re.search(rf"^    {package}/ .*?(?=^    \w)", tree, re.DOTALL | re.MULTILINE)
        assert section is not None
        folder, named = "", set()
        for indent, name in re.findall(r"^    ( +)(\w+(?:/|\.py))", section[0], re.MULTILINE):
            if name.endswith("/"):
                folder = name
            else:
                named.add(name if len(indent) == 2 else folder + name)
        listed = {path.relative_to(ROOT / package).as_posix() for path in (ROOT / package).rglob("*.py")}
        assert named == {name for name in listed if not name.startswith(("rl/", "compat/")) and "__init__" not in name}
