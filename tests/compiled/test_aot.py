"""The kernels that are compiled ahead of time are those that a model launches."""

import collections
from unittest import mock

import aot
import pytest
import torch
import triton
from emulator import install

import kernels
from kernels import decode, flash, rotary
from model import GPT, GPTConfig
from nanolong.inference import FixedShapeStep, KVCache


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


def launches_of_a_model(pos):
    """Decode a token and train a step, in bfloat16: {name of a kernel: its Launcher}."""
    found = {}
    for module in (flash, decode, rotary):
        found.update(install(module, "sm_80", execute=False))
    config = GPTConfig(
        pos=pos, n_layer=1, n_head=12, n_embd=768, vocab_size=64, block_size=aot.TOKENS
    )
    model = GPT(config)
    if pos == "alibi":  # aot.py has learned slopes, which take a sum more
        model.pos.slopes.requires_grad_()
    tokens = torch.zeros(aot.BATCH, aot.TOKENS, dtype=torch.int64)
    cache = KVCache(aot.TOKENS)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            model(tokens[:, 1:], cache=cache)
            FixedShapeStep(model, cache).run(tokens[:, :1])
        model(tokens, tokens).backward()
    return found


@pytest.mark.parametrize(
    "pos, bias",
    [
        ("rope", "none"),
        ("alibi", "slopes"),
        ("kerple", "table"),
        ("shaw", "vectors"),
        ("xl", "xl"),
    ],
)
def test_what_is_compiled_is_what_a_model_launches(pos, bias, monkeypatch):
    monkeypatch.setitem(kernels._answers, ("cpu", None), True)
    with (
        mock.patch.dict(vars(flash)),
        mock.patch.dict(vars(decode)),
        mock.patch.dict(vars(rotary)),
    ):
        launched = launches_of_a_model(pos)
        cases = {"_rotate_kernel": (aot.rope_case, (64, 64, True))}
        for kernel in ("forward", "dq", "dkdv", "sweep"):
            cases[f"_{kernel}_kernel"] = aot.attention_case, (kernel, 64, bias)
        cases["_split_kernel"] = aot.attention_case, ("decode", 64, bias)
        for name, (make, args) in cases.items():
            if launched[name].launches:
                _, compiled = make("sm_80", *args)
                assert key_of(compiled) == key_of(launched[name]), name
