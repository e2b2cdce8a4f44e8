"""Which steps of a verl run stay: the folder is asked, not a list in memory, so that it holds after a restart too."""

import re
from pathlib import Path

from ..utils.files import remove_or_log
from ..utils.logging import get_logger

logger = get_logger(__name__)

DCP = "dcp"
"""Folder of a role in which Holdfast keeps what it has written."""

_STEP = re.compile(r"global_step_(\d+)")


def retire(saved: Path, n_keep: int | None, named: int | None) -> None:
    """Remove older steps of the role (``actor``, ``critic``) of the folder ``saved`` that Holdfast has written.

    What cannot be removed is logged and left: the save was good. What a killed process left half removed goes too.

    Args:
        saved: ``global_step_<N>/<role>``, complete.
        n_keep: steps to keep, this one included; None or less than 1: all.
        named: the step that verl's tracker names, which stays.
    """
    match = _STEP.fullmatch(saved.parent.name)
    if not n_keep or n_keep < 1 or match is None:
        return
    root, role, now = saved.parent.parent, saved.name, int(match[1])
    found = (_STEP.fullmatch(folder.name) for folder in root.iterdir())
    folders = {int(each[1]): root / each[0] / role for each in found if each}
    for folder in folders.values():
        for left in folder.parent.glob(f".retired-{role}-*"):
            remove_or_log(left)
    older = sorted(step for step, folder in folders.items() if step < now and (folder / DCP).is_dir())
    for step in older[: max(0, len(older) - n_keep + 1)]:
        if step != named:
            logger.info("removing %s of step %d: %d stay", role, step, n_keep)
            remove_or_log(folders[step])
