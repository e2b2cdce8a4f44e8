"""What holds for every test."""

import signal

pytest_plugins = ["tests.faults.tally"]

# What a shell starts in its background ignores Ctrl-C, and so would all that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
