"""The errors that a user can fix, and notes."""

import os
import sys


class UserError(ValueError):
    """Says what cannot be done and how to fix it. Scripts print it and exit with status 2."""


class LocalError(UserError):
    """A UserError that one process of several may meet alone, so that it prints it itself."""


def discard_stdout():
    """Send further output nowhere; Python would otherwise complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text):
    """Print a note on stderr, in the first process."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"note: {text}", file=sys.stderr)
