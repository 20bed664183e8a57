"""In and out of the Hugging Face ecosystem: stretch public checkpoints here, run ours anywhere.

    python hf.py import SmolLM-135M/ out/smollm            a local directory -> a run folder, for extend.py, evaluate.py and sample.py
    python hf.py export out/rope-yarn4 exported/           a run folder -> a directory that AutoModelForCausalLM loads, with the same logits
    python hf.py export out/smollm-yarn32 exported/ --tokenizer=SmolLM-135M/    with that directory's tokenizer files, as they are

Read: the Llama family (Llama 1 to 3, SmolLM, TinyLlama), Mistral, Qwen2, Qwen3, SmolLM3 and GPT-2, with any rope_parameters or rope_scaling. Written: the one of these
that a model is; RoPE's static methods by their own name there, by a base, or as a longrope table; what has no equal there is refused. Only JSON and safetensors are read, and names,
shapes and dtypes are checked before memory is taken. What was written is loaded again by transformers, where it is installed, and its logits compared before the directory appears.
"""
import config  # first: it says in one sentence that a Python is too old
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import OrderedDict
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn as nn

import checkpoint
import data
from config import UserError
from data import tokenizer_json
from model import ATTEND, GPT, GPTConfig, PastTrainedLength, Refused


@dataclass
class HFConfig:
    tokenizer: str = ""   # export: copy the tokenizer files of this Hugging Face directory, in the place of the checkpoint's own
    verify: bool = True   # export: load what was written by transformers, where it is installed, and compare logits
    best: bool = False    # export: of a run folder take the step with the best validation loss, not the newest


class GPT2(GPT):
    """GPT-2's blocks: LayerNorm, a bias in every matrix, GELU between two of them. Its positions are the learned vectors of --pos=learned."""

    def __init__(self, config):
        super().__init__(config)
        C, hidden = config.n_embd, config.mlp_width or 4 * config.n_embd
        for block in self.blocks:
            block.attention_norm, block.mlp_norm = nn.LayerNorm(C, config.norm_eps), nn.LayerNorm(C, config.norm_eps)
            block.attention.o = nn.Linear(C, C)
            block.mlp = nn.Sequential(OrderedDict(up=nn.Linear(C, hidden), gelu=nn.GELU("tanh"), down=nn.Linear(hidden, C)))
        self.norm = nn.LayerNorm(C, config.norm_eps)


FAMILIES = {"gpt2": GPT2}  # GPTConfig.family -> the class that GPT.load() makes

