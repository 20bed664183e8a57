"""Position schemes: the papers' numbers and formulas, cached decoding, positions and documents."""

import contextlib
import importlib
import math
import warnings
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from conftest import BUILT_IN, ROOT, Operators
from formulas import BIASES, nezha_vector, shaw_vectors, sinusoid, transformer_xl_keys

from model import GPT, POSITIONS, ContextLengthWarning, GPTConfig, NoPE
from nanolong.errors import UserError
from nanolong.inference import KVCache

SCHEMES = sorted(POSITIONS)
ABSOLUTE = ("learned", "sinusoidal")
TAKES_GAPS = ["nope", "learned", "sinusoidal", "rope"]  # the others use distances between indices
TAKES_GAPS += [pos for pos in SCHEMES if pos not in BUILT_IN and not POSITIONS[pos].by_index]


def make_scheme(pos, **settings):
    defaults = {"n_head": 4, "n_embd": 32, "block_size": 1024}
    return POSITIONS[pos](GPTConfig(pos=pos, **{**defaults, **settings}))


# -----------------------------------------------------------------------------
# Numbers that the papers and their code give.


def slopes_of_the_paper(n_head):
    """The recursion of ALiBi's released code."""
    if math.log2(n_head).is_integer():
        return [2 ** (-8 * (h + 1) / n_head) for h in range(n_head)]
    lower = 2 ** math.floor(math.log2(n_head))
    every_other = slopes_of_the_paper(2 * lower)[0::2]
    return slopes_of_the_paper(lower) + every_other[: n_head - lower]


@pytest.mark.parametrize("n_head", [*range(1, 33), 40, 48, 64, 112])
def test_alibi_slopes_match_the_paper(n_head):
    slopes = make_scheme("alibi", n_head=n_head, head_dim=8).bias(10, 0)
    assert slopes.dtype == torch.float32
    assert slopes.tolist() == pytest.approx(slopes_of_the_paper(n_head), rel=1e-6)


def test_t5_buckets_match_t5s_own_function():
    t5 = make_scheme("t5")
    starts = [int((t5.bucket == bucket).nonzero()[0]) for bucket in range(32)]
    logarithmic = [16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert starts == [*range(16), *logarithmic]
    assert len(t5.bucket) == 114  # constant from 113 on


def test_t5s_last_bucket_holds_for_all_greater_distances():
    t5 = make_scheme("t5")
    torch.nn.init.normal_(t5.weight)
    table = t5.bias(500, 0)
    assert table.shape == (4, 114)
    assert torch.equal(table[:, -1], t5.weight[:, 31])
    assert torch.equal(t5.bias(7, 1), t5.weight[:, :7])


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 64, 100, 128, 300])
def test_t5_uses_no_bucket_that_training_does_not_reach(length):
    """Sequences of `length` tokens have distances below it."""
    bucket = make_scheme("t5", block_size=length).bucket
    assert 1 <= len(bucket) <= length
    assert bucket[0] == 0
    assert (bucket.diff() >= 0).all()


def test_sinusoidal_embeddings_match_the_paper():
    sinusoidal = make_scheme("sinusoidal", n_embd=8, n_head=1)
    scale = 0.02 * math.sqrt(2)  # of a fresh token embedding
    near = sinusoidal.embed(torch.zeros(1, 1, 8), torch.tensor([1]))[0, 0] / scale
    numbers = [0.841471, 0.540302, 0.099833, 0.995004, 0.01, 0.99995, 0.001, 1]
    assert near.tolist() == pytest.approx(numbers, abs=1e-6)
    for position in (0, 17, 199, 1_000_000):
        x = sinusoidal.embed(torch.zeros(1, 1, 8), torch.tensor([position]))[0, 0] / scale
        assert x.tolist() == pytest.approx(sinusoid(position, 8).tolist(), abs=1e-5)


def test_nezhas_vectors_are_sinusoids_of_the_distance():
    table = make_scheme("nezha", n_embd=64, n_head=8).relative(1000, 0)[0][0]
    assert len(table) == 65
    for distance in (0, 1, 17, 64):
        assert torch.allclose(table[distance], sinusoid(distance, 8).float(), atol=1e-6)


