"""Run an experiment: train, extend and evaluate as a user would, and judge what came out.

    python experiments/run.py leaderboard                    all arms, three seeds
    python experiments/run.py leaderboard --budget=try       minutes, a test without meaning
    python experiments/run.py leaderboard --arms=rope,alibi --seeds=1,2
    python experiments/run.py leaderboard --entry=my_scheme.py     an arm for a scheme of yours
    python experiments/run.py leaderboard --redraw           only the report, from its JSON
    python experiments/run.py mine.py                        an experiment of yours

An experiment is a file that states some of these; docs/evaluation.md has an example of ten lines.
Names in capitals may be functions of the budget b, whose numbers are attributes: b.L.

    TITLE, ABOUT    the heading, and what stands below it, by default the docstring of the file
    BUDGETS         name -> numbers as text, "L=64 steps=700"; L is the training length
    FLAGS           flags of train.py, for all arms; the flags of an arm win
    ARMS            name -> a command or a list of them, ["train --pos=rope", "extend --factor=4"]
    EVALUATE        flags of evaluate.py, a list of them, or label -> flags
    TABLES          (heading, measure or measures, lengths), where "4L" is four training lengths
    CLAIMS          a line each: "last-quarter: alibi@8L < alibi@L + ln 1.1", or of more values,
                    "last-quarter: a@8L - a@L < b@8L - b@L": a gets worse by less than b
    measure(arm)    what evaluate.py does not measure: measure or (measure, length) -> number
    derive(board)   rows (arm, seed, measure, length, number) that follow from others
    MEASURES        name -> unit of what measure() and derive() return, or the names alone
    make_data(b)    writes datasets below b.data from b.dataset: for arms, --dataset={b.data}/NAME
    FINDING         a sentence, the title of the figure, but for budgets try and gpu
    notes(board)    more lines of the report
    plot(board, file)   a figure in place of one panel for each table

Each command is run in this process, and kept in out/experiments under a hash of all commands up to
it, their data, the code and torch's version. So arms that begin alike share runs, what was stopped
goes on, and what was edited since is run again. NAME.md, .json and .png (also .svg and .pdf) go to
--out_dir. An arm that fails says why in its row, and the others go on; the exit status is then 1.
The report says how the training of arms differs; no claim is judged between other token ids.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)

import contextlib
import difflib
import functools
import hashlib
import importlib
import importlib.util
import itertools
import json
import re
import shlex
import shutil
import statistics
import time
import traceback
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

import data
from data import prepare_missing
from data.tasks import KINDS
from experiments.board import (
    Board,
    as_list,
    check_name,
    claim_lines,
    count_tokens,
    format_report,
    parse_claim,
    plot_tables,
)
from model import GPT, POSITIONS
from nanolong.devices import pick_device
from nanolong.entry import load_entries
from nanolong.errors import UserError, check_choice, note, require, run_main
from nanolong.evaluation import comparison, provenance
from nanolong.evaluation.repeats import BUCKETS
from nanolong.run import is_evaluated, list_steps, lock, read_meta
from nanolong.strict_json import write_json

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path("out/experiments")

# The code that a training run depends on, and what an evaluation depends on besides.
TRAINING_CODE = ("model.py", "rope_scaling.py", "train.py", "extend.py", "data/*.py")
TRAINING_CODE += ("kernels/eager.py", "kernels/reference.py", "nanolong/optim.py")
EVALUATION_CODE = ("evaluate.py", "nanolong/evaluation/*.py")
MEASURING_CODE = ("experiments/tasks.py",)  # which others train with

# What an experiment's file may state.
DEFAULTS = {"TITLE": "", "ABOUT": "", "FLAGS": "", "ARMS": {}, "EVALUATE": {}, "TABLES": None}
DEFAULTS |= {"CLAIMS": "", "FINDING": "", "MEASURES": (), "BUDGETS": {"default": ""}}
DEFAULTS |= dict.fromkeys(("measure", "derive", "make_data", "notes", "plot"))


@dataclass
class RunConfig:
    budget: str = ""  # sizes, a key of the experiment's BUDGETS; default: its first
    arms: tuple[str, ...] = ()  # only these arms, and the arms of --entry
    seeds: tuple[int, ...] = (1, 2, 3)  # a run of each arm for each seed
    entry: tuple[str, ...] = ()  # files with a scheme of your own: an arm each, like the first arm
    dataset: str = "python"  # text for training and evaluation
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    out_dir: str = "out/experiments"  # folder for the report
    redraw: bool = False  # write the report from its JSON in out_dir; measure nothing


# -----------------------------------------------------------------------------
# An experiment


def load_experiment(name, cfg):
    """Read an experiment's file for one budget. Returns what it states, with defaults."""
    file = Path(name) if name.endswith(".py") else ROOT / "experiments" / f"{name}.py"
    if not file.is_file():
        check_choice(name, available(), "experiment", "choose from {}, or give a FILE.py")
    spec = importlib.util.spec_from_file_location(f"experiment_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{file} cannot be run ({reason}): correct it") from error
    if not hasattr(module, "ARMS"):
        raise UserError(f"{file} states no ARMS: add name -> commands (see docs/evaluation.md)")
    budgets = getattr(module, "BUDGETS", DEFAULTS["BUDGETS"])
    budget = cfg.budget or next(iter(budgets))
    check_choice(budget, budgets, "budget")
    for name in filter(str.isupper, vars(module)):
        similar = difflib.get_close_matches(name, DEFAULTS, 1, 0.8) or [name]
        require(similar == [name], f"{file} states {name}: did you mean {similar[0]}?")
    numbers = [word.split("=") for word in budgets[budget].split()]
    b = SimpleNamespace(**{name: json.loads(number) for name, number in numbers})
    b.budget = budget
    b.dataset = cfg.dataset
    b.data = str(CACHE / f"data-{file.stem}-{budget}-{Path(cfg.dataset).name}")

    experiment = SimpleNamespace(name=file.stem, file=file, b=b)
    for name, default in DEFAULTS.items():
        value = getattr(module, name, default)
        is_of_budget = name.isupper() and callable(value)
        setattr(experiment, name.lower(), value(b) if is_of_budget else value)
    experiment.about = experiment.about or (module.__doc__ or "").strip()
    experiment.arms = {name: as_list(commands) for name, commands in experiment.arms.items()}
    for arm in experiment.arms:
        check_name(arm)
    words = split(experiment.flags, *itertools.chain(*experiment.arms.values()))
    has_seed = any(word.partition("=")[0] == "--seed" for word in words)
    # one run would be counted several times
    require(not has_seed, f"{file} gives --seed: leave it to run.py's --seeds")
    if isinstance(experiment.claims, str):
        experiment.claims = experiment.claims.splitlines()
    experiment.claims = list(filter(None, experiment.claims))
    if not isinstance(experiment.evaluate, dict):
        calls = as_list(experiment.evaluate)
        experiment.evaluate = {" " * number: flags for number, flags in enumerate(calls)}
    return experiment


