"""kernels/check.py: the faults that it finds, also in bfloat16, and what happens then.

The kernels here are plain PyTorch, until a test breaks them. The real ones pass in
tests/interpreted/test_check_of_kernels.py.
"""

import json
import sys

import pytest
import torch
from conftest import ROOT, TINY, assert_success

import kernels
from kernels import check, eager
from model import GPT, GPTConfig

CPU = torch.device("cpu")


def wrong_scale(q, k, v, options):
    return q, k, v, {**options, "scale": 1.05 * options["scale"]}


def one_key_more(q, k, v, options):
    """Each query sees the next key, too. The biases of the others stay as they are."""
    options = dict(options)
    k, v = (torch.cat((x, x[:, :, -1:]), 2) for x in (k, v))
    for name in ("positions", "docs"):
        x = options.get(name)
        options[name] = None if x is None else torch.cat((x, x[..., -1:]), -1)
    options["window"] += bool(options["window"])  # distances are greater by one
    gates = options.get("gates")
    options["gates"] = None if gates is None else torch.cat((gates, gates[..., -1:]), -1)
    bias = options.get("bias")
    if bias is not None and bias.dim() > 1:
        options["bias"] = torch.cat((bias[:, :1], bias), 1)
    return q, k, v, options


def wider_window(q, k, v, options):
    return q, k, v, {**options, "window": options["window"] + bool(options["window"])}


def shifted_documents(q, k, v, options):
    docs = options["docs"]
    return q, k, v, {**options, "docs": torch.cat((docs[:, :1], docs[:, :-1]), 1)}


def wrong_groups(q, k, v, options):
    repeats = (1, q.shape[1] // k.shape[1], 1, 1)
    return q, k.repeat(repeats), v.repeat(repeats), options


def wrong_gradient(q, k, v, options):
    """The gradients of a table and of gates are 10 % too large."""

    def amplify(x):
        return x if x is None or not x.requires_grad else 1.1 * x - 0.1 * x.detach()

    terms = {name: amplify(options.get(name)) for name in ("bias", "gates")}
    return q, k, v, {**options, **terms}


def late_gates(q, k, v, options):
    """Each token has those of the token before it."""
    gates = options["gates"]
    return q, k, v, {**options, "gates": torch.cat((gates[..., :1], gates[..., :-1]), -1)}


def shifted_target():
    """A fault of the loss, of which FakeKernels knows."""


def make_model(pos="rope", **settings):
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 128, "layer_pattern": "FW"}
    return GPT(GPTConfig(pos=pos, **{**sizes, "window": 50, "sinks": 4, **settings}))


class FakeKernels:
    """Kernels that compute what eager.py does with what a fault makes of their arguments."""

    def __init__(self):
        self.fault = None

    def attention(self, q, k, v, shared=None, **options):
        if self.fault and self.fault is not shifted_target:
            q, k, v, options = self.fault(q, k, v, options)
        return eager.attention(q, k, v, **options)

    def row_losses(self, logits, targets, z_loss, has_grad):
        if self.fault is shifted_target:
            targets = torch.where(targets > 0, targets - 1, targets)
        return eager._row_losses(logits, targets, z_loss, has_grad)

    rope = staticmethod(eager.rope)


@pytest.fixture
def fakes(monkeypatch):
    fakes = FakeKernels()
    monkeypatch.setattr(kernels, "flash", fakes, raising=False)
    monkeypatch.setitem(sys.modules, "kernels.rotary", fakes)
    monkeypatch.setitem(sys.modules, "kernels.loss", fakes)
    monkeypatch.setattr(kernels, "_can_run", lambda device: True)
    monkeypatch.setattr(kernels, "_is_allowed", True)
    monkeypatch.setenv("NANOLONG_CHECK", "1")
    return fakes


MASKS = (one_key_more, wider_window, shifted_documents)
FOUND = [
    (pos, fault, torch.bfloat16)
    for pos in ("rope", "t5", "alibi", "fox")
    for fault in (wrong_scale, wrong_groups, *MASKS, wrong_gradient)
    if fault is not wrong_gradient or pos not in ("rope", "alibi", "fox")
]
# in bfloat16 plain PyTorch's own gradient of the gates is off by as much
FOUND += [("fox", late_gates, torch.bfloat16), ("fox", wrong_gradient, torch.float32)]
FOUND += [("alibi", shifted_target, dtype) for dtype in (torch.bfloat16, torch.float32)]
FOUND += [("t5", fault, torch.float32) for pos, fault, _ in FOUND if pos == "t5"]


