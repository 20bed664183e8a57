"""What one training step, or one generated token, costs the host.

    counted.py step SCRIPT FLAGS
    counted.py token SCHEME [deterministic] [compiled] [sampled]

Prints a line of JSON for each.
"""

import json
import sys
import warnings

import counts
import torch

import extend
import train
from model import GPT, GPTConfig
from nanolong.errors import run_main


def print_counts():
    lines = dict(counts.synchronising_lines)
    print(json.dumps({"counts": counts.counts(), "lines": lines}), flush=True)
    counts.reset()


def count_steps(script, *flags):
    """Run train.py or extend.py, and print the counts of each step from its first forward pass."""
    forward_backward, optimizer_step = train.forward_backward, train.update

    def first(*args):
        counts.reset()
        return forward_backward(*args)

    def last(*args):
        optimizer_step(*args)
        print_counts()

    train.forward_backward, train.update = first, last
    sys.argv = [script, *flags]
    run_main({"train.py": train, "extend.py": extend}[script].main)


def count_tokens(pos, *words):
    """Print the counts of each of eight tokens, which are read one by one."""
    torch.use_deterministic_algorithms("deterministic" in words, warn_only=True)
    config = GPTConfig(pos=pos, vocab_size=257, n_layer=2, n_head=4, n_embd=64)
    model = GPT(config).to("cuda").eval()
    sampling = {"temperature": 0.8, "top_k": 20} if "sampled" in words else {"temperature": 0}
    prompt = torch.zeros(1, 10, dtype=torch.long)
    counts.reset()
    with warnings.catch_warnings(), torch.autocast("cuda", torch.bfloat16):
        warnings.simplefilter("error", UserWarning)  # such as: sampling without a CUDA graph
        warnings.filterwarnings("ignore", message="Deterministic|.*does not have a deterministic")
        for token in model.generate(prompt, 8, **sampling, compiled="compiled" in words):
            token.tolist()
            print_counts()


if __name__ == "__main__":
    {"step": count_steps, "token": count_tokens}[sys.argv[1]](*sys.argv[2:])
