"""The model families of transformers that are read and written: one row for each.

A row says which tensors hold our parameters, what is computed from a stored tensor and back, and
which settings its models can have. What a config leaves out, its old names and old forms are
transformers' business: AutoConfig.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from nanolong.errors import require

# our setting -> attribute of a config; the class of GPT-2 and others knows these names too
FIELDS = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "head_dim": "head_dim",
    "mlp_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "block_size": "max_position_embeddings",
    "mlp": "hidden_act",
}
# setting mlp -> names of its activation function; the first is written
ACTIVATIONS = {
    "swiglu": ("silu", "swish"),
    "geglu": ("gelu_pytorch_tanh", "gelu_new"),
    "gelu": ("gelu_pytorch_tanh", "gelu_new"),
    "gelu_exact": ("gelu",),
}


class Fold(NamedTuple):
    """What is computed from a stored tensor, and back; c: a config of transformers."""

    read: Callable = lambda x, c: x
    write: Callable = lambda x, c: x


def swap_groups(x, n, m):
    """Exchange the first two dimensions of rows (n, m, D)."""
    return x.unflatten(0, (n, m, -1)).transpose(0, 1).flatten(0, 2)


def swap_pairs(x, c, n, m):
    """Exchange the dimensions (n, m) of the rows of q or k that are rotated, in each head."""
    fraction = c.rope_parameters.get("partial_rotary_factor") or 1.0
    heads = x.unflatten(0, (-1, head_dim(c)))
    rotated, others = heads.tensor_split([int(fraction * head_dim(c))], 1)
    rotated = rotated.unflatten(1, (n, m)).transpose(1, 2).flatten(1, 2)
    return torch.cat((rotated, others), 1).flatten(0, 1)


def multiplied_by(name, power=1):
    """A factor of the config becomes part of the weights, and is written as 1."""
    return Fold(read=lambda x, c: x.float() * getattr(c, name) ** power)


# GPT-2 stores matrices as (in, out), where torch's Linear has (out, in)
TRANSPOSED = Fold(lambda x, c: x.t(), lambda x, c: x.t())
# query, key and value of the first head come before the second head's
BY_HEAD = Fold(
    lambda x, c: swap_groups(x, c.num_attention_heads, 3),
    lambda x, c: swap_groups(x, 3, c.num_attention_heads),
)
# Their RoPE rotates adjacent channels, as in the paper, and ours a channel of each half of a head.
ADJACENT = Fold(lambda x, c: swap_pairs(x, c, -1, 2), lambda x, c: swap_pairs(x, c, 2, -1))
# one norm stands before attention and MLP
SHARED = Fold(lambda x, c: torch.cat((x, x)), lambda x, c: check_shared(*x.chunk(2)))
# the norm adds 1 to its weight
ONE_ADDED = Fold(lambda x, c: x.float() + 1, lambda x, c: x.float() - 1)


def check_shared(attention_norm, mlp_norm):
    require(
        torch.equal(attention_norm, mlp_norm),
        "a Cohere 2 has one norm before attention and MLP, and training has made two of it: train "
        "with --lora, or choose another model",
    )
    return attention_norm


@dataclass(frozen=True)
class Family:
    # their module, or their tensor outside of one -> our parameters, several if fused
    top: dict
    layer: dict
    prefix: str  # name of a layer's modules, before its number
    has: dict  # our setting -> values that its models can have; the first is the default
    folds: dict = field(default_factory=dict)  # their module -> Fold
    fields: dict = field(default_factory=dict)  # changes of FIELDS; None: there is no such field
    patterns: tuple = ("F",)  # kinds of layers that a model can have together
    partial: bool = False  # rotates a part of each head
    by_kind: bool = False  # layers with and without a window have RoPE parameters of their own
    rope_types: tuple = ()  # if not all
    embed_scale: Callable = lambda config: 1.0  # GPTConfig -> the required value
    read: Callable = lambda c: {}  # config -> more of our settings
    write: Callable = lambda config: {}  # GPTConfig -> more fields


def table(text):
    """Return a table of tensors from words theirs=ours; + joins fused tensors."""
    pairs = [word.split("=") for word in text.split()]
    return {theirs: ours.replace("+", " ") for theirs, ours in pairs}


def derive(family, has=(), fields=(), **changes):
    """Return a row with these changes; has and fields are additions."""
    has = family.has | dict(has)
    return replace(family, has=has, fields=family.fields | dict(fields), **changes)


def head_dim(c):
    return getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads


def tensor_layout(family, n_layer, names=None):
    """Yield (their name, ours that it holds, Fold) of all tensors of a model.

    names: names of our parameters, if known; others, such as a bias, are left out.
    """
    places = [("", "", family.top)]
    places += [(f"{family.prefix}{i}.", f"blocks.{i}.", family.layer) for i in range(n_layer)]
    for their_prefix, our_prefix, modules in places:
        for module, held in modules.items():
            # the empty kind: a tensor that is no weight or bias of a module
            for kind in (".weight", ".bias", ""):
                ours = [f"{our_prefix}{name}{kind}" for name in held.split()]
                if names is None or ours[0] in names:
                    yield f"{their_prefix}{module}{kind}", ours, family.folds.get(module, Fold())


# -----------------------------------------------------------------------------
# What some families say in their own way


def has_positions(config, layer):
    """Return whether a layer of our model has more than the causal mask; DroPE's have not."""
    method = config.extension["method"] if config.extension else "none"
    return config.pos != "nope" and method != "drope" and config.uses_positions(layer)


