"""Compare an exported directory with the model: transformers' logits and token ids with ours."""

import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from data.tokenizer import ImportedTokenizer
from nanolong.errors import UserError
from nanolong.hf_tokenizer import sample_text

# Runs in a process of its own outside of this folder: transformers would take our kernels/ for a
# package that it looks for.
TRANSFORMERS_SCRIPT = """
import sys
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, inputs, outputs = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
answers = {}
for name, tokens in load_file(inputs).items():
    if name == "text":
        text = bytes(tokens.tolist()).decode()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        answers[name] = torch.tensor(ids)
    else:
        with torch.no_grad():
            logits = model(tokens).logits
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
    lengths = verified_lengths(model)
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for length in lengths:
        shape = (1, length)
        inputs[str(length)] = torch.randint(model.config.vocab_size, shape, generator=generator)
    if tokenizer:
        sample = sample_text(tokenizer)
        inputs["text"] = torch.tensor(list(sample.encode()), dtype=torch.uint8)
    answers = run_transformers(folder, inputs)

    report = []
    for length in lengths:
        difference = logit_difference(model, inputs[str(length)], answers[str(length)])
        report.append(f"{length} tokens: {difference:.1e}")
    text = f"verified by transformers: largest logit difference {', '.join(report)}"
    if tokenizer:
        if answers["text"].tolist() == tokenizer.encode(sample):
            text += "; text is encoded alike"
        elif isinstance(tokenizer, ImportedTokenizer):
            # its files are what they were
            text += "; its class of this tokenizer encodes text otherwise than tokenizer.json"
        else:
            raise UserError(
                "transformers encodes text otherwise by the tokenizer that was written, and "
                "nothing is kept: give --tokenizer=DIR with the original files, or report it"
            )
    print(text)


def verified_lengths(model):
    """Return the lengths in tokens to compare: a short one, and one beyond the original length."""
    config = model.config
    longest = config.original_length + 37
    if model.pos.bounded:
        longest = min(longest, config.block_size)
    # what takes some tens of seconds on a CPU
    affordable = max(40, int(4e12 / model.flops_per_token(64)))
    return sorted({min(33, config.block_size), min(longest, affordable)})


def run_transformers(folder, inputs):
    """Return what TRANSFORMERS_SCRIPT makes of a dict of tensors."""
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        save_file(inputs, place / "inputs")
        script = place / "script.py"
        script.write_text(TRANSFORMERS_SCRIPT, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, script, folder.resolve(), place / "inputs", place / "outputs"],
            cwd=place,
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
        )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"transformers does not load what was written ({reason}), and nothing is kept: "
                "update transformers, or give --verify=false"
            )
        return load_file(place / "outputs")


@torch.no_grad()
def logit_difference(model, tokens, theirs):
    """Return the largest difference of logits. Raises UserError beyond rounding errors."""
    length = tokens.shape[1]
    with warnings.catch_warnings():
        # a length beyond the context is meant here
        warnings.simplefilter("ignore", UserWarning)
        ours = model(tokens)[:, :: max(1, length // 64)]
    difference = (ours - theirs).abs().max().item()
    largest = ours.abs().max().item()
    # transformers' angles are float32, so that their error grows with the position
    if not difference <= 1e-6 * (100 + length) * max(1, largest):
        raise UserError(
            f"transformers computes other logits from what was exported ({difference:.2g} apart at "
            f"{length} tokens), so nothing was written: if you have edited the scheme or method, "
            "transformers has no equivalent of it, and if not, please report this error of ours"
        )
    return difference
