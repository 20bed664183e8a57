"""The position schemes of examples/schemes: their numbers, and each from training to sampling.

The numbers of schemes that read the text are in test_content.py.
"""

import json
import math
from pathlib import Path

import pytest
import reference
import torch
from conftest import ROOT, TINY, assert_success

from model import GPT, POSITIONS
from nanolong.entry import load_entries

FILES = {file.stem: file for file in sorted((ROOT / "examples" / "schemes").glob("*.py"))}
WINDOW = {"layer_pattern": "WF", "window": 6, "sinks": 2}


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES.values(), POSITIONS)


# -----------------------------------------------------------------------------
# Numbers. Each is a model of model.py with certain settings, whose formulas reference.py has.


@pytest.mark.parametrize("p", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("method", ["none", "pi", "yarn"])
def test_p_rope_rotates_the_fastest_pairs_only(p, method, make, monkeypatch):
    """Of 5 pairs, 0.75 are 3."""
    monkeypatch.setattr(POSITIONS["p_rope"], "p", p)
    tokens = torch.randint(0, 50, (1, 19))
    logits = []
    for settings in ({"pos": "p_rope"}, {"p_rope": p}):
        model = make(head_dim=10, **settings)
        model.extend(method, 4.0)
        logits.append(model(tokens))
    assert torch.equal(*logits)


def test_two_bases_extend_the_full_layers_only(make):
    """The first layer has a window, the second has none."""
    tokens = torch.randint(0, 50, (1, 60))
    bases = {"rope_base": 1e6, "rope_local_base": 1e4}
    for method in ("none", "pi", "dynamic-ntk"):
        model, expected = make(pos="two_bases", **WINDOW), make(**bases, **WINDOW)
        for each in (model, expected):
            each.extend(method, 4.0)
        difference = model(tokens) - reference.logits(expected, tokens)
        assert difference.abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, WINDOW], ids=str)
def test_ssmax_multiplies_scores_by_s_log_n(settings, make):
    """n counts the visible keys of a window with its sinks, too, and s is of a layer and head.

    That is score_scale=logn with a length of 2, log n / log 2, times s log 2 in the queries.
    """
    model = make(pos="ssmax", **settings)
    expected = make(score_scale="logn", score_scale_length=2, **settings)
    s = model.pos.s * math.log(2)
    assert s.shape == (2, 4)
    for block, factors in zip(expected.blocks, s, strict=True):
        block.attention.q.weight *= factors.repeat_interleave(8)[:, None]
    tokens = torch.randint(0, 50, (1, 40))
    for method in ("none", "pi"):
        model.extend(method, 2.0)
        expected.extend(method, 2.0, "all")  # layers with a window too, as a scheme of one's own
        difference = model(tokens) - reference.logits(expected, tokens)
        assert difference.abs().max() < 1e-4


# -----------------------------------------------------------------------------
# From training to sampling.


@pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
@pytest.mark.parametrize("name", FILES)
def test_a_scheme_goes_from_training_to_sampling(name, call, text_data, tmp_path):
    """It is extended, scored, sampled, and loaded again."""

    def call_anew(*words):
        POSITIONS.pop(name)  # as in a process of its own
        return assert_success(call(*words, f"--entry={FILES[name]}"))

    run, extended = tmp_path / "run", tmp_path / "extended"
    data = f"--dataset={text_data}"
    window = ["--layer_pattern=WF", "--window=8"] if name == "two_bases" else []
    call_anew("train.py", *TINY, *window, data, f"--out_dir={run}")
    methods = POSITIONS[name].methods
    method = next(m for m in ("dynamic-ntk", "pi", "none") if m in methods)
    extend = ["extend.py", run, "--factor=4", f"--method={method}", "--max_iters=2", data]
    # one state for the whole text cannot leave other documents out
    extend += ["--separate_docs=false"] if name == "linear_attention" else []
    call_anew(*extend, f"--out_dir={extended}")
    file = tmp_path / "losses.json"
    runs = [run, extended]
    call_anew("evaluate.py", *runs, "--lengths=32,128", "--max_tokens=512", f"--json={file}")
    records = json.loads(file.read_text())
    found = {(Path(record["checkpoint"]).name, record["length"]) for record in records}
    assert found == {(folder.name, length) for folder in runs for length in (32, 128)}
    assert all(0 < record["loss"] < math.log(300) for record in records)
    assert len(call_anew("sample.py", extended, "--max_new_tokens=40").stdout) > 20

    model = GPT.load(extended)
    text = torch.tensor([[256, *b"def f(x):\n"]])
    for token in list(model.generate(text, 40, temperature=0)):
        assert token == model(text)[0, -1].argmax()
        text = torch.cat((text, token), 1)
    if name == "ssmax":
        s = model.pos.s
        assert s.shape == (2, 2) and (s != model.pos.initial_s).all()  # trained, and saved
