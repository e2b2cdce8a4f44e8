"""Retention of the steps of a verl run. It reads the folder and not a list in memory, so it holds
after a restart.
"""

import re
from pathlib import Path

from ..utils.files import remove_or_log
from ..utils.logging import get_logger

logger = get_logger(__name__)

DCP = "dcp"
"""Name of the folder that Holdfast writes for each role."""

_STEP = re.compile(r"global_step_(\d+)")


def parse_step_folder(saved: Path) -> tuple[Path, int, str] | None:
    """Return root, step and role of a folder that verl's trainer saves to, or None for other
    folders.

    The PPO trainer saves to ``<root>/global_step_<N>/<role>``. The SFT trainer saves to
    ``<root>/global_step_<N>``, with the role "".
    """
    for step, role in ((saved, ""), (saved.parent, saved.name)):
        match = _STEP.fullmatch(step.name)
        if match:
            return step.parent, int(match[1]), role
    return None


def retire(saved: Path, n_keep: int | None, named: int | None) -> None:
    """Remove older steps of a role (``actor``, ``critic``) that Holdfast has written.

    Folders that a killed process has removed in part go too. A folder that cannot be removed is
    logged, because the save has succeeded.

    Args:
        saved: complete folder ``global_step_<N>/<role>``, or ``global_step_<N>`` of an SFT run.
        n_keep: number of steps to keep, including this one. None or less than 1 keeps all.
        named: step in verl's ``latest_checkpointed_iteration.txt``, if there is one, which stays in
            addition.
    """
    if not n_keep or n_keep < 1:
        return
    place = parse_step_folder(saved)
    if place is None:
        return
    root, now, role = place

    # Folders of this role, by step. In an SFT run they are the folders of the steps.
    folders: dict[int, Path] = {}
    for folder in root.iterdir():
        match = _STEP.fullmatch(folder.name)
        if match:
            folders[int(match[1])] = folder / role

    # Leftovers of removals by a process that was killed.
    parents = {folder.parent for folder in folders.values()}
    name = role or "global_step_*"
    for parent in parents:
        for left in parent.glob(f".retired-{name}-*"):
            remove_or_log(left)

    # Steps of verl's own manager have no such folder, and stay.
    older: list[int] = []
    for step, folder in sorted(folders.items()):
        if step < now and (folder / DCP).is_dir():
            older.append(step)

    # The step of ``saved`` is one of those to keep.
    n_removed = max(0, len(older) - (n_keep - 1))
    for step in older[:n_removed]:
        if step != named:
            logger.info("removing %s of step %d: %d stay", role or "all", step, n_keep)
            remove_or_log(folders[step])
