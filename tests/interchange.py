"""Every model family and RoPE type compared with transformers, in one process.

transformers makes each model with random weights and writes its folder. Compared are all logits, in
float32, beyond the original context length and the windows: after the import, in one forward pass
and token by token with a cache; and after an export, as AutoModelForCausalLM loads the folder. Our
own models are exported and imported again. By default test_hub.py takes a case of each family;
--all takes all. Run as a script, this file prints the table of the largest differences.
"""

import contextlib
import copy
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import AutoConfig, AutoModelForCausalLM

from model import GPT, ContextLengthWarning, GPTConfig, KVCache
from nanolong.errors import UserError
from nanolong.hub.transfer import export_to, import_to
from rope_scaling import ATTENTION

LENGTH = 64  # the original context length
N_TOKENS = 144  # a multiple of a quarter of it, where a dynamic scale is that of transformers
# with a cache: a prompt, single tokens beyond the windows and the original length, and the rest
PARTS = (41, *[1] * 27, N_TOKENS - 68)
VOCAB_SIZE = 131

# -----------------------------------------------------------------------------
# transformers' models

TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    **TOKENS,
}
ORIGINAL = {"original_max_position_embeddings": LENGTH}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
HYBRID = {
    **MULTIPLIERS,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 1,
}
TIED = {"tie_word_embeddings": True}
LLAMA4_TEXT = {
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 256,
    "no_rope_layers": [1] * 5,
    "layer_types": ["chunked_attention"] * 3,
    "moe_layers": [],
    "attn_temperature_tuning": False,
    # its norm of queries and keys sees the attention factor of RoPE, up to this
    "rms_norm_eps": 1e-7,
}
GPT2 = {"n_positions": 160, "n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": VOCAB_SIZE}
WITHOUT_ROPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, **TIED, **TOKENS}
# model_type, and what is special -> fields of its config; windows are shorter than the texts
FAMILIES = {
    "llama": TIED,
    "llama, wide heads": {"head_dim": 16, "num_key_value_heads": 6, "vocab_size": 127},
    "mistral": {"sliding_window": None},
    "mistral, window": {"sliding_window": 21},
    "ministral3": {"head_dim": 12},
    "qwen2": TIED,
    "qwen2, window in some layers": {
        "use_sliding_window": True,
        "sliding_window": 21,
        "max_window_layers": 1,
    },
    "qwen3": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "smollm3, no positions": {"no_rope_layers": [0, 0, 0]},
    "phi3": {"partial_rotary_factor": 0.75, **ORIGINAL},
    "phi3, window": {"sliding_window": 21, **TIED, **ORIGINAL},
    "olmo2": {},
    "olmo3": {"sliding_window": 21, "num_hidden_layers": 5},
    "gemma": {"num_key_value_heads": 1, "head_dim": 12, **TIED},
    "gemma3_text": {
        "sliding_window": 21,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "query_pre_attn_scalar": 10,
        **TIED,
    },
    "gpt_neox": {"rotary_pct": 0.5, "layer_norm_eps": 1e-4, "intermediate_size": 100},
    "gpt_neox, pre": {"rotary_pct": 0.75, "use_parallel_residual": False},
    "granite": {**MULTIPLIERS, **TIED},
    "granite_swa": {
        **MULTIPLIERS,
        "sliding_window": 21,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "layer_rope_theta": [0, 1e3, 1e3, 1e3, 0],
        **TIED,
    },
    "granitemoehybrid": {**HYBRID, "position_embedding_type": "rope"},
    "granitemoehybrid, no positions": {**HYBRID, "position_embedding_type": None},
    "ernie4_5": {"num_key_value_heads": 6, **TIED},
    "cohere2": {
        "num_hidden_layers": 5,
        "sliding_window": 21,
        "logit_scale": 0.25,
        "layer_norm_eps": 1e-4,
        # which files have, and transformers does not look at
        "position_embedding_type": "rope_gptj",
        "sliding_window_pattern": 4,
        **TIED,
    },
    "cohere2, no positions": {"layer_types": ["full_attention"] * 3, **TIED},
    # as MobileLLM-R1's files: more entries than layers, and the text is one chunk
    "llama4_text": {**LLAMA4_TEXT, **TIED},
    "llama4_text, no norm": {**LLAMA4_TEXT, "use_qk_norm": False},
    "gpt2": {**GPT2, "n_inner": 100},
    # as Mistral's of Stanford divide the scores of a layer by its number
    "gpt2, scores by layer": {**GPT2, "scale_attn_by_inverse_layer_idx": True},
    "gpt2, scores as they are": {**GPT2, "scale_attn_weights": False},
    "bloom": {**WITHOUT_ROPE, "n_layer": 3, "n_head": 6},
    "mpt": {
        **WITHOUT_ROPE,
        "d_model": 48,
        "n_heads": 6,
        "n_layers": 3,
        "max_seq_len": 160,
        "attn_config": {"softmax_scale": 0.4, "attn_pdrop": 0},
    },
}
BY_KIND = ("olmo3", "gemma3_text")
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}
LONG = [1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 10.0, 11.5]
# name -> rope_parameters, or rope_scaling in the older form
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn, options": {**YARN, "beta_fast": 8, "beta_slow": 2.0, "truncate": False}
    | {"attention_factor": 1.05},
    "yarn, mscale": {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4}
    | ORIGINAL,
    "longrope": {"rope_type": "longrope", "rope_theta": 1e4, **ORIGINAL}
    | {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": LONG},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, **ORIGINAL}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def all_cases():
    """Return (family, RoPE type) of all cases."""
    cases = []
    for family in FAMILIES:
        ropes = list(ROPES)
        if family.startswith(("gpt2", "bloom", "mpt")) or "no positions" in family:
            ropes = ["default"]
        elif family.startswith("phi3"):
            ropes = ["default", "longrope"]
        if family in BY_KIND or "granite" in family:
            ropes = [rope for rope in ropes if rope != "dynamic"]
        cases += [(family, rope) for rope in ropes]
    return cases


def make_theirs(family, rope, seed=0, **changes):
    """Return transformers' model of a case, with random weights, so that no term is hidden."""
    model_type = family.partition(",")[0]
    fields = {**SHAPE, **FAMILIES[family]}
    if model_type in ("gpt2", "bloom", "mpt"):
        fields = dict(FAMILIES[family])
    else:
        # because they would win over the type of the case, which would then pass untested
        assert not {"rope_scaling", "rope_parameters"} & FAMILIES[family].keys(), family
        fields |= rope_fields(model_type, fields, rope)
    torch.manual_seed(seed)
    # a copy, because the classes keep and change what they get
    c = AutoConfig.for_model(model_type, **copy.deepcopy(fields | changes))
    theirs = AutoModelForCausalLM.from_config(c).eval().float().requires_grad_(False)
    for name, p in theirs.named_parameters():
        module = name.split(".")[-2]
        # Gemma adds 1 to the weights of its norms
        is_norm = p.dim() == 1 and name.endswith("weight") and not family.startswith("gemma")
        is_matrix = p.dim() == 2 and module not in ("embed_tokens", "wte", "wpe", "lm_head")
        p.normal_(float(is_norm), p.shape[1] ** -0.5 if is_matrix else 0.1)
    theirs.tie_weights()
    return theirs


def write_folder(place, family="llama", rope="default", config=None, **changes):
    """Write transformers' folder of a case, and return its model.

    changes: of the model; config: of what its config.json says of it.
    """
    theirs = make_theirs(family, rope, **changes)
    theirs.save_pretrained(place)
    edit_json(place / "config.json", config or {})
    return theirs


def edit_json(file, changes):
    values = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(values | changes))


