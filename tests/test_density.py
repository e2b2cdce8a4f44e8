"""The density check counts what readers stumble over, and fails on one dense file."""

from pathlib import Path

import pytest

from tests.density import FILE_TOKENS, Density, collect, complaints, main, measure

SPARSE = '''"""A module."""

# The sum of both.
total = first + second

'''
DENSE = "done = dict(zip(map(tuple, a), zip(b, c, strict=True), strict=True))\n"


def test_docstrings_comments_and_blank_lines_are_no_tokens() -> None:
    assert measure(SPARSE) == Density(all_lines=5, lines=2, tokens=5, comments=1)
    assert measure('x = 1\n"""What x is,\nand why."""\n').tokens == 3


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("a, b = x, y\n", "tuple_assignments"),
        ("if n := f():\n    g(n)\n", "walrus"),
        ("a = x if y else z\n", "ternaries"),
        (f"a = {'x' * 100}\n", "over_long"),
    ],
)
def test_each_kind_of_crowded_statement_is_counted(source: str, count: str) -> None:
    assert getattr(measure(source), count) == 1
    assert getattr(measure(SPARSE), count) == 0


def test_results_of_one_call_are_no_tuple_assignment() -> None:
    assert measure("a, b = f()\n").tuple_assignments == 0


def test_one_dense_file_fails_although_all_files_together_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(50):
        (tmp_path / f"sparse_{number}.py").write_text(SPARSE * 40)
    assert main([str(tmp_path)]) == 0
    (tmp_path / "dense.py").write_text(DENSE * 31)
    assert main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "dense.py has 29.0 tokens a line" in printed
    assert "sparse" not in printed


def test_a_file_that_is_too_long_in_tokens_fails(tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text("# A call.\nf(1)\n" * (FILE_TOKENS // 4 + 1))
    assert [line.split("; ")[0] for line in complaints(collect([tmp_path]))] == [
        f"{tmp_path}/long.py has {FILE_TOKENS + 4} tokens"
    ]


def test_dense_files_fail_as_a_group(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(DENSE * 20)
    found = " ".join(complaints(collect([tmp_path])))
    assert "29.0 tokens a line; the limit is 7.2" in found
    assert "lines per comment line" not in found
