"""What all stress tests share: tiny runs, child processes, and comparisons of run folders.

A trial forks this process, which has imported torch and has computed nothing yet; the child runs
the main() of a script. That takes a fraction of a second, so that hundreds of trials are
affordable. Some trials start whole processes instead, with or without torchrun.

"Bit-exact" means that a run and an undisturbed one have the same steps, the same SHA-256 of
model.safetensors and optim.safetensors, and the same rows in log.jsonl (except tokens_per_second).
"""

import argparse
import ast
import contextlib
import ctypes
import functools
import hashlib
import importlib
import inspect
import json
import mmap
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Imported before any fork: a child with little memory, or without permissions, cannot import.
import safetensors.torch  # noqa: F401
import tiktoken  # noqa: F401
import torch
import tqdm  # noqa: F401

import evaluate  # noqa: F401
import extend  # noqa: F401
import sample  # noqa: F401
import train
from data import write_tokens
from nanolong import cli
from nanolong.run.checkpoint import read_meta, verify
from nanolong.run.folder import list_steps
from tests.flags import TINY, last_of_each_flag

ROOT = Path(__file__).resolve().parent.parent.parent
TWELVE_STEPS = ["--gradient_accumulation_steps=2", "--max_iters=12", "--eval_interval=3"]
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal to get when the parent has ended
TINY_EXTENSION = ["--method=yarn", "--factor=2", "--max_iters=6", "--eval_interval=2"]


def attempt(description, trial, *args):
    """Run one trial. Returns (description, None), or (description, what went wrong)."""
    try:
        trial(*args)
    except AssertionError as error:
        return description, f"AssertionError: {error}"[:2000]
    except Exception as error:
        message = f"{type(error).__name__}: {error}"[:2000]
        return description, f"{message}\n{traceback.format_exc()[-1500:]}"
    return description, None


# -----------------------------------------------------------------------------
# Child processes.


