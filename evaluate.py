"""Measure checkpoints: loss by context length and by position, or retrieval from long prompts.

    python evaluate.py out/rope out/rope-yarn4 --report=out/report.html
    python evaluate.py out/rope out/rope-yarn4 --lengths=256,512,1024 --plot=out/length.png
    python evaluate.py "RoPE=out/rope" "YaRN=out/rope-yarn4" --protocol=last-quarter
    python evaluate.py out/smollm2 --text=book.txt --lengths=2048,8192
    python evaluate.py out/rope out/rope-yarn4 --task=ruler --ruler=niah,vt

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
  last-tokens    The same with 500 tokens, and what each doubling of the context takes off the loss.
  key-tokens     Score only tokens that a --judge predicts far better from a long context than from
                 about the last --short_context tokens, by more than 2 nats (LongPPL, 2410.23771).

At most --max_tokens are scored: sequences of the longest length, evenly spaced over all validation
files, as in train.py. Shorter sequences lie in these, so with the first four protocols all lengths
score the same text. Where the last sequence overlaps the one before it, only its new tokens are
scored. A mean is over all scored tokens, never over sequences; its 95 % interval is over sequences,
with Student's t, and unknown below 5 of them. Checkpoints that score the same text are compared by
the differences of the same sequences: an asterisk marks those that differ from the first. Dynamic
methods scale by the length of the whole sequence. A model with random positions gets positions
sampled as in training.

The text is the validation text of --dataset, of the dataset that a checkpoint was trained on, or
--text=FILE, a plain text in the tokens of each checkpoint. Models with different vocabularies are
compared by bits per byte, which is loss * tokens / bytes / ln 2 of a record: "bytes" is the UTF-8
text that the scored tokens stand for.

--task=needle hides a number of three digits in filler text (of seven, if the vocabulary is larger
than 512), at a depth from 0 (the start) to 1 (the end), and asks for it at the end of the prompt. A
trial succeeds when every digit has the highest probability given the correct digits before it
(teacher forcing), so nothing is sampled and guessing succeeds once in 900 trials. The control has
no needle in its prompt.

--task=ruler asks for what is hidden in prompts like those of RULER (2404.06654), by the same rule:
one value (niah), one of several (multikey), all names of a value (vt, variable tracking), and the
most frequent words of a list (fwe). Besides the fraction
of prompts in which all answers are right it measures the nats of the answer, and what the needles
save of them against the same prompt without them (the gain); this separates models that never
answer right. The scores are not those that are published for RULER.

Prompts depend on the seed, the task and the length only, so all checkpoints with one tokenizer see
the same ones. Small models know their format only from training: train.py --tasks=niah:0.1.

--report=FILE.html writes one page of everything measured, with the text itself coloured by loss.
Without --task and --protocol it chooses what to measure.

--curves=FILE.png measures nothing: it plots the losses that runs have logged in training.
"""

from nanolong import settings  # isort: skip (first: --help before torch is imported)
import contextlib
import os
import shlex
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import torch

from model import GPT, POSITIONS
from nanolong import (
    curves,
    devices,
    entry,
    evaluation_log,
    key_tokens,
    parallel,
    plots,
    provenance,
    report,
    retrieval,
    run,
    scoring,
)
from nanolong.errors import UserError, note, require, run_main
from nanolong.evaluation import loss

AnyProtocol = Literal[
    "chunked",
    "last-quarter",
    "position",
    "sliding",
    "token-aligned",
    "last-tokens",
    "key-tokens",
]
RulerTask = Literal["niah", "multikey", "vt", "fwe"]

# With fewer sequences than this the choice of the text decides how two lengths compare.
MIN_SEQUENCES = 8


