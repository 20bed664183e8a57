"""The model families of transformers that are imported and exported: one entry for each.

An entry says which settings of GPTConfig its models have, how its config.json names them, and which
tensors hold our parameters, with the fold of each: what is computed from a stored tensor, and back.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from nanolong.errors import UserError
from nanolong.hub.layout import BY_HEAD, NORMED, ONE_ADDED, TRANSPOSED, WITHOUT_BIAS, ConfigFields
from nanolong.hub.rope import rope_values


@dataclass(frozen=True)
class Family:
    class_name: str
    # Modules of the checkpoint, or tensors that are no weight or bias of one -> ours that they
    # hold, and their folds (layout.py). What a model does not have, such as a bias, is left out.
    model: dict
    layer: dict
    layer_prefix: str
    folds: dict
    # The settings of GPTConfig that its models have: name -> possible values.
    settings: dict
    # Fields of config.json by Llama's names: theirs, all of which are written, or () if there is no
    # such field; what transformers takes for one that is missing; those that must have one value;
    # those that are only written.
    names: dict
    defaults: dict
    fixed: dict
    written: dict
    # fields that are true or false -> (setting, its value if true, its value if false)
    switches: dict
    # the kinds of layers, letters of layer_pattern, that a model can have together
    patterns: tuple = ("F",)
    embed_scale: str = "one"  # or root: sqrt(n_embd); or any
    heads_divide: bool = False  # transformers wants n_head to divide n_embd
    partial_rope: bool = False  # rotates a part of each head, by partial_rotary_factor
    rope_by_kind: bool = False  # layers with and without a window have RoPE parameters of their own
    rope_types: dict | None = None  # as ROPE_TYPES, if there are other names or few types
    read: Callable | None = None  # (fields, settings) -> more settings of GPTConfig
    write: Callable | None = None  # (config, letters of its layers, fields so far) -> more fields
    read_only: str = ""  # why it is not exported


def derive(family, class_name, **changes):
    """Return an entry with these changes; those of settings, names and defaults are additions."""
    for name in ("settings", "names", "defaults"):
        changes[name] = getattr(family, name) | changes.get(name, {})
    return replace(family, class_name=class_name, **{"heads_divide": False, "fixed": {}, **changes})


ATTENTION = {f"self_attn.{name}_proj": f"attention.{name}" for name in "qkvo"}
ATTENTION |= {f"self_attn.{name}_norm": f"attention.{name}_norm" for name in "qk"}
GATED_MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
LLAMA = Family(
    "LlamaForCausalLM",
    model={"model.embed_tokens": "embed", "model.norm": "norm", "lm_head": "head"},
    layer={**PRE_NORMS, **ATTENTION, **GATED_MLP},
    layer_prefix="model.layers.",
    folds={},
    settings={
        "norm": ("rmsnorm",),
        "norm_position": ("pre",),
        "mlp": ("swiglu", "geglu"),
        "bias": ("none",),
        "qk_norm": ("none",),
        "pos": ("rope",),
    },
    names={},
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 1e4,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    written={"attention_dropout": 0.0},
    switches={},
    heads_divide=True,
)
# model_type of a config.json -> its entry; an export takes the first that has all of a model.
FAMILIES = {"llama": LLAMA}
FAMILIES["mistral"] = MISTRAL = derive(
    LLAMA,
    "MistralForCausalLM",
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    patterns=("F", "W"),
)


def read_ministral3(fields, settings):
    """Its scores are scaled from the length on that its RoPE is extended from."""
    rope = ConfigFields(fields.file, rope_values(fields, FAMILIES["ministral3"])[0], {})
    return {
        "score_scale_coefficient": rope.real("llama_4_scaling_beta", 1e-12, 1e12),
        "score_scale_length": rope.integer("original_max_position_embeddings", low=2),
    }


def write_ministral3(config, letters, fields):
    rope = fields["rope_parameters"]
    length = config.score_scale_length or config.original_length
    if rope.get("original_max_position_embeddings", length) != length:
        raise UserError(
            f"--score_scale_length={length} has no equivalent in a Ministral 3, whose scores are "
            f"scaled from its original length on: it needs {config.original_length}"
        )
    more = {
        "llama_4_scaling_beta": config.score_scale_coefficient,
        "original_max_position_embeddings": length,
    }
    scaling = fields["rope_scaling"]
    return {"rope_parameters": rope | more, "rope_scaling": scaling and scaling | more}


FAMILIES["ministral3"] = derive(
    MISTRAL,
    "Ministral3ForCausalLM",
    settings={
        "score_scale": ("llama4",),
        "score_scale_offset": (0,),
        "score_scale_layers": ("all",),
    },
    defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "sliding_window": None,
    },
    read=read_ministral3,
    write=write_ministral3,
)
FAMILIES["qwen2"] = QWEN2 = derive(
    LLAMA,
    "Qwen2ForCausalLM",
    settings={"bias": ("qkv",)},
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    patterns=("FW",),
)
FAMILIES["qwen3"] = derive(
    QWEN2,
    "Qwen3ForCausalLM",
    settings={"qk_norm": ("head",), "bias": ("none",)},
    defaults={"head_dim": 128},
    fixed={"attention_bias": False},
)


def rotated_layers(config, letters):
    """Return whether each layer has RoPE."""
    has_rope = not letters <= {"N", "S"}
    return [has_rope and config.uses_positions(layer) for layer in range(config.n_layer)]


def write_smollm3(config, letters, fields):
    """1 stands for a layer with RoPE, whatever the name says."""
    rotated = [int(is_rotated) for is_rotated in rotated_layers(config, letters)]
    return {"no_rope_layers": rotated, "no_rope_layer_interval": 4}


FAMILIES["smollm3"] = derive(
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


NO_GQA = {"num_key_value_heads": (), "head_dim": ()}
LAYER_NORM = {"norm": ("layernorm",), "bias": ("all",)}
# Its matrices are transposed, and a file may have its names or Llama's.
FAMILIES["gpt2"] = GPT2 = derive(
    LLAMA,
    "GPT2LMHeadModel",
    model={
        "transformer.wpe.weight": "pos.table",
        "transformer.wte": "embed",
        "transformer.ln_f": "norm",
        "lm_head": "head",
    },
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
    settings={**LAYER_NORM, "mlp": ("gelu", "gelu_exact"), "pos": ("learned",)},
    names={
        "num_hidden_layers": ("n_layer",),
        "num_attention_heads": ("n_head",),
        "hidden_size": ("n_embd",),
        "intermediate_size": ("n_inner",),
        "hidden_act": ("activation_function",),
        "rms_norm_eps": ("layer_norm_epsilon",),
        "max_position_embeddings": ("n_positions", "n_ctx"),
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
)

# Old files say su or yarn for longrope.
FAMILIES["phi3"] = derive(
    LLAMA,
    "Phi3ForCausalLM",
    layer={
        **PRE_NORMS,
        "self_attn.qkv_proj": "attention.q attention.k attention.v",
        "self_attn.o_proj": "attention.o",
        "mlp.gate_up_proj": "mlp.gate mlp.up",
        "mlp.down_proj": "mlp.down",
    },
    defaults={"rms_norm_eps": 1e-5},
    patterns=("F", "W"),
    partial_rope=True,
    rope_types={"default": "default", **dict.fromkeys(("longrope", "su", "yarn"), "longrope")},
)
FAMILIES["starcoder2"] = derive(
    LLAMA,
    "Starcoder2ForCausalLM",
    layer={**PRE_NORMS, **ATTENTION, "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
    settings={"norm": ("layernorm",), "mlp": ("gelu", "gelu_exact"), "bias": ("none", "all")},
    switches={"use_bias": ("bias", "all", "none")},
    names={"rms_norm_eps": ("norm_epsilon",)},
    defaults={
        "hidden_act": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-5,
        "use_bias": True,
        "tie_word_embeddings": True,
    },
    patterns=("F", "W"),
)
# StableLM-2
FAMILIES["stablelm"] = derive(
    LLAMA,
    "StableLmForCausalLM",
    settings={"norm": ("layernorm",), "bias": ("none", "qkv")},
    switches={"use_qkv_bias": ("bias", "qkv", "none")},
    names={"rms_norm_eps": ("layer_norm_eps",), "head_dim": ()},
    defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
    fixed={"qk_layernorm": False, "use_parallel_residual": False},
    partial_rope=True,
)
FAMILIES["seed_oss"] = derive(
    LLAMA,
    "SeedOssForCausalLM",
    settings={"bias": ("none", "qkv")},
    switches={"attention_bias": ("bias", "qkv", "none")},
    defaults={"attention_bias": True},
    fixed={"attention_out_bias": False, "mlp_bias": False},
)
NEOX_LAYER = {
    **PRE_NORMS,
    "attention.query_key_value": "attention.q attention.k attention.v",
    "attention.dense": "attention.o",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
FAMILIES["bloom"] = derive(
    GPT2,
    "BloomForCausalLM",
    model={"transformer.word_embeddings": "embed head", "transformer.ln_f": "norm"},
    layer={name.replace("attention.", "self_attention."): x for name, x in NEOX_LAYER.items()},
    folds={"transformer.word_embeddings": NORMED, "self_attention.query_key_value": BY_HEAD},
    settings={"mlp": ("gelu",), "pos": ("alibi",), "tie_embeddings": (False,)},
    names={
        "hidden_size": ("n_embed",),
        "intermediate_size": (),
        "hidden_act": (),
        "max_position_embeddings": ("seq_length",),
    },
    defaults={"max_position_embeddings": 2048},
    fixed={"apply_residual_connection_post_layernorm": False},
    read_only="the norm of BLOOM's embeddings became part of them at the import, and trained "
    "embeddings cannot be divided into the two again",
)
# post_attention_layernorm stands after attention here, and before the MLP in a Llama.
FAMILIES["olmo2"] = OLMO2 = derive(
    LLAMA,
    "Olmo2ForCausalLM",
    layer={
        **ATTENTION,
        **GATED_MLP,
        "post_attention_layernorm": "attention_post_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
    settings={"norm_position": ("post",), "qk_norm": ("all",)},
    defaults={"rms_norm_eps": 1e-5},
    fixed={"attention_bias": False},
)
FAMILIES["olmo3"] = derive(
    OLMO2,
    "Olmo3ForCausalLM",
    defaults={
        "rope_theta": 5e5,
        "rope_local_base_freq": 5e5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    fixed=OLMO2.fixed,
    patterns=("FW",),
    rope_by_kind=True,
)
# In a model with windows the layers without one have no positions either.
FAMILIES["exaone4"] = derive(
    OLMO2,
    "Exaone4ForCausalLM",
    settings={"qk_norm": ("head",)},
    defaults={"sliding_window": 4096, "sliding_window_pattern": 4},
    patterns=("F", "WN"),
)


def read_gemma(fields, settings):
    """In bfloat16 transformers rounds the factor of the embeddings, 25.298 to 25.25 for example."""
    scale = {"embed_scale": math.sqrt(settings["n_embd"])}
    if fields.get("query_pre_attn_scalar") is None:  # the first Gemma
        return scale
    scalar = fields.real("query_pre_attn_scalar", 1e-6, 1e9)
    return {**scale, "attn_scale": math.sqrt(settings["head_dim"] / scalar)}


# Of the first Gemma, files say another activation function than the one it was trained with.
FAMILIES["gemma"] = derive(
    LLAMA,
    "GemmaForCausalLM",
    folds=dict.fromkeys((*PRE_NORMS, "model.norm"), ONE_ADDED),
    settings={"mlp": ("geglu",)},
    embed_scale="root",
    names={"hidden_act": ()},
    defaults={"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    fixed={"attention_bias": False},
    read=read_gemma,
)


def write_gemma3(config, letters, fields):
    return {"query_pre_attn_scalar": config.head_dim}


GEMMA3_NORMS = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "attention_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
FAMILIES["gemma3_text"] = derive(
    LLAMA,
    "Gemma3ForCausalLM",
    layer={**GEMMA3_NORMS, **ATTENTION, **GATED_MLP},
    folds=dict.fromkeys(
        (*GEMMA3_NORMS, "self_attn.q_norm", "self_attn.k_norm", "model.norm"), ONE_ADDED
    ),
    settings={"norm_position": ("both",), "mlp": ("geglu",), "qk_norm": ("head",)},
    embed_scale="root",
    names={"hidden_act": ("hidden_activation",)},
    defaults={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
    },
    fixed={"attention_bias": False, "use_bidirectional_attention": False},
    patterns=("FW",),
    heads_divide=True,
    rope_by_kind=True,
    read=read_gemma,
    write=write_gemma3,
)
# Pythia, whose files call the head embed_out
FAMILIES["gpt_neox"] = derive(
    LLAMA,
    "GPTNeoXForCausalLM",
    model={"gpt_neox.embed_in": "embed", "gpt_neox.final_layer_norm": "norm", "lm_head": "head"},
    layer=NEOX_LAYER,
    layer_prefix="gpt_neox.layers.",
    folds={"attention.query_key_value": BY_HEAD},
    settings={**LAYER_NORM, "norm_position": ("parallel", "pre"), "mlp": ("gelu_exact", "gelu")},
    names={
        "rms_norm_eps": ("layer_norm_eps",),
        "rope_theta": ("rotary_emb_base",),
        "partial_rotary_factor": ("rotary_pct",),
        **NO_GQA,
    },
    defaults={
        "hidden_act": "gelu",
        "rms_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.25,
    },
    fixed={"attention_bias": True},
    switches={"use_parallel_residual": ("norm_position", "parallel", "pre")},
    partial_rope=True,
)


def read_mpt(fields, settings):
    if fields.get("softmax_scale") is None:
        return {}
    scale = fields.real("softmax_scale", 1e-12, 1e12)
    return {"attn_scale": scale * math.sqrt(settings["head_dim"])}


FAMILIES["mpt"] = derive(
    GPT2,
    "MptForCausalLM",
    model={"transformer.wte": "embed", "transformer.norm_f": "norm", "lm_head": "head"},
    layer={
        "norm_1": "attention_norm",
        "norm_2": "mlp_norm",
        "attn.Wqkv": "attention.q attention.k attention.v",
        "attn.out_proj": "attention.o",
        "ffn.up_proj": "mlp.up",
        "ffn.down_proj": "mlp.down",
    },
    layer_prefix="transformer.blocks.",
    folds=dict.fromkeys(("norm_1", "norm_2", "transformer.norm_f"), WITHOUT_BIAS),
    settings={"bias": ("none",), "mlp": ("gelu_exact",), "pos": ("alibi",)},
    names={
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "hidden_size": ("d_model",),
        "intermediate_size": (),
        "hidden_act": (),
        "max_position_embeddings": ("max_seq_len",),
    },
    defaults={"max_position_embeddings": 2048},
    fixed={
        "alibi": True,
        "alibi_bias_max": 8,
        "qk_ln": False,
        "prefix_lm": False,
        "no_bias": True,
        "logit_scale": None,
    },
    written={},
    read=read_mpt,
)


MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def read_granite(fields, settings):
    multipliers = {key: fields.real(key, 1e-12, 1e12) for key in MULTIPLIERS}
    return {
        "embed_scale": multipliers["embedding_multiplier"],
        "attn_scale": multipliers["attention_multiplier"] * math.sqrt(settings["head_dim"]),
    }


def write_granite(config, letters, fields):
    return MULTIPLIERS | {
        "embedding_multiplier": float(config.embed_scale),
        "attention_multiplier": config.attn_scale / math.sqrt(config.head_dim),
    }


FAMILIES["granite"] = GRANITE = derive(
    LLAMA,
    "GraniteForCausalLM",
    folds={
        "model.norm": "logits_scaling",
        "self_attn.o_proj": "residual_multiplier",
        "mlp.down_proj": "residual_multiplier",
        "shared_mlp.output_linear": "residual_multiplier",
    },
    embed_scale="any",
    defaults=MULTIPLIERS,
    fixed=LLAMA.fixed,
    read=read_granite,
    write=write_granite,
)


def read_granite_hybrid(fields, settings):
    kinds = fields.values.get("layer_types")
    if not isinstance(kinds, list) or not all(kind in ATTENTION_LAYERS for kind in kinds):
        raise UserError(
            f"{fields.file}: its layer_types are not attention alone, and Mamba layers are not "
            "computed here: choose a dense checkpoint"
        )
    has_rope = fields.values.get("position_embedding_type") == "rope"
    positions = {} if has_rope else {"pos": "nope", "extension": None}
    return {**read_granite(fields, settings), **positions}


def write_granite_hybrid(config, letters, fields):
    return {
        **write_granite(config, letters, fields),
        "position_embedding_type": None if "N" in letters else "rope",
        "layer_types": ["full_attention"] * config.n_layer,
    }


ATTENTION_LAYERS = ("attention", "full_attention")
# Granite 4 without experts and without Mamba layers
FAMILIES["granitemoehybrid"] = derive(
    GRANITE,
    "GraniteMoeHybridForCausalLM",
    layer={
        **PRE_NORMS,
        **ATTENTION,
        "shared_mlp.input_linear": "mlp.gate mlp.up",
        "shared_mlp.output_linear": "mlp.down",
    },
    names={"intermediate_size": ("shared_intermediate_size",)},
    defaults={"num_local_experts": 8},
    fixed={"attention_bias": False, "num_local_experts": 0},
    # transformers checks the sizes of Mamba layers also if there are none
    written={"attention_dropout": 0.0, "mamba_n_heads": 1},
    patterns=("F", "N"),
    read=read_granite_hybrid,
    write=write_granite_hybrid,
)


def read_granite_swa(fields, settings):
    """layer_rope_theta has a base for each layer, and 0 for those without positions."""
    values = read_granite(fields, settings)
    if fields.get("layer_types") is None:  # which layers have the window
        raise fields.wrong_value("layer_types", "a list with the kind of each layer")
    if fields.get("layer_rope_theta") is None:
        return values
    pattern = settings["layer_pattern"]
    letters = ""
    found = {"F": set(), "W": set()}
    for layer, base in enumerate(fields.reals("layer_rope_theta", settings["n_layer"], 0, 1e12)):
        letter = pattern[layer % len(pattern)]
        found[letter] |= {float(base)} - {0.0}
        letters += letter if base else {"F": "N", "W": "S"}[letter]
    if max(map(len, found.values())) > 1:
        raise UserError(
            f"{fields.file}: layer_rope_theta has several bases in layers of one kind, and here "
            "layers with and without a window have one each: choose another checkpoint"
        )
    if not any(found.values()):
        return {**values, "pos": "nope", "extension": None}
    (full,), (local,) = (found["F"] or found["W"]), (found["W"] or found["F"])
    local_base = local if full != local else 0.0
    return {**values, "layer_pattern": letters, "rope_base": full, "rope_local_base": local_base}


def write_granite_swa(config, letters, fields):
    base = fields["rope_theta"]
    bases = [base if is_rotated else 0 for is_rotated in rotated_layers(config, letters)]
    window = fields["sliding_window"] or 128  # transformers wants one, also if no layer has it
    return {
        **write_granite(config, letters, fields),
        "layer_rope_theta": bases,
        "sliding_window": window,
    }


FAMILIES["granite_swa"] = derive(
    GRANITE,
    "GraniteSWAForCausalLM",
    layer={**LLAMA.layer, "self_attn.sinks": "attention.sink_scores"},
    settings={"sink_scores": (True,)},
    defaults={"sliding_window": 128, "tie_word_embeddings": True},
    fixed={**LLAMA.fixed, "attention_bias": False},
    patterns=("FWNS",),
    read=read_granite_swa,
    write=write_granite_swa,
)

# Why other well-known model types cannot be imported: the end of "it is of model_type X, which",
# and the types.
REASONS = {
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
    "has an activation function with weights": "apertus",
}
UNSUPPORTED = {name: reason for reason, names in REASONS.items() for name in names.split()}
