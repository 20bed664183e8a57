"""The position schemes of examples/schemes: their formulas in float64, and each from end to end."""

import json
import math
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, assert_success

from model import GPT, POSITIONS
from nanolong.attention_maps import attention_maps
from nanolong.entry import load_entries

FILES = {file.stem: file for file in sorted((ROOT / "examples" / "schemes").glob("*.py"))}
WINDOW = {"layer_pattern": "WF", "window": 6, "sinks": 2}


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES.values(), POSITIONS)


# -----------------------------------------------------------------------------
# Numbers. A pair of channels (c, c + D/2) is a complex number here, and a rotation a product.


def powers(base, n_pairs):
    """RoPE's frequencies: base^(-2c/D)."""
    return [base ** (-2 * c / (2 * n_pairs)) for c in range(n_pairs)]


def map_by_formula(model, tokens, layer, frequencies, scale_of):
    """The probabilities of a layer for tokens (1, T), one score at a time: float64 (H, T, T).

    frequencies: of each pair. scale_of(head, n): multiplies the scores of a query that sees n keys.
    """
    config = model.config
    block = model.blocks[layer]
    entered = []
    hook = block.attention_norm.register_forward_hook(lambda norm, x, y: entered.append(y[0]))
    model.hidden_states(tokens)
    hook.remove()

    T, D = tokens.shape[1], config.head_dim
    pairs = []
    for linear in (block.attention.q, block.attention.k):
        x = (entered[0].double() @ linear.weight.double().T).view(T, config.n_head, D)
        pairs.append(torch.complex(x[..., : D // 2], x[..., D // 2 :]))
    q, k = pairs
    p = torch.zeros(config.n_head, T, T, dtype=torch.float64)
    for head in range(config.n_head):
        for i in range(T):
            visible = list(range(i + 1))
            if config.uses_window(layer):
                visible = [j for j in visible if i - j < config.window or j < config.sinks]
            scores = []
            for j in visible:
                angle = torch.tensor([(i - j) * f for f in frequencies], dtype=torch.float64)
                rotated = q[i, head] * torch.polar(torch.ones_like(angle), angle)
                score = (rotated * k[j, head].conj()).real.sum() / math.sqrt(D)
                scores.append(scale_of(head, len(visible)) * score)
            p[head, i, visible] = torch.stack(scores).softmax(0)
    return p


@torch.no_grad()
def check_maps(model, tokens, frequencies_of, scale_of=lambda layer, head, n: 1.0):
    """Compare the attention of both layers with the formula, and their number of keys."""
    maps = attention_maps(model, tokens)
    assert len(maps) == 2
    for layer, p in enumerate(maps):
        expected = map_by_formula(
            model,
            tokens,
            layer,
            frequencies_of(layer),
            lambda head, n, i=layer: scale_of(i, head, n),
        )
        assert (p[0] - expected).abs().max() < 1e-5, layer


def test_p_rope_rotates_the_fastest_pairs_only(make):
    """Of 5 pairs, 0.75 are 3, also when the context is extended."""
    model = make(pos="p_rope", head_dim=10)
    tokens = torch.randint(0, 50, (1, 19))
    kept = powers(10000, 5)[:3]
    check_maps(model, tokens, lambda layer: [*kept, 0, 0])
    model.extend("pi", 4)
    check_maps(model, tokens, lambda layer: [*(f / 4 for f in kept), 0, 0])


def test_p_rope_is_rope_at_1_and_nope_at_0(make, monkeypatch):
    tokens = torch.randint(0, 50, (1, 19))
    for p, pos in ((1.0, "rope"), (0.0, "nope")):
        monkeypatch.setattr(POSITIONS["p_rope"], "p", p)
        assert torch.equal(make(pos="p_rope")(tokens), make(pos=pos)(tokens))


def test_ssmax_multiplies_scores_by_s_log_n(make):
    """n counts the visible keys of a window with its sinks, too, and s is of a layer and head."""
    model = make(pos="ssmax", **WINDOW)
    s = model.pos.s.double()
    assert s.shape == (2, 4)
    tokens = torch.randint(0, 50, (1, 19))
    scale_of = lambda layer, head, n: s[layer, head] * math.log(n)  # noqa: E731
    check_maps(model, tokens, lambda layer: powers(10000, 4), scale_of)
    model.extend("pi", 2)
    check_maps(model, tokens, lambda layer: [f / 2 for f in powers(10000, 4)], scale_of)


def test_two_bases_extend_the_full_layers_only(make):
    """The first layer has a window, the second has none."""
    model = make(pos="two_bases", **WINDOW)
    tokens = torch.randint(0, 50, (1, 23))
    local, full = powers(10_000, 4), powers(1_000_000, 4)
    check_maps(model, tokens, lambda layer: full if layer else local)
    model.extend("pi", 4)
    check_maps(model, tokens, lambda layer: [f / 4 for f in full] if layer else local)
    # at the greatest length of 96, dynamic NTK multiplies the base by 13^(8/6): 4 * 4 - 3 is 13
    model.extend("dynamic-ntk", 1)
    model.pos.set_length(96)
    expected = torch.tensor(powers(1_000_000 * 13 ** (8 / 6), 4), dtype=torch.float64)
    assert torch.allclose(model.pos.inv_freq, expected, rtol=1e-12)
    assert torch.equal(model.pos.window_rope.inv_freq, torch.tensor(local, dtype=torch.float64))


# -----------------------------------------------------------------------------
# From training to sampling.


@pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
@pytest.mark.parametrize("name", FILES)
def test_a_scheme_goes_from_training_to_sampling(name, call, text_data, tmp_path):
    """It is extended with and without training, scored, sampled, saved, and loaded again."""

    def call_anew(*words):
        POSITIONS.pop(name)  # as in a process of its own
        done = assert_success(call(*words, f"--entry={FILES[name]}"))
        return done

    runs = [tmp_path / run for run in ("trained", "yarn", "dynamic")]
    window = ["--layer_pattern=WF", "--window=8"] if name == "two_bases" else []
    call_anew("train.py", *TINY, *window, f"--dataset={text_data}", f"--out_dir={runs[0]}")
    extend = ["extend.py", runs[0], "--factor=4", f"--dataset={text_data}"]
    # one state for the whole text cannot leave other documents out
    extend += ["--separate_docs=false"] if name == "linear_attention" else []
    call_anew(*extend, "--method=yarn", "--max_iters=2", f"--out_dir={runs[1]}")
    call_anew(*extend, "--method=dynamic-ntk", "--max_iters=0", f"--out_dir={runs[2]}")
    file = tmp_path / "losses.json"
    call_anew("evaluate.py", *runs, "--lengths=32,128", "--max_tokens=512", f"--json={file}")
    records = json.loads(file.read_text())
    assert {(Path(record["checkpoint"]).name, record["length"]) for record in records} == {
        (run.name, length) for run in runs for length in (32, 128)
    }
    assert all(0 < record["loss"] < math.log(300) for record in records)
    assert len(call_anew("sample.py", runs[1], "--max_new_tokens=40").stdout) > 20

    prompt = torch.tensor([[256, *b"def f(x):\n"]])
    text = torch.randint(0, 257, (1, 100))
    for run in runs:
        model = GPT.load(run)
        cached = torch.cat(list(model.generate(prompt, 40, temperature=0)), 1)
        plain = torch.cat(list(model.generate_plain(prompt, 40, temperature=0)), 1)
        assert torch.equal(cached, plain), run.name
        model.save(tmp_path / f"{run.name}-again" / "step-000001")
        again = GPT.load(tmp_path / f"{run.name}-again")
        assert torch.equal(again(text), model(text)), run.name
    if name == "ssmax":
        s = model.pos.s
        assert s.shape == (2, 2) and (s != model.pos.initial_s).all()  # trained, and saved