def kerple_of_ones():
    """KERPLE with r1 = r2 = 1, and its power form with r1 = 1 and the exponent 0.7."""
    logarithmic, power = make_scheme("kerple"), make_scheme("kerple-power")
    with torch.no_grad():
        for p in (logarithmic.r1, logarithmic.r2, power.r1):
            p.fill_(math.log(math.expm1(1.0)))  # its softplus is 1
        power.r2.fill_(math.log(0.7 / 1.3))  # twice its sigmoid is 0.7
    return logarithmic, power


@pytest.mark.parametrize("index", [0, 1], ids=["kerple", "kerple-power"])
def test_kerple_has_finite_gradients_and_float32_biases(index):
    scheme = kerple_of_ones()[index]
    scheme.bias(101, 0).sum().backward()
    for p in scheme.parameters():
        assert p.grad.isfinite().all()
        assert (p.grad != 0).all()
    assert scheme.bias(1, 0).tolist() == [[0.0]] * 4
    assert scheme.bias(7, 1).dtype == torch.float32


def test_kerple_starts_from_uniform_samples():
    torch.manual_seed(0)
    logarithmic = make_scheme("kerple", n_head=1000, head_dim=8)
    power = make_scheme("kerple-power", n_head=1000, head_dim=8)
    for values, top in (
        (F.softplus(logarithmic.r1), 2),
        (F.softplus(logarithmic.r2), 1),
        (F.softplus(power.r1), 1),
        (2 * power.r2.sigmoid(), 2),
    ):
        assert 0 < values.min() < 0.05
        assert 0.95 * top < values.max() <= top
        assert values.mean().item() == pytest.approx(top / 2, rel=0.1)


def test_sandwich_matches_its_formula():
    bias = make_scheme("sandwich", n_head=8, n_embd=64).bias(4097, 0)
    numbers = [0, -1.4466, -22.3407, -42.4357, -67.2693]
    assert bias[0, [0, 1, 16, 256, 4096]].tolist() == pytest.approx(numbers, abs=1e-4)
    for head in range(8):  # head h, counted from 1, is multiplied by 8 / (8 h)
        assert torch.allclose(bias[head] * (head + 1), bias[0])


def rope_scores(q, k, positions):
    """RoPE's scores of the same query and key (D,) at all pairs of positions (T,): (T, T)."""
    T, D = len(positions), len(q)
    rope = make_scheme("rope", n_head=1, n_embd=D, block_size=4096)
    rows = [x.expand(1, 1, T, D) for x in (q, k)]
    q, k = rope.rotate(*rows, positions, 0)
    return q[0, 0] @ k[0, 0].T


def test_ropes_score_depends_on_the_difference_of_positions_only():
    """Of "my" and "dog" in "my dog" and in "I walk my dog", and anywhere else."""
    q, k = torch.randn(2, 64)
    positions = torch.arange(40)
    scores = rope_scores(q, k, positions)
    for first in (2, 1000, 3000):  # "I walk" are two words
        assert torch.allclose(rope_scores(q, k, positions + first), scores, atol=1e-3)
    assert scores[1, 0].item() == pytest.approx(scores[3, 2].item(), abs=1e-4)
    assert scores[0].std() > 0.1  # and it does depend on that


def test_rope_fraction_chooses_the_rotated_channels(make):
    tokens = torch.randint(0, 50, (2, 9))
    unrotated, nope = make(pos="rope", rope_fraction=0.0), make(pos="nope")
    assert torch.equal(unrotated(tokens), nope(tokens))
    assert make(pos="rope", rope_fraction=0.25).pos.inv_freq.tolist() == [1.0]
    half = make(pos="rope", rope_fraction=0.5, head_dim=16).pos.inv_freq
    assert torch.allclose(half, 10000.0 ** -(torch.arange(0, 8, 2).double() / 8))


# -----------------------------------------------------------------------------
# The first layer's attention in float64, one score at a time.


def attention_by_loops(model, x, terms):
    """
    The first block's attention over x (T, C), in float64.

    terms(q, head, i, j) for query q (D,) at index i and the key at index j returns what the scheme
    adds to q k, before the scale, and to the value.
    """
    config = model.config
    w = {name: p.double() for name, p in model.blocks[0].attention.named_parameters()}
    T, D = len(x), config.head_dim
    q, k, v = ((x.double() @ w[f"{name}.weight"].T).view(T, -1, D) for name in "qkv")
    y = torch.zeros(T, config.n_head, D, dtype=torch.float64)
    for head in range(config.n_head):
        for i in range(T):
            scores, values = [], []
            for j in range(i + 1):
                to_score, to_value = terms(q[i, head], head, i, j)
                scores.append((q[i, head] @ k[j, head] + to_score) / math.sqrt(D))
                values.append(v[j, head] + to_value)
            p = torch.stack(scores).softmax(0)
            y[i, head] = p @ torch.stack(values)
    return y.flatten(1) @ w["o.weight"].T