@dataclass
class EvaluateConfig:
    # [measurement]
    task: Literal["loss", "needle", "ruler"] = "loss"  # what to measure
    # context lengths in tokens; default: 1, 2, 4 and 8 times the shortest original context length
    # (needle: 1, 2, 3 and 4 times)
    lengths: tuple[int, ...] = ()
    seed: int = 1  # seed of the prompts
    # Python files, each with one scheme of your own, for checkpoints that were trained with it
    entry: tuple[str, ...] = ()
    best: bool = False  # of a run folder, use the step with the lowest validation loss
    # [loss]
    # how to score, see above; by default of a single length without token-aligned
    protocol: tuple[AnyProtocol, ...] = ("chunked", "last-quarter", "token-aligned")
    # sliding, token-aligned, last-tokens: scored tokens at the end of a sequence, at most the
    # sequence itself (of the last two, half the shortest length); 0: 256, of last-tokens 500
    stride: int = 0
    max_tokens: int = 65536  # tokens of the validation text that are scored, spread over its files
    dataset: str = ""  # default: the one that each checkpoint was trained on
    text: str = ""  # score this text file, in the tokens of each checkpoint, and no dataset
    judge: str = ""  # key-tokens: the run that says which tokens are key tokens
    # key-tokens: tokens of the judge's short context, at most half of the judge's context length
    short_context: int = 4096
    min_key_tokens: int = 1000  # key-tokens: with fewer of them no loss is given
    # [needle, ruler]
    depths: int = 5  # needle: number of depths, from the start to the end
    ruler: tuple[RulerTask, ...] = ("niah", "multikey", "vt", "fwe")  # ruler: the tasks
    # prompts for each length and depth, or each length and task; 0: 64, of ruler 20
    trials: int = 0
    # [output]
    plot: str = ""  # write a figure to this PNG file (needs matplotlib)
    report: str = ""  # write a page with everything measured to this HTML file
    curves: str = ""  # only plot the training curves of run folders to this PNG file
    # write the records to this file as they come, with the step folder, dtype, device, data and
    # commit; a loss that is not finite is null. The same command, after a stop, reuses them
    json: str = ""
    # [system]
    # processes, started by torchrun, that share every sequence, a part of its tokens each
    sequence_parallel: int = 1
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # dtype of the weights in memory; auto: as stored if --dtype is bfloat16, else float32; with
    # bfloat16 products both give the same numbers
    weights: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self):
        self.check()

    def check(self):
        """Refuse what measures nothing, or what another task has. Raises UserError."""
        require(not (self.text and self.dataset), "--text and --dataset both name a text: give one")
        require(
            not self.text or self.task == "loss",
            f"--text is of --task=loss, and --task={self.task} has texts of its own: give one",
        )
        for name in ("plot", "curves"):
            file = getattr(self, name)
            require(not file or file.endswith(".png"), f"--{name}={file} is no PNG: end it in .png")
        require(
            not self.curves or not (self.plot or self.json or self.report),
            "--curves plots logs and measures nothing: leave --plot, --json and --report out",
        )
        require(
            not self.report or self.report.endswith(".html"),
            f"--report={self.report} is not a page: end it in .html",
        )
        require(
            bool(self.judge) == ("key-tokens" in self.protocol),
            "--protocol=key-tokens and --judge=RUN need each other: give both or neither",
        )
        require(self.protocol and self.ruler, "--protocol and --ruler are lists: name one at least")
        for name in ("max_tokens", "min_key_tokens", "depths"):
            require(getattr(self, name) >= 1, f"--{name} must be at least 1")
        require(min(self.lengths, default=1) >= 1, "--lengths must be at least 1")
        require(self.depths <= 1000, f"--depths={self.depths} would take days: give 1,000 or less")
        require(self.short_context >= 2, "--short_context must be at least 2 tokens")


# -----------------------------------------------------------------------------
# Loss


def load_judge(cfg, models):
    """Load the judge of key tokens. Raises UserError unless it reads the tokens of all models."""
    device = next(next(iter(models.values())).parameters()).device
    judge = GPT.load(cfg.judge, cfg.best).to(device)
    if scoring.have_different_vocabularies({"": judge, **models}):
        raise UserError(
            f"the judge {cfg.judge} and the checkpoints have different vocabularies: give a "
            "--judge with their tokenizer"
        )
    return key_tokens.Judge(judge, cfg.short_context, devices.pick_dtype(cfg.dtype, device))


def plan_loss(name, model, text, cfg, lengths, length, protocols, fields, judge):
    """Return the Measurement of protocols that share their forward passes, at one length.

    judge: a key_tokens.Judge for the protocol key-tokens, otherwise None.
    """
    records = [scoring.loss_record(name, word, length, **fields) for word in protocols]
    settings = {"sequences": []}
    if judge:
        records[0]["short_context"] = judge.short_context
        settings.update(judge=judge.weights, min_key_tokens=cfg.min_key_tokens)
    try:
        if judge:
            judge.check_length(length)
        settings["sequences"] = loss.find_sequences(
            text.val, length, cfg.max_tokens, protocols[0], lengths=lengths, **fields
        )
    except UserError as error:
        settings["refused"] = str(error)
    sequences = settings["sequences"]

    def find():
        if "refused" in settings:
            raise UserError(settings["refused"])
        dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
        if judge:
            what = (model, text, sequences, judge, cfg.min_key_tokens, dtype)
            return [key_tokens.measure(records[0], *what)]
        sums, counts = loss.loss_by_part(model, text.val, length, sequences, dtype)
        n_bytes = scoring.bytes_by_part(text, length, sequences)
        return scoring.make_records(records, sums, counts, n_bytes)

    flops = len(sequences) * length * devices.flops_per_token(model, length)
    return evaluation_log.Measurement(records, find, flops, settings)


