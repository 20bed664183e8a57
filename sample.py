"""Sample text from a checkpoint and print it while it is generated.

    python sample.py out/python-rope --start="def " --max_new_tokens=500
    python sample.py --start=FILE:prompt.txt    # the newest run under out/
    python sample.py --start=@prompts.txt       # a prompt a line
    python sample.py out/smollm2 --chat --start="What is a token?"

Takes a run folder (its newest step) or a step folder. The checkpoint says how its context was
extended, so no flag of extend.py is repeated here.
"""

from nanolong import settings  # isort: skip (first: it refuses an old Python)
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from data import tokenizer_from_json
from kernels import check
from model import GPT, POSITIONS, ContextLengthWarning
from nanolong import devices, entry, inference, prompts, run
from nanolong.errors import note, require, run_main

# In smaller models casting the weights to bfloat16 costs more on a CPU than its products save.
MIN_PARAMETERS_BFLOAT16 = 16e6


@dataclass
class SampleConfig:
    # [sampling]
    # the prompt; FILE:PATH reads it from a file, and @PATH one from each line, or each row of JSON
    start: str = ""
    # --start is a user's message to an Instruct model: render its chat template, print its answer
    chat: bool = False
    system: str = ""  # with --chat: the system message, if the model's template has one
    max_new_tokens: int = 500  # tokens to generate
    num_samples: int = 1  # number of samples of each prompt
    temperature: float = 0.8  # divides the logits; 0: greedy decoding
    top_k: int = 200  # sample from the k most likely tokens; 0: from all
    # nucleus sampling: of the tokens that top_k leaves, sample from the most likely ones whose
    # probabilities sum to this
    top_p: float = 1.0
    # sample from tokens that are at least so probable, as a fraction of the most likely one
    min_p: float = 0.0
    stop_at_eos: bool = True  # end a text at the token that ends a document
    # end it before this text, too, where \n is a line end; may be given several times
    stop: Sequence[str] = ()
    seed: int = 1337  # seed of the first sample (sample i uses seed + i)
    # [checkpoint]
    out_dir: str = ""  # the run folder, as another way to name it; default: the newest under out/
    # Python files, each with one scheme of your own, for checkpoints that were trained with it
    entry: tuple[str, ...] = ()
    best: bool = False  # use the step with the lowest validation loss of a run folder
    # [system]
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products; auto: float32 for small models on a CPU
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # dtype of the weights in memory; auto: as stored if --dtype is bfloat16, else float32; with
    # bfloat16 products both give the same numbers
    weights: Literal["auto", "float32", "bfloat16"] = "auto"
    # torch.compile the decoding step, on a GPU to a CUDA graph; pays for long texts only
    compile: bool = False

    def __post_init__(self):
        require(
            0 < self.top_p <= 1,
            f"--top_p={self.top_p:g} is no probability: give one above 0, at most 1",
        )
        require(self.min_p <= 1, f"--min_p={self.min_p:g} is a fraction, at most 1")
        require(self.num_samples >= 1, "--num_samples must be at least 1")
        require(self.chat or not self.system, "--system is part of a conversation: give --chat too")
        require(self.start or not self.chat, "--chat needs a user's message: give --start=TEXT")


def load(cfg, paths):
    """Load the model that is asked for, and its tokenizer: (folder, model, tokenizer)."""
    runs = [*paths, cfg.out_dir] if cfg.out_dir else paths
    require(len(runs) < 2, "there are several run folders: give one (a prompt goes to --start)")
    folder = runs[0] if runs else run.latest_run()
    require(folder, "there is no run under out/: train one (python train.py --pos=rope)")
    if not runs:
        note(f"the newest run is {folder}")
    model = GPT.load(folder, cfg.best, devices.weights_to_load(cfg.weights))
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    require(tokenizer, f"{folder} has no tokenizer for text: sample ids as docs/python.md does")
    return folder, model, tokenizer


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
    compiled = devices.pick_compile(cfg.compile, device, pays=False)
    model.to(device)
    check.choose_kernels(model, device, dtype)

    # Encode the prompts.
    found = prompts.read_prompts(cfg, tokenizer, model.meta.get("bos"))
    prompts.note_length(cfg, model, folder, found)
    warnings.simplefilter("ignore", ContextLengthWarning)  # note_length() has said so
    if compiled:
        longest = max(len(prompt.ids) for prompt in found)
        inference.check_compiles(model, longest, cfg.max_new_tokens)
        note("the first tokens take about a minute, to compile the decoding step")

    # Generate, and print each text while it is generated.
    texts = [(prompt, cfg.seed + i) for prompt in found for i in range(cfg.num_samples)]
    for number, (prompt, seed) in enumerate(texts):
        print("\n" + "-" * 16 + "\n" if number else "", end="")
        with devices.autocast(device, dtype):
            for text in prompts.continue_text(cfg, model, tokenizer, prompt, seed, compiled):
                print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    run_main(main)
