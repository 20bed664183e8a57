"""Does a public checkpoint use a longer context, find in it, and after how much fine-tuning?

    make smollm2                                        downloads SmolLM2-135M-Instruct, 94 MB
    python experiments/public.py FILE.gguf a            parts: a, b, c, or several
    python experiments/public.py report                 writes public.md

(a) Use: the loss of the same tokens, the last of a document, in contexts of each length, by where a
token and the two before it stood last (--protocol=repeats of evaluate.py), without training.
(b) Find: prompts of --task=ruler, with needles and without. A task that the untouched checkpoint
does not solve at its own length is dropped.
(c) Tokens: (a) after fine-tuning on skipped positions (PoSE, config/finetune_public.toml); a second
seed is measured in the shortest and the longest context alone.

Documents are the modules of Python's standard library that are long enough, cut to the longest
length, and in turn with them sequences of prose that Python brings: the texts of help(), and the
help, news and change log of IDLE. Fine-tuning is on the other modules.

Each cell, one arm on one document or prompt at one length, is a line of --cells as soon as it is
measured, and only missing ones are measured, a document or prompt after the other. Parts may run at
the same time. The checkpoint is imported to --cache, and fine-tuned there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)

import datetime
import hashlib
import html
import itertools
import json
import re
import sysconfig
import time
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Literal, NamedTuple

import numpy as np

import data
import extend
import hf
from data import Split, texts
from data.tasks import make_document
from experiments import public_report
from experiments.public_report import SAME_UP_TO
from kernels import check
from model import GPT
from nanolong import devices, run
from nanolong.errors import UserError, require, run_main
from nanolong.evaluation import loss, provenance, repeats, retrieval
from nanolong.strict_json import to_json

# Arm -> method of extend.py and its options.
METHODS = {x: (x, {}) for x in "none abf yarn lm-infinite self-extend jet-long pi ntk".split()}
METHODS["MrRoPE"] = ("yarn", {"ramp": "progressive"})
TUNED = ("yarn", "none", "abf")  # methods of (c)
SEQUENCES_PER_STEP = 4  # as in config/finetune_public.toml
SEEDS = (1, 2)  # seeds of fine-tuning on the fewest tokens (on more tokens only the first seed)

Task = Literal["niah", "multikey", "nth", "last"]


@dataclass
class PublicConfig:
    # [measurement]
    cells: str = "experiments/results/public.jsonl"  # file of the cells; the report is next to it
    lengths: tuple[int, ...] = (2048, 8192, 16384)  # contexts of (a) and (c), in tokens
    targets: int = 2560  # scored tokens of (a) and (c), the last of each document
    documents: int = 8  # documents of (a) and (c), at most
    # arms of (a), without training
    arms: tuple[str, ...] = tuple("untouched yarn MrRoPE lm-infinite self-extend jet-long".split())
    # arms of (b), also fine-tuned ones such as yarn+65536
    finders: tuple[str, ...] = ("untouched", "yarn", "self-extend", "jet-long", "lm-infinite")
    find: tuple[Task, ...] = ("niah", "multikey", "nth")  # tasks of (b)
    find_length: int = 12288  # length of the prompts of (b)
    prompts: int = 8  # prompts for each task of (b)
    tokens: tuple[int, ...] = (65536, 262144)  # tokens of fine-tuning of (c)
    train_length: int = 1024  # length of the sequences of fine-tuning
    factor: float = 4.0  # how many times longer the context gets
    # [system]
    cache: str = "out/public"  # folder of the imported and the fine-tuned checkpoints
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # dtype of matrix products


class Key(NamedTuple):
    """What tells a cell from all others."""

    task: str  # repeats, or a task of (b)
    arm: str  # "yarn", or fine-tuned "yarn+65536"
    seed: int  # seed of fine-tuning
    length: int  # tokens of context
    document: int  # or prompt


# -----------------------------------------------------------------------------
# Documents


def read_prose():
    """Return the English prose that Python brings: name -> text."""
    folder = Path(sysconfig.get_path("stdlib"), "idlelib")
    files = [folder / name for name in ("help.html", "NEWS.txt", "NEWS2x.txt", "ChangeLog")]
    parts = [file.read_text("utf-8", "replace") for file in files if file.is_file()]
    idle = html.unescape(re.sub(r"<[^>]*>", "", "\n\n".join(parts)))
    return {"pydoc_data/topics.py": "\n\n".join(topics.values()), "idlelib": idle}


def read_documents(tokenizer, n_tokens):
    """Return documents of n_tokens tokens, code and prose in turn: (name, ids), and the modules of
    the standard library that are too short for one: name -> path.
    """
    code, prose, others = [], [], {}
    # in the order of a hash, as neighbours in a package are alike
    files = texts.standard_library().items()
    for name, file in sorted(files, key=lambda item: hashlib.sha256(item[0].encode()).digest()):
        # a token has a byte or more
        is_long = file.stat().st_size >= n_tokens and not texts.why_no_text(file)
        ids = tokenizer.encode(file.read_text("utf-8-sig")) if is_long else []
        if len(ids) >= n_tokens:
            code.append((name, np.array(ids[:n_tokens])))
        else:
            others[name] = file
    for name, text in read_prose().items():
        ids = np.array(tokenizer.encode(text))
        for start in range(0, len(ids) - n_tokens + 1, n_tokens):
            prose.append((f"{name} from token {start:,}", ids[start : start + n_tokens]))
    turns = itertools.chain.from_iterable(itertools.zip_longest(code, prose))
    return [document for document in turns if document], others


# -----------------------------------------------------------------------------
# Checkpoints


def hash_checkpoint(path):
    """Return 16 digits of the SHA-256 of a file, or of the files of a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = hashlib.sha256()
    for file in filter(Path.is_file, files):
        with open(file, "rb") as f:
            found.update(hashlib.file_digest(f, "sha256").digest())
    return found.hexdigest()[:16]


