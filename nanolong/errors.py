"""The errors that a user can fix, notes, and how a script ends."""

import difflib
import os
import sys
import time

OUT_OF_MEMORY = (
    "out of memory: in training lower --batch_size (more --gradient_accumulation_steps keep the "
    "batch), --block_size, --factor, --n_embd or --n_layer, or give --checkpoint_activations=true; "
    "in evaluation lower --lengths, in sampling --max_new_tokens or the prompt"
)


class UserError(ValueError):
    """A request that cannot be fulfilled, and its remedy: scripts print it, exit status 2."""


class LocalError(UserError):
    """A UserError that one process of several may meet alone, so that it prints it itself."""


def require(condition, message):
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def check_choice(value, choices, what, remedy="choose from {}"):
    """Raise UserError for a value that is not one of the choices; advise the most similar one."""
    if value in choices:
        return
    similar = difflib.get_close_matches(str(value), choices, 1)
    advice = f"did you mean {similar[0]!r}? Else " if similar else ""
    raise UserError(f"unknown {what} {value!r}: {advice}{remedy.format(', '.join(choices))}")


def note(text):
    """Print a note on stderr, in the first process."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"note: {text}", file=sys.stderr)


def run_main(main):
    """Run a script's main() and exit: with status 2 and one line for an error of the user."""
    sys.stdout.reconfigure(errors="replace")  # a terminal may know ASCII only
    try:
        status = main()
    except BrokenPipeError:  # whoever reads our output has closed it: python sample.py | head
        discard_stdout()
        status = 0
    except UserError as error:
        status = report(error, on_every_rank=isinstance(error, LocalError))
    except FileNotFoundError as error:
        # to be read, or the folder of one to be written
        name = error.filename or "a file"
        status = report(f"{name} cannot be used, for there is no such file or folder: give another")
    except OSError as error:
        reason = f"{error.filename or 'a file'} cannot be used ({error.strerror or error})"
        status = report(f"{reason}: choose another path, or fix its permissions or the disk")
    except (RuntimeError, MemoryError) as error:
        phrases = ("out of memory", "t allocate memory", "bad_alloc", "size calculation overflowed")
        if not isinstance(error, MemoryError) and not any(x in str(error) for x in phrases):
            raise
        status = report(OUT_OF_MEMORY)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def discard_stdout():
    """Send further output nowhere; Python would otherwise complain when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(error, on_every_rank=True, status=2):
    """Print an error; one that all processes meet, by the first one. Returns the status."""
    if on_every_rank or int(os.environ.get("RANK", 0)) == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    else:  # a launcher ends all processes with the first that ends, perhaps before it is printed
        time.sleep(3)
    return status
