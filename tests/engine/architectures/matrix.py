"""Judge architectures one after the other, each in two separate processes: a crash or a hang costs
one verdict.
"""

import json
import re
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
import transformers

from holdfast.utils.distributed import gather_objects
from holdfast.utils.errors import HoldfastError, PeerError
from tests.engine.architectures.case import TIMEOUT_S, Case, Unsupported
from tests.engine.architectures.checks import (
    CHECKS,
    NO,
    NONE,
    REFUSED,
    RELEASED_CHECKS,
    YES,
    Check,
    Verdict,
)
from tests.helpers import run_ranks

Verdicts = dict[str, Verdict]
"""Verdicts by the name of the check."""

_JUDGING_S = 240.0
_MOST_WORDS = 240
_VERDICTS_NAME = "verdicts.jsonl"


def checks_of(name: str) -> Mapping[str, Check]:
    """The checks of a model type, or of a released model."""
    return RELEASED_CHECKS if "/" in name else CHECKS


def judge(name: str, checks: Sequence[str] | None = None) -> Verdicts:
    """Verdicts on a model type, or on a released model.

    Args:
        name: a model type or the name of a released model.
        checks: names of checks. None: all of `checks_of`.
    """
    with tempfile.TemporaryDirectory(prefix="holdfast-architecture-") as folder:
        root = Path(folder)
        while left := [
            check for check in checks or checks_of(name) if check not in (found := _read(root))
        ]:
            trouble = ""
            try:
                run_ranks(_judge, 2, name, root, left, timeout_s=_JUDGING_S)
            except AssertionError as error:
                trouble = str(error)
            if len(_read(root)) == len(found):  # no further check has finished
                _note(
                    root,
                    left[0],
                    Verdict(NO, f"a rank ended or hung: {_in_words(_last_line(trouble), root)}"),
                )
        return _read(root)


def _judge(rank: int, world_size: int, name: str, root: Path, checks: Sequence[str]) -> None:
    """Run checks on one rank and write the verdicts, until the ranks disagree about their
    position.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    case = Case(name, root, rank)
    report = dist.new_group(backend="gloo", timeout=timedelta(seconds=4 * TIMEOUT_S))
    assert isinstance(report, dist.ProcessGroup)
    if rank == 0 and not case.folder.exists():
        _write_folder(case)
    dist.barrier(report)
    for check in checks:
        if check in (found := _read(root)):
            return  # the other checks failed
        if found.get("starts", Verdict(YES)).word != YES:
            verdicts = [Verdict(NONE)]
        else:
            verdicts = gather_objects(_verdict(case, check), report)
        if rank == 0:
            _note(root, check, min(verdicts, key=_interest))
        if len({verdict.word for verdict in verdicts}) > 1:
            return  # one rank may still be in a collective that the other has left
        dist.barrier(report)


def _write_folder(case: Case) -> None:
    try:
        case.write_folder()
    except Unsupported as error:
        for check in checks_of(case.name):
            _note(
                case.root,
                check,
                Verdict(NONE, _in_words(str(error), case.root) if check == "starts" else ""),
            )


def _verdict(case: Case, check: str) -> Verdict:
    try:
        return RELEASED_CHECKS[check](case)
    except Unsupported as error:
        word, why = NONE, str(error)
    except PeerError:
        return Verdict(YES)  # the other rank gives the reason
    except HoldfastError as error:
        word, why = REFUSED, str(error)
    except Exception as error:
        word, why = NO, f"{type(error).__name__}: {error}"
    with suppress(KeyError):
        del case.__dict__["engine"]  # an error may have left it in an inconsistent state
    return Verdict(word, _in_words(why, case.root))


def _interest(verdict: Verdict) -> int:
    return (NO, REFUSED, NONE).index(verdict.word) if verdict.word in (NO, REFUSED, NONE) else 3


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _in_words(text: str, root: Path) -> str:
    """Remove from a message the parts that differ in every run: paths, and numbers with a point or
    an exponent.
    """
    text = re.sub(
        r"\d\.\d+(e-?\d+)?",
        "...",
        text.replace(str(root / "model"), "the folder").replace(str(root), ""),
    )
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]} ..."


def _note(root: Path, check: str, verdict: Verdict) -> None:
    with open(root / _VERDICTS_NAME, "a", encoding="utf-8") as file:
        file.write(json.dumps([check, verdict.word, verdict.why]) + "\n")


def _read(root: Path) -> Verdicts:
    if not (root / _VERDICTS_NAME).exists():
        return {}
    lines = (root / _VERDICTS_NAME).read_text(encoding="utf-8").splitlines()
    return {check: Verdict(word, why) for check, word, why in map(json.loads, lines)}
