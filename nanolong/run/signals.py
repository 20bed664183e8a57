"""SIGTERM and SIGINT: before the first step they end the process, later the step is saved first."""

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
        self.ends_at_once = False

    def __len__(self):
        return len(self.times)

    def note(self, number, frame):
        """The signal handler. A second signal, more than a second later, ends the process."""
        now = time.monotonic()
        if self.times and now - self.times[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.times.append(now)
        if len(self.times) == 1 and not self.ends_at_once:
            write("stopping after this step; the run will be saved; again stops without saving")

    @contextlib.contextmanager
    def ending_at_once(self, clean_up):
        """A context in which a signal ends the process with status 130, after clean_up().

        Python calls a signal's handler between two operations of the main thread, and here one may
        take a minute, as compilation does. So another thread waits for what Python writes to a pipe
        when a signal comes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)

        def wait_for_signal():
            for number in iter(lambda: os.read(read_end, 1), b""):
                if number[0] in SIGNALS:
                    try:
                        clean_up()
                        write("stopped before the first step; the run folder is as it was")
                    finally:  # also if the disk has gone
                        os._exit(130)

        thread = threading.Thread(target=wait_for_signal, daemon=True)
        thread.start()
        self.ends_at_once = True
        old_end = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old_end)
            os.close(write_end)  # ends the thread
            thread.join()
            os.close(read_end)
            self.ends_at_once = False


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
