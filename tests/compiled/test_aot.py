"""The kernels that are compiled ahead of time, and executed, are those that a model launches."""

import collections
import contextlib
from unittest import mock

import aot
import execution
import pytest
import torch
import triton
from checks import CHECKS
from launchers import install

import kernels
from kernels import decode, flash, rotary
from model import GPT, GPTConfig
from nanolong.inference import FixedShapeStep, KVCache

# the scheme of a model, the bias in aot.py and in checks.py
BIASES = (
    ("rope", "none", "none"),
    ("alibi", "slopes", "slopes"),
    ("kerple", "table", "table"),
    ("shaw", "vectors", "shaw"),
    ("xl", "xl", "xl"),
)
MODULES = (flash, decode, rotary)


def key_of(launcher):
    """By what Triton knows the kernel of the last launch: types, constants and options."""
    keys = []

    def stop_before_compiling(*, key, **_):
        keys.append(key)
        return True

    function = launcher.function
    nothing_compiled = collections.defaultdict(function.create_binder)
    with (
        mock.patch.object(function, "device_caches", nothing_compiled),
        mock.patch.object(triton.knobs.runtime, "jit_cache_hook", stop_before_compiling),
    ):
        launcher.compile()
    return keys[0]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """Models launch kernels on a CPU's tensors, and afterwards those of MODULES are Triton's."""
    monkeypatch.setitem(kernels._answers, ("cpu", None), True)
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            stack.enter_context(mock.patch.dict(vars(module)))
        yield


def keys_launched(use, *args):
    """{name of a kernel: its key} of the launches of use(*args), for sm_80.

    Without the kernel that combines the splits of a text: their number is a constant of it.
    """
    launchers = {}
    for module in MODULES:
        launchers.update(install(module, "sm_80", execute=False))
    use(*args)
    del launchers["_combine_kernel"]
    return {name: key_of(x) for name, x in launchers.items() if x.launches}


def use_a_model(pos):
    """Decode a token and train a step, in bfloat16."""
    config = GPTConfig(
        pos=pos, n_layer=1, n_head=12, n_embd=768, vocab_size=64, block_size=aot.TOKENS
    )
    model = GPT(config)
    if pos == "alibi":  # aot.py and checks.py have learned slopes, which take a sum more
        model.pos.slopes.requires_grad_()
    tokens = torch.zeros(aot.BATCH, aot.TOKENS, dtype=torch.int64)
    cache = KVCache(aot.TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(tokens[:, 1:], cache=cache)
            FixedShapeStep(model, cache).run(tokens[:, :1])
        model(tokens, tokens).backward()


def use_checks(bias):
    for name in (f"decoding, {bias}, sm_80", f"training, {bias}, sm_80"):
        list(CHECKS[name].compare(execution.PROJECT))


@pytest.mark.parametrize(
    "pos, bias, bias_in_checks",
    [BIASES[0], *(pytest.param(*biases, marks=pytest.mark.slow) for biases in BIASES[1:])],
)
def test_a_models_kernels_are_compiled_and_executed(pos, bias, bias_in_checks):
    keys = keys_launched(use_a_model, pos)
    for name, key in keys.items():
        kernel = name.removeprefix("_").removesuffix("_kernel")
        if kernel == "rotate":
            _, launcher = aot.rope_case("sm_80", 64, 64, inverse=True)
        else:
            kernel = "decode" if kernel == "split" else kernel
            _, launcher = aot.attention_case("sm_80", kernel, 64, bias)
        assert key_of(launcher) == key, name

    executed = keys_launched(use_checks, bias_in_checks)
    assert executed == {name: key for name, key in keys.items() if name != "_rotate_kernel"}


def test_a_register_kept_in_an_accumulator_register_is_not_spilled():
    text = "; ScratchSize: {}\n .vgpr_count: 335\n .vgpr_spill_count: 1\n"
    assert [aot.amd_cost(text.format(n_bytes))["stack"] for n_bytes in (0, 8)] == [0, 8]


# 100 tokens of one sequence, 4 heads of 64 channels, no window: what Triton documents is that a
# constant is made of every 1, and that pointers and integers may be divisible by 16, as 0 is.
SPECIALIZED = {
    "prefill": {
        "*bf16:16": "Q QR K V BIAS REL_V POS DOC BLOCK_MASK OUT",
        "*fp32:16": "LSE",
        "i32:16": "q_b q_h q_t qr_b qr_h qr_t k_b k_h k_t v_b v_h v_t o_b o_h o_t bias_h p_b d_b "
        "mask_b m window sinks",
        1: "bias_t p_t d_t G",
        "i32": "Tq Tk",
        "fp32": "scale",
    },
    "decode": {
        "*bf16:16": "Q QR K V BIAS REL_V POS DOC LENGTH",
        "*fp32:16": "OUT ROW_MAX ROW_SUM",
        "i32:16": "q_b q_h q_t qr_b qr_h qr_t k_b k_h k_t v_b v_h v_t bias_h p_b d_b m window "
        "sinks",
        1: "bias_t p_t d_t Tq G",
        "i32": "Tk H",
        "fp32": "scale",
    },
}


@pytest.mark.parametrize("what", SPECIALIZED)
def test_attention_is_specialized_as_in_a_users_process(what):
    module, name, n = {
        "prefill": (flash, "_forward_kernel", 100),
        "decode": (decode, "_split_kernel", 1),
    }[what]
    q, k, v = (torch.zeros(1, 4, tokens, 64).bfloat16() for tokens in (n, 100, 100))
    with mock.patch.dict(vars(module)), torch.no_grad():
        launcher = install(module, "sm_80", execute=False)[name]
        module.attention(q, k, v)
        found = launcher.specialization()
    assert found == SPECIALIZED[what]
