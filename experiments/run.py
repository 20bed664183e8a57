"""Run an experiment: train, extend and evaluate as a user would, and judge what came out.

    python experiments/run.py leaderboard                    all arms, three seeds
    python experiments/run.py leaderboard --budget=try       seconds, a test without meaning
    python experiments/run.py leaderboard --arms=rope,alibi --seeds=1,2
    python experiments/run.py leaderboard --entry=my_scheme.py     an arm for a scheme of yours
    python experiments/run.py leaderboard --redraw           only the report, from its JSON
    python experiments/run.py mine.py                        an experiment of yours

An experiment is a file that states some of these; docs/evaluation.md has an example of ten lines.
Those with a star may be functions of the budget b, whose numbers are attributes: b.L.

    TITLE, ABOUT *  the heading, and the paragraph below it
    BUDGETS         name -> numbers as text, "L=64 steps=700"; L is the training length
    FLAGS *         flags of train.py, for all arms; the flags of an arm win
    ARMS *          name -> a command or a list of them, ["train --pos=rope", "extend --factor=4"]
    EVALUATE *      flags of evaluate.py, a list of them, or label -> flags
    TABLES          (heading, measure or measures, lengths), where "4L" is four training lengths
    CLAIMS          a line each: "last-quarter: alibi@8L < alibi@L + ln 1.1"
    measure(arm)    what evaluate.py does not measure: measure or (measure, length) -> number
    derive(board)   rows (arm, seed, measure, length, number) that follow from others
    MEASURES        the names of what measure() and derive() return
    make_data(b)    writes datasets below b.data, for arms with --dataset={b.data}/NAME
    notes(board)    more lines of the report
    plot(board, file)   a figure in place of one panel for each table

Each command is run in this process, and kept in out/experiments under a hash of all commands up to
it, their data, the code and torch's version. So arms that begin alike share runs, what was stopped
goes on, and what was edited since is run again. NAME.md, .json and .png go to --out_dir. An arm
that fails says why in its row, and the others go on; the exit status is then 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import ast
import contextlib
import errno
import functools
import hashlib
import importlib
import json
import math
import re
import shlex
import statistics
import time
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

import torch

import data
from data.prepare import prepare_missing
from model import GPT, POSITIONS
from nanolong import cli, provenance
from nanolong.curves import import_pyplot
from nanolong.devices import pick_device
from nanolong.entry import load_entries
from nanolong.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path("out/experiments")
SCHEMES = dict(POSITIONS)  # without those of --entry

# The code that a training run depends on, and what an evaluation depends on besides.
TRAINING_CODE = ("model.py", "rope_scaling.py", "train.py", "extend.py", "data/*.py")
TRAINING_CODE += ("kernels/eager.py", "kernels/reference.py", "nanolong/optim.py")
EVALUATION_CODE = ("evaluate.py", "nanolong/losses.py", "nanolong/scoring.py")
EVALUATION_CODE += ("nanolong/retrieval.py",)

# A full or read-only disk ends the experiment; any other error is that of an arm.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@dataclass
class RunConfig:
    budget: str = ""  # sizes, a key of the experiment's BUDGETS; default: its first
    arms: tuple[str, ...] = ()  # only these arms
    seeds: tuple[int, ...] = (1, 2, 3)  # a run of each arm for each seed
    entry: tuple[str, ...] = ()  # files with a scheme of your own: an arm each, like the first arm
    dataset: str = "python"  # text for training and evaluation
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    out_dir: str = str(CACHE)  # folder for the report
    redraw: bool = False  # write the report from its JSON in out_dir; measure nothing


# -----------------------------------------------------------------------------
# An experiment


def load_experiment(name, cfg):
    """Read an experiment's file for one budget. Returns its statements, with defaults."""
    file = Path(name) if name.endswith(".py") else ROOT / "experiments" / f"{name}.py"
    if not file.is_file():
        known = ", ".join(sorted(available()))
        raise UserError(f"there is no experiment {name}: choose from {known}, or give a file.py")
    spec = importlib.util.spec_from_file_location(f"experiment_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "ARMS"):
        raise UserError(f"{file} states no ARMS: give name -> commands, as experiments/run.py says")
    budgets = getattr(module, "BUDGETS", {"default": ""})
    budget = cfg.budget or next(iter(budgets))
    if budget not in budgets:
        raise UserError(f"there is no budget {budget!r}: choose from {', '.join(budgets)}")
    numbers = [word.split("=") for word in budgets[budget].split()]
    b = SimpleNamespace(**{key: json.loads(value) for key, value in numbers})
    b.data = CACHE / f"data-{file.stem}-{budget}"

    def state(name, default):
        value = getattr(module, name, default)
        return value(b) if callable(value) else value

    experiment = SimpleNamespace(
        name=file.stem,
        file=file,
        b=b,
        title=getattr(module, "TITLE", file.stem),
        about=state("ABOUT", ""),
        flags=state("FLAGS", ""),
        arms={name: as_list(commands) for name, commands in state("ARMS", {}).items()},
        evaluate=state("EVALUATE", {}),
        tables=getattr(module, "TABLES", None),
        claims=[line for line in getattr(module, "CLAIMS", "").splitlines() if line.strip()],
        measures=tuple(getattr(module, "MEASURES", ())),
    )
    for hook in ("measure", "derive", "make_data", "notes", "plot"):
        setattr(experiment, hook, getattr(module, hook, None))
    if not isinstance(experiment.evaluate, dict):
        calls = as_list(experiment.evaluate)
        experiment.evaluate = {" " * number: flags for number, flags in enumerate(calls)}
    return experiment


def available():
    """Return the names of the experiments beside this file."""
    files = (ROOT / "experiments").glob("*.py")
    return [file.stem for file in files if "\nARMS = " in file.read_text(encoding="utf-8")
            or "\ndef ARMS(" in file.read_text(encoding="utf-8")]  # fmt: skip


def as_list(value):
    return [value] if isinstance(value, str) else list(value)


def add_entries(experiment, entries):
    """Add an arm for each file with a scheme: the first arm's commands, with this scheme."""
    first, *others = next(iter(experiment.arms.values()))
    for name, file in zip(load_entries(entries, POSITIONS), entries, strict=True):
        flags = [word for word in shlex.split(first) if not word.startswith("--pos=")]
        experiment.arms[name] = [shlex.join([*flags, f"--entry={file}"]), *others]


def choose_arms(experiment, names):
    """Keep the arms of these names, all without any. Raises UserError for an unknown one."""
    for name in names:
        if name not in experiment.arms:
            known = ", ".join(experiment.arms)
            raise UserError(f"there is no arm {name!r}: choose from {known}")
    return {name: experiment.arms[name] for name in names or experiment.arms}


def check_claims(experiment):
    """Raise UserError for a claim about an arm, a measure or a length that there is not."""
    lengths = {}  # measure -> the lengths of evaluate.py
    for label, flags in experiment.evaluate.items():
        for measure, found in measures_of(flags).items():
            lengths[f"{label} {measure}".strip()] = found
    known = [*lengths, *experiment.measures, "seconds"]
    for line in experiment.claims:
        if line.startswith("#"):
            continue
        claim = parse_claim(line)
        if claim.measure not in known:
            raise UserError(f"claim {line!r}: no {claim.measure!r} is measured, only {known}")
        for arm, length in claim.sides:
            if arm not in experiment.arms:
                raise UserError(f"claim {line!r}: there is no arm {arm!r}: correct its name")
            measured_at = lengths.get(claim.measure)
            if measured_at and count_tokens(length, experiment.b) not in measured_at:
                raise UserError(f"claim {line!r}: {length} is not among --lengths: add it there")


def measures_of(flags):
    """Return what a call of evaluate.py measures: measure -> lengths, empty for its default."""
    given = dict(word.removeprefix("--").split("=", 1) for word in shlex.split(flags))
    lengths = [int(length) for length in given.get("lengths", "").split(",") if length]
    task = given.get("task", "loss")
    if task == "needle":
        names = ["needle", "needle control"]
        names += [f"needle {depth:g}" for depth in torch.linspace(0, 1, 5).tolist()]
    elif task == "ruler":
        kinds = given.get("ruler", "niah,multikey,vt").split(",")
        names = [f"{kind} {field}" for kind in kinds for field in ("accuracy", "nats", "gain")]
    else:
        names = given.get("protocol", "chunked,last-quarter,token-aligned").split(",")
    return dict.fromkeys(names, lengths)


# -----------------------------------------------------------------------------
# Runs


@functools.cache
def hash_code(patterns, pos):
    """Hash the code of files, without docstrings; of the schemes of model.py only that of pos.

    pos: None for a model with all schemes.
    """
    own = set(SCHEMES.values()) if pos not in SCHEMES else {SCHEMES[pos]}
    own = {base.__name__ for scheme in own for base in scheme.__mro__}
    others = {base.__name__ for scheme in SCHEMES.values() for base in scheme.__mro__} - own
    digest = hashlib.sha256()
    for pattern in patterns:
        for file in sorted(ROOT.glob(pattern)) or [ROOT / pattern]:
            tree = ast.parse(file.read_text(encoding="utf-8"))
            kept = [node for node in tree.body if getattr(node, "name", "") not in others]
            tree = ast.Module([node for node in kept if not is_list_of_schemes(node)], [])
            for node in ast.walk(tree):
                first = node.body[0] if isinstance(getattr(node, "body", None), list) else None
                if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                    first.value.value = ""
            digest.update(ast.dump(tree).encode())
    return digest.hexdigest()


def is_list_of_schemes(node):
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "POSITIONS"


@functools.cache
def hash_file(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def hash_data(name):
    return data.open_dataset(name).hash


def hash_words(words):
    """Hash the files and the data that a command's words name."""
    found = []
    for word in words:
        name, _, value = word.rpartition("=")
        if name == "--dataset":
            found.append(hash_data(value))
        elif Path(value).is_file():
            found.append(hash_file(value))
    return found


def merge(*parts):
    """Join words of a command; of a flag that is given again the last one counts."""
    words = {}
    for word in parts:
        name = word.partition("=")[0] if word.startswith("--") else word
        words.pop(name, None)
        words[name] = word
    return list(words.values())


def split(command):
    """Return the words of a command, each flag as --name=value."""
    words = []
    for word in shlex.split(command):
        last = words[-1] if words else ""
        is_value = last.startswith("--") and "=" not in last and not word.startswith("--")
        if is_value:
            words[-1] = f"{last}={word}"
        else:
            words.append(word)
    return words


class ArmError(Exception):
    """An arm cannot go on; says why."""


@dataclass
class Arm:
    """What measure() gets: an arm of one seed, after its commands."""

    name: str
    seed: int
    b: SimpleNamespace
    dataset: str
    device: torch.device
    folder: Path | None = None  # the run folder of the last command
    seconds: float = 0.0  # of the processor, for its commands

    def load(self):
        """Load the model, on the device."""
        return GPT.load(self.folder).to(self.device)


class Runs:
    """Runs the commands of arms, and keeps what they leave in the cache."""

    def __init__(self, experiment, cfg):
        self.experiment = experiment
        self.cfg = cfg
        self.device = pick_device(cfg.device)
        self.commits = {}  # of what the report uses, in order
        CACHE.mkdir(parents=True, exist_ok=True)

    def call(self, script, words):
        """Run a script in this process, which saves the import of torch; its output is logged."""
        with open(CACHE / "log.txt", "a+", encoding="utf-8") as log:
            print(f"\n$ python {script}.py {shlex.join(words)}", file=log, flush=True)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                status = importlib.import_module(script).main(words)
            log.flush()
            if status:
                log.seek(0)
                raise ArmError(log.read().splitlines()[-1].removeprefix("error: "))

    def cached(self, name, key, function):
        """Return what function() returned for this key: {"value", "seconds", "commit"}."""
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        file = CACHE / f"{name}-{digest}.json"
        if not file.is_file():
            start = time.process_time()
            value = function(file.with_suffix(""))
            seconds = time.process_time() - start
            commit = provenance.current_commit()
            write_json(file, {"value": value, "seconds": seconds, "commit": commit, "key": key})
        found = json.loads(file.read_text(encoding="utf-8"))
        self.commits[found["commit"]] = None
        return found

    def make(self, arm, commands):
        """Run the commands of an arm, or what is left of them to run. Returns the last one's key.

        arm: gets the folder of the last one.
        """
        entries, key = [], []
        pos = None
        for number, command in enumerate(commands):
            script, *words = split(command)
            if script not in ("train", "extend", "hf"):
                raise ArmError(f"{script!r} is not a command of an arm: give train, extend or hf")
            if script == "train":
                common = split(self.experiment.flags)
                common = ["--eval_interval=1000000000", f"--dataset={self.cfg.dataset}", *common]
                words = merge(*common, *words)
                entries = [word for word in words if word.startswith("--entry=")]
                flags = dict(word.partition("=")[::2] for word in words)
                pos = flags.get("--pos", None if entries else "rope") if number == 0 else pos
            elif script == "extend":
                words = merge(*words, *entries)
            if script != "hf":
                words = merge(f"--seed={arm.seed}", f"--device={self.device}", *words)
            code = hash_code(TRAINING_CODE, pos)
            key = [key, script, words, hash_words(words), code, torch.__version__]
            run = functools.partial(self.run, script, arm.folder, words)
            found = self.cached(script, key, run)
            arm.folder = Path(found["value"])
            arm.seconds += found["seconds"]
        return key, entries, pos

    def run(self, script, parent, words, folder):
        """Run train.py, extend.py or hf.py to its end; return its run folder."""
        steps = sorted(folder.glob("step-*"))
        if script == "hf":
            self.call(script, [*words, str(folder)])
            return str(folder)
        paths = [str(parent)] if script == "extend" else []
        resume = ["--init_from=resume"] if steps else []
        self.call(script, [*paths, *words, f"--out_dir={folder}", *resume])
        last = sorted(folder.glob("step-*"))[-1]
        saved = json.loads((last / "meta.json").read_text(encoding="utf-8"))
        settings = saved.get("train") or {}
        if saved["step"] < (settings.get("stop_at") or settings.get("max_iters", 0)):
            raise KeyboardInterrupt  # a signal: the script has saved and returned
        return str(folder)

    def rows(self, name, commands, seed):
        """Make an arm and measure it. Returns its rows [arm, seed, measure, length, value]."""
        experiment = self.experiment
        arm = Arm(name, seed, experiment.b, self.cfg.dataset, self.device)
        key, entries, pos = self.make(arm, commands)
        code = hash_code(TRAINING_CODE + EVALUATION_CODE, pos)
        found = [("seconds", 0, arm.seconds)] if commands else []
        for label, flags in experiment.evaluate.items():
            words = merge(f"--device={self.device}", *split(flags), *entries)
            part = [key, words, hash_words(words), hash_data(arm.dataset), code]
            evaluate = functools.partial(self.evaluate, arm.folder, words)
            for measure, length, value in self.cached("evaluate", part, evaluate)["value"]:
                found.append((f"{label} {measure}".strip(), length, value))
        if experiment.measure:
            source = hash_file(experiment.file)
            part = [key, name, seed, vars(experiment.b), hash_data(arm.dataset), code, source]
            part[3] = {key: str(value) for key, value in part[3].items()}
            found += self.cached("measure", part, functools.partial(self.measure, arm))["value"]
        return [[name, seed, measure, length, value] for measure, length, value in found]

    def evaluate(self, run, words, file):
        """Evaluate a run folder; evaluate.py goes on where it was stopped, by its JSON."""
        file = file.with_suffix(".records")
        self.call("evaluate", [str(run), *words, f"--json={file}"])
        records = json.loads(file.read_text(encoding="utf-8"))
        return [row for record in records for row in measured(record)] + mean_needles(records)

    def measure(self, arm, file):
        """Return what the experiment's measure() finds, as rows."""
        with open(CACHE / "log.txt", "a", encoding="utf-8") as log:
            print(f"\n$ measure {arm.name}, seed {arm.seed}", file=log, flush=True)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                found = self.experiment.measure(arm)
        rows = []
        for measure, value in found.items():
            measure, length = measure if isinstance(measure, tuple) else (measure, 0)
            rows.append([measure, length, value])
        return rows


def measured(record):
    """Yield the [measure, length, value] of a record of evaluate.py."""
    length = record["length"]
    if record["task"] == "loss":
        part = record.get("position")
        name = record["protocol"]
        value = "refused" if "refused" in record else record["loss"]
        yield [f"{name} {part[0]}" if part else name, length, value]
    elif record["task"] == "needle":
        depth = "control" if record["depth"] is None else f"{record['depth']:g}"
        yield [f"needle {depth}", length, record.get("accuracy", "refused")]
    elif "summary" in record:
        for field in ("accuracy", "nats", "gain"):
            yield [f"{record['kind']} {field}", length, record[field]["mean"]]


def mean_needles(records):
    """Return rows of the mean accuracy over the depths, without the control."""
    by_length = {}
    for record in records:
        if record["task"] == "needle" and record["depth"] is not None and "accuracy" in record:
            by_length.setdefault(record["length"], []).append(record["accuracy"])
    return [["needle", length, statistics.fmean(found)] for length, found in by_length.items()]


def write_json(file, value):
    """Write a file whole or not at all."""
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(file)


def run_arms(experiment, arms, cfg):
    """Run all arms of all seeds. Returns the board, which becomes NAME.json."""
    runs = Runs(experiment, cfg)
    rows, failed = [], {}
    for seed in cfg.seeds:
        for number, (name, commands) in enumerate(arms.items(), 1):
            print(f"seed {seed}: {name} ({number} of {len(arms)})", flush=True)
            try:
                rows += runs.rows(name, commands, seed)
            except Exception as error:
                if is_disk_error(error):
                    raise
                failed[name] = explain(error)
                print(f"{name} failed: {failed[name]}", file=sys.stderr)
    where = provenance.provenance(runs.device, runs.commits)
    return {
        "command": shlex.join(["python", "experiments/run.py", *sys.argv[1:]]),
        "note": f"{where}; {cfg.dataset} {hash_data(cfg.dataset)}",
        "budget": {key: str(value) if key == "data" else value
                   for key, value in vars(experiment.b).items()},
        "arms": {name: commands for name, commands in arms.items()},
        "failed": failed,
        "rows": rows,
    }  # fmt: skip


def is_disk_error(error):
    """Whether an error, or what it was raised from, is that of the disk."""
    while error is not None:
        if getattr(error, "errno", None) in DISK_ERRORS:
            return True
        error = error.__cause__ or error.__context__
    return False


def explain(error):
    """Return why an arm failed, as one line; a fault of the code leaves its traceback in the log."""
    if isinstance(error, UserError | ArmError):
        return str(error)
    with open(CACHE / "log.txt", "a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]} (more in {CACHE}/log.txt)"


# -----------------------------------------------------------------------------
# Values, intervals and claims

# Student's t, two-sided 95 %, of 1 degree of freedom and more; of yet more it is taken as 2.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values):
    """Return the mean and the half-width of its 95 % interval (nan for a single value)."""
    n = len(values)
    mean = statistics.fmean(values)
    if n == 1:
        return mean, math.nan
    t = T95[n - 2] if n - 2 < len(T95) else 2.0
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def format_interval(values, sign=""):
    mean, half_width = interval(values)
    text = f"{mean:{sign}.3f}"
    return text if math.isnan(half_width) else f"{text} ± {half_width:.3f}"


def count_tokens(length, b):
    """Return the number of a length such as 4L, L+20 or 84."""
    parts = re.fullmatch(r"(\d*)(L?)(?:\+(\d+))?", length)
    if not parts:
        raise UserError(f"{length!r} is no length: give one such as 84, L, 4L or L+20")
    times, is_relative, more = parts.groups()
    return int(times or 1) * (b.L if is_relative else 1) + int(more or 0)


class Board:
    """What was measured: the value of an arm by measure, length and seed."""

    def __init__(self, saved, derive=None):
        self.saved = saved
        self.b = SimpleNamespace(**saved["budget"])
        self.arms = list(saved["arms"])
        self.failed = saved.get("failed", {})
        self.values = {}  # (arm, measure, length) -> {seed: number}
        self.texts = {}  # (arm, measure, length) -> such as "refused", in place of a number
        self.add(saved["rows"])
        if derive:
            self.add(list(derive(self)))

    def add(self, rows):
        for arm, seed, measure, length, value in rows:
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number:
                self.values.setdefault((arm, measure, length), {})[seed] = value
            else:
                text = value if isinstance(value, str) else "not finite"
                self.texts[arm, measure, length] = text

    def of(self, arm, measure, length=0):
        """Return seed -> value. length: a number, or text such as 4L."""
        if isinstance(length, str):
            length = count_tokens(length, self.b)
        return self.values.get((arm, measure, length), {})

    def cell(self, arm, measure, length):
        """Return a cell of a table: mean and interval, or why there is none."""
        values = list(self.of(arm, measure, length).values())
        if values:
            return format_interval(values)
        return self.texts.get((arm, measure, count_tokens(length, self.b)), "–")

    def measures(self):
        """Return measure -> its lengths, in the order of the rows."""
        found = {}
        for _, measure, length in [*self.values, *self.texts]:
            found.setdefault(measure, set()).add(length)
        return {measure: sorted(lengths) for measure, lengths in found.items()}


RULE = (
    "A claim passes when its whole 95 % interval does. It is not separated from its bound when the "
    "interval includes the bound, contradicted when the whole interval lies on the other side of "
    "the bound and of zero, and too small when it lies on the other side of the bound alone."
)
SIDE = r"([^\s@]+)(?:@(\S+))?"
CLAIM = re.compile(rf"(.+?): {SIDE} ([<>]) (?:{SIDE})(?: ([+-]) (ln )?([\d.]+))?$")


def parse_claim(line):
    """Read a claim such as "loss: a@4L < b@L + ln 1.1" or "accuracy: a@4L > 0.8"."""
    match = CLAIM.match(line)
    if not match:
        raise UserError(f"{line!r} is no claim: write one as in 'chunked: a@4L < b@L + ln 1.1'")
    measure, a, a_length, sign, b, b_length, plus, is_ln, margin = match.groups()
    bound = 0.0
    if margin:
        bound = math.log(float(margin)) if is_ln else float(margin)
        bound = -bound if plus == "-" else bound
    sides = [(a, a_length or "0")]
    if re.fullmatch(r"-?[\d.]+", b):
        bound += float(b)
    else:
        sides.append((b, b_length or "0"))
    return SimpleNamespace(measure=measure, sides=sides, sign=sign, bound=bound)


def judge(line, board):
    """Judge a claim on the differences of the same seeds, as text; None without measurements."""
    claim = parse_claim(line)
    values = [board.of(arm, claim.measure, length) for arm, length in claim.sides]
    seeds = set.intersection(*map(set, values))
    if not seeds:
        return None
    differences = [values[0][seed] - sum(v[seed] for v in values[1:]) for seed in sorted(seeds)]
    verdict = find_verdict(differences, claim.sign, claim.bound)
    found = format_interval(differences, "+")
    return f"- {line}: {found}, {claim.sign} {claim.bound:.4g}: {verdict}"


def find_verdict(differences, sign, bound):
    """Return "pass", or "FAIL" and why, in the words of RULE."""
    mean, half_width = interval(differences)
    side = 1 if sign == ">" else -1
    ahead = side * (mean - bound)
    if math.isnan(half_width):
        return "FAIL (a single seed has no interval)"
    if ahead > half_width:
        return "pass"
    if ahead >= -half_width:
        return "FAIL (not separated)"
    is_beyond_zero = side * mean < -half_width
    return "FAIL (contradicted)" if is_beyond_zero else "FAIL (too small)"


# -----------------------------------------------------------------------------
# The report


def expand_tables(experiment, board):
    """Return (heading, measures, lengths) of each table; by default one for each measure."""
    if experiment.tables is None:
        return [(m, [m], [str(n) for n in lengths]) for m, lengths in board.measures().items()]
    return [(heading, as_list(m), as_list(lengths)) for heading, m, lengths in experiment.tables]


def table_lines(header, rows):
    """Return the lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def format_table(board, names, measures, lengths):
    """Return a Markdown table: a line for each arm, a column for each measure and length."""
    columns = [(measure, length) for measure in measures for length in lengths]
    header = [""]
    for measure, length in columns:
        tokens = f"{count_tokens(length, board.b):,}"
        text = f"{tokens} ({length})" if "L" in length else tokens
        header.append(" ".join([measure] * (len(measures) > 1) + [text] * (length != "0")))
    rows = []
    for name in names:
        cells = [board.cell(name, *column) for column in columns]
        if name in board.failed:
            cells = [f"failed: {board.failed[name]}", *cells[1:]]
        if set(cells) != {"–"}:  # of a measure that this arm does not have
            rows.append([name, *cells])
    return table_lines(header, rows)


def rank(board, measures, lengths):
    """Sort the arms by the mean of the first measure; those without all lengths come last."""

    def mean(name):
        found = [board.of(name, measures[0], length).values() for length in lengths]
        return statistics.fmean(statistics.fmean(v) if v else math.inf for v in found)

    return sorted(board.arms, key=mean)


def format_report(experiment, board):
    """Return the lines of NAME.md."""
    lines = [f"# {experiment.title}", "", f"`{board.saved['command']}`: {board.saved['note']}."]
    lines += ["", experiment.about] if experiment.about else []
    tables = expand_tables(experiment, board)
    names = rank(board, *tables[0][1:])
    for heading, measures, lengths in tables:
        lines += ["", f"## {heading}", "", *format_table(board, names, measures, lengths)]
    lines += ["", f"![{experiment.title}]({experiment.name}.png)"]
    if experiment.notes:
        lines += ["", *experiment.notes(board)]
    judged = []
    for line in experiment.claims:
        judged += ["", f"##{line}", ""] if line.startswith("#") else [judge(line, board)]
    if any(judged):
        lines += ["", "## Claims", "", RULE, "", *(line for line in judged if line is not None)]
    return lines


def plot_tables(experiment, board, file):
    """Plot each table with several lengths: a curve for each arm, with its interval."""
    tables = [table for table in expand_tables(experiment, board) if len(table[2]) > 1]
    pyplot = import_pyplot(file) if tables else None
    if pyplot is None:
        return
    size = (7 * len(tables), 5)
    figure, axes = pyplot.subplots(1, len(tables), figsize=size, squeeze=False)
    for axis, (heading, measures, lengths) in zip(axes[0], tables, strict=True):
        for i, name in enumerate(board.arms):
            points = []
            for length in lengths:
                values = list(board.of(name, measures[0], length).values())
                if values:
                    points.append((count_tokens(length, board.b), *interval(values)))
            if points:
                x, mean, half_width = map(list, zip(*points, strict=True))
                style = {"color": f"C{i % 10}", "marker": "osD^vP*X"[i % 8], "markersize": 4}
                axis.errorbar(x, mean, half_width, capsize=2, label=name, **style)
        axis.set(title=heading, xscale="log", xlabel="length", ylabel=measures[0])
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel(board.saved["note"], fontsize=7, color="gray")
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def report(experiment, saved, file):
    """Write NAME.md and NAME.png from a board, and print the first."""
    board = Board(saved, experiment.derive)
    text = "\n".join(format_report(experiment, board)) + "\n"
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print("\n" + text)
    plot = experiment.plot or functools.partial(plot_tables, experiment)
    plot(board, file.with_suffix(".png"))


def main(argv=None):
    args = cli.parse(cfg=RunConfig, about=__doc__, paths="the experiment", argv=argv)
    cfg = args.cfg
    if len(args.paths) != 1:
        raise UserError(f"name one experiment: {', '.join(sorted(available()))}, or a file.py")
    experiment = load_experiment(args.paths[0], cfg)
    file = Path(cfg.out_dir) / f"{experiment.name}.json"
    if not cfg.redraw:
        add_entries(experiment, cfg.entry)
        arms = choose_arms(experiment, cfg.arms)
        check_claims(experiment)
        prepare_missing(cfg.dataset)
        if experiment.make_data:
            experiment.make_data(experiment.b)
        saved = run_arms(experiment, arms, cfg)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, saved)
    if not file.is_file():
        raise UserError(f"--redraw needs {file}, which does not exist: measure first, without it")
    saved = json.loads(file.read_text(encoding="utf-8"))
    report(experiment, saved, file)
    return 1 if saved["failed"] else 0


if __name__ == "__main__":
    cli.run_main(main)