def available():
    """Return the names of the experiments in the folder of this file."""
    files = sorted((ROOT / "experiments").glob("*.py"))
    return [f.stem for f in files if re.search("^TITLE = ", f.read_text(), re.M)]


def choose_arms(experiment, cfg):
    """Return the arms to run: name -> commands. Raises UserError for an unknown name."""
    entries = load_entries(cfg.entry, POSITIONS)
    for name, file in zip(entries, cfg.entry, strict=True):
        first, *others = next(iter(experiment.arms.values())) or ["train"]
        words = [word for word in shlex.split(first) if not word.startswith("--pos=")]
        experiment.arms[name] = [shlex.join([*words, f"--entry={file}"]), *others]
    is_once = len({*cfg.seeds}) == len(cfg.seeds)
    require(is_once, "--seeds has one twice, and a run is measured once: name each once")
    for name in cfg.arms:
        check_choice(name, experiment.arms, "arm", "choose from {} (the names in ARMS)")
    chosen = [*cfg.arms, *entries] if cfg.arms else experiment.arms
    return {name: experiment.arms[name] for name in chosen}


def check_claims(experiment):
    """Raise UserError for a claim about an arm, a measure or a length that there is not."""
    lengths = dict.fromkeys([*experiment.measures, "seconds"])  # None: any length
    for label, flags in experiment.evaluate.items():
        for measure, found in measures_of(flags).items():
            lengths[f"{label} {measure}".strip()] = found
    for line in experiment.claims:
        if line.startswith("#"):
            continue
        claim = parse_claim(line)
        if claim.measure not in lengths:
            known = ", ".join(lengths)
            raise UserError(f"claim {line!r}: there is no measure {claim.measure!r}, but {known}")
        for _, arm, length in claim.terms:
            if arm not in experiment.arms and not experiment.derive:
                known = ", ".join(experiment.arms) or "none at all: give ARMS some"
                raise UserError(f"claim {line!r}: there is no arm {arm!r}, but {known}")
            measured_at = lengths[claim.measure]
            if measured_at and count_tokens(length, experiment.b) not in measured_at:
                raise UserError(f"claim {line!r}: {length} is not among --lengths: add it there")


