"""Answer a Python that is too old in one sentence. Every script imports this file first."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an old Python has to be able to run this file)
    sys.stderr.write(
        "error: nanoLong needs Python 3.11 or newer, and this is {}.{}: install a newer one and "
        "create the environment with it (python3.11 -m venv .venv)\n".format(*sys.version_info)
    )
    sys.exit(2)
