"""What the prober of a `ServerFleet` does with one server: have it load the weights that it should
serve, or put it to sleep again.
"""

import time
from contextlib import suppress

from .api import ObservableServer, ServerState, ServerStatus
from .fleet_member import ABOUT_TO_SLEEP, FleetMember, PublishedFolder
from .sleep import TAGS

# A server is gone if a status request takes longer. A busy server may take some seconds.
_SILENCE_S = 10.0
_LONGEST_PAUSE_S = 300.0
"""Longest pause between failed loads, and time limit of commands to sleep."""


def note_silence(member: FleetMember) -> None:
    """Note the server as gone if a status request has taken too long."""
    with member.changed:
        if member.asked_at is None:
            return
        silent_s = time.monotonic() - member.asked_at
        if silent_s >= _SILENCE_S:
            member.note(ServerState.GONE, f"it has not answered for {silent_s:.0f} s")


def look_after(member: FleetMember, retry_s: float) -> None:
    """Have the server load the wanted weights if it serves others, or sleep if it should. Do
    nothing during another update.
    """
    if not member.busy.acquire(blocking=False):
        return
    try:
        folder = member.wanted
        if member.resting:
            _look_after_sleeper(member)
        elif folder is not None and _needs_load(member, folder) and folder.on_disk:
            # The status request took a while, in which the publisher may have decided otherwise.
            still_wanted = member.wanted is folder and not member.resting
            if still_wanted and time.monotonic() >= member.retry_at(retry_s, _LONGEST_PAUSE_S):
                member.load(folder)
    finally:
        member.busy.release()


def _look_after_sleeper(member: FleetMember) -> None:
    if member.report.error == ABOUT_TO_SLEEP:  # the command is on its way
        return
    status = member.ask()
    if status is None:
        return
    whole = member.resting == TAGS
    if not set(member.resting) <= set(status.asleep):
        member.note_unready(status, "it was restarted while it should sleep")
    elif member.sleeps or not whole:
        member.note_unready(status, None)
        return

    # Also if it said before that it sleeps, and then failed to.
    if whole:
        with suppress(Exception):  # the report has it
            fall_asleep(member, _LONGEST_PAUSE_S)


def _needs_load(member: FleetMember, folder: PublishedFolder) -> bool:
    if not isinstance(member.server, ObservableServer):
        return not member.serves
    status = member.ask()
    if status is None:
        member.failures = 0  # the server may have been restarted
        return False

    # The label alone proves nothing: the load may have failed afterwards, or another job may
    # publish.
    with member.changed:
        if member.confirmed is folder and status == ServerStatus(folder.label, paused=False):
            member.confirm(folder)
            return False
        if member.resting:
            return False

    # The error of a failed load is more specific than what the server says.
    problem = _seen_problem(member, folder, status)
    if member.failures and member.report.error:
        problem = member.report.error
    member.note_unready(status, problem)
    return True


def _seen_problem(member: FleetMember, folder: PublishedFolder, status: ServerStatus) -> str:
    seen = f"it serves {status.label or 'other weights'}"
    if status.asleep:
        seen = "it sleeps"
    elif status.paused:
        seen = "it is paused"

    other_label = status.label not in (None, folder.label)
    if other_label and not status.paused and member.confirmed is folder:
        seen += (
            f", published by somebody else since it confirmed {folder.label}; let one job publish "
            "to a server"
        )
    return seen


def fall_asleep(member: FleetMember, timeout_s: float) -> None:
    """Have the server sleep. Raises as `FleetMember.command` does."""
    member.command(lambda server: server.sleep(member.sleep_level), timeout_s)
    member.sleeps = True