# what a config.json may leave out: transformers' defaults
LLAMA = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 2048, "sliding_window": None, "rope_theta": 1e4}
DEFAULTS = {"llama": LLAMA, "mistral": {**LLAMA, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
            "qwen2": {**LLAMA, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
            "qwen3": {**LLAMA, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096},
            "smollm3": {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32768, "rope_theta": 2e6},
            "gpt2": {"n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "n_positions": 1024}}
WHY_NOT = {"gpt_neox": "adds attention and MLP side by side", "gptj": "adds attention and MLP side by side", "phi": "adds attention and MLP side by side", "falcon": "adds attention and MLP side by side",
           "bloom": "has ALiBi beside LayerNorms with biases", "mpt": "has ALiBi beside LayerNorms", "opt": "has ReLU and positions that are offset by two", "gpt_neo": "does not scale its scores",
           "gemma": "scales its embeddings and adds one to its gains", "gemma2": "caps its scores and adds one to its gains", "gemma3_text": "adds one to its gains", "phi3": "fuses its matrices",
           "olmo": "has norms without gains", "olmo2": "has its norms after the blocks", "cohere": "adds attention and MLP side by side", "granite": "multiplies residuals and logits", "mixtral": "is a mixture of experts",
           "qwen2_moe": "is a mixture of experts", "qwen3_moe": "is a mixture of experts", "deepseek_v3": "has latent attention and experts", "gpt_oss": "is a mixture of experts", "llama4_text": "is a mixture of experts",
           "t5": "is an encoder and a decoder", "bert": "is an encoder", "mamba": "has no attention"}
NOTHING = 1e30  # a longrope factor that leaves a pair unrotated: its angle is below float32's rounding at any position


# ---------------------------------------------------------------------------------------------------------------------
# The tensors. One table serves both directions.

def layout(config):
    """Hugging Face's name -> (our parameters, one after the other in its first dimension, and whether the tensor is transposed)."""
    gpt2, table = config.family == "gpt2", {}
    table["transformer.wte.weight" if gpt2 else "model.embed_tokens.weight"] = ["embed.weight"], False
    for i in range(config.n_layer):
        ours, kinds = f"blocks.{i}.", ("weight", "bias")
        if gpt2:
            theirs = f"transformer.h.{i}."
            for kind in kinds:
                table[f"{theirs}ln_1.{kind}"], table[f"{theirs}ln_2.{kind}"] = ([f"{ours}attention_norm.{kind}"], False), ([f"{ours}mlp_norm.{kind}"], False)
                table[f"{theirs}attn.c_attn.{kind}"] = [f"{ours}attention.{name}.{kind}" for name in "qkv"], kind == "weight"
                for name, mine in (("attn.c_proj", "attention.o"), ("mlp.c_fc", "mlp.up"), ("mlp.c_proj", "mlp.down")):
                    table[f"{theirs}{name}.{kind}"] = [f"{ours}{mine}.{kind}"], kind == "weight"
            continue
        theirs = f"model.layers.{i}."
        names = {"input_layernorm.weight": "attention_norm.weight", "post_attention_layernorm.weight": "mlp_norm.weight",
                 **{f"self_attn.{name}_proj.weight": f"attention.{name}.weight" for name in "qkvo"}, **{f"mlp.{name}_proj.weight": f"mlp.{name}.weight" for name in ("gate", "up", "down")},
                 **({f"self_attn.{name}_proj.bias": f"attention.{name}.bias" for name in "qkv"} if config.qkv_bias else {}),
                 **({f"self_attn.{name}_norm.weight": f"attention.{name}_norm.weight" for name in "qk"} if config.qk_norm else {})}
        table.update({theirs + name: ([ours + mine], False) for name, mine in names.items()})
    if gpt2:
        table.update({"transformer.wpe.weight": (["pos.table"], False), "transformer.ln_f.weight": (["norm.weight"], False), "transformer.ln_f.bias": (["norm.bias"], False)})
    else:
        table["model.norm.weight"] = ["norm.weight"], False
    if not config.tied:
        table["lm_head.weight"] = ["head.weight"], False
    return table


def ignored(name, tied):
    """Tensors that some checkpoints hold and no model needs: tables that are computed, and a tied head."""
    return name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")) or tied and name == "lm_head.weight"


# ---------------------------------------------------------------------------------------------------------------------
# import

def read_json(file):
    """An object from a JSON file of at most 256 MB. Raises UserError."""
    try:
        if file.stat().st_size > 1 << 28:
            raise ValueError("it is larger than 256 MB")
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({type(error).__name__}: {error}): fetch it again") from None


class Fields:
    """A config.json, read with types and ranges checked."""

    def __init__(self, file, values, defaults):
        self.file, self.values, self.defaults = file, values, defaults

    def number(self, key, kind=int, low=1, high=1 << 30, optional=False):
        value = self.values.get(key, self.defaults.get(key))
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)) or not low <= value <= high:
            raise UserError(f"{self.file}: {key} is {value!r}, where a number between {low} and {high} is needed: fetch it again")
        return value if kind is int else float(value)

    def flag(self, key):
        value = self.values.get(key, self.defaults.get(key, False))
        if not isinstance(value, bool):
            raise UserError(f"{self.file}: {key} is {value!r}, where true or false is needed: fetch it again")
        return value

    def per_layer(self, key, layers, allowed):
        value = self.values.get(key)
        if value is not None and not (isinstance(value, list) and len(value) >= layers and all(v in allowed for v in value)):
            raise UserError(f"{self.file}: {key} must name {' or '.join(map(str, allowed))} for each of the {layers} layers")
        return value

    def must_be(self, key, allowed, why):
        value = self.values.get(key, self.defaults.get(key))
        if value not in allowed:
            raise UserError(f"{self.file}: {key} is {value!r}, and {why}")


def read_config(folder):
    """The GPTConfig of a Hugging Face directory, by its config.json alone. Raises UserError for what has no equal here."""
    file = folder / "config.json"
    if not file.is_file():
        raise UserError(f"there is no config.json in {folder}: give the directory of a Hugging Face checkpoint, fetched to this machine")
    values = read_json(file)
    kind = values.get("model_type")
    if kind not in DEFAULTS:
        what = f"{folder} is a {kind} model, which {WHY_NOT[kind]}" if isinstance(kind, str) and kind in WHY_NOT else f"{folder} is of model_type {kind!r}, which is not known here"
        raise UserError(f"{what}: what can be imported is {', '.join(DEFAULTS)}")
    hf = Fields(file, values, DEFAULTS[kind])
    if values.get("quantization_config"):
        raise UserError(f"{folder} is quantised, and weights are read in float32, float16 or bfloat16: fetch the checkpoint that it was made from")
    if kind == "gpt2":
        hf.must_be("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "here it is gelu_new")
        for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
            if values.get(key, usual) is not usual:
                raise UserError(f"{file}: {key} is {values[key]!r}, and here it is {usual}")
        C = hf.number("n_embd")
        return GPTConfig(pos="learned", family="gpt2", n_layer=hf.number("n_layer"), n_head=hf.number("n_head"), n_embd=C, block_size=hf.number("n_positions"), vocab_size=hf.number("vocab_size"),
                         tied=hf.flag("tie_word_embeddings"), norm_eps=hf.number("layer_norm_epsilon", float, 1e-30, 0.1), mlp_width=hf.number("n_inner", optional=True) or 4 * C, qkv_bias=True)
    hf.must_be("hidden_act", ("silu", "swish"), "here it is silu")
    for key in ("mlp_bias", "rope_interleaved", *(["attention_bias"] if kind != "qwen2" else [])):
        if values.get(key):
            raise UserError(f"{file}: {key} is on, and here it is off: no imported family has a use for it")
    L, H, C = hf.number("num_hidden_layers", high=1 << 16), hf.number("num_attention_heads", high=1 << 16), hf.number("hidden_size")
    windows, window = [], hf.number("sliding_window", optional=True) if kind == "mistral" or values.get("use_sliding_window") and kind != "llama" else None
    rotated, types = hf.per_layer("no_rope_layers", L, (0, 1)) if kind == "smollm3" else None, hf.per_layer("layer_types", L, ("full_attention", "sliding_attention"))
    if kind == "smollm3" and rotated is None:
        interval = hf.number("no_rope_layer_interval") if "no_rope_layer_interval" in values else 4
        rotated = [int((i + 1) % interval != 0) for i in range(L)]
    nope = [i for i in range(L) if rotated and not rotated[i]]
    if window:
        first = hf.number("max_window_layers", low=0) if "max_window_layers" in values else 28
        windows = list(range(L)) if kind == "mistral" else [i for i in range(L) if types[i] == "sliding_attention"] if types else nope if kind == "smollm3" else list(range(first, L))
    shape = dict(n_layer=L, n_head=H, n_kv_head=hf.number("num_key_value_heads", optional=True) or H, head_dim=hf.number("head_dim", optional=True) or C // H, n_embd=C, vocab_size=hf.number("vocab_size"),
                 qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2", tied=hf.flag("tie_word_embeddings"), norm_eps=hf.number("rms_norm_eps", float, 1e-30, 0.1), mlp_width=hf.number("intermediate_size"),
                 window=window if windows else 0, window_layers=windows)
    base, method, factor, options, trained, length = read_rope(hf, shape["head_dim"])
    if len(nope) == L or method == "longrope" and min(min(options[key]) for key in ("long_factor", "short_factor") if key in options) >= NOTHING:
        return GPTConfig(pos="nope", block_size=length, **shape)
    stretch = {"method": method, "factor": factor, "options": options, "trained_length": trained}
    return GPTConfig(pos="rope", rope_base=base, block_size=length, nope_layers=nope, stretch=None if method == "none" else stretch, **shape)


def read_rope(hf, head_dim):
    """(base, method, factor, options, trained length, length) of a config.json, as transformers reads it: rope_scaling before rope_parameters, an original length outside before one inside."""
    found = hf.values.get("rope_scaling") or hf.values.get("rope_parameters") or {}
    if not isinstance(found, dict) or any(isinstance(value, dict) for value in found.values()):
        raise UserError(f"{hf.file}: its rope_parameters differ by layer, and here all layers have the same")
    rope = Fields(hf.file, {**{key: hf.values[key] for key in ("rope_theta", "partial_rotary_factor") if key in hf.values}, **found}, hf.defaults)
    kind, length = found.get("rope_type", found.get("type", "default")), hf.number("max_position_embeddings")
    outside = {"original_max_position_embeddings": hf.values["original_max_position_embeddings"]} if hf.values.get("original_max_position_embeddings") else {}
    trained = Fields(hf.file, {"original_max_position_embeddings": length, **{k: v for k, v in found.items() if v is not None}, **outside}, {}).number("original_max_position_embeddings")
    base, large = rope.number("rope_theta", float, 1.0, 1e12), max(length, round(trained * found["factor"])) if length == trained and isinstance(found.get("factor"), (int, float)) else length
    if (share := rope.number("partial_rotary_factor", float, 0, 1, optional=True)) not in (None, 1) and kind != "proportional":
        raise UserError(f"{hf.file}: partial_rotary_factor is {share}, and transformers' own models of these families rotate whole heads: set it to 1, if that is meant")

    def options(*names, kind=float, low=1e-12, high=1e12):
        return {name: rope.number(name, kind, low, high) for name in names if found.get(name) is not None}

    if kind == "default":
        return base, "none", 1.0, {}, length, length
    if kind in ("linear", "dynamic"):
        factor = rope.number("factor", float, 1, 1e6)
        return base, {"linear": "pi", "dynamic": "dynamic-ntk"}[kind], factor, {}, length, round(length * factor)
    if kind == "llama3":
        return base, "llama3", rope.number("factor", float, 1, 1e6), options("low_freq_factor", "high_freq_factor"), trained, large
    if kind == "yarn":
        factor = rope.number("factor", float, 1, 1e6) if found.get("factor") is not None else length / trained
        own = options("beta_fast", "beta_slow", "attention_factor")
        if "attention_factor" not in own and found.get("mscale") and found.get("mscale_all_dim") and factor > 1:
            own["attention_factor"] = (0.1 * rope.number("mscale", float, 0, 100) * math.log(factor) + 1) / (0.1 * rope.number("mscale_all_dim", float, 0, 100) * math.log(factor) + 1)
        return base, "yarn", factor, own | ({} if rope.values.get("truncate", True) else {"truncate": False}), trained, large
    if kind in ("longrope", "su"):
        factor, own = rope.number("factor", float, 1, 1e6) if found.get("factor") is not None else length / trained, options("attention_factor")
        for name in ("short_factor", "long_factor"):
            own[name] = found.get(name)
            if not isinstance(own[name], list) or len(own[name]) != head_dim // 2 or not all(type(x) in (int, float) and 0 < x < math.inf for x in own[name]):
                raise UserError(f"{hf.file}: {name} must be a list of {head_dim // 2} numbers above 0, one for each rotated pair")
        if own["short_factor"] == own["long_factor"]:
            del own["short_factor"]
        return base, "longrope", factor, own, trained, length
    if kind == "proportional":
        turned, factor = int((1.0 if share is None else share) * head_dim // 2), rope.number("factor", float, 1, 1e6) if found.get("factor") is not None else 1.0
        return base, "longrope", factor, {"long_factor": [factor] * turned + [NOTHING] * (head_dim // 2 - turned), "attention_factor": 1.0}, length, round(length * factor)
    raise UserError(f"{hf.file}: there is no rope_type {kind!r} here: what can be imported is default, linear, dynamic, yarn, longrope, llama3 and proportional")


def tensor_files(folder):
    """Hugging Face's tensors of a directory: name -> (file, shape). Only headers are read. Raises UserError."""
    from safetensors import SafetensorError, safe_open
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.is_file():
        places = None
    elif index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(name, str) and isinstance(file, str) for name, file in places.items()):
            raise UserError(f"{index} has no weight_map of names to files: fetch it again")
        for file in set(places.values()):
            if Path(file).name != file or "\\" in file or not file.endswith(".safetensors") or file.startswith("."):
                raise UserError(f"{index} names {file!r}, which is no safetensors file of this folder: fetch the checkpoint from one that you trust")
    else:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern))
        raise UserError(f"{folder} holds {pickles[0]}, a pickle, which is a program and is not opened: fetch its model.safetensors, or load and save it by transformers where you trust it"
                        if pickles else f"there is no model.safetensors in {folder}: fetch the checkpoint whole")
    found = {}
    for name in ["model.safetensors"] if places is None else sorted(set(places.values())):
        try:
            with safe_open(folder / name, framework="pt") as weights:
                for key in weights.keys():
                    part = weights.get_slice(key)
                    if part.get_dtype() not in ("F32", "F16", "BF16", "F64") and not ignored(key, True):
                        raise UserError(f"{folder / name}: {key} is of dtype {part.get_dtype()}, and weights are read in float32, float16 or bfloat16: fetch the checkpoint that is not quantised")
                    found[key] = name, tuple(part.get_shape())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{folder / name} is not a whole safetensors file ({error}): fetch it again") from None
    for key, name in (places or {}).items():
        if found.get(key, (None,))[0] != name:
            raise UserError(f"{index} says that {key} is in {name}, and it is not: fetch both again")
    return found


def import_checkpoint(source, target):
    """Write a Hugging Face directory's model and tokenizer as the first step of a run folder. Returns the step folder. Raises UserError, with nothing written."""
    from safetensors import safe_open
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise UserError(f"there is no directory {source}: give that of a Hugging Face checkpoint, fetched to this machine")
    if checkpoint.steps(target):
        raise UserError(f"{target} holds a run already: choose another folder")
    gpt = read_config(source)
    found = tensor_files(source)
    if gpt.n_layer > len(found):
        raise UserError(f"{source / 'config.json'} says {gpt.n_layer} layers, and there are {len(found)} tensors: fetch both again")
    try:
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in FAMILIES.get(gpt.family, GPT)(gpt).named_parameters()}
    except (RuntimeError, TypeError, OverflowError) as error:
        raise UserError(f"{source / 'config.json'} describes no model that can be ({error}): fetch it again") from None
    table, parts = layout(gpt), {}
    bare = "" if any(name.startswith(("model.", "transformer.")) for name in found) else r"^(model|transformer)\."  # GPT-2's own files leave the prefix out
    table = {re.sub(bare, "", name) if bare else name: place for name, place in table.items()}
    for name, (ours, transposed) in table.items():
        parts[name] = [shapes[part] for part in ours]
        rows = (sum(shape[0] for shape in parts[name]), *parts[name][0][1:])
        if found.get(name, (None, None))[1] != (rows[::-1] if transposed else rows):
            raise UserError(f"{source}: {name} is {found[name][1] if name in found else 'absent'}, where config.json asks for {rows[::-1] if transposed else rows}: fetch both again")
    if extra := [name for name in found if name not in table and not ignored(name, gpt.tied)]:
        raise UserError(f"{source}: there is no place here for {extra[0]}" + (f" and {len(extra) - 1} more" if len(extra) > 1 else "") + ": this is another model than its config.json says")
    tokenizer, bos, note = tokenizer_json.read(source, gpt.vocab_size, read_json)
    weights = {}
    for file in sorted({found[name][0] for name in table}):
        with safe_open(source / file, framework="pt") as tensors:
            for name in (name for name in table if found[name][0] == file):
                tensor = tensors.get_tensor(name).float()
                for part, piece in zip(table[name][0], (tensor.t() if table[name][1] else tensor).split([shape[0] for shape in parts[name]])):
                    weights[part] = piece.contiguous() if piece.is_contiguous() and piece.numel() == tensor.numel() else piece.clone(memory_format=torch.contiguous_format)
    folder = target / "step-000000"
    checkpoint.write(folder, {"model": weights}, {"config": asdict(gpt), "tokenizer": tokenizer and tokenizer.to_json(), "bos": bos, "imported": source.resolve().name})
    print(f"{folder}: {sum(math.prod(shape) for shape in shapes.values()) / 1e6:.2f} M parameters, made for {gpt.block_size} tokens"
          + (f" (trained at {gpt.trained_length}, {gpt.stretch['method']}, factor {gpt.stretch['factor']:g})" if gpt.stretch else "")
          + (f"; window {gpt.window} in {len(gpt.window_layers)} of {gpt.n_layer} layers" if gpt.window else "") + (f"; {len(gpt.nope_layers)} layers without RoPE" if gpt.nope_layers else ""))
    if gpt.stretch and gpt.stretch["method"] == "dynamic-ntk":
        note += "\nnote: a dynamic scale is that of the text's length rounded up to a quarter of the trained one, where transformers takes the exact length and keeps keys of the older scale"
    if note:
        print(note.strip())
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# export

def write_rope(model):
    """(rope_parameters, max_position_embeddings, which channels go where or None) of a RoPE model. Raises UserError for a method that has no equal there."""
    c, pos = model.config, model.pos
    method, factor, options = pos.plan
    base, factor, trained, D, R = float(c.rope_base), float(factor), c.trained_length, c.head_dim, pos.rotary_dim
    if method in ATTEND:
        raise UserError(f"method {method!r} changes attention itself, and transformers has nothing like it: extend the model by another --method")
    if pos.dynamic and method not in ("ntk-lceg", "longrope"):
        raise UserError(f"method {method!r} follows the length of the text at hand, and transformers' dynamic type counts otherwise and keeps stale keys: extend by a static --method, or fix the length by --options=length=N")
    outside = {"original_max_position_embeddings": trained}
    if R == D and method == "pi" and factor > 1:
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}, trained, None
    if R == D and method in ("yarn", "ntk-parts") and options.get("ramp", "index") == "index" and factor > 1:
        own = {key: options[key] if key == "truncate" else float(options[key]) for key in ("beta_fast", "beta_slow", "truncate", "attention_factor") if options.get(key) is not None}
        return {"rope_type": "yarn", "rope_theta": base, "factor": factor, **outside, **own, **({"attention_factor": 1.0} if method == "ntk-parts" else {})}, c.block_size, None
    if R == D and (method == "llama3" or method == "ntk-parts" and options.get("ramp") == "paper") and factor > 1:
        low, high = (options.get("low_freq_factor", 1.0), options.get("high_freq_factor", 4.0)) if method == "llama3" else (options.get("beta_slow", 1.0), options.get("beta_fast", 32.0))
        return {"rope_type": "llama3", "rope_theta": base, "factor": factor, **outside, "low_freq_factor": float(low), "high_freq_factor": float(high)}, c.block_size, None
    if R == D and method == "longrope" and options.get("long_factor"):
        long, short = ([*map(float, options.get(key) or options["long_factor"])] for key in ("long_factor", "short_factor"))
        m = None if options.get("attention_factor") is None else float(options["attention_factor"])
        return {"rope_type": "longrope", "rope_theta": base, "factor": factor, **outside, "long_factor": long, "short_factor": short,
                **({} if m is None else {"attention_factor": m, "short_mscale": m, "long_mscale": m})}, c.block_size, None
    if method == "longrope" and "short_factor" in options:
        raise UserError(f"a longrope with two tables and rope_fraction={c.rope_fraction} has no equal there: leave out short_factor")
    if pos.dynamic:
        pos.fit(c.block_size)
    inv_freq, m = pos.inv_freq.double(), float(pos.attention_factor)
    if R == D and m == 1 and D > 2:
        theta = base if method == "none" or factor == 1 else inv_freq[-1].item() ** (-D / (D - 2))
        if torch.allclose(inv_freq, theta ** -(torch.arange(0, D, 2, dtype=torch.float64) / D), rtol=1e-9, atol=0):  # plain RoPE, of some base
            return {"rope_type": "default", "rope_theta": theta}, c.block_size, None
    plain = base ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)  # any other table
    table = [*(plain[:R // 2] / inv_freq).tolist(), *[NOTHING] * ((D - R) // 2)]
    half = (D - R) // 2
    order = None if R == D else [*range(R // 2), *range(R, R + half), *range(R // 2, R), *range(R + half, D)]
    return {"rope_type": "longrope", "rope_theta": base, "factor": factor, **outside, "long_factor": table, "short_factor": table, "attention_factor": m, "short_mscale": m, "long_mscale": m}, c.block_size, order


def write_config(model):
    """(config.json as a dict, which channels of a rotated head go where or None). Raises UserError for what has no equal there."""
    c, pos = model.config, model.pos
    shape = {"vocab_size": c.vocab_size, "tie_word_embeddings": c.tied, "dtype": "float32", "torch_dtype": "float32", "use_cache": True, "initializer_range": 0.02}
    if c.family == "gpt2":
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **shape, "n_positions": c.block_size, "n_ctx": c.block_size, "n_embd": c.n_embd, "n_layer": c.n_layer, "n_head": c.n_head,
                "n_inner": c.mlp_width, "activation_function": "gelu_new", "layer_norm_epsilon": c.norm_eps, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, None
    if c.pos not in ("rope", "nope"):
        raise UserError(f"--pos={c.pos} has no equal among the models that transformers loads: what can be exported is rope and nope, and an imported GPT-2")
    if c.sinks:
        raise UserError("a window with sinks has no equal among the models that transformers loads: train without --sinks to export")
    if c.random_positions:
        raise UserError("random positions have no equal among the models that transformers loads, which count: train without --random_positions to export")
    window = c.window if c.window_layers else 0
    all_nope = c.pos == "nope" or pos.plan[0] == "drope" or not pos.rotary_dim or len(c.nope_layers) == c.n_layer
    nope, rope, length, order = list(range(c.n_layer)) if all_nope else c.nope_layers, {"rope_type": "default", "rope_theta": 10000.0}, c.block_size, None
    if not all_nope:
        rope, length, order = write_rope(model)
    elif c.qk_norm:  # Qwen3 has no layers without RoPE: all pairs stand still
        table, nope = [NOTHING] * (c.head_dim // 2), []
        rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": length, "long_factor": table, "short_factor": table, "attention_factor": 1.0, "short_mscale": 1.0, "long_mscale": 1.0}
    if nope and (c.qk_norm or c.qkv_bias):
        raise UserError(f"layers without RoPE beside {'QK-norm' if c.qk_norm else 'biases of q, k and v'} have no equal among the models that transformers loads: train without one of them to export")
    some = 0 < len(c.window_layers) < c.n_layer
    kind = "qwen3" if c.qk_norm else "qwen2" if c.qkv_bias else "smollm3" if nope or some else "mistral" if window or c.n_embd % c.n_head else "llama"
    if c.head_dim % 2 and kind != "smollm3":
        raise UserError(f"head_dim={c.head_dim} is odd, and the models that transformers loads pair a head's channels: choose an even one")
    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "smollm3": "SmolLM3", "mistral": "Mistral", "llama": "Llama"}[kind]
    windows = {} if kind == "llama" else {"sliding_window": window or None} if kind == "mistral" else {"sliding_window": window or None, "use_sliding_window": bool(window), "max_window_layers": c.n_layer, "layer_types": [
        "sliding_attention" if i in c.window_layers else "full_attention" for i in range(c.n_layer)]}
    scaling = None if rope["rope_type"] == "default" else {"type": rope["rope_type"], **{key: value for key, value in rope.items() if key != "rope_theta"}}
    return {"architectures": [f"{name}ForCausalLM"], "model_type": kind, **shape, "hidden_size": c.n_embd, "intermediate_size": model.blocks[0].mlp.gate.out_features, "num_hidden_layers": c.n_layer,
            "num_attention_heads": c.n_head, "num_key_value_heads": c.n_kv_head, "head_dim": c.head_dim, "hidden_act": "silu", "rms_norm_eps": c.norm_eps, "attention_dropout": 0.0, "max_position_embeddings": length,
            **({} if kind in ("mistral", "qwen2") else {"attention_bias": False}), **({"mlp_bias": False} if kind in ("llama", "smollm3") else {}), **windows,
            **({"no_rope_layers": [int(i not in nope) for i in range(c.n_layer)], "no_rope_layer_interval": 4} if kind == "smollm3" else {}),
            "rope_parameters": rope, "rope_theta": rope["rope_theta"], "rope_scaling": scaling,  # the last two, and what of the first stands beside it, for older runtimes
            **{key: rope[key] for key in ("original_max_position_embeddings",) if key in rope}}, order


@torch.no_grad()
def weights_of(model, order):
    """The tensors under Hugging Face's names: the factors of the scores are put into the queries, the channels of rotated heads into `order`."""
    c, params = model.config, dict(model.named_parameters())
    D = c.head_dim
    for i in range(c.n_layer):
        scheme = model.nope if i in c.nope_layers else model.pos
        factor = c.attn_scale * scheme.score_scale * (scheme.attention_factor**2 if getattr(scheme, "plan", ("",))[0] == "drope" else 1.0)
        factors = torch.full((D,), float(factor))
        if order is not None and i not in c.nope_layers:
            factors[scheme.rotary_dim:] /= scheme.attention_factor**2  # there it multiplies the channels too that are not rotated
        for name in () if (factors == 1).all() else ["q_norm.weight"] if c.qk_norm else ["q.weight", *(["q.bias"] if c.qkv_bias else [])]:
            p = params[f"blocks.{i}.attention.{name}"].unflatten(0, (-1, D))
            params[f"blocks.{i}.attention.{name}"] = (p * factors.view(-1, *[1] * (p.dim() - 2))).flatten(0, 1)
        for name in () if order is None or i in c.nope_layers else ("q.weight", "k.weight", "q.bias", "k.bias", "q_norm.weight", "k_norm.weight"):
            if (p := params.get(f"blocks.{i}.attention.{name}")) is not None:
                params[f"blocks.{i}.attention.{name}"] = p.unflatten(0, (-1, D))[:, order].flatten(0, 1)
    return {name: (torch.cat([params[part] for part in ours]).t() if transposed else torch.cat([params[part] for part in ours]) if len(ours) > 1 else params[ours[0]]).detach().contiguous()
            for name, (ours, transposed) in layout(c).items()}


def export_checkpoint(source, target, best=False, verify=True, tokenizer_from=""):
    """Write a run folder's model and tokenizer as a Hugging Face directory, whole or not at all. Raises UserError for what has no equal there, or where transformers reads other logits."""
    from safetensors.torch import save_file
    target, model = Path(target), GPT.load(source, best)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already: remove it, or choose another directory")
    settings, order = write_config(model)
    tokenizer = data.from_json(model.meta.get("tokenizer"))
    tmp = target.parent / f".tmp-{target.name}"
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    try:
        save_file(weights_of(model, order), tmp / "model.safetensors", {"format": "pt"})
        bos, eos = (tokenizer.bos, tokenizer.bos if tokenizer.eos is None else tokenizer.eos) if tokenizer else (None, None)
        settings |= {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": None}
        (tmp / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if tokenizer_from:
            copied = [name for name in tokenizer_json.FILES if (Path(tokenizer_from) / name).is_file()]
            if not copied:
                raise UserError(f"there are no tokenizer files in --tokenizer={tokenizer_from}: give the Hugging Face directory that the model was imported from")
            for name in copied:
                shutil.copyfile(Path(tokenizer_from) / name, tmp / name)
        else:
            tokenizer_json.write(tmp, tokenizer, model.meta.get("bos") is not None, model.config.block_size)
        print(f"{settings['architectures'][0]}, " + (f"rope_type {settings['rope_parameters']['rope_type']}, " if "rope_parameters" in settings else "") + f"{model.config.block_size} tokens"
              + ("" if tokenizer or tokenizer_from else "; no tokenizer: the model was trained on bare token files"))
        if not verify:
            print("not verified: you asked not to")
        elif importlib.util.find_spec("transformers") is None:
            print("not verified: transformers is not installed (pip install transformers)")
        else:
            print(compare(model, tmp, tokenizer))
        if target.exists():
            target.rmdir()
        os.rename(tmp, target)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


THEIRS = """
import sys, torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, asked, answer = sys.argv[1:]
model, out = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), {}
with torch.no_grad():
    for name, tokens in load_file(asked).items():
        if name == "text":
            out["text"] = torch.tensor(AutoTokenizer.from_pretrained(folder)(bytes(tokens.tolist()).decode(), add_special_tokens=False)["input_ids"])
        else:
            out[name] = model(tokens).logits[:, :: max(1, tokens.shape[1] // 64)].contiguous()
save_file(out, answer)
"""


@torch.no_grad()
def compare(model, folder, tokenizer):
    """Have transformers load a directory in a process of its own, and compare logits and encoded text. Returns what was seen, in words. Raises UserError when they differ."""
    from safetensors.torch import load_file, save_file
    c = model.config
    afford = max(40, int(4e12 / model.flops_per_token(64)))  # some tens of seconds of a CPU
    generator = torch.Generator().manual_seed(0)
    lengths = sorted({min(33, c.block_size), min(c.trained_length + 37, c.block_size if model.pos.bounded else c.trained_length + 37, afford)})
    asked = {str(n): torch.randint(c.vocab_size, (1, n), generator=generator) for n in lengths}
    if tokenizer:
        asked["text"] = torch.tensor(list(tokenizer_json.sample_of(tokenizer).encode()), dtype=torch.uint8)
    with tempfile.TemporaryDirectory() as place:
        save_file(asked, Path(place) / "asked")
        code = Path(place) / "theirs.py"
        code.write_text(THEIRS, encoding="utf-8")
        done = subprocess.run([sys.executable, code, folder.resolve(), Path(place) / "asked", Path(place) / "answer"], cwd=place, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
        if done.returncode:
            raise UserError(f"transformers does not load what was written ({(done.stderr.strip().splitlines() or ['?'])[-1]}): nothing is left behind; update it, or give --verify=false")
        answer, seen = load_file(Path(place) / "answer"), []
    for n in lengths:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PastTrainedLength)
            ours = model(asked[str(n)])[:, ::max(1, n // 64)]
        apart, size = (ours - answer[str(n)]).abs().max().item(), ours.abs().max().item()
        if not apart <= 1e-6 * (100 + n) * max(1, size):  # transformers' angles are float32: their error grows with the position
            raise UserError(f"transformers reads other logits from what was written: {apart:.2g} apart at {n} tokens; nothing is left behind, and this is a fault of ours: please report it")
        seen.append(f"{n} tokens: {apart:.1e}")
    if tokenizer and answer["text"].tolist() != tokenizer.encode(tokenizer_json.sample_of(tokenizer)):
        raise UserError("transformers encodes text otherwise by what was written; nothing is left behind: give --tokenizer=DIR with the original files, or report it")
    return f"verified by transformers: largest logit difference {', '.join(seen)}" + ("; text is encoded alike" if tokenizer else "")


def main():
    cfg, given, words = config.parse(HFConfig, about=__doc__, paths="import DIR out/NAME, or export out/NAME DIR")
    if len(words) != 3 or words[0] not in ("import", "export"):
        raise UserError("say python hf.py import DIR out/NAME, or python hf.py export out/NAME DIR")
    if words[0] == "import":
        if given:
            raise UserError(f"--{sorted(given)[0]} is for export: leave it out")
        import_checkpoint(words[1], words[2])
    else:
        export_checkpoint(words[1], words[2], cfg.best, cfg.verify, cfg.tokenizer)


if __name__ == "__main__":
    config.main(main, Refused)
