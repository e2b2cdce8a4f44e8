"""Compare a restored run with the facts that its generation recorded (see `engines`)."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...utils.errors import CheckpointCorruptError
from ...utils.logging import get_logger
from ..info import EngineFacts

logger = get_logger(__name__)

_TABLE_WIDTH = 110


@dataclass(frozen=True)
class _Row:
    what: str
    saved: Any
    restored: Any


def check_restored(
    what: str,
    saved: tuple[Mapping[str, EngineFacts], Mapping[str, str]],
    restored: tuple[Mapping[str, EngineFacts], Mapping[str, str]],
) -> str:
    """Compare the restored state with the saved one.

    Args:
        what: name of the generation.
        saved: engine name -> facts, and process -> digest of its generators, from the generation.
        restored: the same, from the live engines and processes. Processes that the saved run did not have are absent.

    Returns:
        a table for the log.

    Raises:
        CheckpointCorruptError: something differs, although every byte that was read matched its digest.
    """
    if unknown := sorted((restored[0].keys() - saved[0].keys()) | (restored[1].keys() - saved[1].keys())):
        raise CheckpointCorruptError(f"{what} was restored, but its recover_info.json says nothing of {unknown[0]!r}")
    rows = list(_rows(saved[0], restored[0]))
    rows += [_Row(f"generators of {name}", saved[1][name], digest) for name, digest in restored[1].items()]
    if wrong := [row for row in rows if not _same(row.saved, row.restored)]:
        row = wrong[0]
        raise CheckpointCorruptError(
            f"{what} was restored, but {row.what} is {row.restored!r}; recover_info.json says {row.saved!r} "
            f"({len(wrong)} of {len(rows)} differ). Do not go on with this run; report it"
        )
    return _render(what, rows)


def warn_of_switches(what: str, saved: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Log one warning with all settings whose values differ from the generation ``what``."""
    if changed := [name for name in saved if name in now and saved[name] != now[name]]:
        logger.warning(
            "%s was saved with other settings, so the run goes on with other numbers than without the restart: %s. Set "
            "them before load as they were, unless the change is meant",
            what, "; ".join(f"{name} was {saved[name]}, is {now[name]}" for name in changed),
        )  # fmt: skip


def _same(saved: Any, restored: Any) -> bool:
    return saved == restored or (saved != saved and restored != restored)  # a learning rate may have become NaN


def _rows(saved: Mapping[str, EngineFacts], restored: Mapping[str, EngineFacts]) -> Iterator[_Row]:
    for name, facts in restored.items():
        before, now = asdict(saved[name]), asdict(facts)
        for key in ("optimizer_steps", "lr", "schedule_step"):
            if now[key] is not None:
                yield _Row(f"{name}: {key}", before[key], now[key])
        for part in facts.fingerprints:
            yield _Row(f"{name}: {part}", before["fingerprints"].get(part), facts.fingerprints[part])


def _render(what: str, rows: Sequence[_Row]) -> str:
    table = Table(title=f"restored from {what}", title_justify="left", box=box.SIMPLE_HEAD)
    for column in ("what", "as saved and as restored"):
        table.add_column(column)
    for row in rows:
        table.add_row(row.what, str(row.restored))
    out = io.StringIO()
    Console(file=out, width=_TABLE_WIDTH, color_system=None).print(table)
    return out.getvalue().rstrip()
