"""Rounds, ratios, tables and comparisons, with made-up numbers."""

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.compare import BASELINE, compare, main, make_baseline
from benchmarks.harness import Figure, Options, Spread, interleave, over, read_figures, save_results
from benchmarks.limits import WarmBuffer
from benchmarks.model import _count, model_config
from benchmarks.plot import CHARTS, draw
from benchmarks.report import BEGIN, END, PAGE, PLOT, _explained, put_into
from benchmarks.report import main as report
from benchmarks.run import BENCHMARKS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def document(options: Options, tmp_path: Path) -> dict[str, Any]:
    figures = [
        Figure(
            "a.stall",
            "stall / copy",
            "lower",
            {"Holdfast": [1.0, 1.1, 1.2], "rival": [5.0, 5.0, 6.0]},
        ),
        Figure(
            "b.speed", "bytes / limit", "higher", {"Holdfast": [0.8, 0.9, 0.85]}, {"Holdfast": 0.9}
        ),
        Figure("c.nothing", "memory / shard", "lower", {"Holdfast": [0.0]}),
    ]
    return save_results(tmp_path / "results.json", options, figures, {"a": 1.0})


def test_ways_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []

    def way(name: str) -> dict[str, float]:
        calls.append(name)
        return {"s": float(len(calls))}

    times = interleave({"a": lambda: way("a"), "b": lambda: way("b")}, rounds=2)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert times == {"s": {"a": [4.0, 5.0], "b": [3.0, 6.0]}}
    assert list(times["s"]) == ["a", "b"]


def test_ratios_are_taken_within_a_round() -> None:
    seconds = {"limit": [1.0, 2.0], "way": [3.0, 4.0]}
    assert over("limit", seconds) == {"way": [3.0, 2.0]}
    assert over("limit", seconds, inverse=True) == {"way": [1 / 3, 0.5]}


def test_spread_is_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_target_is_met_on_the_better_side(document: dict[str, Any]) -> None:
    figure = Figure("f", "t", "lower", {"Holdfast": [1.2]}, {"Holdfast": 1.2})
    assert figure.met("Holdfast")
    assert not read_figures(document)[1].met("Holdfast")


def test_figures_come_back_from_the_file(document: dict[str, Any], options: Options) -> None:
    again = json.loads((options.scratch / "results.json").read_text())
    assert again == document
    assert read_figures(again)[0].samples["rival"] == [5.0, 5.0, 6.0]


def test_a_run_compared_with_itself_has_not_changed(document: dict[str, Any]) -> None:
    changes = compare(make_baseline(document), document)
    assert [change.figure for change in changes] == [
        "a.stall: Holdfast",
        "b.speed: Holdfast",
        "c.nothing: Holdfast",
    ]
    assert all(change.worse == 1.0 and not change.regressed for change in changes)


@pytest.mark.parametrize(
    ("index", "factor", "regressed"), [(0, 2.0, True), (0, 0.5, False), (1, 0.5, True), (1, 2, 0)]
)
def test_a_figure_that_is_much_worse_is_a_regression(
    document: dict[str, Any], index: int, factor: float, regressed: bool
) -> None:
    baseline, now = make_baseline(document), copy.deepcopy(document)
    now["figures"][index]["samples"]["Holdfast"] = [
        value * factor for value in now["figures"][index]["samples"]["Holdfast"]
    ]
    changes = compare(baseline, now)
    assert [change.regressed for change in changes] == [regressed and i == index for i in range(3)]
    assert changes[index].worse == pytest.approx(2.0 if regressed else 0.5)


def test_a_change_within_the_spread_is_no_regression(document: dict[str, Any]) -> None:
    baseline, now = make_baseline(document), copy.deepcopy(document)
    now["figures"][0]["samples"]["Holdfast"] = [
        0.8,
        1.4,
        2.0,
    ]  # its median is far off, but its quartiles overlap
    assert not any(change.regressed for change in compare(baseline, now))


def test_figures_that_only_one_side_has_are_shown_and_judge_nothing(
    document: dict[str, Any],
) -> None:
    baseline, now = make_baseline(document), copy.deepcopy(document)
    now["figures"][0]["name"] = "a.renamed"
    changes = {change.figure: change for change in compare(baseline, now)}
    assert (
        changes["a.stall: Holdfast"].after is None and changes["a.renamed: Holdfast"].before is None
    )
    assert not any(change.regressed for change in changes.values())


