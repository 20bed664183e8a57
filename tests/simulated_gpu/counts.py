"""What the simulated GPU has counted in this process, and the lines of code that synchronised."""

import atexit
import collections
import ctypes
import traceback
from pathlib import Path

ROOT = f"{Path(__file__).resolve().parent.parent.parent}/"
OURS = f"{Path(__file__).resolve().parent}/"
LIBRARY = ctypes.CDLL(None)
LIBRARY.simulated_counts.restype = ctypes.c_size_t
BUFFER_SIZE = 1 << 22

synchronising_lines = collections.Counter()


def counts():
    """Numbers by name: launches, copies, synchronisations, captures, "illegal" and so on."""
    return collections.Counter(_read(False))


def kernels():
    """The number of launches by the name of the kernel."""
    return collections.Counter(_read(True))


def reset():
    LIBRARY.simulated_reset()
    synchronising_lines.clear()


def _read(of_kernels):
    buffer = ctypes.create_string_buffer(BUFFER_SIZE)
    LIBRARY.simulated_counts(of_kernels, buffer, ctypes.c_size_t(BUFFER_SIZE))
    lines = (line.split("\t", 1) for line in buffer.value.decode(errors="replace").splitlines())
    return {name: int(n) for n, name in lines}


@ctypes.CFUNCTYPE(None, ctypes.c_char_p)
def _note_line(what):
    """Note the line of the project that synchronises, and the two that called it."""
    frames = [frame for frame in traceback.extract_stack()[:-1] if frame.filename.startswith(ROOT)]
    frames = [frame for frame in frames if not frame.filename.startswith(OURS)][-3:]
    lines = [f"{frame.filename.removeprefix(ROOT)}:{frame.lineno}" for frame in reversed(frames)]
    synchronising_lines[f"{what.decode()} {' < '.join(lines)}"] += 1


LIBRARY.simulated_on_synchronize(_note_line)
atexit.register(LIBRARY.simulated_on_synchronize, None)  # Python ends before the driver does
