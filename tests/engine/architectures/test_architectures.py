"""The table in docs/models.md is well-formed and gives reasons; what it says is true (all rows: ``make test-all``)."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import transformers

from tests.engine.architectures import matrix
from tests.engine.architectures.checks import CHECKS, NO, NONE, PADDED, SILENT, YES, Verdict
from tests.engine.architectures.matrix import Verdicts, judge
from tests.engine.architectures.page import PAGE, read, render
from tests.engine.architectures.tiny import model_types

REPRESENTATIVES = ("qwen3", "glm4_moe", "biogpt")
"""Everything at its plainest; a router bias that stays float32 in bfloat16; one that cannot be packed."""


@pytest.fixture(scope="module")
def page() -> dict[str, Verdicts]:
    return read(PAGE.read_text(encoding="utf-8"))[1]


def _check_row(model_type: str, page: dict[str, Verdicts]) -> None:
    found = judge(model_type)
    silent = {name: verdict.why for name, verdict in found.items() if SILENT in verdict.why}
    assert silent == {}
    assert {name: verdict.word for name, verdict in found.items()} == {
        name: verdict.word for name, verdict in page[model_type].items()
    }, {name: verdict.why for name, verdict in found.items() if verdict.why}


def test_every_row_that_does_not_work_says_why(page: dict[str, Verdicts]) -> None:
    for model_type, verdicts in page.items():
        for name, verdict in verdicts.items():
            follows = verdict.word == NONE and verdicts["starts"].word != YES and name != "starts"
            assert verdict.word in (YES, PADDED) or follows or verdict.why, f"{model_type}: {name}"


def test_page_has_the_architectures_of_the_transformers_that_it_names(page: dict[str, Verdicts]) -> None:
    version, _ = read(PAGE.read_text(encoding="utf-8"))
    if version == transformers.__version__:
        assert sorted(page) == model_types()
    assert set(REPRESENTATIVES) <= page.keys() & set(model_types())


def test_page_reads_back_as_it_was_written(page: dict[str, Verdicts]) -> None:
    version, _ = read(PAGE.read_text(encoding="utf-8"))
    assert render(page, version) == PAGE.read_text(encoding="utf-8")
    reasons = [Verdict(YES), Verdict(NO, "one; two: three"), Verdict(NONE, "four / five")]
    row = dict(zip(page["qwen3"], [*reasons, *list(page["qwen3"].values())[3:]], strict=True))
    assert read(render({"qwen3": row}))[1] == {"qwen3": row}


def _dies_in_one_check(rank: int, world_size: int, model_type: str, root: Path, names: Sequence[str]) -> None:
    for name in names:
        if name == "step":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            matrix._note(root, name, Verdict(YES))


@pytest.mark.slow
def test_a_check_that_kills_its_process_costs_no_other_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "_judge", _dies_in_one_check)
    found = matrix.judge("qwen3")
    step = found.pop("step")  # which rank is heard first is a matter of luck
    assert step.word == NO and step.why.startswith("a rank ended or hung: ")
    assert set(found.values()) == {Verdict(YES)} and len(found) == len(CHECKS) - 1


@pytest.mark.slow
@pytest.mark.parametrize("model_type", REPRESENTATIVES)
def test_representatives_do_what_the_page_says(model_type: str, page: dict[str, Verdicts]) -> None:
    _check_row(model_type, page)


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", [name for name in model_types() if name not in REPRESENTATIVES])
def test_all_architectures_do_what_the_page_says(model_type: str, page: dict[str, Verdicts]) -> None:
    if model_type not in page:
        pytest.skip("of another transformers than the page is; python -m tests.engine.architectures writes it anew")
    _check_row(model_type, page)
