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
    return q, k, v, {**options, "scale": 1.05 * q.shape[3] ** -0.5}


def wrong_groups(q, k, v, options):
    repeats = (1, q.shape[1] // k.shape[1], 1, 1)
    return q, k.repeat(repeats), v.repeat(repeats), options


def wrong_gradient(q, k, v, options):
    """The gradient of a table is 10 % too large."""
    bias = options["bias"]
    return q, k, v, {**options, "bias": 1.1 * bias - 0.1 * bias.detach()}


def late_gates(q, k, v, options):
    """Each token has those of the token before it."""
    gates = options["gates"]
    return q, k, v, {**options, "gates": torch.cat((gates[..., :1], gates[..., :-1]), -1)}


def make_model(pos="rope", **settings):
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 128, "layer_pattern": "FW"}
    return GPT(GPTConfig(pos=pos, **{**sizes, "window": 50, "sinks": 4, **settings}))


class FakeKernels:
    """Kernels that compute what eager.py does with what a fault makes of their arguments."""

    def __init__(self):
        self.fault = None

    def attention(self, q, k, v, shared=None, **options):
        if self.fault:
            q, k, v, options = self.fault(q, k, v, options)
        return eager.attention(q, k, v, **options)

    rope = staticmethod(eager.rope)
    row_losses = staticmethod(eager._row_losses)


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


FOUND = [(pos, x) for pos in ("rope", "t5", "alibi", "fox") for x in (wrong_scale, wrong_groups)]
FOUND += [("fox", late_gates), ("t5", wrong_gradient)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pos, fault", FOUND)
def test_small_faults_are_found(pos, fault, dtype, fakes):
    fakes.fault = fault
    assert " is off by " in check.find_fault(make_model(pos), CPU, dtype)


def too_large(*arguments):
    raise RuntimeError("out of resource: shared memory\nRequired: 1, limit: 0")


def not_a_number(q, k, v, options):
    return q * float("nan"), k, v, options


@pytest.mark.parametrize(
    "fault, words",
    [
        (wrong_scale, "the gradient of q is off by "),
        (not_a_number, " is off by nan, and "),
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
    why = "not compiled\n"
    assert f", float32, attention by triton, {why}" in done.stdout
    fakes.fault = wrong_scale
    done = assert_success(call("train.py", *words, "--max_iters=4", "--init_from=resume"))
    assert f", float32, attention by plain PyTorch, {why}" in done.stdout
    metas = [tmp_path / f"run/step-00000{step}/meta.json" for step in (2, 4)]
    found = [json.loads(meta.read_text())["kernels"] for meta in metas]
    assert found == ["triton", "plain PyTorch"]
