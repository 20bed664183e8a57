"""SIGTERM and SIGINT, once the loop of training runs: the step is finished and saved first."""

import contextlib
import os
import signal
import sys
import threading
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """The stop signals so far: false until the first one comes."""

    def __init__(self):
        self.times = []  # seconds of a monotonic clock

    def __len__(self):
        return len(self.times)

    def note(self, number, frame):
        """The signal handler. A second signal, more than a second later, ends the process."""
        now = time.monotonic()
        if self.times and now - self.times[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.times.append(now)
        if len(self.times) == 1:
            write("stopping after this step; the run will be saved; again stops without saving")


def write(message):
    """Print a line on stderr, in the first process. A signal may have interrupted print()."""
    if int(os.environ.get("RANK", 0)) == 0:
        with contextlib.suppress(OSError):
            os.write(sys.stderr.fileno(), f"\n{message}\n".encode())


@contextlib.contextmanager
def catch_signals():
    """A context in which SIGTERM and SIGINT are only noted, in the StopSignals that it yields.

        with catch_signals() as stop_signals:
            while not stop_signals: ...

    Signals reach the main thread only; in another one nothing is caught.
    """
    stop_signals = StopSignals()
    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            previous_handlers[number] = signal.signal(number, stop_signals.note)
    try:
        yield stop_signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