def letter(has_rope, has_window):
    """Return the kind of a layer, as layer_pattern has it."""
    return ("FW" if has_rope else "NS")[has_window]


def write_window(config):
    return {"sliding_window": config.window or None}


def write_layer_types(config):
    """The window of some layers."""
    kinds = ("full_attention", "sliding_attention")
    types = [kinds[config.uses_window(i)] for i in range(config.n_layer)]
    more = {"use_sliding_window": True, "max_window_layers": 0} if config.window else {}
    return {"layer_types": types, **write_window(config), **more}


def write_smollm3(config):
    """1 stands for a layer with RoPE, whatever the name says."""
    rotated = [int(has_positions(config, i)) for i in range(config.n_layer)]
    return write_layer_types(config) | {"no_rope_layers": rotated}


def read_ministral3(c):
    """Its scores are scaled from the length on that its RoPE is extended from."""
    length = c.rope_parameters["original_max_position_embeddings"]
    coefficient = c.rope_parameters["llama_4_scaling_beta"]
    return {"query_scale": f"llama4:{int(length)}:{coefficient}"}


def read_llama4(c):
    """Without experts and without weights in the norms of queries and keys (MobileLLM-R1)."""
    require(
        all(c.no_rope_layers[: c.num_hidden_layers]),
        "its layers without positions have other norms and scales than its other layers, which is "
        "not computed here: choose another checkpoint",
    )
    return {"qk_norm": "head" if c.use_qk_norm else "none"}


def read_mpt(c):
    attention = c.attn_config
    require(
        attention.clip_qkv is None,
        f"clip_qkv is {attention.clip_qkv}, and queries are not clipped here: use another model",
    )
    scale = attention.softmax_scale or head_dim(c) ** -0.5
    return {"attn_scale": scale * math.sqrt(head_dim(c))}


def read_gemma(c):
    """In bfloat16 transformers rounds the factor of the embeddings, 25.298 to 25.25 for example."""
    scalar = getattr(c, "query_pre_attn_scalar", None) or c.head_dim
    return {"embed_scale": math.sqrt(c.hidden_size), "attn_scale": math.sqrt(c.head_dim / scalar)}


def write_gemma3(config):
    """The pattern is written in its old form too, for which mlx-lm looks alone."""
    n = len(config.layer_pattern)
    is_regular = config.layer_pattern == "W" * (n - 1) + "F"
    older = {"sliding_window_pattern": n} if is_regular else {}
    return write_layer_types(config) | {"query_pre_attn_scalar": config.head_dim} | older


def read_granite(c):
    scale = c.attention_multiplier * math.sqrt(head_dim(c))
    return {"embed_scale": float(c.embedding_multiplier), "attn_scale": scale}


def write_granite(config):
    return {
        "embedding_multiplier": float(config.embed_scale),
        "attention_multiplier": config.attn_scale / math.sqrt(config.head_dim),
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
    }


def write_granite_hybrid(config):
    has_rope = any(has_positions(config, i) for i in range(config.n_layer))
    return write_granite(config) | {
        "position_embedding_type": "rope" if has_rope else None,
        "layer_types": ["full_attention"] * config.n_layer,
        "num_local_experts": 0,
        # transformers checks the sizes of Mamba layers also if there are none
        "mamba_n_heads": 1,
    }


def read_granite_swa(c):
    """layer_rope_theta has a base for each layer, and 0 for those without positions."""
    found = zip(c.layer_types, c.layer_rope_theta, strict=True)
    bases = {kind: float(base) for kind, base in found if base}
    if not bases:
        return read_granite(c)
    local = bases.get("sliding_attention", 0.0)
    base = bases.get("full_attention", local)
    return read_granite(c) | {"rope_base": base, "rope_local_base": local if local != base else 0.0}


def write_granite_swa(config):
    bases = [config.rope_base * has_positions(config, i) for i in range(config.n_layer)]
    # transformers wants a window, also if no layer has it
    more = {"layer_rope_theta": bases, "sliding_window": config.window or 128}
    return write_granite(config) | write_layer_types(config) | more


