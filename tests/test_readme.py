"""README and docs are true: code runs, and links, paths, commands, figures and messages exist."""

import ast
import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.copy_task import make_tokenizer
from holdfast.recover import RecoverConfig
from tests.engine.models import tiny_qwen3, write_model_folder
from tests.helpers import run_ranks
from tests.integration.sft_runs import kill_tree
from tests.limits import stretched

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
N_STEPS = 20
"""Steps of the script."""
PATH = r"`((?:benchmarks|docs|examples|tests)/[\w/.-]+|(?:engine|recover|utils)/[\w/.-]+\.py)`"
"""A path of the repository. ``recover/`` is also a folder of every run."""


def _script() -> str:
    """The complete script of the page about saving. The README shows its loop."""
    page = (DOCS / "saving-and-resuming.md").read_text()
    (code,) = re.findall(
        r"<!-- tests/test_readme.py runs this -->\n```python\n(.*?)```", page, re.DOTALL
    )
    return code


def _run_script(rank: int, world_size: int, folder: Path, code: str) -> None:
    """Run the script on this rank, whose output goes to a file, and expect that it trains to the
    end.
    """
    with open(folder / f"printed_by_{rank}.txt", "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    scope: dict[str, Any] = {}
    exec(compile(code, "train.py", "exec"), scope)
    assert scope["step"].global_step == N_STEPS


def _printed(folder: Path) -> list[str]:
    """Lines of both ranks. Rank 1 must print none."""
    assert (folder / "printed_by_1.txt").read_text() == ""
    return (folder / "printed_by_0.txt").read_text().splitlines()


def _assert_steps(printed: Iterable[str], first: int, last: int) -> None:
    """Check that there is one line for each step and no other."""
    steps = [re.fullmatch(r"step (\d+): loss \d+\.\d{4}", line) for line in printed]
    assert [step and int(step[1]) for step in steps] == list(range(first, last + 1)), printed


def _assert_resumed(line: str, trial: Path) -> int:
    """Check the line that every second life prints. Returns the step that it names."""
    resumed = re.fullmatch(r"resumed at step (\d+) from (\S+) in \d+\.\d{3} s", line)
    assert resumed is not None, line
    step = int(resumed[1])
    assert resumed[2] == str(trial / "recover" / f"global_step_{step - 1}")
    return step


def _changed(code: str, old: str, new: object) -> str:
    """The block with another value in place of one that occurs once."""
    assert code.count(old) == 1, old
    return code.replace(old, str(new))


def _with_own_model(code: str, folder: Path) -> str:
    """The script with a tiny model in ``folder``."""
    write_model_folder(folder / "model", tiny_qwen3())
    make_tokenizer().save_pretrained(folder / "model")
    return _changed(code, "Qwen/Qwen3-0.6B", folder / "model")


@pytest.mark.slow
def test_the_script_prints_its_steps_and_where_it_resumes_once_for_two_ranks(
    tmp_path: Path,
) -> None:
    code = _with_own_model(_script(), tmp_path)
    code = _changed(code, '"runs"', f'"{tmp_path / "runs"}"')
    code = _changed(code, "freq_steps=2", "freq_steps=3")
    trial = tmp_path / "runs" / "experiment" / "trial"
    end_of_loop = "        step = step.next()\n"
    killed = _changed(
        code,
        end_of_loop,
        end_of_loop + "        if step.global_step == 7:\n            os.kill(os.getpid(), 9)\n",
    )
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(_run_script, 2, tmp_path, "import os\n" + killed)
    _assert_steps(_printed(tmp_path), 0, 6)
    run_ranks(_run_script, 2, tmp_path, code)
    resumed, *steps = _printed(tmp_path)
    _assert_steps(steps, _assert_resumed(resumed, trial), N_STEPS - 1)
    names = sorted(path.name for path in (trial / "recover").glob("global_step_*"))
    assert names == ["global_step_17", "global_step_19"]
    run_ranks(
        _run_script, 2, tmp_path, code
    )  # the same command again: the run is finished and trains nothing
    (resumed,) = _printed(tmp_path)
    assert _assert_resumed(resumed, trial) == N_STEPS


@pytest.mark.slow
def test_the_command_of_the_page_prints_each_line_once_in_both_lives(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_with_own_model(_script(), tmp_path))
    _assert_steps(_torchrun(tmp_path, killed_after=12), 0, 12)
    resumed, *steps = _torchrun(tmp_path)
    _assert_steps(
        steps, _assert_resumed(resumed, tmp_path / "runs" / "experiment" / "trial"), N_STEPS - 1
    )


def _torchrun(folder: Path, killed_after: int | None = None) -> list[str]:
    """Run the command of the page, up to the line of a step. Returns what the ranks printed."""
    job = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node=2",
            "train.py",
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(stretched(60), kill_tree, (job,))
    timer.start()
    printed = []
    for line in job.stdout or ():
        printed.append(line.rstrip())
        if line.startswith(f"step {killed_after}:"):
            kill_tree(job)
            break
    timer.cancel()
    assert job.wait(timeout=stretched(20)) == (0 if killed_after is None else -signal.SIGKILL), (
        printed
    )
    return printed


def test_the_code_of_the_readme_is_a_part_of_that_script() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = [line.partition("  #")[0] for line in _script().splitlines()]
    assert [line for line in shown.splitlines() if line.partition("  #")[0] not in script] == []
    assert len(shown.splitlines()) <= 12


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def _text(page: Path) -> str:
    """The page without its code, where brackets are no links."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "code", text)


@cache
def _anchors(page: Path) -> set[str]:
    """Link targets of the headings of a page, on the repository's host and on the site."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", _text(page)) if "://" not in link]
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
        if page.parent == DOCS and target.parent != DOCS:
            broken.append(f"{link}: the site has docs/ only; write the path as code")
    assert broken == []


def test_every_page_is_linked_from_the_readme_and_the_sites_start() -> None:
    pages = {page.name for page in PAGES if page.parent == DOCS} - {"index.md"}
    assert set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README)) == pages
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text())) == pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_backticks_exist(page: Path) -> None:
    paths = re.findall(PATH, page.read_text())
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_targets_and_scripts_that_exist(page: Path) -> None:
    text, makefile = page.read_text(), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE))
    named = re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE)
    assert [name for name in named if name not in targets] == []
    scripts = re.findall(r"\.venv/bin/\S+ (?:-\S+ )*((?:examples|tests)/\S+\.py)", text)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_the_readme_names_the_wheel_python_and_extras_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"dist/{project['name']}-{project['version']}-py3-none-any.whl[ray]" in README
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README
    extras = README.partition("Extras: ")[2].partition("\n\n")[0]
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in extras] == []


