"""What is used of Lightning's fit loop: its counters, taken and put back between two batches.

Lightning's own way, ``load_state_dict`` of the loops, sets them to restart, and a loop that restarts guesses from its
counters what was under way. `begin_at` and `go_on_at` set the counters only.
"""

from collections.abc import Iterator
from typing import Any

from ...engine.compat import Private, require
from ...utils.errors import UnsupportedVersionError

try:
    import lightning.pytorch as pl  # type: ignore[import-not-found]

    LIBRARY, _PACKAGE = "lightning", "lightning.pytorch"
except ModuleNotFoundError:
    import pytorch_lightning as pl  # type: ignore[import-not-found]

    LIBRARY, _PACKAGE = "pytorch_lightning", "pytorch_lightning"

_RESUME = "resume a fit in the middle of an epoch"
_LOOP, _FIT = f"{_PACKAGE}.loops.loop:_Loop", f"{_PACKAGE}.loops.fit_loop:_FitLoop"
_SIGNALS = f"{_PACKAGE}.trainer.connectors.signal_connector:_SignalConnector"

NAMES = (
    Private(f"{_LOOP}.state_dict", _RESUME, ()),
    Private(f"{_LOOP}._load_from_state_dict", _RESUME, ("state_dict", "prefix")),
    Private(f"{_FIT}.setup_data", _RESUME, ()),
    Private(f"{_PACKAGE}.loops.training_epoch_loop:_TrainingEpochLoop.on_load_checkpoint", _RESUME, ("state_dict",)),
    Private(f"{_PACKAGE}.loops.fetchers:_DataFetcher.reset", _RESUME, ()),
    Private(f"{_SIGNALS}.teardown", "snapshot a fit that is asked to stop", ()),
)
require(LIBRARY, NAMES)

_BASES = ("Callback", "CheckpointHooks", "LightningModule")

Callback: Any = pl.Callback
"""What a callback is derived from."""

_ATTRIBUTES = {"fit_loop": ("epoch_progress", "epoch_loop", "_data_fetcher"), "epoch_loop": ("batch_progress",)}


def set_up_data(trainer: Any) -> None:
    """Have ``train_dataloader`` and ``num_training_batches`` of a trainer known before its loop runs.

    Raises:
        UnsupportedVersionError: the loop has no counters where they are looked for.
    """
    fit = trainer.fit_loop
    for name, thing in (("fit_loop", fit), ("epoch_loop", getattr(fit, "epoch_loop", None))):
        if lacking := [each for each in _ATTRIBUTES[name] if not hasattr(thing, each)]:
            raise UnsupportedVersionError(
                f"{LIBRARY} {pl.__version__} does not fit: its {name} has no {lacking[0]!r}, which Holdfast needs to "
                f"{_RESUME}. Install another version"
            )
    fit.setup_data()


def give_signals_back(trainer: Any) -> None:
    """Put back the handlers of signals that were there before those of a trainer; a second call does nothing.

    Lightning's own end a fit at SIGTERM before its next batch is asked for, with exit code 0; and what it has found it
    would put back after all callbacks are through.
    """
    trainer._signal_connector.teardown()


def counters_of(trainer: Any) -> dict[str, Any]:
    """What the loops of a fit have counted: plain values."""
    return {name: value for name, value in trainer.fit_loop.state_dict().items() if name != "state_dict"}


def begin_at(trainer: Any, counters: dict[str, Any], epoch: int) -> None:
    """Have a fit that has not begun start with ``epoch``."""
    _put_back(trainer, counters)
    _set_epoch(trainer, begun=epoch, done=epoch)


def go_on_at(trainer: Any, counters: dict[str, Any], epoch: int, given: int) -> None:
    """Have an epoch that was begun, and has asked for its first batch, go on after ``given`` batches."""
    if given:  # else they count the epoch before, and the loop has begun this one
        _put_back(trainer, counters)
    _set_epoch(trainer, begun=epoch + 1, done=epoch)
    trainer.fit_loop._data_fetcher.fetched = given


def overrides(thing: Any, method: str) -> bool:
    """Whether a callback or module has a method of its own in place of that of Lightning's base classes."""
    owner = next((cls for cls in type(thing).__mro__ if method in vars(cls)), None)
    return owner is not None and owner.__name__ not in _BASES


def _put_back(trainer: Any, counters: dict[str, Any]) -> None:
    for prefix, loop in _loops(trainer.fit_loop, ""):
        loop._load_from_state_dict(counters, prefix)


def _loops(loop: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """A loop and those in it, with the prefix of each in ``state_dict``."""
    yield prefix, loop
    for name, value in vars(loop).items():
        if hasattr(value, "restarting") and hasattr(value, "_load_from_state_dict"):  # (of either package)
            yield from _loops(value, f"{prefix}{name}.")


def _set_epoch(trainer: Any, begun: int, done: int) -> None:
    progress = trainer.fit_loop.epoch_progress
    for counted in (progress.current, progress.total):
        counted.ready = counted.started = begun
        counted.processed = counted.completed = done
