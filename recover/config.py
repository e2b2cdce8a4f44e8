"""Configuration of recovery, under AReaL's names.

The keys that begin with ``mirror_`` are about copies of generations, not of published weights.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..engine.api import ADAPTER_FORMS, EXPORT_DTYPES
from ..utils.config import require_at_least, require_choice, require_numbers
from ..utils.errors import ConfigError
from ..utils.remote import FETCH_FIRST, require_local

_MODE_NAMES = {"on": "auto", "disabled": "off", "True": "auto", "False": "off"}
"""Names of AReaL, and the values that YAML 1.1 reads from an unquoted ``on`` or ``off``, with our
names.
"""

_LOWEST = {
    "freq_epochs": 1,
    "freq_steps": 1,
    "max_ckpt_to_keep": 1,
    "keep_every_steps": 1,
    "keep_best": 1,
    "hf_freq_steps": 1,
    "hf_max_to_keep": 1,
    "mirror_max_to_keep": 1,
    "save_failures_allowed": 0,
    "retries": 0,
    "freq_secs": 0.0,
    "lock_timeout_s": 0.0,
    "mirror_timeout_s": 0.0,
    "node_wait_s": 0.0,
    "episode_log_s": 0.0,
    "shrink_after_s": 0.0,
    "retry_window_s": 0.0,
    "save_timeout_s": 1.0,
}


@dataclass
class RecoverConfig:
    """Where generations are stored, how often they are made, and what happens at the start of a
    job.

    Example:

        RecoverConfig("grpo", "seed0", fileroot="/shared/runs", freq_steps=10)
    """

    experiment_name: str = "experiment"
    """Group of trials, and second folder of every path."""
    trial_name: str = "trial"
    """Name of one run, and third folder of every path."""
    fileroot: str = "runs"
    """First folder of every path. All ranks must see it."""
    mode: str = "auto"
    """``auto``: resume if there is a generation, else start fresh. ``must``: resume or fail.
    ``off``: neither resume nor snapshot nor export. AReaL's ``on`` and ``disabled`` mean ``auto``
    and ``off``.
    """
    resume_path: str | None = None
    """Resume from this generation instead of the newest one. Later generations in the run's folder
    are quarantined. A restart with the same value continues from the generations that the run has
    written since.
    """
    freq_epochs: int | None = None
    """Snapshot at the end of every N-th epoch."""
    freq_steps: int | None = None
    """Snapshot every N steps."""
    freq_secs: float | None = None
    """Snapshot when this many seconds have passed since the last snapshot."""
    max_ckpt_to_keep: int | None = 2
    """Number of newest generations to keep. None keeps all. A generation stays if this rule or one
    of the next two keeps it. The newest usable generation always stays.
    """
    keep_every_steps: int | None = None
    """Keep every N-th generation for good. With 100: steps 99, 199, 299 ..."""
    keep_best: int | None = None
    """Number of best generations to keep, by ``best_metric``."""
    best_metric: str | None = None
    """Name of one of the ``metrics`` given to ``dump``."""
    best_mode: str = "max"
    """Whether the ``max`` or the ``min`` of ``best_metric`` is best."""
    async_save: bool = True
    """True: ``dump`` returns when the state is copied to host memory, and writes in the background.
    False: ``dump`` returns when the snapshot is committed.
    """
    on_busy: str = "wait"
    """What to do if a snapshot or export is due while the previous one is still being written:
    ``wait`` for the previous one, or ``skip`` the new one.
    """
    hf_freq_steps: int | None = None
    """Export the weights in Hugging Face format every N steps, to ``hf/global_step_<N>``. With 10:
    steps 9, 19, 29 ... Exports are written in the background like snapshots. If both are due, they
    share one staged copy.
    """
    hf_engine: str | None = None
    """Name of the engine to export, if there are several."""
    hf_dtype: str | None = None
    """Dtype of exported floating-point weights: ``float32``, ``bfloat16`` or ``float16``. None
    takes the dtype of the folder that the engine's model was made from. Without an engine, None
    leaves each weight unchanged.
    """
    hf_adapters: str = "merged"
    """How to export a model with adapters: ``merged`` weights, which load like any model, or small
    ``peft`` folders (``adapter_model.safetensors``, ``adapter_config.json``), which load on top of
    the base.
    """
    hf_max_to_keep: int | None = None
    """Number of newest exports to keep, and as many that a resumed run has rejected. None keeps
    all.
    """
    save_timeout_s: float = 1800.0
    """How long ranks wait for each other while they write in the background."""
    save_failures_allowed: int = 3
    """Number of snapshots in a row that may fail, for example on a full disk, before the run ends.
    With 0 the first failure ends it. Exports are counted separately, with the same limit. A forced
    snapshot and the one before a stop may never fail. An export may fail then, because the next
    start makes it.
    """
    episode_log_s: float | None = 2.0
    """Longest time in seconds until a recorded answer of a rollout survives a power cut. A kill of
    the process loses none. None writes no log: a kill loses the answers of unfinished episodes
    since the last generation.
    """
    lock_timeout_s: float = 10.0
    """How long to wait for another job that uses the same folder before this job is refused, and
    ends with exit code 75. A job that was just killed may need this long to disappear. On NFS, if
    its host died too, that can take 90 s. A job that SLURM has started again waits for 90 s at
    least.
    """
    stop_signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGINT"])
    """Signals that cause a snapshot at the next step boundary and exit code 75. A second SIGINT
    stops at once.
    """
    must_save_by: str | int | float | None = None
    """When the job will be ended. The last snapshot is made as late as is safe before it, and the
    run stops.

    - A duration from the start of the process: ``90m``, ``3h30m``, ``2d``, ``5400s``.
    - A time, which stays the same after a restart: ``2026-11-20T18:00``, local unless it has an
      offset, or a Unix time of ten digits.
    - ``slurm``: the end of SLURM's job, from SLURM_JOB_END_TIME or squeue.

    Before a save has been measured, three minutes are kept free for it (half of that without
    ``async_save``), and at most a third of the time until the end.
    """
    mirror_url: str | None = None
    """fsspec URL to which committed generations are copied in the background: ``s3://bucket/runs``,
    ``gs://``, ``hdfs://``, ``file:///...``. Experiment and trial are appended. None makes no
    copies.
    """
    mirror_max_to_keep: int | None = 2
    """Number of newest generations to keep at the mirror. None keeps all."""
    mirror_timeout_s: float = 600.0
    """How long the end of a run waits for unfinished copies. If the process will be ended at a
    known time (``must_save_by``, or a notice), the wait ends before.
    """
    retries: int = 3
    """How often a job may be restarted after losing workers, within ``retry_window_s``."""
    retry_window_s: float = 3600.0
    """Losses older than this do not count. Time that passed because lost workers made no progress
    is left out.
    """
    node_wait_s: float = 600.0
    """How long to wait for resources that the Ray cluster lacks, for example after the loss of a
    node. The wait uses no retry. Afterwards the job ends, and the same command resumes it.
    """
    shrink_after_s: float | None = None
    """How much of ``node_wait_s`` to wait for all ranks of a worker group that may run with fewer
    (``min_world_size``). None means all of it."""

    def __post_init__(self) -> None:
        require_numbers(self, "recover.")
        self.mode = _MODE_NAMES.get(self.mode, self.mode)
        require_choice("recover.mode", self.mode, ("auto", "must", "off"))

        # Paths.
        advice = "give one that all ranks see, and set recover.mirror_url for copies at a URL"
        key = "config key 'recover.fileroot'"
        self.fileroot = str(require_local(self.fileroot, "a run", advice, key))
        if self.resume_path is not None:
            key = "config key 'recover.resume_path'"
            self.resume_path = str(require_local(self.resume_path, "resuming", FETCH_FIRST, key))
            _require_short(key, self.resume_path)
        _require_short("'recover.fileroot', experiment_name and trial_name", str(self.recover_root))

        # Words and numbers.
        require_choice("recover.best_mode", self.best_mode, ("max", "min"))
        require_choice("recover.on_busy", self.on_busy, ("wait", "skip"))
        require_choice("recover.hf_dtype", self.hf_dtype, (None, *EXPORT_DTYPES))
        require_choice("recover.hf_adapters", self.hf_adapters, ADAPTER_FORMS)
        require_at_least(self, "recover.", **_LOWEST)

        # Keys that need each other.
        if (self.keep_best is None) != (self.best_metric is None):
            raise ConfigError(
                f"config keys 'recover.keep_best' ({self.keep_best!r}) and 'recover.best_metric' "
                f"({self.best_metric!r}) go together; set both or neither"
            )

    @property
    def trial_root(self) -> Path:
        """Folder of the run, ``<fileroot>/<experiment>/<trial>``."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def recover_root(self) -> Path:
        """Folder of the generations."""
        return self.trial_root / "recover"

    @property
    def hf_root(self) -> Path:
        """Folder of the Hugging Face exports."""
        return self.trial_root / "hf"

    @property
    def lock_path(self) -> Path:
        """Lock file that a job holds while it uses the folder."""
        return self.trial_root / "recover.lock"

    @property
    def mirror_path(self) -> str | None:
        """URL of the copies of this trial, or None."""
        if self.mirror_url is None:
            return None
        return "/".join((self.mirror_url.rstrip("/"), self.experiment_name, self.trial_name))


_LONGEST_BYTES = 4096 - 512
"""Linux allows 4096 bytes for a path. The rest is for the names of files in a generation."""


def _require_short(key: str, path: str) -> None:
    n_bytes = len(os.fsencode(os.path.abspath(path)))
    longest_name = max((len(os.fsencode(part)) for part in Path(path).parts), default=0)
    if n_bytes > _LONGEST_BYTES or longest_name > 255:
        raise ConfigError(
            f"{key} give a path of {n_bytes} bytes, {path[:60]!r}...; expected at most "
            f"{_LONGEST_BYTES}, and 255 a name"
        )
