"""Linear attention against its formula, written out in float64, and its experiment."""

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import BUILT_IN, ROOT, TINY
from try_budget import try_words

import data
import rope_scaling
from examples.schemes import linear_attention as linear
from experiments.papers import linear_attention as experiment
from model import GPT, POSITIONS
from nanolong.errors import UserError
from nanolong.inference import KVCache

ENTRY = f"--entry={ROOT}/examples/schemes/linear_attention.py"
MASK = {"window": 0, "sinks": 0, "scale": 0.3, "docs": None, "positions": None}

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


@pytest.fixture(autouse=True)
def schemes():
    """The schemes are there, and do not stay; the products are small, so one thread computes."""
    before = dict(POSITIONS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    experiment.model_settings(["nope", "rope"])
    yield
    POSITIONS.clear()
    POSITIONS.update(before)
    torch.set_num_threads(threads)


def rotate(x, pos, inv_freq, factor=1.0):
    """Multiply the pairs (c, c + R/2) of x (..., T, D) by e^(i pos inv_freq), and by a factor."""
    half = len(inv_freq)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    angle = pos.double()[:, None] * inv_freq
    pairs = pairs * torch.polar(torch.full_like(angle, factor), angle)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


def formula(q, k, v, pos, inv_freq, factor=1.0, both=False):
    """The output and the denominators, by T x T matrices of weights in float64."""
    repeats = q.shape[1] // k.shape[1]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    weights = (rotate(q, pos, inv_freq, factor) @ rotate(k, pos, inv_freq, factor).mT).tril()
    denominator = (weights if both else (q @ k.mT).tril()).sum(-1)
    return weights @ v / denominator[..., None], denominator


def make_inputs(T, n_kv_head=4, D=8, seed=0):
    """Queries of 4 heads, keys and values, for two sequences, with gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 4, T, D), (2, n_kv_head, T, D), (2, n_kv_head, T, D))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def relative_error(x, expected):
    return ((x - expected).abs().max() / expected.abs().max()).item()


def flatten(tensors):
    return torch.cat([x.flatten() for x in tensors])


# -----------------------------------------------------------------------------
# The formula.


@pytest.mark.parametrize("T", [1, 31, 32, 33, 77])
@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_attention_is_the_formula(T, n_kv_head, fraction, make):
    model = make(pos="linear_attention", n_kv_head=n_kv_head, rope_fraction=fraction)
    q, k, v = make_inputs(T, n_kv_head)
    pos = torch.arange(T)
    inv_freq = 10000.0 ** -(torch.arange(0, 8 * fraction, 2, dtype=torch.float64) / (8 * fraction))
    expected, _ = formula(q, k, v, pos, inv_freq)
    y = model.pos.attend(q, k, v, pos, 0, None, **MASK)
    assert y.dtype == torch.float32
    assert relative_error(y, expected) < 1e-5

    grad = torch.randn(y.shape)
    # together: of a single token, those of q and k are zero
    mine = torch.autograd.grad(y, (q, k, v), grad)
    theirs = torch.autograd.grad(expected, (q, k, v), grad.double())
    assert relative_error(flatten(mine), flatten(theirs)) < 1e-5


@pytest.mark.parametrize("chunk", [1, 3, 8, 50, 64])
def test_chunks_of_any_size_equal_the_recurrence_and_the_sum(chunk):
    q, k, v = make_inputs(50, n_kv_head=2)
    repeated_k, repeated_v = k.repeat_interleave(2, 1).double(), v.repeat_interleave(2, 1).double()
    expected = (q.double() @ repeated_k.mT).tril() @ repeated_v
    y, state = linear.chunked_product(q, k, v, chunk=chunk)
    assert relative_error(y, expected) < 1e-5
    assert relative_error(state, k.double().mT @ v.double()) < 1e-5

    # in two parts, and token by token
    first, middle = linear.chunked_product(q[:, :, :11], k[:, :, :11], v[:, :, :11], chunk=chunk)
    second, end = linear.chunked_product(
        q[:, :, 11:], k[:, :, 11:], v[:, :, 11:], middle, chunk=chunk
    )
    assert relative_error(torch.cat((first, second), 2), expected) < 1e-5
    assert relative_error(end, state) < 1e-5
    state, steps = torch.zeros(2, 2, 8, 8), []
    for t in range(50):
        token = slice(t, t + 1)
        y, state = linear.recurrent_product(q[:, :, token], k[:, :, token], v[:, :, token], state)
        steps.append(y)
    assert relative_error(torch.cat(steps, 2), expected) < 1e-5


def test_feature_map_is_positive_where_elu_rounds_to_minus_one():
    x = torch.linspace(-80, 20, 401, requires_grad=True)
    y = linear.feature_map(x)
    assert torch.allclose(y, F.elu(x) + 1, atol=1e-6)
    assert (y > 0).all() and (F.elu(x) + 1 == 0).any()
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(slope, torch.where(x > 0, 1.0, x.exp()))
    assert slope[x == 0] == 1


def test_attention_depends_on_differences_of_positions(make):
    model = make(pos="linear_attention")
    q, k, v = make_inputs(40)
    near = model.pos.attend(q, k, v, torch.arange(40), 0, None, **MASK)
    distant = model.pos.attend(q, k, v, torch.arange(40) + 9000, 0, None, **MASK)
    other = model.pos.attend(q, k, v, torch.arange(40) * 2, 0, None, **MASK)
    assert torch.allclose(near, distant, atol=1e-5)
    assert not torch.allclose(near, other, atol=1e-2)


def test_no_token_sees_a_later_one(make):
    model = make(pos="linear_attention", n_kv_head=2)
    tokens = torch.randint(0, 50, (1, 75))
    changed = tokens.clone()
    changed[:, 41] = (changed[:, 41] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :41], after[:, :41])
    assert (before[:, 41:] != after[:, 41:]).any(-1).all()


# -----------------------------------------------------------------------------
# Generation.


@pytest.mark.parametrize("fraction", [0.0, 1.0])
@pytest.mark.parametrize("n_kv_head", [1, 4])
def test_recurrent_generation_equals_the_chunked_forward_pass(fraction, n_kv_head, make):
    model = make(pos="linear_attention", rope_fraction=fraction, n_kv_head=n_kv_head)
    tokens = torch.randint(0, 50, (2, 301))
    cache = KVCache()
    with torch.no_grad():
        expected = model(tokens)
        pieces = [model(tokens[:, :7], cache=cache), model(tokens[:, 7:50], cache=cache)]
        for t in range(50, 301):
            pieces.append(model(tokens[:, t : t + 1], cache=cache))
    assert relative_error(torch.cat(pieces, 1), expected) < 1e-5
    # the state of a layer, whatever the length
    assert cache.keys[0].shape == (2, n_kv_head, 8, 8)
    assert cache.values[0].shape == (2, n_kv_head, 1, 8)


@pytest.mark.parametrize("method", ["yarn", "dynamic-yarn"])
def test_generation_uses_the_state_and_follows_dynamic_tables(method, make):
    model = make(pos="linear_attention")
    model.extend(method, 4)
    prompt = torch.randint(0, 50, (2, 20))
    generated = torch.cat(list(model.generate(prompt, 40, temperature=0)), 1)
    plain = torch.cat(list(model.generate_plain(prompt, 40, top_k=1)), 1)
    assert torch.equal(generated, plain)


# -----------------------------------------------------------------------------
# Extension methods, and denominators.


@pytest.mark.parametrize("method", ["pi", "ntk", "yarn", "dynamic-ntk"])
def test_extension_methods_apply_as_they_are(method, make):
    model = make(pos="linear_attention")
    model.extend(method, 4.0)
    q, k, v = make_inputs(96)
    pos = torch.arange(96)
    model.pos.set_length(96)
    y = model.pos.attend(q, k, v, pos, 0, None, **MASK)
    options = {"length": 96} if method.startswith("dynamic") else {}
    inv_freq, factor = rope_scaling.METHODS[method](10000.0, 8, 24, 4.0, **options)
    plain, _ = rope_scaling.none(10000.0, 8, 24, 4.0)
    assert relative_error(y, formula(q, k, v, pos, inv_freq, factor)[0]) < 1e-5
    assert relative_error(y, formula(q, k, v, pos, plain)[0]) > 1e-2


def test_every_method_applies_or_is_refused(make):
    for method in rope_scaling.METHODS:
        model = make(pos="linear_attention")
        options = {"long_factor": [4.0] * 4} if method == "longrope" else {}
        if method in rope_scaling.EVALUATION_ONLY:
            with pytest.raises(UserError, match="replaces attention"):
                model.extend(method, 4, **options)
        else:
            model.extend(method, 4, **options)
            assert model(torch.randint(0, 50, (1, 96))).isfinite().all()


def test_denominators_are_positive_unless_they_are_rotated(make):
    q, k, v = make_inputs(300, D=16)
    pos = torch.arange(300)
    inv_freq = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    inputs = 4 * q.detach(), 4 * k.detach(), v.detach()
    for name, both in (("linear_attention", False), ("linear_attention_both", True)):
        model = make(pos=name, n_embd=64)
        seen = model.pos.observe = experiment.Denominators()
        y = model.pos.attend(*inputs, pos, 0, None, **MASK)
        expected, denominator = formula(*inputs, pos, inv_freq, both=both)
        measured = seen.ranges["rotated" if both else "unrotated"]
        assert measured["smallest"] == pytest.approx(denominator.min().item(), rel=1e-4, abs=1e-3)
        assert measured["number"] == denominator.numel()
        assert (measured["smallest"] < 0) == both
        assert (measured["negative"] > 0) == both
        assert relative_error(y, expected) < (1e-2 if both else 1e-5)


# -----------------------------------------------------------------------------
# What is refused.


def test_each_other_scheme_is_refused_with_its_reason():
    experiment.check_pos("nope")
    experiment.check_pos("rope")
    assert set(experiment.REFUSED) == set(BUILT_IN) - {"nope", "rope"}
    for pos in experiment.REFUSED:
        with pytest.raises(UserError, match=f"{pos} is not used in linear .*: use nope or rope$"):
            experiment.check_pos(pos)
    with pytest.raises(UserError, match="no position scheme 'ropey'"):
        experiment.check_pos("ropey")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"window": 8}, "window=8"),
        ({"layer_pattern": "FN"}, "layer_pattern=FN"),
        ({"attn_scale": 0.5}, "attn_scale=0.5"),
    ],
)
def test_settings_without_meaning_are_refused(settings, message, make):
    with pytest.raises(UserError, match=message):
        make(pos="linear_attention", **settings)


def test_documents_and_prompts_of_unequal_length_are_refused(make):
    model = make(pos="linear_attention")
    tokens = torch.randint(0, 50, (1, 9))
    with pytest.raises(UserError, match="one state for the whole text"):
        model(tokens, docs=torch.zeros_like(tokens))
    with pytest.raises(UserError, match="unequal length"):
        next(model.generate([[1, 2, 3], [4]], 3))


def test_compiled_generation_is_refused(make):
    model = make(pos="linear_attention")
    with pytest.raises(UserError, match="LinearAttention cannot be compiled: leave out --compile"):
        list(model.generate(torch.randint(0, 50, (1, 9)), 3, compiled=True))


@pytest.mark.parametrize(
    "word, message",
    [
        ("--pos=rope,alibi", "alibi is not used"),
        ("--pos=learned", "embeddings"),
        ("--pos=", "pos"),
        ("--seeds=-1", "seed -1"),
        ("--budget=gpu", "budget"),
    ],
)
def test_bad_input_is_one_sentence(word, message, call, tmp_path):
    done = call("experiments/papers/linear_attention.py", word, cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr
    assert not list(tmp_path.iterdir())


# -----------------------------------------------------------------------------
# In the scripts, and the experiment.


def test_scripts_take_the_scheme_as_it_is(call, text_data, tmp_path):
    run = tmp_path / "run"
    data = f"--dataset={text_data}"
    longer = tmp_path / "longer"
    entry = [ENTRY, "--separate_docs=false"]  # extend.py's default separates those it knows
    for words in (
        ["train.py", *TINY, data, ENTRY, f"--out_dir={run}"],
        ["extend.py", run, *entry, "--max_iters=2", f"--out_dir={longer}"],
        ["evaluate.py", run, longer, ENTRY, "--lengths=32,64", "--max_tokens=500"],
        ["sample.py", longer, ENTRY, "--max_new_tokens=5"],
    ):
        done = call(*words)
        assert done.returncode == 0, done.stderr
    assert GPT.load(longer).config.extension["method"] == "yarn"
    refused = call("extend.py", run, ENTRY, "--method=self-extend")
    assert refused.returncode == 2 and "self-extend" in refused.stderr


def test_experiment_continues_and_reports(call, text_data, tmp_path, monkeypatch):
    monkeypatch.setitem(experiment.BUDGETS["try"]["training"], "max_iters", 3)
    monkeypatch.setattr(experiment, "METHODS", ("none", "yarn", "self-extend"))
    monkeypatch.setattr(experiment, "TIMED_FACTORS", (1, 2))
    words = ["--seeds=1", "--max_tokens=300"]
    words = try_words("papers/linear_attention", tmp_path, *words, text=text_data)
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    board = json.loads((tmp_path / "results/linear_attention.json").read_text())
    assert len(board["records"]) == 5
    text = (tmp_path / "results/linear_attention.md").read_text()
    assert "- linear rope, `self-extend`: method 'self-extend' replaces attention" in text
    with monkeypatch.context() as patched:
        patched.setattr(experiment, "train_or_stop", None)
        assert call(*words, cwd=tmp_path).returncode == 0
    again = json.loads((tmp_path / "results/linear_attention.json").read_text())
    assert again["records"] == board["records"]
    refused = call(*words, "--max_tokens=200", cwd=tmp_path)
    assert refused.returncode == 2 and "other settings" in refused.stderr


def test_divergence_is_recorded(make, text_data, tmp_path, monkeypatch):
    """The first step that is not finite, and the losses before it."""
    dataset = data.Dataset(text_data)
    model = make(pos="linear_attention_both", vocab_size=257)
    config = experiment.TrainConfig(
        dataset=str(text_data),
        out_dir=str(tmp_path / "run"),
        batch_size=2,
        max_iters=5,
        log_interval=1,
        eval_iters=1,
        compile=False,
        device="cpu",
    )
    attend = type(model.pos).attend
    calls = []

    def overflow(self, *arguments, **mask):
        calls.append(self.training)
        factor = torch.inf if sum(calls) > 2 * 2 else 1  # from the third step of two layers on
        return factor * attend(self, *arguments, **mask)

    monkeypatch.setattr(type(model.pos), "attend", overflow)
    record = experiment.train_run(model, config, dataset)
    assert "step 3" in record["diverged"] and "not finite" in record["diverged"]
    assert len(record["training_losses"]) == 2
    assert [seen["when"] for seen in record["denominators"]][2] == "in training"


def test_claims_leave_out_losses_that_are_not_finite():
    losses = {"linear rope": (2.0, 2.1, 2.2), "linear nope": (2.5, 2.6, None)}
    losses |= {experiment.BOTH: (None, None, None), "softmax rope": (1.9, 2.0, 2.0)}
    records = []
    for name, by_seed in losses.items():
        for seed, loss in enumerate(by_seed, 1):
            scored = [{"protocol": "chunked", "length": 16, "loss": loss}]
            records.append({"model": name, "seed": seed, "losses": scored})
    board = {"records": records, "model": {"block_size": 16}, "unigram_loss": 3.0}
    first, second = experiment.judge(board)
    assert first.mean == pytest.approx(-0.5) and first.passed
    assert "softmax rope below linear rope" in second.text
    assert experiment.format_losses([2.0, None]) == "2.000 (1 not finite)"
    assert experiment.format_losses([None]) == "not finite"