def first_attention(model, x):
    """The same by the model: (T, C)."""
    return model.blocks[0].attention(x[None], model.pos, torch.arange(len(x)), None, {})[0]


def shaw_terms(model, k, q, head, i, j):
    key, value = shaw_vectors(model.pos, i - j, 0, model.pos.max_distance)
    return q @ key, value


def nezha_terms(model, k, q, head, i, j):
    vector = nezha_vector(model.pos, i - j, 12)  # up to half of the context
    return q @ vector, vector


def transformer_xl_terms(model, k, q, head, i, j):
    """Scores (q + u) k + (q + v) W_R R, with R of each distance computed on its own."""
    u, v = model.pos.u.double(), model.pos.v.double()
    relative_key = transformer_xl_keys(model.pos, i - j, 0)[head]
    return u[head] @ k[j, head] + (q + v[head]) @ relative_key, 0


def bias_terms(model, k, q, head, i, j):
    bias = BIASES[model.config.pos](model.pos, i - j)[head]
    return bias * math.sqrt(8), 0  # before the scale of 1 / sqrt(8)


TERMS = {"shaw": shaw_terms, "nezha": nezha_terms, "xl": transformer_xl_terms}


# with a max_distance of 1000, every distance has its own vector
# -----------------------------------------------------------------------------
# Parameters and constants.