# -----------------------------------------------------------------------------
# The rows: model_type -> Family. An export takes the first that has all of a model.

ATTENTION = {f"self_attn.{x}_proj": f"attention.{x}" for x in "qkvo"}
ATTENTION |= {f"self_attn.{x}_norm": f"attention.{x}_norm" for x in "qk"}
ADJACENT_QK = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj"), ADJACENT)
QKV = "attention.q+attention.k+attention.v"
MLP = table("mlp.gate_proj=mlp.gate mlp.up_proj=mlp.up mlp.down_proj=mlp.down")
NORMS = table("input_layernorm=attention_norm post_attention_layernorm=mlp_norm")
LLAMA = Family(
    top=table("model.embed_tokens=embed model.norm=norm lm_head=head"),
    layer=NORMS | ATTENTION | MLP,
    prefix="model.layers.",
    has={
        "norm": ("rmsnorm",),
        "norm_position": ("pre",),
        "mlp": ("swiglu", "geglu"),
        "bias": ("none",),
        "qk_norm": ("none",),
        "pos": ("rope",),
    },
)
MISTRAL = derive(LLAMA, patterns=("F", "W"), write=write_window)
QWEN2 = derive(
    LLAMA, {"bias": ("qkv",)}, {"head_dim": None}, patterns=("FW",), write=write_layer_types
)
LAYER_NORM = {"norm": ("layernorm",), "bias": ("all",)}
# Its matrices are transposed.
GPT2 = derive(
    LLAMA,
    {**LAYER_NORM, "mlp": ("gelu", "gelu_exact"), "pos": ("learned",)},
    {
        "mlp": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "mlp_dim": "n_inner",
        "head_dim": None,
        "n_kv_head": None,
    },
    top=table(
        "transformer.wpe.weight=scheme.table transformer.wte=embed transformer.ln_f=norm "
        "lm_head=head"
    ),
    layer=table(
        f"ln_1=attention_norm ln_2=mlp_norm attn.c_attn={QKV} attn.c_proj=attention.o "
        "mlp.c_fc=mlp.up mlp.c_proj=mlp.down"
    ),
    prefix="transformer.h.",
    folds=dict.fromkeys(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), TRANSPOSED),
)
NEOX_LAYER = NORMS | table(
    f"attention.query_key_value={QKV} attention.dense=attention.o "
    "mlp.dense_h_to_4h=mlp.up mlp.dense_4h_to_h=mlp.down"
)
# post_attention_layernorm stands after attention here, and before the MLP in a Llama.
OLMO2 = derive(
    LLAMA,
    {"norm_position": ("post",), "qk_norm": ("all",)},
    layer=ATTENTION
    | MLP
    | table(
        "post_attention_layernorm=attention_post_norm post_feedforward_layernorm=mlp_post_norm"
    ),
)
GEMMA3_NORMS = table(
    "input_layernorm=attention_norm post_attention_layernorm=attention_post_norm "
    "pre_feedforward_layernorm=mlp_norm post_feedforward_layernorm=mlp_post_norm"
)
GRANITE = derive(
    LLAMA,
    folds={
        "model.norm": multiplied_by("logits_scaling", -1),
        "self_attn.o_proj": multiplied_by("residual_multiplier"),
        "mlp.down_proj": multiplied_by("residual_multiplier"),
        "shared_mlp.output_linear": multiplied_by("residual_multiplier"),
    },
    embed_scale=lambda config: config.embed_scale,
    read=read_granite,
    write=write_granite,
)
FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "ministral3": derive(
        MISTRAL,
        {"query_scale": ("llama4",)},
        read=read_ministral3,
    ),
    "qwen2": QWEN2,
    "qwen3": derive(QWEN2, {"qk_norm": ("head",), "bias": ("none",)}, {"head_dim": "head_dim"}),
    "smollm3": derive(LLAMA, patterns=("FWNS",), write=write_smollm3),
    "gpt2": GPT2,
    "phi3": derive(
        LLAMA,
        layer=NORMS
        | table(
            f"self_attn.qkv_proj={QKV} self_attn.o_proj=attention.o "
            "mlp.gate_up_proj=mlp.gate+mlp.up mlp.down_proj=mlp.down"
        ),
        partial=True,
        rope_types=("default", "longrope"),
        patterns=("F", "W"),
        write=lambda config: (
            write_window(config) | {"original_max_position_embeddings": config.original_length}
        ),
    ),
    "bloom": derive(
        GPT2,
        {"mlp": ("gelu",), "pos": ("alibi",), "tie_embeddings": (False,)},
        {"mlp": None, "mlp_dim": None, "block_size": "seq_length", "tie_embeddings": None},
        top=table("transformer.word_embeddings=embed transformer.ln_f=norm lm_head=head"),
        layer={name.replace("attention.", "self_attention."): x for name, x in NEOX_LAYER.items()},
        folds={"self_attention.query_key_value": BY_HEAD},
    ),
    "mpt": derive(
        GPT2,
        {"bias": ("none",), "mlp": ("gelu_exact",), "pos": ("alibi",)},
        {"mlp": None, "mlp_dim": None, "block_size": "max_seq_len"},
        top=table("transformer.wte=embed transformer.norm_f=norm lm_head=head"),
        layer=table(
            f"norm_1=attention_norm norm_2=mlp_norm attn.Wqkv={QKV} attn.out_proj=attention.o "
            "ffn.up_proj=mlp.up ffn.down_proj=mlp.down"
        ),
        prefix="transformer.blocks.",
        folds={},
        read=read_mpt,
    ),
    "olmo2": OLMO2,
    "olmo3": derive(OLMO2, patterns=("FW",), by_kind=True, write=write_layer_types),
    # its files say another activation function than the one it was trained with
    "gemma": derive(
        LLAMA,
        {"mlp": ("geglu",)},
        {"mlp": None},
        folds=dict.fromkeys((*NORMS, "model.norm"), ONE_ADDED),
        embed_scale=lambda config: math.sqrt(config.n_embd),
        read=read_gemma,
    ),
    "gemma3_text": derive(
        LLAMA,
        {"norm_position": ("both",), "mlp": ("geglu",), "qk_norm": ("head",)},
        {"mlp": "hidden_activation"},
        layer=GEMMA3_NORMS | ATTENTION | MLP,
        folds=dict.fromkeys(
            (*GEMMA3_NORMS, "self_attn.q_norm", "self_attn.k_norm", "model.norm"), ONE_ADDED
        ),
        patterns=("FW",),
        by_kind=True,
        embed_scale=lambda config: math.sqrt(config.n_embd),
        read=read_gemma,
        write=write_gemma3,
    ),
    # Pythia
    "gpt_neox": derive(
        LLAMA,
        {**LAYER_NORM, "norm_position": ("parallel", "pre"), "mlp": ("gelu_exact", "gelu")},
        {"norm_eps": "layer_norm_eps", "head_dim": None, "n_kv_head": None},
        top=table("gpt_neox.embed_in=embed gpt_neox.final_layer_norm=norm lm_head=head"),
        layer=NEOX_LAYER,
        prefix="gpt_neox.layers.",
        folds={"attention.query_key_value": BY_HEAD},
        partial=True,
        read=lambda c: {"norm_position": "parallel" if c.use_parallel_residual else "pre"},
        write=lambda config: {"use_parallel_residual": config.norm_position == "parallel"},
    ),
    "ernie4_5": derive(LLAMA, folds=ADJACENT_QK),
    # Command R7B and Tiny Aya: no positions in layers without a window
    "cohere2": derive(
        LLAMA,
        {"norm": ("layernorm",), "norm_position": ("parallel",)},
        {"norm_eps": "layer_norm_eps", "head_dim": None},
        layer=ATTENTION | MLP | {"input_layernorm": "attention_norm mlp_norm"},
        folds=ADJACENT_QK | {"input_layernorm": SHARED, "model.norm": multiplied_by("logit_scale")},
        patterns=("WN",),
        write=lambda config: (
            write_layer_types(config) | {"sliding_window": config.window or 128, "logit_scale": 1.0}
        ),
    ),
    # MobileLLM-R1: its norm after the rotation computes the same as one before it
    "llama4_text": derive(
        LLAMA,
        (),
        {"mlp_dim": "intermediate_size_mlp"},
        layer=NORMS
        | ATTENTION
        | {f"feed_forward.{x}_proj": f"mlp.{x}" for x in ("gate", "up", "down")},
        folds=ADJACENT_QK,
        read=read_llama4,
    ),
    "granite": GRANITE,
    # Granite 4 without experts and without Mamba layers
    "granitemoehybrid": derive(
        GRANITE,
        (),
        {"mlp_dim": "shared_intermediate_size"},
        layer=NORMS
        | ATTENTION
        | table("shared_mlp.input_linear=mlp.gate+mlp.up shared_mlp.output_linear=mlp.down"),
        patterns=("F", "N"),
        write=write_granite_hybrid,
    ),
    "granite_swa": derive(
        GRANITE,
        {"sink_scores": (True,)},
        layer=LLAMA.layer | table("self_attn.sinks=attention.sink_scores"),
        patterns=("FWNS",),
        read=read_granite_swa,
        write=write_granite_swa,
    ),
}
# small models of today that are not read -> why
NOT_READ = {
    "gemma4_text": "its heads have another size in layers without a window",
    "hunyuan_v1_dense": "it norms queries and keys after their rotation",
    "nanochat": "its logits are capped by tanh",
    "qwen3_5_text": "most of its layers are linear attention",
}
