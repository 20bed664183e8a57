"""Measure checkpoints: loss by context length and by position, retrieval, and cost.

    python evaluate.py out/rope out/rope-yarn4 --report=out/report.html
    python evaluate.py out/rope out/rope-yarn4 --lengths=256,512,1024 --plot=out/length.png
    python evaluate.py RoPE=out/r1,out/r2,out/r3 ALiBi=out/a1,out/a2,out/a3
    python evaluate.py out/smollm2 --text=book.txt --lengths=2048,8192 --cost=true
    python evaluate.py out/rope out/rope-yarn4 --task=ruler --ruler=niah,nth

--task=loss scores validation text, in nats per token, by these protocols:

  chunked        Cut the text into sequences of each length that do not overlap and score every
                 token. Part of what a longer context gains is that fewer tokens have a short one.
  last-quarter   The same sequences, but score only the last quarter of each. This shows failures
                 beyond the original context length that the mean over whole sequences hides.
  position       The same sequences, with one loss for each of 16 equal parts of a sequence.
  sliding        Let sequences overlap: each starts --stride tokens after the one before it, and
                 only its last --stride tokens are scored (of the first of a file, all).
  token-aligned  Score the same tokens at every length: sequences of all lengths end at the same
                 places, and only their last --stride tokens are scored. This answers whether
                 more context helps.
  repeats        Group tokens by the last occurrence of their trigram: in the shortest context
                 (near), in the longer one only (far: a distant repeat), or nowhere in the document
                 (new). A gain on distant repeats shows that the longer context is used. A sentence
                 says so for each checkpoint.
                 The default stride, half the shortest length, scores as many tokens as possible.
                 Intervals are over documents, or over places in fewer than 8 documents.

The text is --text=FILE (a text or rows of JSON), or the validation text of --dataset, by default of
the dataset that a checkpoint was trained on. At most --max_tokens of it are scored, in sequences of
the longest length, evenly spaced over all files, as in train.py. Shorter sequences lie inside these
sequences, so that all lengths score the same text (token-aligned: the same tokens). A mean is over
all scored tokens. Its 95 % interval is over sequences, by Student's t, and needs 5 of them.

An asterisk marks a loss that differs from the first checkpoint's on the same sequences. The lines
below the tables name what else is unequal (steps, trained tokens, data, unfinished runs). Losses of
different token ids are not compared; the table in bits per byte compares such checkpoints.
NAME=A,B,C are runs of one model that differ in their seed: the interval is over the runs, whose
weights must differ. Two such groups are compared by the differences of their runs in this order.

--task=needle hides a value in filler text, at a depth from 0 (the start) to 1 (the end), and asks
for it at the end of the prompt. --task=ruler does so for tasks after RULER (2404.06654):
one value (niah), one of several (multikey), the n-th or the last of several values of one key (nth,
last), which only their order tells. An answer is right if each of its tokens has the highest
probability given those before it (teacher forcing). Its loss, and its difference to the loss of
the same prompt without needles (the gain), separate models that are never right. Prompts depend on
the seed, the task and the length only. Small models know their format only from training on a
dataset of data/prepare.py --task=niah:1.
Scores are not those that are published for RULER.
"""

from nanolong import settings  # isort: skip (first: it refuses an old Python)
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kernels import check
from model import GPT, POSITIONS
from nanolong import devices, entry
from nanolong.errors import note, require, run_main
from nanolong.evaluation import (
    comparison,
    cost,
    figures,
    log,
    provenance,
    report,
    retrieval,
    scoring,
    tables,
)

Task = Literal["loss", "needle", "ruler"]
Protocol = Literal["chunked", "last-quarter", "position", "sliding", "token-aligned", "repeats"]
RulerTask = Literal["niah", "multikey", "nth", "last"]


@dataclass
class EvaluateConfig:
    # [measurement]
    task: tuple[Task, ...] = ("loss",)  # measurements
    # context lengths in tokens; default: 1, 2, 4 and 8 times the shortest original context length
    lengths: tuple[int, ...] = ()
    cost: bool = False  # also the seconds of prefill, tokens/s of decoding, and megabytes of cache
    seed: int = 1  # seed of the prompts
    # Python files, each with one scheme of your own, for checkpoints that were trained with it
    entry: tuple[str, ...] = ()
    best: bool = False  # use the step with the lowest validation loss of a run folder
    # [loss]
    # how to score, see above; a single length has no token-aligned by default
    protocol: tuple[Protocol, ...] = ("chunked", "last-quarter", "token-aligned")
    # scored tokens at the end of a sequence, for sliding, token-aligned and repeats; the last two
    # take at most half the shortest length. 0: 256, for repeats half the shortest length
    stride: int = 0
    max_tokens: int = 65536  # tokens of the validation text that are scored, spread over its files
    dataset: str = ""  # default: the one that each checkpoint was trained on
    text: str = ""  # score this text file, in the tokens of each checkpoint, and no dataset
    # [needle, ruler]
    depths: int = 5  # needle: number of depths, from the start to the end
    # ruler: the tasks
    ruler: tuple[RulerTask, ...] = ("niah", "multikey", "nth", "last")
    # prompts for each length and depth, or each length and task; 0: 64, for ruler 20
    trials: int = 0
    # [output]
    plot: str = ""  # write a figure to this PNG file, with SVG and PDF (needs matplotlib)
    report: str = ""  # write a page with everything measured to this HTML file
    curves: str = ""  # only plot the training curves of run folders to this PNG file
    # write the records to this file as they come, with the step folder, dtype, device, data and
    # commit; a loss that is not finite is null. The same command, after a stop, reuses them
    json: str = ""
    # [system]
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # dtype of the weights in memory; auto: as stored if --dtype is bfloat16, else float32
    weights: Literal["auto", "float32", "bfloat16"] = "auto"


