"""Attack the promises of the README: killed processes, full disks, damaged files, hanging ranks, NaNs, nonsense as input, two writers, little memory.

    python tests/torture.py                                    everything: 200 kills, and an hour of training under watch
    python tests/torture.py --only=crash --kills=50 --seed=7
    python tests/torture.py --only=memory --hours=0.05

Real processes and real signals. A trial forks this process, which has torch imported and has computed nothing yet, and the child runs a script's main(): that costs a fraction of a second, so that
hundreds are affordable; some trials are whole processes, under torchrun or not. "The same bits" compares SHA-256 of model.safetensors and optim.safetensors, the rows of log.jsonl (but for
tokens_per_second), and which steps there are, with those of a run of the same settings that was left alone. Everything happens in a temporary folder.

Each section yields (line, what went wrong or None) for each trial. results/trust.md and trust.json have a row for each line: tried, survived, lost. A section that was not run in a call keeps the rows
of its last call, with the commit, date and seed of that call beside it. The exit status is 1 when anything was lost. Linux.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import contextlib
import ctypes
import hashlib
import importlib
import io
import json
import math
import mmap
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import traceback
from dataclasses import dataclass

import safetensors.torch  # noqa: F401: a child that has little memory, or is nobody, cannot import
import tiktoken  # noqa: F401
import torch
import torch.distributed as dist
import tqdm  # noqa: F401

import data
import evaluate
import extend
import sample  # noqa: F401
import train
from checkpoint import Refused, read_meta, steps, verify, write_meta
from config import UserError
from model import GPT, Block, GPTConfig

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("crash", "elastic", "numbers", "input", "concurrency", "memory")
TINY = ["--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4", "--max_iters=12", "--warmup_iters=2", "--eval_interval=3", "--eval_iters=2", "--log_interval=1",
        "--gradient_accumulation_steps=2", "--compile=false", "--dtype=float32", "--device=cpu"]
LONGER = ["--method=yarn", "--factor=2", "--max_iters=6", "--eval_interval=2"]  # of extend.py


@dataclass
class TortureConfig:
    only: tuple[str, ...] = ()   # sections; by default all
    kills: int = 200             # by kill -9, over all kinds
    examples: int = 300          # of each kind of nonsense
    hours: float = 1.0           # of training under watch
    fast: bool = False           # a few trials of each line, of those that cost more than a second; for the tests
    seed: int = -1               # of all that is random; by default a fresh one
    out_dir: str = "results"     # where trust.md and trust.json are written

    def __post_init__(self):
        if unknown := sorted({*self.only} - {*SECTIONS}):
            raise UserError(f"there is no section {unknown[0]!r}: --only takes {', '.join(SECTIONS)}")
        if self.kills < 1 or self.examples < 1 or not 0 < self.hours < 1000 or self.seed < -1:
            raise UserError("kills, examples and hours must be above 0, and seed at least 0 (or -1: a fresh one)")


class Torture:
    """The temporary folder, the draws, and how processes are started."""

    def __init__(self, cfg, folder):
        self.cfg, self.folder, self.rng, self.count = cfg, Path(folder), random.Random(cfg.seed), 0
        os.chmod(folder, 0o755)
        self.text = self.folder / "text"
        self.text.mkdir()
        import argparse
        import ast
        import inspect
        modules = [inspect.getsource(m).encode() for m in (ast, argparse, inspect)]
        for split, documents in (("train", modules[:2]), ("val", modules[2:])):
            data.write_tokens(self.text / f"{split}.bin", [t for d in documents for t in (256, *d)], 257)
        (self.text / "meta.json").write_text(json.dumps({"tokenizer": {"kind": "bytes"}, "vocab_size": 257, "bos": 256, "bos_default": True}))

    def new(self, name="run"):
        """A path that nobody has used."""
        self.count += 1
        return self.folder / f"{name}-{self.count}"

    def words(self, run, *more):
        """The command line of the tiny run; a run that was begun is gone on with."""
        return ["train.py", *TINY, f"--dataset={self.text}", f"--out_dir={run}", *more, *(["--init_from=resume"] if Path(run).is_dir() else [])]

    def longer(self, parent, run, *more):
        return ["extend.py", str(parent), *LONGER, f"--out_dir={run}", *more, *(["--init_from=resume"] if Path(run).is_dir() else [])]

    def start(self, words, env=(), before=None, cpus=None):
        """Fork a child that runs a script's main(); before() is called in it first, and what that returns, a function or None, last."""
        self.count += 1
        said = self.folder / f"said-{os.getpid()}-{self.count}"
        said.touch()
        pid = os.fork()
        if pid:
            return pid, said
        code = 99
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0), os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout, sys.stderr = (open(fd, "w", closefd=False, errors="backslashreplace") for fd in (1, 2))
            os.environ.update(env)
            os.chdir(self.folder)
            os.sched_setaffinity(0, cpus or os.sched_getaffinity(0))
            torch.set_num_threads(1)
            sys.argv = list(map(str, words))
            after = before() if before else None
            try:
                config.main(importlib.import_module(words[0].removesuffix(".py")).main, Refused)
            except SystemExit as exit:
                code = exit.code or 0
            finally:
                if after:
                    after()
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def ranks(self, words, env=(), before=None):
        """Fork two ranks of one group, without a launcher, each on one processor; before(rank) as above. A list of what start() returns."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        cpus = sorted(os.sched_getaffinity(0))
        return [self.start(words, {"RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NANOLONG_TIMEOUT": "30", **dict(env)},
                           before and (lambda r=r: before(r)), {cpus[r % len(cpus)]}) for r in (0, 1)]

    def run(self, words, code=0, seconds=60, **options):
        """Start a child and wait for its end. Raises AssertionError unless it ends in time, with this status and no traceback; returns what it said."""
        return end(self.start(words, **options), code, seconds)

    def launch(self, words, *torchrun, env=(), cpus=None):
        """A whole process, or a launcher: python, or torchrun with these words."""
        self.count += 1
        said = self.folder / f"said-{os.getpid()}-{self.count}"
        command = [sys.executable, *(["-m", "torch.distributed.run", *torchrun] if torchrun else []), str(ROOT / words[0]), *map(str, words[1:])]
        with open(said, "wb") as out:
            return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **dict(env)},
                                    preexec_fn=lambda: os.sched_setaffinity(0, cpus or os.sched_getaffinity(0))), said

    def seconds(self, words):
        """How long an undisturbed child takes."""
        begun = time.monotonic()
        self.run(words)
        return time.monotonic() - begun


def over(child, seconds):
    """Wait for a child's end: its exit status, or minus its signal. After so many seconds it is killed: AssertionError."""
    until = time.monotonic() + seconds
    while True:
        pid, status = os.waitpid(child[0], os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child[0], signal.SIGKILL)
            os.waitpid(child[0], 0)
            raise AssertionError(f"it hung: no end after {seconds} s; it said {text_of(child)[-300:]!r}")
        time.sleep(0.002)


def text_of(child):
    return child[1].read_text(errors="replace")


def end(child, code=0, seconds=60):
    """over(), with the status and the sentence looked at. Returns what the child said."""
    got, said = over(child, seconds), text_of(child)
    assert got == code and "Traceback" not in said, f"exit status {got} where {code} was due; it said {said[-1500:]!r}"
    if code == 2:
        errors = [line for line in said.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and len(errors[0]) > 20, f"not one sentence: {said[-1500:]!r}"
    return said


def signal_at(evaluation, number):
    """In the child: send itself a signal at the start of this evaluation of training, counted from 1: there are so many checkpoints less one."""
    validate, seen = train.validate, []

    def once(*args, **more):
        seen.append(1)
        if len(seen) == evaluation:
            os.kill(os.getpid(), number)
        return validate(*args, **more)
    train.validate = once


def kill(child):
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child[0], signal.SIGKILL)
        os.waitpid(child[0], 0)