def test_the_command_accepts_compares_and_fails_on_a_regression(
    document: dict[str, Any], tmp_path: Path
) -> None:
    results, baseline = tmp_path / "results.json", tmp_path / "baseline.json"
    arguments = [str(results), "--baseline", str(baseline)]
    assert main([*arguments, "--accept"]) == 0
    assert main(arguments) == 0
    document["figures"][0]["samples"]["Holdfast"] = [10.0, 11.0, 12.0]
    results.write_text(json.dumps(document))
    assert main(arguments) == 1


def test_results_are_put_between_the_marks_of_the_page_again_and_again(
    document: dict[str, Any], tmp_path: Path
) -> None:
    page = tmp_path / PAGE
    page.write_text(f"before\n{BEGIN}what was there{END}after\n")
    report([str(tmp_path / "results.json"), "--docs", str(tmp_path)])
    first = page.read_text()
    assert (
        first.startswith("before\n") and first.endswith("after\n") and "what was there" not in first
    )
    assert "| stall | rival | 5.00 | 5.00 - 5.50 |  |  |" in first
    assert ">= 0.9: NOT met" in first
    report([str(tmp_path / "results.json"), "--docs", str(tmp_path)])
    assert page.read_text() == first
    assert (tmp_path / PLOT).read_text() == draw(read_figures(document))
    with pytest.raises(ValueError, match="has no"):
        put_into("no marks", "results")


def test_a_model_is_as_large_as_asked_for_and_not_much_larger() -> None:
    for parameters in (1e6, 1e8):
        config = model_config(int(parameters))
        assert (
            parameters <= _count(config.hidden_size, config.vocab_size, tied=False) < 2 * parameters
        )


def test_the_warm_buffer_holds_and_moves_what_the_tensors_hold(tmp_path: Path) -> None:
    import torch

    tensors = [
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor(3.0),
        torch.empty(0, 4),
        torch.arange(6).view(2, 3),
    ]
    buffer = WarmBuffer(tensors)
    buffer.copy()
    buffer.write(tmp_path / "file", 7)
    size = 7 + sum(tensor.nbytes for tensor in tensors)
    assert (tmp_path / "file").stat().st_size == size == buffer.n_bytes + 7
    buffer.read(tmp_path / "file", 7)
    for kept, tensor in zip(buffer._kept, tensors, strict=True):
        assert torch.equal(kept, tensor)
    with pytest.raises(RuntimeError, match="ends at byte"):
        buffer.read(tmp_path / "file", 8)


def test_the_page_explains_every_benchmark_and_shows_its_figures() -> None:
    page = (ROOT / "docs" / PAGE).read_text()
    explained, _, rest = page.partition(BEGIN)
    results, _, _ = rest.partition(END)
    for name in BENCHMARKS:
        assert f"`{name}`" in explained, name
        assert f"### {name}\n" in results, name
    assert f"({PLOT})" in page and (ROOT / "docs" / PLOT).is_file()


def test_the_baseline_has_figures_of_every_benchmark() -> None:
    figures = json.loads(BASELINE.read_text())["figures"]
    assert {name.partition(".")[0] for name in figures} == BENCHMARKS.keys()


def test_the_plot_has_the_main_figures_only_and_the_table_all() -> None:
    many = [
        Figure(
            f"save.size.{size}M",
            f"bytes / limit: {size}M parameters",
            "higher",
            {"Holdfast": [1.0]},
        )
        for size in (1, 10)
    ]
    main = Figure("load.throughput", "bytes a second / plain read", "higher", {"Holdfast": [0.4]})
    plot = draw([*many, main])
    assert "load.throughput" in plot and "save.size" not in plot
    ElementTree.fromstring(plot)
    assert list(_explained(many)) == ["- `size.1M`, `size.10M`: bytes / limit (higher is better)."]
    drawn = (ROOT / "docs" / PLOT).read_text()
    assert [name for name in CHARTS if name not in drawn] == [] and drawn.count('class="t"') == len(
        CHARTS
    )