@pytest.mark.parametrize("length", [1, 2, 3, 7, 40, 256, 1000])
def test_shaw_has_a_vector_for_each_distance_up_to_half_the_context(length):
    shaw = make_scheme("shaw", block_size=length)
    size = min(128, max(1, length // 2)) + 1
    assert shaw.keys.shape == shaw.values.shape == (4, size, 8)


def test_shaw_starts_as_nope():
    logits = []
    for pos in ("shaw", "nope"):
        torch.manual_seed(3)
        model = GPT(GPTConfig(pos=pos, n_embd=32, n_head=4, block_size=24))
        logits.append(model(torch.arange(24)[None]))
    assert torch.allclose(*logits, atol=1e-5)


def test_transformer_xl_shares_u_and_v_between_layers(make):
    shapes = {name: tuple(p.shape) for name, p in make(pos="xl").pos.named_parameters()}
    assert shapes == {"u": (4, 8), "v": (4, 8), "project": (2, 32, 32)}


def test_transformer_xl_tells_great_distances_apart_under_autocast():
    """In bfloat16, distances above 256 would be merged."""
    torch.manual_seed(0)
    xl = make_scheme("xl")
    with torch.autocast("cpu", torch.bfloat16):
        keys = xl.relative(3000, 1)[0]
    assert keys.dtype == torch.float32
    assert torch.equal(keys, xl.relative(3000, 1)[0])


@pytest.mark.parametrize("pos", SCHEMES)
def test_constants_keep_their_dtype_and_are_not_saved(pos, make):
    """model.bfloat16() must not round frequencies, slopes or buckets."""
    model = make(pos=pos)
    names = model.pos.__dict__.get("_constants", [])
    before = {name: getattr(model.pos, name).clone() for name in names}
    model.bfloat16()
    for name, tensor in before.items():
        assert getattr(model.pos, name).dtype == tensor.dtype
        assert torch.equal(getattr(model.pos, name), tensor)
    saved = {name for name in model.state_dict() if name.startswith("pos.")}
    assert saved == {f"pos.{name}" for name, _ in model.pos.named_parameters()}
    assert model(torch.zeros(1, 5, dtype=torch.long)).dtype == torch.bfloat16


@pytest.mark.parametrize("pos", SCHEMES)
def test_constants_stay_on_their_device_when_the_dtype_changes(pos, make):
    model = make(pos=pos).to("meta")
    for convert in (model.float, model.bfloat16, model.half):
        convert()
        names = model.pos.__dict__.get("_constants", [])
        assert all(getattr(model.pos, name).is_meta for name in names)


@pytest.mark.parametrize(
    "settings",
    [
        {"pos": "rope", "head_dim": 7},
        {"pos": "rope", "rope_fraction": 0.4},
        {"pos": "nezha", "head_dim": 7},
        {"pos": "sinusoidal", "n_embd": 33, "head_dim": 8},
        {"pos": "xl", "n_embd": 33, "head_dim": 8},
    ],
    ids=str,
)
def test_channels_that_cannot_be_paired_are_refused(settings, make):
    with pytest.raises(UserError, match="odd"):
        make(**settings)


# -----------------------------------------------------------------------------
# Properties of the whole model.


@pytest.mark.parametrize("pos", BUILT_IN)
def test_only_absolute_schemes_notice_that_all_positions_are_shifted(pos, make):
    model = make(pos=pos, block_size=2000)
    tokens = torch.randint(0, 50, (2, 12))
    shifted = model(tokens, positions=torch.arange(12) + 1000)
    same = (model(tokens) - shifted).abs().max() < 1e-4
    assert same == (pos not in ABSOLUTE)


@pytest.mark.parametrize("pos", SCHEMES)
def test_the_future_changes_nothing(pos, make):
    model = make(pos=pos)
    tokens = torch.randint(0, 50, (1, 20))
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 50
    assert torch.allclose(model(changed)[:, :12], model(tokens)[:, :12], atol=1e-6)


@pytest.mark.parametrize("pos", SCHEMES)
def test_padded_prompts_with_their_own_positions_equal_prompts_alone(pos, make):
    """The shorter prompt is padded on the left, and the pad tokens are a document of their own."""
    model = make(pos=pos)
    a, b = torch.randint(0, 50, (1, 12)), torch.randint(0, 50, (1, 8))
    tokens = torch.cat((a, F.pad(b, (4, 0))))
    docs = torch.tensor([[0] * 12, [-1] * 4 + [0] * 8])
    positions = torch.stack((torch.arange(12), F.pad(torch.arange(8), (4, 0))))
    if pos not in TAKES_GAPS:
        positions[1, :4] = torch.arange(4)
    logits = model(tokens, positions=positions, docs=docs)
    assert torch.allclose(logits[:1], model(a), atol=1e-5)
    assert torch.allclose(logits[1:, 4:], model(b), atol=1e-5)


@pytest.mark.parametrize("pos", SCHEMES)
def test_position_ids_with_gaps_are_refused_where_distances_are_between_indices(pos, make):
    model = make(pos=pos)
    tokens = torch.randint(0, 50, (1, 6))
    gaps = torch.tensor([0, 1, 2, 9, 10, 11])
    assert model.pos.by_index == (pos not in TAKES_GAPS)
    if pos in TAKES_GAPS:
        assert model(tokens, positions=gaps).isfinite().all()
    else:
        with pytest.raises(UserError, match=f"--pos={pos} uses distances between indices"):
            model(tokens, positions=gaps)


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(
    "hook, result, message",
    [
        ("bias", lambda n: zeros(n), r"must return slopes \(4,\) or a table .* float32 \(7,\)"),
        ("bias", lambda n: zeros(4, n + 1), r"m <= 7, and returned float32 \(4, 8\)"),
        ("bias", lambda n: zeros(1, n), r"returned float32 \(1, 7\)"),
        ("bias", lambda n: zeros(4, n).double(), r"a table .* in float32, .* returned float64"),
        ("bias", lambda n: 0.5, "and returned float:"),
        ("relative", lambda n: zeros(4, n, 8), r"must return a tuple \(keys, values, offsets\)"),
        ("relative", lambda n: (zeros(4, n, 9), None, None), r"keys \(4 or 1, m, 8\)"),
        ("relative", lambda n: (zeros(4, n, 8), zeros(1, n, 8), None), r"values \(4, 7, 8\)"),
        ("relative", lambda n: (zeros(4, n, 8), None, (zeros(4), zeros(4))), "two offsets"),
        ("bias", lambda n: zeros(4), None),
        ("bias", lambda n: zeros(4, 3), None),
        ("relative", lambda n: (zeros(1, n, 8), zeros(1, n, 8), None), None),
        ("relative", lambda n: (zeros(4, 2, 8), None, (zeros(4, 8), zeros(4, 8))), None),
    ],
)
def test_what_a_scheme_returns_is_checked_once(hook, result, message, make, monkeypatch):
    """With 4 heads: a table over 4 distances must not pass as slopes."""
    scheme = type("FireLite", (NoPE,), {hook: lambda self, n, layer: result(n)})
    assert scheme.by_index
    monkeypatch.setitem(POSITIONS, "fire", scheme)
    if message is None:
        make(pos="fire")(torch.randint(0, 50, (1, 9)))
        return
    with pytest.raises(UserError, match=rf"^FireLite\.{hook}\(7, layer\).*{message}"):
        make(pos="fire")


def test_the_base_class_keeps_its_state_under_names_of_its_own(make):
    """What a scheme may call `length`, `scale` or `table` belongs to it."""
    public = {name for name in vars(make(pos="nope").pos) if not name.startswith("_")}
    assert public <= {"config", "is_dynamic", "position_scale", "score_scale", "training"}
    methods = {name for name in vars(NoPE) if not name.startswith("_")}
    assert methods == {
        *("embed", "rotate", "bias", "relative", "attend", "extend", "bounded", "pairs"),
        *("by_index",),
        *("methods", "check_method", "set_length", "update_tables", "distance_index"),
        *("register_constant", "needs_whole_text"),
    }
    text = (ROOT / "docs/schemes.md").read_text()
    assert all(f"`{name}" in text for name in methods | public - {"training"})


@pytest.mark.parametrize("pos", SCHEMES)
def test_negative_position_ids_are_refused(pos, make):
    with pytest.raises(UserError, match="must not be negative"):
        make(pos=pos)(torch.randint(0, 50, (1, 6)), positions=torch.arange(6) - 1)


def test_a_window_counts_explicit_positions(make):
    """With and without a cache; without explicit positions it counts tokens."""
    model = make(pos="rope", window=6, sinks=2)
    tokens = torch.randint(0, 50, (1, 14))
    positions = torch.tensor([0, 1, 2, 5, 6, 9, 10, 11, 12, 15, 16, 17, 18, 19])
    whole = model(tokens, positions=positions)
    assert not torch.allclose(model(tokens), whole, atol=1e-2)
    assert torch.equal(model(tokens, positions=torch.arange(14)), model(tokens))

    cache = KVCache()
    sizes = [8, 1, 1, 1, 1, 1, 1]
    parts = []
    for part, where in zip(tokens.split(sizes, 1), positions.split(sizes), strict=True):
        parts.append(model(part, positions=where, cache=cache))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)


def test_a_window_counts_explicit_positions_of_an_earlier_call(make):
    model = make(pos="rope", window=6, sinks=2)
    tokens = torch.randint(0, 50, (1, 14))
    cache = KVCache()
    first = model(tokens[:, :3], positions=torch.tensor([0, 1, 2]), cache=cache)
    second = model(tokens[:, 3:], cache=cache)
    assert cache.explicit_positions
    assert torch.allclose(torch.cat((first, second), 1), model(tokens), atol=1e-4)


# -----------------------------------------------------------------------------
# What a GPU would wait for. A tensor on the meta device has no values, so reading one raises.


@pytest.fixture
def make_on_meta(make, monkeypatch):
    """Make a model, extended by a method or not, on the meta device, which knows no autocast."""

    def make_on_meta(method=None, **settings):
        model = make(**settings)
        if method is not None:
            model.extend(method, 2)
        return model.to("meta")

    importlib.import_module("torch._dynamo")  # it would keep what is set here
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: contextlib.nullcontext())
    return make_on_meta


