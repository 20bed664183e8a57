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
import shlex
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import data
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
    scoring,
    validate,
)
from nanolong.errors import UserError, note

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
# Loss


@contextmanager
def evaluation_mode(model, dtype):
    """Disable dropout and gradients, multiply matrices in `dtype`, allow any context length.

    Yields the device of the model. Leaves the model in the mode in which it was.
    """
    device = next(model.parameters()).device
    with torch.no_grad(), devices.autocast(device, dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextLengthWarning)
        with inference.EvaluationMode(model):
            yield device


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


def loss_by_position(model, split, length, max_tokens=65536, dtype=torch.float32, **placement):
    """Sum the loss at each position of sequences of `length` tokens.

    Returns two float64 tensors (length,): the summed loss in nats and the number of scored tokens.
    placement: the protocol, stride and all `lengths` that are to be compared, which are arguments
    of scoring.find_sequences(). The model computes on the device of its weights. Raises UserError
    when the text or the context of the model is too short.
    """
    sequences = scoring.find_sequences(split, length, max_tokens, **placement)
    loss_sum = torch.zeros(length, dtype=torch.float64)
    n_scored = torch.zeros(length, dtype=torch.float64)
    batch_size = max(1, BATCH_TOKENS // length)
    with evaluation_mode(model, dtype) as device:
        for i in range(0, len(sequences), batch_size):
            batch = sequences[i : i + batch_size]
            x, y = scoring.read_sequences(split, length, batch)
            positions = model.sample_positions(len(x), length, batch[0][1])
            losses = token_losses(model, x.to(device), y.to(device), positions).cpu().double()
            loss_sum += losses.sum(0)
            n_scored += (y >= 0).sum(0)
    return loss_sum, n_scored


def plan_loss(name, model, text, cfg, lengths, length, protocols, fields):
    """Return the Measurement of protocols that share their forward passes, at one length.

    If a loss cannot be measured, its record has "refused" with the reason.
    """
    split = text.val
    placement = {"protocol": protocols[0], "stride": cfg.stride, "lengths": lengths}
    settings = {"protocols": protocols, **fields}
    try:
        settings["sequences"] = scoring.find_sequences(split, length, cfg.max_tokens, **placement)
    except UserError as error:
        settings["refused"] = str(error)
    n_sequences = len(settings.get("sequences", ()))

    def measure():
        dtype = devices.pick_dtype(cfg.dtype, next(model.parameters()).device)
        try:
            sums = loss_by_position(model, split, length, cfg.max_tokens, dtype, **placement)
        except UserError as error:
            refused = {**fields, "refused": str(error)}
            return [scoring.loss_record(name, word, length, **refused) for word in protocols]
        n_bytes = scoring.bytes_by_position(text, length, cfg.max_tokens, **placement)
        counted = {**fields, "sequences": n_sequences}
        return scoring.make_records(name, *sums, protocols, n_bytes, **counted)

    flops = n_sequences * length * model.flops_per_token(length)
    return evaluation_log.Measurement(name, length, settings, flops, measure)


def measure_losses(models, cfg, lengths, texts=None, log=None):
    """Measure every checkpoint (name -> GPT, on its device) at every length, by every protocol.

    texts: of scoring.open_texts(), if they are open; log: an EvaluationLog, None to print nothing.
    Returns a list of records. Where a loss cannot be measured, the record has "refused"
    with the reason in place of "loss" and "tokens".
    """
    texts = texts or scoring.open_texts(models, cfg, lengths)
    if cfg.sequence_parallel > 1:
        parallel.check_same_everywhere(data=[text.hash for text in texts.values()])
    groups = scoring.group_protocols(cfg.protocol, cfg.stride, lengths)
    measurements = []
    for name, length, group in product(models, lengths, groups):
        planned = plan_loss(name, models[name], texts[name], cfg, lengths, length, *group)
        measurements.append(planned)
    return evaluation_log.measure_all(measurements, log)


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
    prompts = [data.passkey(tokenizer, length, depth, rng, bos, hidden) for _ in range(trials)]
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
            last = parallel.gather_tokens(hidden_states[:, -data.DIGITS :])[:, -data.DIGITS :]
            logits = model.head(last).float()  # (B, DIGITS, V)
            answer = y[:, -data.DIGITS :]
            correct = logits.argmax(-1) == answer
            n_found += int(correct.all(1).sum())
            loss = F.cross_entropy(logits.flatten(0, 1), answer.flatten(), reduction="sum")
            loss_sum += loss.item()
    return n_found / trials, loss_sum / trials / data.DIGITS


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
        tokenizer = data.tokenizer_from_json(model.meta.get("tokenizer"))
        if tokenizer is None:
            raise UserError(
                f"{name} has no tokenizer, so it cannot be asked in text: "
                "use one that was trained on a text prepared by data/prepare.py"
            )
        if not (model.meta.get("train") or {}).get("passkey"):
            note(
                f"{name} was not trained on passkey documents (train.py --passkey=0.5), so "
                "it may not know the question"
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
    if len(texts) > 1 or scoring.have_different_vocabularies(models):
        note(
            "these checkpoints are scored on different texts or vocabularies, so their "
            "losses per token cannot be compared"
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
    """Return what the records of each checkpoint came from: a dict of fields by its name.

    texts: of scoring.open_texts(), {} where no text was scored.
    """
    fields = {
        "dtype": str(dtype).removeprefix("torch."),
        "device": run.device_name(device),
        "commit": provenance.current_commit(),
    }
    found = {name: {"folder": str(model.folder), **fields} for name, model in models.items()}
    for name, text in texts.items():
        found[name]["data_hash"] = text.hash
    return found


def losses_to_plot(records, models):
    """Return the records to plot and their unit, which all vocabularies must have in common."""
    if not scoring.have_different_vocabularies(models):
        return records, "nats per token"
    in_bits = plots.bits_per_byte(records)
    if not in_bits:
        note(
            "nothing is plotted, for a loss per token means something else in each "
            "vocabulary: bits per byte need --protocol=chunked and checkpoints with a tokenizer"
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

    scored: of scoring.describe_scored(); unit: of losses_to_plot().
    """
    original = sorted({model.config.original_length for model in models.values()})
    trained_at = " or ".join(f"{length:,}" for length in original)
    title = f"Trained at {trained_at} tokens, evaluated at up to {max(lengths):,}"
    if cfg.task == "needle":
        chance = 10**-data.DIGITS
        caption = f"{cfg.trials} prompts per cell, teacher-forced; chance is {chance}"
        plots.plot_needle_heatmaps(records, lengths, cfg.plot, caption, title=title)
    elif records:
        plots.plot_losses(records, lengths, cfg.plot, scored[0], title=title, unit=unit)


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
    parallel.check_same_everywhere(checkpoint=list(map(run.weights_hash, models.values())))
    dtype = devices.pick_dtype(cfg.dtype, device)
    for model in models.values():
        devices.settle_weights(model, cfg.weights, dtype)
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
        texts = scoring.open_texts(models, cfg, lengths)
        scored = scoring.describe_scored(texts, lengths, cfg.max_tokens)
        print("\n".join(f"scored: {line}" for line in scored), flush=True)
    origin = origins(models, texts, dtype, device)
    facts = {"code": entry.hash_sources(cfg.entry), "processes": cfg.sequence_parallel}
    file = cfg.json if writes else ""
    log = evaluation_log.EvaluationLog(file, saved, models, origin, **facts)
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
