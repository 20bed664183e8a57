"""The transformer against float64 formulas; its layers, initial weights, FLOPs and generation."""

import json
import math
import runpy
import shutil

import pytest
import torch
from conftest import ROOT, run_python

from model import GPT, POSITIONS, GPTConfig, RoPE
from nanolong.errors import UserError

# -----------------------------------------------------------------------------
# Float64 forward passes, written from the formulas.


def float64_weights(model):
    """The weights by name, each tensor in float64."""
    return {name: p.detach().double() for name, p in model.named_parameters()}


def linear(x, w, name):
    """The linear layer `name`, with its bias if it has one."""
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)


def rms_norm(x, w, name):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]


def layer_norm(x, w, name):
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return centered / (variance + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def split_heads(x, head_dim):
    """(B, T, H D) -> (B, H, T, D)."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def rotate(x):
    """Rotate (B, H, T, D) by the positions 0..T-1; channel c is paired with c + D/2."""
    T, D = x.shape[-2:]
    inv_freq = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angle = torch.arange(T)[:, None] * inv_freq
    a, b = x.chunk(2, -1)
    first = a * angle.cos() - b * angle.sin()
    second = a * angle.sin() + b * angle.cos()
    return torch.cat((first, second), -1)


def causal_attention(q, k, v):
    """Softmax attention of (B, H, T, D), heads concatenated: (B, T, H D)."""
    T, D = q.shape[-2:]
    in_future = torch.ones(T, T).triu(1).bool()
    scores = (q @ k.mT / math.sqrt(D)).masked_fill(in_future, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def llama_logits(model, tokens):
    """Llama's forward pass: RoPE, grouped queries, RMSNorm, SwiGLU; and QK-norm."""
    config = model.config
    w = float64_weights(model)
    group = config.n_head // config.n_kv_head
    x = w["embed.weight"][tokens]
    for i in range(config.n_layer):
        attention = f"blocks.{i}.attention"
        h = rms_norm(x, w, f"blocks.{i}.attention_norm")
        q = split_heads(linear(h, w, f"{attention}.q"), config.head_dim)
        k = split_heads(linear(h, w, f"{attention}.k"), config.head_dim)
        v = split_heads(linear(h, w, f"{attention}.v"), config.head_dim)
        q = rotate(rms_norm(q, w, f"{attention}.q_norm"))
        k = rotate(rms_norm(k, w, f"{attention}.k_norm"))
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        x = x + linear(causal_attention(q, k, v), w, f"{attention}.o")

        h = rms_norm(x, w, f"blocks.{i}.mlp_norm")
        gate = linear(h, w, f"blocks.{i}.mlp.gate")
        up = linear(h, w, f"blocks.{i}.mlp.up")
        x = x + linear(gate * gate.sigmoid() * up, w, f"blocks.{i}.mlp.down")
    output = w["embed.weight"] if config.tie_embeddings else w["head.weight"]
    return rms_norm(x, w, "norm") @ output.T


def gelu(x):
    """GPT-2's approximation of GELU."""
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def gpt2_logits(model, tokens):
    """GPT-2's forward pass: learned positions, LayerNorm, GELU, a bias in every layer."""
    config = model.config
    w = float64_weights(model)
    x = w["embed.weight"][tokens] + w["pos.table"][: tokens.shape[1]]
    for i in range(config.n_layer):
        attention = f"blocks.{i}.attention"
        h = layer_norm(x, w, f"blocks.{i}.attention_norm")
        q = split_heads(linear(h, w, f"{attention}.q"), config.head_dim)
        k = split_heads(linear(h, w, f"{attention}.k"), config.head_dim)
        v = split_heads(linear(h, w, f"{attention}.v"), config.head_dim)
        x = x + linear(causal_attention(q, k, v), w, f"{attention}.o")

        h = layer_norm(x, w, f"blocks.{i}.mlp_norm")
        x = x + linear(gelu(linear(h, w, f"blocks.{i}.mlp.up")), w, f"blocks.{i}.mlp.down")
    return layer_norm(x, w, "norm") @ w["embed.weight"].T


def relative_error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


# -----------------------------------------------------------------------------
# Parameters: their names, shapes, numbers and initial values.


def test_initial_weights_follow_the_table_of_init_weights():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=256, n_head=4, tie_embeddings=False, bias="all"))
    w = dict(model.named_parameters())
    for name, std in (
        ("embed.weight", 0.02),
        ("head.weight", 0.02),
        ("blocks.0.attention.q.weight", 0.5 / 16),
        ("blocks.1.mlp.gate.weight", 0.5 / 16),
    ):
        assert w[name].std().item() == pytest.approx(std, rel=0.02), name
    for name, value in (
        ("blocks.3.attention.o.weight", 0),
        ("blocks.0.mlp.down.weight", 0),
        ("blocks.2.attention.k.bias", 0),
        ("blocks.2.mlp.down.bias", 0),
        ("blocks.1.mlp_norm.weight", 1),
        ("norm.weight", 1),
    ):
        assert (w[name] == value).all(), name


