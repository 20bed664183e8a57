"""Kills at any moment, too little space, read-only folders, vanished data, damaged checkpoints, a
clock that jumps. Afterwards the run is resumed and must be bit-exact with an undisturbed one."""

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

from harness import (
    assert_same,
    assert_whole,
    attempt,
    fingerprint,
    hash_tree,
    measure_workload,
    resume_and_compare,
    train_until_checkpoint,
)

from nanolong.run.folder import list_steps

NOBODY = 65534


def trials(harness):
    """Yield (description, what went wrong or None) for each trial."""
    reference = harness.new_path()
    training = measure_workload(harness, harness.train_command, reference)
    extension = measure_workload(
        harness, functools.partial(harness.extend_command, reference), harness.new_path("extended")
    )
    kills = split_kills(harness.cfg.kills)
    yield from random_kills(harness, training, "train.py", kills["train"])
    yield from kills_at_file_operations(harness, training, extension, kills["files"])
    yield from random_kills(harness, extension, "extend.py", kills["extend"])
    yield from kills_of_evaluation(harness, reference, kills["evaluate"])
    yield from kills_of_pairs(harness, kills["pair"])
    yield from file_size_limits(harness, training, extension, reference)
    yield from read_only_folders(harness, training)
    yield from vanished_data(harness, training)
    yield from damaged_checkpoints(harness, training)
    yield from jumping_clocks(harness, training)


def split_kills(n):
    """How often each kind of process is killed, of n kills in all."""
    kills = {
        "files": n * 25 // 100,
        "extend": n * 15 // 100,
        "evaluate": -(-n * 5 // 100),
        "pair": n * 15 // 100,
    }
    return {**kills, "train": n - sum(kills.values())}


# -----------------------------------------------------------------------------
# kill -9.


def random_kills(harness, workload, script, n):
    """kill -9 after a random time, sometimes again after resuming; then resume undisturbed."""

    def trial(run):
        kill_again = True
        while kill_again:
            child = harness.start(workload.command(run))
            time.sleep(harness.rng.uniform(0, workload.seconds * 1.02))
            child.kill()
            assert "Traceback" not in child.read_output(), child.read_output()
            assert_whole(run)
            kill_again = harness.rng.random() < 0.25
        resume_and_compare(harness, workload, run)
        shutil.rmtree(run)

    description = f"kill -9 of {script} at a random moment: resumed, bit-exact"
    yield from harness.repeat(description, trial, n, fast=n)


def count_file_operations(counter, kill_at=None):
    """In a child: write a byte to `counter` at each file operation in the run folder.

    Counted are opening, creating, renaming and removing, in paths that hold the counter's stem.
    kill_at: send itself kill -9 before this operation, counted from 1.
    """
    descriptor = os.open(counter, os.O_WRONLY | os.O_CREAT)
    n_seen = 0

    def audit(event, args):
        nonlocal n_seen
        if event not in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"):
            return
        if not isinstance(args[0], str | bytes) or counter.stem not in os.fsdecode(args[0]):
            return
        n_seen += 1
        os.write(descriptor, b".")
        if n_seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)


def kills_at_file_operations(harness, training, extension, n):
    """kill -9 before one of the file operations of saving and logging, each at most once first."""
    moments = []
    for workload in (training, extension):
        run = harness.new_path("ops")
        counter = run.with_suffix(".ops")
        before = functools.partial(count_file_operations, counter)
        harness.run(workload.command(run), before=before)
        n_operations = counter.stat().st_size
        assert n_operations > 20, "the file operations were not seen"
        moments += [(workload, number) for number in range(1, n_operations + 1)]

    def trial(workload, number, run):
        before = functools.partial(count_file_operations, run.with_suffix(".ops"), number)
        child = harness.start(workload.command(run), before=before)
        assert child.wait() in (-signal.SIGKILL, 0)
        assert_whole(run)
        resume_and_compare(harness, workload, run)
        shutil.rmtree(run)

    chosen = harness.rng.sample(moments, min(n, len(moments)))
    chosen += harness.rng.choices(moments, k=n - len(chosen))
    description = (
        f"kill -9 before one of the {len(moments)} file operations of saving and logging: "
        "resumed, bit-exact"
    )
    for workload, number in chosen:
        yield attempt(description, trial, workload, number, harness.new_path("ops"))


