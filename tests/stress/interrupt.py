"""Ctrl-C while torch.compile compiles: the process ends with status 130 and leaves nothing behind.

The signal goes to the process group, as a terminal sends it, so that the compilers get it too.
"""

import os
import signal
import time

from harness import attempt

from nanolong.run.folder import list_steps

COMPILED = ["--compile=true", "--max_iters=100000", "--eval_interval=50000", "--log_interval=10"]
COMPILED += ["--n_embd=48", "--n_head=3"]
MAX_LINES = 3
MAX_SECONDS = 25  # torchrun kills after 30 s what is still there
STATUSES = ({130}, {0}, {1, 130})  # all before the first step; all after it; one has begun


def trials(harness):
    """With one process, with two, and with two of which one compiles alone."""
    n = 2 if harness.cfg.fast else 10
    cache = harness.new_path("cache")
    seconds = time_compilation(harness, cache)
    description = "Ctrl-C to the process group while torch.compile compiles: nothing is written"
    kinds = [("", n, 1, 0, seconds, None)]
    kinds += [(", two processes", n // 2 or 1, 2, 0, 2 * seconds, None)]
    alone = ", one of two processes compiling alone"
    kinds += [(alone, n // 2 or 1, 2, seconds / 3, seconds, cache)]
    for kind, n_trials, processes, earliest, latest, filled in kinds:
        for _ in range(n_trials):
            delay = harness.rng.uniform(earliest, latest)
            yield attempt(description + kind, interrupt, harness, processes, delay, filled)


def time_compilation(harness, cache):
    """Fill a cache. Returns the seconds that one process compiles."""
    run = harness.new_path()
    (child,) = start(harness, run, 1, [cache])
    begin = time.monotonic()
    wait_for(child, "step 0:")
    seconds = time.monotonic() - begin
    os.killpg(child.pid, signal.SIGTERM)
    child.expect()
    return seconds


def start(harness, run, processes, caches):
    """Start a run, each process in a group of its own; wait until rank 0 says that it compiles."""

    def before(rank):
        os.setsid()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches[rank])

    command = harness.train_command(run, *COMPILED)
    children = harness.start_ranks(command, processes, {"NANOLONG_TIMEOUT": "300"}, before)
    wait_for(children[0], "compiling")
    return children


def wait_for(child, text, seconds=300):
    deadline = time.monotonic() + seconds
    while text not in child.read_output():
        assert time.monotonic() < deadline, f"no {text!r} after {seconds} s: {child.read_output()}"
        time.sleep(0.05)


def interrupt(harness, processes, delay, cache=None):
    """One trial; with a cache, which is filled, rank 0 has nothing to compile."""
    run = harness.new_path()
    caches = [harness.new_path("cache") for _ in range(processes)]
    if cache:
        caches[0] = cache
    children = start(harness, run, processes, caches)
    before = [len(child.read_output().splitlines()) for child in children]
    time.sleep(delay)
    for child in children:
        os.killpg(child.pid, signal.SIGINT)
    statuses = {child.wait(MAX_SECONDS) for child in children}
    outputs = [child.read_output() for child in children]
    lines = []
    for output, n in zip(outputs, before, strict=True):
        assert "Traceback" not in output, output
        new_lines = [line for line in output.splitlines()[n:] if line.strip()]
        # the compilation may have ended, and the evaluation begun
        lines += [line for line in new_lines if not line.startswith("step 0: validation")]
    text = "\n".join(lines)
    assert statuses in STATUSES, (statuses, text)
    assert len(lines) <= MAX_LINES, text
    if statuses == {0}:  # the first step had begun
        assert "stopping " in text and "stopped and saved" in text, text
        assert list_steps(run), "nothing saved"
    else:
        assert "stopped before the first step" in text, text
        assert not list_steps(run), "something was written"
