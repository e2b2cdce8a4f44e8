"""The language check finds each kind of phrase in prose, and reads no code."""

from pathlib import Path

import pytest

from tests.language import LIMIT, PATTERNS, collect, main, passages, rate

GOOD = """Write the shard of this rank.

The file is complete when this returns, because its folder is fsynced last. Later calls do nothing.

Args:
    path: folder of the checkpoint.
"""
BAD = {
    "opens without its noun": "Of one tensor.",
    "'what' for a noun": "Keep what was written.",
    "'that' for a noun": "The step is that of the newest folder.",
    "people for code": "Nothing is left for who reads it.",
    "chain of pronouns": "A part of it.",
    "rare word": "The folder is made anew.",
    "riddle": "The server is told.",
    "preposition with 'which'": "The folder in which it lies.",
    "semicolon": "It is read; it is closed.",
}


def found(source: str, name: str = "page.md") -> list[str]:
    return [hit for passage in passages(Path(name), source) for hit in (+passage.hits).elements()]


def test_good_prose_passes() -> None:
    module = f'"""{GOOD}"""\nx = 1  # the first step\n'
    assert found(GOOD) == found(module, "module.py") == []


@pytest.mark.parametrize("name", PATTERNS)
def test_each_pattern_is_found_in_docstrings_comments_and_pages(name: str) -> None:
    assert name in found(BAD[name])
    assert name in found(f'def f():\n    """{BAD[name]}"""\n', "module.py")
    assert name in found(f"# {BAD[name]}\nx = 1\n", "module.py")
    assert name in found(f"x = 1  # {BAD[name]}\n", "module.py")


def test_code_is_not_counted() -> None:
    bad = "a; b; what is it; anew"
    page = (
        f"Text with `{bad}` in it.\n\n```sh\n{bad}\n\n{bad}\n```\n\n    "
        f"{bad}\n\n[link](a;b)\n<!-- {bad} -->\n"
    )
    module = (
        f'"""Text with ``{bad}``.\n\nExample::\n\n    {bad}\n\n>>> {bad}\n"""\nx = "{bad}"\ny = '
        f'f("""{bad}""")\n'
    )
    assert found(page) == found(module, "module.py") == []
    assert found(f'"""Example::\n\n    {bad}\n\nText; text.\n"""\n', "module.py") == ["semicolon"]


def test_comments_are_passages_of_their_lines() -> None:
    source = "# One;\n# two;\nx = 1  # three;\ny = 2  # type: ignore;\n\n# four;\n"
    assert [(each.line, each.text) for each in passages(Path("m.py"), source)] == [
        (1, "One;\ntwo;"),
        (3, "three;"),
        (6, "four;"),
    ]


def test_a_text_above_the_limit_fails_and_its_worst_passage_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text(GOOD)
    assert rate(collect([tmp_path])) == 0 and main([str(tmp_path)]) == 0
    (tmp_path / "page.md").write_text(f"{GOOD}\n\n{BAD['rare word']}\n")
    assert rate(collect([tmp_path])) > LIMIT and main([str(tmp_path), "--worst", "1"]) == 1
    assert "page.md:9: rare word: The folder is made anew." in capsys.readouterr().out
