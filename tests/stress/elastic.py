"""Ranks that die, hang, come back, and become fewer or more."""

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import time
from pathlib import Path

from harness import (
    assert_same,
    assert_whole,
    attempt,
    fingerprint,
    free_port,
    read_log,
)

from data import Dataset
from nanolong.run.folder import list_steps

TORCHRUN = ("--max-restarts=3", "--monitor-interval=0.1")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "NANOLONG_TIMEOUT": "20"}


def trials(harness):
    """Yield (description, what went wrong or None) for each trial."""
    elastic = Elastic(harness)
    yield from elastic.killed_ranks()
    yield from elastic.changing_numbers_of_processes()
    yield from elastic.hanging_ranks()
    yield from elastic.two_launchers()


class Elastic:
    """The trials, and the undisturbed runs that they are compared with."""

    def __init__(self, harness):
        self.harness = harness
        self.cpus = sorted(os.sched_getaffinity(0))[:2]
        # a run that is long enough to be disturbed by a process that starts slowly
        self.long_run = ["--max_iters=400", "--eval_interval=40"]
        if harness.cfg.fast:
            self.long_run = ["--max_iters=200", "--eval_interval=20"]

        pair = harness.new_path("pair")
        harness.run_pair(harness.train_command(pair))
        self.expected_of_pair = fingerprint(pair)
        self.single_run = harness.new_path()
        harness.run(harness.train_command(self.single_run))
        long_pair = harness.new_path("pair")
        harness.run_pair(harness.train_command(long_pair, *self.long_run), seconds=200)
        self.expected_of_long_pair = fingerprint(long_pair)

    # kill -9 of a rank

    def killed_ranks(self):
        """kill -9 of a rank: torchrun restarts both, which resume from the newest checkpoint."""
        yield from self.harness.repeat(
            "kill -9 of a rank under torchrun --max-restarts: restarts by itself, bit-exact",
            self.kill_ranks,
            4,
        )

    def kill_ranks(self, _):
        n_kills = 1 if self.harness.cfg.fast else self.harness.rng.choice((1, 2, 3))
        n_done = 0
        while n_done == 0:  # the run may end before a rank can be killed
            run = self.harness.new_path("restarted")
            command = self.harness.train_command(run, *self.long_run)
            torchrun = ("--standalone", "--nproc_per_node=2", *TORCHRUN)
            process, output_file = self.harness.launch(
                command, *torchrun, env=ENVIRONMENT, cpus=self.cpus
            )
            last_step = None
            while n_done < n_kills:
                wait_for_step(run, last_step, process, output_file)
                time.sleep(self.harness.rng.uniform(0, 0.3))
                last_step = list_steps(run)[-1].name
                ranks = rank_pids(process)
                if len(ranks) < 2:
                    break
                os.kill(self.harness.rng.choice(ranks), signal.SIGKILL)
                n_done += 1
            wait_for_launcher(process, output_file)
            assert_same(run, self.expected_of_long_pair)

    # other numbers of processes

    def changing_numbers_of_processes(self):
        yield from self.harness.repeat(
            "2 processes, killed, 1 process, killed, 2 processes: the same batches, losses within "
            "1e-5",
            self.change_number_of_processes,
            20,
            fast=2,
        )

    def change_number_of_processes(self, run):
        """Train the 24 micro-batches of 12 steps as two processes, as one, and as two again."""
        expected_log = self.harness.new_path("batches")
        log = self.harness.new_path("batches")
        self.train_recording(self.harness.new_path(), expected_log, n_processes=1)
        first, second = sorted(self.harness.rng.sample(range(2, 22), 2))
        self.train_recording(run, log, n_processes=2, stop_at=first)
        self.train_recording(run, log, n_processes=1, stop_at=second)
        self.train_recording(run, log, n_processes=2)

        expected = read_batches(expected_log)
        assert len(expected) == 24
        assert read_batches(log) == expected, f"other batches, killed at {first} and {second}"
        losses = {row["step"]: row["loss"] for row in read_log(run) if "loss" in row}
        for row in read_log(self.single_run):
            if "loss" in row:
                assert abs(losses[row["step"]] - row["loss"]) < 1e-5

    def train_recording(self, run, log, n_processes, stop_at=None):
        """Train, with each process recording its batches; kill all before micro-batch stop_at."""

        def before(rank):
            record_batches(log, stop_at)

        command = self.harness.train_command(run)
        children = self.harness.start_ranks(command, n_processes, before=before)
        # a rank that is not killed itself loses its peer
        allowed = (0,) if stop_at is None else (-signal.SIGKILL, 1)
        for child in children:
            status = child.wait()
            output = child.read_output()
            assert status in allowed and "Traceback" not in output, output

    # a rank that hangs

    def hanging_ranks(self):
        """SIGSTOP: a rank neither answers nor ends."""
        yield from self.harness.repeat(
            "a rank that hangs (SIGSTOP): its peer ends after NANOLONG_TIMEOUT with a clear error; "
            "resumed, bit-exact",
            self.hang,
            5,
        )

    def hang(self, run):
        hanging_rank = self.harness.rng.randrange(2)
        index = self.harness.rng.randrange(2, 200)

        def before(rank):
            if rank == hanging_rank:
                stop_at_batch(index)

        command = self.harness.train_command(run, *self.long_run)
        environment = {"NANOLONG_TIMEOUT": "3"}
        children = self.harness.start_ranks(command, env=environment, before=before)
        try:
            children[hanging_rank].wait_until_stopped()
            start = time.monotonic()
            output = children[1 - hanging_rank].expect(status=1, seconds=40)
            assert time.monotonic() - start > 1, output
            for words in ("error: ", "NANOLONG_TIMEOUT", "--init_from=resume"):
                assert words in output, output
        finally:
            children[hanging_rank].kill()
        assert_whole(run)
        self.harness.run_pair(self.harness.train_command(run, *self.long_run), seconds=200)
        assert_same(run, self.expected_of_long_pair)

    # two launchers

    def two_launchers(self):
        """Two torchrun launchers meet at an endpoint, as those of two machines do."""
        description = (
            "multi-node rendezvous, two torchrun launchers on one machine: bit-exact with two "
            "processes of one launcher"
        )
        yield attempt(description, self.rendezvous, self.harness.new_path("nodes"), False)
        if not self.harness.cfg.fast:
            description += ", also when one worker is killed and both restart"
            yield attempt(description, self.rendezvous, self.harness.new_path("nodes"), True)

    def rendezvous(self, run, kill):
        port = free_port()
        command = self.harness.train_command(run, *(self.long_run if kill else []))
        torchrun = [
            "--nnodes=2",
            "--nproc_per_node=1",
            *TORCHRUN,
            "--rdzv_backend=c10d",
            f"--rdzv_id=stress{port}",
            f"--rdzv_endpoint=127.0.0.1:{port}",
        ]
        launchers = []
        for node in (0, 1):
            cpus = {self.cpus[node % len(self.cpus)]}
            launchers.append(self.harness.launch(command, *torchrun, env=ENVIRONMENT, cpus=cpus))
        try:
            if kill:
                while not (run.is_dir() and len(list_steps(run)) > 1):
                    assert all(process.poll() is None for process, _ in launchers)
                    time.sleep(0.01)
                process, _ = self.harness.rng.choice(launchers)
                os.kill(rank_pids(process)[0], signal.SIGKILL)
            for process, output_file in launchers:
                wait_for_launcher(process, output_file)
        finally:
            for process, _ in launchers:
                process.kill()
        assert_same(run, self.expected_of_long_pair if kill else self.expected_of_pair)