def test_a_parameter_without_an_initialization_rule_raises(make):
    model = make()
    model.blocks[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="blocks.0.extra.weight"):
        model.init_weights()


QKV = {"attention.q", "attention.k", "attention.v"}
BIASED = {"none": set(), "qkv": QKV, "all": QKV | {"attention.o", "mlp.gate", "mlp.up", "mlp.down"}}


@pytest.mark.parametrize("bias, with_bias", BIASED.items())
def test_bias_chooses_the_linear_layers_that_have_one(bias, with_bias, make):
    names = {name for name, _ in make(bias=bias, n_layer=1).named_parameters()}
    biased = {name.removesuffix(".bias") for name in names if name.endswith(".bias")}
    assert biased == {f"blocks.0.{layer}" for layer in with_bias}


def test_parameters_have_llamas_shapes():
    model = GPT(GPTConfig(n_embd=128, n_head=4, n_kv_head=2, vocab_size=65))
    block = model.blocks[0]
    assert block.attention.k.weight.shape == (64, 128)
    assert block.mlp.gate.weight.shape == (352, 128)  # 8/3 n_embd, up to a multiple of 32


def test_gpt2s_sizes_give_124_million_parameters():
    with torch.device("meta"):
        config = GPTConfig(
            pos="t5", n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257
        )
        model = GPT(config)
    block = 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    count = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("pos."))
    assert count == 12 * block + 768 + 50257 * 768 == 123_551_232


def test_schemes_share_every_other_initial_weight():
    """With the same seed, two models of different schemes differ in the scheme alone."""
    weights = []
    for pos in POSITIONS:
        torch.manual_seed(5)
        model = GPT(GPTConfig(pos=pos, n_embd=32, n_head=4, n_layer=2))
        named = dict(model.named_parameters())
        weights.append({name: p for name, p in named.items() if not name.startswith("pos.")})
    for others in weights[1:]:
        assert others.keys() == weights[0].keys()
        for name, p in others.items():
            assert torch.equal(p, weights[0][name]), name