@pytest.mark.parametrize("pos, fault, dtype", FOUND)
def test_small_faults_are_found(pos, fault, dtype, fakes):
    fakes.fault = fault
    assert " differs by " in check.find_fault(make_model(pos), CPU, dtype, True, False)


def too_large(*arguments):
    raise RuntimeError("out of resource: shared memory\nRequired: 1, limit: 0")


def not_a_number(q, k, v, options):
    return q * float("nan"), k, v, options


@pytest.mark.parametrize(
    "fault, words",
    [
        (wrong_scale, "the gradient of "),
        (not_a_number, " differs by nan, and "),
        (too_large, "off: RuntimeError: out of resource: shared memory; using plain PyTorch, "),
    ],
)
def test_a_fault_turns_all_kernels_off(fault, words, fakes, capfd):
    fakes.fault = fault
    model = make_model()
    state = torch.get_rng_state()
    assert check.choose_kernels(model, CPU, torch.float32) == "plain PyTorch"
    assert not kernels.triton_runs(CPU) and torch.equal(state, torch.get_rng_state())
    message = capfd.readouterr().err
    assert message.startswith("the Triton kernels are off: ") and message.count("\n") == 1
    assert words in message
    assert check.choose_kernels(make_model(), CPU, torch.float32) == "plain PyTorch"
    assert capfd.readouterr().err == ""


def test_what_is_not_checked_is_trusted(fakes, monkeypatch, capfd):
    assert check.choose_kernels(make_model(), CPU, torch.float32) == "triton"
    fakes.fault = too_large
    for setting in ("0", ""):  # under the interpreter only where it is asked for
        monkeypatch.setenv("NANOLONG_CHECK", setting)
        assert check.choose_kernels(make_model(), CPU, torch.float32) == "triton, not checked"
    assert kernels.triton_runs(CPU) and capfd.readouterr().err == ""


def test_sdpa_is_compared_where_it_may_compute(fakes, monkeypatch, capfd):
    model = make_model(layer_pattern="F", window=0, sinks=0)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    faults = iter((1, 1.05))
    factor = None

    def scaled(q, k, v, *mask, scale, **options):
        if not mask:  # which plain PyTorch gives
            scale *= factor
        return sdpa(q, k, v, *mask, scale=scale, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled)
    found = []
    for allowed in (False, True, True):
        factor = next(faults) if allowed else None  # None * scale fails: it is not called
        kernels.use_sdpa(allowed)
        found.append(check.choose_kernels(model, CPU, torch.bfloat16))
    kernels.use_sdpa(False)
    assert found == ["triton", "triton", "plain PyTorch"]
    assert capfd.readouterr().err.startswith("the Triton kernels are off: the gradient of ")


TWO_PROCESSES = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
import torch.distributed as dist
from test_check import CPU, FakeKernels, check, kernels, make_model, wrong_scale

dist.init_process_group("gloo")
kernels.flash = sys.modules["kernels.rotary"] = sys.modules["kernels.loss"] = fakes = FakeKernels()
kernels._can_run = lambda device: True
fakes.fault = wrong_scale if dist.get_rank() else None
chosen = check.choose_kernels(make_model(), CPU, torch.float32)
# One write: two processes share the output, and a line in pieces would mix with another.
sys.stdout.write(chosen + " " + str(kernels.triton_runs(CPU)) + "\\n")
dist.destroy_process_group()
"""


def test_what_fails_in_one_process_is_off_in_all(run, tmp_path):
    """And the first one says so."""
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    done = assert_success(run(tmp_path / "two.py", processes=2, env={"NANOLONG_CHECK": "1"}))
    assert done.stdout.count("plain PyTorch False\n") == 2
    assert done.stderr.count("the Triton kernels are off") == 1


def test_a_run_says_what_computes(fakes, call, text_data, tmp_path):
    """In its first lines, and in meta.json, where a resumed run has its own."""
    words = [*TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}", "--pos=t5"]
    done = assert_success(call("train.py", *words, "--max_iters=2"))
    why = "not compiled: it would take longer than it saves\n"
    assert f", float32, attention by triton, {why}" in done.stdout
    fakes.fault = wrong_scale
    done = assert_success(call("train.py", *words, "--max_iters=4", "--init_from=resume"))
    assert f", float32, attention by plain PyTorch, {why}" in done.stdout
    metas = [tmp_path / f"run/step-00000{step}/meta.json" for step in (2, 4)]
    found = [json.loads(meta.read_text())["kernels"] for meta in metas]
    assert found == ["triton", "plain PyTorch"]
