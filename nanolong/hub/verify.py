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
from nanolong.errors import UserError
from nanolong.hub.tokenizer import sample_text

ROOT = Path(__file__).resolve().parents[2]

# Takes a checkpoint, a file of inputs (name -> tokens, and "text" -> bytes) and one for the logits,
# of which at most 127 positions are kept.
OUR_SCRIPT = """
import sys
import warnings

import torch
from safetensors.torch import load_file, save_file

from model import GPT

folder, inputs, outputs = sys.argv[1:]
# a length beyond the context is meant here
warnings.simplefilter("ignore", UserWarning)
model = GPT.load(folder)
answers = {}
for name, tokens in load_file(inputs).items():
    if name != "text":
        with torch.no_grad():
            logits = model(tokens)
        answers[name] = logits[:, :: max(1, tokens.shape[1] // 64)].contiguous()
save_file(answers, outputs)
"""

# Takes an exported directory, the inputs, our logits, and a file for its answers: of tokens the
# largest difference of logits and our largest logit, of text its ids. It runs outside of this
# repository: transformers would take our kernels/ for a package that it looks for.
TRANSFORMERS_SCRIPT = """
import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, inputs, logits, outputs = sys.argv[1:]
inputs, ours = load_file(inputs), load_file(logits)
answers = {}
if "text" in inputs:
    text = bytes(inputs.pop("text").tolist()).decode()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers["text"] = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
for name, tokens in inputs.items():
    with torch.no_grad():
        theirs = model(tokens).logits[:, :: max(1, tokens.shape[1] // 64)]
    difference = (theirs - ours[name]).abs().max()
    answers[name] = torch.stack((difference, ours[name].abs().max()))
save_file(answers, outputs)
"""


def verify_export(model, folder, tokenizer):
    """Let transformers load a directory, and compare its logits and token ids with ours.

    Prints the differences. Raises UserError when they are too large.
    """
    if importlib.util.find_spec("transformers") is None:
        print("not verified: transformers is not installed (pip install transformers)")
        return
    inputs = make_inputs(model)
    if tokenizer:
        text = sample_text(tokenizer).encode()
        inputs["text"] = torch.tensor(list(text), dtype=torch.uint8)
    answers = run_both_sides(model.folder, folder, inputs)
    report = []
    for name in inputs:
        if name != "text":
            difference, largest = answers[name].tolist()
            check_difference(name, difference, largest)
            report.append(f"{name}: {difference:.1e}")
    text = f"verified by transformers: largest logit difference {', '.join(report)}"
    if tokenizer:
        text += compare_ids(answers["text"].tolist(), tokenizer)
    print(text)
    peak = peak_of_children()
    if peak:
        print(f"peak memory of the verification, which had its own processes: {peak / 1e9:.2f} GB")


def make_inputs(model):
    """Return random tokens of the lengths to compare: "33 tokens" -> (1, 33) int64."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for length in verified_lengths(model):
        tokens = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        inputs[f"{length} tokens"] = tokens
    return inputs


def verified_lengths(model):
    """Return the lengths in tokens to compare: a short one, and one beyond the original length."""
    config = model.config
    longest = config.original_length + 37
    # an MPT of transformers has no distances beyond its length
    if model.pos.bounded or config.pos == "alibi":
        longest = min(longest, config.block_size)
    # what takes some tens of seconds on a CPU
    affordable = max(40, int(4e12 / model.flops_per_token(64)))
    return sorted({min(33, config.block_size), min(longest, affordable)})


def run_both_sides(checkpoint, folder, inputs):
    """Return the answers of TRANSFORMERS_SCRIPT for a checkpoint and what was exported from it."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_file(inputs, place / "inputs")
        files = [place / "inputs", place / "logits"]
        done = run_python(["-c", OUR_SCRIPT, checkpoint.resolve(), *files], ROOT)
        if done.returncode:
            raise UserError(
                f"our own logits cannot be computed ({last_line(done)}), and nothing is kept: "
                "give --verify=false to export without comparing"
            )
        script = place / "script.py"
        script.write_text(TRANSFORMERS_SCRIPT, encoding="utf-8")
        command = [script, folder.resolve(), *files, place / "answers"]
        done = run_python(command, place, HF_HUB_OFFLINE="1", PYTHONPATH="")
        if done.returncode:
            raise UserError(
                f"transformers does not load what was written ({last_line(done)}), and nothing is "
                "kept: update transformers, or give --verify=false"
            )
        return load_file(place / "answers")


def run_python(arguments, folder, **variables):
    """Run Python in a folder, with these environment variables; returns it finished."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )


def last_line(done):
    """Return why a process has failed: the last line of its errors."""
    lines = done.stderr.strip().splitlines()
    # without a message, the system has ended it, most often because memory ran out
    return lines[-1] if lines else f"exit status {done.returncode}"


def check_difference(name, difference, largest):
    """Raise UserError for a difference of logits beyond rounding errors; largest: of our logits."""
    length = int(name.split()[0])
    # transformers' angles are float32, so that their error grows with the position
    if not difference <= 1e-6 * (100 + length) * max(1, largest):
        raise UserError(
            f"transformers computes other logits from what was exported ({difference:.2g} apart at "
            f"{length} tokens), so nothing was written: if you have edited the scheme or method, "
            "transformers has no equivalent of it, and if not, please report this error of ours"
        )


def compare_ids(ids, tokenizer):
    """Return the end of the report: whether transformers encodes text to the same ids.

    Raises UserError for a tokenizer that we have written ourselves, where it does not.
    """
    if ids == tokenizer.encode(sample_text(tokenizer)):
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
