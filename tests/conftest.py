"""What holds for every test."""

import signal

import pytest

pytest_plugins = ["tests.faults.tally"]

# What a shell starts in its background ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file stay in one process of pytest-xdist: what they share is made once."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))
