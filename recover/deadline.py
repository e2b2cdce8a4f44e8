"""``recover.must_save_by``: when the job will be ended, as Unix time.

Newer versions of SLURM set SLURM_JOB_END_TIME. In all versions squeue tells the end of a job. It
asks the controller, so one rank asks for all.
"""

import contextlib
import os
import re
import subprocess
from datetime import datetime

from ..utils.errors import ConfigError
from ..utils.processes import process_started_at

SLURM = "slurm"
"""Value of ``recover.must_save_by`` that asks SLURM."""
_SQUEUE_S = 60.0
"""Time limit for squeue, which itself asks a busy controller again."""

_UNITS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d.*")
_UNIX_TIME = re.compile(r"\d{10}(\.\d+)?", re.ASCII)
_FORMS = (
    "a duration from the start of the process with its units ('90m', '3h30m', '2d', '5400s'), a "
    "time ('2026-11-20T18:00', local unless it has an offset as '+01:00'), a Unix time of ten "
    "digits, or 'slurm' in a job of SLURM"
)


def parse_deadline(value: str | float, after: float) -> float:
    """Parse ``recover.must_save_by``, other than `SLURM`, into Unix time. Raises `ConfigError`
    unless it is a time later than ``after``.
    """
    deadline = _parse(str(value).strip())
    if deadline is None:
        raise ConfigError(f"config key 'recover.must_save_by' is {value!r}; expected {_FORMS}")
    if deadline <= after:
        raise ConfigError(
            f"config key 'recover.must_save_by' is {value!r}, which was over at "
            f"{local_time(deadline)}; expected something to come: {_FORMS}"
        )
    return deadline


def require_slurm() -> str:
    """Return the id of SLURM's job, for a task of an array as squeue takes it. Raises `ConfigError`
    outside of a job.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigError(
            f"config key 'recover.must_save_by' is '{SLURM}', but this process is in no job of "
            "SLURM (SLURM_JOB_ID is not set); give a duration or a time, or none"
        )
    # The last task of an array has the id of the array, by which squeue lists all of its tasks.
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return job


def end_of_slurm_job() -> float:
    """Unix time at which SLURM ends the job of this process.

    Raises:
        ConfigError: there is no job, squeue is missing or fails, or the job has no end.
    """
    job = require_slurm()
    told = os.environ.get("SLURM_JOB_END_TIME", "")
    asked = "SLURM_JOB_END_TIME"
    if not told:
        asked = f"squeue -h -j {job} -o %e"
        told = _run(asked)
    end = _parse(told)
    if end is None or end <= process_started_at():
        raise ConfigError(
            f"config key 'recover.must_save_by' is '{SLURM}', but {asked} gives {told!r}, which is "
            "no time to come; give a duration or a time, or none"
        )
    return end


def _run(command: str) -> str:
    # As Unix time, because a local time is ambiguous for an hour of each year.
    environment = {**os.environ, "SLURM_TIME_FORMAT": "%s"}
    try:
        done = subprocess.run(
            command.split(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_SQUEUE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise ConfigError(
            f"config key 'recover.must_save_by' is '{SLURM}', SLURM_JOB_END_TIME is not set, and "
            f"'{command}' failed: {said}; give a duration or a time"
        ) from error
    return done.stdout.strip()


def local_time(unix_s: float) -> str:
    """Format a Unix time as local time with its offset."""
    return datetime.fromtimestamp(unix_s).astimezone().isoformat(timespec="seconds")


def _parse(text: str) -> float | None:
    # Unix time. None if the text has none of the forms.
    duration = _UNITS.fullmatch(text)
    if text and duration:
        days, hours, minutes, seconds = (int(group or 0) for group in duration.groups())
        duration_s = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
        return process_started_at() + duration_s
    if _UNIX_TIME.fullmatch(text):
        return float(text)
    if _TIME.fullmatch(text):
        with contextlib.suppress(ValueError):
            return datetime.fromisoformat(text).timestamp()
    return None
