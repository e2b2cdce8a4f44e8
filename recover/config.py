"""What recovery can be told, under AReaL's names."""

from dataclasses import dataclass
from pathlib import Path

from ..utils.config import require_choice, require_range

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
    nor snapshot. AReaL's ``on`` and ``disabled`` mean ``auto`` and ``off``."""
    resume_path: str | None = None
    """Resume from this generation instead of the newest. Later ones in this run's folder are set aside. A restart with
    the same value goes on from what the run has written since."""
    freq_epochs: int | None = None
    """Snapshot at the end of every so many epochs."""
    freq_steps: int | None = None
    """Snapshot every so many steps."""
    freq_secs: float | None = None
    """Snapshot when so many seconds have passed since the last one."""
    max_ckpt_to_keep: int | None = 2
    """How many of the newest generations stay; None keeps all."""
    retries: int = 3
    """How often a job may be started again after losing workers, within ``retry_window_s``."""
    retry_window_s: float = 3600.0
    """Losses longer ago than this no longer count."""

    def __post_init__(self) -> None:
        self.mode = _MODE_NAMES.get(self.mode, self.mode)
        require_choice("recover.mode", self.mode, ("auto", "must", "off"))
        require_range("recover.freq_epochs", self.freq_epochs, low=1)
        require_range("recover.freq_steps", self.freq_steps, low=1)
        require_range("recover.freq_secs", self.freq_secs, low=0.0)
        require_range("recover.max_ckpt_to_keep", self.max_ckpt_to_keep, low=1)
        require_range("recover.retries", self.retries, low=0)
        require_range("recover.retry_window_s", self.retry_window_s, low=0.0)

    @property
    def trial_root(self) -> Path:
        """``<fileroot>/<experiment>/<trial>``; everything of a run is below it."""
        return Path(self.fileroot) / self.experiment_name / self.trial_name

    @property
    def recover_root(self) -> Path:
        """Where the generations are."""
        return self.trial_root / "recover"
