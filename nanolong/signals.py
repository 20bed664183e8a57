"""SIGTERM and SIGINT during training: finish the step, save, and exit."""

import contextlib
import os
import signal
import sys
import threading
import time
import warnings


class StopRequested(BaseException):
    """A stop signal has come where nothing needs to be finished: see interruptible()."""


class StopSignals:
    """The stop signals so far: false until the first one comes."""

    def __init__(self):
        self.times = []  # seconds of a monotonic clock
        self.raises = False

    def __len__(self):
        return len(self.times)

    def note(self, number, frame):
        """The signal handler. A second signal, more than a second later, ends the process."""
        now = time.monotonic()
        if self.times and now - self.times[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.times.append(now)
        if len(self.times) == 1 and int(os.environ.get("RANK", 0)) == 0:
            when = "now" if self.raises else "after this step"
            # print() may be what the signal has interrupted
            message = f"\nstopping {when}; the run will be saved; again stops without saving\n"
            with contextlib.suppress(OSError):
                os.write(sys.stderr.fileno(), message.encode())
        self.leave(number, frame)

    def leave(self, number, frame):
        """Raise StopRequested in what interruptible() has called, again and again until it ends."""
        if not self.raises:
            return
        # An exception may be ignored, in the callback of a weak reference for example.
        set_alarm(0.05)
        warnings.simplefilter("ignore")  # torch's, about what an exception has cut short
        if frame.f_code is not StopSignals.interruptible.__code__:
            raise StopRequested

    def interruptible(self, function, *args):
        """
        Call a function, and leave it at once when a stop signal comes.

        It may be left at any point, so it must not change what will be saved.
        """
        unraisable_hook = sys.unraisablehook
        sys.unraisablehook = lambda args: (
            None if args.exc_type is StopRequested else unraisable_hook(args)
        )
        self.raises = True
        try:
            if not self.times:
                function(*args)
        except StopRequested:
            pass
        except Exception:
            # The terminal sends Ctrl-C to a compiler too, whose end may be noticed first.
            time.sleep(0.2)
            if not self.times:
                raise
        finally:
            self.raises = False
            set_alarm(0)
            sys.unraisablehook = unraisable_hook


def set_alarm(seconds):
    """Have SIGALRM sent after so long, where the system has it; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


@contextlib.contextmanager
def catch_signals():
    """
    A context in which SIGTERM and SIGINT are only noted, in the StopSignals that it yields.

        with catch_signals() as stop_signals:
            while not stop_signals: ...

    Signals reach the main thread only; in another one nothing is caught.
    """
    stop_signals = StopSignals()
    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            previous_handlers[number] = signal.signal(number, stop_signals.note)
        if hasattr(signal, "SIGALRM"):
            previous_handlers[signal.SIGALRM] = signal.signal(signal.SIGALRM, stop_signals.leave)
    try:
        yield stop_signals
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
