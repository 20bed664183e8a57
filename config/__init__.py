"""Settings: a dataclass at the top of each script, TOML presets that stack, flags that win.

    settings, given, paths = parse(TrainConfig, GPTConfig, presets=True, about=__doc__)

A field's help is the comment behind it in the dataclass, so a setting is described once, where it is read.
"""
import sys

if sys.version_info < (3, 11):
    sys.stderr.write("nanoLong needs Python 3.11 or newer, and this is %d.%d: install one and make the virtual environment with it, as in "
                     "python3.11 -m venv .venv\n" % sys.version_info[:2])
    sys.exit(2)

import contextlib
import datetime
import difflib
import errno
import functools
import inspect
import os
import tomllib
import types
import typing
from dataclasses import MISSING, fields
from pathlib import Path


class UserError(ValueError):
    """What the user asked for cannot be done; the message is one sentence that names the repair."""


class LocalError(UserError):
    """A UserError that one process of several may meet alone, so that each says it for itself."""


def main(run, *refusals):
    """Run a script's main function; UserError, the given exceptions, files that cannot be read or written, and memory that is not there become one line on stderr
    and exit status 2; a fellow process that has ended or hangs becomes one and status 1.

    Of several processes rank 0 alone says what all meet alike.
    """
    sys.stdout.reconfigure(errors="replace")  # a terminal that knows ASCII only
    try:
        sys.exit(run())
    except BrokenPipeError:  # the reader of our output has gone, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except (UserError, OSError, *refusals) as error:
        alone = isinstance(error, (OSError, LocalError))
        if isinstance(error, OSError):
            error = NO_MEMORY if error.errno == errno.ENOMEM else f"{error.filename or 'a file'} cannot be used ({error.strerror or error}): choose another path, or mend its permissions or the disk"
        if alone or int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (RuntimeError, MemoryError) as error:
        lost = _fellow_lost(error)
        if not lost and not isinstance(error, MemoryError) and not any(words in str(error) for words in ("out of memory", "t allocate memory", "bad_alloc", "size calculation overflowed")):
            raise
        print(f"error: {lost or NO_MEMORY}", file=sys.stderr)
        if lost:  # the group is broken: taking it down in order might wait for the one that is lost
            sys.stderr.flush(), os._exit(1)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


NO_MEMORY = ("out of memory: lower --batch_size (raising --gradient_accumulation_steps as much keeps the batch), --block_size, --n_embd or --n_layer in training, --lengths in evaluation, "
             "--max_new_tokens or the prompt in sampling, or use a machine that has more")


def silence():
    """Seconds that a process waits for the others before it ends itself: NANOLONG_TIMEOUT, by default 600."""
    try:
        seconds = float(os.environ.get("NANOLONG_TIMEOUT", 600))
        if not 0 < seconds < 1e7:
            raise ValueError
    except ValueError:
        raise UserError(f"NANOLONG_TIMEOUT={os.environ['NANOLONG_TIMEOUT']} is no number of seconds: give one above 0, such as 600") from None
    return seconds


def require_memory(size):
    """Raise UserError when the machine has less memory than so many bytes. (Taken bit by bit it would be granted, and the process killed without a word.)"""
    try:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return
    if size > have:
        raise UserError(f"the weights alone take {size / 2**30:,.0f} GiB, and this machine has {have / 2**30:,.0f}: lower --n_layer or --n_embd")