class Checkpoints:
    """The imported checkpoint, and its arms."""

    def __init__(self, cfg, path):
        self.cfg = cfg
        self.device = devices.pick_device(cfg.device)
        self.dtype = devices.pick_dtype(cfg.dtype, self.device)
        self.hash = hash_checkpoint(path)
        self.cache = Path(cfg.cache) / self.hash
        if not run.list_steps(self.cache / "imported"):
            hf.main(["import", str(path), str(self.cache / "imported")])
        meta = run.read_meta(run.find_checkpoint(self.cache / "imported"))
        self.tokenizer = data.tokenizer_from_json(meta["tokenizer"])
        self.bos = meta["bos"]
        self.vocab_size = meta["config"]["vocab_size"]
        self.original_length = meta["config"]["block_size"]
        self.loaded = None, None

    def open(self, arm, seed):
        """Load an arm as evaluate.py does. The last one stays in memory."""
        if self.loaded[0] != (arm, seed):
            self.loaded = None, None  # before the next one takes memory
            self.loaded = (arm, seed), self.load(arm, seed)
        return self.loaded[1]

    def load(self, arm, seed):
        is_tuned = "+" in arm
        folder = self.folder_of(arm, seed) if is_tuned else self.cache / "imported"
        model = GPT.load(folder, dtype=devices.weights_to_load("auto")).to(self.device)
        devices.set_weights_dtype(model, "auto", self.dtype)
        if not is_tuned and arm != "untouched":
            method, options = METHODS[arm]
            model.extend(method, self.cfg.factor, **options)
        check.choose_kernels(model, self.device, self.dtype)
        return model

    def folder_of(self, arm, seed):
        return self.cache / f"{arm}-{seed}"

    def is_tuned(self, arm, seed):
        """Whether fine-tuning of an arm has ended."""
        folder = self.folder_of(arm, seed)
        has_steps = bool(run.list_steps(folder))
        return has_steps and run.read_meta(run.find_checkpoint(folder))["step"] == self.steps(arm)

    def steps(self, arm):
        return int(arm.partition("+")[2]) // (SEQUENCES_PER_STEP * self.cfg.train_length)

    def tune(self, arm, seed, modules):
        """Fine-tune an arm, from where it was stopped. modules: text, name -> path."""
        dataset = self.cache / "modules"
        if not dataset.exists():
            source = "the standard library without its long modules"
            library = texts.Texts(modules, source, as_bytes=False, val_fraction=0.1)
            texts.write_dataset(dataset, self.tokenizer, library.parts(), {"source": source})
        method, options = METHODS[arm.partition("+")[0]]
        words = [f"--{name}={value}" for name, value in self.training_settings(arm).items()]
        words += [f"--options={','.join(f'{k}={v}' for k, v in options.items())}"]
        words += [f"--method={method}", f"--seed={seed}", f"--dataset={dataset}"]
        words += [f"--out_dir={self.folder_of(arm, seed)}", "--init_from=auto"]
        preset = "config/finetune_public.toml"
        status = extend.main([str(self.cache / "imported"), preset, *words])
        # stopped by a signal, extend.py saves and returns 0
        is_done = not status and self.is_tuned(arm, seed)
        require(is_done, f"fine-tuning of {arm} was stopped: the same command goes on")

    def training_settings(self, arm):
        """Settings of extend.py by name, besides the preset's."""
        length = self.cfg.train_length
        # evaluated briefly: the cells are what is measured
        short = dict.fromkeys(("eval_length", "max_tokens", "train_length"), length)
        own = {"factor": self.cfg.factor, "dtype": self.cfg.dtype, "device": self.cfg.device}
        steps = self.steps(arm)
        return {**short, **own, "max_iters": steps, "warmup_iters": steps // 6, "eval_iters": 1}


# -----------------------------------------------------------------------------
# Cells


def plan(part, cfg, original_length, n_documents, cells):
    """Yield the keys of a part in the order in which they are measured. cells: key -> cell."""
    if part == "b":
        return plan_prompts(cfg, original_length, cells)
    groups = [[(arm, 0) for arm in cfg.arms]] if part == "a" else tuned_arms(cfg)
    return plan_repeats(cfg, original_length, n_documents, groups)


def tuned_arms(cfg):
    """List the arms of (c) in groups of the same tokens and seed: (arm, seed) each."""
    groups = []
    for tokens in sorted(cfg.tokens):
        seeds = SEEDS if tokens == min(cfg.tokens) else SEEDS[:1]
        groups += [[(f"{method}+{tokens}", seed) for method in TUNED] for seed in seeds]
    groups[0].append(("abf", 0))  # without fine-tuning
    return groups


def plan_repeats(cfg, original_length, n_documents, groups):
    """Yield the keys of (a) or (c), all documents of a group of arms before the next group."""
    lengths = sorted(cfg.lengths)
    for group in groups:
        for document, (arm, seed) in itertools.product(range(n_documents), group):
            for length in lengths if seed <= SEEDS[0] else (lengths[0], lengths[-1]):
                if length > original_length * SAME_UP_TO.get(arm, 0):
                    yield Key("repeats", arm, seed, length, document)


def plan_prompts(cfg, original_length, cells):
    """Yield the keys of (b): first the untouched checkpoint at its own length."""
    for prompt, task in itertools.product(range(cfg.prompts), cfg.find):
        yield Key(task, "untouched", 0, original_length, prompt)
    solved = []
    for task in cfg.find:
        keys = [Key(task, "untouched", 0, original_length, i) for i in range(cfg.prompts)]
        right = [cells[key]["values"]["right"] for key in keys if key in cells]
        if len(right) < cfg.prompts or sum(right) >= cfg.prompts / 2:
            solved.append(task)
    for prompt, arm, task in itertools.product(range(cfg.prompts), cfg.finders, solved):
        yield Key(task, arm, int("+" in arm), cfg.find_length, prompt)


def place_targets(cfg, length):
    """Place the sequences of one context length that score the last targets of a document: a list
    of (start, number of targets that are context only). A target has half the length or more.
    """
    end = max(cfg.lengths)
    step = min(cfg.targets, length // 2)
    stops = [*range(end - cfg.targets + step, end, step), end]
    parts = itertools.pairwise([end - cfg.targets, *stops])
    return [(stop - length, length - (stop - start)) for start, stop in parts]


def split_targets(cfg, tokens, extra_tokens):
    """Put the targets of a document into buckets by repeats.py, for each length and the next:
    {bucket: bool (targets,)}. "far N": N tokens of context are the fewest that show the repeat.
    """
    trigrams, pairs, _ = repeats.repeats_of(tokens, np.zeros(len(tokens), bool))
    end = max(cfg.lengths) + extra_tokens
    trigrams, pairs = (x[end - cfg.targets : end] for x in (trigrams, pairs))
    first_seen = {}
    for length in sorted(cfg.lengths):
        places = place_targets(cfg, length)
        first_seen[length] = np.concatenate([np.full(length - n, s) for s, n in places])
    found = {}
    for short, long in itertools.pairwise(sorted(cfg.lengths)):
        masks = repeats.bucket_masks(trigrams, pairs, first_seen[short], first_seen[long])
        found |= {f"{bucket} {long}": masks[bucket] for bucket in ("far", "pair far")}
        if short == min(cfg.lengths):
            found |= {bucket: masks[bucket] for bucket in ("all", "near", "new")}
    return found


def score_repeats(cfg, model, split, length, dtype):
    """Sum the losses of the targets in one context length: {bucket: (targets, nats)}."""
    sequences = [(0, start, n_context) for start, n_context in place_targets(cfg, length)]
    found = []
    for batch, _, _, losses in loss.sequence_losses(model, split, length, sequences, dtype):
        found += [row[n:] for (*_, n), row in zip(batch, losses.numpy(), strict=True)]
    losses = np.concatenate(found)
    masks = split_targets(cfg, split.tokens[0], split.extra_tokens)
    return {name: (int(m.sum()), round(float(losses[m].sum()), 4)) for name, m in masks.items()}


def answer_prompt(model, checkpoints, key):
    """Answer a prompt with its needles and without, as --task=ruler does."""
    found = {}
    for suffix, needles in (("", True), (" without", False)):
        words = (key.task, checkpoints.tokenizer, key.length, 1, key.document)
        prompt = make_document(*words, checkpoints.bos, needles)
        (right,), (nats,) = retrieval.answer_prompts(model, [prompt], checkpoints.cfg.dtype)
        found |= {f"right{suffix}": right, f"nats{suffix}": round(nats, 4)}
    return found


def read_cells(file):
    """Read the cells of a file by their keys. Raises UserError if it is damaged."""
    cells = {}
    lines = file.read_text().splitlines() if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            cell = json.loads(line)
            cells[Key(*(cell[name] for name in Key._fields))] = cell
        except (ValueError, KeyError, TypeError):
            raise UserError(f"line {number} of {file} is no cell of public.py: remove it") from None
    return cells


def measure(cfg, path, parts):
    """Measure the missing cells of the parts."""
    checkpoints = Checkpoints(cfg, path)
    documents, modules = read_documents(checkpoints.tokenizer, max(cfg.lengths) + 1)
    documents = documents[: cfg.documents]
    require(documents, f"no text of Python has {max(cfg.lengths):,} tokens: lower --lengths")
    # what the documents' cells depend on
    facts = repr((sorted(cfg.lengths), cfg.targets)).encode()
    ids = [hashlib.sha256(facts + x.tobytes()).hexdigest()[:16] for _, x in documents]
    file = Path(cfg.cells)
    cells = read_cells(file)
    check_cells(file, cells, checkpoints.hash, ids)
    origin = {
        "commit": run.current_commit(),
        "hardware": provenance.hardware(checkpoints.device),
        "checkpoint": checkpoints.hash,
    }
    options = cfg, checkpoints.original_length, len(documents), cells
    # Processor time, because other programs may share the cores.
    clock = time.process_time if checkpoints.device.type == "cpu" else time.time

    def add(part, key, start, values, **more):
        seconds = round(clock() - start, 1)
        facts = {**origin, "date": str(datetime.date.today()), "seconds": seconds, **more}
        cells[key] = {"part": part, **key._asdict(), **facts, "values": values}
        with open(file, "a") as f:  # a line is written at once: another part may run
            f.write(to_json(cells[key]) + "\n")
        print(f"{part}: {' '.join(map(str, key))}: {seconds:.0f} s", flush=True)

    for part in parts:
        print(estimate(part, list(plan(part, *options)), cells), flush=True)
        for key in plan(part, *options):
            if key in cells:
                continue
            if "+" in key.arm and not checkpoints.is_tuned(key.arm, key.seed):
                start = clock()
                checkpoints.tune(key.arm, key.seed, modules)
                add(part, Key("train", key.arm, key.seed, cfg.train_length, 0), start, {})
            model = checkpoints.open(key.arm, key.seed)
            start = clock()
            if key.task != "repeats":
                add(part, key, start, answer_prompt(model, checkpoints, key))
                continue
            name, tokens = documents[key.document]
            split = Split([Path(name)], checkpoints.vocab_size, checkpoints.bos, [tokens])
            found = score_repeats(cfg, model, split, key.length, checkpoints.dtype)
            add(part, key, start, found, ids=ids[key.document], text=name)


def check_cells(file, cells, checkpoint, ids):
    """Raise UserError if the cells are of another checkpoint, or of other documents or settings."""
    remedy = "give another --cells"
    is_same = all(cell["checkpoint"] == checkpoint for cell in cells.values())
    require(is_same, f"{file} has cells of another checkpoint than this, {checkpoint}: {remedy}")
    known = dict(enumerate(ids))
    scored = [cell for key, cell in cells.items() if key.task == "repeats"]
    is_same = all(known.get(cell["document"], cell["ids"]) == cell["ids"] for cell in scored)
    problem = "has cells of other --lengths or --targets, or of another Python's texts"
    require(is_same, f"{file} {problem}: {remedy}")


def estimate(part, keys, cells):
    """Say how many cells of a part are left, and by the measured ones how many hours."""
    left = [key for key in keys if key not in cells]
    known = {}
    for key, cell in cells.items():
        known.setdefault((key.arm, key.length), []).append(cell["seconds"])
    seconds = [
        np.mean(known[key.arm, key.length]) for key in left if (key.arm, key.length) in known
    ]
    text = f"part {part}: {len(left)} of {len(keys)} cells are left"
    n_others = len(left) - len(seconds)
    others = f", and {n_others} of unknown time" if n_others else ""
    return f"{text}: {sum(seconds) / 3600:.1f} hours by those that were measured{others}"


def main(argv=None):
    args = settings.parse(
        cfg=PublicConfig, paths="FILE.gguf and parts of a, b, c; or report", argv=argv
    )
    cfg, words = args.cfg, args.paths
    if words == ["report"]:
        file = Path(cfg.cells)
        cells = read_cells(file)
        require(cells, f"{file} has no cells: measure some first, as in public.py FILE.gguf a")
        public_report.write(cfg, cells, file.with_suffix(".md"))
        return
    path, parts = Path(*words[:1]), words[1:]
    is_known = bool(parts) and {"a", "b", "c"}.issuperset(parts)
    usage = "say experiments/public.py FILE.gguf a (or b, c, several), or report"
    require(is_known, f"public.py needs a checkpoint and parts of a, b, c: {usage}")
    require(path.exists(), f"there is no checkpoint {path}: run make smollm2")
    known = {"untouched", *METHODS}
    unknown = sorted({arm.partition("+")[0] for arm in (*cfg.arms, *cfg.finders)} - known)
    require(not unknown, f"there is no arm {', '.join(unknown)}: choose from {', '.join(known)}")
    check_sizes(cfg)
    measure(cfg, path, parts)


def check_sizes(cfg):
    """Raise UserError for sizes that measure nothing."""
    for name in ("targets", "documents", "prompts", "train_length"):
        require(getattr(cfg, name), f"--{name} must be at least 1")
    fits = len(set(cfg.lengths)) > 1 and cfg.targets <= max(cfg.lengths)
    require(fits, "--lengths needs two or more, the longest at least --targets: give others")
    step = SEQUENCES_PER_STEP * cfg.train_length
    has_steps = bool(cfg.tokens) and min(cfg.tokens) >= step
    require(has_steps, f"--tokens has less than a step of {step}: give more")


if __name__ == "__main__":
    run_main(main)
