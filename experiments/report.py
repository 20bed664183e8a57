"""What the experiments share: settings, trained models, a report with its JSON, claims, figures.

A script states a dataclass based on Experiment, and has three functions: measure(cfg) returns a
board, the dict that becomes NAME.json; report(board) returns the lines of NAME.md; and plot(board,
folder) writes figures. make_main() does the rest, also with --redraw.
"""

import ast
import functools
import hashlib
import inspect
import itertools
import json
import math
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch

import data
from data.prepare import prepare_missing
from evaluate import EvaluateConfig, measure_losses
from kernels.definition import dump_code
from model import GPT, POSITIONS, GPTConfig
from nanolong import cli
from nanolong.curves import import_pyplot
from nanolong.devices import autocast, pick_device, pick_dtype, synchronize
from nanolong.entry import entry_hash
from nanolong.optim import update_weights
from nanolong.provenance import current_commit, provenance
from nanolong.run.folder import list_steps
from nanolong.strict_json import to_json, write_json
from nanolong.validate import require
from train import train

ROOT = Path(__file__).resolve().parent.parent

# -----------------------------------------------------------------------------
# An experiment

# of settings that must not be empty
EXAMPLES = {
    "seeds": "1,2,3",
    "pos": "nope,rope",
    "schemes": "xl,rope",
    "objectives": "causal,masked",
    "tables": "length,size",
    "datasets": "python",
}


@dataclass
class Experiment:
    """The settings of all experiments. The budget, a key of BUDGETS, is stated by each."""

    runs: str = ""  # folder for the runs and what was measured on them; default: out/NAME
    out_dir: str = ""  # folder for the report; default: out/NAME
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    redraw: bool = False  # write the report from its JSON in out_dir; measure nothing

    name = ""  # of the report; default: that of the file

    def __post_init__(self):
        name = self.report_name()
        self.runs = self.runs or f"out/{name}"
        self.out_dir = self.out_dir or f"out/{name}"
        for setting, example in EXAMPLES.items():
            given = getattr(self, setting, None) != ()
            require(given, f"{setting} is empty: give some, as in --{setting}={example}")
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, tuple):
                setattr(self, field.name, tuple(dict.fromkeys(given)))  # each of them once
        seeds = getattr(self, "seeds", 1)
        if isinstance(seeds, int):
            require(seeds >= 1, f"seeds={seeds} is too small: give at least 1")
        else:
            require(min(seeds) >= 0, f"seed {min(seeds)} is negative: give 0 or more")
        steps = getattr(self, "steps", 0)
        require(steps >= 0, f"steps={steps} is negative: give 0 for the budget's own")
        check_names("position scheme", getattr(self, "pos", ()), POSITIONS)

    @classmethod
    def script(cls):
        return Path(inspect.getfile(cls)).resolve().relative_to(ROOT).as_posix()

    @classmethod
    def report_name(cls):
        return cls.name or Path(cls.script()).stem

    def pick_device(self):
        """The device, and the dtype of matrix products on it."""
        device = pick_device(self.device)
        return device, pick_dtype(self.dtype, device)


@dataclass
class TextExperiment(Experiment):
    """An experiment on a text."""

    dataset: str = "python"  # text for training and evaluation

    def load_dataset(self):
        prepare_missing(self.dataset)
        return data.Dataset(self.dataset)

    def run_folder(self):
        """The folder of the runs with this budget and text."""
        return Path(self.runs) / f"{self.budget}-{Path(self.dataset).name}"

    def note(self, dataset, commits=()):
        """Where and on what an experiment was made, as a line of text."""
        where = provenance(pick_device(self.device), commits)
        return f"{where}; {self.dataset} {dataset.hash}"


def check_names(kind, names, known):
    """Raise UserError unless all of these names are known."""
    for name in names:
        require(name in known, f"there is no {kind} {name!r}: choose from {', '.join(known)}")


def make_main(settings, measure, report, plot=None):
    """Return the main() of a script; the arguments are those of run_experiment()."""
    return functools.partial(run_experiment, settings, measure, report, plot)


def run_experiment(settings, measure, report, plot=None):
    """Run a script: measure, or read what was measured, and write NAME.json, NAME.md and figures.

    settings: the class based on Experiment.
    """
    cfg = cli.parse(cfg=settings, about=sys.modules[settings.__module__].__doc__).cfg
    folder = Path(cfg.out_dir)
    file = folder / f"{cfg.report_name()}.json"
    if cfg.redraw:
        board = load_board(file)
    else:
        board = {"command": command_line(cfg.script()), **measure(cfg)}
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, board, indent=1)
        board = as_in_json(board)
    text = "\n".join(report(board)) + "\n"
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    print("\n" + text)
    if plot:
        plot(board, folder)
    return 0