def prepare_data(experiment):
    """Prepare a built-in dataset, and what the experiment makes of it, if either has changed."""
    b = experiment.b
    prepare_missing(b.dataset)
    if not experiment.make_data:
        return
    commands = " ".join(sum(experiment.arms.values(), []))
    files = [hash_file(word) for word in split(commands) if Path(word).is_file()]
    code = hash_code("data/*.py")
    source = " ".join([hash_data(b.dataset), hash_file(experiment.file), code, *files])
    made_from = Path(b.data) / "made_from.txt"
    if not made_from.is_file() or made_from.read_text() != source:
        shutil.rmtree(b.data, ignore_errors=True)
        experiment.make_data(b)
        made_from.write_text(source)


def measures_of(flags):
    """Return what a call of evaluate.py measures: measure -> lengths, [] for its default."""
    given = dict(word.partition("=")[::2] for word in split(flags))
    lengths = list(filter(None, given.get("--lengths", "").split(",")))
    if not all(map(str.isdigit, lengths)):
        raise UserError(f"--lengths={given['--lengths']} in EVALUATE: give numbers, as 64,256")
    lengths = [int(length) for length in lengths]
    task = given.get("--task", "loss")
    if task == "needle":
        names = [f"needle {number / 4:g}" for number in range(5)] + ["needle", "needle control"]
    elif task == "ruler":
        kinds = given.get("--ruler", ",".join(KINDS)).split(",")
        names = [f"{kind} {field}" for kind in kinds for field in ("accuracy", "nats", "gain")]
    else:
        names = given.get("--protocol", "chunked,last-quarter,token-aligned").split(",")
        if "repeats" in names:
            names.remove("repeats")
            names += [f"repeats {bucket}" for bucket in BUCKETS]
    return dict.fromkeys(names, lengths)


def split(*commands):
    """Return the words of a command, each flag as --name=value and once: the last one counts."""
    words = []
    for word in shlex.split(" ".join(commands)):
        last = words[-1] if words else ""
        if last.startswith("--") and "=" not in last and not word.startswith("--"):
            words[-1] = f"{last}={word}"
        else:
            words.append(word)
    names = [word.partition("=")[0] if word.startswith("--") else word for word in words]
    return list(dict(zip(names, words, strict=True)).values())


# -----------------------------------------------------------------------------
# What a command depends on


def hash_code(*patterns):
    """Hash the files of these patterns: after any change of one, runs are made again."""
    files = sorted(file for pattern in patterns for file in ROOT.glob(pattern))
    return hashlib.sha256(" ".join(map(hash_file, files)).encode()).hexdigest()


@functools.cache
def hash_file(file):
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


@functools.cache
def hash_data(name):
    return data.open_dataset(name).hash


def hash_words(words):
    """Hash the files and the datasets that the words of a command name."""
    found = []
    for word in words:
        name, _, value = word.rpartition("=")
        if name == "--dataset":
            found.append(hash_data(value))
        elif Path(value).is_file():
            found.append(hash_file(value))
        elif value and Path(value).is_dir():
            files = [(file.name, file.stat()) for file in sorted(Path(value).iterdir())]
            found += [[name, stat.st_size, stat.st_mtime] for name, stat in files]
    return found