def plan_losses(models, cfg, lengths, texts):
    """Plan what measure_losses() measures. Returns a list of Measurements."""
    judge = load_judge(cfg, models) if "key-tokens" in cfg.protocol else None
    groups = scoring.group_protocols(cfg.protocol, cfg.stride, lengths)
    measurements = []
    for name, length, (protocols, fields) in product(models, lengths, groups):
        what = (name, models[name], texts[name], cfg, lengths, length, protocols, fields)
        judges = "key-tokens" in protocols
        measurements.append(plan_loss(*what, judge if judges else None))
    return measurements


def measure_losses(models, cfg, lengths, texts=None):
    """Measure every checkpoint (name -> GPT, on its device) at every length, by every protocol.

    texts: of scoring.open_texts(), if they are open. Returns a list of records. If a loss cannot be
    measured, the record has "refused" with the reason in place of "loss" and "tokens".
    """
    texts = texts or scoring.open_texts(models, cfg, lengths)
    records = evaluation_log.measure_all(plan_losses(models, cfg, lengths, texts))
    scoring.compare(records, scoring.identify_texts(models, texts))
    return records


# -----------------------------------------------------------------------------
# The command line


def name_folders(paths):
    """Return the folders of arguments FOLDER or NAME=FOLDER: a dict by name."""
    if not paths:
        raise UserError("no checkpoint: give at least one run folder (python evaluate.py out/NAME)")
    folders = {}
    for path in paths:
        name, _, folder = path.partition("=")
        if Path(path).exists() or not folder:
            name = path.rstrip("/")
            folder = path
        folders[name] = folder
    if len(folders) < len(paths):
        raise UserError("two checkpoints have the same name: name each by NAME=FOLDER")
    return folders


def load_models(paths, best, device, dtype=torch.float32):
    """Load FOLDER or NAME=FOLDER: name -> GPT, with weights in dtype, None for the stored one."""
    folders = name_folders(paths)
    return {name: GPT.load(folder, best, dtype).to(device) for name, folder in folders.items()}


def check_texts(models, cfg):
    """Raise UserError if nothing names a text to score; note if losses cannot be compared."""
    for name, model in models.items():
        if not (model.meta.get("dataset") or cfg.dataset or cfg.text):
            tokenizer = shlex.quote(str(model.folder.parent))
            raise UserError(
                f"{name} does not say on which text it was trained: give --text=FILE, or --dataset "
                f"(prepared by python data/prepare.py FILE --tokenizer={tokenizer} --name=NAME)"
            )
    texts = {cfg.text or cfg.dataset or model.meta.get("dataset") for model in models.values()}
    if len(texts) > 1 or scoring.have_different_vocabularies(models):
        note("texts or vocabularies differ, so these losses per token cannot be compared")


def note_few_sequences(records, lengths):
    """Print a note if lengths differ by the text that they score rather than by the context."""
    for protocol in ("last-quarter", "position"):  # the others score the same text at all lengths
        few = {}
        for record in records:
            n = record.get("n", MIN_SEQUENCES)
            if record["protocol"] == protocol and n < MIN_SEQUENCES:
                few[record["length"]] = f"{n} at {record['length']}"
        if few and len(lengths) > 1:
            note(
                f"{protocol} has few sequences ({', '.join(few.values())} tokens), and each "
                "length scores other text: compare lengths by token-aligned, or raise --max_tokens"
            )


