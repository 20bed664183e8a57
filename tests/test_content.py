"""Positions that depend on the text: FoX of model.py, and three of examples/schemes.

Their numbers are in test_example_schemes.py.
"""

import pytest
import torch
from conftest import ROOT, TINY, assert_same_bits, assert_success, run_pytest

from model import POSITIONS
from nanolong.entry import load_entries
from nanolong.errors import UserError

FILES = {name: ROOT / f"examples/schemes/{name}.py" for name in ("selective_rope", "repo", "grape")}
SCHEMES = ("fox", "fox-rope", *FILES)

pytestmark = pytest.mark.filterwarnings("ignore::model.ContextLengthWarning")


@pytest.fixture(autouse=True)
def schemes(entries_do_not_stay):
    load_entries(FILES.values(), POSITIONS)


def test_the_tests_over_all_schemes_pass_with_the_examples(request):
    """However the text is cut, padded or packed, in steps of fixed shape; and their gradients.

    FoX is among all schemes.
    """
    names = ("reference", "inference", "model", "positions")
    words = [f"tests/test_{name}.py" for name in names] + ["-k", " or ".join(FILES)]
    entries = ",".join(map(str, FILES.values()))
    run_pytest(*words, request=request, env={"NANOLONG_ENTRY": entries})


@pytest.mark.parametrize("pos", SCHEMES)
@torch.no_grad()
def test_autocast_rounds_nothing_that_is_summed(pos, make):
    model = make(pos=pos, n_kv_head=2)
    q, k, x = torch.randn(2, 4, 24, 8), torch.randn(2, 2, 24, 8), torch.randn(2, 24, 32)
    context = model.make_context(24)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            bias = model.scheme.bias(x, 1, context)
            results.append([*model.scheme.rotate(q, k, x, 1, context), q if bias is None else bias])
    for plain, autocast in zip(*results, strict=True):
        assert torch.equal(plain, autocast)


@pytest.mark.parametrize("pos", ["fox-rope", "selective_rope"])
def test_the_model_is_one_graph(pos, make):
    model = make(pos=pos, n_kv_head=2).double()
    tokens, targets = torch.randint(0, 50, (2, 2, 24)).unbind()
    results = []
    torch._dynamo.reset()
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        loss = forward(tokens, targets)
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([loss.detach(), *grads])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)  # norms are other operators there


# -----------------------------------------------------------------------------
# Training.


@pytest.mark.parametrize("pos", ["fox", "selective_rope"])
def test_a_resumed_run_has_the_same_bits(pos, call, text_data, tmp_path):
    words = [*TINY, f"--dataset={text_data}", f"--pos={pos}", "--separate_docs=true"]
    words += [f"--entry={FILES[pos]}"] if pos in FILES else []
    for name, stop_at in (("whole", 8), ("cut", 4)):
        out = f"--out_dir={tmp_path / name}"
        assert_success(call("train.py", *words, out, f"--stop_at={stop_at}"))
    assert_success(call("train.py", *words, out, "--init_from=resume"))
    assert_same_bits(tmp_path / "whole", tmp_path / "cut")


# -----------------------------------------------------------------------------
# Refusals.


def test_positions_that_gates_would_ignore_are_refused(make):
    for pos in SCHEMES:
        with pytest.raises(UserError, match="consecutive position ids"):
            make(pos=pos)(torch.zeros(1, 3, dtype=torch.long), positions=torch.tensor([0, 2, 3]))
