"""docs/areal.md contains the tables used for reading. ``python -m
tests.integrations.areal.test_page`` writes them.
"""

import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

from holdfast.integrations.areal.keys import FILE, KEYS, NOTHING, Fate
from holdfast.integrations.areal.rules import RULES

PAGE = Path(__file__).parents[3] / "docs" / "areal.md"
TABLE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def said(value: object) -> str:
    """Format a value as in YAML."""
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def becomes(fate: Fate) -> str:
    if fate.kind == "renamed":
        return f"`{fate.to}`" if fate.value is NOTHING else f"`{fate.to}: {fate.value}`"
    if fate.kind == "refused" and fate.neutral:
        return f"refused unless {' or '.join(f'`{said(value)}`' for value in fate.neutral)}"
    return fate.kind if fate.absent is NOTHING else f"same, `{said(fate.absent)}` when absent"


def table_of_keys(table: Mapping[str, Fate]) -> str:
    lines = ["| AReaL's key | becomes | |", "|---|---|---|"]
    for shown, keys in groupby(table, key=lambda key: f"{becomes(table[key])} | {table[key].why}"):
        names = ", ".join(f"`{key}`" for key in keys)
        lines.append(f"| {names} | {shown} |")
    return "\n".join(lines)


def table_of_rules() -> str:
    lines = ["| keys | result |", "|---|---|"]
    for rule in (rule for rules in RULES.values() for rule in rules):
        words = " ".join((rule.__doc__ or "").split())
        keys, _, fate = words.partition(": ")
        lines.append(f"| {keys} | {fate.rstrip('.')} |")
    return "\n".join(lines)


def page_with_tables(text: str) -> str:
    tables = {name: table_of_keys(table) for name, table in KEYS.items()}
    tables |= {"FILE": table_of_keys(FILE), "RULES": table_of_rules()}
    found = [match[1] for match in TABLE.finditer(text)]
    assert sorted(found) == sorted(tables)
    return TABLE.sub(
        lambda match: f"<!-- table: {match[1]} -->\n{tables[match[1]]}\n<!-- end -->", text
    )


def test_the_tables_of_the_page_are_the_ones_that_files_are_read_by() -> None:
    text = PAGE.read_text()
    assert page_with_tables(text) == text, "run python -m tests.integrations.areal.test_page"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text()))