class Measurements:
    """Named measurements, in a JSON file that is written after each of them.

    Each has a value, the seconds that it took and the commit of the code. key: what they were made
    with. Raises UserError for a file with another key.
    """

    def __init__(self, file, key):
        self.file = file
        key = as_in_json(key)
        self.measured = {"key": key, "values": {}, "seconds": {}, "commits": {}}
        if file.is_file():
            self.measured = read_json(file)
        require(
            self.measured["key"] == key,
            f"{file} was made with other settings, data, device or version: remove it, or choose "
            "another --runs",
        )

    def measure(self, name, function, *args, **options):
        """Return the measurement of this name; what was not measured yet is function(...)."""
        values = self.measured["values"]
        if name not in values:
            start = time.perf_counter()
            value = function(*args, **options)
            seconds = time.perf_counter() - start
            self.measured["seconds"][name] = seconds
            self.measured["commits"][name] = current_commit()
            values[name] = as_in_json(value)
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.file, self.measured)
            print(f"{self.file.parent.name}: {name}, {seconds:.0f} s", flush=True)
        return values[name]

    def seconds(self):
        return sum(self.measured["seconds"].values())

    def commits(self):
        return list(self.measured["commits"].values())


def measure_run(file, key, function, *args):
    """Return what function(*args) measures, or what it has left in the file of its run."""
    return Measurements(file, key).measure(file.stem, function, *args)


class SeedRun(Measurements):
    """The models of one seed and what has been measured on them, kept in measured.json.

    folder: of both. key: what the measurements are made with, besides budget, data and device.
    """

    def __init__(self, cfg, seed, dataset, budget, folder, **key):
        self.cfg = cfg
        self.seed = seed
        self.dataset = dataset
        self.budget = budget
        self.folder = folder
        self.device, self.dtype = cfg.pick_device()
        key |= {
            "budget": budget,
            "data": dataset.hash,
            "dtype": str(self.dtype),
            "device": self.device.type,
        }
        super().__init__(folder / "measured.json", key)

    def train_settings(self, name, max_iters, **changes):
        """Return the settings of TrainConfig of a run of this name, which is evaluated once."""
        settings = {
            # Each name has a run of its own, which goes on if it was stopped.
            "dataset": self.cfg.dataset,
            "out_dir": str(self.folder / name),
            "seed": self.seed,
            "max_iters": max_iters,
            "warmup_iters": min(50, max_iters // 4),
            "learning_rate": 3e-3,
            # What counts is measured after training.
            "eval_interval": 10**9,
            "eval_iters": 1,
            "device": self.cfg.device,
            "dtype": self.cfg.dtype,
            "compile": False if self.device.type == "cpu" else None,
        }
        return settings | changes


def commits_of(runs):
    return [commit for run in runs for commit in run.commits()]


def effort(runs):
    """Return how many seeds and minutes SeedRuns have taken, as text."""
    seeds = count(len({run.seed for run in runs}), "seed")
    minutes = count(math.ceil(sum(run.seconds() for run in runs) / 60), "minute")
    return f"{seeds}, {minutes} over all processes"


def run_all(runs, function, *others):
    """Call function(*run, *others) for each run, and say which one it is; return all records."""
    records = []
    for number, run in enumerate(runs, 1):
        name = ", ".join(map(str, run))
        print(f"\n== {name} ({number} of {len(runs)})", flush=True)
        records += function(*run, *others)
    return records


def train_or_stop(model, train_config, *options):
    """Train a model by train.py; a signal that stops it stops the experiment."""
    result = train(model, train_config, *options)
    if result["stopped"]:
        raise KeyboardInterrupt
    return result


def train_model(settings, train_config, dataset):
    """Train a model, or what is left of it to train, in train_config.out_dir; return it.

    settings: of GPTConfig, without vocab_size.
    """
    if list_steps(train_config.out_dir):
        model = GPT.load(train_config.out_dir)
        train_config.init_from = "resume"
    else:
        torch.manual_seed(train_config.seed)
        model = GPT(GPTConfig(**settings, vocab_size=dataset.vocab_size))
    if model.meta.get("step") != train_config.max_iters:
        train_or_stop(model, train_config)
    model.meta["bos"] = dataset.bos  # a model that was not loaded does not know it
    return model


def train_step(model, batch, run_on, optimizers, learning_rate, max_norm=1.0, **options):
    """Take a training step of a GPT on a batch of inputs and targets; return its loss.

    run_on: device and dtype of matrix products; options: of GPT.forward().
    """
    device, dtype = run_on
    # Forward, backward and update.
    x, y = (part.to(device) for part in batch)
    with autocast(device, dtype):
        loss = model(x, y, **options)
    loss.backward()
    update_weights(model, optimizers, learning_rate, max_norm)
    return loss.detach()


def train_on_samples(model, make_batch, steps, learning_rate, warmup, run_on, weight_decay=0.01):
    """Train a GPT in place on make_batch(step), inputs and targets; return the loss of each step.

    The learning rate rises over `warmup` steps and falls linearly over the last fifth.
    """
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay
    )
    losses = []
    for step in range(steps):
        rate = learning_rate * min(1, (step + 1) / warmup, (steps - step) / (0.2 * steps))
        losses.append(train_step(model, make_batch(step), run_on, [optimizer], rate))
    model.eval()
    return torch.stack(losses)


