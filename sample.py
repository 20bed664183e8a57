"""Sample text from a checkpoint and print it while it is generated.

    python sample.py out/python-rope --start="def " --max_new_tokens=500
    python sample.py --start=FILE:prompt.txt    # the newest run under out/
    python sample.py out/smollm2 --chat --start="What is a token?"

Takes a run folder (its newest step) or a step folder. The checkpoint says how its context was
extended, so no flag of extend.py is repeated here.
"""

from nanolong import python_version  # noqa: F401  # isort: skip
import itertools
import math
import shlex
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from data import decode_stream, encode_prompt, tokenizer_from_json
from model import GPT, POSITIONS, ContextLengthWarning
from nanolong import chat, cli, devices, entry, inference, run, validate
from nanolong.errors import UserError
from nanolong.hub import tokenizer as hub_tokenizer

# In smaller models casting the weights to bfloat16 costs more on a CPU than its products save.
MIN_PARAMETERS_BFLOAT16 = 16e6

# A prompt that takes longer than so many seconds is reported: then, after twice as long, and so on.
SLOW_PROMPT = 5


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
        validate.check_sample(self)


def read_prompt(start):
    """Return the prompt as text; bytes that are not UTF-8 become surrogate escapes."""
    if not start.startswith("FILE:"):
        return start
    file = start.removeprefix("FILE:")
    try:
        return Path(file).read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        reason = f"the prompt {file!r} cannot be read ({error.strerror})"
        raise UserError(f"{reason}: give --start=FILE:PATH of a text file") from None


def encode_start(cfg, tokenizer, bos):
    """Return the token ids of the prompt, what to print of it, and the ids that end the text."""
    start = read_prompt(cfg.start)
    if cfg.chat:
        ids, stop = chat.encode_chat(tokenizer, start, cfg.system)
        return ids, "", stop
    note_special_tokens(start, tokenizer)
    printable = start.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return encode_prompt(tokenizer, bos, start), printable, set()


def note_special_tokens(start, tokenizer):
    """Print a note if a prompt has the text of a special token, which is plain text there."""
    found = [text for text in hub_tokenizer.special_tokens(tokenizer) if text in start]
    if not found:
        return
    note = f"note: {found[0]!r} in the prompt is encoded as plain text, not as a special token"
    if chat.find_template(tokenizer) is not None:
        note += "; for the model's chat format give the message alone, and --chat"
    print(note, file=sys.stderr)


def check_length(model, folder, prompt_length, max_new_tokens):
    """Print a note if the text will exceed the context length; refuse an absurd prompt."""
    config = model.config
    context = config.max_positions
    if prompt_length > 64 * context:
        raise UserError(
            f"the prompt has {prompt_length} tokens, more than 64 times the context length of "
            f"{context}: shorten it, or extend the model by extend.py"
        )
    total = prompt_length + max_new_tokens
    if total <= context or model.pos.bounded:  # generate() refuses where a scheme is bounded
        return
    note = f"note: {total} tokens are more than the context length of {context}"
    if config.pos == "rope" and not config.random_positions:
        factor = math.ceil(total / config.block_size)
        path = shlex.quote(str(folder))
        note += f"; to extend it: python extend.py {path} --method=yarn --factor={factor}"
    print(note, file=sys.stderr)


def note_rounding(cfg, dtype):
    """Print a note if greedy decoding rounds, which the user has not asked for."""
    is_greedy = cfg.temperature == 0 or cfg.top_k == 1
    if is_greedy and cfg.dtype == "auto" and dtype != torch.float32:
        print(
            f"note: matrix products in {str(dtype).removeprefix('torch.')} may choose other tokens "
            "than another program: to compare texts, give --dtype=float32",
            file=sys.stderr,
        )


def show_prefill(model, n_tokens):
    """Print on stderr how far the next forward pass, which computes the prompt, is if it is slow.

    All layers take about as long, whatever the scheme: those that are done say when it will end.
    """
    n_layers = len(model.blocks)
    done = 0
    start = time.perf_counter()
    next_line = start + SLOW_PROMPT

    def finish_layer(block, args, output):
        nonlocal done, next_line
        done += 1
        now = time.perf_counter()
        if done < n_layers and now >= next_line:
            next_line = now + (now - start)
            left = (now - start) / done * (n_layers - done)
            layers = f"{done} of {n_layers} layers"
            print(
                f"prompt of {n_tokens} tokens: {layers}, about {left:.0f} s left", file=sys.stderr
            )
        if done == n_layers:
            for hook in hooks:
                hook.remove()
            note_slow_tokens(model, n_tokens, now - start)

    hooks = [block.register_forward_hook(finish_layer) for block in model.blocks]


def note_slow_tokens(model, n_tokens, seconds):
    """Print a note if every new token takes these seconds, since no keys can be cached."""
    if seconds < SLOW_PROMPT:
        return
    versions = {model.set_length(n_tokens + i) for i in range(3)}
    if len(versions) == 3:  # a cache is refilled at every token
        print(
            f"note: every new token computes the whole text again, about {seconds:.0f} s each: "
            "lower --max_new_tokens, or extend by another method",
            file=sys.stderr,
        )


def load(cfg, paths):
    """Load the model that is asked for, and its tokenizer: (folder, model, tokenizer)."""
    runs = [*paths, cfg.out_dir] if cfg.out_dir else paths
    if len(runs) > 1:
        raise UserError("there are several run folders: give one (a prompt goes to --start)")
    folder = runs[0] if runs else run.latest_run()
    if folder is None:
        raise UserError("there is no run under out/: train one (python train.py --pos=rope)")
    if not runs:
        print(f"note: the newest run is {folder}", file=sys.stderr)
    model = GPT.load(folder, cfg.best, devices.weights_to_load(cfg.weights))
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    if tokenizer is None:
        reason = "no tokenizer, so it cannot write text"
    elif tokenizer.vocab_size > model.config.vocab_size:
        reason = "a tokenizer larger than its vocabulary"
    else:
        return folder, model, tokenizer
    raise UserError(f"{folder} has {reason}: use another checkpoint")


def main():
    cfg, _, paths = cli.parse(SampleConfig, about=__doc__, paths="a run folder or a step folder")
    entry.load_entries(cfg.entry, POSITIONS)
    folder, model, tokenizer = load(cfg, paths)

    # Choose where and how to compute.
    device = devices.pick_device(cfg.device)
    n_parameters = sum(p.numel() for p in model.parameters())
    small = device.type == "cpu" and n_parameters < MIN_PARAMETERS_BFLOAT16
    dtype = devices.pick_dtype("float32" if cfg.dtype == "auto" and small else cfg.dtype, device)
    note_rounding(cfg, dtype)
    devices.settle_weights(model, cfg.weights, dtype)
    compiled, why_not = devices.pick_compile(cfg.compile, device, 0)
    if why_not:
        print(f"note: {why_not}", file=sys.stderr)
    model.to(device)

    # Encode the prompt.
    ids, printable, stop = encode_start(cfg, tokenizer, model.meta.get("bos"))
    check_length(model, folder, len(ids), cfg.max_new_tokens)
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
            show_prefill(model, len(ids))
            new_ids = (token.item() for token in tokens)
            new_ids = itertools.takewhile(lambda token: token not in stop, new_ids)
            stream = decode_stream(new_ids, tokenizer)
            print(printable + next(stream, ""), end="", flush=True)
            for text in stream:
                print(text, end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    cli.run_main(main)