def rows_of(run):
    rows = [json.loads(line) for line in (Path(run) / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows if "changed" not in row]


def whole(run):
    """Every checkpoint of a run is whole: meta.json is read, and all files have their checksums. Raises Refused."""
    for step in steps(run) if Path(run).is_dir() else []:
        meta = read_meta(step)
        for name in meta["checksums"].keys() - {"meta.json"}:
            verify(step / name, meta)


def state(run):
    """What "the same bits" compares."""
    newest = steps(run)[-1]
    assert not list(Path(run).glob(".tmp*")), "something half-made is left"
    return [step.name for step in steps(run)], {name: hashlib.sha256((newest / name).read_bytes()).hexdigest() for name in ("model.safetensors", "optim.safetensors")}, rows_of(run)


def same(run, reference):
    whole(run)
    names, sums, rows = state(run)
    assert sums == reference[1], f"other weights than those of a run that was left alone: {run}"
    assert rows == reference[2], f"the log differs: {rows[-2:]} and {reference[2][-2:]}"
    assert names == reference[0], f"other steps: {names}"


def tree(folder, but=()):
    """Every file below a folder: size and SHA-256."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for p in Path(folder).rglob("*") if p.name not in but}


def attempt(line, trial, *args):
    """One trial as a section yields it."""
    try:
        trial(*args)
    except Skip:
        raise
    except Exception as error:
        return line, f"{type(error).__name__}: {error}"[:2000] + ("" if isinstance(error, AssertionError) else "\n" + traceback.format_exc()[-1500:])
    return line, None


class Skip(Exception):
    """What this machine cannot do, in words."""


# ---------------------------------------------------------------------------------------------------------------------
# Crash: killed at any moment, a full disk, a read-only folder, vanished data, damaged checkpoints, a clock that jumps.

def crash(t):
    """Stopped by force or by its surroundings; then resumed, to the same bits."""
    reference, long = t.new(), t.new("long")
    t.run(t.words(reference))
    took = t.seconds(t.words(t.new()))
    alone = state(reference)
    t.run(t.longer(reference, long))
    alone_long, took_long = state(long), t.seconds(t.longer(reference, t.new("long")))
    rows = t.new("rows.json")
    measure = ["evaluate.py", str(reference), "--lengths=16,32,64", "--max_tokens=4000", f"--json={rows}"]
    took_rows = t.seconds(measure)
    losses, untouched = json.loads(rows.read_text()), tree(reference)
    pair = t.new("pair")
    begun = time.monotonic()
    for child in t.ranks(t.words(pair)):
        end(child)
    took_pair, alone_pair = time.monotonic() - begun, state(pair)
    n, few = t.cfg.kills, t.cfg.fast
    share = {"train": n * 35 // 100, "saving": n * 25 // 100, "extend": n * 15 // 100, "evaluate": -(-n * 5 // 100), "pair": n * 15 // 100}
    share["process"] = n - sum(share.values())

    def killed(words_of, run, took, alone, more=0.25):
        """Kill a child at a moment of its life, and perhaps the ones that go on; the last is left alone."""
        while True:
            child = t.start(words_of(run))
            time.sleep(t.rng.uniform(0, took * 1.02))
            kill(child)
            assert "Traceback" not in text_of(child), text_of(child)
            whole(run)
            if t.rng.random() > more:
                break
        t.run(words_of(run))
        same(run, alone)
        shutil.rmtree(run)

    for _ in range(share["train"]):
        yield attempt("kill -9 at a random moment of train.py: resumed, the same bits", killed, t.words, t.new(), took, alone)

    def operations(counter, at=None):
        """In the child: a byte to the counter for every file that is opened, made, renamed or removed in the run folder, or, at number `at`, kill -9 before it is done."""
        fd, seen = os.open(counter, os.O_WRONLY | os.O_CREAT), [0]

        def note(event, args):
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and counter.stem in os.fsdecode(args[0] if isinstance(args[0], (str, bytes)) else ""):
                seen[0] += 1
                os.write(fd, b".")
                if seen[0] == at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(note)

    def at_operation(words_of, run, at, alone):
        child = t.start(words_of(run), before=lambda: operations(run.with_suffix(".ops"), at))
        assert over(child, 60) in (-signal.SIGKILL, 0)
        whole(run)
        t.run(words_of(run))
        same(run, alone)
        shutil.rmtree(run)

    counted = {}
    for name, words_of in (("train.py", t.words), ("extend.py", lambda run: t.longer(reference, run))):
        run = t.new("ops")
        t.run(words_of(run), before=lambda run=run: operations(run.with_suffix(".ops")))
        counted[name] = run.with_suffix(".ops").stat().st_size
        assert counted[name] > 20, "the operations on files were not seen"
    moments = [(name, at) for name, count in counted.items() for at in range(1, count + 1)]
    for name, at in t.rng.sample(moments, min(share["saving"], len(moments))) + t.rng.choices(moments, k=max(0, share["saving"] - len(moments))):
        words_of, right = (t.words, alone) if name == "train.py" else (lambda run: t.longer(reference, run), alone_long)
        yield attempt(f"kill -9 before one of the {len(moments)} operations on files while saving and logging: resumed, the same bits", at_operation, words_of, t.new("ops"), at, right)

    for _ in range(share["extend"]):
        yield attempt("kill -9 at a random moment of extend.py: resumed, the same bits", killed, lambda run: t.longer(reference, run), t.new("long"), took_long, alone_long)

    def evaluating():
        child = t.start(measure)
        time.sleep(t.rng.uniform(0, took_rows))
        kill(child)
        assert tree(reference) == untouched, "evaluation wrote to the run that it measures"
        t.run(measure)
        assert json.loads(rows.read_text()) == losses and tree(reference) == untouched

    for _ in range(share["evaluate"]):
        yield attempt("kill -9 at a random moment of evaluate.py: the run untouched, and the same figures afterwards", evaluating)

    def both(run):
        children = t.ranks(t.words(run))
        time.sleep(t.rng.uniform(0, took_pair * 1.02))
        t.rng.shuffle(children)
        kill(children[0])
        time.sleep(t.rng.choice((0, 0.05, 0.3)))  # the other one goes on alone for a while, ends by itself, or is killed too
        kill(children[1])
        assert not any("Traceback" in text_of(child) for child in children), [text_of(child)[-900:] for child in children]
        whole(run)
        for child in t.ranks(t.words(run)):
            end(child)
        same(run, alone_pair)
        shutil.rmtree(run)

    for _ in range(share["pair"]):
        yield attempt("kill -9 at a random moment of two processes that train together: resumed, the same bits", both, t.new("pair"))

    begun = time.monotonic()
    process = t.launch(t.words(t.new()))[0]
    assert process.wait() == 0
    took_process = time.monotonic() - begun

    def process_killed(run):
        process, said = t.launch(t.words(run))
        time.sleep(t.rng.uniform(0, took_process))
        process.kill()
        process.wait()
        assert "Traceback" not in said.read_text(), said.read_text()
        whole(run)
        t.run(t.words(run))
        same(run, alone)

    for _ in range(share["process"]):
        yield attempt("kill -9 at a random moment of a whole process, its imports included: resumed, the same bits", process_killed, t.new())

    sizes = [p.stat().st_size for p in steps(reference)[-1].iterdir()]

    def limited(run, script, right):
        """Files may not grow beyond a limit that lies somewhere below the largest file of a checkpoint."""
        limit = t.rng.randrange(300, max(sizes) - 1)
        words_of = t.words if script == "train.py" else lambda run: t.longer(reference, run)
        if t.rng.random() < 0.5:  # into a run that has checkpoints
            stopped(words_of(run), run)
        said = t.run(words_of(run), 2, before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        assert "File too large" in said and (not run.exists() or not list(run.glob(".tmp*"))), said
        whole(run)
        t.run(words_of(run))
        same(run, right)

    def stopped(words, run, at=None):
        """Train until there is a checkpoint, or two, and kill it there."""
        at = at or t.rng.choice((1, 2))
        assert over(t.start(words, before=lambda: signal_at(at + 1, signal.SIGKILL)), 60) == -signal.SIGKILL and len(steps(run)) == at

    for script, right in (("train.py", alone), ("extend.py", alone_long)) * (1 if few else 10):
        yield attempt("no room for a file (RLIMIT_FSIZE): one sentence, nothing half-made; with room again resumed, the same bits", limited, t.new(), script, right)

    def full(run):
        """A disk of its own, in a mount namespace of its own, too small; then enlarged."""
        libc, mount = ctypes.CDLL(None, use_errno=True), run.parent / f"disk-{run.name}"
        mount.mkdir()
        if libc.unshare(0x20000 | (0x10000000 if os.geteuid() else 0)) or libc.mount(b"none", b"/", None, 0x44000, None) or libc.mount(b"tmpfs", bytes(mount), b"tmpfs", 0, b"size=64m"):
            raise Skip(f"mounting a small disk is not permitted here ({os.strerror(ctypes.get_errno())})")
        run = mount / "run"
        if t.rng.random() < 0.5:
            stopped(t.words(run), run, 1)
        used = sum(-(-p.stat().st_size // 4096) for p in mount.rglob("*")) + 2
        assert not libc.mount(b"tmpfs", bytes(mount), b"tmpfs", 0x20, b"size=%dk" % (4 * (used + t.rng.randrange(1, 100))))
        said = t.run(t.words(run), 2)
        assert "No space left" in said and not list(run.glob(".tmp*")), said
        whole(run)
        assert not libc.mount(b"tmpfs", bytes(mount), b"tmpfs", 0x20, b"size=64m")
        t.run(t.words(run))
        same(run, alone)

    for _ in range(1 if few else 10):
        yield inside("a full disk (a tmpfs of its own): one sentence, nothing half-made; with room again resumed, the same bits", t, full, t.new())

    def nobody():
        if os.geteuid() == 0:  # whom permissions do not bind
            os.setgid(65534), os.setuid(65534)

    def read_only(run, begun):
        if begun:
            stopped(t.words(run), run)
        else:
            (run.parent / f"shut-{run.name}").mkdir()
            run = run.parent / f"shut-{run.name}" / "run"
        paths = [run, *run.rglob("*")] if begun else [run.parent]
        for path in paths:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        before = tree(paths[0])
        said = t.run(t.words(run), 2, before=nobody)
        assert "Permission denied" in said and tree(paths[0]) == before
        for path in paths:
            os.chmod(path, 0o755 if path.is_dir() else 0o644)
        t.run(t.words(run))
        same(run, alone)

    for begun in (True, False) * (1 if few else 5):
        yield attempt("a read-only folder (as root: tried as nobody): one sentence, nothing changed; mended, the same bits", read_only, t.new(), begun)

    def vanished(run, when):
        other = t.new("text")
        shutil.copytree(t.text, other)
        words = lambda: [w if not w.startswith("--dataset") else f"--dataset={other}" for w in t.words(run)]  # noqa: E731
        gone = other / t.rng.choice(("train.bin", "val.bin"))
        content = gone.read_bytes()
        if when == "running":
            child = t.start(words())
            while not (run.is_dir() and steps(run)):
                time.sleep(0.001)
            gone.unlink()
            end(child)
            return same(run, alone)
        if when == "resume":
            stopped(words(), run)
        gone.unlink()
        before = tree(run) if run.exists() else None
        t.run(words(), 2)
        gone.write_bytes(content[:-40] if t.rng.random() < 0.5 else content[:-1] + bytes([content[-1] ^ 1]))  # or back, but not the same
        if when == "resume":
            t.run(words(), 2)
            assert tree(run, ("lock",)) == {k: v for k, v in before.items() if k != "lock"}
        gone.write_bytes(content)
        t.run(words())
        same(run, alone)

    for when in ("start", "running", "resume") * (1 if few else 5):
        yield attempt("a data file that vanishes or changes before, in or after training: refused in a sentence, or not needed any more; the same bits", vanished, t.new(), when)

    def damaged(run, file):
        stopped(t.words(run), run, 2)
        newest, before = steps(run)[-1], steps(run)[-2]
        content = (newest / file).read_bytes()
        at, bit = t.rng.randrange(len(content)), 1 << t.rng.randrange(8)
        spoiled = content[:at] if t.rng.random() < 0.3 else content[:at] + bytes([content[at] ^ bit]) + content[at + 1:]
        (newest / file).write_bytes(spoiled)
        harmless = False
        with contextlib.suppress(ValueError):  # white space in JSON
            harmless = file == "meta.json" and json.loads(spoiled) == json.loads(content)
        scripts = [t.words(run)] + ([["sample.py", run, "--max_new_tokens=3"], ["evaluate.py", run, "--lengths=32", "--max_tokens=99"], t.longer(run, t.new("never"))] if file != "optim.safetensors" else [])
        for words in scripts if not harmless else ():
            said = t.run(words, 2)
            assert str(newest) in said and before.name in said, said
        if not harmless:
            newest.rename(run / "damaged")
        t.run(t.words(run))
        same(run, alone)

    for file in ("model.safetensors", "optim.safetensors", "meta.json") * (1 if few else 20):
        yield attempt("a checkpoint truncated or with a flipped bit: refused by its checksum, the step before offered; resumed from there, the same bits", damaged, t.new(), file)

    def jumping(run):
        def before():
            real, rng = time.time, random.Random(t.rng.random())
            time.time = lambda: real() + rng.uniform(-3e8, 3e8)
        for last in (False, True):
            child = t.start(t.words(run), before=before)
            if not last:
                time.sleep(t.rng.uniform(0.3, 0.9) * took)
                kill(child)
                for path in run.rglob("*") if run.exists() else ():
                    os.utime(path, (t.rng.choice((0, 4e9)),) * 2)
        end(child)
        same(run, alone)

    for _ in range(1 if few else 10):
        yield attempt("a clock that jumps by years, and files from the future and from 1970: killed, resumed, the same bits", jumping, t.new())


def inside(line, t, trial, *args):
    """attempt() in a forked process, whose mounts are its own."""
    said = t.new("inside")
    pid = os.fork()
    if not pid:
        try:
            lost = attempt(line, trial, *args)[1] or ""
        except Skip as skip:
            lost = f"SKIP {skip}"
        said.write_text(lost)
        os._exit(0)
    os.waitpid(pid, 0)
    lost = said.read_text() if said.exists() else "the trial's own process died"
    return line, lost or None


# ---------------------------------------------------------------------------------------------------------------------
# Elastic: ranks that die, hang, come back, become fewer and more.

def elastic(t):
    """Two processes and what may happen to one of them."""
    few, cpus = t.cfg.fast, set(sorted(os.sched_getaffinity(0))[:2])
    pair, single = t.new("pair"), t.new()
    for child in t.ranks(t.words(pair)):
        end(child)
    alone = state(pair)
    t.run(t.words(single))
    quick = {"OMP_NUM_THREADS": "1", "NANOLONG_TIMEOUT": "20"}

    def workers(launcher):
        """The ranks that a launcher has started: process ids, when there are two."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(path.read_text().rpartition(")")[2].split()[1]) == launcher.pid and b"train.py" in (path.parent / "cmdline").read_bytes():
                    found.append(int(path.parent.name))
        return found

    slow = ["--max_iters=200", "--eval_interval=20"] if few else ["--max_iters=400", "--eval_interval=40"]
    longer = t.new("pair")

    def settled(process, said, seconds=150):
        try:
            assert process.wait(seconds) == 0, said.read_text()[-3000:]
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"it hung; it said {said.read_text()[-2000:]!r}") from None

    def begin():
        if not longer.exists():
            for child in t.ranks(t.words(longer, *slow)):
                end(child, seconds=200)

    def comes_back(run, kills):
        """kill -9 on one rank; torchrun starts both again, and they go on from the newest checkpoint."""
        begin()
        process, said = t.launch(t.words(run, *slow), "--standalone", "--nproc_per_node=2", "--max-restarts=3", "--monitor-interval=0.1", env=quick, cpus=cpus)
        at, done = None, 0
        while done < kills:
            until = time.monotonic() + 60
            while not (run.is_dir() and steps(run) and steps(run)[-1].name != at and len(workers(process)) == 2) and process.poll() is None:
                assert time.monotonic() < until, said.read_text()[-2000:]
                time.sleep(0.01)
            time.sleep(t.rng.uniform(0, 0.3))
            at, alive = steps(run)[-1].name, workers(process)
            if len(alive) < 2:  # it was faster than we
                break
            os.kill(t.rng.choice(alive), signal.SIGKILL)
            done += 1
        settled(process, said)
        same(run, state(longer))
        if not done:
            comes_back(t.new("back"), kills)

    for _ in range(1 if few else 4):
        yield attempt("kill -9 on a rank under torchrun --max-restarts: the run comes back by itself, to the same bits", comes_back, t.new("back"), 1 if few else t.rng.choice((1, 2, 3)))

    def batches(run, log, world, until=None):
        """Train as so many processes, each noting which batches it saw; all killed before batch `until`."""
        def before(rank=0):
            real = data.Dataset.batch

            def batch(self, number, *args, **more):
                if number >= (until or math.inf):
                    os.kill(os.getpid(), signal.SIGKILL)
                out = real(self, number, *args, **more)
                with open(log, "a") as f:
                    f.write(f"{number} {hashlib.sha256(out[0].tobytes() + out[1].tobytes()).hexdigest()}\n")
                return out
            data.Dataset.batch = batch
        children = t.ranks(t.words(run), before=before) if world == 2 else [t.start(t.words(run), before=before)]
        for child in children:
            code = over(child, 60)
            assert code in ((0,) if until is None else (-signal.SIGKILL, 1)) and "Traceback" not in text_of(child), text_of(child)

    def changes(run):
        """As two, as one, and as two again: the 24 batches of 12 iterations."""
        logs = t.new("batches"), t.new("batches")
        batches(t.new(), logs[0], 1)
        cuts = sorted(t.rng.sample(range(2, 22), 2))
        for world, until in (2, cuts[0]), (1, cuts[1]), (2, None):
            batches(run, logs[1], world, until)
        right, seen = (sorted({line for line in log.read_text().splitlines() if int(line.split()[0]) < 24}, key=lambda line: int(line.split()[0])) for log in logs)  # one more is prepared, and not used
        assert right == seen and len(right) == 24, f"other batches, cut at {cuts}"
        a, b = ({row["step"]: row["loss"] for row in rows_of(r) if "loss" in row} for r in (single, run))
        assert a.keys() == b.keys() and max(abs(a[s] - b[s]) for s in a) < 1e-5

    for _ in range(2 if few else 20):
        yield attempt("2 processes, killed, 1 process, killed, 2 processes: every batch the same, losses within 1e-5", changes, t.new("pair"))

    def hangs(run):
        """SIGSTOP: it neither answers nor ends."""
        begin()
        which, number, real = t.rng.randrange(2), t.rng.randrange(2, 200), data.Dataset.batch

        def batch(self, n, *args, **more):
            if n >= number:
                os.kill(os.getpid(), signal.SIGSTOP)
            return real(self, n, *args, **more)
        children = t.ranks(t.words(run, *slow), env={"NANOLONG_TIMEOUT": "3"}, before=lambda rank: setattr(data.Dataset, "batch", batch) if rank == which else None)
        try:
            assert os.WIFSTOPPED(os.waitpid(children[which][0], os.WUNTRACED)[1])
            begun = time.monotonic()
            said = end(children[1 - which], 1, 40)
            assert "error: process" in said and "NANOLONG_TIMEOUT" in said and "--init_from=resume" in said and time.monotonic() - begun > 1, said
        finally:
            kill(children[which])
        whole(run)
        for child in t.ranks(t.words(run, *slow)):
            end(child, seconds=200)
        same(run, state(longer))

    for _ in range(1 if few else 5):
        yield attempt("a rank that hangs (SIGSTOP): the other ends after NANOLONG_TIMEOUT with a sentence; resumed, the same bits", hangs, t.new("pair"))

    def two_launchers(run, killed):
        """Two torchrun launchers meet at an endpoint, as two machines would."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        begin()
        words, name = t.words(run, *(slow if killed else [])), f"trust{port}"
        each = [t.launch(words, "--nnodes=2", "--nproc_per_node=1", "--max-restarts=3", "--monitor-interval=0.1", "--rdzv_backend=c10d", f"--rdzv_id={name}", f"--rdzv_endpoint=127.0.0.1:{port}",
                         env=quick, cpus={cpu}) for cpu in (sorted(cpus) * 2)[:2]]
        try:
            if killed:
                while not (run.is_dir() and len(steps(run)) > 1):
                    assert all(process.poll() is None for process, _ in each)
                    time.sleep(0.01)
                os.kill(workers(t.rng.choice(each)[0])[0], signal.SIGKILL)
            for process, said in each:
                settled(process, said)
        finally:
            for process, _ in each:
                process.kill()
        same(run, state(longer) if killed else alone)

    for killed in (False,) if few else (False, True):
        yield attempt("multi-node rendezvous, two torchrun launchers on one machine" + (", one worker killed: both come back" if killed else "") + ": the same bits as two processes of one", two_launchers, t.new("nodes"), killed)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers: nothing that is not finite gets through, and the same command gives the same bits.

def numbers(t):
    """NaN and Inf, put in at a random micro-batch of a random rank."""
    few = t.cfg.fast

    def digest(model):
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()

    def inject(where, value, call, notes):
        """In the child: at training call number `call` (None: never) of this rank; notes the weights at the start of each iteration and at the end."""
        seen, kept = [0], []
        forward, block = GPT.forward, Block.forward

        def model_forward(self, *args, **more):
            if not self.training:
                return forward(self, *args, **more)
            kept[:] = [self]
            with open(notes, "a") as f:
                f.write(digest(self) + "\n")
            out = forward(self, *args, **more)
            seen[0] += 1
            return out * value if where == "loss" and seen[0] - 1 == call else out

        def block_forward(self, *args):
            out = block(self, *args)
            if self.training and seen[0] == call and where == "activations":
                out = out.clone()
                out[0, -1, 0] = value
            if self.training and seen[0] == call and where == "gradients":
                def spoil(g):
                    g = g.clone()
                    g[-1, 0, 0] = value
                    return g
                out.register_hook(spoil)
            return out
        GPT.forward, Block.forward = model_forward, block_forward

        def after():
            with open(notes, "a") as f:
                f.write(digest(kept[0]) + "\n")
        return after

    def stopped(where, value, world, run):
        """12 iterations of 2 micro-batches, over one process or two."""
        micro = t.rng.randrange(24)
        iteration, rank, call = micro // 2, micro % world, micro // world
        notes = [t.new("notes") for _ in range(world)]
        make = lambda r: inject(where, value, call if r == rank else None, notes[r])  # noqa: E731
        children = t.ranks(t.words(run), before=make) if world == 2 else [t.start(t.words(run), before=lambda: make(0))]
        said = [end(child, 1) for child in children][0]
        what = "gradient" if where == "gradients" else "loss"
        assert f"the {what} of iteration {iteration + 1} (micro-batches {2 * iteration} to {2 * iteration + 1}" in said and "stopped before the update" in said, said
        assert what == "gradient" or f"first of micro-batch {micro}" in said, said
        for note in notes:
            sums = note.read_text().split()
            assert sums[-1] == sums[-2] and len(set(sums)) == iteration + 1, "weights have changed"
        assert len({note.read_text().split()[-1] for note in notes}) == 1
        whole(run)
        assert steps(run)[-1].name == f"step-{iteration // 3 * 3:06d}" and "NaN" not in (run / "log.jsonl").read_text()
        shutil.rmtree(run)

    for where in ("loss", "gradients", "activations"):
        for value in (math.nan, math.inf, -math.inf):
            for world in (1, 2):
                for _ in range(1 if few else 4) if not few or (value != -math.inf and (world == 1 or value != value)) else ():
                    yield attempt(f"NaN or Inf in {where}: stopped before the update on all ranks, iteration and micro-batches named", stopped, where, value, world, t.new())

    def bad_data(world, run):
        """Text is whole numbers: what is wrong in it is a token outside the vocabulary."""
        other, micro = t.new("text"), t.rng.randrange(2, 24)
        shutil.copytree(t.text, other)
        dataset = data.Dataset(other)
        file, start = dataset.train.sample(micro * 4 + t.rng.randrange(4), 32, 1337)
        tokens = data.np.memmap(other / "train.bin", "<u2", "r+", 1024)
        tokens[start + t.rng.randrange(32)] = t.rng.choice((257, 65535, 300))
        tokens.flush()
        words = [w if not w.startswith("--dataset") else f"--dataset={other}" for w in t.words(run)]
        children = t.ranks(words) if world == 2 else [t.start(words)]
        codes = [(over(child, 60), text_of(child)) for child in children]
        told = "".join(text for _, text in codes)
        assert "Traceback" not in told and sorted(code for code, _ in codes) == [1, 2][2 - world:] and "train.bin: token" in told and "outside the vocabulary of 257" in told, codes
        whole(run)
        assert len(rows_of(run)) - sum("val_loss" in row for row in rows_of(run)) == micro // 2
        shutil.rmtree(run)

    for world in (1, 2) * (1 if few else 5):
        yield attempt("a token outside the vocabulary: stopped before the update on all ranks, file and token named", bad_data, world, t.new())

    def twice(words):
        runs = t.new(), t.new()
        for run in runs:
            t.run(t.words(run, *words), seconds=120)
        same(runs[1], state(runs[0]))

    kinds = [[f"--pos={pos}"] for pos in ("nope", "learned", "sinusoidal", "shaw", "nezha", "xl", "t5", "alibi", "kerple", "kerple-power", "sandwich", "rope")]
    kinds += [["--optimizer=muon"], ["--dropout=0.3"], ["--dtype=bfloat16"], ["--dtype=float16"], ["--random_positions=99"], ["--passkey=0.5"], ["--window=8", "--sinks=2"], ["--nope_every=2", "--qk_norm=true"]]
    for words in t.rng.sample(kinds, 4) if few else kinds:
        yield attempt("the same command twice, on a CPU: the same bits", twice, words)

    def twice_on_a_gpu(words):
        runs = t.new(), t.new()
        for run in runs:
            process, said = t.launch([w for w in t.words(run, *words) if w not in ("--device=cpu", "--dtype=float32")])
            assert process.wait(300) == 0, said.read_text()[-2000:]
        same(runs[1], state(runs[0]))

    if not few and torch.cuda.is_available():  # whole processes: CUDA does not fork
        for words in kinds[:12]:
            yield attempt("the same command twice, on a GPU: the same bits", twice_on_a_gpu, words)


# ---------------------------------------------------------------------------------------------------------------------
# Input: nonsense of every kind. Drawn by hypothesis in a child that has little memory to take, an alarm, and an audit of what it opens and starts.

FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.connect", "ctypes.dlopen")
WRITES = {"os.rename": (0, 1), "os.remove": (0,), "os.mkdir": (0,), "os.rmdir": (0,), "os.truncate": (0,), "os.link": (0, 1), "os.symlink": (0, 1), "os.chmod": (0,), "shutil.rmtree": (0,)}


class Lost(Exception):
    """What nonsense must never bring about."""


def fuzz(t, name, body, seconds=10, examples=None):
    """Run body(draw, folder) on drawn examples in a child; yields (line, None) for each that survived, and one (line, what) for the first, smallest, that did not.

    draw is hypothesis' data.draw; folder is new for every example, and the only one that may be written to. Each has so many seconds and, over what the child has, 1 GiB."""
    line, report, room = f"nonsense as {name}: done or refused in one sentence", t.new("fuzz"), t.new("room")
    room.mkdir()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(report.with_suffix(".said"), os.O_WRONLY | os.O_CREAT, 0o644), 2)
            report.write_text(_fuzz(t, body, room, seconds, examples or t.cfg.examples))
        os._exit(0)
    os.waitpid(pid, 0)
    tried, _, lost = report.read_text().partition("\n") if report.exists() else ("0", "", "the child died of it: " + report.with_suffix(".said").read_text()[-500:])
    for _ in range(int(tried)):
        yield line, None
    if lost:
        yield line, lost
    shutil.rmtree(room)


