"""Which weights let a model without positions know absolute and relative positions?

Kazemnejad et al. (2023) prove that such weights exist (appendix C). They are set here in the GPT of
model.py, with pos="nope" and two layers; nothing is trained. Position t counts from 0.
Layer 1, theorem 1: all keys are alike, so a query attends uniformly to the t + 1 tokens it sees.
Only <bos> has a value, so the head returns 1/(t + 1). The MLP interpolates any function f of t,
with f(0) = 0, linearly between these: f = sum over j of c_j relu(1/j - 1/(t + 1)), exact at each t.
It writes t and t^2. Each position needs a hidden unit, so the width limits the length.
Layer 2, theorem 2: its scores are content + g(t - i) for query t and key i. The first head has the
g of ALiBi, -SLOPE (t - i), as in the proof. The second has -SHARPNESS (t - i - BACK)^2, for which
it needs t^2, and no content: it copies the token BACK tokens before.
Beyond the proof: every embedding has a channel of 2^60, next to which the others vanish in the mean
square, so that RMSNorm divides by a known power of 2 and its weights undo that; this channel is
also the constant 1. The gate of SwiGLU computes silu(STEEPNESS z) / STEEPNESS, which is relu(z) to
rounding: |z| is 0 or at least 1/(t + 1)(t + 2).
"""

import math

import torch

from model import GPT, GPTConfig

TITLE = "Positions without position embeddings"
ABOUT = (
    "A seed is a random text, an arm a precision and the positions that the model has units for. "
    "Errors are the largest of all tokens, as powers of ten: -12 is 1e-12, and -30 is none. "
    "`right` counts the tokens up to the first with a wrong position."
)
BUDGETS = {
    "cpu": 'lengths={"1024":[257,513,1023,1024,1100],"4096":[2047,4095]}',
    "try": 'lengths={"1024":[257],"4096":[300]}',
}
ARMS = {f"{dtype}-{n}": [] for n in (1024, 4096) for dtype in ("float64", "float32")}
ERRORS = ("position", "t^2", "ALiBi head", "copying head")
MEASURES = {**dict.fromkeys(ERRORS, "power of ten"), "right": "tokens"}
CLAIMS = """
position: float64-1024@1024 < -9
ALiBi head: float64-1024@1024 < -11
copying head: float64-1024@1024 < -11
right: float32-4096@4095 > 4094
right: float64-1024@1100 < 1100
"""

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
    model.embed.weight[:, CONSTANT] = 2.0**60
    model.embed.weight[BOS, IS_BOS] = 1
    generator = torch.Generator().manual_seed(1)
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
        first = head * SHAPE["head_dim"]
        for row, (key_channel, query) in enumerate(terms.items(), first + 8):
            k[row, key_channel] = 1
            for channel, weight in query.items():
                # attention divides the scores by the root of head_dim
                q[row, channel] = factor * weight * SHAPE["head_dim"] ** 0.5
        v[first : first + 8, CONTENT] = torch.eye(8)
        o[OUTPUTS[head], first : first + 8] = torch.eye(8)


def random_text(length, seed):
    """Return tokens (T,): <bos>, then random ones."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, SHAPE["vocab_size"], (length,), generator=generator)
    return tokens.index_fill(0, torch.tensor(0), BOS)


@torch.no_grad()
def errors(model, tokens):
    """Return the ERRORS at each of the tokens (T,), float64 (4, T), from explicit distances."""
    # Layer 2 in float64: what its heads return (2, T, 8).
    content = model.embed.weight[tokens, CONTENT].double()
    attention = model.blocks[1].attention
    q, k = (content @ x.weight[:8, CONTENT].double().T for x in (attention.q, attention.k))
    t = torch.arange(len(tokens), device=tokens.device, dtype=torch.float64)
    distance = t[:, None] - t
    alibi = q @ k.T / SHAPE["head_dim"] ** 0.5 - SLOPE * distance
    scores = torch.stack((alibi, -SHARPNESS * (distance - BACK) ** 2))
    expected = scores.masked_fill(distance < 0, -torch.inf).softmax(-1) @ content
    # What the model's hidden states hold; its last norm leaves them as they are.
    states = model.hidden_states(tokens[None])[0].double()
    returned = torch.stack([states[:, channels] for channels in OUTPUTS])
    outputs = (returned - expected).abs().amax(-1)
    positions = torch.stack((states[:, POSITION] - t, states[:, SQUARE] - t**2)).abs()
    return torch.cat((positions, outputs))


def measure(arm):
    """Return the errors in a text of each length, as powers of ten."""
    dtype, max_length = arm.name.split("-")
    model = build_model(int(max_length), getattr(torch, dtype)).to(arm.device)
    found = {}
    for length in arm.b.lengths[max_length]:
        error = errors(model, random_text(length, arm.seed).to(arm.device))
        found["right", length] = int((error[0] < 0.5).int().cumprod(0).sum())
        for name, largest in zip(ERRORS, error.amax(1).clamp(min=1e-30).tolist(), strict=True):
            found[name, length] = math.log10(largest)
    return found
