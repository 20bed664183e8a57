"""Measure checkpoints: loss by context length and by position, or retrieval of a hidden passkey.

    python evaluate.py out/rope out/rope-yarn4 --lengths=256,512,1024 --plot=out/length.png
    python evaluate.py "RoPE=out/rope" "YaRN=out/rope-yarn4" --protocol=last-quarter
    python evaluate.py out/smollm2 --text=book.txt --lengths=2048,8192
    python evaluate.py out/rope out/rope-yarn4 --task=needle --plot=out/needle.png

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

At most --max_tokens are scored: sequences of the longest length, evenly spaced over all validation
files, as in train.py. Shorter sequences lie in these, so with the first four protocols all lengths
score the same text. Where the last sequence overlaps the one before it, only its new tokens are
scored. A mean is over all scored tokens, never over sequences. Dynamic methods scale by the length
of the whole sequence. A model with random positions gets positions sampled as in training.

The text is the validation text of --dataset, of the dataset that a checkpoint was trained on, or
--text=FILE, a plain text in the tokens of each checkpoint. Models with different vocabularies are
compared by bits per byte, which is loss * tokens / bytes / ln 2 of a record: "bytes" is the UTF-8
text that the scored tokens stand for.

--task=needle hides a passkey of three digits in filler text, at a depth from 0 (the start) to 1
(the end), and asks for it at the end of the prompt. A trial succeeds when every digit has the
highest probability given the correct digits before it (teacher forcing), so nothing is sampled and
guessing succeeds once in 1,000 trials. The control has no passkey in its prompt. The prompts depend
on the seed, length and depth only, so all checkpoints with one tokenizer see the same ones. Small
models know the format only from training: use train.py --passkey=0.1.
"""

from nanolong import python_version  # noqa: F401  # isort: skip
import math
import shlex
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from data import (
    DIGITS,
    Dataset,
    TextFile,
    passkey,
    same_vocabulary,
    tokenizer_from_json,
)
from model import GPT, POSITIONS, ContextLengthWarning
from nanolong import (
    cli,
    devices,
    entry,
    evaluation_log,
    inference,
    parallel,
    plots,
    provenance,
    run,
    validate,
)
from nanolong.errors import UserError

Protocol = Literal["chunked", "last-quarter", "position", "sliding", "token-aligned"]

# With fewer sequences than this the choice of the text decides how two lengths compare.
MIN_SEQUENCES = 8

# Tokens in one forward pass: of a batch of sequences, and of a chunk of one long sequence.
BATCH_TOKENS = 16384
CHUNK = 32768


@dataclass
class EvaluateConfig:
    # [measurement]
    task: Literal["loss", "needle"] = "loss"  # what to measure
    # context lengths in tokens; default: 1, 2, 4 and 8 times the shortest original context length
    # (needle: 1, 2, 3 and 4 times)
    lengths: tuple[int, ...] = ()
    seed: int = 1  # seed of the needle prompts
    # Python files, each with one scheme of your own, for checkpoints that were trained with it
    entry: tuple[str, ...] = ()
    best: bool = False  # of a run folder, use the step with the lowest validation loss
    # [loss]
    # how to score, see above; by default of a single length without token-aligned
    protocol: tuple[Protocol, ...] = ("chunked", "last-quarter", "token-aligned")
    # sliding, token-aligned: scored tokens at the end of a sequence, at most the sequence itself
    # (token-aligned: at most half the shortest length)
    stride: int = 256
    max_tokens: int = 65536  # tokens of the validation text that are scored, spread over its files
    dataset: str = ""  # default: the one that each checkpoint was trained on
    text: str = ""  # score this text file, in the tokens of each checkpoint, and no dataset
    # [needle]
    depths: int = 5  # number of depths, from the start to the end
    trials: int = 64  # prompts for each length and depth
    # [output]
    plot: str = ""  # write a figure to this PNG file (needs matplotlib)
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
        validate.check_evaluate(self)


# -----------------------------------------------------------------------------
# Protocols: which sequences are evaluated, and which of their tokens are scored.