# Settings of a task, or of two.
OF_TASK = dict.fromkeys(("protocol", "stride", "max_tokens", "dataset", "text"), ["loss"])
OF_TASK |= {"depths": ["needle"], "ruler": ["ruler"]}
OF_TASK |= dict.fromkeys(("trials", "seed"), ["needle", "ruler"])


def check_settings(cfg):
    """Refuse settings that measure nothing. Raises UserError."""
    require(not (cfg.text and cfg.dataset), "--text and --dataset both name a text: give one")
    for name, ending in (("plot", ".png"), ("curves", ".png"), ("report", ".html")):
        file = getattr(cfg, name)
        require(not file or file.endswith(ending), f"--{name}={file}: end it in {ending}")
    measures = cfg.plot or cfg.json or cfg.report
    problem = "--curves plots logs and measures nothing: leave --plot, --json and --report out"
    require(not (cfg.curves and measures), problem)
    some = cfg.task and cfg.protocol and cfg.ruler
    require(some, "--task, --protocol and --ruler are lists: name one at least")
    for name in ("max_tokens", "depths"):
        require(getattr(cfg, name), f"--{name} must be at least 1")
    require(0 not in cfg.lengths, "--lengths must be at least 1")


def choose_measurements(cfg, given, models):
    """Set the lengths and protocols that are not given.

    Raises UserError for a setting of a task that is not measured.
    """
    if not cfg.lengths:
        shortest = min(model.config.original_length for model in models.values())
        cfg.lengths = tuple(shortest * factor for factor in (1, 2, 4, 8))
    if "protocol" not in given and cfg.report:  # it shares the forward passes of chunked
        cfg.protocol += ("position",)
    if "protocol" not in given and len(cfg.lengths) == 1:  # there is nothing to align
        cfg.protocol = tuple(word for word in cfg.protocol if word != "token-aligned")
    is_compared = len(set(cfg.lengths)) > 1 or "repeats" not in cfg.protocol
    require(is_compared, "--protocol=repeats compares contexts: give --lengths two or more")
    for name in sorted(given & OF_TASK.keys()):
        problem = f"--{name} needs --task={' or '.join(OF_TASK[name])}, which is not measured"
        require(set(OF_TASK[name]) & set(cfg.task), f"{problem}: leave it out, or name the task")


def name_arms(paths):
    """Return the arms of FOLDER, NAME=FOLDER or NAME=A,B,C: name -> run name -> folder."""
    require(paths, "no checkpoint: give at least one run folder (python evaluate.py out/NAME)")
    arms = {}
    for path in paths:
        name, _, folder = path.partition("=")
        if Path(path).exists() or not folder:
            name = folder = path.rstrip("/")
        folders = [folder] if Path(folder).exists() else folder.split(",")
        require(name.isprintable(), f"{path!r} cannot be printed: give NAME=FOLDER")
        arms[name] = {f"{name}/{i}": folder for i, folder in enumerate(folders, 1)}
        if len(folders) == 1:
            arms[name] = {name: folder}
    require(len(arms) == len(paths), "two checkpoints have the same name: give NAME=FOLDER")
    return arms


def open_models(cfg, folders):
    """Load runs by name: name -> GPT, their device, and the dtype of matrix products."""
    device = devices.pick_device(cfg.device)
    entry.load_entries(cfg.entry, POSITIONS)
    weights = devices.weights_to_load(cfg.weights)
    dtype = devices.pick_dtype(cfg.dtype, device)
    models = {}
    for name, folder in folders.items():
        model = models[name] = GPT.load(folder, cfg.best, weights).to(device)
        devices.set_weights_dtype(model, cfg.weights, dtype)
        check.choose_kernels(model, device, dtype)
    return models, device, dtype


