"""Errors belong to one tree, have builtin bases, and keep their contents across processes."""

import inspect
import pickle

from holdfast.utils import errors
from holdfast.utils.errors import (
    AttemptEnded,
    FolderInUseError,
    HoldfastError,
    JobRefusedError,
    PeerError,
    Preempted,
    Terminated,
    WorkerLost,
)

RAISED = [
    cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, BaseException)
]
ALL_ERRORS = [cls for cls in RAISED if cls not in (AttemptEnded, Preempted, Terminated)]
LEAVES = [cls for cls in ALL_ERRORS if not cls.__subclasses__()]


def test_every_error_is_ours_and_every_leaf_a_builtin_other_than_exception() -> None:
    assert len(LEAVES) > 10
    for cls in ALL_ERRORS:
        assert issubclass(cls, HoldfastError) and cls.__doc__
    for cls in LEAVES:
        builtin = [base for base in cls.__mro__ if base.__module__ == "builtins"]
        assert set(builtin) - {Exception, BaseException, object}, cls


def test_every_error_survives_pickling_with_its_message_and_attributes() -> None:
    special = {
        PeerError: PeerError("saving", {2: "OSError: full", 0: "ValueError: bad"}),
        WorkerLost: WorkerLost("actor", [3, 1], "SIGKILL"),
    }
    for cls in RAISED:
        error = special.get(cls) or cls("what was found")
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is cls and str(copy) == str(error) and vars(copy) == vars(error)


def test_a_run_asked_to_stop_is_no_error_and_has_its_code() -> None:
    stop = Preempted("SIGTERM")
    assert not isinstance(stop, Exception) and isinstance(stop, SystemExit) and stop.code == 75
    assert str(stop) == "stopped after a snapshot: SIGTERM"


def test_a_refused_job_is_an_error_that_ends_the_process_with_the_code_of_a_stop() -> None:
    error = JobRefusedError("in use")
    assert isinstance(error, FolderInUseError) and isinstance(error, SystemExit)
    assert error.code == Preempted.EXIT_CODE and str(error) == "in use"


def test_messages_name_the_ranks_in_order() -> None:
    error = PeerError("saving", {2: "OSError: full", 0: "ValueError: bad"})
    assert str(error) == "saving failed on rank 0: ValueError: bad; rank 2: OSError: full"
    assert (
        str(WorkerLost("actor", [3, 1], "SIGKILL"))
        == "worker group 'actor' lost rank(s) [1, 3]: SIGKILL"
    )