def kills_of_evaluation(harness, reference, n):
    """kill -9 of evaluate.py, which must not change the run that it measures."""
    json_file = harness.new_path("records.json")
    command = ["evaluate.py", str(reference), "--lengths=16,32,64", "--max_tokens=4000"]
    command.append(f"--json={json_file}")
    start = time.monotonic()
    harness.run(command)
    seconds = time.monotonic() - start
    records = json.loads(json_file.read_text())
    hashes = hash_tree(reference)

    def trial(_):
        child = harness.start(command)
        time.sleep(harness.rng.uniform(0, seconds))
        child.kill()
        assert hash_tree(reference) == hashes, "evaluation wrote to the run that it measures"
        harness.run(command)
        assert json.loads(json_file.read_text()) == records
        assert hash_tree(reference) == hashes

    yield from harness.repeat(
        "kill -9 of evaluate.py at a random moment: the run unchanged, and the same results "
        "afterwards",
        trial,
        n,
        fast=n,
    )


def kills_of_pairs(harness, n):
    """kill -9 of two processes that train together, one shortly after the other."""
    reference = harness.new_path("pair")
    start = time.monotonic()
    harness.run_pair(harness.train_command(reference))
    seconds = time.monotonic() - start
    expected = fingerprint(reference)

    def trial(run):
        children = harness.start_ranks(harness.train_command(run))
        time.sleep(harness.rng.uniform(0, seconds * 1.02))
        harness.rng.shuffle(children)
        children[0].kill()
        # the other one goes on alone for a while, ends by itself, or is killed too
        time.sleep(harness.rng.choice((0, 0.05, 0.3)))
        children[1].kill()
        for child in children:
            assert "Traceback" not in child.read_output(), child.read_output()[-900:]
        assert_whole(run)
        harness.run_pair(harness.train_command(run))
        assert_same(run, expected)
        shutil.rmtree(run)

    yield from harness.repeat(
        "kill -9 of two processes that train together, at a random moment: resumed, bit-exact",
        trial,
        n,
        fast=n,
    )


# -----------------------------------------------------------------------------
# Disks and folders.


def file_size_limits(harness, training, extension, reference):
    """Files may not grow beyond a limit somewhere below the largest file of a checkpoint."""
    sizes = [file.stat().st_size for file in list_steps(reference)[-1].iterdir()]

    def trial(run, workload):
        limit = harness.rng.randrange(300, max(sizes) - 1)
        if harness.rng.random() < 0.5:  # a run that has checkpoints already
            n_checkpoints = harness.rng.choice((1, 2))
            train_until_checkpoint(harness, workload.command(run), run, n_checkpoints)
        output = harness.run(
            workload.command(run),
            status=2,
            before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        )
        assert "File too large" in output, output
        assert not list(run.glob(".tmp*")), "something half-written is left"
        assert_whole(run)
        resume_and_compare(harness, workload, run)

    yield from harness.repeat(
        "no space for a file (RLIMIT_FSIZE): a clear error, nothing half-written; with space again "
        "resumed, bit-exact",
        trial,
        10,
        cases=[(training,), (extension,)],
    )


def become_nobody():
    """In a child of root, who is above permissions."""
    if os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def set_writable(paths, writable):
    for path in paths:
        if path.is_dir():
            os.chmod(path, 0o755 if writable else 0o555)
        else:
            os.chmod(path, 0o644 if writable else 0o444)


def read_only_folders(harness, training):
    """A run folder, or its parent, without write permission."""

    def trial(run, has_checkpoints):
        if has_checkpoints:
            n_checkpoints = harness.rng.choice((1, 2))
            train_until_checkpoint(harness, training.command(run), run, n_checkpoints)
            paths = [run, *run.rglob("*")]
        else:
            parent = run.parent / f"read-only-{run.name}"
            parent.mkdir()
            run = parent / "run"
            paths = [parent]
        set_writable(paths, False)
        hashes = hash_tree(paths[0])
        output = harness.run(training.command(run), status=2, before=become_nobody)
        assert "Permission denied" in output, output
        assert hash_tree(paths[0]) == hashes
        set_writable(paths, True)
        resume_and_compare(harness, training, run)

    yield from harness.repeat(
        "a read-only folder (as root: tried as nobody): a clear error, nothing changed; writable "
        "again, bit-exact",
        trial,
        5,
        cases=[(True,), (False,)],
    )