def score_losses(name, model, cfg, lengths, protocols, max_tokens, dataset=""):
    """Return evaluate.py's records of a model's loss at each length by each protocol."""
    settings = EvaluateConfig(
        dataset=dataset or cfg.dataset, max_tokens=max_tokens, dtype=cfg.dtype, protocol=protocols
    )
    records = measure_losses({name: model}, settings, lengths)
    for record in records:
        record.pop("by_sequence", None)  # the intervals are over seeds, and these are many
    return records


def count_parameters(settings, vocab_size):
    """Count the parameters of a model with these settings of GPTConfig."""
    model = GPT(GPTConfig(**settings, vocab_size=vocab_size))
    return sum(p.numel() for p in model.parameters())


def time_in_turns(functions, rounds, device):
    """Time functions, all of them in turn in every round; return name -> seconds of each round.

    functions: name -> function. A first round, which warms up, is not counted.
    """
    seconds = {name: [] for name in functions}
    for _ in range(rounds + 1):
        for name, function in functions.items():
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start)
    return {name: times[1:] for name, times in seconds.items()}


# -----------------------------------------------------------------------------
# Intervals and claims

# Student's t, two-sided 95 %, of 1 degree of freedom and more; of yet more it is taken as 2.
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def confidence_interval(values):
    """Return the mean and the half-width of its 95 % interval (nan for a single value)."""
    n = len(values)
    mean = statistics.fmean(values)
    if n == 1:
        return mean, math.nan
    t = T95[n - 2] if n - 2 < len(T95) else 2.0
    return mean, t * statistics.stdev(values) / math.sqrt(n)


def format_interval(values, digits=3):
    """Return the mean and its 95 % interval as text, "1.235 ± 0.017"; of one value, the value."""
    mean, half_width = confidence_interval(list(values))
    if math.isnan(half_width):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ± {half_width:.{digits}f}"


RULE = (
    "A claim passes when its whole 95 % interval does. It is not separated from its bound when the "
    "interval includes the bound, contradicted when the whole interval lies on the other side of "
    "the bound and of zero, and too small when it lies on the other side of the bound alone."
)


@dataclass
class Claim:
    """A prediction: the whole 95 % interval of a measured mean lies above, or below, a bound."""

    text: str
    mean: float
    half_width: float
    above: float | None = None
    below: float | None = None

    @property
    def margin(self):
        """How far the mean lies on the predicted side of the bound."""
        return self.mean - self.above if self.below is None else self.below - self.mean

    @property
    def passed(self):
        return self.margin > self.half_width  # False if the half-width is nan

    def verdict(self):
        """Return "pass", or "FAIL" and why, in the words of RULE."""
        if self.passed:
            return "pass"
        if math.isnan(self.half_width):
            return "FAIL (a single seed has no interval)"
        if self.margin >= -self.half_width:
            return "FAIL (not separated)"
        return "FAIL (contradicted)" if self.is_contradicted else "FAIL (too small)"

    @property
    def is_contradicted(self):
        """Whether the whole interval lies on the other side of the bound and of zero."""
        if self.below is None:
            return self.mean + self.half_width < min(self.above, 0)
        return self.mean - self.half_width > max(self.below, 0)

    @property
    def bound(self):
        return f"< {self.below:.4g}" if self.above is None else f"> {self.above:.4g}"

    @property
    def measured(self):
        if self.half_width > 0:
            return f"{self.mean:+.3f} ± {self.half_width:.3f}"
        return f"{self.mean:+.3f}"  # a single number, without an interval

    def __str__(self):
        return f"{self.text}: {self.measured}, {self.bound}: {self.verdict()}"


def paired_claim(text, a, b, above=None, below=None):
    """Claim that a minus b, values by seed, lies above, or below, a bound; None without values."""
    differences = [value - b[seed] for seed, value in a.items() if seed in b]
    if not differences:
        return None
    return Claim(text, *confidence_interval(differences), above, below)


# -----------------------------------------------------------------------------
# Reports


