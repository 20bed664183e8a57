"""The lock of a run folder: one process at a time writes to it.

It is a record lock of the operating system, which ends with the process that holds it, however that
process ends. The file `lock` itself means nothing; it only names the process for the error message.
(POSIX also releases the lock when this process closes any file object of `lock`: do not open it.)
"""

import os

from nanolong.errors import UserError

held = {}  # folder -> the open file that holds its lock


def lock(folder):
    """Hold a folder's lock until unlock(folder); holding it twice is holding it once.

    Raises UserError when another process holds it.
    """
    if folder in held:
        return
    file = open(folder / "lock", "a+")
    try:
        _lock_file(file)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise UserError(
            f"process {owner} is writing to {folder}: wait for it, or choose another --out_dir"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    held[folder] = file


def unlock(folder):
    """Release a folder's lock, if this process holds it."""
    if folder in held:
        held.pop(folder).close()


def _lock_file(file):
    """Lock an open file without waiting."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        return
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
