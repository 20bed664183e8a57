"""papers/segment_memory.py: compared with long texts, and with a reference in float64."""

import copy

import pytest
import torch
from conftest import BUILT_IN
from formulas import BIASES, nezha_vector, shaw_vectors, transformer_xl_keys

from experiments.papers.segment_memory import RELATIVE, RecurrentGPT, SegmentMemory, generate
from model import GPT, GPTConfig
from nanolong.errors import UserError

SCHEMES = [pos for pos in RELATIVE if pos in BUILT_IN]


@pytest.fixture
def make_recurrent(make):
    """Make a small RecurrentGPT whose weights are all random."""

    def make_recurrent(**settings):
        model = make(**{"block_size": 48, "n_kv_head": 2, "qk_norm": True, **settings})
        recurrent = RecurrentGPT(model.config)
        recurrent.load_state_dict(model.state_dict())
        return recurrent.eval()

    return make_recurrent


def in_segments(model, tokens, capacity, sizes):
    """The logits of tokens (B, N), computed in segments of these sizes."""
    memory = SegmentMemory(model, capacity)
    logits = [model(part, cache=memory) for part in tokens.split(sizes, 1)]
    assert memory.length == min(capacity, tokens.shape[1])
    return torch.cat(logits, 1)


@pytest.mark.parametrize("settings", [{}, {"n_kv_head": 4, "qk_norm": False}], ids=str)
@pytest.mark.parametrize("pos", SCHEMES)
def test_a_memory_of_everything_equals_one_long_text(pos, settings, make_recurrent):
    model = make_recurrent(pos=pos, **settings)
    tokens = torch.randint(50, (3, 37))
    with torch.no_grad():
        expected = model(tokens)
        for sizes in ([7, 1, 13, 2, 14], [1] * 37, [20, 17]):
            logits = in_segments(model, tokens, 37, sizes)
            assert (logits - expected).abs().max() < 1e-5
        # A memory that is too short is no such thing.
        assert (in_segments(model, tokens, 5, [7, 1, 13, 2, 14]) - expected).abs().max() > 1e-3


def rotate_by(x, position, base=10000.0):
    """Rotate x (..., D) float64 to a position: pairs (c, c + D/2) as complex numbers."""
    half = x.shape[-1] // 2
    angle = position * base ** -(torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angle)
    return torch.cat((z.real, z.imag), -1)


def score_and_value(model, layer, distance, q, k, v):
    """The scores (H,) of one query and one key, and the value that it adds, (H, D) each."""
    scheme, pos = model.pos, model.config.pos
    scale = model.config.head_dim**-0.5
    if pos in BIASES:
        return (q * k).sum(-1) * scale + BIASES[pos](scheme, distance), v
    if pos == "shaw":
        key, value = shaw_vectors(scheme, distance, layer, scheme.keys.shape[1] - 1)
        return (q * (k + key)).sum(-1) * scale, v + value
    if pos == "nezha":
        vector = nezha_vector(scheme, distance, scheme.max_distance)
        return (q * (k + vector)).sum(-1) * scale, v + vector
    if pos == "xl":
        content = ((q + scheme.u) * k).sum(-1)
        keys = transformer_xl_keys(scheme, distance, layer)
        return (content + ((q + scheme.v) * keys).sum(-1)) * scale, v
    if pos == "nope":
        return (q * k).sum(-1) * scale, v
    assert pos == "rope"
    return (rotate_by(q, distance) * k).sum(-1) * scale, v