# -----------------------------------------------------------------------------
# Data and checkpoints.


def vanished_data(harness, training):
    """A data file that is missing or changed before training, during it, or at its resumption."""

    def trial(run, moment):
        dataset = harness.new_path("text")
        shutil.copytree(harness.dataset, dataset)
        file = dataset / harness.rng.choice(("train.bin", "val.bin"))
        content = file.read_bytes()

        def command():
            return harness.train_command(run, f"--dataset={dataset}")

        if moment == "during":
            child = harness.start(command())
            while not (run.is_dir() and list_steps(run)):
                time.sleep(0.001)
            file.unlink()  # it is open, so nothing is lost
            child.expect()
            assert_same(run, training.expected)
            return

        if moment == "resume":
            train_until_checkpoint(harness, command(), run, harness.rng.choice((1, 2)))
        file.unlink()
        hashes = hash_tree(run, ignore=("lock",))
        harness.run(command(), status=2)
        # back, but not the same
        if harness.rng.random() < 0.5:
            file.write_bytes(content[:-40])
        else:
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        if moment == "resume":
            harness.run(command(), status=2)
            assert hash_tree(run, ignore=("lock",)) == hashes
        file.write_bytes(content)
        harness.run(command())
        assert_same(run, training.expected)

    yield from harness.repeat(
        "a data file that vanishes or changes before, during or after training: a clear error, or "
        "it is no longer needed; bit-exact",
        trial,
        5,
        cases=[("start",), ("during",), ("resume",)],
    )


def damage(content, rng):
    """The bytes cut off at a random place, or with one flipped bit."""
    place = rng.randrange(len(content))
    bit = 1 << rng.randrange(8)
    if rng.random() < 0.3:
        return content[:place]
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def is_same_json(a, b):
    """Whether damage has changed white space only."""
    with contextlib.suppress(ValueError):
        return json.loads(a) == json.loads(b)
    return False


def damaged_checkpoints(harness, training):
    """A file of the newest of two checkpoints is damaged, noticed, and the one before it used."""

    def trial(run, name):
        train_until_checkpoint(harness, training.command(run), run, 2)
        earlier, newest = list_steps(run)
        content = (newest / name).read_bytes()
        damaged = damage(content, harness.rng)
        (newest / name).write_bytes(damaged)

        commands = [training.command(run)]
        if name != "optim.safetensors":  # only training reads that one
            extended = harness.new_path("never")
            commands.append(["sample.py", run, "--max_new_tokens=3"])
            commands.append(["evaluate.py", run, "--lengths=32", "--max_tokens=99"])
            commands.append(harness.extend_command(run, extended))
        if not (name == "meta.json" and is_same_json(damaged, content)):
            for command in commands:
                output = harness.run(command, status=2)
                assert str(newest) in output and earlier.name in output, output
            newest.rename(run / "damaged")
        resume_and_compare(harness, training, run)

    yield from harness.repeat(
        "a truncated checkpoint, or one with a flipped bit: rejected by its checksum, the earlier "
        "step named; resumed from there, bit-exact",
        trial,
        20,
        cases=[("model.safetensors",), ("optim.safetensors",), ("meta.json",)],
    )


def jumping_clocks(harness, training):
    """A clock that jumps by years, and files that are dated 1970 and 2096."""

    def disturb_clock():
        real_time = time.time
        rng = random.Random(harness.rng.random())
        time.time = lambda: real_time() + rng.uniform(-3e8, 3e8)

    def trial(run):
        child = harness.start(training.command(run), before=disturb_clock)
        time.sleep(harness.rng.uniform(0.3, 0.9) * training.seconds)
        child.kill()
        for path in Path(run).rglob("*"):
            date = harness.rng.choice((0, 4e9))
            os.utime(path, (date, date))
        harness.start(training.command(run), before=disturb_clock).expect()
        assert_same(run, training.expected)

    yield from harness.repeat(
        "a clock that jumps by years, and files dated 1970 and 2096: killed, resumed, bit-exact",
        trial,
        10,
    )
