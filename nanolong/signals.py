"""SIGTERM and SIGINT during training: finish the step, save, and exit."""

import contextlib
import signal
import threading
import time


@contextlib.contextmanager
def catch_signals():
    """
    A context in which SIGTERM and SIGINT are only noted: yields the list of their times.

        with catch_signals() as stop_signals:
            while not stop_signals: ...

    A second signal that comes more than a second after the first is meant in earnest and ends the
    process at once. Signals reach the main thread only; in another one nothing is caught.
    """
    stop_signals = []  # seconds of a monotonic clock

    def note(number, frame):
        if stop_signals and time.monotonic() - stop_signals[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop_signals.append(time.monotonic())

    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            previous_handlers[number] = signal.signal(number, note)
    try:
        yield stop_signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