def _fellow_lost(error):
    """The sentence for an error of torch.distributed, else None."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and (isinstance(error, torch.distributed.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)):
        return (f"process {os.environ.get('RANK', 0)} has lost another one, which ended or has not answered for {silence():g} seconds (NANOLONG_TIMEOUT): look at what the others said; "
                "the last checkpoint is whole, and --init_from=resume goes on from it")
    return None


def parse(*classes, about="", presets=False, paths=None, defaults=None, argv=None):
    """Read the command line into one instance of each dataclass.

    Takes --name=value, --name value, and --name alone for a true bool. With presets, positional *.toml files are read in order,
    a bare name being looked up in this folder too. `paths` says in words what other positional arguments are (None: there are none).
    `defaults`, a function of what was given (name -> value) and the other positional arguments, returns what replaces defaults, by name.
    Returns (*instances, given, paths): `given` holds the names that were set by preset or flag.
    Raises UserError; --help prints every setting and exits with status 0.
    """
    argv, preset, flags, positional = list(sys.argv[1:] if argv is None else argv), {}, {}, []
    known = {f.name: f for cls in classes for f in fields(cls) if not _comment(cls, f.name).startswith("internal")}
    hints = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    while argv:
        word = argv.pop(0)
        if word in ("--help", "-h"):
            print(_help(classes, about, presets, paths))
            sys.exit(0)
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            _known(name, known, word)
            if not equals:
                if bool in (hints[name], *typing.get_args(hints[name])) and not (argv and argv[0].lower() in _BOOLS):
                    text = "true"
                elif argv:
                    text = argv.pop(0)
                else:
                    raise UserError(f"--{name} wants a value: --{name}={_example(known[name])}")
            flags[name] = _convert(name, text, hints[name], f"--{name}={text}")
        elif presets and word.endswith(".toml"):
            for name, value in _toml(word).items():
                _known(name, known, f"{word}: {name}")
                preset[name] = _convert(name, value, hints[name], f"{word}: {name} = {value!r}")
        elif paths is None:
            raise UserError(f"{word!r} is not a setting: settings are given as --name=value" + (", presets as config/NAME.toml" if presets else "") + "; --help lists them")
        else:
            positional.append(word)
    given = {**preset, **flags}
    rest = {name: value for name, value in (defaults(given, positional) if defaults else {}).items() if name in known}
    merged = {**{name: _convert(name, value, hints[name], f"the run that is gone on from has {name} = {value!r:.60}") for name, value in rest.items()}, **given}
    instances = [cls(**{f.name: merged[f.name] for f in fields(cls) if f.name in merged}) for cls in classes]
    return *instances, set(given), positional


_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _known(name, known, word):
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.6)
        raise UserError(f"{word}: there is no setting {name!r}" + (f"; did you mean {near[0]!r}?" if near else "; --help lists them all"))


def _convert(name, value, hint, where):
    """A string from the command line, or a value from TOML, as the field's type."""
    if value is None and len(typing.get_args(hint)) > 1 and isinstance(hint, types.UnionType):
        return None
    options = [h for h in (typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)) if h is not type(None)]
    if isinstance(value, str) and isinstance(hint, types.UnionType) and len(options) < len(typing.get_args(hint)) and value.lower() in ("none", "auto"):
        return None
    kind = options[0]
    if typing.get_origin(kind) is typing.Literal:
        if not isinstance(value, str) or value not in typing.get_args(kind):
            raise UserError(f"{where}: {name} is one of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if typing.get_origin(kind) is tuple:
        items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
        return tuple(_convert(name, item.strip() if isinstance(item, str) else item, typing.get_args(kind)[0], where) for item in items if item != "")
    try:
        if kind is bool:
            return _BOOLS[str(value).lower()]
        if kind is int and isinstance(value, (str, float)):
            digits = str(value).replace("_", "")
            number = int(digits) if digits.lstrip("+-").isdigit() else float(digits)
            if number == int(number) and abs(number) < 2**63:
                return int(number)
        elif kind is not str and not isinstance(value, (bool, list, dict)) and (kind is float or abs(value) < 2**63):
            return kind(value)
        elif kind is str and isinstance(value, str):
            return value
    except (ValueError, KeyError, OverflowError, TypeError):
        pass
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    raise UserError(f"{where}: {name} wants {words[kind]}")


def _toml(word):
    here = Path(__file__).parent
    file = next((p for p in (Path(word), here / word, here.parent / word) if p.is_file()), None)
    if file is None:
        raise UserError(f"there is no preset {word}: config/ holds {', '.join(sorted(p.name for p in here.glob('*.toml')))}")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{word} is not valid TOML: {error}") from None


@functools.cache
def _source(cls):
    return inspect.getsource(cls).splitlines()


def _comment(cls, name):
    """The comment behind a field, in the class of the hierarchy that defines it."""
    for base in cls.__mro__:
        if name in base.__dict__.get("__annotations__", {}):
            for line in _source(base):
                if line.strip().startswith(f"{name}:"):
                    return line.partition("  # ")[2].strip()
    return ""


def _default(field):
    return field.default_factory() if field.default is MISSING else field.default


def _text(value):
    return "auto" if value is None else ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else str(value)


def _example(field):
    return _text(_default(field)) or "TEXT"


def _help(classes, about, presets, paths):
    lines = [about.strip(), ""]
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for f in fields(cls):
            comment = _comment(cls, f.name)
            if comment.startswith("internal"):
                continue
            hint = [h for h in (typing.get_args(hints[f.name]) if isinstance(hints[f.name], types.UnionType) else (hints[f.name],)) if h is not type(None)][0]
            kind = "|".join(map(str, typing.get_args(hint))) if typing.get_origin(hint) is typing.Literal else "list" if typing.get_origin(hint) is tuple else hint.__name__
            lines.append(f"  --{f.name + '=' + (_text(_default(f)) or chr(39) * 2):<34} {kind:<6} {comment}")
    if presets:
        lines += ["", f"presets: {', '.join('config/' + p.name for p in sorted(Path(__file__).parent.glob('*.toml')))}; they stack, and flags win"]
    if paths:
        lines += ["", f"positional: {paths}"]
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# What device, dtype and compile choose when they are left to themselves.

def pick_device(name):
    """A torch.device for "auto" or a name. A GPU that is there but unusable is an error, never a quiet slide to the CPU."""
    import torch
    try:
        if name == "auto":
            if not torch.cuda.is_available() and torch.backends.mps.is_available():
                name = "mps"
            else:
                name = "cuda" if torch.cuda.is_available() else "cpu"
                if name == "cpu" and _nvidia_gpu():
                    raise UserError(f"there is an NVIDIA GPU, but torch {torch.__version__} cannot use it: install the CUDA build (pip install -r requirements.txt) and a driver "
                                    "that fits it, or say --device=cpu")
        device = torch.device(name)
        if device.index is not None and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
            raise UserError(f"--device={name} would put all processes on one GPU: say --device=cuda, and each takes its own")
        if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # Triton launches where the current device is
        torch.ones(8, device=device).sum().item()
        return device
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"device {name!r} cannot be used ({str(error).splitlines()[0].rstrip('.')}): choose --device=cpu, cuda, cuda:N or mps, or mend its driver") from None