@pytest.mark.parametrize("fraction, n_rotated", [(1.0, 8), (0.5, 4)])
def test_wavelengths_of_rope_are_2_pi_base_to_the_2c_over_r(fraction, n_rotated, make):
    model = make(pos="rope", rope_base=500.0, rope_fraction=fraction)
    expected = [2 * math.pi * 500.0 ** (2 * c / n_rotated) for c in range(n_rotated // 2)]
    expected = torch.tensor(expected, dtype=torch.float64)
    assert model.rope_wavelengths().dtype == torch.float64
    assert torch.allclose(model.rope_wavelengths(), expected, rtol=1e-12)
    model.extend("pi", 4)
    assert torch.allclose(model.rope_wavelengths(), 4 * expected, rtol=1e-12)
    model.extend("drope", 1)
    assert model.rope_wavelengths().isinf().all()


@pytest.mark.parametrize("pos", [pos for pos in POSITIONS if not issubclass(POSITIONS[pos], RoPE)])
def test_other_schemes_have_no_wavelengths(pos, make):
    with pytest.raises(UserError, match=f"--pos={pos} has no wavelengths: use a model with rope"):
        make(pos=pos).rope_wavelengths()


def test_flops_are_counted_from_the_shapes(make):
    model = make(n_embd=32, n_head=4, n_kv_head=2, n_layer=3)
    C, mlp_dim = 32, 96
    block = C * 32 + 2 * C * 16 + 32 * C + 3 * C * mlp_dim
    assert model.flops_per_token(100) == 6 * (3 * block + 50 * C) + 12 * 3 * 32 * 100
    assert model.flops_per_token() == model.flops_per_token(24)


# A window of 10 and 2 sinks: 12 keys are visible in W and S, all in F and N.
@pytest.mark.parametrize(
    "pattern, visible_at_100",
    [("F", 4 * 100), ("W", 4 * 12), ("FN", 4 * 100), ("WN", 2 * 100 + 2 * 12), ("WWS", 4 * 12)],
)
def test_flops_count_the_visible_keys_of_each_layer(pattern, visible_at_100, make):
    window = {"window": 10, "sinks": 2} if set(pattern) & set("WS") else {}
    model = make(layer_pattern=pattern, n_layer=4, **window)
    visible_at_5 = 4 * 5
    difference = model.flops_per_token(100) - model.flops_per_token(5)
    assert difference == 12 * 32 * (visible_at_100 - visible_at_5)


# -----------------------------------------------------------------------------
# Layers by letter.

WINDOW = {"window": 6, "sinks": 1}


@pytest.mark.parametrize(
    "settings, letters",
    [
        ({}, "FFFFF"),
        ({"window": 6}, "WWWWW"),
        ({"layer_pattern": "FN"}, "FNFNF"),
        ({"layer_pattern": "WWWF", "window": 6}, "WWWFW"),
        ({"layer_pattern": "FWNS", "window": 6}, "FWNSF"),
    ],
    ids=str,
)
def test_the_layer_pattern_repeats_over_the_layers(settings, letters):
    config = GPTConfig(n_layer=5, **settings)
    assert "".join(config.layer_kind(layer) for layer in range(5)) == letters
    for layer, letter in enumerate(letters):
        assert config.uses_window(layer) == (letter in "WS")
        assert config.uses_positions(layer) == (letter in "FW")


def forward_layer_by_layer(model, tokens):
    """The logits of a model assembled from four, each with layers of one letter only."""
    config = model.config
    shape = {"n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd}
    shape.update(vocab_size=config.vocab_size, block_size=config.block_size)
    models = {
        "F": GPT(GPTConfig(pos=config.pos, **shape)),
        "W": GPT(GPTConfig(pos=config.pos, **WINDOW, **shape)),
        "N": GPT(GPTConfig(pos="nope", **shape)),
        "S": GPT(GPTConfig(pos="nope", **WINDOW, **shape)),
    }
    for other in models.values():
        other.load_state_dict(model.state_dict(), strict=False)
    x = model.embed(tokens)
    pos = torch.arange(tokens.shape[1])
    for layer in range(config.n_layer):
        letter = config.layer_pattern[layer % len(config.layer_pattern)]
        x = models[letter].blocks[layer](x, models[letter].pos, pos, None, {})
    return model.head(model.norm(x))


# -----------------------------------------------------------------------------
# Refusals, and generation.


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.tensor([1, 2, 3]), r"shape \(3,\): give int64 \(B, T\)"),
        (torch.tensor([[0.5]]), "torch.float32"),
        ([[1, 2]], "a list: give a tensor"),
        (torch.tensor([[0, 50]]), "outside the vocabulary of 50"),
        (torch.tensor([[-1, 5]]), "outside the vocabulary of 50"),
    ],
)
def test_forward_refuses_what_is_not_text(make, tokens, message):
    with pytest.raises(UserError, match=message):
        make()(tokens)


@pytest.mark.parametrize("name", ["targets", "positions", "docs"])
def test_forward_refuses_what_does_not_fit_the_tokens(make, name):
    tokens = torch.randint(0, 50, (2, 8))
    with pytest.raises(UserError, match=rf"{name} are \(2, 5\), tokens \(2, 8\)"):
        make()(tokens, **{name: torch.zeros(2, 5, dtype=torch.long)})
    with pytest.raises(UserError, match="reduction='avg' is unknown: give mean, sum or none"):
        make()(tokens, tokens, reduction="avg")


@pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
@pytest.mark.parametrize("pos", POSITIONS)
def test_the_plain_loop_generates_the_same_tokens_as_the_cache(pos, make):
    model = make(pos=pos)
    prompts = torch.randint(0, 50, (2, 5))
    n = 19 if model.pos.bounded else 30  # beyond the context of 24, except for learned embeddings
    plain = torch.cat(list(model.generate_plain(prompts, n, temperature=0)), 1)
    cached = torch.cat(list(model.generate(prompts, n, temperature=0)), 1)
    assert torch.equal(plain, cached)


def test_the_plain_loop_samples_by_temperature_and_top_k(make):
    model = make()
    prompts = torch.randint(0, 50, (2, 5))
    sampled = []
    for loop in (model.generate, model.generate_plain):
        generator = torch.Generator().manual_seed(7)
        tokens = list(loop(prompts, 12, temperature=2.0, generator=generator))
        sampled.append(torch.cat(tokens, 1))
    assert torch.equal(*sampled)
    top = model(prompts[:1])[0, -1].topk(3).indices
    many = next(model.generate_plain(prompts[:1].expand(500, -1), 1, temperature=5.0, top_k=3))
    assert set(many[:, 0].tolist()) == set(top.tolist())


# -----------------------------------------------------------------------------
# model.py in another project, and torch.compile.


TRAIN_AND_GENERATE = """
import torch
from model import GPT, GPTConfig

torch.manual_seed(0)
model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50))
tokens = torch.randint(0, 50, (2, 12))
losses = []
for step in range(3):
    loss = model(tokens[:, :-1], tokens[:, 1:])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p -= 0.5 * gradient
    losses.append(loss.item())
model.extend("yarn", 2)
generated = [token.flatten().tolist() for token in model.generate(tokens, 10, temperature=0)]
"""
PRINT_RESULTS = """
import json
import sys

imported = sorted({"nanolong", "transformers", "triton"} & set(sys.modules))
print(json.dumps([losses, generated, imported]))
"""


def test_model_py_works_when_copied_into_another_project(tmp_path):
    """
    With rope_scaling.py and kernels/ it trains, extends and generates without nanolong/.

    It prints nothing, and imports neither triton nor transformers.
    """
    for name in ("model.py", "rope_scaling.py"):
        shutil.copy(ROOT / name, tmp_path)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignore)
    (tmp_path / "here.py").write_text(TRAIN_AND_GENERATE)
    there = TRAIN_AND_GENERATE + PRINT_RESULTS
    done = run_python(there, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert (done.returncode, done.stderr) == (0, "")
    losses, generated, imported = json.loads(done.stdout)
    assert imported == []
    here = runpy.run_path(str(tmp_path / "here.py"))
    assert losses == pytest.approx(here["losses"], rel=1e-6)
    assert losses[-1] < losses[0]
    assert generated == here["generated"]


def loss_and_gradients(model, forward, tokens, positions):
    """The summed loss of predicting the tokens themselves, and all gradients."""
    model.zero_grad()
    loss = forward(tokens, tokens, positions, reduction="sum")
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


slow = pytest.mark.slow  # each of them compiles for seconds


@pytest.mark.parametrize(
    "settings",
    [
        {"pos": "rope", "layer_pattern": "WN", "window": 9},
        pytest.param({"pos": "rope"}, marks=slow),
        pytest.param({"pos": "t5"}, marks=slow),
        pytest.param({"pos": "xl"}, marks=slow),
        pytest.param({"pos": "shaw"}, marks=slow),
        pytest.param({"pos": "kerple-power"}, marks=slow),
        pytest.param({"pos": "learned", "random_positions": 30}, marks=slow),
    ],
    ids=str,
)
def test_the_compiled_model_is_one_graph_with_the_same_gradients(settings, make):
    torch._dynamo.reset()
    model = make(qk_norm="head", n_kv_head=2, **settings)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 50, (2, 24))
    positions = model.sample_positions(2, 24, seed=5)
    loss, gradients = loss_and_gradients(model, compiled, tokens, positions)
    expected_loss, expected_gradients = loss_and_gradients(model, model, tokens, positions)
    assert torch.allclose(loss, expected_loss, rtol=1e-5)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-3, atol=1e-4)

    shorter = tokens[:, :13]
    if positions is not None:
        positions = positions[:, :13]
    expected = model(shorter, shorter, positions)
    assert torch.allclose(compiled(shorter, shorter, positions), expected, rtol=1e-5)
