"""A progress bar of bytes on stderr."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


class ProgressBar(Progress):
    """A progress bar on stderr, which prints nothing unless it is ``shown``."""

    def __init__(self, shown: bool, what: str, n_bytes: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._what = what
        self._task = self.add_task(what, total=n_bytes)

    def count(self, n_bytes: int) -> None:
        """Add bytes that were written, or read back."""
        self.advance(self._task, n_bytes)

    def say(self, doing: str) -> None:
        """Describe the phase."""
        self.update(self._task, description=f"{self._what}, {doing}")