def rope_fields(model_type, fields, rope):
    """Return what a config says of a RoPE type."""
    parameters = dict(ROPES[rope])
    fraction = fields.get("partial_rotary_factor", fields.get("rotary_pct", 1.0))
    for key in {"short_factor", "long_factor"} & parameters.keys():
        parameters[key] = parameters[key][: int(fields["head_dim"] * fraction) // 2]
    if model_type == "ministral3":
        parameters |= {"llama_4_scaling_beta": 0.3, **ORIGINAL}
    if model_type in BY_KIND and "type" not in parameters:
        local = {"rope_type": "default", "rope_theta": 500.0}
        outside = {"truncate": parameters.get("truncate", True)}
        parameters = {"full_attention": parameters, "sliding_attention": local, **outside}
    key = "rope_scaling" if "type" in parameters else "rope_parameters"
    length = LENGTH if rope in ("default", "dynamic") else 4 * LENGTH
    return {"max_position_embeddings": length, key: parameters}


# -----------------------------------------------------------------------------
# Our own models: name -> settings of GPTConfig, and None or an extension method with its options

LAYER_NORM = {"norm": "layernorm", "bias": "all"}
OUR_GPT2 = {**LAYER_NORM, "mlp": "gelu", "pos": "learned", "block_size": 160}
WINDOW = {"window": 21, "layer_pattern": "WF"}
OLMO3 = {"norm_position": "post", "qk_norm": "all", **WINDOW, "rope_local_base": 500.0}
GEMMA3 = {"norm_position": "both", "mlp": "geglu", "qk_norm": "head", "embed_scale": 48**0.5}
GEMMA3 |= {"attn_scale": 1.1, **WINDOW}
LLAMA4 = {"query_scale": "llama4"}
TWO_TABLES = {"long_factor": [1.0, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
METHODS = ("none", "pi", "ntk", "ntk-parts", "yarn", "abf", "llama3", "ntk-lceg")
OURS = {
    "GQA, heads that do not divide": ({"n_embd": 50, "head_dim": 8, "n_kv_head": 2}, None),
    "biases of q, k and v": ({"bias": "qkv"}, None),
    "window": ({"window": 21}, None),
    "layers of all four kinds": ({"n_layer": 4, "window": 21, "layer_pattern": "FWNS"}, None),
    "scores times 1.3": ({"attn_scale": 1.3}, None),
    "untied, QK-norm": ({"tie_embeddings": False, "qk_norm": "head"}, None),
    "nope, scale": ({"pos": "nope"}, ("scale", {"scale": 1.2})),
    "GPT-2, scores times 1.3, pi": ({**OUR_GPT2, "attn_scale": 1.3}, ("pi", {})),
    "GPT-2's layers with rope": ({**OUR_GPT2, "pos": "rope"}, None),
    "nanoGPT": ({**OUR_GPT2, "mlp": "gelu_exact"}, None),
    "Olmo 3, yarn": (OLMO3, ("yarn", {})),
    "Olmo 3, yarn in all layers": (OLMO3, ("yarn", {"layers": "all"})),
    "Gemma 3, pi": (GEMMA3, ("pi", {})),
    "learned sinks": ({"sink_scores": True}, None),
    "Ministral 3, yarn": (LLAMA4, ("yarn", {})),
    "p-RoPE, yarn": ({"p_rope": 0.5}, ("yarn", {})),
    **{method: ({}, (method, {})) for method in METHODS},
    "yarn, ramp=paper": ({}, ("yarn", {"ramp": "paper"})),
    "dynamic-ntk at a fixed length": ({}, ("dynamic-ntk", {"length": 200.0})),
    "MrRoPE, progressive": ({}, ("yarn", {"ramp": "progressive"})),
    "MrRoPE, geometric": ({}, ("ntk-parts", {"ramp": "geometric"})),
    "longrope": ({}, ("longrope", {"long_factor": [1, 2, 3.5, 4]})),
    "longrope, two tables": ({}, ("longrope", TWO_TABLES)),
    "half of a head": ({"rope_fraction": 0.5, "bias": "none"}, None),
    "drope in half of a head": ({"rope_fraction": 0.5}, ("drope", {"scale": 1.1})),
}
DYNAMIC = ("dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen", *ATTENTION)
# what cannot be exported -> a phrase of the reason
REFUSED = {
    **{pos: ({"pos": pos}, None, "--pos=rope") for pos in ("alibi", "t5", "shaw", "learned")},
    **{method: ({}, (method, {}), f"method '{method}'") for method in DYNAMIC},
    "output gate": ({"output_gate": "head"}, None, "--output_gate=none"),
    "sinks, QK-norm": ({"sink_scores": True, "qk_norm": "head"}, None, "--sink_scores=True"),
    "logn": ({"query_scale": "logn"}, None, "--query_scale=logn"),
    "Ministral 3 at 16": ({"query_scale": "llama4:16"}, ("yarn", {}), "other logits"),
    "post-norms": ({"norm_position": "post"}, None, "--norm_position=post"),
    "window and sinks": ({"window": 21, "sinks": 2}, None, "--sinks=2"),
    "NoPE, QK-norm": ({"layer_pattern": "FN", "qk_norm": "head"}, None, "layers of the kinds FN"),
    "half a head, QK-norm": ({"rope_fraction": 0.5, "qk_norm": "head"}, None, "rope_fraction"),
    "biases in all layers": ({"bias": "all"}, None, "--bias=all"),
}


def make_ours(settings, extension, seed=0):
    """Return a model of ours with random weights, extended by 4."""
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCAB_SIZE, "block_size": LENGTH, "n_layer": 2, "n_head": 6}
    model = GPT(GPTConfig(**{**shape, "n_embd": 48, "mlp_dim": 80, **settings}))
    model.eval().requires_grad_(False)
    for name, p in model.named_parameters():
        p.normal_(0.0, p.shape[-1] ** -0.5 if p.dim() == 2 else 0.1)
        p += float("norm" in name and name.endswith("weight"))
    if extension:
        method, options = extension
        model.extend(method, 4.0, **options)
    model.stored_dtype = torch.float32
    return model


# -----------------------------------------------------------------------------
# Comparisons


@torch.no_grad()
def our_logits(model, tokens, with_cache=False):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextLengthWarning)
        if not with_cache:
            return model(tokens)
        cache = KVCache()
        return torch.cat([model(part, cache=cache) for part in tokens.split(PARTS, 1)], 1)


def quietly(function, *arguments, **options):
    """Call a function, and return what it prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        function(*arguments, **options)
    return output.getvalue()


def imported(source, folder, **options):
    """Import a file or folder; return the model and what is printed."""
    run = folder / f"run-{Path(source).stem}"
    text = quietly(import_to, GPT, str(source), run, **options)
    return GPT.load(run), text


def load_folder(folder):
    """Return transformers' own reading of a folder."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_close(found, expected):
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


def compare(family, rope, folder, seed=0):
    """Compare a case in both directions.

    Returns the largest differences as fractions of the largest logit, imported, with a cache and
    exported, or None of what was not compared; and why there is no export, or "".
    """
    theirs = make_theirs(family, rope, seed)
    theirs.save_pretrained(folder / "hf", max_shard_size="20KB" if seed % 2 else "5GB")
    quietly(import_to, GPT, str(folder / "hf"), folder / "run")
    model = GPT.load(folder / "run")
    size = model.config.vocab_size
    tokens = torch.randint(size, (2, N_TOKENS), generator=torch.Generator().manual_seed(seed))
    expected = theirs(tokens).logits.detach()

    def difference(logits):
        return ((logits - expected).abs().max() / expected.abs().max()).item()

    differences = [difference(our_logits(model, tokens)), None, None]
    if rope not in ("dynamic", "longrope"):  # transformers' cache keeps keys of the older scale
        differences[1] = difference(our_logits(model, tokens, with_cache=True))
    try:
        model = GPT.load(folder / "run", dtype=None)
        # not verified, because the comparison below has more tokens; exports of our own models are
        quietly(export_to, model, folder / "exported", verify=False)
    except UserError as error:
        return differences, str(error)
    differences[2] = difference(load_folder(folder / "exported")(tokens).logits)
    return differences, ""


if __name__ == "__main__":
    print("| family | RoPE | imported | with a cache | exported |\n|---|---|---|---|---|")
    for number, case in enumerate(all_cases()):
        with tempfile.TemporaryDirectory() as name:
            differences, refused = compare(*case, Path(name), number)
        words = ["-" if x is None else f"{x:.1e}" for x in differences]
        if refused:
            words[2] = refused.partition(":")[0]
        print("|", " | ".join([*case, *words]), "|", flush=True)