def _fuzz(t, body, room, seconds, examples):
    """In the child: the number that survived, and, from the second line on, what one did not survive."""
    import hypothesis
    from hypothesis import strategies as st
    tried, broken = [0], []
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(Lost(f"it hung: no end after {seconds} s")))
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (taken + (1 << 30),) * 2)
    watched = [False]

    def audit(event, args):
        if not watched[0]:
            return
        paths = [args[i] for i in WRITES.get(event, ())]
        if event == "open" and args[0] is not None and not isinstance(args[0], int) and (isinstance(args[1], str) and set(args[1]) & set("wax+") or args[1] is None and args[2] & (os.O_WRONLY | os.O_RDWR)):
            paths = [args[0]]
        outside = [p for p in paths if not isinstance(p, int) and not str(Path(os.fsdecode(p)).absolute()).startswith((str(room), str(t.folder / "hypothesis"), "/dev/null", "/proc/self"))]
        if (event in FORBIDDEN and not (event == "ctypes.dlopen" and args[0] is None)) or outside and "__pycache__" not in str(outside[0]):
            broken.append(f"{event} of {args!r:.200}")
    sys.addaudithook(audit)

    @hypothesis.seed(t.rng.randrange(1 << 32))
    @hypothesis.settings(max_examples=examples, database=None, deadline=None, derandomize=False, suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink])
    @hypothesis.given(st.data())
    def test(drawn):
        broken.clear()
        folder = room / str(tried[0])
        folder.mkdir(exist_ok=True)
        said = []

        def draw(strategy):
            said.append(drawn.draw(strategy))
            return said[-1]
        os.chdir(folder)
        try:
            watched[0] = True
            signal.alarm(seconds)
            try:
                body(draw, folder)
                if broken:
                    raise Lost(broken[0])
            finally:
                signal.alarm(0)
                watched[0] = False
        except hypothesis.errors.HypothesisException:
            raise
        except Exception as error:
            raise Lost(f"{type(error).__name__}: {error!s:.600}; drawn: {said!r:.600}; {traceback.format_exc()[-700:]}") from None
        finally:
            os.chdir(room)
            shutil.rmtree(folder, ignore_errors=True)
        tried[0] += 1
    try:
        test()
    except BaseException as error:
        return f"{tried[0]}\n{error!s:.2000}" + "".join(f"; {e!s:.1500}" for e in getattr(error, "exceptions", ()))
    return f"{tried[0]}\n"


