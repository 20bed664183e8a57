"""Positions that depend on the text: FoX of model.py, and three of examples/schemes.

Their numbers are in test_example_schemes.py.
"""

import json
import os

import pytest
import torch
from conftest import ROOT, TINY, assert_same_bits, assert_success, logged
from process_cases import train_case

from model import POSITIONS, Past
from nanolong.entry import load_entries
from nanolong.errors import UserError
from nanolong.inference import FixedShapeStep, KVCache

FILES = {name: ROOT / f"examples/schemes/{name}.py" for name in ("selective_rope", "repo", "grape")}
SCHEMES = ("fox", "fox-rope", *FILES)
ENTRIES = {"NANOLONG_ENTRY": ",".join(map(str, FILES.values()))}
WINDOW = {"window": 9}

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES.values(), POSITIONS)


# -----------------------------------------------------------------------------
# However the text is cut, and whatever else is in the row.


@pytest.fixture
def build(make):
    """A model in float64 with grouped queries, whose weights are all random."""

    def build(pos, n_layer=3, **settings):
        model = make(pos=pos, n_layer=n_layer, n_kv_head=2, **settings).double()
        with torch.no_grad():
            for p in model.pos.parameters():
                p.mul_(0.3)
        return model

    return build


def decode(model, tokens, cuts, **mask):
    """The logits of tokens given in pieces, which end at cuts."""
    cache, logits, start = KVCache(), [], 0
    for end in cuts:
        part = {name: x[..., start:end] for name, x in mask.items()}
        logits.append(model(tokens[:, start:end], **part, cache=cache))
        start = end
    return torch.cat(logits, 1)


@pytest.mark.parametrize("settings", [{}, WINDOW], ids=str)
@pytest.mark.parametrize("pos", SCHEMES)
@torch.no_grad()
def test_a_text_is_the_same_however_it_is_given(pos, settings, build):
    """Cached in pieces, after another document, and padded on the left."""
    model = build(pos, **settings)
    tokens = torch.randint(0, 50, (2, 40))
    whole = model(tokens)
    assert (whole[:, 1:] - model(tokens.roll(1, 1))[:, 1:]).abs().max() > 0.1
    cuts = [2, 9, 10, 11, 23, *range(24, 41)]
    assert (decode(model, tokens, cuts) - whole).abs().max() < 1e-11

    before = torch.randint(0, 50, (2, 13))
    mask = {"docs": (torch.arange(53) >= 13).long().expand(2, -1)}
    mask["positions"] = torch.cat((torch.arange(13), torch.arange(40)))
    after = torch.cat((before, tokens), 1)
    assert (model(after, **mask)[:, 13:] - whole).abs().max() < 1e-11
    cuts = [7, 14, 15, 30, *range(31, 54)]
    assert (decode(model, after, cuts, **mask)[:, 13:] - whole).abs().max() < 1e-11

    mask["docs"] = (13 - torch.arange(53)).clamp(min=0).expand(2, -1)  # each pad is a document
    mask["positions"] = (torch.arange(53) - 13).clamp(min=0)
    assert (decode(model, after, cuts, **mask)[:, 13:] - whole).abs().max() < 1e-11


@pytest.mark.parametrize("pos", SCHEMES)
@torch.no_grad()
def test_steps_of_fixed_shape_in_one_graph_compute_the_same(pos, build):
    """Also of a row that is padded, and after a rewind."""
    model = build(pos, n_layer=2)
    tokens = torch.randint(0, 50, (2, 30))
    count = torch.arange(32) - torch.tensor([[6], [0]])
    mask = {"positions": count.clamp(min=0), "docs": (-count).clamp(min=0)}
    expected = model(tokens, **{name: x[:, :30] for name, x in mask.items()})[:, 20:]
    cache = KVCache(32)
    model(tokens[:, :20], **{name: x[:, :20] for name, x in mask.items()}, cache=cache)
    step = FixedShapeStep(model, cache, mask["positions"], mask["docs"])
    torch._dynamo.reset()
    run = torch.compile(step.run, backend="aot_eager", fullgraph=True)
    run(torch.zeros(2, 1, dtype=torch.long))
    step.rewind()
    logits = torch.stack([run(token) for token in tokens[:, 20:].split(1, 1)], 1)
    assert (logits - expected).abs().max() < 1e-5  # they are float32


@torch.no_grad()
def test_a_cache_is_refilled_when_tables_change(build):
    model = build("fox-rope")
    model.extend("dynamic-ntk", 2)
    tokens = torch.randint(0, 50, (2, 40))
    for end in (24, 26, 32, 40):
        expected = model(tokens[:, :end])[:, -1]
        logits = decode(model, tokens[:, :end], range(20, end + 1))[:, -1]
        assert (logits - expected).abs().max() < 1e-11


