"""The tables in docs/models-table.md are well-formed, give reasons and are true (all rows: ``make
test-all``).
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers

from tests.engine.architectures import matrix
from tests.engine.architectures.checks import CHECKS, GOOD, LOGITS, NO, NONE, SILENT, YES, Verdict
from tests.engine.architectures.matrix import Verdicts, checks_of, judge
from tests.engine.architectures.page import (
    PAGE,
    SUMMARY,
    other_model_types,
    read,
    render,
    summarise,
)
from tests.engine.architectures.released import model_names, seeing_names

QUICK = {
    "microsoft/Phi-3-mini-128k-instruct": ("starts", "packed = alone", "long = alone"),
    "tencent/Hunyuan-A13B-Instruct": ("starts", "packed = alone", "head"),
    "google/gemma-2-2b": ("starts", "head"),
}
"""Models with rotary factors for two context lengths, with lists in the config, with capped logits.
"""

REPRESENTATIVES = (
    "Qwen/Qwen3-0.6B",
    "zai-org/GLM-4.5",
    "Qwen/Qwen3-Next-80B-A3B-Thinking",
    "biogpt",
)
"""A plain model, one with a router bias that stays float32 in bfloat16, and two that cannot be
packed.
"""


@pytest.fixture(scope="module")
def page() -> dict[str, Verdicts]:
    return read(PAGE.read_text(encoding="utf-8"))[1]


def _check_row(name: str, page: dict[str, Verdicts], checks: Sequence[str] | None = None) -> None:
    found = judge(name, checks)
    silent = {check: verdict.why for check, verdict in found.items() if SILENT in verdict.why}
    assert silent == {}
    assert {check: verdict.word for check, verdict in found.items()} == {
        check: page[name][check].word for check in checks or checks_of(name)
    }, {check: verdict.why for check, verdict in found.items() if verdict.why}


def test_every_row_that_does_not_work_says_why(page: dict[str, Verdicts]) -> None:
    for name, verdicts in page.items():
        for check, verdict in verdicts.items():
            follows = verdict.word == NONE and verdicts["starts"].word != YES and check != "starts"
            assert verdict.word in GOOD or follows or verdict.why, f"{name}: {check}"


def test_page_has_the_released_models_and_all_other_architectures(
    page: dict[str, Verdicts],
) -> None:
    version, _ = read(PAGE.read_text(encoding="utf-8"))
    assert {name for name in page if "/" in name} == {*model_names(), *seeing_names()}
    if version == transformers.__version__:
        assert sorted(name for name in page if "/" not in name) == other_model_types()
    assert {*QUICK, *REPRESENTATIVES} <= page.keys()


def test_page_reads_back_as_it_was_written(page: dict[str, Verdicts]) -> None:
    version, _ = read(PAGE.read_text(encoding="utf-8"))
    assert render(page, version) == PAGE.read_text(encoding="utf-8")
    assert summarise(page, version) == SUMMARY.read_text(encoding="utf-8")
    reasons = [
        Verdict(YES),
        Verdict(NO, "one; two: three"),
        Verdict(NONE, "four / five"),
        Verdict(LOGITS),
    ]
    rows = {}
    for name in ("biogpt", "Qwen/Qwen3-0.6B"):
        rows[name] = dict(zip(page[name], [*reasons, *list(page[name].values())[4:]], strict=True))
    assert read(render(rows))[1] == rows


def test_the_short_page_names_every_model_once_under_its_limits(page: dict[str, Verdicts]) -> None:
    text = SUMMARY.read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    named = [
        name.strip()
        for _, models in rows[1:]
        for name in models.split(",")
        if name.strip() != "models"
    ]
    assert len(named) == len(page)
    assert {name for name in page if "/" not in name} <= set(named)
    limits = {name.strip(): row[0].strip() for row in rows for name in row[1].split(",")}
    assert limits["Qwen/Qwen3-0.6B"] == "none" and limits["google/gemma-2-2b"] == "whole logits, c"


def _dies_in_one_check(
    rank: int, world_size: int, name: str, root: Path, checks: Sequence[str]
) -> None:
    for check in checks:
        if check == "gradients":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            matrix._note(root, check, Verdict(YES))


@pytest.mark.slow
def test_a_check_that_kills_its_process_costs_no_other_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matrix, "_judge", _dies_in_one_check)
    found = matrix.judge("biogpt")
    step = found.pop("gradients")  # the order of the ranks is random
    assert step.word == NO and step.why.startswith("a rank ended or hung: ")
    assert set(found.values()) == {Verdict(YES)} and len(found) == len(CHECKS) - 1


@pytest.mark.parametrize("name", QUICK)
def test_hard_released_models_do_what_the_page_says(name: str, page: dict[str, Verdicts]) -> None:
    _check_row(name, page, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_representatives_do_what_the_page_says(name: str, page: dict[str, Verdicts]) -> None:
    _check_row(name, page)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [name for name in [*model_names(), *seeing_names()] if name not in REPRESENTATIVES]
)
def test_all_released_models_do_what_the_page_says(name: str, page: dict[str, Verdicts]) -> None:
    _check_row(name, page)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name", [name for name in other_model_types() if name not in REPRESENTATIVES]
)
def test_all_other_architectures_do_what_the_page_says(
    name: str, page: dict[str, Verdicts]
) -> None:
    if name not in page:
        pytest.skip(
            "the page is about another transformers; python -m tests.engine.architectures writes "
            "it again"
        )
    _check_row(name, page)