def check_writable(file):
    """Raise OSError if a file cannot be written: before the work, not after it."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    existed = path.exists()
    with open(path, "ab"):
        pass
    if not existed:
        path.resolve().unlink()  # of a link, what it leads to


def origins(models, texts, dtype, device):
    """Return what the records of each checkpoint came from: name -> fields."""
    fields = {"dtype": str(dtype).removeprefix("torch."), "device": devices.device_name(device)}
    fields["commit"] = provenance.current_commit()
    found = {name: {"folder": str(model.folder), **fields} for name, model in models.items()}
    for name, text in texts.items():
        found[name]["data_hash"] = text.hash
    return found


def print_losses(records, models, cfg, lengths):
    """Print the losses as tables and as plots in characters.

    Returns the records to plot and their unit, which all vocabularies must have in common.
    """
    bits = plots.bits_per_byte(records)
    plotted, unit = records, "nats per token"
    if scoring.have_different_vocabularies(models):
        plotted, unit = bits, "bits per byte"
        if not bits:
            note(
                "nothing is plotted, for a loss per token means something else in each "
                "vocabulary: bits per byte need --protocol=chunked and checkpoints with a tokenizer"
            )
    print()
    print(plots.format_loss_table(records, lengths))
    # where a token is a byte, bits per byte would say nothing new
    has_words = any(r.get("bytes") not in (None, r.get("tokens")) for r in records)
    if bits and (cfg.text or has_words or unit == "bits per byte"):
        print()
        print("\n".join(plots.format_lengths(bits, lengths, "bits per byte")))
    for protocol in plots.unique(plotted, "protocol"):
        if len(lengths) == 1 and protocol != "position":
            continue  # a plot of one point
        x_axis = "position" if protocol == "position" else "context length"
        print(f"\n{protocol}, {unit}, by {x_axis}")
        print(plots.terminal_plot(plots.loss_curves(plotted, protocol)))
    note_few_sequences(records, lengths)
    return plotted, unit


def plot_records(records, models, cfg, lengths, scored, unit):
    """Write the figure of either task, with what it was measured on in its title and note.

    scored: of scoring.describe_scored(); unit: of print_losses().
    """
    original = sorted({model.config.original_length for model in models.values()})
    trained_at = " or ".join(f"{length:,}" for length in original)
    title = f"Trained at {trained_at} tokens, evaluated at up to {max(lengths):,}"
    if cfg.task == "needle":
        tokenizers = [retrieval.tokenizer_of(name, model) for name, model in models.items()]
        chance = f"1 in {9 * 10 ** (min(map(retrieval.count_digits, tokenizers)) - 1):,}"
        trials = cfg.trials or retrieval.NEEDLE_TRIALS
        caption = f"{trials} prompts per cell, teacher-forced; chance is {chance}"
        plots.plot_needle_heatmaps(records, lengths, cfg.plot, caption, title=title)
    elif records:
        plots.plot_losses(records, lengths, cfg.plot, scored[0], title=title, unit=unit)


def plot_training(file, paths):
    """Plot the logs of run folders. Returns the exit status, 1 without matplotlib."""
    check_writable(file)
    return 0 if curves.plot_curves(name_folders(paths), file) else 1


def main(argv=None):
    args = settings.parse(
        cfg=EvaluateConfig,
        paths="run folders or step folders; NAME=FOLDER names one in tables and figures",
        argv=argv,
    )
    cfg = args.cfg
    rank, world = parallel.join_processes(devices.pick_device(cfg.device))
    require(
        world in (1, cfg.sequence_parallel),
        f"evaluate.py runs in {world} processes, which share every sequence: give "
        f"--sequence_parallel={world}",
    )
    with contextlib.ExitStack() as stack:
        if rank:  # the first process prints
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        return evaluate(cfg, args.given, args.paths, writes=rank == 0)


def choose_measurements(cfg, given, models, lengths):
    """Return the tasks to measure, and set the protocols that are not given."""
    tasks = [cfg.task]
    if "protocol" not in given and len(lengths) == 1:
        cfg.protocol = ("chunked", "last-quarter")  # there is nothing to align
    if cfg.report and not {"task", "protocol"} & given:
        cfg.protocol = ("chunked", "position", *cfg.protocol[1:])
        if all(model.meta.get("tokenizer") for model in models.values()):
            tasks.append("ruler")
            if "ruler" not in given:
                cfg.ruler = ("niah", "multikey", "vt")
    return tasks


def default_lengths(models, task):
    """Return multiples of the shortest original context length."""
    shortest = min(model.config.original_length for model in models.values())
    factors = (1, 2, 3, 4) if task == "needle" else (1, 2, 4, 8)
    return tuple(shortest * factor for factor in factors)


def evaluate(cfg, given, paths, writes):
    """Do what the settings say; only one process writes files. Returns the exit status."""
    if cfg.curves:
        return plot_training(cfg.curves, paths) if writes else 0
    device = devices.pick_device(cfg.device)
    entry.load_entries(cfg.entry, POSITIONS)
    models = load_models(paths, cfg.best, device, devices.weights_to_load(cfg.weights))
    dtype = devices.pick_dtype(cfg.dtype, device)
    for model in models.values():
        devices.set_weights_dtype(model, cfg.weights, dtype)
    if cfg.task == "loss":
        check_texts(models, cfg)
    require(
        not cfg.report or len(models) <= report.MAX_CHECKPOINTS,
        f"--report compares at most {report.MAX_CHECKPOINTS} checkpoints: name fewer",
    )
    for file in (cfg.plot, cfg.json, cfg.report):
        if file and writes:
            check_writable(file)
    saved = evaluation_log.read_records(cfg.json) if writes else []

    lengths = cfg.lengths or default_lengths(models, cfg.task)
    tasks = choose_measurements(cfg, given, models, lengths)
    for model in models.values():
        parallel.share_sequences(cfg.sequence_parallel, model, lengths)

    scored, texts, measurements = [], {}, []
    if "loss" in tasks:
        texts = scoring.open_texts(models, cfg, lengths)
        scored = scoring.describe_scored(texts, lengths, cfg.max_tokens)
        print("\n".join(f"scored: {line}" for line in scored), flush=True)
        measurements += plan_losses(models, cfg, lengths, texts)
    if "needle" in tasks:
        measurements += retrieval.plan_needles(models, cfg, lengths)
    if "ruler" in tasks:
        measurements += retrieval.plan_ruler(models, cfg, lengths)

    hashes = [text.hash for text in texts.values()] if texts else []
    local = {"dataset", "device", "entry", "json", "plot", "report", "text"}
    shared = {name: value for name, value in asdict(cfg).items() if name not in local}
    weights = list(map(run.weights_hash, models.values()))
    parallel.check_same((shared, weights, hashes, entry.hash_sources(cfg.entry)))
    origin = origins(models, texts, dtype, device)
    facts = {"code": entry.hash_sources(cfg.entry), "processes": cfg.sequence_parallel}
    file = cfg.json if writes else ""
    log = evaluation_log.EvaluationLog(file, saved, models, origin, **facts)
    records = log.measure(measurements)
    same_prompts = not scoring.have_different_vocabularies(models)
    records += retrieval.summarise_ruler(records, same_prompts)
    if "loss" in tasks:
        scoring.compare(records, scoring.identify_texts(models, texts))
    log.write(records)
    plotted, unit = print_records(records, models, cfg, lengths, tasks)
    if cfg.plot and writes:
        plot_records(plotted, models, cfg, lengths, scored, unit)
    if file:
        print(f"wrote {file}")
    if cfg.report and writes:
        write_report(cfg, models, texts, lengths, records, dtype, tasks)
    return 0


def print_records(records, models, cfg, lengths, tasks):
    """Print all that was measured. Returns the records to plot and their unit."""
    plotted, unit = records, ""
    if "loss" in tasks:
        of_losses = [record for record in records if record["task"] == "loss"]
        plotted, unit = print_losses(of_losses, models, cfg, lengths)
    if "needle" in tasks:
        print()
        print(plots.format_needle_table(records, lengths))
    if "ruler" in tasks:
        of_ruler = [record for record in records if record["task"] == "ruler"]
        summaries = [record for record in of_ruler if "summary" in record]
        print()
        print(plots.format_ruler_table(summaries, of_ruler, lengths))
    return plotted, unit


def write_report(cfg, models, texts, lengths, records, dtype, tasks):
    """Write the page of --report, with the text coloured by loss if a text was scored."""
    shown = {}
    for name, text in texts.items():
        found = loss.text_losses(models[name], text, lengths, cfg.max_tokens, dtype)
        if found:
            shown[name] = found
    checkpoints = [provenance.describe_checkpoint(name, model) for name, model in models.items()]
    title = f"{', '.join(models)}: evaluated at up to {max(lengths):,} tokens"
    report.write_report(cfg.report, checkpoints, records, shown, list_omissions(cfg, tasks), title)
    print(f"wrote {cfg.report}")


def list_omissions(cfg, tasks):
    """Return sentences that name what was not measured, and the option that does."""
    omitted = []
    if "loss" not in tasks:
        omitted.append("Loss was not measured: --task=loss does.")
    else:
        left_out = [word for word in get_args(AnyProtocol) if word not in cfg.protocol]
        omitted.append(f"Protocols that were not measured: {', '.join(left_out)} (--protocol).")
    if "ruler" in tasks:
        left_out = [kind for kind in get_args(RulerTask) if kind not in cfg.ruler]
        if left_out:
            omitted.append(f"Tasks that were not measured: {', '.join(left_out)} (--ruler).")
    elif "needle" not in tasks:
        omitted.append("Retrieval was not measured: --task=ruler or --task=needle does.")
    return omitted


if __name__ == "__main__":
    run_main(main)