@dataclass
class Child:
    """A forked process and the file that its stdout and stderr go to."""

    pid: int
    output_file: Path

    def read_output(self):
        return self.output_file.read_text(errors="replace")

    def wait(self, seconds=60):
        """Wait for the end: the exit status, or minus the signal. AssertionError after so long."""
        deadline = time.monotonic() + seconds
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                self.kill()
                output = self.read_output()[-300:]
                raise AssertionError(f"it hung for {seconds} s; its output: {output!r}")
            time.sleep(0.002)

    def expect(self, status=0, seconds=60):
        """Wait for the end with this status and no traceback. Returns the output.

        With status 2 the output must hold exactly one error message.
        """
        found = self.wait(seconds)
        output = self.read_output()
        assert found == status and "Traceback" not in output, (
            f"exit status {found}, not {status}; output: {output[-1500:]!r}"
        )
        if status == 2:
            errors = [line for line in output.splitlines() if line.startswith("error: ")]
            one_sentence = len(errors) == 1 and len(errors[0]) > 20
            assert one_sentence, f"not one error message: {output[-1500:]!r}"
        return output

    def wait_until_stopped(self):
        """Wait until SIGSTOP has stopped the process."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), self.read_output()[-900:]

    def kill(self):
        """Send kill -9, also where the process has ended already."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def run_child(command, output_file, folder, env, before, cpus):
    """The life of a forked child: run the script's main() and exit. Never returns."""
    status = 99
    try:
        # in a session of its own it would outlive a runner that is killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(output_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")
        sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")
        os.environ.update(env)
        os.chdir(folder)
        os.sched_setaffinity(0, cpus or os.sched_getaffinity(0))
        torch.set_num_threads(1)
        sys.argv = list(map(str, command))
        after = before() if before else None
        try:
            script = importlib.import_module(command[0].removesuffix(".py"))
            cli.run_main(script.main)
        except SystemExit as exit:
            status = exit.code or 0
        finally:
            if after:
                after()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def address_space():
    """The bytes of address space that this process uses."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * mmap.PAGESIZE


def limit_memory(n_bytes):
    """Allow this process so many bytes beyond what it uses now."""
    limit = address_space() + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Harness:
    """The temporary folder, the random choices, and how processes are started."""

    def __init__(self, cfg, folder):
        self.cfg = cfg
        self.folder = Path(folder)
        self.rng = random.Random(cfg.seed)
        self.n_paths = 0
        os.chmod(folder, 0o755)  # some trials run as nobody
        self.dataset = self.folder / "text"
        write_dataset(self.dataset)

    def new_path(self, name="run"):
        """A path that is not in use."""
        self.n_paths += 1
        return self.folder / f"{name}-{self.n_paths}"

    def repeat(self, description, trial, n, fast=1, cases=((),)):
        """Attempt trial(new path, *case) with each case, n times, or `fast` times in the tests."""
        for _ in range(fast if self.cfg.fast else n):
            for case in cases:
                yield attempt(description, trial, self.new_path(), *case)

    def train_command(self, run, *flags):
        """The tiny training run; resumes where the folder exists."""
        files = [f"--dataset={self.dataset}", f"--out_dir={run}"]
        flags = last_of_each_flag([*TINY, *TWELVE_STEPS, *files, *flags])
        return ["train.py", *flags, *resume_flag(run)]

    def extend_command(self, parent, run, *flags):
        """The tiny extension of a run; resumes where the folder exists."""
        files = [str(parent), f"--out_dir={run}"]
        flags = last_of_each_flag([*TINY_EXTENSION, *flags])
        return ["extend.py", *files, *flags, *resume_flag(run)]

    def start(self, command, env=(), before=None, cpus=None):
        """Fork a child that runs a script. Returns a Child.

        before: called in the child first; the function that it returns, if any, is called last.
        """
        self.n_paths += 1
        output_file = self.folder / f"output-{os.getpid()}-{self.n_paths}"
        output_file.touch()
        pid = os.fork()
        if pid == 0:
            run_child(command, output_file, self.folder, dict(env), before, cpus)
        return Child(pid, output_file)

    def start_ranks(self, command, n=2, env=(), before=None):
        """Fork n ranks of one process group, each on one CPU. Returns a list of Child.

        before: as above, but called with the rank. One rank is an ordinary process.
        """
        cpus = sorted(os.sched_getaffinity(0))
        port = str(free_port())
        children = []
        for rank in range(n):
            group = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n),
                "LOCAL_WORLD_SIZE": str(n),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NANOLONG_TIMEOUT": "30",
            }
            own_env = {**(group if n > 1 else {}), **dict(env)}
            own_cpus = {cpus[rank % len(cpus)]} if n > 1 else None
            own_before = before and functools.partial(before, rank)
            children.append(self.start(command, own_env, own_before, own_cpus))
        return children

    def run(self, command, status=0, seconds=60, **options):
        """Start a child and wait for its end with this status. Returns its output."""
        return self.start(command, **options).expect(status, seconds)

    def run_pair(self, command, seconds=60):
        """Run two ranks to their end."""
        for child in self.start_ranks(command):
            child.expect(seconds=seconds)

    def launch(self, command, *torchrun, env=(), cpus=None):
        """Start a whole process, by python or by torchrun with these flags.

        Returns the Popen and the file of its output.
        """
        self.n_paths += 1
        output_file = self.folder / f"output-{os.getpid()}-{self.n_paths}"
        launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
        script = str(ROOT / command[0])
        cpus = cpus or os.sched_getaffinity(0)
        with open(output_file, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, *launcher, script, *map(str, command[1:])],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **dict(env)},
                preexec_fn=lambda: os.sched_setaffinity(0, cpus),
            )
        return process, output_file


def resume_flag(run):
    return ["--init_from=resume"] if Path(run).is_dir() else []


def write_dataset(folder):
    """Write a dataset of bytes with <bos>: the source of three modules."""
    folder.mkdir()
    documents = [inspect.getsource(module).encode() for module in (ast, argparse, inspect)]
    for name, part in (("train", documents[:2]), ("val", documents[2:])):
        tokens = []
        for document in part:
            tokens += [256, *document]
        write_tokens(folder / f"{name}.bin", tokens, 257)
    meta = {"tokenizer": {"kind": "bytes"}, "vocab_size": 257, "bos": 256, "bos_default": True}
    (folder / "meta.json").write_text(json.dumps(meta))


def send_signal_at_evaluation(number, signal_number):
    """In a child: send itself a signal when this evaluation of training starts, counted from 1.

    At that moment there are number - 1 checkpoints.
    """
    estimate_loss = train.estimate_loss
    n_calls = 0

    def estimate_loss_with_signal(*args, **kwargs):
        nonlocal n_calls
        n_calls += 1
        if n_calls == number:
            os.kill(os.getpid(), signal_number)
        return estimate_loss(*args, **kwargs)

    train.estimate_loss = estimate_loss_with_signal


def train_until_checkpoint(harness, command, run, n_checkpoints):
    """Start a training and kill it when it has saved so many checkpoints."""
    child = harness.start(
        command, before=lambda: send_signal_at_evaluation(n_checkpoints + 1, signal.SIGKILL)
    )
    assert child.wait() == -signal.SIGKILL, child.read_output()[-900:]
    assert len(list_steps(run)) == n_checkpoints


# -----------------------------------------------------------------------------
# Comparing run folders.


@dataclass
class Fingerprint:
    """What bit-exact runs have in common."""

    steps: list[str]
    hashes: dict[str, str]  # of the newest step
    log: list[dict]


@dataclass
class Workload:
    """A command, what it leaves behind when it is not disturbed, and how long it takes."""

    command: Callable  # of the run folder; resumes where it exists
    expected: Fingerprint
    seconds: float


def measure_workload(harness, command, run):
    """Run a command undisturbed: Workload."""
    start = time.monotonic()
    harness.run(command(run))
    return Workload(command, fingerprint(run), time.monotonic() - start)


def resume_and_compare(harness, workload, run):
    """Run the command to its end, in a folder that may hold an earlier part of it."""
    harness.run(workload.command(run))
    assert_same(run, workload.expected)


def read_log(run):
    """The rows of log.jsonl, without what depends on time and on resuming."""
    lines = (Path(run) / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row.pop("tokens_per_second", None)
    return [row for row in rows if "changed" not in row]


def sha256(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


def fingerprint(run):
    """The Fingerprint of a run that has ended, with nothing half-written in it."""
    assert not list(Path(run).glob(".tmp*")), "something half-written is left"
    steps = list_steps(run)
    hashes = {name: sha256(steps[-1] / name) for name in ("model.safetensors", "optim.safetensors")}
    return Fingerprint([step.name for step in steps], hashes, read_log(run))


def assert_whole(run):
    """Every checkpoint of a run is whole: all files have their checksums."""
    for step in list_steps(run) if Path(run).is_dir() else []:
        meta = read_meta(step)
        for name in meta["checksums"].keys() - {"meta.json"}:
            verify(step / name, meta)


def assert_same(run, expected):
    """A run is whole and bit-exact with an undisturbed one."""
    assert_whole(run)
    found = fingerprint(run)
    assert found.hashes == expected.hashes, f"other weights than an undisturbed run: {run}"
    assert found.log == expected.log, f"the log differs: {found.log[-2:]} and {expected.log[-2:]}"
    assert found.steps == expected.steps, f"other steps: {found.steps}"


def hash_tree(folder, ignore=()):
    """Path -> SHA-256 of everything below a folder ("" for folders)."""
    hashes = {}
    for path in Path(folder).rglob("*"):
        if path.name not in ignore:
            relative = str(path.relative_to(folder))
            hashes[relative] = sha256(path) if path.is_file() else ""
    return hashes