# -----------------------------------------------------------------------------
# Runs


@dataclass
class Arm:
    """What measure() gets: an arm of one seed, after its commands."""

    name: str
    seed: int
    b: SimpleNamespace
    dataset: str
    device: torch.device
    folder: Path | None = None  # the run folder of the last command
    runs: dict = field(default_factory=dict)  # runs of the arms before it: name -> run folder
    seconds: float = 0.0  # processor seconds of the commands
    key: list = field(default_factory=list)  # what the run folder depends on
    entries: list = field(default_factory=list)  # --entry flags, for commands on the run folder

    def load(self):
        """Load the model, on the device."""
        load_entries([word.partition("=")[2] for word in self.entries], POSITIONS)
        return GPT.load(self.folder).to(self.device)


def call(script, words):
    """Run a script in this process, which saves the import of torch; its output is logged."""
    with open(CACHE / "log.txt", "a+", encoding="utf-8") as log:
        print(f"\n$ python {script}.py {shlex.join(words)}", file=log, flush=True)
        start = log.tell()
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            status = importlib.import_module(script).main(words)
        log.seek(start)
        lines = log.read().splitlines() or ["it failed"]
    if status:
        raise UserError(lines[-1].removeprefix("error: "))


class Runs:
    """Makes and measures arms, and keeps in the cache what their commands leave."""

    def __init__(self, experiment, cfg):
        self.experiment = experiment
        self.dataset = cfg.dataset
        self.device = pick_device(cfg.device)
        self.folders = {}  # seed -> arm -> run folder
        self.metas = {}  # arm -> meta of a run of it, the first
        self.weights = []  # [arm, seed, SHA-256 of the weights]
        self.commits = []  # commits of what is used, measured now or before
        CACHE.mkdir(parents=True, exist_ok=True)

    def cached(self, name, key, function, *args):
        """Return what function(folder, *args) has returned for this key, and its seconds.

        folder: of this key in the cache; what is stopped finds there how far it came.
        """
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        folder = CACHE / f"{name}-{digest}"
        file = folder / "done.json"
        if not file.is_file():
            start = time.process_time()
            found = {"value": function(folder, *args)}
            found["seconds"] = time.process_time() - start
            folder.mkdir(exist_ok=True)
            write_json(file, {**found, "commit": provenance.current_commit(), "key": repr(key)})
        found = json.loads(file.read_text(encoding="utf-8"))
        self.commits.append(found["commit"])
        return found["value"], found["seconds"]

    def make(self, arm, commands):
        """Run the commands of an arm, or what is left of them to run."""
        first = split(commands[0])
        arm.entries = [word for word in first if word.startswith("--entry=")]
        code = hash_code(*TRAINING_CODE)
        if arm.entries:  # because one may derive from another
            code += hash_code("examples/schemes/*.py")
        common = f"--seed={arm.seed} --device={self.device}"
        # Many runs of a minute: compiling takes longer on a CPU.
        if self.device.type == "cpu":
            common += " --compile=false"
        defaults = {
            "train": f"--eval_interval=1000000000 --dataset={self.dataset} {common} "
            + self.experiment.flags,
            "extend": f"{common} {shlex.join(arm.entries)}",
            "hf": "",
        }
        for command in commands:
            script, *words = split(command)
            if script not in defaults:
                raise UserError(f"{script!r} is no command of an arm: give train, extend or hf")
            words = split(defaults[script], shlex.join(words))
            arm.key = [arm.key, script, words, hash_words(words), code, torch.__version__]
            folder, seconds = self.cached(script, arm.key, run, script, arm.folder, words)
            arm.folder = Path(folder)
            arm.seconds += seconds

    def measure(self, name, commands, seed):
        """Make an arm and measure it. Returns its rows [arm, seed, measure, length, value]."""
        experiment = self.experiment
        arm = Arm(name, seed, experiment.b, self.dataset, self.device)
        folders = self.folders.setdefault(seed, {})
        arm.runs = dict(folders)
        rows = []
        if commands:
            self.make(arm, commands)
            folders[name] = arm.folder
            meta = read_meta(list_steps(arm.folder)[-1])
            self.metas.setdefault(name, meta)
            self.weights.append([name, seed, meta["checksums"]["model.safetensors"]])
        code = hash_code(*TRAINING_CODE, *EVALUATION_CODE)
        for label, flags in experiment.evaluate.items():
            words = split(flags, f"--device={self.device}", shlex.join(arm.entries))
            key = [arm.key, words, hash_words(words), code]
            found, _ = self.cached("evaluate", key, evaluate, arm.folder, words)
            rows += [[f"{label} {measure}".strip(), *others] for measure, *others in found]
        if experiment.measure:
            key = [arm.key, name, seed, vars(arm.b), hash_data(arm.dataset), code]
            key += [hash_file(experiment.file), hash_code(*MEASURING_CODE), arm.runs]
            found, _ = self.cached("measure", key, measure, experiment, arm)
            rows += found
        if commands:
            rows.append(["seconds", 0, arm.seconds])
        return [[name, seed, *row] for row in rows]