def test_quoted_output_of_the_demo_is_in_its_source() -> None:
    demo = (ROOT / "examples" / "demo.py").read_text()
    block = README.partition("make demo     #")[2].partition("`make test`")[0]
    for words in (
        "final mean reward",
        "rewards over steps",
        "left alone  ",
        "killed twice",
        "bit-identical",
    ):
        assert words in block and words in demo
    headings = re.search(r"Table\((.*?)\n    \)", demo, re.DOTALL)
    assert headings is not None
    for word in re.findall(r"\w+", headings[1].replace(r"\n", " ")):
        assert word in block


def _rows(text: str) -> list[list[str]]:
    """The cells of the rows of tables, headings and rulers included."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


SAVES = ["Holdfast dump", "AReaL dcp.save", "verl torch.save", None, "torch async_save"]
WAYS = {
    "`save_stall`": ("blocking", SAVES),
    "`save_stall`, row `step`": ("step", SAVES),
    "`save`": ("throughput", SAVES),
    "`load`": (
        "throughput",
        ["Holdfast engine.load", "AReaL dcp.load", "verl torch.load", None, None],
    ),
}
"""Benchmark in the README's row -> its figure, and the way in each of the row's columns."""


def test_the_figures_of_the_comparison_are_those_of_the_benchmarks() -> None:
    results = (DOCS / "performance.md").read_text().partition("<!-- results")[2]
    rows = _rows(README.partition("## Comparison")[2].partition("\n## ")[0])[1:]
    assert len(rows) == 9
    shown = set()
    for row in rows:
        benchmark = re.fullmatch(r"benchmark (`(\w+)`.*)", row[-1])
        if benchmark is None:
            path = re.fullmatch(r"`(tests/\S+\.py)`", row[-1])
            assert path is not None and (ROOT / path[1]).is_file(), row
            continue
        if benchmark[2] == "goodput":
            continue  # see the next test
        shown.add(name := benchmark[1])
        measured = _rows(results.partition(f"### {benchmark[2]}\n")[2].partition("\n### ")[0])
        figure, ways = WAYS[name]
        for way, cell in zip(ways, row[1:-1], strict=True):
            found = [_as_in_the_readme(line) for line in measured if line[:2] == [figure, way]]
            expected = ["-"] if way is None else found
            assert [cell.partition(",")[0]] == expected, f"{name}: {way}: the README says {cell}"
    assert shown == set(WAYS)


def test_the_figures_of_the_job_under_kills_are_those_of_the_benchmark() -> None:
    page = (DOCS / "performance.md").read_text().partition("### Under kills")[2]
    measured = {}
    for line in _rows(page.partition("\n### ")[0]):
        if line[0] in ("holdfast", "areal"):
            measured[line[0], line[1]] = line
    (row,) = (row for row in _rows(README) if row[-1] == "benchmark `goodput`")
    for way, cell in (("holdfast", row[1]), ("areal", row[2])):
        for mean_s, shown in zip(("20", "40"), cell.split("Every 40 s"), strict=True):
            line = measured[way, mean_s]
            share = f"{float(line[5].rstrip('%')):.0f} %"
            assert f"{share}, {line[7]}, {line[8]}" in shown, line


def _as_in_the_readme(line: list[str]) -> str:
    """Seconds and ratio of a row of the results: ``0.0302 s (0.289)``."""
    ratio, seconds = line[2], line[4]
    return f"{seconds} s ({ratio})" if seconds else ratio


def test_every_guarantee_names_a_test() -> None:
    rows = _rows((DOCS / "guarantees.md").read_text())[1:]
    assert len(rows) >= 29
    assert [row[0] for row in rows if not re.search(r"`tests/\S+\.py`", row[1])] == []


def test_the_table_of_the_configuration_has_every_key_and_no_other() -> None:
    page = (
        (DOCS / "saving-and-resuming.md")
        .read_text()
        .partition("## Configuration")[2]
        .partition("\n## ")[0]
    )
    named = {key for row in _rows(page) for key in re.findall(r"`(\w+)`", row[0])} - {"recover"}
    assert named == {field.name for field in fields(RecoverConfig)}


def _messages() -> list[str]:
    """All texts in the sources, with a NUL for each placeholder."""
    found = []
    for package in ("engine", "integrations", "recover", "utils"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        part.value if isinstance(part, ast.Constant) else "\0"
                        for part in node.values
                    ]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%(?:\.\d+)?[srdfg]", "\0", node.value))
    return found


def test_messages_on_the_pages_about_errors_are_in_the_sources() -> None:
    page = (DOCS / "troubleshooting.md").read_text().partition("## Exit codes")[0]
    page += (DOCS / "servers-reference.md").read_text().partition("## Errors")[2]
    sources = _messages()
    named = [row[0][1:-1] for row in _rows(page) if row[0].startswith("`")]
    assert len(named) > 40
    missing = []
    for message in named:
        pieces = [piece.strip() for piece in message.split("...")]
        pattern = re.compile(".*?".join(map(re.escape, pieces)), re.DOTALL)
        likely = (source for source in sources if all(piece in source for piece in pieces))
        if not any(pattern.search(source) for source in likely):
            missing.append(message)
    assert missing == [], (
        "reworded? the page quotes messages as they are printed, with ... for what is filled in"
    )


def test_the_four_paths_of_the_architecture_name_their_files() -> None:
    page = (DOCS / "architecture.md").read_text()
    for path in ("dump", "load", "train_batch", "publish"):
        section = page.partition(f"### `{path}`\n")[2].partition("\n### ")[0]
        steps = re.findall(r"^(\d+)\. `([\w/]+\.py)`: ", section, re.MULTILINE)
        assert len(steps) >= 5 and [int(number) for number, _ in steps] == list(
            range(1, len(steps) + 1)
        ), path
        assert [name for _, name in steps if not (ROOT / name).is_file()] == []


def test_every_package_is_in_the_architecture_and_no_other() -> None:
    table = (DOCS / "architecture.md").read_text().partition("## Packages")[2].partition("\n## ")[0]
    described = [row[0].strip("`/") for row in _rows(table) if row[0].startswith("`")]
    roots = ("engine", "integrations", "recover", "utils")
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for root in roots
        for path in (ROOT / root).rglob("__init__.py")
    }
    assert sorted(described) == sorted(packages)