def tokens_on_meta(B, T):
    return torch.zeros(B, T, dtype=torch.long, device="meta")


@pytest.mark.parametrize("pos", SCHEMES)
def test_positions_on_the_cpu_are_checked_there(pos, make_on_meta):
    model = make_on_meta(pos=pos)
    tokens = tokens_on_meta(2, 20)
    assert model(tokens, positions=torch.arange(20)).is_meta
    with pytest.raises(UserError, match="must not be negative"):
        model(tokens, positions=torch.arange(20) - 1)


@pytest.mark.parametrize("pos", TAKES_GAPS)
def test_positions_on_a_device_are_not_read(pos, make_on_meta):
    """The loader checks them on the host; dynamic tables alone need them."""
    model = make_on_meta(pos=pos, block_size=100)
    positions = torch.arange(20) * 4
    assert model.check_positions(positions) == 77
    tokens = tokens_on_meta(2, 20)
    model(tokens, positions=positions.to("meta"))
    model.pos.is_dynamic = True
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(tokens, positions=positions.to("meta"))


def test_sampled_positions_are_not_read_from_the_device(make_on_meta):
    model = make_on_meta(pos="rope", random_positions=500)
    assert model(tokens_on_meta(3, 20), positions=model.sample_positions(3, 20, seed=1)).is_meta


