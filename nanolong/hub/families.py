"""The model families of transformers that are imported and exported: one entry for each.

An entry says which settings of GPTConfig its models have, how its config.json names them, and which
tensors hold our parameters, with the fold of each: what is computed from a stored tensor, and back.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nanolong.hub.layout import Fold

# -----------------------------------------------------------------------------
# Folds, of a tensor and a Source


def transpose(tensor, source):
    return tensor.t()


# GPT-2 stores its matrices as (in, out), where torch's Linear has (out, in).
TRANSPOSED = Fold(transpose, transpose)


# -----------------------------------------------------------------------------
# Entries


@dataclass(frozen=True)
class Family:
    class_name: str
    # Modules of the checkpoint -> ours that they hold, and their folds. What a model does not have,
    # such as a bias or a norm of its queries, is left out.
    model: dict
    layer: dict
    layer_prefix: str = "model.layers."
    folds: dict = field(default_factory=dict)
    position_table: str = ""  # the tensor of learned positions
    old_names: dict = field(default_factory=dict)  # of modules: in old files -> in `model`
    # The settings of GPTConfig that its models have: name -> possible values.
    settings: dict = field(default_factory=dict)
    embed_scale: str = "one"  # or root: sqrt(n_embd); or any
    # Fields of config.json by Llama's names: theirs, () if there is none; what transformers takes
    # for one that is missing; those that must have one value; those that are only written.
    names: dict = field(default_factory=dict)
    defaults: dict = field(default_factory=dict)
    fixed: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)
    # fields that are true or false -> (setting, its value if true, its value if false)
    switches: dict = field(default_factory=dict)
    # the kinds of layers, letters of layer_pattern, that a model can have together
    patterns: tuple = ("F",)
    heads_divide: bool = False  # transformers wants n_head to divide n_embd
    partial_rope: bool = False  # rotates a part of each head, by partial_rotary_factor
    rope_by_kind: bool = False  # layers with and without a window have RoPE parameters of their own
    # rope_type of config.json -> what it means, if there are other names or few types
    rope_types: dict | None = None
    read: Callable | None = None  # (fields, settings) -> more settings of GPTConfig
    write: Callable | None = None  # (config, letters of its layers) -> more fields of config.json
    read_only: str = ""  # why it is not exported


def derive(family, class_name, **changes):
    """Return an entry with these changes; those of settings, names and defaults are additions."""
    for name in ("settings", "names", "defaults"):
        changes[name] = getattr(family, name) | changes.get(name, {})
    return replace(family, class_name=class_name, **{"heads_divide": False, "fixed": {}, **changes})


ATTENTION = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.o",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
}
GATED_MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
LLAMA = Family(
    "LlamaForCausalLM",
    model={"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"},
    layer={**PRE_NORMS, **ATTENTION, **GATED_MLP},
    settings={
        "norm": ("rmsnorm",),
        "norm_position": ("pre",),
        "mlp": ("swiglu", "geglu"),
        "bias": ("none",),
        "qk_norm": ("none",),
        "sink_scores": (False,),
        "pos": ("rope",),
    },
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 1e4,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    written={"attention_dropout": 0.0},
    heads_divide=True,
)
MISTRAL = derive(
    LLAMA,
    "MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    patterns=("F", "W"),
)
QWEN3 = derive(
    LLAMA,
    "Qwen3ForCausalLM",
    settings={"qk_norm": ("head",)},
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    fixed={"attention_bias": False},
    patterns=("FW",),
)
QWEN2 = derive(
    QWEN3,
    "Qwen2ForCausalLM",
    settings={"qk_norm": ("none",), "bias": ("qkv",)},
    defaults={"head_dim": None},
)


def write_smollm3(config, letters):
    """1 stands for a layer with RoPE, whatever the name says."""
    has_rope = not letters <= {"N", "S"}
    layers = range(config.n_layer)
    return {
        "no_rope_layers": [int(has_rope and config.uses_positions(layer)) for layer in layers],
        "no_rope_layer_interval": 4,
    }


SMOLLM3 = derive(
    LLAMA,
    "SmolLM3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "use_sliding_window": False,
        "no_rope_layer_interval": 4,
    },
    fixed=LLAMA.fixed,
    patterns=("FWNS",),
    write=write_smollm3,
)


def write_gpt2(config, letters):
    return {"n_ctx": config.block_size}


NO_GQA = {"num_key_value_heads": (), "head_dim": ()}
LAYER_NORM = {"norm": ("layernorm",), "bias": ("all",)}
GPT2 = derive(
    LLAMA,
    "GPT2LMHeadModel",
    model={"transformer.wte": "embed", "transformer.ln_f": "norm", "lm_head": "head"},
    layer={
        "ln_1": "attention_norm",
        "ln_2": "mlp_norm",
        "attn.c_attn": "attention.q attention.k attention.v",
        "attn.c_proj": "attention.o",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
    },
    layer_prefix="transformer.h.",
    folds=dict.fromkeys(("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"), TRANSPOSED),
    position_table="transformer.wpe.weight",
    settings={**LAYER_NORM, "mlp": ("gelu", "gelu_exact"), "pos": ("learned",)},
    names={
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "hidden_size": ("n_embd",),
        "intermediate_size": ("n_inner",),
        "hidden_act": ("activation_function",),
        "rms_norm_eps": ("layer_norm_epsilon",),
        "max_position_embeddings": ("n_positions",),
        **NO_GQA,
    },
    defaults={
        "hidden_act": "gelu_new",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    },
    fixed={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    written={"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    write=write_gpt2,
)

# model_type of a config.json -> its entry; an export takes the first that has all of a model.
FAMILIES = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "smollm3": SMOLLM3,
    "gpt2": GPT2,
}

# Why other well-known model types cannot be imported: the end of "it is of model_type X, which",
# and the types.
REASONS = {
    "combines ALiBi with a norm of its embeddings": "bloom",
    "combines ALiBi with LayerNorms without biases": "mpt",
    "fuses its matrices": "phi3",
    "computes attention and MLP in parallel": "gpt_neox",
    "scales its embeddings and adds one to the weights of its norms": "gemma gemma3_text",
    "has its norms after attention and MLP": "olmo2",
    "multiplies its residuals and logits": "granite",
    "is a mixture of experts": "gpt_oss granitemoe mixtral olmoe phimoe qwen2_moe qwen3_moe",
    "is a mixture of experts whose attention is chunked": "llama4 llama4_text",
    "has latent attention and a mixture of experts": "deepseek_v2 deepseek_v3",
    "has layers of linear attention": "kimi_linear minimax qwen3_5 qwen3_5_text qwen3_next",
    "has Mamba layers": "bamba falcon_h1 jamba nemotron_h zamba2",
    "has convolutions in place of most attention": "lfm2",
    "has recurrent layers": "recurrent_gemma",
    "has no attention": "mamba rwkv",
    "is an encoder": "bert modernbert roberta",
    "is an encoder-decoder": "bart t5 t5gemma",
    "caps its attention scores": "gemma2",
    "has embeddings for each layer": "gemma3n gemma3n_text gemma4 gemma4_text",
    "has a squared ReLU in its MLP": "arcee nemotron persimmon",
    "has a squared ReLU, and norms without weights after RoPE": "nanochat",
    "has norms without weights": "olmo",
    "norms its queries and keys after RoPE": "hunyuan_v1_dense",
    "pairs adjacent channels in RoPE": "ernie4_5 glm glm4 helium",
    "computes attention and MLP from one norm": "codegen cohere cohere2 falcon gptj phi",
    "has ReLU, and learned positions that are offset by two": "opt",
    "has a bias in one of attention's four matrices": "gpt_neo",
    "scales its scores by position": "ministral3",
    "has learned sinks in its attention": "granite_swa",
    "has an activation function with weights": "apertus",
}
UNSUPPORTED = {name: reason for reason, names in REASONS.items() for name in names.split()}
