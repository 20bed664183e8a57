"""Compare an exported directory with the model: transformers' logits and token ids with ours.

Each side runs in a process of its own, one after the other, so that there is one model in memory at
a time, and none in this process.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from data.tokenizer import ImportedTokenizer
from nanolong import devices
from nanolong.errors import UserError
from nanolong.hub.tokenizer import sample_text

ROOT = Path(__file__).resolve().parents[2]

# Takes a checkpoint, a file of inputs (name -> tokens, and "text" -> bytes) and one for the
# answers: of tokens the logits at 127 positions at most, of text its ids.
START = """
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file

folder, inputs, outputs = sys.argv[1:]
inputs, answers = load_file(inputs), {}
text = bytes(inputs.pop("text").tolist()).decode()
"""
OURS = """
from model import GPT

# a length beyond the context is meant here
warnings.simplefilter("ignore", UserWarning)
model = GPT.load(folder)

def compute_logits(tokens):
    return model(tokens)
"""
TRANSFORMERS = """
from transformers import AutoModelForCausalLM, AutoTokenizer

if text:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers["text"] = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

def compute_logits(tokens):
    return model(tokens).logits
"""
END = """
for name, tokens in inputs.items():
    with torch.no_grad():
        logits = compute_logits(tokens)
    answers[name] = logits[:, :: max(1, tokens.shape[1] // 64)].contiguous()
save_file(answers, outputs)
"""


def verify_export(model, folder, tokenizer):
    """Let transformers load a directory, and compare its logits and token ids with ours.

    Prints the differences. Raises UserError when they are too large.
    """
    if importlib.util.find_spec("transformers") is None:
        print("not verified: transformers is not installed (pip install transformers)")
        return
    text = sample_text(tokenizer) if tokenizer else ""
    inputs = {"text": torch.tensor(list(text.encode()), dtype=torch.uint8)}
    generator = torch.Generator().manual_seed(0)
    for length in verified_lengths(model):
        tokens = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        inputs[str(length)] = tokens
    ours, theirs = run_both_sides(model.folder, folder, inputs)
    report = []
    for length, logits in ours.items():
        difference = (logits - theirs[length]).abs().max().item()
        # transformers' angles are float32, so that their error grows with the position
        if not difference <= 1e-6 * (100 + int(length)) * max(1, logits.abs().max().item()):
            raise UserError(
                "transformers computes other logits from what was exported "
                f"({difference:.2g} apart at {length} tokens), so nothing was written: if you have "
                "edited the scheme or method, transformers has no equivalent of it, and if not, "
                "please report this error of ours"
            )
        report.append(f"{length} tokens: {difference:.1e}")
    report = f"verified by transformers: largest logit difference {', '.join(report)}"
    if tokenizer:
        report += compare_ids(theirs["text"].tolist(), tokenizer, text)
    print(report)
    peak = peak_of_children()
    if peak:
        print(f"peak memory of the verification, which had its own processes: {peak / 1e9:.2f} GB")


def verified_lengths(model):
    """Return the lengths in tokens to compare: a short one, and one beyond the original length."""
    config = model.config
    longest = config.original_length + 37
    # an MPT of transformers has no distances beyond its length
    if model.pos.bounded or config.pos == "alibi":
        longest = min(longest, config.block_size)
    # what takes some tens of seconds on a CPU
    affordable = max(40, int(4e12 / devices.flops_per_token(model, 64)))
    return sorted({min(33, config.block_size), min(longest, affordable)})


def run_both_sides(checkpoint, exported, inputs):
    """Return the answers of both sides for a checkpoint and what was exported from it."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_file(inputs, place / "inputs")
        run_side("nanoLong", OURS, checkpoint, place, ROOT)
        # outside of this repository: transformers would take our kernels/ for a package that it
        # looks for
        run_side("transformers", TRANSFORMERS, exported, place, place)
        return load_file(place / "nanoLong"), load_file(place / "transformers")


def run_side(name, script, folder, place, working_folder):
    """Run the script of one side on the file of inputs in a place. Raises UserError."""
    words = [START + script + END, folder.resolve(), place / "inputs", place / name]
    done = subprocess.run(
        [sys.executable, "-c", *words],
        cwd=working_folder,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    if done.returncode:
        # without a message, the system has ended it, most often because memory ran out
        lines = [f"exit status {done.returncode}", *done.stderr.strip().splitlines()]
        raise UserError(
            f"{name} cannot compute the logits ({lines[-1]}), and nothing is kept: update "
            "transformers, or give --verify=false to export without comparing"
        )


def compare_ids(ids, tokenizer, text):
    """Return the end of the report: whether transformers encodes text to the same ids.

    Raises UserError for a tokenizer that we have written ourselves, where it does not.
    """
    if ids == tokenizer.encode(text):
        return "; text is encoded alike"
    if isinstance(tokenizer, ImportedTokenizer):
        # its files are what they were
        return "; its class of this tokenizer encodes text otherwise than tokenizer.json"
    raise UserError(
        "transformers encodes text otherwise by the tokenizer that was written, and nothing is "
        "kept: give --tokenizer=DIR with the original files, or report it"
    )


def peak_of_children():
    """Return the most memory that a child process of this one has had, in bytes.

    None if the system does not say.
    """
    try:
        import resource
    except ImportError:  # Windows
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