@pytest.mark.parametrize("method", ["lm-infinite", "self-extend"])
def test_default_positions_are_never_read(method, make_on_meta):
    model = make_on_meta(method, pos="rope", block_size=24)
    with pytest.warns(ContextLengthWarning):
        assert model(tokens_on_meta(1, 60)).is_meta


@pytest.mark.parametrize("pos", [pos for pos in SCHEMES if "pi" in POSITIONS[pos].methods])
def test_an_interpolated_scheme_computes_on_its_own_device(pos, make_on_meta):
    scheme = make_on_meta("pi", pos=pos).pos
    with Operators() as operators:
        scheme.bias(40, 0)
        scheme.relative(40, 0)
    computed = [x for _, tensors in operators.calls for x in tensors if x.dim()]  # but numbers
    assert all(x.is_meta for x in computed)


@pytest.mark.parametrize("factor", [1.1, 1.2, 1.5, 2, 2.15, 7, 16])
def test_an_exact_multiple_of_the_factor_is_not_rounded_down(factor):
    scheme = make_scheme("shaw")
    scheme.extend("pi", factor)
    exact = Fraction(str(factor))
    index = scheme.distance_index(3000, 129)
    assert index.tolist() == [math.floor(d / exact) for d in range(len(index))]
    assert index[-1] == 128


# -----------------------------------------------------------------------------
# Beyond the context.


@pytest.mark.parametrize("pos", SCHEMES)
def test_beyond_the_context_a_scheme_warns_or_refuses(pos, make):
    model = make(pos=pos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.zeros(1, 24, dtype=torch.long))
    tokens = torch.zeros(1, 25, dtype=torch.long)
    if model.pos.bounded:
        with pytest.raises(UserError, match="no embedding for position 24: the context is 24"):
            model(tokens)
    else:
        with pytest.warns(ContextLengthWarning, match="longer than .* context of 24 tokens"):
            model(tokens)


def test_learned_embeddings_generate_as_many_tokens_as_the_table_has_rows(make):
    model = make(pos="learned")
    prompt = torch.zeros(1, 20, dtype=torch.long)
    with pytest.raises(UserError, match="at most --max_new_tokens=5"):
        list(model.generate(prompt, 6))
    assert len(list(model.generate(prompt, 5))) == 5


# -----------------------------------------------------------------------------
# Random positions.

WITH_RANDOM_POSITIONS = ("learned", "sinusoidal", "rope")


def test_sampled_positions_are_sorted_distinct_and_repeatable(make):
    model = make(random_positions=500)
    positions = model.sample_positions(3, 20, seed=1)
    assert positions.shape == (3, 20)
    assert positions.dtype == torch.int64
    assert (positions.diff() > 0).all()
    assert positions.min() >= 0
    assert positions.max() < 500
    assert torch.equal(positions, model.sample_positions(3, 20, seed=1))
    assert not torch.equal(positions, model.sample_positions(3, 20, seed=2))
    many = model.sample_positions(4000, 5, seed=3).double()
    assert many.mean().item() == pytest.approx(249.5, abs=5)  # they are uniform
    assert many[:, 0].mean().item() == pytest.approx(500 / 6, abs=5)  # the least of five


def test_sampled_positions_are_all_where_there_are_no_more(make):
    positions = make(random_positions=24).sample_positions(2, 24, seed=0)
    assert torch.equal(positions, torch.arange(24).expand(2, 24))
    assert make().sample_positions(2, 5, seed=0) is None


@pytest.mark.parametrize("pos", WITH_RANDOM_POSITIONS)
def test_each_sequence_has_its_own_positions(pos, make):
    model = make(pos=pos, random_positions=500)
    tokens = torch.randint(0, 50, (3, 20))
    positions = model.sample_positions(3, 20, seed=1)
    together = model(tokens, positions=positions)
    for row in range(3):
        alone = model(tokens[row : row + 1], positions=positions[row])
        assert torch.allclose(together[row], alone[0], atol=1e-5)


