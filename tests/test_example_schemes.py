"""The position schemes of examples/schemes: numbers of those whose formulas reference.py has not,
and each from training to sampling.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, assert_success

from model import GPT, POSITIONS, GPTConfig
from nanolong.entry import load_entries

FILES = {file.stem: file for file in sorted((ROOT / "examples" / "schemes").glob("*.py"))}


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES.values(), POSITIONS)


# -----------------------------------------------------------------------------
# Golden numbers of schemes that read the text, FoX of model.py among them, and of two softmaxes:
# one layer, the first or the third, x (7, 16), 4 query heads and 2 key heads of 8 channels, by
# loops in numpy, without code of this project.

GOLDEN = {  # the first four channels of head 0 at the last token, and the sum of all 224 numbers
    "fox": "0.1764876667 1.4139843212 1.0480370907 0.2910621379 8.3202306105",
    "fox docs": "-2.2271559777 1.3911344301 0.3088880141 -0.2215148789 -9.4448572288",
    "fox window": "-1.9043264394 1.6097080238 -0.0445310221 0.4707667905 4.1206706124",
    "fox-rope": "-0.6204523302 0.7799121682 -0.2402618199 0.9052062838 -23.5262128924",
    "selective_rope": "0.1381410102 1.3553984511 0.9538840345 0.3330578588 -15.2069701233",
    "selective_rope docs": "-2.4513655362 1.1681365501 0.5065093896 -0.6571252815 -14.0714231216",
    "repo": "0.4921803906 1.5571294623 1.5064433503 -0.0354766635 -13.9506367236",
    "grape": "-0.2499638441 0.8529801759 0.2616778978 0.4273795043 -18.7188959139",
    "differential": "0.6920437890 0.2989110381 0.4751959463 -0.7388710724 18.9353551234",
    "differential docs": "0.7951436265 0.3162916482 0.4343941033 -0.6551304427 25.8175402667",
    "differential window": "1.0539201124 0.6483180882 -0.0117183891 0.2450452218 17.5647855534",
    "differential third": "0.4001886063 0.1951631063 0.3336508623 -0.5246112347 11.2740944738",
}


def numbers(seed, *shape, size=1.0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * size)


def golden_parameters(pos):
    if pos in ("fox", "fox-rope"):
        return {"weight": numbers(5, 4, 16, size=0.3), "gate_bias": numbers(6, 4)}
    if pos == "selective_rope":
        down, up, taps = numbers(7, 32, 16), numbers(8, 8, 32), numbers(9, 4, 2, 1, 4)
        return {"down": down / 2, "up": up / 2, "taps": taps / 2}
    if pos == "repo":
        return {"gate": numbers(10, 2, 16), "value": numbers(11, 2, 16), "out": numbers(12, 2, 2)}
    if pos == "grape":
        return {"weight": numbers(13, 16, size=0.3), "shift": torch.tensor(0.5)}
    if pos == "differential":
        a, b = numbers(14, 2, 4), numbers(15, 2, 4)
        return {"a": a / 2, "b": b / 2, "norm_weight": numbers(16, 8)}
    return {}


@pytest.mark.parametrize("case", GOLDEN)
@torch.no_grad()
def test_one_layer_has_the_golden_numbers(case):
    """To the digits given; the tables of rope are float32 by design."""
    pos, _, mask = case.partition(" ")
    shape = {"n_head": 4, "n_kv_head": 2, "n_embd": 16, "head_dim": 8}
    shape["n_layer"] = 3 if mask == "third" else 1
    window = 3 if mask == "window" else 0
    model = GPT(GPTConfig(pos=pos, block_size=7, window=window, **shape)).double()
    layer = model.blocks[-1].attention
    layer.o = torch.nn.Identity()
    for projection, (seed, rows) in ((layer.q, (2, 32)), (layer.k, (3, 16)), (layer.v, (4, 16))):
        projection.weight.copy_(numbers(seed, rows, 16, size=0.5))
    for name, value in golden_parameters(pos).items():
        p = getattr(model.scheme, name)
        p.copy_(value.expand(p.shape))  # the same in all layers
    if pos == "repo":
        model.scheme.first_layer = 0
    docs = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]) if mask == "docs" else None
    context = model.make_context(7)
    context.docs = docs
    y = layer(numbers(1, 7, 16)[None], model.scheme, context)[0]
    found = torch.cat((y[-1, :4], y.sum()[None]))
    expected = torch.tensor([float(x) for x in GOLDEN[case].split()], dtype=torch.float64)
    limit = 1e-5 if pos == "grape" else 2e-6 if pos in ("fox-rope", "differential") else 1e-9
    assert (found - expected).abs().max() < limit


# -----------------------------------------------------------------------------
# From training to sampling.

FIRST = ("linear_attention", "ssmax", "two_bases")


@pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")
@pytest.mark.parametrize(
    "name",
    # by default a state, parameters, and two kinds of layers; cases.py has all of them
    [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in FILES],
)
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
    extend += ["--max_tokens=512"]
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
        s = model.scheme.s
        assert s.shape == (2, 2) and (s != model.scheme.initial_s).all()  # trained, and saved