def select(records, **wanted):
    """Return the records whose values equal the wanted ones."""
    return [r for r in records if all(r.get(key) == value for key, value in wanted.items())]


def by_seed(records, measure, **wanted):
    """Return seed -> a measure of the record with the wanted values."""
    return {record["seed"]: record[measure] for record in select(records, **wanted)}


def title(board, text, end="."):
    """Return the first lines of a report."""
    return [f"# {text}", "", f"`{board['command']}`: {board['note']}{end}"]


def section(heading, *parts):
    """Return a heading and what stands below it: paragraphs, or lists of lines."""
    lines = ["", f"## {heading}"]
    for part in parts:
        lines += ["", *([part] if isinstance(part, str) else part)]
    return lines


def claim_lines(claims):
    return [f"- {claim}" for claim in claims]


def topic_lines(topics):
    """Return the lines of claims by topic, below the first heading."""
    lines = []
    for topic, claims in topics.items():
        lines += [f"### {topic}", "", *claim_lines(claims), ""]
    return lines[:-1]


def not_judged(steps):
    return f"Not judged: models trained for {steps} steps say nothing about them."


def format_settings(settings):
    """Return settings as text: n_layer=4, n_head=4."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def markdown_table(header, rows):
    """Return a Markdown table as a list of lines; header and rows are lists of cells."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return lines


def text_table(header, rows):
    """Return a table as lines of text: the first column on the left, all others on the right."""
    columns = list(itertools.zip_longest(header, *rows, fillvalue=""))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for first, *cells in zip(*columns, strict=True):
        line = first.ljust(max(10, widths[0]))
        for cell, width in zip(cells, widths[1:], strict=True):
            line += "  " + cell.rjust(width)
        lines.append(line.rstrip())
    return lines


def grid(names, columns, cell):
    """Return a Markdown table of cell(name, column): a line per name.

    columns: title -> what cell() gets.
    """
    rows = [[name, *(cell(name, column) for column in columns.values())] for name in names]
    return markdown_table(["", *columns], rows)


def count(n, noun):
    """Return "1 seed" or "3 seeds"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def command_line(script):
    """Return the command that started this script."""
    return " ".join(["python", script, *sys.argv[1:]])


def read_json(file):
    return json.loads(file.read_text(encoding="utf-8"))


def as_in_json(value):
    """Return a value as a JSON file has it, in which a number that is not finite is null."""
    return json.loads(to_json(value))


def load_board(file):
    """Return what an experiment measured, for --redraw. Raises UserError if it is not there."""
    require(
        file.is_file(), f"--redraw needs {file}, which does not exist: measure first, without it"
    )
    return read_json(file)


# -----------------------------------------------------------------------------
# Figures


def save_figure(file, draw, size, note="", panels=(1, 1), dpi=120, **options):
    """Let draw(figure, *axes) fill the panels of a figure, and write it as a PNG.

    panels: rows and columns; options: of pyplot.subplots(). Returns whether it is written, which
    needs matplotlib.
    """
    plt = import_pyplot(file)
    if plt is None:
        return False
    figure, axes = plt.subplots(
        *panels, figsize=size, squeeze=False, layout="constrained", **options
    )
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    draw(figure, *axes.flat)
    figure.supxlabel(note, fontsize=7, color="gray")
    figure.savefig(file, dpi=dpi)
    plt.close(figure)
    print(f"wrote {file}")
    return True


def line_style(i):
    """Colour and marker of the i-th line."""
    return {"color": f"C{i % 10}", "marker": "osD^vP*X"[i % 8], "markersize": 4}


def length_axis(axis, lengths, label="context length in tokens"):
    """Make x a logarithmic axis of context lengths."""
    axis.set(xscale="log", xlabel=label)
    axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axis.minorticks_off()


def hash_code(objects):
    """
    Hash the code of classes and functions, of what they inherit, and of what they name of their
    own modules. Of a class from --entry it is the whole file.
    """
    found = {}
    for item in objects:
        _collect(item, found)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name}: {found[name]}\n".encode())
    return digest.hexdigest()


def _collect(item, found):
    """Put the code of a class or function, and of what it uses, into `found`, by name."""
    key = f"{item.__module__}.{item.__qualname__}"
    if key in found or item.__module__.partition(".")[0] in ("torch", "builtins"):
        return
    found[key] = entry_hash(item)
    for base in getattr(item, "__bases__", ()):
        _collect(base, found)
    if found[key] is not None:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(item)))
    found[key] = dump_code(tree)
    module = vars(inspect.getmodule(item))
    for node in ast.walk(tree):
        used = module.get(node.id) if isinstance(node, ast.Name) else None
        is_code = inspect.isfunction(used) or inspect.isclass(used)
        if is_code and used.__module__ == item.__module__:
            _collect(used, found)