def _nvidia_gpu():
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return False
    return any(Path("/proc/driver/nvidia/gpus").glob("*")) if Path("/proc/driver/nvidia/gpus").is_dir() else False


# Dense bf16 tensor-core peaks in FLOP/s, from the makers' data sheets: the denominator of MFU (model FLOPs utilisation)
PEAK = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "L4": 121e12,
        "RTX 5090": 210e12, "RTX 4090": 165e12, "RTX 3090": 71e12, "MI300X": 1307e12}


def peak_flops(device):
    """The peak of a GPU in the table, or None."""
    import torch
    return next((flops for name, flops in PEAK.items() if device.type == "cuda" and name in torch.cuda.get_device_name(device)), None)


def prepare_device(device):
    """Make the same command give the same bits on a GPU, at some cost in speed, and make memory cheap to reuse on Linux."""
    import ctypes
    import torch
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    elif sys.platform == "linux":  # glibc: keep freed memory; faulting in fresh pages for every temporary tensor costs 7 % of a small model's step
        with contextlib.suppress(OSError, AttributeError):
            for parameter, value in ((-1, 2**31 - 1), (-2, 1 << 26), (-3, 1 << 25)):  # M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD
                ctypes.CDLL(None).mallopt(parameter, value)


def pick_dtype(name, device):
    """The torch.dtype of matrix products: bfloat16 where processor or GPU multiply it natively, float16 on other GPUs, else float32."""
    import torch
    if name != "auto":
        if name == "float16" and device.type == "mps":
            raise UserError("--dtype=float16 trains with a loss scaler, which mps has not: use float32 or bfloat16")
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu" and any(getattr(torch.cpu, f, bool)() for f in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")):
        return torch.bfloat16
    return torch.float32


def autocast(device, dtype):
    """The context in which matrix products have this dtype."""
    import torch
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()


def pick_compile(wanted, device, steps):
    """(whether to compile, why not in words or None). Left to itself: on a GPU always, on a CPU where the run is long enough to pay for it."""
    import shutil
    import sysconfig
    if wanted is False:
        return False, None
    if device.type == "mps":
        return False, "torch.compile is off: it is not ready for mps"
    if device.type == "cpu" and wanted is None and steps < 500:
        return False, "torch.compile is off: it takes longer to compile than it saves in a run this short (--compile=true forces it)"
    if not any(shutil.which(c) for c in ((os.environ.get("CXX") or "g++").split()[0], "clang++", "cl")):
        return False, "torch.compile is off: there is no C++ compiler (install g++, as in apt-get install g++)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False, "torch.compile is off: the Python headers are missing (as in apt-get install python3-dev)"
    if device.type == "cuda":
        import importlib.util
        if importlib.util.find_spec("triton") is None:
            return False, "torch.compile is off: there is no triton for the GPU (pip install triton)"
    return True, None


