"""Malicious generations: pickles that run code, in every file that is read. None runs, and errors
name each file.

Every attack is tried twice. With the old digests it is ordinary damage: the generation is
quarantined and the older one is loaded. With new digests, as someone with write access can compute
them, the contents are refused, and no state may have changed by then.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

from holdfast.engine import DCPState, load_dcp
from holdfast.recover.info import INFO_NAME
from holdfast.utils.errors import HoldfastError
from holdfast.utils.manifest import MANIFEST_NAME
from holdfast.utils.record_log import FRAME, MAGIC, log_files
from tests.engine.peak_memory import CAN_MEASURE, peak_growth_bytes
from tests.faults.attacks import (
    BOMB_BYTES,
    STATE,
    Attack,
    bomb_attacks,
    odd_attacks,
    pickle_attacks,
    plant_file,
)
from tests.faults.generations import (
    LOAD_TIMEOUT_S,
    NEWER,
    OLDER,
    Victim,
    copy_generations,
    quiet,
    replace_bytes,
    reseal,
    sharded_states,
    slug,
    time_limit,
)
from tests.faults.payloads import WRAPPINGS, Call, careless, payload_objects, payload_streams
from tests.faults.share import SHARE, pick
from tests.faults.tally import Tally
from tests.helpers import run_ranks
from tests.recover.runs import Diary, Tiny, make_handler, make_loader

pytestmark = pytest.mark.timeout(600)

ALLOWED_BYTES = 64 << 20
"""Memory that refusing a bomb of `BOMB_BYTES` may take."""


def _judge(
    attack: Attack,
    redigested: bool,
    good: Path,
    root: Path,
    victim: Victim,
    older: str,
    marker: Path,
) -> tuple[str, str] | None:
    """Return ``(column of the table, fault)``, or None if the attack was survived."""
    recover = copy_generations(good, root, OLDER, NEWER)
    attack.plant(recover / NEWER)
    if (
        redigested
        and "manifest" not in attack.name
        and (recover / NEWER / MANIFEST_NAME).read_bytes()[:1] == b"{"
    ):
        reseal(recover / NEWER)
    # A pointer to a payload also changes files other than its target.
    words = attack.named if redigested else (*attack.named, "actor/.metadata", "actor/__0_0.distcp")
    try:
        found = victim.load(root)
    except HoldfastError as error:
        verdict = (
            None
            if any(word in str(error) for word in words)
            else ("undetected", f"not named: {error}")
        )
        if victim.state_record() != victim.untouched:
            verdict = "lost", f"something was changed before {error}"
        elif not redigested:
            verdict = "lost", f"the older generation did not take over: {error}"
    except Exception as error:  # the harness reports every error
        verdict = "lost", f"{type(error).__name__}: {error}"
    else:
        (reason,) = [path.name for path in recover.glob(".rejected-*")] or [
            "nothing was quarantined"
        ]
        named = any(slug(word) in reason for word in words)
        sound = found.step == 0 and found.record == older
        verdict = (
            None if sound and named else ("undetected", f"step {found.step} was loaded; {reason}")
        )
    return ("executed", "the payload ran") if marker.exists() else verdict


def _run(
    kind: str,
    attacks: list[Attack],
    good: Path,
    victim: Victim,
    older: str,
    tmp_path: Path,
    tally: Tally,
    progress: Callable[[str], None],
) -> None:
    problems = []
    for number, attack in enumerate(attacks):
        for redigested in (False, True):
            with quiet():
                problem = _judge(
                    attack, redigested, good, tmp_path / "run", victim, older, tmp_path / "marker"
                )
            shutil.rmtree(tmp_path / "run")
            (tmp_path / "marker").unlink(missing_ok=True)
            tally.add(kind, injected=1, **{problem[0] if problem else "survived": 1})
            if problem:
                problems.append(
                    f"{attack.name}{', with new digests' if redigested else ''}: {problem[1]}"
                )
        progress(f"{kind}: {number + 1} of {len(attacks)}, {len(problems)} bad")
    assert attacks and not problems, f"{len(problems)} of {2 * len(attacks)}:\n" + "\n".join(
        problems[:20]
    )


@pytest.fixture(scope="module")
def older(good: Path, victim: Victim, tmp_path_factory: pytest.TempPathFactory) -> str:
    """State that the older generation restores."""
    root = tmp_path_factory.mktemp("older") / "run"
    copy_generations(good, root, OLDER)
    return victim.load(root).record


def test_every_payload_is_alive(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    streams = payload_streams(marker)
    objects = {
        f"{name}, pickled": pickle.dumps(value) for name, value in payload_objects(marker).items()
    }
    for name, stream in (streams | objects).items():
        for how, wrap in WRAPPINGS.items():
            careless(wrap(stream))
            assert marker.exists(), f"{name}, {how}, does nothing"
            marker.unlink()


def test_no_pickle_runs_wherever_it_is_planted(
    good: Path,
    victim: Victim,
    older: str,
    tmp_path: Path,
    tally: Tally,
    progress: Callable[[str], None],
) -> None:
    by_place: dict[str, list[Attack]] = {}
    for attack in pickle_attacks(tmp_path / "marker"):
        by_place.setdefault(attack.name.rpartition(", ")[2], []).append(attack)
    attacks = [attack for place in by_place.values() for attack in pick(place, SHARE)]
    _run("pickle that runs code", attacks, good, victim, older, tmp_path, tally, progress)


def test_no_name_leads_out_of_the_folder_no_size_takes_memory(
    good: Path,
    victim: Victim,
    older: str,
    tmp_path: Path,
    tally: Tally,
    progress: Callable[[str], None],
) -> None:
    _run(
        "name or size that lies",
        list(odd_attacks()),
        good,
        victim,
        older,
        tmp_path,
        tally,
        progress,
    )


@pytest.mark.skipif(not CAN_MEASURE, reason="cannot reset the peak of memory")
def test_a_small_file_that_unpacks_large_is_refused_before_it_does(
    good: Path,
    victim: Victim,
    older: str,
    tmp_path: Path,
    tally: Tally,
    progress: Callable[[str], None],
) -> None:
    assert (
        peak_growth_bytes(lambda: torch.zeros(BOMB_BYTES, dtype=torch.uint8).fill_(1))
        > ALLOWED_BYTES
    )
    for attack in bomb_attacks():
        grown = peak_growth_bytes(
            lambda attack=attack: _run(
                "zip bomb", [attack], good, victim, older, tmp_path, tally, progress
            )
        )
        assert grown < ALLOWED_BYTES, f"{attack.name}: took {grown} bytes"


def _load_each(rank: int, world_size: int, roots: list[str]) -> list[str]:
    """Load each generation and return the errors."""
    states, said = sharded_states(world_size), []
    for root in roots:
        handler = make_handler(root, freq_steps=1)
        try:
            with time_limit(LOAD_TIMEOUT_S):
                handler.load(states, make_loader("own", rank, world_size))
            said.append("was loaded")
        except HoldfastError as error:
            said.append(f"{type(error).__name__}: {error}")
        finally:
            handler.close()
    return said


def test_a_file_that_one_rank_reads_is_refused_on_both(
    good: Path, tmp_path: Path, tally: Tally
) -> None:
    """With new digests. Rank 0 never opens the file of rank 1."""
    marker, roots = tmp_path / "marker", []
    for number, (what, stream) in enumerate(payload_streams(marker).items()):
        folder = copy_generations(good, tmp_path / str(number), NEWER) / NEWER
        plant_file("state/rank_00001.pt", WRAPPINGS["zip"](stream), folder)
        reseal(folder)
        roots.append(str(tmp_path / str(number)))
        assert what
    first, second = run_ranks(_load_each, 2, roots)
    assert all("PeerError" in text and "rank_00001.pt" in text for text in first), first
    assert all("CheckpointCorruptError" in text and "rank_00001.pt" in text for text in second), (
        second
    )
    assert not marker.exists()
    tally.add("pickle that runs code, two ranks", injected=len(roots), survived=len(roots))


def test_torchs_own_loader_runs_a_planted_object_and_load_dcp_does_not(
    tmp_path: Path, tally: Tally
) -> None:
    """The folder is written by stock torch, with a byte entry next to the model."""
    marker, saved, loaded = tmp_path / "marker", torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    planted = Call(os.system, f"touch {marker}")
    dcp.save(
        {"dcp": {"model": saved.state_dict(), "evil": planted}},
        checkpoint_id=tmp_path / "stock",
        no_dist=True,
    )
    load_dcp(tmp_path / "stock", DCPState(loaded))
    assert torch.equal(loaded.weight, saved.weight) and not marker.exists()
    wanted = {"dcp": {"model": loaded.state_dict(), "evil": None}}
    dcp.load(wanted, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert marker.exists(), "the attack is not alive"
    tally.add("pickle that runs code, stock folder", injected=1, survived=1)


def _flip_sealed(name: str, at: int, folder: Path) -> None:
    data = bytearray((folder / name).read_bytes())
    data[at] ^= 1 << (at % 8)
    replace_bytes(folder / name, data)


def test_nonsense_with_right_digests_is_refused_or_does_no_harm(
    good: Path, victim: Victim, tmp_path: Path, tally: Tally, progress: Callable[[str], None]
) -> None:
    """Flip any bit of parsed files and compute new digests, so that only the parsers can notice."""
    dice, problems = Random(1), []
    for name in ("actor/.metadata", STATE, "data.pt", INFO_NAME):
        size = (good / NEWER / name).stat().st_size
        places = pick(dice.sample(range(size), min(size, 400)), SHARE)
        for number, at in enumerate(places):
            folder = copy_generations(good, tmp_path / "run", NEWER) / NEWER
            _flip_sealed(name, at, folder)
            reseal(folder)
            problem = None
            with quiet():
                try:
                    victim.load(tmp_path / "run")
                except HoldfastError:
                    pass
                except Exception as error:  # the harness reports every error
                    problem = f"{name}, byte {at}: {type(error).__name__}: {error}"
            shutil.rmtree(tmp_path / "run")
            problems += [problem] if problem else []
            tally.add(
                "nonsense with right digests", injected=1, **{"lost" if problem else "survived": 1}
            )
            progress(f"nonsense in {name}: {number + 1} of {len(places)}, {len(problems)} bad")
    assert not problems, f"{len(problems)}:\n" + "\n".join(islice(problems, 20))


def _framed(payload: bytes) -> bytes:
    return FRAME.pack(MAGIC, len(payload), xxhash.xxh3_128_digest(payload)) + payload


def _plant_in_log(folder: Path, name: str, data: bytes, size: int | None = None) -> None:
    path = folder / name
    path.write_bytes(data)
    if size is not None:
        os.truncate(path, size)


def test_malicious_files_of_a_log_run_nothing_and_take_no_memory(
    tmp_path: Path, tally: Tally
) -> None:
    def start() -> Diary:
        handler = make_handler(tmp_path, freq_steps=1)
        diary = Diary()
        handler.register("diary", diary)
        handler.load(Tiny().state)
        diary.note("sound")
        handler.close(wait=False)
        return diary

    start()
    folder = tmp_path / "e" / "t" / "recover" / "episodes" / "diary"
    (sound,) = log_files(folder)
    marker = tmp_path / "ran"
    code = pickle.dumps(Call(os.mkdir, str(marker)))
    claims = FRAME.pack(MAGIC, (1 << 32) - 1, bytes(16)) * 100

    # All of them descend from the sound file.
    ending = f"{sound.id}.log"
    _plant_in_log(folder, f"00000002-aaaaaaa1-{ending}", claims, size=1 << 40)
    _plant_in_log(folder, f"00000003-aaaaaaa2-{ending}", os.urandom(1 << 16))
    _plant_in_log(folder, f"00000004-aaaaaaa3-{ending}", code)
    os.mkfifo(folder / f"00000005-aaaaaaa4-{ending}")
    os.symlink("/dev/zero", folder / f"00000006-aaaaaaa5-{ending}")
    os.symlink(folder, folder / f"00000007-aaaaaaa6-{ending}")
    _plant_in_log(folder, f"99999999-aaaaaaa7-{'0' * 8}.log", _framed(code))

    with time_limit(LOAD_TIMEOUT_S):
        if CAN_MEASURE:
            grown = peak_growth_bytes(start)
            assert grown < ALLOWED_BYTES, f"{grown} bytes"
        found = start().read
    assert "sound" in found and not marker.exists()
    assert code.decode(errors="replace") in found, "the object gets it as bytes"
    tally.add("malicious file of a log", injected=7, survived=7)
