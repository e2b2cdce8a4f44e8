"""Purpose of each fsync in a recorded trace, by which tests name the fsync that they leave out.

Every new fsync in the product needs an entry here. test_harness_can_fail.py removes each of them in
turn.
"""

import os
import re

from tests.faults.power_loss import FSYNCS
from tests.faults.shim import Call

MIRROR = "mirror/e/t"
"""Folder of mirrored snapshots, relative to the root."""
IN_STAGING = {
    "the data file of a rank": r"\w+/__\d+_\d+\.distcp",
    "the metadata of an engine": r"\w+/\.metadata",
    "the state of a rank": r"state/rank_\d+\.pt",
    "the data cursor": r"data\.pt",
    "the recover info": r"recover_info\.json",
    "the manifest": r"manifest\.json",
    "the folder of an engine": r"(actor|critic)",
    "the folder of the ranks' states": r"state",
    "the weights": r"model\.safetensors",
    "the changes of a rank": r"delta/rank_\d+\.safetensors",
    "the manifest of the changes": r"delta/manifest\.json",
    "the folder of the changes": r"delta",
    "a small file of a model": (
        r"((generation_|tokenizer_)?config|tokenizer)\.json|chat_template\.jinja"
    ),
    "the staging folder": r"",
    "the small files of a model": r"state/model_files_\w+\.pt",
}
"""Purpose of an fsync in a staging folder -> path in that folder."""
AFTER_NAMES = {
    "the folder with the new name": r".*/(global_step_|v)\d+",
    "the folder with a retired name": r".*/\.retired-.*",
    "a folder above the first snapshot": r"(e|e/t|e/t/recover)",
    "a folder above the first log": r"e/t/recover/episodes(/diary)?",
    "the folder of a log": r".*\.log",
}
"""Purpose of an fsync of any other folder -> name that was created there last."""
IN_MIRROR = {
    "the manifest of a copy": r"/global_step_\d+/\.part-manifest\.json",
    "a file of a copy": r"/global_step_\d+/.*\.part-.*",
    "a folder of a copy": r"/global_step_\d+(/\w+)?",
    "the marker of a copy": r"/\.part-\.copying-.*",
    "the folder of copies": r"",
}
"""Purpose of an fsync at the mirror -> path below it, unless a manifest was created or removed
there last.
"""
MANIFEST_MOVED = "the folder of a copy whose manifest came or went"
EARLIER_LIFE = "a name that an earlier life may have made"
"""Purpose of an fsync of a folder in which this run has created no name. An earlier run may have
created one.
"""
UNKNOWN = "nothing that is known"
HINT = "a hint"
"""The tracker, the file with the run's id, the holder of the lock. Without one nothing is lost: no
fsync needed.
"""
HINTS = ("latest_checkpointed_iteration", "run_id.txt")
PROBES = ".shared-"
"""Files that are removed at once, so that no fsync is for them."""


def fsync_purposes(calls: list[Call]) -> dict[int, str]:
    """Map the index of each fsync to its purpose, which follows from the last name created in the
    folder.
    """
    found, last_name = dict[int, str](), dict[str, str]()
    for i, call in enumerate(calls):
        name = call.target if call.name == "rename" else call.path
        if os.path.basename(name or "").startswith(PROBES):
            continue
        is_new_log = call.name == "open" and call.path.endswith(".log") and _creates(call)
        if call.name in ("rename", "mkdir", "unlink") or is_new_log:
            last_name[os.path.dirname(name or "") or "."] = name or ""
        elif call.name in FSYNCS:
            found[i] = _purpose(call.path, last_name.get(call.path, ""))
    return found


def _creates(call: Call) -> bool:
    return bool((call.flags or 0) & os.O_EXCL)


def _purpose(path: str, last_name: str) -> str:
    if path.endswith(".log"):
        return "the records of a log"
    if path.endswith(".lock") or any(hint in path + last_name for hint in HINTS):
        return HINT
    if path.startswith(MIRROR):
        if last_name.endswith("/manifest.json"):
            return MANIFEST_MOVED
        return _first_match(IN_MIRROR, path.removeprefix(MIRROR))
    staged = re.fullmatch(r"(?:.*/)?\.staging-[^/]+/?(.*)", path)
    if staged:
        return _first_match(IN_STAGING, staged[1])
    return _first_match(AFTER_NAMES, last_name) if last_name else EARLIER_LIFE


def _first_match(table: dict[str, str], text: str) -> str:
    return next(
        (purpose for purpose, pattern in table.items() if re.fullmatch(pattern, text)), UNKNOWN
    )
