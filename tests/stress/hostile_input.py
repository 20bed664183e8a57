"""Files, settings and prompts that make no sense: accepted, or rejected with one clear error.

hypothesis generates them in a child process that has little memory to take, an alarm, and an audit
hook that watches which files are written and whether a process is started.
"""

import base64
import contextlib
import functools
import hashlib
import importlib
import io
import json
import math
import os
import shutil
import signal
import sys
import traceback
import zlib
from pathlib import Path

import hypothesis
from harness import limit_memory
from hypothesis import strategies as st

import evaluate
import extend
import sample
import train
from data import tokenizer_from_json
from model import GPTConfig
from nanolong import cli
from nanolong.errors import UserError
from nanolong.run import lock
from nanolong.run.checkpoint import write_meta
from nanolong.run.folder import list_steps
from tests.flags import TINY, last_of_each_flag

# Audit events that must never happen, and those that write, with their arguments that are paths.
FORBIDDEN_EVENTS = set(
    "pickle.find_class os.system os.exec os.posix_spawn os.spawn subprocess.Popen pty.spawn "
    "socket.connect ctypes.dlopen".split()
)
WRITING_EVENTS = {
    **dict.fromkeys(("os.rename", "os.link", "os.symlink"), (0, 1)),
    **dict.fromkeys("os.remove os.mkdir os.rmdir os.truncate os.chmod shutil.rmtree".split(), (0,)),
}
SECONDS_PER_EXAMPLE = 10
EXTRA_MEMORY = 1 << 30


class Failed(Exception):
    """What hostile input must never cause."""


