"""The checks of a resume, in the order in which they run on all ranks.

- Before anything is chosen: all ranks see the folder (`check_shared`).
- Before anything changes: the bytes are sound (`check_bytes`), and the engines are of this job
  (`open_generation`).
- Afterwards: the restored run has the facts that its generation recorded (`check_restored`, see
  `engines`).
"""

import io
import re
import socket
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ...engine.dcp.configured import Setting, Settled, warn_of_settings
from ...engine.dcp.format import read_layout
from ...engine.dcp.load import Checkpoint
from ...utils.distributed import all_ranks_succeed, get_rank, get_world_size
from ...utils.errors import (
    CheckpointCorruptError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
)
from ...utils.logging import get_logger
from ...utils.manifest import verify_file
from ..engines import engines_of
from ..info import EngineFacts
from ..ranks import Ranks

logger = get_logger(__name__)


def check_shared(ranks: Ranks, folder: Path) -> None:
    """Check that all ranks see the folder of the run. Collective over the callers.

    The leader, which has locked ``folder``, makes a file there, and every rank looks for it.
    Otherwise a node with another file system under this path would be found only when the first
    snapshot is committed, perhaps hours later.

    Raises:
        ConfigError: a rank does not see the file. The message names ranks, nodes and the folder.
    """
    probe = ranks.decide(partial(_make_probe, folder))
    if probe is None:
        return
    # Ask all ranks, and leave no file behind.
    try:
        blind = [found for found in ranks.run_all(_look_for, str(probe)) if found is not None]
    finally:
        if ranks.is_leader:
            probe.unlink(missing_ok=True)
    if blind:
        leaders_host = ranks.decide(socket.gethostname)
        raise ConfigError(
            f"{'; '.join(blind)} does not see {probe}, which the leader sees on {leaders_host}; "
            "all ranks need the same folder under the same path (an absolute recover.fileroot, "
            "mounted everywhere)"
        )


def _make_probe(folder: Path) -> Path | None:
    """Make an empty file with a name that no node can have cached. None if the disk has no room."""
    for leftover in folder.glob(".shared-*"):  # from a start that was killed
        leftover.unlink(missing_ok=True)
    probe = folder.absolute() / f".shared-{uuid.uuid4().hex}"
    try:
        probe.touch(exist_ok=False)
    except OSError as error:  # the first snapshot reports a full disk
        logger.warning(
            "cannot make %s, so that it is not known whether all ranks see this folder: %s",
            probe,
            error,
        )
        return None
    return probe


def _look_for(holder: Any, probe: str) -> str | None:
    if Path(probe).exists():
        return None
    return f"rank {get_rank()} on {socket.gethostname()}"


