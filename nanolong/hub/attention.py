"""Self-Extend, Jet-Long and LM-Infinite as attention functions of transformers. At most 150 lines.

    from nanolong.hub import attention
    attention.register(factor=4)
    model = AutoModelForCausalLM.from_pretrained(NAME, attn_implementation="jet-long")

The original length is max_position_embeddings. When jet-long's group changes, model.py computes its
cache again, and transformers keeps the old one (experiments/results/maintainers/interchange.md).
"""

import functools
import runpy
import sys
import weakref
from importlib.util import find_spec

import torch
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

import kernels
import rope_scaling
from nanolong.entry import ROOT
from nanolong.errors import UserError, require, run_main
from nanolong.hub import rope
from nanolong.hub.extend import find_rotary

IGNORED = ("position_ids", "cache_position", "num_items_in_batch")  # tensors that change nothing
NOT_COMPUTED = "sliding_window softcap output_attentions cache dropout".split()  # they would
layers = weakref.WeakKeyDictionary()  # attention module -> inverse frequencies, () without RoPE


def register(factor=4.0):
    """Let transformers know the methods by their names. factor: target length / original length."""
    require(factor >= 1, f"factor={factor} does not extend the context: give at least 1")
    for name in rope_scaling.ATTENTION:
        # not compiled, because values are checked and tables kept
        function = torch.compiler.disable(functools.partial(attend, name, factor))
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, torch.compiler.disable(causal_mask))


def causal_mask(config, q_length, kv_length, q_offset, mask_function, attention_mask=None, **_):
    """Return None if row i of n sees keys 0 .. n_keys - n + i, else what attend() refuses."""
    name, parameters = config.model_type, getattr(config, "rope_parameters", None)
    require(parameters, f"{name} has no RoPE to extend: choose another model")
    types = {p.get("rope_type") for p in rope.by_kind(parameters)} & {"dynamic", "longrope"}
    require(not types, f"{name} has RoPE of the type {', '.join(types)}: use sdpa")
    file = sys.modules[getattr(MODEL_MAPPING.get(type(config), None), "__module__", __name__)]
    is_open = hasattr(file, "ALL_ATTENTION_FUNCTIONS")
    require(is_open, f"{name} calls no attention function of transformers: choose another model")
    # a static cache has as many keys as its capacity
    is_whole = int(q_offset) + q_length == kv_length and mask_function is causal_mask_function
    if attention_mask is not None:
        is_whole &= attention_mask.shape[-1] >= kv_length and bool(attention_mask.all())
    return None if is_whole else torch.ones(1, 1, 1, 1, dtype=torch.bool)


def attend(method, factor, module, query, key, value, attention_mask, probe=None, **options):
    """Attend from rotated queries (B, H, n, D) to keys (B, Hk, T, D): (B, n, H, D), and None."""
    if probe is not None:  # a list for queries and keys, see find_frequencies()
        probe.append(torch.cat((query, key), 1))
        return query.transpose(1, 2), None
    if module not in layers:
        layers[module] = find_frequencies(module, query)
    check_arguments(module, query, value, attention_mask, **options)
    n_keys, inv_freq = key.shape[2], layers[module]
    length = {"length": n_keys} if method == "jet-long" else {}
    far = rope_scaling.far_keys(method, module.config.max_position_embeddings, factor, length)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    # for up to 1,023 keys more, because the next tokens then find the tables
    terms = make_terms(far, inv_freq, -(-n_keys // 1024) * 1024, query.device)
    if not inv_freq or far.group == 1:
        y = kernels.attention(query, key, value, scale=scale)
    elif rope_scaling.is_in_two(query, terms):
        y = rope_scaling.attend_in_two(query, key, value, terms, scale)
    else:
        arguments = query, key, value, terms, scale, {}
        (y,) = kernels.attend_in_chunks(rope_scaling.attend_chunk, *arguments)
    return y.transpose(1, 2), None


@functools.lru_cache(maxsize=8)
def make_terms(far, inv_freq, n, device):
    """Return the Terms of n keys, which all layers share."""
    with torch.inference_mode(False):  # because a later pass may need gradients
        inv_freq = torch.tensor(inv_freq, dtype=torch.float64, device=device)
        pos = torch.arange(n, device=device)
        tables = kernels.cos_sin(far.of_keys(pos) - pos, inv_freq)
    return rope_scaling.Terms(far, inv_freq, tables, pos, by_index=True)


def check_arguments(module, query, v, mask, scaling=None, is_causal=True, **others):
    """Raise UserError unless queries attend causally to a whole text, at positions 0, 1, ..."""
    name, n, n_keys = module.config.model_type, query.shape[2], v.shape[2]
    found = [x for x in others if torch.is_tensor(others[x]) and x not in IGNORED]
    found += [x for x in NOT_COMPUTED if others.get(x)]
    found += ["values of another size"] * (query.shape[-1] != v.shape[-1])
    is_causal = is_causal is not False and getattr(module, "is_causal", True)
    problem = f"a layer of {name} attends with {', '.join(found) or 'no causal mask'}"
    require(is_causal and not found, f"{problem}: use sdpa, another model, or model.eval()")
    pos = others.get("position_ids")
    expected = torch.arange(n_keys - n, n_keys, device=v.device)
    is_whole = mask is None and (pos is None or bool((pos == expected).all()))
    problem = f"the mask or the position ids of {name} are not a whole text's"
    require(is_whole, f"{problem}: give rows of one length without padding, and a dynamic cache")


def find_frequencies(module, query):
    """Return the inverse frequencies by which a layer rotates; () if it does not rotate."""
    config, found = module.config, []
    try:
        kinds, _ = find_rotary(config)
        inv_freq, _ = kinds.get("full_attention") or kinds[None]
        # A token goes through the layer at angle 0, and at angles that differ by pair. It has no
        # random numbers, because sampling would then give other tokens.
        x = torch.arange(config.hidden_size).sin().expand(2, 1, -1).to(query)
        angles = torch.arange(1, len(inv_freq) + 1) * torch.tensor([0, 1])[:, None, None]
        cos, sin = angles.cos().to(query), angles.sin().to(query)  # (2, 1, R/2)
        options = {"position_embeddings": tuple(torch.cat((t, t), -1) for t in (cos, sin))}
        options |= {"position_ids": torch.zeros_like(angles[..., 0]).to(query.device)}
        with torch.no_grad():
            type(module).forward(module, x, attention_mask=None, probe=found, **options)
        ((plain, rotated),) = found  # (H + Hk, 1, D)
        difference = rotated - kernels.rotate(plain[None], cos[1], sin[1])[0]
        is_plain = torch.equal(plain, rotated)
        is_ours = is_plain or difference.abs().max() < 0.02 * plain.abs().max()
    except Exception as error:
        problem = f"{config.model_type} does not rotate as Llama does ({error!r:.200})"
        raise UserError(f"{problem}: use sdpa, or another model") from None
    problem = f"{config.model_type} rotates pairs of channels that are not half a head apart"
    require(is_ours, f"{problem}: {rope.HERE}")
    return () if is_plain else tuple(inv_freq.tolist())


def main():
    """Register the methods, and run the module that is named, as python -m does."""
    name, _, factor = "".join(sys.argv[1:2]).partition("=")
    # packages have the names of evaluate.py and others here
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    is_module = len(sys.argv) > 2 and find_spec(sys.argv[2])
    usage = "say python -m nanolong.hub.attention --factor=4 lm_eval ..., with an installed module"
    require(name == "--factor" and factor.isdecimal() and is_module, usage)
    register(int(factor))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    run_main(main)