def trials(harness):
    """Yield (description, what went wrong or None) for each example."""
    run = harness.new_path()
    harness.run(harness.train_command(run))
    hypothesis.configuration.set_hypothesis_home_dir(harness.folder / "hypothesis")
    ODD_VALUES.validate()  # tables of Unicode: three seconds, once
    with contextlib.suppress(ImportError):
        import matplotlib.pyplot  # noqa: F401  # it writes files of its own at the first import

    inputs = HostileInputs(harness.dataset, run)
    # name, function, the fraction 1/n of --examples
    kinds = (
        ("settings on the command line", inputs.flags, 2),
        ("TOML presets", inputs.presets, 1),
        ("token files, shard headers and the JSON of a dataset", inputs.token_files, 3),
        ("the JSON of a checkpoint, with a matching checksum", inputs.checkpoint_json, 1),
        ("safetensors headers, with a matching checksum", inputs.checkpoint_tensors, 2),
        ("the JSON of a tokenizer", inputs.tokenizers, 1),
        ("prompts: empty, 1 MB, not UTF-8, special tokens", inputs.prompts, 2),
        ("a JSON file of options", inputs.options, 2),
    )
    for name, function, divisor in kinds:
        description = f"hostile input, {name}: accepted, or rejected with one clear error"
        yield from fuzz(harness, description, function, max(1, harness.cfg.examples // divisor))


# -----------------------------------------------------------------------------
# Running examples in a child.


def fuzz(harness, description, function, n_examples):
    """Call function(draw, folder) on random examples in a child process.

    draw is hypothesis' data.draw. folder is new for every example and the only one that may be
    written to. Yields a passed trial per example, and a failed one for the first, shrunk failure.
    """
    report = harness.new_path("fuzz")
    scratch = harness.new_path("scratch")
    scratch.mkdir()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            stderr = os.open(report.with_suffix(".stderr"), os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(stderr, 2)
            n_passed, failure = run_examples(harness, function, scratch, n_examples)
            report.write_text(f"{n_passed}\n{failure}")
        os._exit(0)
    os.waitpid(pid, 0)
    n_passed = 0
    failure = "the child died of it: " + report.with_suffix(".stderr").read_text()[-500:]
    if report.exists():
        first_line, _, failure = report.read_text().partition("\n")
        n_passed = int(first_line)
    for _ in range(n_passed):
        yield description, None
    if failure:
        yield description, failure
    shutil.rmtree(scratch)


class Auditor:
    """While it is active, notes forbidden events and writes outside of the allowed folders."""

    def __init__(self, *allowed):
        self.allowed = (*map(str, allowed), "/dev/null", "/proc/self")
        self.is_active = False
        self.violations = []
        sys.addaudithook(self.audit)

    def audit(self, event, args):
        if not self.is_active:
            return
        loads_itself = event == "ctypes.dlopen" and args[0] is None
        asks_for_the_commit = event == "subprocess.Popen" and args[0] == "git"
        if event in FORBIDDEN_EVENTS and not loads_itself and not asks_for_the_commit:
            self.violations.append(f"{event} of {args!r:.200}")
        for path in written_paths(event, args):
            path = str(Path(os.fsdecode(path)).absolute())
            if not path.startswith(self.allowed) and "__pycache__" not in path:
                self.violations.append(f"{event} of {args!r:.200}")


def written_paths(event, args):
    """The paths that an audit event writes to; file descriptors are left out."""
    paths = [args[i] for i in WRITING_EVENTS.get(event, ())]
    if event == "open" and args[0] is not None:
        path, mode, flags = args
        if isinstance(mode, str):
            writes = bool(set(mode) & set("wax+"))
        else:
            writes = mode is None and bool(flags & (os.O_WRONLY | os.O_RDWR))
        if writes:
            paths.append(path)
    return [path for path in paths if not isinstance(path, int)]


def raise_alarm(signal_number, frame):
    raise Failed(f"it hung: no end after {SECONDS_PER_EXAMPLE} s")


def run_examples(harness, function, scratch, n_examples):
    """In the child: how many examples passed, and "" or what the first failure was."""
    signal.signal(signal.SIGALRM, raise_alarm)
    limit_memory(EXTRA_MEMORY)
    auditor = Auditor(scratch, harness.folder / "hypothesis")
    n_passed = 0

    @hypothesis.seed(harness.rng.randrange(1 << 32))
    @hypothesis.settings(
        max_examples=n_examples,
        database=None,
        deadline=None,
        derandomize=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(st.data())
    def run_example(data):
        nonlocal n_passed
        folder = scratch / str(n_passed)
        folder.mkdir(exist_ok=True)
        check_example(function, data, folder, auditor)
        n_passed += 1

    try:
        run_example()
    except BaseException as error:
        several = "".join(f"; {e!s:.1500}" for e in getattr(error, "exceptions", ()))
        return n_passed, f"{error!s:.2000}{several}"
    return n_passed, ""


def check_example(function, data, folder, auditor):
    """Run one example under the audit and an alarm. Raises Failed."""
    values = []

    def draw(strategy):
        value = data.draw(strategy)
        values.append(value)
        return value

    auditor.violations.clear()
    os.chdir(folder)
    try:
        auditor.is_active = True
        signal.alarm(SECONDS_PER_EXAMPLE)
        try:
            function(draw, folder)
            if auditor.violations:
                raise Failed(auditor.violations[0])
        finally:
            signal.alarm(0)
            auditor.is_active = False
    except hypothesis.errors.HypothesisException:
        raise
    except Exception as error:
        details = f"values: {values!r:.600}; {traceback.format_exc()[-700:]}"
        raise Failed(f"{type(error).__name__}: {error!s:.600}; {details}") from None
    finally:
        os.chdir(folder.parent)
        shutil.rmtree(folder, ignore_errors=True)


def call(*command):
    """Run the main() of a script in this process. Returns the exit status.

    Raises Failed unless it is 0 without an error message, or 2 with exactly one that is not about
    memory.
    """
    kept = sys.stdout, sys.stderr, sys.argv
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace") for _ in range(2)]
    sys.stdout, sys.stderr = streams
    sys.argv = [os.fsdecode(os.fsencode(word)) for word in last_of_each_flag(command)]
    try:
        script = importlib.import_module(command[0].removesuffix(".py"))
        cli.run_main(script.main)
    except SystemExit as exit:
        status = exit.code or 0
    finally:
        sys.stdout, sys.stderr, sys.argv = kept
        for folder in list(lock.held):
            lock.unlock(folder)

    for stream in streams:
        stream.flush()
    text = streams[1].buffer.getvalue().decode("utf-8", "replace")
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    if status == 2:
        is_fine = len(errors) == 1 and "out of memory" not in errors[0]
    else:
        is_fine = status == 0 and not errors
    if not is_fine or "Traceback" in text:
        raise Failed(f"exit status {status}: {text[-1500:]}")
    return status


# -----------------------------------------------------------------------------
# What is generated.

ODD_NUMBERS = (1 << 31, 1 << 63, 10**30, -(10**9), 1e308, 1e-308, -0.5, 1 << 24, 65537)
ODD_WORDS = ("", "x", "rope", "none", "../../x", "/", "9" * 400, "\0", "\ud800", "1e999", "true")
ODD_OTHERS = ([], {}, [1], {"a": 1}, [[]], math.inf, math.nan, None, True, False)
ODD_VALUES = st.one_of(
    st.sampled_from(ODD_NUMBERS),
    st.sampled_from(ODD_WORDS),
    st.sampled_from(ODD_OTHERS),
    st.text(max_size=9),
    st.floats(),
    st.integers(),
    st.integers(-3, 3),
)
ODD_TEXTS = st.sampled_from(
    (
        "0 -1 1 2 1e999 nan inf -inf 1_0 0x10 ٣ ² true none auto 1,2 , ../.. \udcff %s {} 1e-400 "
        "-- = 16777217"
    ).split()
    + ["", "9" * 30, "9" * 5000, "x" * 100_000]
)
ODD_PROMPTS = st.sampled_from(
    "\0 <|endoftext|> <bos> FILE: FILE:/ FILE:. FILE:/dev/null \udcff\udc80 \ud800 - -- =".split()
    + ["", " ", "é" * 40]
)
# pieces of a prompt file, and how often each is repeated
PROMPT_PIECES = {b"": 1, b"a": 1_000_000, b"\xff": 1000, b"\0": 100, b"<|endoftext|>": 99}
PROMPT_PIECES |= {b"\xef\xbb\xbfx": 1, "\U0001f600".encode(): 20}
# the beginning, middle and end of a text; beginning and end are repeated
NESTINGS = [('{"a":', "1", "}"), ("[", "", "]"), ("[", "", ""), ('{"a":', "", "")]
NESTINGS += [("99999", "", ""), ("", "", " ")]
CPU = "--device=cpu"


def draw_deep_nesting(draw):
    """A text that is nested deeper than any parser should follow."""
    n = draw(st.sampled_from((900, 5000, 200_000)))
    before, middle, after = draw(st.sampled_from(NESTINGS))
    return before * n + middle + after * n


def draw_changed_number(draw, value):
    changed = (value + 1, value * 2, -value, value * 10**6, float(value), str(value), [value])
    return draw(st.sampled_from(changed))


def draw_mutation(draw, value):
    """A JSON value with one to three of its parts replaced, removed or added, anywhere."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        mutate_once(draw, value)
    return value


def mutate_once(draw, node):
    """Walk into a JSON value and change it in place."""
    while isinstance(node, dict | list) and len(node):
        if isinstance(node, dict):
            key = draw(st.sampled_from(sorted(node)))
        else:
            key = draw(st.integers(0, len(node) - 1))
        child = node[key]
        goes_deeper = isinstance(child, dict | list) and child and draw(st.integers(0, 3)) != 0
        if goes_deeper:
            node = child
            continue
        action = draw(st.integers(0, 5))
        if action == 0:
            del node[key]
        elif action == 1 and isinstance(node, dict):
            node[draw(st.text(max_size=5))] = draw(ODD_VALUES)
        elif action == 2 and type(child) in (int, float):
            node[key] = draw_changed_number(draw, child)
        else:
            node[key] = draw(ODD_VALUES)
        return


def draw_damaged_safetensors(draw, content):
    """The bytes of a safetensors file with a header that is wrong in one way."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tensors = content[8 + size :]
    way = draw(st.integers(0, 6))
    if way == 0:
        sizes = (0, 1, size - 1, size + 1, 100_000_000, (1 << 63) - 1, (1 << 64) - 1)
        return draw(st.sampled_from(sizes)).to_bytes(8, "little") + content[8:]
    if way == 1:
        text = draw_deep_nesting(draw).encode()
        return len(text).to_bytes(8, "little") + text + tensors
    if way == 2:
        return draw(st.binary(max_size=99))
    name = draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))
    if way == 3:
        shapes = ([1 << 40], [1 << 20, 1 << 20], [0], [], [-1], [1.5], "x", [1 << 62, 4])
        header[name]["shape"] = draw(st.sampled_from((*shapes, header[name]["shape"][::-1])))
    elif way == 4:
        offsets = ([0, 1 << 40], [1 << 62, 1 << 63], [4, 0], [0, 0], [-1, 3], "x", [0])
        header[name]["data_offsets"] = draw(st.sampled_from(offsets))
    elif way == 5:
        dtypes = ("F64", "I64", "BOOL", "F8_E4M3", "F4", "C64", "x", 3)
        header[name]["dtype"] = draw(st.sampled_from(dtypes))
    else:
        header = draw_mutation(draw, header)
    text = json.dumps(header).encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + tensors


def draw_token_file(draw):
    """The bytes of a token file, with a shard header or without."""
    magic = draw(st.sampled_from((20240520, 20240801, 0, -1)))
    version = draw(st.sampled_from((1, 7, 0)))
    n_tokens = draw(st.sampled_from((200, 100, 0, -1, 1 << 30, (1 << 31) - 1)))
    uint16 = b"\1\0" * 200
    uint32 = b"\1\0\0\0" * 200
    body = draw(st.sampled_from((b"", b"\0", uint16, uint32, b"\xff" * 400, os.urandom(400))))
    if not draw(st.booleans()):
        return body
    header = b"".join(x.to_bytes(4, "little", signed=True) for x in (magic, version, n_tokens))
    return header + bytes(1024 - len(header)) + body


@functools.cache
def pack_bytes_as_bpe():
    """The ranks of a BPE tokenizer of single bytes, as a tokenizer's JSON holds them unpacked."""
    entries = [b"\1\0" + i.to_bytes(4, "little") + bytes([i]) for i in range(256)]
    return b"".join(entries)


def draw_packed_ranks(draw):
    """The compressed ranks of a BPE tokenizer: right, too large, cut off, random or wrong."""
    packed = pack_bytes_as_bpe()
    way = draw(st.integers(0, 5))
    if way == 0:
        packed = bytes(1 << 27)
    elif way == 1:
        packed = packed[: draw(st.integers(0, len(packed)))]
    elif way == 2:
        packed = draw(st.binary(max_size=50))
    elif way == 3:
        packed = packed[:-5] + b"\xff\xff\xff\xff\0"
    return base64.b64encode(zlib.compress(packed)).decode()


# Settings that are not tried, because they name files or bound the work.
NOT_DRAWN = {
    *("out_dir", "plot", "json", "wandb", "dataset", "init_from"),
    *("max_iters", "batch_size", "gradient_accumulation_steps", "block_size"),
}
SCRIPTS = {
    "train.py": (GPTConfig, train.TrainConfig),
    "extend.py": (extend.ExtendConfig,),
    "evaluate.py": (evaluate.EvaluateConfig,),
    "sample.py": (sample.SampleConfig,),
}
# Settings of which any number may be meant, however long the work then takes.
UNBOUNDED = {
    "train.py": set(),
    "extend.py": set(),
    "evaluate.py": {"lengths", "max_tokens", "trials"},
    "sample.py": {"max_new_tokens", "num_samples"},
}
# Settings whose large values are legitimate, at a price that a test cannot pay.
COSTLY = "n_layer n_head n_kv_head n_embd head_dim eval_iters random_positions".split()


class HostileInputs:
    """A function for each kind of input. dataset: a folder; run: a trained run."""

    def __init__(self, dataset, run):
        self.dataset = dataset
        self.run = run

    def copy_run(self, folder):
        """A copy of the newest checkpoint as a run in this folder. Returns run and step."""
        run = folder / "run"
        step = run / "step-000012"
        shutil.copytree(list_steps(self.run)[-1], step)
        shutil.copy(self.run / "log.jsonl", run / "log.jsonl")
        return run, step

    def load_by_script(self, draw, run):
        """One of the scripts reads a run."""
        dataset = f"--dataset={self.dataset}"
        script = draw(st.sampled_from(("sample", "evaluate", "extend", "resume")))
        if script == "sample":
            call("sample.py", run, "--max_new_tokens=2", CPU)
        elif script == "evaluate":
            call("evaluate.py", run, "--lengths=8,16", "--max_tokens=64", CPU, dataset)
        elif script == "extend":
            call("extend.py", run, "--max_iters=0", f"--out_dir={run}-extended", dataset, CPU)
        else:
            resume = ("--init_from=resume", "--max_iters=12")
            call("train.py", f"--out_dir={run}", *resume, CPU, dataset)

    def checkpoint_json(self, draw, folder):
        run, step = self.copy_run(folder)
        file = step / "meta.json"
        meta = json.loads(file.read_text())
        way = draw(st.integers(0, 9))
        if way == 0:
            file.write_text(draw_deep_nesting(draw))
        elif way == 1:
            file.write_bytes(draw(st.binary(max_size=99)))
        elif way == 2:
            file.write_text(json.dumps(draw_mutation(draw, meta)))
        else:
            try:
                write_meta(step, draw_mutation(draw, meta))  # with a matching checksum
            except (ValueError, TypeError, KeyError, AttributeError, UnicodeError):
                return
        self.load_by_script(draw, run)

    def checkpoint_tensors(self, draw, folder):
        run, step = self.copy_run(folder)
        file = step / draw(st.sampled_from(("model.safetensors", "optim.safetensors")))
        damaged = draw_damaged_safetensors(draw, file.read_bytes())
        file.write_bytes(damaged)
        meta = json.loads((step / "meta.json").read_text())
        meta["checksums"][file.name] = hashlib.sha256(damaged).hexdigest()
        write_meta(step, meta)
        if file.stem == "optim":
            call("train.py", f"--out_dir={run}", "--init_from=resume", "--max_iters=13", CPU)
        else:
            self.load_by_script(draw, run)

    def token_files(self, draw, folder):
        dataset = folder / "text"
        dataset.mkdir()
        for name in ("train.bin", "val.bin"):
            (dataset / name).write_bytes(draw_token_file(draw))
        meta = json.loads((self.dataset / "meta.json").read_text())
        way = draw(st.integers(0, 5))
        if way in (1, 2):
            (dataset / "meta.json").write_text(json.dumps(meta))
        elif way in (3, 4):
            (dataset / "meta.json").write_text(json.dumps(draw_mutation(draw, meta)))
        elif way == 5:
            (dataset / "meta.json").write_text(draw_deep_nesting(draw))
        if draw(st.integers(0, 9)) == 0:
            (dataset / draw(st.sampled_from(("train_dir.bin", "val_2.bin")))).mkdir()
        files = (f"--dataset={dataset}", f"--out_dir={folder}/run")
        call("train.py", *TINY, "--max_iters=2", "--eval_interval=2", *files)

    def tokenizers(self, draw, folder):
        bpe = {"kind": "bpe", "name": "x", "pattern": r"\w+|\W+", "bos": 256}
        bpe |= {"special": {"<|endoftext|>": 256}, "ranks": draw_packed_ranks(draw)}
        char = {"kind": "char", "characters": "ab\nc", "bos": True}
        spec = draw(st.sampled_from((bpe, char, {"kind": "bytes"})))
        if draw(st.integers(0, 5)):
            spec = draw_mutation(draw, spec)
        with contextlib.suppress(UserError):
            tokenizer = tokenizer_from_json(spec)
            if tokenizer:
                tokenizer.decode(tokenizer.encode("abc"))

    def presets(self, draw, folder):
        keys = ("n_layer", "pos", "learning_rate", "tie_embeddings", "bos", "protocol")
        key = draw(st.sampled_from((*keys, "vocab_size", "extension", "x")))
        value = draw(ODD_VALUES)
        texts = (
            f"{key} = {json.dumps(value)}",
            f"{key} = {value}",
            f"[{key}]\na = 1",
            f"{key} = " + "[" * 9000,
            f"{key} = " + "9" * 5000,
            "a." * 5000 + "b = 1",
            f"{key} = {draw_deep_nesting(draw)}",
            f"{key} = 1979-05-27",
            f"{key} = nan",
            draw(st.text(max_size=60)),
        )
        text = draw(st.sampled_from(texts))
        encoding = draw(st.sampled_from(("utf-8", "utf-8", "utf-8-sig", "utf-16")))
        file = folder / "x.toml"
        file.write_bytes(text.encode(encoding, "surrogatepass"))
        with contextlib.suppress(UserError):
            argv = [str(file), *TINY[:2]]
            cli.parse(model_config=GPTConfig, cfg=train.TrainConfig, presets=True, argv=argv)

    def flags(self, draw, folder):
        """Random settings; where they are accepted, a small run."""
        script = draw(st.sampled_from(tuple(SCRIPTS)))
        names = [name for cls in SCRIPTS[script] for name in cls.__dataclass_fields__]
        names = [name for name in names if name not in NOT_DRAWN | UNBOUNDED[script]]
        chosen = st.lists(
            st.sampled_from((*names, "x", "", "é")), min_size=1, max_size=3, unique=True
        )
        flags = []
        for name in draw(chosen):
            text = draw(ODD_TEXTS)
            if name in COSTLY and text == "16777217":
                text = "3"
            if name == "compile" and text in ("1", "true"):
                text = "false"  # compiling takes longer than the alarm allows
            flags.append(f"--{name}={text}")
        out_dir = f"--out_dir={folder}/run"
        base = {
            "train.py": [*TINY, "--max_iters=2", f"--dataset={self.dataset}", out_dir],
            "extend.py": [self.run, "--factor=2", "--max_iters=1", out_dir],
            "evaluate.py": [self.run, "--lengths=8", "--max_tokens=64", "--trials=2"],
            "sample.py": [self.run, "--max_new_tokens=2"],
        }
        call(script, *base[script], *flags)

    def prompts(self, draw, folder):
        prompt = draw(st.one_of(ODD_PROMPTS, st.text(max_size=40)))
        if draw(st.booleans()):
            piece = draw(st.one_of(st.sampled_from([*PROMPT_PIECES]), st.binary(max_size=99)))
            (folder / "prompt").write_bytes(piece * PROMPT_PIECES.get(piece, 1))
            prompt = f"FILE:{folder}/prompt"
        # the command line holds bytes without NUL
        flag = f"--start={prompt}".replace("\0", "").encode("utf-8", "surrogatepass")
        flag = flag.decode("utf-8", "surrogateescape")
        status = call("sample.py", self.run, flag, "--max_new_tokens=3")
        if prompt.startswith("FILE:."):
            assert status == 2, "a folder was accepted as a prompt"

    def options(self, draw, folder):
        names = "beta_fast long_factor ramp scale length new_base group sinks of attention_factor x"
        methods = "yarn ntk longrope llama3 dynamic-ntk drope abf self-extend lm-infinite resonance"
        file = folder / "options.json"
        if draw(st.integers(0, 5)):
            options = {draw(st.sampled_from(names.split())): draw(ODD_VALUES)}
            file.write_text(json.dumps(options))
        else:
            file.write_text(draw_deep_nesting(draw))
        method = draw(st.sampled_from([*methods.split(), "pi"]))
        how = (f"--method={method}", f"--options={file}", "--max_iters=0")
        call("extend.py", self.run, *how, f"--out_dir={folder}/run")