def compiled(model):
    """torch.compile(model), with a fresh count of recompilations: dynamo gives up on a function after eight kinds of it, and a process may train more models than that."""
    import torch
    torch._dynamo.reset()
    return torch.compile(model)


def provenance(device):
    """What must stand beside a figure: commit, hardware, torch and date, as a line of text."""
    import platform
    import subprocess
    import torch

    def git(*words):
        try:
            return subprocess.run(["git", *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return ""
    commit = (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if git("status", "--porcelain", "--", "*.py") else "")
    try:
        cpu = next(line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads of {cpu}"
    return f"commit {commit}, {hardware}, torch {torch.__version__.partition('+')[0]}, {datetime.date.today()}"


# ---------------------------------------------------------------------------------------------------------------------
# Processes: joining those that torchrun started, and being the only one that writes to a folder.

def join_processes(device):
    """Join the process group when torchrun started us: NCCL on GPUs, gloo on CPUs, whose cores are shared out. A process that waits
    for another longer than silence() ends itself. Returns (rank, processes)."""
    import torch
    if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
        return 0, 1
    if os.environ.get("TORCHELASTIC_RUN_ID") == "none" and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0):
        raise UserError("torchrun --max-restarts without a name cannot tell a restart from another run in the same folder: add --standalone, or on several machines --rdzv_id=NAME")
    device = pick_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
    patience = datetime.timedelta(seconds=silence())
    store, rank, world = next(torch.distributed.rendezvous("env://", timeout=patience))
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", store=_meet(store, rank, world), rank=rank, world_size=world, timeout=patience)
    return rank, world


def _meet(store, rank, world):
    """A part of the store for those that are here now. torchrun keeps its store over restarts, where the addresses of the dead would be found; and its count of restarts,
    which may differ between machines, is made the highest of all, so that all resume or none."""
    import time
    import torch
    token, count, until = os.urandom(8).hex(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), time.monotonic() + silence()
    if rank:
        store.set(f"nanolong/hello/{rank}", token)
        group = store.get(f"nanolong/welcome/{token}").decode()  # waits for it
        store.set(f"nanolong/{group}/{rank}", count)
    else:
        group, missing = token, set(range(1, world))
        while missing:
            for other in sorted(missing):
                if store.check([f"nanolong/hello/{other}"]):  # perhaps of one that is dead by now
                    store.set(f"nanolong/welcome/{store.get(f'nanolong/hello/{other}').decode()}", group)
            missing -= {other for other in missing if store.check([f"nanolong/{group}/{other}"])}
            if time.monotonic() > until:
                raise torch.distributed.DistError(f"{len(missing)} processes have not come")
            time.sleep(0.01)
        store.set(f"nanolong/{group}/restarts", str(max(int(count), *(int(store.get(f"nanolong/{group}/{other}")) for other in range(1, world)), 0)))
    if count != (most := store.get(f"nanolong/{group}/restarts").decode()):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = most
    return torch.distributed.PrefixStore(f"nanolong/{group}/group", store)


def catch_signals():
    """From now on SIGTERM and SIGINT only add to a list. Returns it, and the function that gives them back. A second signal, a second or more after
    the first and so in earnest, does not wait; outside the main thread nothing is caught."""
    import signal
    import threading
    import time
    told, before = [], {}

    def note(number, frame):
        if told and time.monotonic() - told[0] > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        told.append(time.monotonic())

    def release():
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        before.update({number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)})
    return told, release


_locks = {}


def lock(folder):
    """Hold a folder's lock, a record lock that the system lets go of when its owner dies, until unlock(). Holding it twice is holding it once.

    Raises UserError when another process holds it.
    """
    if folder in _locks:
        return
    file = open(folder / "lock", "a+")
    try:
        try:
            import fcntl
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except (BlockingIOError, PermissionError):
        file.seek(0)
        raise UserError(f"process {file.read().strip() or 'unknown'} is writing to {folder}: wait for it, or choose another --out_dir") from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    _locks[folder] = file


def unlock(folder):
    """Let go of a folder's lock."""
    if folder in _locks:
        _locks.pop(folder).close()
