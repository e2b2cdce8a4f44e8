"""The kernel kills a process whose lease has expired, whatever it does. A process that renews its
lease lives.
"""

import os
import signal
import time

import pytest

from holdfast.utils.processes import Lease
from tests.limits import stretched


def end_of_child(*naps_s: float, stopped: bool) -> tuple[int, float]:
    """Signal that ended a child with a lease of 0.4 s, renewed after each nap, and the seconds that
    it lived.
    """
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        lease = Lease()
        lease.put_off(lease.now() + 0.4)
        for nap_s in naps_s:
            time.sleep(nap_s)
            lease.put_off(lease.now() + 0.4)
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(stretched(30))
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.monotonic() - began


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_is_not_renewed_is_killed_even_when_it_is_stopped(stopped: bool) -> None:
    code, lived_s = end_of_child(stopped=stopped)
    assert code == -signal.SIGKILL and lived_s >= 0.4


def test_a_renewed_lease_puts_the_end_off() -> None:
    code, lived_s = end_of_child(0.2, 0.2, 0.2, stopped=False)
    assert code == -signal.SIGKILL and lived_s >= 1.0