@pytest.mark.parametrize("pos", SCHEMES)
@torch.no_grad()
def test_autocast_rounds_nothing_that_is_summed(pos, make):
    model = make(pos=pos, n_kv_head=2)
    x = torch.randn(2, 24, 32)
    for hook in ("angles", "gates"):
        results = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                results.append(getattr(model.pos, hook)(x, 1, Past(model.pos, 1, None, None)))
        if results[0] is not None:
            assert results[0].dtype == torch.float64 and torch.equal(*results)


# -----------------------------------------------------------------------------
# Gradients.


@pytest.mark.parametrize("pos", SCHEMES)
def test_gradients_are_central_differences(pos, build):
    model = build(pos)
    tokens, targets = torch.randint(0, 50, (2, 2, 40)).unbind()
    parameters = list(model.pos.parameters())
    grads = torch.autograd.grad(model(tokens, targets), parameters)
    with torch.no_grad():
        for p, grad in zip(parameters, grads, strict=True):
            for i in torch.randperm(p.numel())[:6].tolist():
                sides = []
                for change in (1e-5, -2e-5):
                    p.view(-1)[i] += change
                    sides.append(model(tokens, targets))
                p.view(-1)[i] += 1e-5
                slope = (sides[0] - sides[1]) / 2e-5
                assert abs(slope - grad.view(-1)[i]) < 1e-6 * grad.abs().max() + 1e-10


@pytest.mark.parametrize("pos", SCHEMES)
def test_checkpointing_changes_no_bit_and_the_model_is_one_graph(pos, build):
    model = build(pos, n_layer=2)
    tokens, targets = torch.randint(0, 50, (2, 2, 24)).unbind()

    def results(forward):
        model.zero_grad()
        loss = forward(tokens, targets)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = results(model)
    torch._dynamo.reset()
    compiled = results(torch.compile(model, backend="aot_eager", fullgraph=True))
    model.activation_checkpointing = True
    for a, b, c in zip(expected, results(model), compiled, strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c, rtol=1e-9, atol=1e-11)  # norms are other operators there


# -----------------------------------------------------------------------------
# Training.


@pytest.mark.parametrize("pos", SCHEMES)
def test_a_resumed_run_has_the_same_bits(pos, call, text_data, tmp_path):
    words = [*TINY, f"--dataset={text_data}", f"--pos={pos}", "--separate_docs=true"]
    words += [f"--entry={FILES[pos]}"] if pos in FILES else []
    for name, max_iters in (("whole", 8), ("cut", 4)):
        out = f"--out_dir={tmp_path / name}"
        assert_success(call("train.py", *words, out, f"--max_iters={max_iters}"))
    assert_success(call("train.py", *words, out, "--init_from=resume"))
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_share_a_text_compute_it(processes, run):
    """Four share it beyond the two key heads."""
    done = assert_success(run("tests/process_cases.py", *SCHEMES, processes=processes, env=ENTRIES))
    errors = json.loads(done.stdout)
    assert {name.split()[0] for name in errors} == set(SCHEMES)
    for name, (loss_error, gradient_error) in errors.items():
        assert loss_error < 1e-12, name
        assert gradient_error < 1e-9, name


def test_two_processes_train_as_one(run, text_data, tmp_path):
    cases = []
    for pos in SCHEMES:
        train = {"dataset": str(text_data), "out_dir": str(tmp_path / f"two-{pos}")}
        cases.append({"model": {"pos": pos}, "train": {**train, "max_iters": 6}})
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    words = ("tests/process_cases.py", tmp_path / "cases.json")
    assert_success(run(*words, processes=2, env={**os.environ, **ENTRIES}))
    for case in cases:
        two = case["train"]["out_dir"]
        case["train"]["out_dir"] = two + "-one"
        train_case(case)
        one = logged(two + "-one", "loss")
        assert len(one) > 3 and logged(two, "loss") == pytest.approx(one, abs=1e-5), two


# -----------------------------------------------------------------------------
# Refusals.


def test_positions_that_gates_would_ignore_are_refused(build, capfd):
    for pos in SCHEMES:
        with pytest.raises(UserError, match="random_positions needs a scheme that uses position"):
            build(pos, random_positions=99)
        with pytest.raises(UserError, match="consecutive position ids"):
            build(pos)(torch.zeros(1, 3, dtype=torch.long), positions=torch.tensor([0, 2, 3]))
    build("fox", window=9, sinks=2)
    assert "forgets the --sinks" in capfd.readouterr().err