def norm(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def reference(model, tokens, capacity, segment):
    """The logits (N, V) of tokens (N,), a query and a key at a time, in float64."""
    c = model.config
    memories = [torch.zeros(0, c.n_embd).double() for _ in model.blocks]
    states = []
    for part in tokens.split(segment):
        x = model.embed.weight[part]
        for layer, block in enumerate(model.blocks):
            attention = block.attention
            both = torch.cat((memories[layer], x))
            start = len(memories[layer])
            memories[layer] = both[-capacity:]
            h = norm(both, block.attention_norm.weight, c.norm_eps)
            q, k, v = (h @ getattr(attention, name).weight.T for name in "qkv")
            q, k, v = (t.unflatten(1, (-1, c.head_dim)) for t in (q, k, v))
            q = norm(q, attention.q_norm.weight, c.norm_eps)
            k = norm(k, attention.k_norm.weight, c.norm_eps)
            k, v = (t.repeat_interleave(c.n_head // c.n_kv_head, 1) for t in (k, v))
            rows = []
            for i in range(start, len(both)):
                pairs = []
                for j in range(i + 1):
                    pairs.append(score_and_value(model, layer, i - j, q[i], k[j], v[j]))
                scores, values = (torch.stack(column) for column in zip(*pairs, strict=True))
                rows.append((scores.softmax(0)[..., None] * values).sum(0).flatten())
            x = x + torch.stack(rows) @ attention.o.weight.T
            h = norm(x, block.mlp_norm.weight, c.norm_eps)
            gate = torch.nn.functional.silu(h @ block.mlp.gate.weight.T)
            x = x + (gate * (h @ block.mlp.up.weight.T)) @ block.mlp.down.weight.T
        states.append(norm(x, model.norm.weight, c.norm_eps))
    return torch.cat(states) @ model.embed.weight.T


@pytest.mark.parametrize("pos", SCHEMES)
def test_a_truncated_memory_equals_the_reference(pos, make_recurrent):
    """Also beyond the distances that the tables hold; the reference shares no code with it."""
    model = make_recurrent(pos=pos, block_size=8)
    tokens = torch.randint(50, (2, 19))
    exact = copy.deepcopy(model).double()
    with torch.no_grad(), pytest.warns(match="longer than the model's context"):
        logits = in_segments(model, tokens, 6, [5, 5, 5, 4])
        for row in range(2):
            expected = reference(exact, tokens[row], capacity=6, segment=5)
            assert (logits[row] - expected).abs().max() < 2e-5


def test_gradients_reach_weights_but_not_the_segments_before(make_recurrent):
    model = make_recurrent(pos="rope", tie_embeddings=False)
    memory = SegmentMemory(model, 9)
    model(torch.arange(0, 9)[None], cache=memory).sum().backward()
    assert not any(x.requires_grad for x in memory.inputs.values())
    model.zero_grad()
    model(torch.arange(20, 25)[None], torch.arange(30, 35)[None], cache=memory).backward()
    assert (model.embed.weight.grad[:9] == 0).all()
    assert (model.embed.weight.grad[20:25] != 0).all()


@pytest.mark.parametrize("pos", ["rope", "xl"])
def test_gradients_pass_through_the_memory_as_finite_differences_say(pos, make_recurrent):
    model = make_recurrent(pos=pos).double()
    memory = SegmentMemory(model, 6)
    model(torch.arange(9)[None], cache=memory)
    inputs = dict(memory.inputs)
    attention = model.blocks[1].attention

    def loss():
        memory.inputs = dict(inputs)
        return model(torch.arange(20, 24)[None], torch.arange(30, 34)[None], cache=memory)

    loss().backward()
    for weight in (attention.k.weight, attention.v.weight, model.blocks[1].attention_norm.weight):
        direction = torch.randn_like(weight)
        with torch.no_grad():
            weight += 1e-5 * direction
            above = loss()
            weight -= 2e-5 * direction
            below = loss()
            weight += 1e-5 * direction
        difference = float(above - below) / 2e-5
        assert difference == pytest.approx(float((weight.grad * direction).sum()), rel=1e-4)


def test_generation_equals_uncached_generation(make_recurrent):
    model = make_recurrent(pos="xl")
    prompts = torch.randint(50, (2, 11))
    expected = torch.cat(list(GPT.generate_plain(model, prompts, 9, temperature=0.0)), 1)
    for segment in (1, 4, 16):
        tokens = generate(model, prompts, 9, capacity=24, segment=segment, temperature=0.0)
        assert torch.equal(tokens, expected)
    assert generate(model, prompts, 0, capacity=1, segment=4).shape == (2, 0)
    with pytest.raises(UserError, match="empty"):
        generate(model, prompts[:, :0], 1, capacity=1, segment=4)


@pytest.mark.parametrize(
    "settings, capacity, message",
    [
        ({"pos": "learned"}, 8, "absolute positions"),
        ({"pos": "sinusoidal"}, 8, "absolute positions"),
        ({"pos": "rope"}, 0, "at least 1 token"),
        ({"pos": "rope", "window": 4}, 8, "windows"),
        ({"pos": "rope", "layer_pattern": "FN"}, 8, "layer patterns"),
        ({"pos": "rope", "qk_norm": "all"}, 8, "norms keys by head"),
    ],
)
def test_what_cannot_have_a_memory_is_refused(settings, capacity, message):
    model = RecurrentGPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, **settings))
    with pytest.raises(UserError, match=message):
        SegmentMemory(model, capacity)