def call(*words):
    """Run a script's main() here, in a fuzz's child. Raises Lost unless it ends with 0, or with 2 and one sentence that is not about memory. Returns the status and what it said."""
    kept, out, err = (sys.stdout, sys.stderr, sys.argv), *(io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in range(2))
    sys.stdout, sys.stderr, sys.argv = out, err, [os.fsdecode(os.fsencode(str(word))) for word in words]
    try:
        config.main(importlib.import_module(words[0].removesuffix(".py").replace("/", ".")).main, Refused)
    except SystemExit as exit:
        code = exit.code or 0
    finally:
        sys.stdout, sys.stderr, sys.argv = kept
        for folder in list(config._locks):
            config.unlock(folder)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))
    errors = [line for line in texts[1].splitlines() if line.startswith("error: ")]
    if code not in (0, 2) or "Traceback" in texts[1] or code == 2 and (len(errors) != 1 or "out of memory" in errors[0]) or code == 0 and errors:
        raise Lost(f"status {code}: {texts[1][-1500:]}")
    return code, *texts


def input(t):  # noqa: A001
    """Files, flags and prompts that nobody should give."""
    import hypothesis
    from hypothesis import strategies as st
    run, examples = t.new(), t.cfg.examples
    t.run(t.words(run))
    odd = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from((1 << 31, 1 << 63, 10**30, -10**9, 1e308, 1e-308, -0.5, math.inf, math.nan, 1 << 24, 65537, "", "x", "rope", "none", "../../x", "/", "9" * 400, [], {}, [1], {"a": 1},
                                                                            [[]], "\0", "\ud800", "1e999", "true")), st.text(max_size=9), st.floats(), st.integers())

    hypothesis.configuration.set_hypothesis_home_dir(t.folder / "hypothesis")
    odd.validate()  # three seconds of Unicode, once

    def bomb(draw):
        """A text that nests deeper than anybody reads."""
        n, (before, middle, after) = draw(st.sampled_from((900, 5000, 200_000))), draw(st.sampled_from((('{"a":', "1", "}"), ("[", "", "]"), ("[", "", ""), ('{"a":', "", ""), ("99999", "", ""), ("", "", " "))))
        return before * n + middle + after * n

    def mutated(draw, value):
        """A JSON value with some of it replaced, removed or added, anywhere."""
        value = json.loads(json.dumps(value))
        for _ in range(draw(st.integers(1, 3))):
            at = value
            while isinstance(at, (dict, list)) and len(at):
                key = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
                if not isinstance(at[key], (dict, list)) or not at[key] or draw(st.integers(0, 3)) == 0:
                    action = draw(st.integers(0, 5))
                    if action == 0:
                        del at[key]
                    elif action == 1 and isinstance(at, dict):
                        at[draw(st.text(max_size=5))] = draw(odd)
                    elif action == 2 and type(at[key]) in (int, float):
                        at[key] = draw(st.sampled_from((at[key] + 1, at[key] * 2, -at[key], at[key] * 10**6, float(at[key]), str(at[key]), [at[key]])))
                    else:
                        at[key] = draw(odd)
                    break
                at = at[key]
        return value

    def copied(folder):
        """The run's newest checkpoint, as a run of its own in this folder."""
        shutil.copytree(steps(run)[-1], folder / "run" / "step-000012")
        shutil.copy(run / "log.jsonl", folder / "run" / "log.jsonl")
        return folder / "run", folder / "run" / "step-000012"

    def read_by(draw, here):
        """One of the scripts reads it."""
        script = draw(st.sampled_from(("sample", "evaluate", "extend", "resume")))
        return call(*{"sample": ["sample.py", here, "--max_new_tokens=2", "--device=cpu"], "evaluate": ["evaluate.py", here, "--lengths=8,16", "--max_tokens=64", "--device=cpu", f"--dataset={t.text}"],
                      "extend": ["extend.py", here, "--max_iters=0", f"--out_dir={here}-long", f"--dataset={t.text}", "--device=cpu"],
                      "resume": ["train.py", f"--out_dir={here}", "--init_from=resume", "--max_iters=12", "--device=cpu", f"--dataset={t.text}"]}[script])

    def checkpoint_json(draw, folder):
        here, step = copied(folder)
        meta = json.loads((step / "meta.json").read_text())
        way = draw(st.integers(0, 9))
        if way == 0:
            (step / "meta.json").write_text(bomb(draw))
        elif way == 1:
            (step / "meta.json").write_bytes(draw(st.binary(max_size=99)))
        elif way == 2:
            (step / "meta.json").write_text(json.dumps(mutated(draw, meta)))
        else:
            try:
                write_meta(step, mutated(draw, meta))  # with a checksum that fits
            except (ValueError, TypeError, KeyError, AttributeError, UnicodeError):
                return
        read_by(draw, here)

    def checkpoint_tensors(draw, folder):
        here, step = copied(folder)
        file = step / draw(st.sampled_from(("model.safetensors", "optim.safetensors")))
        content = file.read_bytes()
        n = int.from_bytes(content[:8], "little")
        header, rest, way = json.loads(content[8:8 + n]), content[8 + n:], draw(st.integers(0, 6))
        if way == 0:
            new = draw(st.sampled_from((0, 1, n - 1, n + 1, 100_000_000, (1 << 63) - 1, (1 << 64) - 1))).to_bytes(8, "little") + content[8:]
        elif way == 1:
            text = bomb(draw).encode()
            new = len(text).to_bytes(8, "little") + text + rest
        elif way == 2:
            new = draw(st.binary(max_size=99))
        else:
            name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
            if way == 3:
                header[name]["shape"] = draw(st.sampled_from(([1 << 40], [1 << 20, 1 << 20], [0], [], [-1], [1.5], "x", [1 << 62, 4], header[name]["shape"][::-1])))
            elif way == 4:
                header[name]["data_offsets"] = draw(st.sampled_from(([0, 1 << 40], [1 << 62, 1 << 63], [4, 0], [0, 0], [-1, 3], "x", [0])))
            elif way == 5:
                header[name]["dtype"] = draw(st.sampled_from(("F64", "I64", "BOOL", "F8_E4M3", "F4", "C64", "x", 3)))
            else:
                header = mutated(draw, header)
            text = json.dumps(header).encode(errors="surrogatepass")
            new = len(text).to_bytes(8, "little") + text + rest
        file.write_bytes(new)
        meta = json.loads((step / "meta.json").read_text())
        meta["checksums"][file.name] = hashlib.sha256(new).hexdigest()
        write_meta(step, meta)
        if file.stem == "optim":
            call("train.py", f"--out_dir={here}", "--init_from=resume", "--max_iters=13", "--device=cpu")
        else:
            read_by(draw, here)

    def token_files(draw, folder):
        (folder / "text").mkdir()
        for name in ("train.bin", "val.bin"):
            header = [draw(st.sampled_from((20240520, 20240801, 0, -1))), draw(st.sampled_from((1, 7, 0))), draw(st.sampled_from((200, 100, 0, -1, 1 << 30, (1 << 31) - 1)))]
            body = draw(st.sampled_from((b"", b"\0", b"\1\0" * 200, b"\1\0\0\0" * 200, b"\xff" * 400, os.urandom(400))))
            (folder / "text" / name).write_bytes((b"".join(x.to_bytes(4, "little", signed=True) for x in header) + bytes(1012) if draw(st.booleans()) else b"") + body)
        meta = json.loads((t.text / "meta.json").read_text())
        way = draw(st.integers(0, 5))
        if way:
            (folder / "text" / "meta.json").write_text(json.dumps(meta if way < 3 else mutated(draw, meta)) if way < 5 else bomb(draw))
        if draw(st.integers(0, 9)) == 0:
            (folder / "text" / draw(st.sampled_from(("train_dir.bin", "val_2.bin")))).mkdir()
        call("train.py", *TINY, "--max_iters=2", "--eval_interval=2", f"--dataset={folder}/text", f"--out_dir={folder}/run")

    def tokenizers(draw, folder):
        import base64
        import zlib
        ranks = data.np.arange(256)
        packed = b"".join(b"\1\0" + int(i).to_bytes(4, "little") + bytes([i]) for i in ranks)
        way = draw(st.integers(0, 5))
        packed = {0: bytes(1 << 27), 1: packed[:draw(st.integers(0, len(packed)))], 2: draw(st.binary(max_size=50)), 3: packed[:-5] + b"\xff\xff\xff\xff\0"}.get(way, packed)
        spec = draw(st.sampled_from(({"kind": "bpe", "name": "x", "pattern": r"\w+|\W+", "special": {"<|endoftext|>": 256}, "bos": 256, "ranks": base64.b64encode(zlib.compress(packed)).decode()},
                                     {"kind": "char", "characters": "ab\nc", "bos": True}, {"kind": "bytes"})))
        try:
            tokenizer = data.from_json(spec if way == 4 else mutated(draw, spec))
            if tokenizer:
                tokenizer.decode(tokenizer.encode("abc"))
        except UserError:
            pass

    def presets(draw, folder):
        key, value = draw(st.sampled_from(("n_layer", "pos", "learning_rate", "tied", "bos", "protocol", "vocab_size", "stretch", "x"))), draw(odd)
        way, some = draw(st.integers(0, 9)), draw(st.text(max_size=60))
        text = (f"{key} = {json.dumps(value)}", f"{key} = {value}", f"[{key}]\na = 1", f"{key} = " + "[" * 9000, f"{key} = " + "9" * 5000, "a." * 5000 + "b = 1", f"{key} = {bomb(draw)}", f"{key} = 1979-05-27", f"{key} = nan", some)[way]
        file = folder / "x.toml"
        file.write_bytes(text.encode(draw(st.sampled_from(("utf-8", "utf-8", "utf-8-sig", "utf-16"))), "surrogatepass"))
        try:
            config.parse(GPTConfig, train.TrainConfig, presets=True, argv=[str(file), *TINY[:2]])
        except (UserError, Refused):
            pass

    texts = st.sampled_from(("", "0", "-1", "1", "2", "1e999", "nan", "inf", "-inf", "9" * 30, "9" * 5000, "1_0", "0x10", "٣", "²", "true", "none", "auto", "1,2", ",", "x" * 100_000, "../..", "\udcff", "%s", "{}", "1e-400", "--", "=", "16777217"))

    def flags(draw, folder):
        """Settings that are drawn; when they are accepted, two iterations of the smallest run, unless they ask for hours."""
        script, classes = draw(st.sampled_from((("train.py", (GPTConfig, train.TrainConfig)), ("extend.py", (extend.ExtendConfig,)), ("evaluate.py", (evaluate.EvaluateConfig,)), ("sample.py", (sample.SampleConfig,)))))
        legal = {"train.py": {}, "extend.py": {}, "evaluate.py": {"lengths", "max_tokens", "trials"}, "sample.py": {"max_new_tokens", "num_samples"}}[script]  # of which any number may be meant
        names = [n for c in classes for n in c.__dataclass_fields__ if n not in ("out_dir", "plot", "json", "wandb", "dataset", "init_from", "max_iters", "batch_size", "gradient_accumulation_steps", "block_size", *legal)]
        words = {name: draw(texts) for name in draw(st.lists(st.sampled_from((*names, "x", "", "é")), min_size=1, max_size=3, unique=True))}
        big = {"n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "eval_iters", "random_positions"}  # these may be had, at their price
        words = {name: "3" if name in big and text == "16777217" else text for name, text in words.items()}
        flags = [f"--{name}={value}" for name, value in words.items()]
        base = {"train.py": ["train.py", *TINY, "--max_iters=2", f"--dataset={t.text}", f"--out_dir={folder}/run"], "extend.py": ["extend.py", run, "--factor=2", "--max_iters=1", f"--out_dir={folder}/run"],
                "evaluate.py": ["evaluate.py", run, "--lengths=8", "--max_tokens=64", "--trials=2"], "sample.py": ["sample.py", run, "--max_new_tokens=2"]}[script]
        call(*base, *flags)

    def prompts(draw, folder):
        prompt = draw(st.one_of(st.sampled_from(("", "\0", "<|endoftext|>", "<bos>", "FILE:", "FILE:/", "FILE:.", "FILE:/dev/null", "\udcff\udc80", "\ud800", "é" * 40, " ", "-", "--", "=")), st.text(max_size=40)))
        if draw(st.booleans()):
            piece, times = draw(st.sampled_from(((b"", 1), (b"a", 1_000_000), (b"\xff", 1000), (b"\0", 100), (b"<|endoftext|>", 99), (b"\xef\xbb\xbfx", 1), ("\U0001f600".encode(), 20)))) if draw(st.booleans()) else (draw(st.binary(max_size=99)), 1)
            (folder / "prompt").write_bytes(piece * times)
            prompt = f"FILE:{folder}/prompt"
        code, *_ = call("sample.py", run, f"--start={prompt.replace(chr(0), '')}".encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape"), "--max_new_tokens=3")
        assert code == 2 or not prompt.startswith("FILE:.")

    def options(draw, folder):
        name, value = draw(st.sampled_from(("beta_fast", "long_factor", "ramp", "scale", "length", "new_base", "group", "sinks", "of", "attention_factor", "x"))), draw(odd)
        (folder / "o.json").write_text(json.dumps({name: value}) if draw(st.integers(0, 5)) else bomb(draw))
        method = draw(st.sampled_from(("yarn", "ntk", "longrope", "llama3", "dynamic-ntk", "drope", "abf", "self-extend", "lm-infinite", "resonance", "pi")))
        call("extend.py", run, f"--method={method}", f"--options={folder}/o.json", "--max_iters=0", f"--out_dir={folder}/run")

    for name, body, share in (("settings on the command line", flags, 2), ("TOML presets", presets, 1), ("token files, shard headers and a dataset's JSON", token_files, 3), ("a checkpoint's JSON, its checksum fitting", checkpoint_json, 1),
                              ("safetensors headers, their checksum fitting", checkpoint_tensors, 2), ("a tokenizer in JSON", tokenizers, 1), ("prompts: empty, 1 MB, not UTF-8, special tokens", prompts, 2), ("a JSON of options", options, 2)):
        yield from fuzz(t, name, body, examples=max(1, examples // share))

    def imports():
        """No pickle, no eval or exec, no shell, in what the project's scripts consist of."""
        import ast
        for file in [*ROOT.glob("*.py"), ROOT / "config" / "__init__.py", *(ROOT / "data").glob("*.py"), *(ROOT / "kernels").glob("*.py")]:
            for node in ast.walk(ast.parse(file.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {n.split(".")[0] for n in names}, file
                if isinstance(node, ast.Call):
                    called = ast.unparse(node.func)
                    assert called not in ("eval", "exec", "os.system", "os.popen", "torch.load", "torch.save", "np.load", "data.np.load"), f"{file}: {called}"
                    assert not any(k.arg in ("shell", "allow_pickle") for k in node.keywords), file
    yield attempt("no pickle, eval, exec or shell in the source; none was called in all of the above (audited)", imports)


# ---------------------------------------------------------------------------------------------------------------------
# Concurrency: two writers.

def concurrency(t):
    """Several processes that want one folder."""
    reference, few = t.new(), t.cfg.fast
    t.run(t.words(reference))
    alone = state(reference)

    def race(run, many, resume):
        """All at once: one trains, and the others are refused, in one sentence, and change nothing."""
        if resume:
            over(t.start(t.words(run), before=lambda: signal_at(3, signal.SIGKILL)), 60)
        words = t.words(run)
        children = [t.start(words, before=lambda: time.sleep(t.rng.uniform(0, 0.05)) if t.rng.seed(os.getpid()) is None else None) for _ in range(many)]
        said = [(over(child, 60), text_of(child)) for child in children]
        won = [text for code, text in said if code == 0]
        for code, text in said:
            assert "Traceback" not in text and code in (0, 2), text
            assert code == 0 or text.count("error: ") == 1 and any(words in text for words in ("is writing to", "holds a run already", "has just written to")), text
        assert won and (resume or len(won) == 1), said  # who comes when all is done has nothing to do
        same(run, alone)

    for resume in (False, True) * (2 if few else 15):
        yield attempt("several trainings started at once into one folder: one writes, the others are refused, the same bits", race, t.new(), t.rng.choice((2, 3, 4)), resume)

    def dead(run, stale):
        """The lock of a dead owner does not bind, and a lock file is no lock, whatever is in it."""
        if stale:
            run.mkdir()
            (run / "lock").write_text(t.rng.choice((f"{os.getpid()}\n", "1\n", "", "\udcff", "x" * 10**6)).encode(errors="surrogateescape").decode("latin1"))
        else:
            child = t.start(t.words(run), before=lambda: signal_at(2, signal.SIGSTOP))  # alive, with the lock
            assert os.WIFSTOPPED(os.waitpid(child[0], os.WUNTRACED)[1])
            assert f"process {child[0]} is writing to" in t.run(t.words(run), 2)
            kill(child)
        t.run(t.words(run))
        same(run, alone)

    for stale in (True, False) * (1 if few else 10):
        yield attempt("a lock whose owner is dead, or a lock file that nobody holds: does not bind", dead, t.new(), stale)

    def two_extensions(run):
        words = t.longer(reference, run)
        said = [(over(child, 60), text_of(child)) for child in [t.start(words), t.start(words)]]
        assert sorted(code for code, _ in said) == [0, 2] and not any("Traceback" in text for _, text in said), said
        whole(run)

    for _ in range(1 if few else 10):
        yield attempt("two extensions into one folder: one writes, the other is refused", two_extensions, t.new("long"))


# ---------------------------------------------------------------------------------------------------------------------
# Memory: what there is not enough of, and what must not grow.

def memory(t):
    """Too little of it, and a long run."""
    few, reference = t.cfg.fast, t.new()
    t.run(t.words(reference))

    def short(script, *more):
        """The address space ends a little above what is taken before the work begins."""
        def before():
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (taken + t.rng.randrange(*((20, 40) if script == "evaluate.py" else (150, 250))) * (1 << 20),) * 2)
        words = {"train.py": [*t.words(t.new()), "--batch_size=8192", "--block_size=64"], "evaluate.py": ["evaluate.py", reference, "--lengths=20000", "--max_tokens=20000"],
                 "extend.py": ["extend.py", reference, "--factor=900", "--max_iters=1", "--batch_size=400", f"--out_dir={t.new('long')}"]}[script]
        said = t.run([*words, *more], 2, before=before, seconds=120)
        assert "error: out of memory: lower --batch_size" in said and "--block_size" in said, said

    for script in ("train.py",) if few else ("train.py", "evaluate.py", "extend.py") * 3:
        yield attempt("out of memory (RLIMIT_AS): one sentence that names the knobs", short, script)

    def too_large():
        said = t.run([w for w in t.words(t.new()) if not w.startswith(("--n_layer", "--n_embd"))] + ["--n_embd=65536", "--n_layer=12"], 2)
        assert "GiB" in said and "--n_embd" in said, said
    yield attempt("a model larger than the machine's memory: refused before it is built", too_large)

    def flat(run, seconds):
        """Training that saves and evaluates every few seconds: memory and files, looked at twice a second."""
        words = t.words(run, "--max_iters=100000000", f"--eval_interval={20 if few else 400}", "--log_interval=20", "--batch_size=1")
        child = t.start(words)
        seen, begun = [], time.monotonic()
        while time.monotonic() < begun + seconds or len(steps(run)) < 3 and time.monotonic() < begun + 100:
            assert not os.waitpid(child[0], os.WNOHANG)[0], text_of(child)[-900:]
            with contextlib.suppress(FileNotFoundError, ValueError, StopIteration):
                kb = next(int(line.split()[1]) for line in Path(f"/proc/{child[0]}/status").read_text().splitlines() if line.startswith("VmRSS"))
                seen.append((kb, len(list(run.rglob("*"))), len(os.listdir(f"/proc/{child[0]}/fd"))))
            time.sleep(0.05 if few else 0.5)
        os.kill(child[0], signal.SIGTERM)
        end(child)
        third = len(seen) // 3
        early, late = (max(kb for kb, _, _ in part) for part in (seen[third // 2:third], seen[2 * third:]))
        files, handles, rows = max(n for _, n, _ in seen), max(n for _, _, n in seen), sum("val_loss" in row for row in rows_of(run))
        flat.note = f"{seconds:.0f} s, {rows} saves: {early / 1024:.1f} MiB at most in the second sixth of the time, {late / 1024:.1f} in the last third; at most {files} files and folders, {handles} open"
        assert rows >= 3 and late < early * 1.02 + (16384 if few else 4096), flat.note
        assert files <= 2 + 4 * 4 + 6 and handles < 24, flat.note
        whole(run)
    flat.note = ""
    result = attempt("training under watch, saving and evaluating every few seconds: memory flat, files bounded", flat, t.new(), 6 if few else 3600 * t.cfg.hours)
    yield *result, flat.note


# ---------------------------------------------------------------------------------------------------------------------

def write(cfg, ran):
    """trust.json and trust.md; sections that were not run keep the rows that they had."""
    folder = Path(cfg.out_dir)
    file = folder / "trust.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept = {section: ran.get(section, kept.get(section)) for section in SECTIONS if section in ran or section in kept}
    file.write_text(json.dumps(kept, indent=1) + "\n")
    lines = ["# Trust", "", "What was done to the program, how often, and how often a promise was lost. `python tests/torture.py` does it again; a section that a call leaves out keeps the rows of its last one.", ""]
    total = [sum(row[key] for part in kept.values() for row in part["rows"]) for key in ("tried", "survived", "lost")]
    lines += [f"In all: {total[0]:,} tried, {total[1]:,} survived, {total[2]:,} lost.", ""]
    for section, part in kept.items():
        lines += [f"## {section}", "", f"`{part['command']}`, seed {part['seed']}; {part['provenance']}; {part['seconds']} s.", "", "| | tried | survived | lost |", "|---|---|---|---|"]
        for row in part["rows"]:
            lines.append(f"| {row['line']}{' (' + row['note'] + ')' if row['note'] else ''} | {row['tried']:,} | {row['survived']:,} | {row['lost']:,} |")
        lines.append("")
    (folder / "trust.md").write_text("\n".join(lines))


def main():
    cfg, given, _ = config.parse(TortureConfig, about=__doc__)
    if sys.platform != "linux":
        raise UserError("torture.py needs Linux: namespaces, /proc and limits on memory that hold")
    if cfg.seed < 0:
        cfg.seed = random.randrange(1 << 32)
    print(f"seed {cfg.seed}", flush=True)
    folder = Path(cfg.out_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    cfg.out_dir = str(folder)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with torch.device("meta"):
        GPT(GPTConfig(n_layer=1))  # what torch imports late, imported once
    ran, command = {}, " ".join(["python tests/torture.py", *(w for w in sys.argv[1:] if not w.startswith(("--seed", "--out_dir")))])
    provenance = config.provenance(torch.device("cpu"))
    for section in cfg.only or SECTIONS:
        begun, rows = time.monotonic(), {}
        with tempfile.TemporaryDirectory(prefix="torture-", ignore_cleanup_errors=True) as work:
            for line, lost, *note in globals()[section](Torture(TortureConfig(**{**vars(cfg)}), work)):
                row = rows.setdefault(line, {"line": line, "tried": 0, "survived": 0, "lost": 0, "note": ""})
                row["note"] = note[0] if note else row["note"]
                if lost and lost.startswith("SKIP "):
                    row["note"] = f"not tried: {lost[5:]}"
                    continue
                row["tried"] += 1
                row["lost" if lost else "survived"] += 1
                if lost:
                    print(f"lost, {section}, {line} (seed {cfg.seed}): {lost}", flush=True)
        ran[section] = {"command": command, "seed": cfg.seed, "provenance": provenance, "seconds": round(time.monotonic() - begun), "rows": list(rows.values())}
        write(cfg, ran)
        for row in rows.values():
            print(f"{section}: {row['line']}: {row['tried']} tried, {row['survived']} survived, {row['lost']} lost{'; ' + row['note'] if row['note'] else ''}", flush=True)
    print(f"wrote {folder / 'trust.md'}")
    return int(any(row["lost"] for part in ran.values() for row in part["rows"]))


if __name__ == "__main__":
    config.main(main, Refused)
