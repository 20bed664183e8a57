"""Set the weights of a model without positions so that it knows absolute and relative positions.

    python experiments/papers/nope_positions.py               a minute of a core

Kazemnejad et al. (2023) prove that such weights exist (appendix C). They are set here in the GPT of
model.py, with pos="nope" and two layers; nothing is trained. Position t counts from 0.

Layer 1, theorem 1: all keys are alike, so a query attends uniformly to the t + 1 tokens it sees.
Only <bos> has a value, so the head returns 1/(t + 1). The MLP interpolates any function f of t,
with f(0) = 0, linearly between these: f = sum over j of c_j relu(1/j - 1/(t + 1)), exact at each t.
It writes t and t^2. Each position needs a hidden unit, so the width limits the length.
Layer 2, theorem 2: its scores are content + g(t - i) for query t and key i. The first head has the
g of ALiBi, -SLOPE (t - i), as in the proof. The second has -SHARPNESS (t - i - BACK)^2, for which
it needs t^2, and no content: it copies the token BACK tokens before.
The proof leaves two steps to other papers. The norm: every embedding has a channel of 2^60, next to
which the others vanish in the mean square, so that RMSNorm divides by a known power of 2 and its
weights undo that. This channel is also the constant 1. The ReLU: the gate of SwiGLU computes
silu(STEEPNESS z) / STEEPNESS, which is relu(z) to rounding: |z| is 0 or at least 1/(t + 1)(t + 2).
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

import torch

from experiments.report import Experiment, make_main, markdown_table, title
from model import GPT, GPTConfig
from nanolong import cli
from nanolong.provenance import provenance

# The channels of the hidden states.
CONSTANT, IS_BOS, INVERSE, POSITION, SQUARE = range(5)
CONTENT = slice(8, 16)  # of a token: random numbers
OUTPUTS = (slice(16, 24), slice(24, 32))  # what the two heads of layer 2 return

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 64, "head_dim": 16, "vocab_size": 100}
BOS = 0  # token id
STEEPNESS = 2.0**30
SLOPE = 2.0**-4  # per token
SHARPNESS = 40  # a neighbour's weight is exp(-40), less than the rounding of float64
BACK = 3  # tokens

# The g(t - i) of both heads, as sums of products: key channel -> query channels and their weights.
ALIBI = {POSITION: {CONSTANT: 1}, CONSTANT: {POSITION: -1}}  # i - t
COPY = {  # -(t - i - BACK)^2
    POSITION: {POSITION: 2, CONSTANT: -2 * BACK},
    SQUARE: {CONSTANT: -1},
    CONSTANT: {SQUARE: -1, POSITION: 2 * BACK, CONSTANT: -(BACK**2)},
}

# positions that a model is built for -> lengths of the texts
LENGTHS = {1024: (257, 513, 1023, 1024, 1100), 4096: (2047, 4095)}
DTYPES = {"float64": torch.float64, "float32": torch.float32}
TEXTS = 4  # of each length
ERRORS = ("position", "t^2", "ALiBi head", "copying head")


@dataclass
class PositionsConfig(Experiment):
    dtype: Literal["auto"] = "auto"  # all of DTYPES are measured


@torch.no_grad()
def build_model(max_length, dtype):
    """Return the GPT with the weights of the proof, for texts of up to max_length tokens."""
    config = GPTConfig(pos="nope", block_size=max_length, mlp_dim=max_length - 1, **SHAPE)
    model = GPT(config).double().eval()
    for name, p in model.named_parameters():
        p.zero_()
        if "norm" in name:  # leaves all channels as they are, but CONSTANT becomes 1
            p.fill_(2.0**60 / SHAPE["n_embd"] ** 0.5)
            p[CONSTANT] = 1 / SHAPE["n_embd"] ** 0.5
    generator = torch.Generator().manual_seed(1)
    model.embed.weight[:, CONSTANT] = 2.0**60
    model.embed.weight[BOS, IS_BOS] = 1
    model.embed.weight[:, CONTENT].normal_(generator=generator)
    find_positions(model.blocks[0], generator)
    attend_by_distance(model.blocks[1].attention, generator)
    return model.to(dtype)


def find_positions(block, generator):
    """Set the weights of layer 1, which writes 1/(t + 1), t and t^2."""
    # The first head counts the tokens. Its queries can be anything.
    block.attention.q.weight[:, CONTENT].normal_(generator=generator)
    block.attention.k.weight[:, CONSTANT] = 1
    block.attention.v.weight[0, IS_BOS] = 1
    block.attention.o.weight[INVERSE, 0] = 1
    # Hidden unit j is relu(1/j - 1/(t + 1)).
    t = torch.arange(block.mlp.up.weight.shape[0] + 1, dtype=torch.float64)
    block.mlp.gate.weight[:, CONSTANT] = STEEPNESS / t[1:]
    block.mlp.gate.weight[:, INVERSE] = -STEEPNESS
    block.mlp.up.weight[:, CONSTANT] = 1
    for channel, values in ((POSITION, t), (SQUARE, t**2)):
        # c_j: how much steeper f becomes in 1/(t + 1) at 1/j
        slopes = values.diff() * t[1:] * (t[1:] + 1)
        block.mlp.down.weight[channel] = slopes.diff(prepend=slopes.new_zeros(1)) / STEEPNESS


def attend_by_distance(attention, generator):
    """Set the scores of both heads, and let them return the content of what they attend to."""
    q, k, v, o = (x.weight for x in (attention.q, attention.k, attention.v, attention.o))
    q[:8, CONTENT].normal_(generator=generator)
    k[:8, CONTENT].normal_(generator=generator)
    for head, (factor, terms) in enumerate(((SLOPE, ALIBI), (SHARPNESS, COPY))):
        factor *= SHAPE["head_dim"] ** 0.5  # attention divides the scores by it
        first = head * SHAPE["head_dim"]
        for row, (key_channel, query) in enumerate(terms.items(), first + 8):
            k[row, key_channel] = 1
            for channel, weight in query.items():
                q[row, channel] = factor * weight
        v[first : first + 8, CONTENT] = torch.eye(8)
        o[OUTPUTS[head], first : first + 8] = torch.eye(8)


@torch.no_grad()
def relative_attention(model, tokens):
    """Compute layer 2 of tokens (T,) in float64, from their content and explicit distances.

    Returns the probabilities (2, T, T) and what the heads return (2, T, 8).
    """
    content = model.embed.weight[tokens, CONTENT].double()
    attention = model.blocks[1].attention
    q, k = (content @ x.weight[:8, CONTENT].double().T for x in (attention.q, attention.k))
    t = torch.arange(len(tokens), device=tokens.device, dtype=torch.float64)
    distance = t[:, None] - t
    alibi = q @ k.T / SHAPE["head_dim"] ** 0.5 - SLOPE * distance
    scores = torch.stack((alibi, -SHARPNESS * (distance - BACK) ** 2))
    p = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
    return p, p @ content


def random_text(length, seed):
    """Return tokens (T,): <bos>, then random ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(BOS + 1, SHAPE["vocab_size"], (length,), generator=generator)
    tokens[0] = BOS
    return tokens


