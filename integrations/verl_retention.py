"""Which steps of a verl run stay: the folder is asked, not a list in memory, so that it holds after a restart too."""

import re
from pathlib import Path

from ..utils.files import remove_or_log
from ..utils.logging import get_logger

logger = get_logger(__name__)

DCP = "dcp"
"""Folder of a role in which Holdfast keeps what it has written."""

_STEP = re.compile(r"global_step_(\d+)")


def place_of(saved: Path) -> tuple[Path, int, str] | None:
    """Root of the run, step and role of a folder that a trainer of verl's saves to; None: it is none.

    ``<root>/global_step_<N>/<role>`` of its PPO trainer, ``<root>/global_step_<N>`` of its SFT trainer: role "" there.
    """
    for step, role in ((saved, ""), (saved.parent, saved.name)):
        if match := _STEP.fullmatch(step.name):
            return step.parent, int(match[1]), role
    return None


def retire(saved: Path, n_keep: int | None, named: int | None) -> None:
    """Remove older steps of the role (``actor``, ``critic``) of the folder ``saved`` that Holdfast has written.

    What cannot be removed is logged and left: the save was good. What a killed process left half removed goes too.

    Args:
        saved: ``global_step_<N>/<role>``, or that of an SFT run, ``global_step_<N>``; complete.
        n_keep: steps to keep, this one included; None or less than 1: all.
        named: the step that verl's tracker names, which stays.
    """
    place = place_of(saved)
    if not n_keep or n_keep < 1 or place is None:
        return
    root, now, role = place
    found = (_STEP.fullmatch(folder.name) for folder in root.iterdir())
    folders = {int(each[1]): root / each[0] / role for each in found if each}
    for parent in {folder.parent for folder in folders.values()}:
        for left in parent.glob(f".retired-{role or 'global_step_*'}-*"):
            remove_or_log(left)
    older = sorted(step for step, folder in folders.items() if step < now and (folder / DCP).is_dir())
    for step in older[: max(0, len(older) - n_keep + 1)]:
        if step != named:
            logger.info("removing %s of step %d: %d stay", role or "all", step, n_keep)
            remove_or_log(folders[step])
