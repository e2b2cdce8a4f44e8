"""Check how dense the code is: ``python -m tests.density [--worst 20] [PATH ...]``.

Dense code saves lines and costs its readers time. A group of folders must stay within `LIMITS` as a
whole, and each file within `FILE_TOKENS_PER_LINE` and `FILE_TOKENS`. No file is exempt. Size counts
in tokens, because a limit in lines rewards lines that are hard to read. Without paths, all of
`GROUPS` are checked, and the exit code is 1 if anything is above its limit.
"""

import argparse
import ast
import io
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
GROUPS = {
    "packages": ["engine", "integrations", "recover", "utils", "plugins"],
    "examples, benchmarks": ["examples", "benchmarks"],
}
LIMITS = {
    "tokens a line": 7.2,
    "tuple assignments per 1,000 lines": 3.0,
    "walrus per 1,000 lines": 3.0,
    "ternaries per 1,000 lines": 15.0,
    "percent of lines over 100 columns": 1.0,
    "lines per comment line": 25.0,
}
FILE_TOKENS_PER_LINE = 8.0
FILE_TOKENS = 4000
SHORT_FILE = 30
"""A file of up to so many lines may be denser, because one table of names decides there."""
COLUMNS = 100

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Density:
    """Counts of one or more files. ``lines`` are those of code: not blank, not of a docstring."""

    all_lines: int = 0
    lines: int = 0
    tokens: int = 0
    comments: int = 0
    over_long: int = 0
    tuple_assignments: int = 0
    walrus: int = 0
    ternaries: int = 0

    def __add__(self, other: "Density") -> "Density":
        names = [field.name for field in fields(self)]
        return Density(*(getattr(self, name) + getattr(other, name) for name in names))

    @property
    def tokens_per_line(self) -> float:
        return self.tokens / max(1, self.lines)

    def figures(self) -> dict[str, float]:
        """The figures that have `LIMITS`, by the same names."""
        thousands = max(1, self.lines) / 1000
        values = (
            self.tokens_per_line,
            self.tuple_assignments / thousands,
            self.walrus / thousands,
            self.ternaries / thousands,
            100 * self.over_long / max(1, self.all_lines),
            self.lines / max(1, self.comments),
        )
        return dict(zip(LIMITS, values, strict=True))


def measure(source: str) -> Density:
    """Count one Python file."""
    tree = ast.parse(source)
    documentation = set(_docstring_lines(tree))
    rows = source.splitlines()
    code = [number for number, row in enumerate(rows, start=1) if row.strip()]
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _LAYOUT and token.start[0] not in documentation
    ]
    nodes = list(ast.walk(tree))
    return Density(
        all_lines=len(rows),
        lines=len(set(code) - documentation),
        tokens=len(tokens),
        comments=sum(row.strip().startswith("#") for row in rows),
        over_long=sum(len(row) > COLUMNS for row in rows),
        tuple_assignments=sum(_assigns_tuple_to_tuple(node) for node in nodes),
        walrus=sum(isinstance(node, ast.NamedExpr) for node in nodes),
        ternaries=sum(isinstance(node, ast.IfExp) for node in nodes),
    )


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of docstrings, and of strings that document an attribute."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _assigns_tuple_to_tuple(node: ast.AST) -> bool:
    """Whether a statement is like ``a, b = x, y``."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    return any(isinstance(target, ast.Tuple) for target in node.targets)


def collect(places: Iterable[Path]) -> dict[Path, Density]:
    """Measure all Python files of files and folders."""
    files: list[Path] = []
    for place in places:
        files += [place] if place.is_file() else sorted(place.rglob("*.py"))
    return {file: measure(file.read_text(encoding="utf-8")) for file in files}


def complaints(found: dict[Path, Density]) -> Iterator[str]:
    """Yield a line for each limit that a group of files exceeds."""
    for name, value in sum(found.values(), Density()).figures().items():
        if value > LIMITS[name]:
            yield f"{value:.1f} {name}; the limit is {LIMITS[name]:g}"
    for file, density in found.items():
        if density.tokens > FILE_TOKENS:
            yield f"{file} has {density.tokens} tokens; the limit is {FILE_TOKENS}: split it"
        if density.lines > SHORT_FILE and density.tokens_per_line > FILE_TOKENS_PER_LINE:
            yield (
                f"{file} has {density.tokens_per_line:.1f} tokens a line; the limit is "
                f"{FILE_TOKENS_PER_LINE:g}: one statement a line, and a name for each result"
            )


def main(argv: list[str] | None = None) -> int:
    """Print the figures of each group and its densest files. Returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders instead of the groups"
    )
    parser.add_argument(
        "--worst", type=int, default=0, metavar="N", help="print the N densest files of each group"
    )
    given = parser.parse_args(argv)
    groups = {name: [ROOT / place for place in places] for name, places in GROUPS.items()}
    if given.paths:
        groups = {"paths": given.paths}
    failed = False
    for group, places in groups.items():
        found = collect(places)
        total = sum(found.values(), Density())
        print(f"{group}: {len(found)} files, {total.lines} lines of code, {total.tokens} tokens")
        for name, value in total.figures().items():
            print(f"  {value:6.1f} {name} (limit {LIMITS[name]:g})")
        for complaint in complaints(found):
            failed = True
            print(f"  TOO DENSE: {complaint}")
        densest = sorted(found, key=lambda file: found[file].tokens_per_line, reverse=True)
        for file in densest[: given.worst]:
            print(f"  {found[file].tokens_per_line:6.1f} tokens a line in {file}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