def run(folder, script, parent, words):
    """Run train.py, extend.py or hf.py to its end, and return the run folder as text."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock(folder))
        except UserError as error:
            advice = "the same command takes its result when that one has ended"
            raise UserError(f"another run.py makes this run, {folder}: {advice}") from error
        if script == "hf":
            shutil.rmtree(folder, ignore_errors=True)  # an import that was stopped
            call(script, [*words, str(folder)])
            return str(folder)
        paths = [str(parent)] if script == "extend" else []
        resume = ["--init_from=resume"] if list(folder.glob("step-*")) else []
        call(script, [*paths, *words, f"--out_dir={folder}", *resume])
    last = max(folder.glob("step-*"))
    meta = json.loads((last / "meta.json").read_text(encoding="utf-8"))
    settings = meta.get("train") or {}
    last_step = settings.get("stop_at") or settings.get("max_iters", 0)
    if meta["step"] < last_step or (last_step and not is_evaluated(folder, last_step)):
        raise KeyboardInterrupt  # a signal: the script has saved and returned
    return str(folder)


def evaluate(folder, run_folder, words):
    """Evaluate a run folder; what is stopped goes on, since evaluate.py does by its JSON.

    Returns rows [measure, length, value, hash of the scored token ids].
    """
    records = folder / "records.json"
    try:
        call("evaluate", [str(run_folder), *words, f"--json={records}"])
    except UserError as error:
        if not str(error).startswith("nothing could be measured"):  # then all rows say why
            raise
    rows = []
    needles = {}  # length -> of each depth the fraction found, without needles, and the hash
    for record in json.loads(records.read_text(encoding="utf-8")):
        length = record["length"]
        ids = record.get("ids", record.get("data_hash"))  # the parts of `position` have no ids
        if record.get("protocol") == "repeats":
            gain = "refused" if "refused" in record else record.get("gain", {}).get("mean")
            # a bucket without a target has none
            rows += [] if gain is None else [[f"repeats {record['bucket']}", length, gain, ids]]
        elif record["task"] == "loss":
            name = " ".join(map(str, [record["protocol"], *record.get("position", ())[:1]]))
            rows.append([name, length, record.get("loss", "refused"), ids])
        elif record["task"] == "needle":
            found = record["accuracy"]["mean"] if "accuracy" in record else "refused"
            rows.append([f"needle {record['depth']:g}", length, found, ids])
            if "accuracy" in record:
                needles.setdefault(length, []).append((found, record["control"]["mean"], ids))
        elif "refused" not in record:
            for name in ("accuracy", "nats", "gain"):
                rows.append([f"{record['kind']} {name}", length, record[name]["mean"], ids])
    for length, found in needles.items():
        with_needles, control, (ids, *_) = zip(*found, strict=True)
        rows.append(["needle", length, statistics.fmean(with_needles), ids])
        rows.append(["needle control", length, statistics.fmean(control), ids])
    return rows


def measure(_, experiment, arm):
    """Return what the experiment's own measure() finds, as rows."""
    with open(CACHE / "log.txt", "a", encoding="utf-8") as log:
        print(f"\n$ measure {arm.name}, seed {arm.seed}", file=log, flush=True)
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            found = experiment.measure(arm)
    places = [name if isinstance(name, tuple) else (name, 0) for name in found]
    return [[*place, value] for place, value in zip(places, found.values(), strict=True)]