# -----------------------------------------------------------------------------
# torchrun.


def rank_pids(launcher):
    """The process ids of the ranks that a launcher has started."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            parent = int(fields[1])
            if parent == launcher.pid and b"train.py" in (folder / "cmdline").read_bytes():
                pids.append(int(folder.name))
    return pids


def wait_for_step(run, last_step, process, output_file, n_ranks=2):
    """Wait until there is a newer checkpoint and all ranks, or the launcher has ended."""
    deadline = time.monotonic() + 30 * n_ranks
    while process.poll() is None:
        steps = list_steps(run) if run.is_dir() else []
        if steps and steps[-1].name != last_step and len(rank_pids(process)) == n_ranks:
            return
        assert time.monotonic() < deadline, output_file.read_text()[-2000:]
        time.sleep(0.01)


def wait_for_launcher(process, output_file, seconds=150):
    """Wait until a launcher ends with exit status 0."""
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output = output_file.read_text()[-2000:]
        raise AssertionError(f"it hung for {seconds} s; its output: {output!r}") from None
    assert status == 0, output_file.read_text()[-3000:]


# -----------------------------------------------------------------------------
# In a child.


def record_batches(log, stop_at):
    """Append a line per micro-batch to a file; kill -9 at micro-batch stop_at."""
    original = Dataset.batch

    def batch(self, index, *args, **kwargs):
        if index >= (stop_at or math.inf):
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, index, *args, **kwargs)
        inputs, targets = result[:2]
        digest = hashlib.sha256(inputs.tobytes() + targets.tobytes()).hexdigest()
        with open(log, "a") as file:
            file.write(f"{index} {digest}\n")
        return result

    Dataset.batch = batch


def read_batches(log):
    """Index -> set of hashes of the 24 micro-batches; one more is prepared and not used."""
    batches = {}
    for line in log.read_text().splitlines():
        index, digest = line.split()
        if int(index) < 24:
            batches.setdefault(int(index), set()).add(digest)
    return batches


def stop_at_batch(index):
    """Send itself SIGSTOP when this micro-batch is prepared."""
    original = Dataset.batch

    def batch(self, number, *args, **kwargs):
        if number >= index:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, number, *args, **kwargs)

    Dataset.batch = batch
