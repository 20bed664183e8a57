"""Sample text from a checkpoint, printed as it comes.

    python sample.py out/python-rope --start="def " --max_new_tokens=500
    python sample.py --start=FILE:prompt.txt         the newest run under out/

Takes a run folder (its newest step) or a step folder. How a model was stretched is in its checkpoint, so there is nothing to repeat here.
"""
import config  # first: it says in one sentence that a Python is too old
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import data
from config import UserError
from model import GPT, PastTrainedLength, Refused


@dataclass
class SampleConfig:
    out_dir: str = ""            # the run folder, as another way to name it; by default the newest under out/
    start: str = ""              # the prompt; FILE:PATH reads it from a file
    max_new_tokens: int = 500    # tokens to write
    num_samples: int = 1         # texts to write
    temperature: float = 0.8     # 0: the likeliest token; 1: as the model thinks
    top_k: int = 200             # keep the k likeliest tokens; 0: all
    top_p: float = 1.0           # keep the fewest tokens that hold this share of the probability
    seed: int = 1337             # of the draws; sample i of several uses seed + i
    best: bool = False           # of a run folder take the step with the best validation loss, not the newest
    device: str = "auto"         # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products
    compile: bool = False        # torch.compile the reading of a token: pays for long texts only

    def __post_init__(self):
        if self.max_new_tokens < 0 or self.num_samples < 1 or not 0 <= self.temperature < float("inf") or self.top_k < 0 or not 0 < self.top_p <= 1 or self.seed < 0:
            raise UserError("max_new_tokens, temperature, top_k and seed must be at least 0, num_samples at least 1, and top_p above 0 and at most 1")


def main():
    cfg, _, paths = config.parse(SampleConfig, about=__doc__, paths="a run folder or step folder")
    runs = paths or ([cfg.out_dir] if cfg.out_dir else sorted({str(p.parent.parent) for p in Path("out").glob("**/step-*/meta.json")}, key=lambda run: max(p.stat().st_mtime for p in Path(run).glob("step-*/meta.json")))[-1:])
    if len(runs) != 1 or paths and cfg.out_dir:
        raise UserError("give one run folder, as in python sample.py out/python-rope" if runs else "there is no run under out/: train one with python train.py --pos=rope")
    model = GPT.load(runs[0], cfg.best)
    device = config.pick_device(cfg.device)
    small = device.type == "cpu" and sum(p.numel() for p in model.parameters()) < 16e6  # of one row at a time the casts cost more than bfloat16 saves
    dtype = config.pick_dtype("float32" if cfg.dtype == "auto" and small else cfg.dtype, device)
    compiled, why_not = config.pick_compile(cfg.compile, device, 0)
    print(f"note: {why_not}\n" if why_not else "", end="", file=sys.stderr)
    tokenizer, bos = data.from_json(model.meta.get("tokenizer")), model.meta.get("bos")
    if tokenizer is None or tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"{runs[0]} was trained on bare token files, so its vocabulary is unknown here and it cannot write text" if tokenizer is None else f"the vocabulary of {runs[0]} is not its model's: use another checkpoint")
    start = cfg.start
    if start.startswith("FILE:"):
        try:
            start = Path(start[5:]).read_bytes().decode("utf-8", "surrogateescape")
        except OSError as error:
            raise UserError(f"the prompt {start[5:]!r} cannot be read ({error.strerror}): give --start=FILE:PATH of a text") from None
    ids = data.prompt(tokenizer, bos, start)
    if len(ids) > 64 * model.config.reach:
        raise UserError(f"the prompt's {len(ids)} tokens are more than 64 times the {model.config.reach} that this model was made for: shorten it, or stretch the model by extend.py")
    total, made_for = len(ids) + cfg.max_new_tokens, model.config.reach
    if total > made_for and not model.pos.bounded:
        remedy = f"; python extend.py {runs[0]} --method=yarn --factor={-(-total // model.config.block_size)} stretches it" if model.config.pos == "rope" and not model.config.random_positions else ""
        print(f"note: {total} tokens are more than the {made_for} that this model was made for{remedy}", file=sys.stderr)
    warnings.simplefilter("ignore", PastTrainedLength)
    for sample in range(cfg.num_samples):
        generator = torch.Generator(device).manual_seed(cfg.seed + sample)
        if sample:
            print("\n" + "-" * 16)
        print(start.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), end="", flush=True)
        with config.autocast(device, dtype):
            tokens = model.to(device).generate(torch.tensor([ids], device=device), cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, generator, compiled)
            for text in data.stream((token.item() for token in tokens), tokenizer):
                print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
