"""Sample text from a checkpoint and print it while it is generated.

    python sample.py out/python-rope --start="def " --max_new_tokens=500
    python sample.py --start=FILE:prompt.txt    # the newest run under out/
    python sample.py out/smollm2 --chat --start="What is a token?"

Takes a run folder (its newest step) or a step folder. The checkpoint says how its context was
extended, so no flag of extend.py is repeated here.
"""

from nanolong import settings  # isort: skip (first: --help before torch is imported)
import itertools
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from data import decode_stream, tokenizer_from_json
from kernels import check
from model import GPT, POSITIONS, ContextLengthWarning
from nanolong import devices, entry, inference, prompts, run
from nanolong.errors import UserError, note, require, run_main

# In smaller models casting the weights to bfloat16 costs more on a CPU than its products save.
MIN_PARAMETERS_BFLOAT16 = 16e6


@dataclass
class SampleConfig:
    # [sampling]
    start: str = ""  # the prompt; FILE:PATH reads it from a file
    # --start is a user's message to an Instruct model: render its chat template, print its answer
    chat: bool = False
    system: str = ""  # with --chat: the system message, if the model's template has one
    max_new_tokens: int = 500  # tokens to generate
    num_samples: int = 1  # number of samples
    temperature: float = 0.8  # divides the logits; 0: greedy decoding
    top_k: int = 200  # sample from the k most likely tokens; 0: from all
    # nucleus sampling: sample from the most likely tokens whose probabilities sum to this
    top_p: float = 1.0
    seed: int = 1337  # of the first sample; sample i uses seed + i
    # [checkpoint]
    out_dir: str = ""  # the run folder, as another way to name it; default: the newest under out/
    # Python files, each with one scheme of your own, for checkpoints that were trained with it
    entry: tuple[str, ...] = ()
    best: bool = False  # of a run folder, use the step with the lowest validation loss
    # [system]
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products; auto: float32 for small models on a CPU
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # dtype of the weights in memory; auto: as stored if --dtype is bfloat16, else float32; with
    # bfloat16 products both give the same numbers
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool = False  # torch.compile the decoding step; pays for long texts only

    def __post_init__(self):
        require(0 < self.top_p <= 1, f"--top_p={self.top_p:g} is a probability, above 0")
        require(self.num_samples >= 1, "--num_samples must be at least 1")
        require(self.chat or not self.system, "--system is part of a conversation: give --chat too")
        require(self.start or not self.chat, "--chat needs a user's message: give --start=TEXT")


def load(cfg, paths):
    """Load the model that is asked for, and its tokenizer: (folder, model, tokenizer)."""
    runs = [*paths, cfg.out_dir] if cfg.out_dir else paths
    if len(runs) > 1:
        raise UserError("there are several run folders: give one (a prompt goes to --start)")
    folder = runs[0] if runs else run.latest_run()
    if folder is None:
        raise UserError("there is no run under out/: train one (python train.py --pos=rope)")
    if not runs:
        note(f"the newest run is {folder}")
    model = GPT.load(folder, cfg.best, devices.weights_to_load(cfg.weights))
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer is None:
        reason = "no tokenizer, so it cannot write text"
    elif tokenizer.vocab_size > model.config.vocab_size:
        reason = "a tokenizer larger than its vocabulary"
    else:
        return folder, model, tokenizer
    raise UserError(f"{folder} has {reason}: use another checkpoint")


def choose_dtype(cfg, model, device):
    """Choose the dtype of matrix products; print a note if greedy decoding rounds unasked."""
    n_parameters = sum(p.numel() for p in model.parameters())
    small = device.type == "cpu" and n_parameters < MIN_PARAMETERS_BFLOAT16
    dtype = devices.pick_dtype("float32" if cfg.dtype == "auto" and small else cfg.dtype, device)
    is_greedy = cfg.temperature == 0 or cfg.top_k == 1
    if is_greedy and cfg.dtype == "auto" and dtype != torch.float32:
        note(
            f"matrix products in {str(dtype).removeprefix('torch.')} may choose other tokens than "
            "another program: to compare texts, give --dtype=float32"
        )
    return dtype


def main(argv=None):
    args = settings.parse(cfg=SampleConfig, paths="a run folder or a step folder", argv=argv)
    cfg = args.cfg
    entry.load_entries(cfg.entry, POSITIONS)
    device = devices.pick_device(cfg.device)
    folder, model, tokenizer = load(cfg, args.paths)

    # Choose how to compute.
    dtype = choose_dtype(cfg, model, device)
    devices.set_weights_dtype(model, cfg.weights, dtype)
    compiled = devices.pick_compile(cfg.compile, device, steps=0)
    model.to(device)
    check.choose_kernels(model, device, dtype)

    # Encode the prompt.
    ids, printable, stop = prompts.encode_start(cfg, tokenizer, model.meta.get("bos"))
    prompts.check_length(model, folder, len(ids), cfg.max_new_tokens)
    inference.check_request(model, [len(ids)], cfg.max_new_tokens)  # before anything is printed
    warnings.simplefilter("ignore", ContextLengthWarning)  # check_length() has said so
    x = torch.tensor([ids], device=device)  # (1, T)

    # Generate. The prompt is printed once it is computed, then each character once it is complete.
    for i in range(cfg.num_samples):
        if i:
            print("\n" + "-" * 16)
        generator = torch.Generator(device).manual_seed(cfg.seed + i)
        with devices.autocast(device, dtype):
            tokens = model.generate(
                x, cfg.max_new_tokens, cfg.temperature, cfg.top_k, cfg.top_p, generator, compiled
            )
            prompts.show_prefill(model, len(ids))
            new_ids = (token.item() for token in tokens)
            new_ids = itertools.takewhile(lambda token: token not in stop, new_ids)
            stream = decode_stream(new_ids, tokenizer)
            print(printable + next(stream, ""), end="", flush=True)
            for text in stream:
                print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    run_main(main)