def check_writable(file):
    """Raise OSError if a file cannot be written: before the work, not after it."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    open(path, "ab").close()
    if not existed:
        path.resolve().unlink()  # the target of a link


def plan(models, cfg, texts):
    """Return the cells to measure, of all tasks."""
    cells = []
    for task in cfg.task:
        if task == "loss":
            cells += scoring.plan_losses(models, cfg, texts)
        else:
            cells += retrieval.plan_retrieval(task, models, cfg)
    if cfg.cost:
        cells += cost.plan_costs(models, cfg)
    return cells


def measure_logged(models, cfg, texts, dtype, file):
    """Measure the records that the file does not hold yet. Returns all records."""
    cells = plan(models, cfg, texts)
    code = entry.hash_sources(cfg.entry)
    device = devices.device_name(devices.pick_device(cfg.device))
    fields = {"dtype": str(dtype).removeprefix("torch."), "device": device}
    fields["commit"] = provenance.current_commit()
    origins = {name: {"folder": str(model.folder), **fields} for name, model in models.items()}
    for name, text in texts.items():
        origins[name]["data_hash"] = text.hash
    return log.measure(cells, models, origins, [code], file)


def evaluate(cfg, given, paths):
    """Run the measurements. Returns the exit status."""
    check_settings(cfg)
    arms = name_arms(paths)
    folders = {name: folder for runs in arms.values() for name, folder in runs.items()}
    if cfg.curves:
        check_writable(cfg.curves)
        return 0 if figures.plot_curves(folders, cfg.curves) else 1
    models, device, dtype = open_models(cfg, folders)
    comparison.check_runs(models, arms)
    choose_measurements(cfg, given, models)
    for file in filter(None, (cfg.plot, cfg.json, cfg.report)):
        check_writable(file)
    texts = scoring.open_texts(models, cfg) if "loss" in cfg.task else {}
    scored = scoring.describe_scored(texts, cfg.lengths, cfg.max_tokens)
    for line in scored:
        print(f"scored: {line}", flush=True)

    records = measure_logged(models, cfg, texts, dtype, cfg.json)
    bits = comparison.over_seeds(scoring.in_bits_per_byte(records), arms)
    shown = comparison.over_seeds(records, arms)
    comparison.compare(shown, list(arms))
    if cfg.json:
        log.write_lines(
            Path(cfg.json), [*records, *(record for record in shown if "seeds" in record)]
        )
    unequal = comparison.describe_unequal(models, arms)
    others = comparison.describe_other_tokens(records, texts, cfg.max_tokens)
    unequal += others
    print_tables(shown, bits, unequal)
    if cfg.json:
        print(f"wrote {cfg.json}")
    lengths = sorted({model.config.original_length for model in models.values()})
    if cfg.plot:
        below = "; ".join([*scored, *unequal])
        plot_records(cfg.plot, bits if others else shown, lengths, below, bool(others))
    if cfg.report:
        facts = {name: provenance.describe_checkpoint(model) for name, model in models.items()}
        coloured = {
            name: scoring.text_losses(models[name], text, cfg) for name, text in texts.items()
        }
        source = "; ".join([f"{provenance.provenance(device)}, {dtype}", *scored])
        report.write_report(cfg.report, facts, lengths, shown, coloured, unequal, source)
        print(f"wrote {cfg.report}")
    refused = [record["refused"] for record in shown if "refused" in record]
    require(len(refused) < len(shown), f"nothing could be measured: {''.join(refused[:1])}")


def print_tables(records, bits, unequal):
    """Print the tables of all records, and in bits per byte if these say something else."""
    found = tables.tables_of(records, unequal)
    if bits:
        found.append(tables.loss_table(bits, "bits per byte"))
    # What is true of several tables is said once, below all.
    counts = Counter(note for table in found for note in table.notes)
    shared = [line for line, n in counts.items() if n > 1 and line not in unequal]
    below = [*shared, *unequal, *tables.refusals(records)]
    for table in found:
        own = [line for line in table.notes if line not in below]
        print(f"\n{replace(table, notes=own).text()}")
    print()
    for line in below:
        print(line)


def plot_records(file, records, original_lengths, below, in_bits):
    """Write the figure of the losses, or if there are none of retrieval."""
    losses = tables.select(records, task="loss")
    retrieved = [record for record in records if "kind" in record]
    trained_at = " or ".join(f"{length:,}" for length in original_lengths)
    title = f"Trained at {trained_at} tokens"
    figure = None
    if losses:
        unit = "bits per byte" if in_bits else "nats per token"
        figure = figures.loss_figure(file, losses, original_lengths, below, unit)
    elif retrieved:
        figure = figures.heatmap_figure(file, retrieved, title, below)
    else:
        note(f"{file} is not written: nothing that was measured can be plotted")
    if figure is not None:
        figures.save(figure, file)


def main(argv=None):
    args = settings.parse(
        cfg=EvaluateConfig,
        paths="run or step folders; NAME=FOLDER names one, NAME=A,B,C are runs with other seeds",
        argv=argv,
    )
    return evaluate(args.cfg, args.given, args.paths)


if __name__ == "__main__":
    run_main(main)
