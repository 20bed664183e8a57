"""Too little memory, and a long training whose memory and files must not grow."""

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from harness import assert_whole, attempt, limit_memory, read_log

from nanolong.run.folder import list_steps


def trials(harness):
    """Yield (description, what went wrong or None), and for the last one a note, per trial."""
    yield from out_of_memory(harness)
    yield from long_training(harness)


# -----------------------------------------------------------------------------
# Too little memory.


def out_of_memory(harness):
    """The address space ends a little above what is in use before the work begins."""
    reference = harness.new_path()
    harness.run(harness.train_command(reference))

    def trial(script):
        mebibytes = harness.rng.randrange(20, 40)
        if script == "evaluate.py":
            command = [script, reference, "--lengths=20000", "--max_tokens=20000"]
        elif script == "train.py":
            mebibytes = harness.rng.randrange(150, 250)
            large = ["--batch_size=8192", "--block_size=64"]
            command = harness.train_command(harness.new_path(), *large)
        else:
            mebibytes = harness.rng.randrange(150, 250)
            command = [script, reference, "--factor=900", "--max_iters=1", "--batch_size=400"]
            command.append(f"--out_dir={harness.new_path('extended')}")
        output = harness.run(
            command, status=2, seconds=120, before=lambda: limit_memory(mebibytes << 20)
        )
        assert "error: out of memory" in output, output
        assert "--batch_size" in output and "--block_size" in output, output

    scripts = ("train.py",) if harness.cfg.fast else ("train.py", "evaluate.py", "extend.py") * 3
    for script in scripts:
        yield attempt(
            "out of memory (RLIMIT_AS): a clear error that names the settings", trial, script
        )


# -----------------------------------------------------------------------------
# A long training.


@dataclass
class Observation:
    """What a process and its run folder take at one moment."""

    memory: int  # resident, in KiB
    n_files: int  # files and folders of the run
    n_open: int  # open file descriptors


def observe(pid, run):
    """Raises an exception when the process ends or a file vanishes meanwhile."""
    status = Path(f"/proc/{pid}/status").read_text()
    memory = int(status.partition("VmRSS:")[2].split()[0])
    return Observation(memory, len(list(run.rglob("*"))), len(os.listdir(f"/proc/{pid}/fd")))


def long_training(harness):
    """Train for --hours, saving and evaluating every few seconds, and look twice a second."""
    seconds = 6 if harness.cfg.fast else 3600 * harness.cfg.hours
    notes = []

    def trial(run):
        command = harness.train_command(
            run,
            "--max_iters=100000000",
            f"--eval_interval={20 if harness.cfg.fast else 400}",
            "--log_interval=20",
            "--batch_size=1",
        )
        child = harness.start(command)
        start = time.monotonic()
        observations = []
        # on a busy machine it may take longer until there are three checkpoints
        while time.monotonic() < start + seconds or (
            len(list_steps(run)) < 3 and time.monotonic() < start + 100
        ):
            ended, _ = os.waitpid(child.pid, os.WNOHANG)
            assert not ended, child.read_output()[-900:]
            with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
                observations.append(observe(child.pid, run))
            time.sleep(0.05 if harness.cfg.fast else 0.5)
        os.kill(child.pid, signal.SIGTERM)
        child.expect()

        third = len(observations) // 3
        early = max(o.memory for o in observations[third // 2 : third])
        late = max(o.memory for o in observations[2 * third :])
        n_files = max(o.n_files for o in observations)
        n_open = max(o.n_open for o in observations)
        n_saves = sum("val_loss" in row for row in read_log(run))
        notes.append(
            f"{seconds:.0f} s, {n_saves} saves: at most {early / 1024:.1f} MiB in the second sixth "
            f"of the time, {late / 1024:.1f} MiB in the last third; at most {n_files} files and "
            f"folders, {n_open} open files"
        )
        allowed_growth = 16384 if harness.cfg.fast else 4096  # KiB
        assert n_saves >= 3 and late < early * 1.02 + allowed_growth, notes[0]
        # log and lock; four steps while one is replaced; temporary files
        assert n_files <= 2 + 4 * 4 + 6 and n_open < 24, notes[0]
        assert_whole(run)

    description, failure = attempt(
        "long training with frequent saves and evaluations: memory constant, files bounded",
        trial,
        harness.new_path(),
    )
    yield description, failure, "".join(notes)