@pytest.mark.parametrize("pos", WITH_RANDOM_POSITIONS)
def test_generate_uses_sampled_positions(pos, make):
    model = make(pos=pos, random_positions=500)
    prompts = torch.randint(0, 50, (3, 20))
    generated = torch.cat(list(model.generate(prompts, 30, temperature=0)), 1)
    positions = model.sample_positions(1, 49, seed=0)[0]  # the last token is not an input
    text = prompts
    for n in range(20, 50):
        next_token = model(text, positions=positions[:n])[:, -1:].argmax(-1)
        text = torch.cat((text, next_token), 1)
    assert torch.equal(text[:, 20:], generated)


@pytest.mark.parametrize("pos", WITH_RANDOM_POSITIONS)
def test_models_with_random_positions_are_not_extended(pos, make):
    """Position interpolation would cut the table of learned embeddings to the context."""
    model = make(pos=pos, random_positions=500)
    for method, factor in (("pi", 1.0), ("none", 2)):
        with pytest.raises(UserError, match="below 500 and needs no extension"):
            model.extend(method, factor)
    if pos != "learned":
        tokens = torch.randint(0, 50, (3, 20))
        logits = model(tokens, positions=model.sample_positions(3, 20, seed=1))
        model.extend("none", 1.0)
        assert torch.equal(model(tokens, positions=model.sample_positions(3, 20, seed=1)), logits)


def test_learned_embeddings_have_a_row_for_every_random_position(make):
    model = make(pos="learned", random_positions=500)
    assert len(model.pos.table) == 500
    with pytest.raises(UserError, match="no embedding for position 500"):
        model(torch.zeros(1, 20, dtype=torch.long), positions=torch.arange(481, 501))


def sinusoids(length):
    """The embeddings of the first positions, float64 (length, 64)."""
    sinusoidal = make_scheme("sinusoidal", n_embd=64)
    embedded = sinusoidal.embed(torch.zeros(1, length, 64), torch.arange(length))[0]
    return embedded.double() / (0.02 * math.sqrt(2))


def test_the_dot_product_of_sinusoids_is_a_sum_of_cosines_of_the_difference():
    embedded = sinusoids(200)
    frequency = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    position = torch.arange(200).double()
    difference = position[:, None] - position  # (200, 200)
    expected = (difference[..., None] * frequency).cos().sum(-1)
    assert (embedded @ embedded.T - expected).abs().max() < 1e-4


def test_every_position_has_its_own_sinusoids_and_near_ones_are_alike():
    embedded = sinusoids(200)
    similarity = embedded @ embedded.T
    assert similarity.diagonal().tolist() == pytest.approx([32.0] * 200, abs=1e-4)
    others = similarity - 64 * torch.eye(200)
    assert others.max() < 31  # no two positions share a vector
    assert (others.argmax(1) - torch.arange(200)).abs().max() == 1  # a neighbour is the nearest


@pytest.mark.parametrize("k", [1, 7, 50])
def test_sinusoids_further_on_are_a_linear_function_of_those_here(k):
    """One matrix for all positions: a rotation of each pair of sine and cosine."""
    embedded = sinusoids(200)
    frequency = 10000.0 ** -(torch.arange(0, 64, 2).double() / 64)
    blocks = []
    for angle in (k * frequency).tolist():
        cos, sin = math.cos(angle), math.sin(angle)
        blocks.append(torch.tensor([[cos, sin], [-sin, cos]], dtype=torch.float64))
    matrix = torch.block_diag(*blocks)
    assert (embedded[:-k] @ matrix.T - embedded[k:]).abs().max() < 1e-5


def test_ropes_score_of_equal_vectors_fades_with_distance_without_a_cut_off():
    """The query equals the key; the means are over distances from one power of 2 to the next."""
    q = torch.ones(64)
    scores = rope_scores(q, q, torch.arange(2048))[:, 0]
    means = [scores[2**i : 2 ** (i + 1)].mean().item() for i in range(11)]
    assert all(a > b for a, b in zip(means, means[1:], strict=False))
    assert scores.argmax() == 0
    assert means[-1] > 0.1 * scores[0]