def check_bytes(holder: Any, generation: str, files: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Compare the bytes of this rank's share of a generation with their digests. Returns the
    problem, if there is one.

    The tensors described by each ``.metadata`` must be complete too, because the mistake of a
    writer has the right digest. One rank alone would take minutes for a large checkpoint, so the
    ranks share the files (see `share_of`).

    Args:
        holder: see `engines_of`.
        generation: folder whose names and sizes the leader has compared with the manifest.
        files: the manifest's entries, as the leader read them.

    Raises:
        CheckpointNotFoundError: this rank does not see a file that the leader sees. This does not
            mean that the generation is damaged.
    """
    group = engines_of(holder).group
    sizes = {name: entry["bytes"] for name, entry in files.items()}
    # A wrong byte is an answer, so that the leader can go on with another generation. A file that
    # is not seen is an error of the setup.
    for name in share_of(sizes, get_rank(group), get_world_size(group)):
        try:
            verify_file(generation, name, files[name])
            if Path(name).name == ".metadata":
                read_layout(Path(generation, name).parent)
        except CheckpointCorruptError as error:
            return str(error)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(
                f"rank {get_rank()} does not see {generation}/{name}, which the leader sees; all "
                "ranks need the same folder under the same path (an absolute recover.fileroot, "
                "mounted everywhere)"
            ) from error
    return None


_OF_RANK = re.compile(r".+/__(\d+)_\d+\.distcp|state/rank_(\d+)\.pt")


def share_of(files: Mapping[str, int], rank: int, world_size: int) -> list[str]:
    """Names of the files (name -> bytes) that ``rank`` of ``world_size`` verifies. Each file is in
    one rank's share.

    - ``.metadata`` is rank 0's.
    - At the world size of the save, a rank verifies its own data files and its own process state.
      It reads them next, and finds them in the page cache of its machine.
    - All other files, and at another world size all files, are assigned from the largest to the
      smallest, each to the rank with the fewest bytes so far.
    """
    # Files that a rank reads next.
    owners = {}
    for name in files:
        match = _OF_RANK.fullmatch(name)
        if match:
            owners[name] = int(match[1] or match[2])
    if set(owners.values()) != set(range(world_size)):  # saved at another world size
        owners = {}
    for name in files:
        if Path(name).name == ".metadata":
            owners[name] = 0

    # Files with an owner come first, because the others level out the bytes of the ranks.
    in_order = sorted(files, key=lambda name: (name not in owners, -files[name], name))
    shares: list[list[str]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for name in in_order:
        owner = owners.get(name, loads.index(min(loads)))
        shares[owner].append(name)
        loads[owner] += files[name]
    return shares[rank]


class OpenedGeneration:
    """The engine folders of a verified generation, opened once on each rank: a session of `Ranks`.

    Attributes:
        path: folder of the generation.
        checkpoints: engine name -> its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints: dict[str, Checkpoint] = {}

    def close(self) -> None:
        """Forget the layouts, which may take tens of megabytes."""
        self.checkpoints.clear()


def open_generation(holder: Any, generation: str) -> OpenedGeneration:
    """Open a verified generation and compare it with this rank's engines, before any engine is
    touched. All ranks call it.

    Raises:
        CheckpointMismatchError: it holds other engines, or another model or optimizer (see
            `Checkpoint.check`).
    """
    target = engines_of(holder)
    path = Path(generation)
    with all_ranks_succeed(f"comparing {path}", target.group_of()):
        saved = {entry.name for entry in path.iterdir() if entry.is_dir()} - {"state"}
        if saved != target.engines.keys():
            raise CheckpointMismatchError(
                f"{path} holds engines {sorted(saved)}, this job has {sorted(target.engines)}"
            )
        states = {name: target.state(name) for name in target.engines}
    opened = OpenedGeneration(path)
    for name, state in states.items():
        opened.checkpoints[name] = Checkpoint.open(path / name, target.group_of(name))
        opened.checkpoints[name].check(state)
    return opened


def check_restored(
    what: str,
    saved: tuple[Mapping[str, EngineFacts], Mapping[str, str]],
    restored: tuple[Mapping[str, EngineFacts], Mapping[str, str]],
) -> str:
    """Compare the restored state with the saved one, of the generation ``what``. Returns a table
    for the log.

    Args:
        what: name of the generation.
        saved: engine name -> facts, and process -> digest of its generators, from the generation.
        restored: the same, from the live engines and processes. Processes that the saved run did
            not have are absent.

    Raises:
        CheckpointCorruptError: something differs, although every byte that was read matched its
            digest.
    """
    # Everything that was restored must have been saved.
    saved_facts, saved_generators = saved
    facts, generators = restored
    unknown_engines = facts.keys() - saved_facts.keys()
    unknown_processes = generators.keys() - saved_generators.keys()
    unknown = sorted(unknown_engines | unknown_processes)
    if unknown:
        raise CheckpointCorruptError(
            f"{what} was restored, but its recover_info.json says nothing of {unknown[0]!r}"
        )

    # Compare what the restored run has. The saved one may have had more.
    expected = _rows(saved_facts, saved_generators)
    rows = _rows(facts, generators)
    for name, engine in saved_facts.items():
        if engine.schedule_step is None:  # the run had no schedule, and this one may begin with one
            rows.pop(f"{name}: schedule_step", None)

    # A learning rate may have become NaN, which differs from itself.
    wrong = []
    for part, now in rows.items():
        before = expected.get(part)
        if now != before and (now == now or before == before):
            wrong.append((part, now, before))
    if wrong:
        part, now, before = wrong[0]
        raise CheckpointCorruptError(
            f"{what} was restored, but {part} is {now!r}; recover_info.json says {before!r} "
            f"({len(wrong)} of {len(rows)} differ). Do not go on with this run; report it"
        )
    return _render(what, rows)


def _rows(facts: Mapping[str, EngineFacts], generators: Mapping[str, str]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, engine in facts.items():
        for count in ("optimizer_steps", "lr", "schedule_step"):
            value = getattr(engine, count)
            if value is not None:
                rows[f"{name}: {count}"] = value
        for part, fingerprint in engine.fingerprints.items():
            rows[f"{name}: {part}"] = fingerprint
    for name, digest in generators.items():
        rows[f"generators of {name}"] = digest
    return rows


def _render(what: str, rows: Mapping[str, Any]) -> str:
    table = Table(title=f"restored from {what}", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what")
    table.add_column("as saved and as restored")
    for part, value in rows.items():
        table.add_row(part, str(value))
    out = io.StringIO()
    Console(file=out, width=110, color_system=None).print(table)
    return out.getvalue().rstrip()


def warn_of_configuration(
    what: str, saved: Mapping[str, str], now: Mapping[str, str], settled: Mapping[str, Settled]
) -> None:
    """Log one warning of everything that is configured otherwise than in the run that saved the
    generation ``what``.

    Args:
        what: name of the generation.
        saved, now: the `numerical_switches` of the generation, and those of rank 0.
        settled: engine name -> what its load found, in rank 0.
    """
    changed = []
    kept = []

    # Settings of torch and of the engines' configurations.
    for name in saved:
        if name not in now or saved[name] == now[name]:
            continue
        if _is_adapted(name, saved) and _is_adapted(name, now):
            kept.append(Setting(name, "the adapted one", now[name]))
        else:
            changed.append(Setting(name, saved[name], now[name]))

    # Settings that the load of an engine compares.
    for engine, found in settled.items():
        changed += [setting.of(f" of {engine}") for setting in found.changed]
        kept += [setting.of(f" of {engine}") for setting in found.kept]
    warn_of_settings(what, changed, kept)


def _is_adapted(name: str, switches: Mapping[str, str]) -> bool:
    """Whether a setting is a start value, which `AdaptiveKLController` has changed since and a load
    brings back.
    """
    key, _, engine = name.partition(" of ")
    return key == "kl_ctl" and switches.get(f"kl_target of {engine}", "None") != "None"