def aligned_stride(stride, lengths):
    """Return the scored tokens of a token-aligned sequence: at most half the shortest length."""
    return min(stride, max(1, min(lengths) // 2))


def place_sequences(protocol, length, stop, stride=256, lengths=(), start=0):
    """Place sequences of `length` targets that score the targets from `start` to `stop` of a text.

    Returns a list of (start, n_context): the first n_context targets of a sequence are context
    only and are not scored. token-aligned needs all `lengths` that are to be compared.
    """
    if protocol == "token-aligned":
        # Sequences of the longest length lie end to end; shorter ones end where these end.
        longest = max(lengths)
        n_context = length - aligned_stride(stride, lengths)
        return [(end - length, n_context) for end in range(start + longest, stop + 1, longest)]

    step = length
    first_end = start + length
    if protocol == "sliding":
        step = min(stride, length)
        first_end = max(length, start + step)  # what comes before `start` is context, too
    ends = [*range(first_end, stop, step), stop]
    sequences = []
    for previous_end, end in pairwise([start, *ends]):
        n_new = end - previous_end
        sequences.append((end - length, length - n_new))
    return sequences


def group_protocols(cfg, lengths):
    """Group the protocols that share their forward passes, with the extra fields of their records.

    Returns a list of (protocols, fields).
    """
    separate = ("sliding", "token-aligned")
    shared = tuple(protocol for protocol in cfg.protocol if protocol not in separate)
    groups = [(shared, {})] if shared else []
    for protocol in cfg.protocol:
        if protocol == "sliding":
            groups.append(((protocol,), {"stride": cfg.stride}))
        elif protocol == "token-aligned":
            groups.append(((protocol,), {"stride": aligned_stride(cfg.stride, lengths)}))
    return groups


# -----------------------------------------------------------------------------
# Loss


@contextmanager
def evaluation_mode(model, dtype):
    """Disable dropout and gradients, multiply matrices in `dtype`, allow any context length.

    Yields the device of the model. Leaves the model in the mode in which it was.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), devices.autocast(device, dtype), warnings.catch_warnings():
            warnings.simplefilter("ignore", ContextLengthWarning)
            yield device
    finally:
        model.train(was_training)


def token_losses(model, x, y, positions):
    """Return the loss of every token in nats, (B, T), for inputs and targets (B, T).

    A sequence of more than CHUNK tokens passes through the model in chunks, with a KV cache, so
    that the memory for activations does not grow with its length.
    """
    length = x.shape[1]
    if model.own_tokens(length) != slice(None):  # other processes compute the other tokens
        return parallel.gather_tokens(model(x, y, positions, reduction="none"))
    # A method whose tables depend on the length has to see the whole sequence at once.
    if length <= CHUNK or model.set_length(CHUNK) != model.set_length(length):
        return model(x, y, positions, reduction="none")
    cache = inference.KVCache(capacity=length)
    losses = []
    for start in range(0, length, CHUNK):
        chunk = slice(start, start + CHUNK)
        pos = None if positions is None else positions[..., chunk]
        losses.append(model(x[:, chunk], y[:, chunk], pos, cache=cache, reduction="none"))
    return torch.cat(losses, 1)


def fitting_lengths(split, lengths, max_tokens):
    """Return those of `lengths` of which some file of `split` holds a sequence."""
    return [n for n in lengths if n <= max_tokens and split.n_sequences(n).any()]


def find_spans(split, longest, max_tokens):
    """Choose the text that is scored: spans (file, start, stop) of at most max_tokens targets.

    They are sequences of `longest` targets, evenly spaced over all files as in train.py's
    validation. A text of at most max_tokens is scored as a whole, but for files that are shorter.
    """
    sizes = [len(tokens) - split.extra_tokens for tokens in split.tokens]
    if sum(sizes) <= max_tokens:
        return [(file, 0, size) for file, size in enumerate(sizes) if size >= longest]
    indices = split.spaced(max_tokens // longest, longest)
    starts = [split.locate(index, longest) for index in indices]
    return [(file, start, start + longest) for file, start in starts]


def find_sequences(split, length, max_tokens=65536, protocol="chunked", stride=256, lengths=()):
    """Place the sequences of a protocol in the text that is scored.

    lengths: all that are to be compared, which score the same text. Returns a list of
    (file, start, n_context): the index of a file in `split`, and what place_sequences() returns.
    Raises UserError when the text is too short.
    """
    fitting = fitting_lengths(split, (*lengths, length), max_tokens)
    if length not in fitting:
        n_targets = max(len(tokens) - split.extra_tokens for tokens in split.tokens)
        raise UserError(
            f"a sequence of {length} tokens is longer than the {min(max_tokens, n_targets)} that "
            "are scored: raise --max_tokens, or give a longer validation text"
        )
    sequences = []
    for file, start, stop in find_spans(split, max(fitting), max_tokens):
        placed = place_sequences(protocol, length, stop, stride, fitting, start)
        sequences += [(file, *place) for place in placed]
    return sequences


def read_sequence(split, file, start, length, n_context):
    """Read a sequence: inputs and targets, (length,).

    Targets of -1 are not scored: here those that are context only, in the text <bos>.
    """
    inputs, targets = split.sequence_at(file, start, length)
    return inputs, np.where(np.arange(length) < n_context, -1, targets)


def loss_by_position(
    model,
    split,
    length,
    max_tokens=65536,
    dtype=torch.float32,
    protocol="chunked",
    stride=256,
    lengths=(),
):
    """Sum the loss at each position of sequences of `length` tokens.

    Returns two float64 tensors (length,): the summed loss in nats and the number of scored tokens.
    The sequences are those of find_sequences(): give all `lengths` that are to be compared. The
    model computes on the device of its weights. Raises UserError when the text or the context of
    the model is too short.
    """
    sequences = find_sequences(split, length, max_tokens, protocol, stride, lengths)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    batch_size = max(1, BATCH_TOKENS // length)
    with evaluation_mode(model, dtype) as device:
        for i in range(0, len(sequences), batch_size):
            batch = sequences[i : i + batch_size]
            pairs = [read_sequence(split, file, start, length, n) for file, start, n in batch]
            x = torch.from_numpy(np.stack([inputs for inputs, _ in pairs]))
            y = torch.from_numpy(np.stack([targets for _, targets in pairs]))
            positions = model.sample_positions(len(x), length, batch[0][1])
            losses = token_losses(model, x.to(device), y.to(device), positions).cpu().double()
            loss_sum += losses.sum(0)
            n_scored += (y >= 0).sum(0)
    return loss_sum, n_scored


def bytes_by_position(
    dataset, length, max_tokens=65536, protocol="chunked", stride=256, lengths=()
):
    """Count the bytes of text that the scored targets at each position stand for: int64 (length,).

    The targets are those of loss_by_position(). dataset: a Dataset or TextFile. Returns None if
    the tokenizer, or what its tokens stand for, is unknown.
    """
    if dataset.tokenizer is None:
        return None
    try:
        byte_lengths = torch.from_numpy(dataset.tokenizer.byte_lengths)
        added_bytes = dataset.tokenizer.added_bytes
    except UserError:  # a tokenizer.json whose tokens are no bytes, or without its package
        return None
    split = dataset.val
    sequences = find_sequences(split, length, max_tokens, protocol, stride, lengths)
    n_bytes = torch.zeros(length, dtype=torch.int64)
    for file, start, n_context in sequences:
        sequence = read_sequence(split, file, start, length, n_context)
        inputs, targets = map(torch.from_numpy, sequence)
        scored = targets >= 0
        n_bytes[scored] += byte_lengths[targets[scored]]
        if added_bytes:
            # What the tokenizer has put before a document is not the document's.
            starts_document = inputs == dataset.separator
            if split.bos is not None:
                starts_document[0] = start == 0
            n_bytes[scored & starts_document] -= added_bytes
    return n_bytes


def loss_record(name, protocol, length, **fields):
    """Return a record of a loss, as it is written to the JSON file."""
    return {"checkpoint": name, "task": "loss", "protocol": protocol, "length": length, **fields}


def make_records(name, loss_sum, n_scored, protocols, n_bytes=None, **fields):
    """Turn the sums by position at one length into records: one for each protocol.

    `position` makes one for each part of the sequence. n_bytes: of bytes_by_position(), None if
    they are unknown. `fields` are added to every record.
    """
    length = len(loss_sum)
    records = []
    for protocol in protocols:
        if protocol == "position":
            edges = sorted({length * i // 16 for i in range(17)})
        elif protocol == "last-quarter":
            edges = [length * 3 // 4, length]
        else:
            edges = [0, length]
        for start, end in pairwise(edges):
            count = int(n_scored[start:end].sum())
            loss = loss_sum[start:end].sum().item()
            record = loss_record(name, protocol, length, **fields)
            if protocol == "position":
                record["position"] = [start, end]
            record["loss"] = loss / count if count else math.nan
            record["tokens"] = count
            if n_bytes is not None:
                record["bytes"] = int(n_bytes[start:end].sum())
            records.append(record)
    return records


def plan_loss(name, model, text, cfg, lengths, length, protocols, fields):
    """Return the Measurement of protocols that share their forward passes, at one length.

    Where a loss cannot be measured, its record has "refused" with the reason.
    """
    split = text.val
    placement = {"protocol": protocols[0], "stride": cfg.stride, "lengths": lengths}
    settings = {"protocols": protocols, **fields}
    try:
        settings["sequences"] = find_sequences(split, length, cfg.max_tokens, **placement)
    except UserError as error:
        settings["refused"] = str(error)
    n_sequences = len(settings.get("sequences", ()))

    def measure():
        dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
        try:
            loss_sum, n_scored = loss_by_position(
                model, split, length, cfg.max_tokens, dtype, **placement
            )
        except UserError as error:
            refused = {**fields, "refused": str(error)}
            return [loss_record(name, protocol, length, **refused) for protocol in protocols]
        n_bytes = bytes_by_position(text, length, cfg.max_tokens, **placement)
        counted = {**fields, "sequences": n_sequences}
        return make_records(name, loss_sum, n_scored, protocols, n_bytes, **counted)

    flops = n_sequences * length * model.flops_per_token(length)
    return evaluation_log.Measurement(name, length, settings, flops, measure)


def measure_losses(models, cfg, lengths, texts=None, log=None):
    """Measure every checkpoint (name -> GPT, on its device) at every length, by every protocol.

    texts: of open_texts(), if they are open already; log: an EvaluationLog, or None to print
    nothing. Returns a list of records. Where a loss cannot be measured, the record has "refused"
    with the reason in place of "loss" and "tokens".
    """
    texts = texts or open_texts(models, cfg, lengths)
    if cfg.sequence_parallel > 1:
        parallel.check_same_everywhere(data=[text.hash for text in texts.values()])
    measurements = []
    for name, length, group in product(models, lengths, group_protocols(cfg, lengths)):
        what = (name, models[name], texts[name], cfg, lengths, length)
        measurements.append(plan_loss(*what, *group))
    return evaluation_log.measure_all(measurements, log)


def open_texts(models, cfg, lengths):
    """Open the text that each checkpoint is scored on: a dict from name to Dataset or TextFile."""
    datasets = {}
    texts = {}
    for name, model in models.items():
        if cfg.text:
            texts[name] = read_text(model, cfg.text)
            check_text_length(texts[name], lengths)
            continue
        key = (cfg.dataset or model.meta["dataset"], model.meta.get("bos") is not None)
        what = getattr(model, "folder", name)
        reader = (what, model.config.vocab_size, model.meta.get("tokenizer"))
        if key not in datasets:
            datasets[key] = Dataset(*key, reader)
        texts[name] = datasets[key]
        texts[name].check_model(*reader)
        warn_if_data_changed(what, model.meta, texts[name])
    longest = max(len(text.val) for text in texts.values())
    if cfg.text and longest > cfg.max_tokens and have_different_vocabularies(models):
        print(
            f"note: {cfg.max_tokens} tokens are another part of the text in each vocabulary: "
            f"to compare bits per byte on all of it, give --max_tokens={longest}",
            file=sys.stderr,
        )
    return texts


def read_text(model, file):
    """Read a text file as a TextFile in the tokens of the model. Raises UserError."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer is None:
        what = getattr(model, "folder", "the model")
        raise UserError(f"the tokenizer of {what} is unknown: give --dataset, not --text")
    return TextFile(file, tokenizer, model.config.vocab_size, model.meta.get("bos"))


def check_text_length(text, lengths):
    """Raise UserError for a text that is too short for a sequence of any length."""
    if not text.val.n_sequences(min(lengths)).any():
        raise UserError(
            f"--text={text.name} holds {len(text.val)} tokens, too few for a sequence of "
            f"{min(lengths)}: give a longer text, or shorter --lengths"
        )


def warn_if_data_changed(what, meta, dataset):
    """Warn if a dataset has changed since a checkpoint was trained on it.

    What is validation text now may have been training text then. meta: the checkpoint's.
    """
    if dataset.name != meta.get("dataset"):
        return
    trained_on = meta.get("data_hash", dataset.hash)
    if trained_on != dataset.hash:
        print(
            f"note: dataset {dataset.name} is now {dataset.hash}, and {what} was trained on "
            f"{trained_on}: the model may have seen in training what is scored here",
            file=sys.stderr,
        )


# -----------------------------------------------------------------------------
# Needle: retrieval of a passkey hidden in filler text


def find_needle(
    model, tokenizer, length, depth, trials=64, seed=1, bos=None, dtype=torch.float32, hidden=True
):
    """Ask for a passkey hidden at a depth from 0 to 1, in prompts of `length` tokens.

    Returns two floats: the fraction of trials in which all digits had the highest probability, and
    the mean loss in nats per digit. hidden=False leaves the passkey out of the prompt (control).
    """
    if tokenizer is None:
        raise UserError(
            "find_needle() has no tokenizer to write prompts with: give that of the model, "
            'data.tokenizer_from_json(model.meta["tokenizer"])'
        )
    entropy = [seed, length, round(depth * 1e6), hidden]
    rng = np.random.Generator(np.random.PCG64(entropy))
    prompts = [passkey(tokenizer, length, depth, rng, bos, hidden) for _ in range(trials)]
    batch_size = max(1, BATCH_TOKENS // length)
    n_found = 0
    loss_sum = 0.0
    with evaluation_mode(model, dtype) as device:
        for i in range(0, trials, batch_size):
            batch = prompts[i : i + batch_size]
            x = torch.from_numpy(np.stack([inputs for inputs, _ in batch])).to(device)
            y = torch.from_numpy(np.stack([targets for _, targets in batch])).to(device)
            positions = model.sample_positions(len(x), length, seed)
            # Only the answer needs logits: the last digits of the targets.
            hidden_states = model.hidden_states(x, positions)
            hidden_states = parallel.gather_tokens(hidden_states[:, -DIGITS:])[:, -DIGITS:]
            logits = model.head(hidden_states).float()  # (B, DIGITS, V)
            answer = y[:, -DIGITS:]
            correct = logits.argmax(-1) == answer
            n_found += int(correct.all(1).sum())
            loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum")
            loss_sum += loss.item()
    return n_found / trials, loss_sum / trials / DIGITS


def plan_needle(name, model, tokenizer, cfg, length, depth):
    """Return the Measurement of retrieval at one length and depth, or of the control (None)."""

    def measure():
        record = {"checkpoint": name, "task": "needle", "length": length, "depth": depth}
        record.update(trials=cfg.trials, seed=cfg.seed)
        dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
        # Nothing is hidden in the control, whose depth only seeds its prompts.
        hidden = depth is not None
        place = depth if hidden else 0.5
        bos = model.meta.get("bos")
        try:
            record["accuracy"], record["nll"] = find_needle(
                model, tokenizer, length, place, cfg.trials, cfg.seed, bos, dtype, hidden
            )
        except UserError as error:
            record["refused"] = str(error)
        return [record]

    settings = {"depth": depth, "trials": cfg.trials, "seed": cfg.seed}
    flops = cfg.trials * length * model.flops_per_token(length)
    return evaluation_log.Measurement(name, length, settings, flops, measure)


def measure_needles(models, cfg, lengths, log=None):
    """Measure retrieval for every checkpoint, length and depth, and for the control (depth None).

    Returns a list of records; one that cannot be measured has "refused" with the reason. log: as in
    measure_losses().
    """
    depths = [i / max(1, cfg.depths - 1) for i in range(cfg.depths)]
    measurements = []
    for name, model in models.items():
        tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
        if tokenizer is None:
            raise UserError(
                f"{name} has no tokenizer, so it cannot be asked in text: "
                "use one that was trained on a text prepared by data/prepare.py"
            )
        if not (model.meta.get("train") or {}).get("passkey"):
            print(
                f"note: {name} was not trained on passkey documents (train.py --passkey=0.5), so "
                "it may not know the question",
                file=sys.stderr,
            )
        for length, depth in product(lengths, (*depths, None)):
            measurements.append(plan_needle(name, model, tokenizer, cfg, length, depth))
    return evaluation_log.measure_all(measurements, log)


# -----------------------------------------------------------------------------
# The command line


def load_models(paths, best, device, dtype=torch.float32):
    """Load the checkpoints of arguments FOLDER or NAME=FOLDER: a dict from name to GPT.

    dtype: of their weights, or None for what is stored.
    """
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
    return {name: GPT.load(folder, best, dtype).to(device) for name, folder in folders.items()}


def check_datasets(models, cfg):
    """Raise UserError if neither a checkpoint nor the command line names the text to score."""
    for name, model in models.items():
        if not (model.meta.get("dataset") or cfg.dataset or cfg.text):
            raise UserError(
                f"{name} does not say on which text it was trained: give --text=FILE, or --dataset "
                "(for an imported checkpoint, prepare a text by python data/prepare.py FILE "
                f"--tokenizer={shlex.quote(str(model.folder.parent))} --name=NAME)"
            )


def note_different_texts(models, cfg):
    """Print a note if the losses of the checkpoints cannot be compared."""
    texts = {cfg.text or cfg.dataset or model.meta.get("dataset") for model in models.values()}
    if len(texts) > 1 or have_different_vocabularies(models):
        print(
            "note: these checkpoints are scored on different texts or vocabularies, so their "
            "losses per token cannot be compared",
            file=sys.stderr,
        )


def note_few_sequences(records, lengths):
    """Print a note if lengths differ by the text that they score rather than by the context."""
    for protocol in ("last-quarter", "position"):  # the others score the same text at all lengths
        few = {}
        for record in records:
            n = record.get("sequences", MIN_SEQUENCES)
            if record["protocol"] == protocol and n < MIN_SEQUENCES:
                few[record["length"]] = f"{n} at {record['length']}"
        if few and len(lengths) > 1:
            print(
                f"note: {protocol} has few sequences ({', '.join(few.values())} tokens), and each "
                "length scores other text: compare lengths by token-aligned, or raise --max_tokens",
                file=sys.stderr,
            )


def have_different_vocabularies(models):
    """Return whether a token stands for different text in some of the checkpoints."""
    first, *others = models.values()
    for model in others:
        if model.config.vocab_size != first.config.vocab_size:
            return True
        tokenizers = [tokenizer_from_json(m.meta.get("tokenizer")) for m in (first, model)]
        if None not in tokenizers and not same_vocabulary(*tokenizers):
            return True
    return False


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
    """Return what the records of each checkpoint came from: a dict of fields by its name.

    texts: of open_texts(), {} where no text was scored.
    """
    fields = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": run.device_name(device),
        "commit": provenance.current_commit(),
    }
    found = {}
    for name, model in models.items():
        found[name] = {"folder": str(model.folder), **fields}
        if name in texts:
            found[name]["data_hash"] = texts[name].hash
    return found


def losses_to_plot(records, models):
    """Return the records to plot and their unit, which all vocabularies must have in common."""
    if not have_different_vocabularies(models):
        return records, "nats per token"
    in_bits = plots.bits_per_byte(records)
    if not in_bits:
        print(
            "note: nothing is plotted, for a loss per token means something else in each "
            "vocabulary: bits per byte need --protocol=chunked and checkpoints with a tokenizer",
            file=sys.stderr,
        )
    return in_bits, "bits per byte"


def print_losses(records, lengths, in_bits, plotted, unit):
    """Print the losses as tables and as plots in characters.

    in_bits: print a table in bits per byte, too; plotted, unit: of losses_to_plot().
    """
    print(plots.format_loss_table(records, lengths))
    bits = plots.bits_per_byte(records) if in_bits else []
    if bits:
        print()
        print("\n".join(plots.format_lengths(bits, lengths, "bits per byte")))
    for protocol in plots.unique(plotted, "protocol"):
        x_axis = "position" if protocol == "position" else "context length"
        print(f"\n{protocol}, {unit}, by {x_axis}")
        print(plots.terminal_plot(plots.loss_curves(plotted, protocol)))


def plot_records(records, models, cfg, lengths, scored, unit):
    """Write the figure of either task, with what it was measured on in its title and note.

    scored: of describe_scored(); unit: of losses_to_plot().
    """
    original = sorted({model.config.original_length for model in models.values()})
    trained_at = " or ".join(f"{length:,}" for length in original)
    title = f"Trained at {trained_at} tokens, evaluated at up to {max(lengths):,}"
    if cfg.task == "needle":
        chance = 10**-DIGITS
        note = f"{cfg.trials} prompts per cell, teacher-forced; chance is {chance}"
        plots.plot_needle_heatmaps(records, lengths, cfg.plot, note, title=title)
    elif records:
        plots.plot_losses(records, lengths, cfg.plot, scored[0], title=title, unit=unit)


def describe_scored(texts, lengths, max_tokens):
    """Say which part of each different text is scored: a list of lines.

    texts: of open_texts().
    """
    lines = []
    for text in texts.values():
        fitting = fitting_lengths(text.val, lengths, max_tokens)
        spans = find_spans(text.val, max(fitting), max_tokens) if fitting else []
        n_tokens = sum(stop - start for _, start, stop in spans)
        names = [text.val.files[file].name for file in sorted({file for file, _, _ in spans})]
        files = ", ".join(names)
        if len(names) > 3:
            files = f"{len(names)} of {len(text.val.files)} files"
        pieces = "1 piece" if len(spans) == 1 else f"{len(spans)} pieces"
        lines.append(
            f"{n_tokens:,} of {len(text.val):,} tokens of {text.name}, {pieces} of "
            f"{files or 'it'}, data {text.hash}"
        )
    return list(dict.fromkeys(lines))


def main():
    positional = "run folders or step folders; NAME=FOLDER names one in tables and figures"
    cfg, given, paths = cli.parse(EvaluateConfig, about=__doc__, paths=positional)
    rank, world = parallel.join_processes(cfg.device)
    run.check_processes_agree(given, cfg)
    validate.require(
        world in (1, cfg.sequence_parallel),
        f"evaluate.py runs in {world} processes, which share every sequence: give "
        f"--sequence_parallel={world}",
    )
    with cli.silent(rank > 0):
        return evaluate(cfg, given, paths, writes=rank == 0)


def evaluate(cfg, given, paths, writes):
    """Do what the settings say; only one process writes files. Returns the exit status."""
    device = devices.pick_device(cfg.device)
    entry.load_entries(cfg.entry, POSITIONS)
    models = load_models(paths, cfg.best, device, devices.weights_to_load(cfg.weights))
    parallel.check_same_everywhere(
        checkpoint=[run.weights_hash(model) for model in models.values()]
    )
    for model in models.values():
        devices.settle_weights(model, cfg.weights, devices.pick_dtype(cfg.dtype, device))
    if cfg.task == "loss":
        check_datasets(models, cfg)
        note_different_texts(models, cfg)
    for file in (cfg.plot, cfg.json):
        if file and writes:
            check_writable(file)
    saved = evaluation_log.read_records(cfg.json) if writes else []

    # The default lengths are multiples of the shortest original context length.
    shortest = min(model.config.original_length for model in models.values())
    factors = (1, 2, 4, 8) if cfg.task == "loss" else (1, 2, 3, 4)
    lengths = cfg.lengths or tuple(shortest * factor for factor in factors)
    if "protocol" not in given and len(lengths) == 1:
        cfg.protocol = ("chunked", "last-quarter")  # there is nothing to align
    for model in models.values():
        parallel.share_sequences(model, cfg.sequence_parallel, lengths)

    scored, texts, unit = [], {}, ""
    if cfg.task == "loss":
        texts = open_texts(models, cfg, lengths)
        scored = describe_scored(texts, lengths, cfg.max_tokens)
        print("\n".join(f"scored: {line}" for line in scored), flush=True)
    origin = origins(models, texts, devices.pick_dtype(cfg.dtype, device), device)
    code = entry.hash_sources(cfg.entry)
    processes = cfg.sequence_parallel
    file = cfg.json if writes else ""
    log = evaluation_log.EvaluationLog(file, saved, models, origin, code=code, processes=processes)
    if cfg.task == "loss":
        records = measure_losses(models, cfg, lengths, texts, log)
        print()
        plotted, unit = losses_to_plot(records, models)
        # where a token is a byte, bits per byte would say nothing new
        has_words = any(r.get("bytes") not in (None, r.get("tokens")) for r in records)
        in_bits = bool(cfg.text) or unit == "bits per byte" or has_words
        print_losses(records, lengths, in_bits, plotted, unit)
        note_few_sequences(records, lengths)
    else:
        plotted = measure_needles(models, cfg, lengths, log)
        print()
        print(plots.format_needle_table(plotted, lengths))

    if cfg.plot and writes:
        plot_records(plotted, models, cfg, lengths, scored, unit)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
