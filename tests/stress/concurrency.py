"""Several processes that want to write to one folder."""

import os
import random
import signal
import time

from harness import (
    assert_same,
    measure_workload,
    send_signal_at_evaluation,
    train_until_checkpoint,
)


def trials(harness):
    """Yield (description, what went wrong or None) for each trial."""
    training = measure_workload(harness, harness.train_command, harness.new_path())
    yield from simultaneous_trainings(harness, training)
    yield from locks_without_owner(harness, training)


def simultaneous_trainings(harness, training):
    """Several at once: one trains, and the others end with a clear error and change nothing."""

    def wait_a_moment():
        time.sleep(random.Random(os.getpid()).uniform(0, 0.05))

    def trial(run, resume):
        n_processes = harness.rng.choice((2, 3, 4))
        if resume:
            train_until_checkpoint(harness, training.command(run), run, 2)
        command = training.command(run)
        children = [harness.start(command, before=wait_a_moment) for _ in range(n_processes)]
        n_successful = 0
        for child in children:
            status = child.wait()
            output = child.read_output()
            assert "Traceback" not in output and status in (0, 2), output
            if status == 0:
                n_successful += 1
            else:
                check_rejection(output)
        # one that resumes when the others are done succeeds, too, and has nothing to do
        assert n_successful == 1 or (resume and n_successful > 0)
        assert_same(run, training.expected)

    yield from harness.repeat(
        "several trainings started at once in one folder: one writes, the others end with a clear "
        "error; bit-exact",
        trial,
        15,
        fast=2,
        cases=[(False,), (True,)],
    )


def check_rejection(output):
    """One error message, which says that another process is faster."""
    assert output.count("error: ") == 1, output
    reasons = ("is writing to", "holds a run already", "has just written to")
    assert any(reason in output for reason in reasons), output


def locks_without_owner(harness, training):
    """The lock of a dead process does not block, nor does a lock file, whatever is in it."""

    def trial(run, stale_file):
        if stale_file:
            run.mkdir()
            contents = (f"{os.getpid()}\n".encode(), b"1\n", b"", b"\xff", b"x" * 10**6)
            (run / "lock").write_bytes(harness.rng.choice(contents))
        else:
            child = harness.start(
                training.command(run), before=lambda: send_signal_at_evaluation(2, signal.SIGSTOP)
            )
            child.wait_until_stopped()  # alive, with the lock
            output = harness.run(training.command(run), status=2)
            assert f"process {child.pid} is writing to" in output, output
            child.kill()
        harness.run(training.command(run))
        assert_same(run, training.expected)

    yield from harness.repeat(
        "a lock whose owner is dead, or a lock file that nobody holds: does not block",
        trial,
        10,
        cases=[(True,), (False,)],
    )