def run_arms(experiment, arms, cfg):
    """Run all arms of all seeds. Returns the content of NAME.json."""
    runs = Runs(experiment, cfg)
    rows, failed = [], {}
    for seed in cfg.seeds:
        for number, (name, commands) in enumerate(arms.items(), 1):
            print(f"seed {seed}: {name} ({number} of {len(arms)})", flush=True)
            try:
                rows += runs.measure(name, commands, seed)
            except Exception as error:
                failed[name] = f"seed {seed}: {explain(error)}"
                print(f"{name} failed, {failed[name]}", file=sys.stderr)
    # the seeds of an arm have equal properties: one run stands for all
    models = {name: SimpleNamespace(meta=meta) for name, meta in runs.metas.items()}
    return {
        "command": shlex.join(["python", "experiments/run.py", *sys.argv[1:]]),
        "note": f"{provenance.provenance(runs.device, runs.commits)}; "
        f"{cfg.dataset} {hash_data(cfg.dataset)}",
        "budget": vars(experiment.b),
        "flags": experiment.flags,
        "arms": arms,
        "folders": {
            name: [str(f[name]) for f in runs.folders.values() if name in f] for name in models
        },
        "original_lengths": sorted({original_length(meta) for meta in runs.metas.values()}),
        "unequal": comparison.describe_unequal(models, {name: [name] for name in models}),
        "failed": failed,
        "weights": runs.weights,
        "rows": rows,
    }


def original_length(meta):
    config = meta["config"]
    return (config.get("extension") or {}).get("original_length", config["block_size"])


def note_replaced(file, saved):
    """Say which other report this one takes the place of."""
    if file.is_file():
        command = json.loads(file.read_text(encoding="utf-8"))["command"]
        if command != saved["command"]:
            note(f"{file} came from `{command}`, which writes it again from the runs it kept")


def explain(error):
    """Return why an arm failed, as one line; the traceback of a fault in the code is logged."""
    if isinstance(error, UserError):
        return str(error)
    with open(CACHE / "log.txt", "a", encoding="utf-8") as log:
        traceback.print_exception(error, file=log)
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line} (more in {CACHE}/log.txt)"


# -----------------------------------------------------------------------------


def main(argv=None):
    args = settings.parse(cfg=RunConfig, paths="the experiment", argv=argv)
    cfg = args.cfg
    if len(args.paths) != 1:
        raise UserError(f"name one experiment: {', '.join(available())}, or a FILE.py")
    file = Path(cfg.out_dir) / f"{Path(args.paths[0]).stem}.json"
    if cfg.redraw:
        if not file.is_file():
            raise UserError(f"--redraw needs {file}, which is not there: measure first, without it")
        cfg.budget = json.loads(file.read_text(encoding="utf-8"))["budget"]["budget"]
    experiment = load_experiment(args.paths[0], cfg)
    if not cfg.redraw:
        arms = choose_arms(experiment, cfg)
        check_claims(experiment)
        prepare_data(experiment)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            saved = run_arms(experiment, arms, cfg)
        except KeyboardInterrupt:
            print("stopped: the same command goes on from here", file=sys.stderr)
            raise
        note_replaced(file, saved)
        write_json(file, saved)
    saved = json.loads(file.read_text(encoding="utf-8"))
    units = experiment.measures if isinstance(experiment.measures, dict) else {}
    board = Board(saved, experiment.derive, units)
    if not cfg.redraw:
        claims = claim_lines(experiment, board)
        write_json(file, {**saved, "claims": [x for x in claims if x.startswith("- ")]})
    text = "\n".join(format_report(experiment, board)) + "\n"
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print("\n" + re.sub(r"^!.*\n\n?", "", text, flags=re.M))  # a terminal shows no figure
    if experiment.plot:
        experiment.plot(board, file.with_suffix(".png"))
    else:
        plot_tables(experiment.tables, board, file.with_suffix(".png"), experiment.finding)
    return 1 if board.failed else 0


if __name__ == "__main__":
    run_main(main)
