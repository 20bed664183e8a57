"""Answer a Python that is too old, --help, and Ctrl-C during the imports, which take seconds.

Every script imports this file first.
"""

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036 (an old Python has to be able to run this file)
    sys.stderr.write(
        "error: nanoLong needs Python 3.11 or newer, and this is {}.{}: install a newer one and "
        "create the environment with it (python3.11 -m venv .venv)\n".format(*sys.version_info)
    )
    sys.exit(2)


def exit_if_interrupted(kind, error, traceback):
    """The hook for uncaught errors: errors.run_main() catches Ctrl-C only after the imports."""
    if issubclass(kind, KeyboardInterrupt):
        os._exit(130)
    sys.__excepthook__(kind, error, traceback)


sys.excepthook = exit_if_interrupted

if {"--help", "-h"} & set(sys.argv[1:]):
    from nanolong import settings

    settings.answer_help()
