"""What recovery can be told, under AReaL's names."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from ..engine.api import ADAPTER_FORMS, EXPORT_DTYPES
from ..utils.config import require_choice, require_range
from ..utils.errors import ConfigError
from ..utils.remote import FETCH_FIRST, require_local

_MODE_NAMES = {"on": "auto", "disabled": "off", "True": "auto", "False": "off"}
"""AReaL's words -> ours, and what YAML 1.1 makes of ``on`` and ``off`` without quotes."""


@dataclass
class RecoverConfig:
    """Where generations live, how often one is made, and what happens at the start of a job."""

    experiment_name: str = "experiment"
    """Groups trials; the second folder of every path."""
    trial_name: str = "trial"
    """Names one run; the third folder of every path."""
    fileroot: str = "runs"
    """First folder of every path; all ranks must see it."""
    mode: str = "auto"
    """``auto``: resume when there is something to resume, else start. ``must``: resume or fail. ``off``: neither resume
    nor snapshot nor export. AReaL's ``on`` and ``disabled`` mean ``auto`` and ``off``."""
    resume_path: str | None = None
    """Resume from this generation instead of the newest. Later ones in this run's folder are quarantined. A restart
    with the same value goes on from what the run has written since."""
    freq_epochs: int | None = None
    """Snapshot at the end of every so many epochs."""
    freq_steps: int | None = None
    """Snapshot every so many steps."""
    freq_secs: float | None = None
    """Snapshot when so many seconds have passed since the last one."""
    max_ckpt_to_keep: int | None = 2
    """How many of the newest generations stay; None keeps all. A generation stays when this rule or any of the next two
    wants it; the newest usable one always does."""
    keep_every_steps: int | None = None
    """Generations of every so many steps stay for good: 100 means steps 99, 199, 299 ..."""
    keep_best: int | None = None
    """How many of the best generations stay, by ``best_metric``."""
    best_metric: str | None = None
    """A name among the ``metrics`` given to ``dump``."""
    best_mode: str = "max"
    """Whether the ``max`` or the ``min`` of ``best_metric`` is best."""
    async_save: bool = True
    """Whether ``dump`` returns when the state is staged (in host memory, a shard of it) and the rest goes on in the
    background; else it returns when the snapshot is committed."""
    on_busy: str = "wait"
    """What becomes of a snapshot or export that is due while the last one is still being written: ``wait`` for that, or
    ``skip`` this one."""
    hf_freq_steps: int | None = None
    """Export the weights in Hugging Face format every so many steps, as ``hf/global_step_<N>`` beside the snapshots; in
    the background like these, from the same staged copy where both are due. 10 means steps 9, 19, 29 ..."""
    hf_engine: str | None = None
    """Which of several named engines is exported."""
    hf_dtype: str | None = None
    """What floating-point weights are exported as: ``float32``, ``bfloat16`` or ``float16``; None takes the dtype of
    the folder that the engine's model was made from, and keeps each as it is of a model without an engine."""
    hf_adapters: str = "merged"
    """What exports of a model with adapters are: ``merged`` weights, which load as any model, or folders of ``peft``
    (``adapter_model.safetensors``, ``adapter_config.json``), which are small, and load beside the base."""
    hf_max_to_keep: int | None = None
    """How many of the newest exports stay; None keeps all."""
    save_timeout_s: float = 1800.0
    """How long ranks wait for each other while they write in the background."""
    save_failures_allowed: int = 3
    """How many snapshots in a row may fail (a full disk) before the run ends; 0: the first one ends it. As many exports
    in a row, which are counted apart. The snapshot before a stop, and a forced one, may never; an export may then, too:
    the next start makes it."""
    lock_timeout_s: float = 10.0
    """How long to wait for another job that uses the same folder, before this one is refused. A job that was killed
    a moment ago may need as long to be gone; on NFS, whose host died with it, up to 90 s."""
    stop_signals: list[str] = field(default_factory=lambda: ["SIGTERM", "SIGUSR1", "SIGINT"])
    """Signals that lead to a snapshot at the next step boundary and exit code 75; the second SIGINT stops at once."""
    must_save_by: str | None = None
    """When the job will be ended: a duration from the start of the process (``90m``, ``3h30m``, ``2d``, ``5400s``) or a
    time (``2026-11-20T18:00``, local unless it has an offset), which a restart does not shift. The last snapshot is
    made, and the run stops, as late as is safe before."""
    mirror_url: str | None = None
    """Where committed generations are copied in the background, as fsspec has it: ``s3://bucket/runs``, ``gs://``,
    ``hdfs://``, ``file:///...``; experiment and trial are appended. None: nowhere."""
    mirror_max_to_keep: int | None = 2
    """How many of the newest generations stay there; None keeps all."""
    mirror_timeout_s: float = 600.0
    """How long the end of a run waits for copies that are under way."""
    retries: int = 3
    """How often a job may be started again after losing workers, within ``retry_window_s``."""
    retry_window_s: float = 3600.0
    """Losses longer ago than this no longer count."""
    node_wait_s: float = 600.0
    """How long to wait for resources that the Ray cluster lacks, after the loss of a node say; no retry is spent
    meanwhile. Then the job ends, and the same command resumes."""
    shrink_after_s: float | None = None
    """How long of that to wait for all ranks of a worker group that may go on with fewer (``min_world_size``); None: as
    long as ``node_wait_s``."""

    def __post_init__(self) -> None:
        self.mode = _MODE_NAMES.get(self.mode, self.mode)
        require_choice("recover.mode", self.mode, ("auto", "must", "off"))
        advice = "give one that all ranks see, and set recover.mirror_url for copies at a URL"
        self.fileroot = str(require_local(self.fileroot, "a run", advice, "config key 'recover.fileroot'"))
        if self.resume_path is not None:
            key = "config key 'recover.resume_path'"
            self.resume_path = str(require_local(self.resume_path, "resuming", FETCH_FIRST, key))
            _require_short(key, self.resume_path)
        _require_short("'recover.fileroot', experiment_name and trial_name", str(self.recover_root))
        require_range("recover.freq_epochs", self.freq_epochs, low=1)
        require_range("recover.freq_steps", self.freq_steps, low=1)
        require_range("recover.freq_secs", self.freq_secs, low=0.0)
        require_range("recover.max_ckpt_to_keep", self.max_ckpt_to_keep, low=1)
        require_range("recover.keep_every_steps", self.keep_every_steps, low=1)
        require_range("recover.keep_best", self.keep_best, low=1)
        require_choice("recover.best_mode", self.best_mode, ("max", "min"))
        require_choice("recover.on_busy", self.on_busy, ("wait", "skip"))
        require_range("recover.hf_freq_steps", self.hf_freq_steps, low=1)
        require_choice("recover.hf_dtype", self.hf_dtype, (None, *EXPORT_DTYPES))
        require_choice("recover.hf_adapters", self.hf_adapters, ADAPTER_FORMS)
        require_range("recover.hf_max_to_keep", self.hf_max_to_keep, low=1)
        require_range("recover.save_timeout_s", self.save_timeout_s, low=1.0)
        require_range("recover.save_failures_allowed", self.save_failures_allowed, low=0)
        require_range("recover.lock_timeout_s", self.lock_timeout_s, low=0.0)
        require_range("recover.mirror_max_to_keep", self.mirror_max_to_keep, low=1)
        require_range("recover.mirror_timeout_s", self.mirror_timeout_s, low=0.0)
        if (self.keep_best is None) != (self.best_metric is None):
            raise ConfigError(
                f"config keys 'recover.keep_best' ({self.keep_best!r}) and 'recover.best_metric' "
                f"({self.best_metric!r}) go together; set both or neither"
            )
        require_range("recover.retries", self.retries, low=0)
        require_range("recover.retry_window_s", self.retry_window_s, low=0.0)
        require_range("recover.node_wait_s", self.node_wait_s, low=0.0)
        require_range("recover.shrink_after_s", self.shrink_after_s, low=0.0)

    @property
    def trial_root(self) -> Path:
        """``<fileroot>/<experiment>/<trial>``; everything of a run is below it."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def recover_root(self) -> Path:
        """Where the generations are."""
        return self.trial_root / "recover"

    @property
    def hf_root(self) -> Path:
        """Where the Hugging Face exports are."""
        return self.trial_root / "hf"

    @property
    def lock_path(self) -> Path:
        """The file whose lock says that a job uses the folder."""
        return self.trial_root / "recover.lock"

    @property
    def mirror_path(self) -> str | None:
        """Where this trial's generations are copied to, as a URL."""
        if self.mirror_url is None:
            return None
        return "/".join((self.mirror_url.rstrip("/"), self.experiment_name, self.trial_name))


_LONGEST_BYTES = 4096 - 512
"""Of a path on Linux 4096 bytes, some of which the names of files in a generation take."""


def _require_short(key: str, path: str) -> None:
    n_bytes = len(os.fsencode(os.path.abspath(path)))
    if n_bytes > _LONGEST_BYTES or any(len(os.fsencode(part)) > 255 for part in Path(path).parts):
        raise ConfigError(
            f"{key} give a path of {n_bytes} bytes, {path[:60]!r}...; expected at most {_LONGEST_BYTES}, and 255 a name"
        )