@torch.no_grad()
def errors(model, tokens):
    """Return the ERRORS at each of the tokens (T,): float64 (4, T)."""
    states = model.hidden_states(tokens[None])[0].double()
    t = torch.arange(len(tokens), device=tokens.device)
    _, expected = relative_attention(model, tokens)
    returned = torch.stack([states[:, channels] for channels in OUTPUTS])
    outputs = (returned - expected).abs().amax(-1)
    positions = torch.stack((states[:, POSITION] - t, states[:, SQUARE] - t**2)).abs()
    return torch.cat((positions, outputs))


def measure(cfg):
    device, _ = cfg.pick_device()
    records = []
    for max_length, dtype in itertools.product(LENGTHS, DTYPES):
        model = build_model(max_length, DTYPES[dtype]).to(device)
        for length in LENGTHS[max_length]:
            texts = [random_text(length, seed).to(device) for seed in range(TEXTS)]
            error = torch.stack([errors(model, text) for text in texts]).amax(0)  # (4, T)
            first_right = (error < 0.5).int().cumprod(-1).sum(-1)
            record = {"dtype": dtype, "hidden units": max_length - 1, "length": length}
            record["largest"] = error.amax(-1).tolist()
            records.append({**record, "right": first_right.tolist()})
    note = f"{provenance(device)}; nothing is trained; {TEXTS} random texts of each length"
    return {"note": note, "records": records}


def report(board):
    rows = []
    for record in board["records"]:
        row = [record["dtype"], f"{record['hidden units']:,}", f"{record['length']:,}"]
        for largest, right in zip(record["largest"], record["right"], strict=True):
            fails = f" (from {right:,})" if right < record["length"] else ""
            row.append(f"{largest:.1e}{fails}")
        rows.append(row)
    return [
        *title(board, "Positions without position embeddings"),
        "",
        *markdown_table(["dtype", "hidden units", "length", *ERRORS], rows),
        "",
        "Largest errors of all tokens; in brackets, the first position with one of 1/2 or more.",
    ]


main = make_main(PositionsConfig, measure, report)

if __name__ == "__main__":
    cli.run_main(main)
