"""Check the language of docstrings, comments and Markdown pages: ``python -m tests.language
[--worst 20] [PATH ...]``.

Counts phrases over which readers of this project stumbled. None of them is always wrong, so a group
of files may have `LIMIT` of them per 1,000 words. Without paths, all of `GROUPS` are checked, and
the exit code is 1 if one is above it.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 6.0
GROUPS = {
    "packages": ["engine", "integrations", "recover", "utils", "plugins"],
    "docs": ["docs", "README.md", "CONTRIBUTING.md"],
    "tests, examples, benchmarks": ["tests", "examples", "benchmarks"],
}

_VERBS = "is|are|was|were|has|had|have|can|comes|goes|becomes|follows|stays"
PATTERNS = {
    "opens without its noun": (
        r"\A(?:As|By|In|Nobody|Nothing|None:|Of|So "
        r"that|That|Those|What|Where|Who|Whose)\b"
    ),
    "'what' for a noun": rf"(?i:\bwhat (?:{_VERBS}|a|he|it|one|the|there|they)\b)",
    "'that' for a noun": r"(?i:\b(?:that|those) (?:of|in|that|which)\b)",
    "people for code": (
        r"(?i:\b(?:by|for|of|to|and) who\b|\bof "
        r"whom\b|\b(?:nobody|somebody|whoever)\b)"
    ),
    "chain of pronouns": r"(?i:\bof (?:it|its own|ours|theirs|them)\b)",
    "rare word": (
        r"(?i:\b(?:anew|as ever|beside|lest|likewise|so far as|so long|so "
        r"many|thereby|wherein)\b)"
    ),
    "riddle": r"(?i:\b(?:is|are|was|were|be) told\b|\bcomes? to (?:it|nothing|that)\b|\bsee that\b"
    r"|\b(?:is|are) of (?:a|another|no|one|the|this)\b)",
    "preposition with 'which'": r"(?i:\b(?:by|for|in|of) which\b)",
    "semicolon": ";",
}
_DIRECTIVES = ("#!", "# fmt:", "# noqa", "# pyright:", "# type:")


@dataclass(frozen=True)
class Passage:
    """A docstring, a block of comments, or a paragraph of a page, without its code."""

    file: Path
    line: int
    text: str

    @property
    def words(self) -> int:
        return len(re.findall(r"[A-Za-z']+", self.text))

    @property
    def hits(self) -> Counter[str]:
        return Counter(
            {name: len(re.findall(pattern, self.text)) for name, pattern in PATTERNS.items()}
        )


def passages(file: Path, source: str) -> Iterator[Passage]:
    """Yield the passages of a Python file or a Markdown page."""
    found = (
        _paragraphs(source) if file.suffix == ".md" else [*_docstrings(source), *_comments(source)]
    )
    yield from (Passage(file, line, prose) for line, text in found if (prose := _prose(text)))


def _prose(text: str) -> str:
    """Remove literal blocks (after a line that ends with ``::``), doctests, spans of code, and
    targets of links.
    """
    kept, literal = [], None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and indent <= literal:
            literal = None
        if literal is None and not line.lstrip().startswith((">>> ", "... ")):
            kept.append(line)
            literal = indent if line.rstrip().endswith("::") else None
    return re.sub(r"(`+).+?\1|\]\([^)]*\)|<!--.*?-->", " x ", "\n".join(kept), flags=re.S).strip()


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield trailing comments one by one, and comments on successive lines as one block."""
    block, begin, end = list[str](), 0, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(_DIRECTIVES):
            continue
        trailing, (line, _) = bool(token.line[: token.start[1]].strip()), token.start
        if block and (trailing or line != end + 1):
            yield begin, "\n".join(block)
            block = []
        begin, end = begin if block else line, 0 if trailing else line
        block.append(token.string.lstrip("# "))
    if block:
        yield begin, "\n".join(block)


def _paragraphs(source: str) -> Iterator[tuple[int, str]]:
    block, fence = list[str](), ""
    for line, text in enumerate([*source.splitlines(), ""], start=1):
        mark = re.match(r"\s*(```+|~~~+)", text)
        if mark and not fence:
            fence = mark[1]
        elif fence:
            fence = "" if text.strip().startswith(fence) else fence
        elif text.strip() and (block or not text.startswith("    ")):
            block.append(text)
            continue
        if block:
            yield line - len(block), "\n".join(block)
            block = []


def collect(places: Iterable[Path]) -> list[Passage]:
    """Return all passages of files and folders."""
    files = [
        file
        for place in places
        for file in ([place] if place.is_file() else sorted(place.rglob("*.[pm][yd]")))
    ]
    return [
        passage for file in files for passage in passages(file, file.read_text(encoding="utf-8"))
    ]


def rate(found: Iterable[Passage]) -> float:
    """Return the number of hits per 1,000 words."""
    totals = [(passage.hits.total(), passage.words) for passage in found]
    return 1000 * sum(hits for hits, _ in totals) / max(1, sum(words for _, words in totals))


def main(argv: list[str] | None = None) -> int:
    """Print the rate of each group and its worst passages. Returns 1 if a rate is above `LIMIT`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders instead of the groups"
    )
    parser.add_argument(
        "--worst", type=int, default=0, metavar="N", help="print the N worst passages of each group"
    )
    given = parser.parse_args(argv)
    groups = {name: [ROOT / place for place in places] for name, places in GROUPS.items()}
    failed = False
    for name, places in ({"paths": given.paths} if given.paths else groups).items():
        found = collect(places)
        value = rate(found)
        failed |= value > LIMIT
        verdict = f"above the limit of {LIMIT:g}, see --worst 20" if value > LIMIT else "ok"
        print(f"{name}: {value:.1f} phrases per 1,000 words: {verdict}")
        found.sort(key=lambda each: each.hits.total() / (each.words + 12), reverse=True)
        for each in found[: given.worst]:
            print(
                f"  {each.file}:{each.line}: {', '.join(+each.hits) or 'none'}: "
                f"{' '.join(each.text.split())[:200]}"
            )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
