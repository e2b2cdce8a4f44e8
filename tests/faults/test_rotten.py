"""Torn and corrupted files: any damage to the newest generation is found, and the older one is
loaded.

Every damage is applied to a new copy of two valid generations of two ranks, which one warm process
loads. The oracle is always the same: the damaged generation is quarantined with a reason that names
a damaged file, the older one is restored to the bit, and there are no more writes to the state than
in a load without damage.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.engine.dcp.load import load_dcp
from holdfast.recover.info import INFO_NAME
from holdfast.recover.storage.generations import TRACKER_NAME
from holdfast.utils.errors import HoldfastError
from tests.faults.damages import KINDS, Damage, boundaries, flip, truncate
from tests.faults.generations import (
    NEWER,
    OLDER,
    Loaded,
    Victim,
    copy_generations,
    files_of,
    link_tree,
    quiet,
    recover_folder,
    sharded_states,
    slug,
    time_limit,
)
from tests.faults.share import SHARE, pick
from tests.faults.tally import Tally
from tests.helpers import run_ranks
from tests.recover.runs import digest, make_handler, make_loader

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def expected(good: Path, victim: Victim, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Result of loading the older generation if there is no other."""
    root = tmp_path_factory.mktemp("expected")
    copy_generations(good, root / "older", OLDER)
    copy_generations(good, root / "both", OLDER, NEWER)
    older, newer = victim.load(root / "older"), victim.load(root / "both")
    assert (
        (older.step, newer.step) == (0, 1)
        and older.record != newer.record
        and older.writes == newer.writes > 0
    )
    return older


_ALSO = {INFO_NAME: ("was renamed",)}
"""File -> other texts of a reason: an info with another step belongs to a renamed generation."""


def _judge(
    damage: Damage, good: Path, root: Path, victim: Victim, expected: Loaded
) -> tuple[str, str] | None:
    """Return ``(column of the table, fault)``, or None if the damage was survived."""
    recover = copy_generations(good, root, OLDER, NEWER)
    damage.strike(recover / NEWER)
    try:
        found = victim.load(root)
    except Exception as error:  # the harness reports every error
        return "lost", f"{type(error).__name__}: {error}"
    if found.step == 1:
        return "undetected", "was loaded"
    if found != expected:
        return "lost", f"something else came back: {found}, not {expected}"
    names = sorted(
        path.name
        for path in recover.iterdir()
        if path.name.startswith((".rejected-", "global_step_"))
    )
    if len(names) != 2 or names[1] != OLDER or not names[0].startswith(f".rejected-{NEWER}-"):
        return "lost", f"left {names}"
    if not any(slug(name) in names[0] for name in (*damage.blame, *_ALSO.get(damage.blame[0], ()))):
        return "undetected", f"the reason {names[0]} names none of {damage.blame}"
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_every_damage_is_found_set_aside_and_the_older_generation_used(
    kind: str,
    good: Path,
    victim: Victim,
    expected: Loaded,
    tmp_path: Path,
    tally: Tally,
    progress: Callable[[str], None],
) -> None:
    problems, damages = [], pick(list(KINDS[kind](good)), SHARE)
    for number, damage in enumerate(damages):
        with quiet():
            problem = _judge(damage, good, tmp_path / str(number), victim, expected)
        shutil.rmtree(tmp_path / str(number))
        if problem is None:
            tally.add(kind, injected=1, survived=1)
        else:
            tally.add(kind, injected=1, **{problem[0]: 1})
            problems.append(f"{damage.name}: {problem[1]}")
        progress(f"{kind}: {number + 1} of {len(damages)}, {len(problems)} bad")
    assert damages and not problems, f"{len(problems)} of {len(damages)}:\n" + "\n".join(
        problems[:20]
    )


def test_the_full_set_has_a_thousand_damages(good: Path) -> None:
    counts = {kind: len(list(damages(good))) for kind, damages in KINDS.items()}
    assert sum(counts.values()) >= 1000 and min(counts.values()) >= 20, counts


TRACKER_DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "the older step": lambda path: path.write_text("0"),
    "a step that never was": lambda path: path.write_text("999"),
    "no number": lambda path: path.write_bytes(b"\xff\x00../../x"),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a fifo": lambda path: (path.unlink(), os.mkfifo(path)),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.mark.parametrize("damage", TRACKER_DAMAGES)
def test_a_damaged_tracker_changes_nothing(
    damage: str, good: Path, victim: Victim, tmp_path: Path, tally: Tally
) -> None:
    recover = copy_generations(good, tmp_path, OLDER, NEWER)
    (recover / TRACKER_NAME).write_text("1")
    sound = victim.load(tmp_path)
    assert sound.step == 1
    TRACKER_DAMAGES[damage](recover / TRACKER_NAME)
    found = victim.load(tmp_path)
    assert (
        found == sound
        and {OLDER, NEWER} <= set(os.listdir(recover))
        and not list(recover.glob(".rejected-*"))
    )
    tally.add("damaged tracker", injected=1, survived=1)


def _load_each(rank: int, world_size: int, roots: list[str]) -> list[tuple[int | None, str]]:
    states = sharded_states(world_size)
    seen = []
    for root in roots:
        handler = make_handler(root, freq_steps=1)
        info = handler.load(states, make_loader("own", rank, world_size))
        handler.close()
        seen.append((info.last_step_info.global_step if info else None, digest(states)))
    return seen


def test_two_ranks_agree_on_what_only_one_of_them_has_read(
    good: Path, tmp_path: Path, tally: Tally
) -> None:
    """The ranks share the verification of the bytes. If one finds damage, all refuse."""
    damaged = files_of(good / NEWER)
    recover = copy_generations(good, tmp_path / "sound", OLDER)
    roots = [str(recover.parents[2])]
    for name in damaged:
        recover = copy_generations(good, tmp_path / name.replace("/", "_"), OLDER, NEWER)
        flip(name, (recover / NEWER / name).stat().st_size // 2, recover / NEWER)
        roots.append(str(recover.parents[2]))
    for seen in run_ranks(_load_each, 2, roots):
        assert seen[0][0] == 0 and seen == [seen[0]] * len(roots)
    assert all(len(list(recover_folder(Path(root)).glob(".rejected-*"))) == 1 for root in roots[1:])
    tally.add("flipped bit, two ranks", injected=len(damaged), survived=len(damaged))


def test_a_folder_without_a_manifest_that_is_cut_short_is_refused_too(
    good: Path, victim: Victim, tmp_path: Path, tally: Tally
) -> None:
    """AReaL and stock torch write no digests, so only missing bytes can be noticed."""
    state, problems = victim.states["actor"], []
    source = good / NEWER / "actor"
    cuts = [(name, at) for name in files_of(source) for at in boundaries(source, name)[:-1]]
    for number, (name, at) in enumerate(pick(cuts, SHARE)):
        folder = tmp_path / str(number)
        link_tree(source, folder)
        size = (folder / name).stat().st_size
        truncate(name, at, folder)
        victim.scramble()
        before = victim.record()
        try:
            with time_limit(20):
                load_dcp(folder, state)
            problem = "was loaded"
        except HoldfastError:
            problem = None if victim.record() == before else "something was changed"
        except Exception as error:  # the harness reports every error
            problem = f"{type(error).__name__}: {error}"
        shutil.rmtree(folder)
        tally.add(
            "truncated file, no manifest",
            injected=1,
            **{"undetected" if problem else "survived": 1},
        )
        if problem:
            problems.append(f"{name} of {size} bytes cut at {at}: {problem}")
    assert not problems, "\n".join(problems[:20])
