"""What interchange.py compares: architectures and RoPE types of transformers, and our models."""

LENGTH = 64  # the original context length of every model
# Beyond the context length, and a multiple of a quarter of it, which is where our dynamic scales
# are the same as transformers'.
N_TOKENS = 144
VOCAB_SIZE = 131

# -----------------------------------------------------------------------------
# transformers

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
}
SMOLLM3_TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}

# name -> model_type, and what differs from SHAPE
ARCHITECTURES = {
    "Llama": ("llama", {}),
    "Llama, wide heads, no GQA": (
        "llama",
        {"head_dim": 16, "num_key_value_heads": 6, "vocab_size": 127},
    ),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, window": ("mistral", {"sliding_window": 21}),
    "Qwen2": ("qwen2", {}),
    "Qwen2, window in some layers": ("qwen2", QWEN2_WINDOW),
    "Qwen3": ("qwen3", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1], **SMOLLM3_TOKENS}),
    "SmolLM3, no RoPE at all": ("smollm3", {"no_rope_layers": [0, 0, 0], **SMOLLM3_TOKENS}),
}

ORIGINAL = {"original_max_position_embeddings": LENGTH}
LONG_FACTORS = [1.0, 2.5, 4.0, 5.5, 7.0, 8.5, 10.0, 11.5]
SHORT_FACTORS = [1.0 + 0.1 * i for i in range(8)]
# name -> rope_parameters (or rope_scaling, in the older form), and max_position_embeddings
ROPES = {
    "default": ({"rope_type": "default", "rope_theta": 5e5}, LENGTH),
    "linear": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, LENGTH),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, LENGTH),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "rope_theta": 1e4},
        4 * LENGTH,
    ),
    "yarn, all options": (
        {
            "rope_type": "yarn",
            "factor": 4.0,
            **ORIGINAL,
            "rope_theta": 1e4,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
            "attention_factor": 1.05,
        },
        4 * LENGTH,
    ),
    "yarn, old form, mscale": (
        {"type": "yarn", "factor": 4.0, **ORIGINAL, "mscale": 0.7, "mscale_all_dim": 0.4},
        4 * LENGTH,
    ),
    "longrope": (
        {
            "rope_type": "longrope",
            **ORIGINAL,
            "rope_theta": 1e4,
            "short_factor": SHORT_FACTORS,
            "long_factor": LONG_FACTORS,
        },
        4 * LENGTH,
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            **ORIGINAL,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_theta": 5e5,
        },
        4 * LENGTH,
    ),
}

# -----------------------------------------------------------------------------
# Our own models: name -> settings of GPTConfig, and None or an extension method with its options

GPT2 = {
    "norm": "layernorm",
    "mlp": "gelu",
    "bias": "all",
    "pos": "learned",
    "block_size": 160,
}
YARN_OPTIONS = {"beta_fast": 8, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.05}
TWO_TABLES = {"long_factor": [1.0, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
# models that can be exported
OURS = {
    "rope": ({}, None),
    "rope, GQA, QK-norm": ({"n_kv_head": 2, "qk_norm": True}, None),
    "rope, biases of q, k and v": ({"bias": "qkv"}, None),
    "rope, window": ({"window": 21}, None),
    "rope, NoPE in every second layer, window in the others": (
        {"window": 21, "layer_pattern": "WN"},
        None,
    ),
    "rope, layers of all four kinds": (
        {"n_layer": 4, "window": 21, "layer_pattern": "FWNS"},
        None,
    ),
    "rope, scores times 1.3": ({"attn_scale": 1.3}, None),
    "rope in half of a head": ({"rope_fraction": 0.5}, None),
    "rope in half of a head, QK-norm, yarn": (
        {"rope_fraction": 0.5, "qk_norm": True},
        ("yarn", {}),
    ),
    "heads that do not divide the embedding": ({"n_embd": 50, "head_dim": 8}, None),
    "untied": ({"tie_embeddings": False}, None),
    "nope": ({"pos": "nope"}, None),
    "nope, QK-norm": ({"pos": "nope", "qk_norm": True}, None),
    "nope, scale": ({"pos": "nope"}, ("scale", {"scale": 1.2})),
    "GPT-2": (GPT2, None),
    "GPT-2, scores times 1.3, untied": (
        {**GPT2, "attn_scale": 1.3, "tie_embeddings": False},
        None,
    ),
    "GPT-2, pi": (GPT2, ("pi", {})),
    "none": ({}, ("none", {})),
    "pi": ({}, ("pi", {})),
    "ntk": ({}, ("ntk", {})),
    "ntk-parts": ({}, ("ntk-parts", {})),
    "ntk-parts, ramp=paper": ({}, ("ntk-parts", {"ramp": "paper"})),
    "yarn": ({}, ("yarn", {})),
    "yarn, ramp=paper": ({}, ("yarn", {"ramp": "paper"})),
    "yarn, options": ({"rope_base": 5e5}, ("yarn", YARN_OPTIONS)),
    "abf": ({}, ("abf", {})),
    "llama3": ({}, ("llama3", {})),
    "ntk-lceg": ({}, ("ntk-lceg", {})),
    "dynamic-ntk at a fixed length": ({}, ("dynamic-ntk", {"length": 200.0})),
    "resonance of yarn": ({}, ("resonance", {})),
    "resonance of pi": ({}, ("resonance", {"of": "pi"})),
    "longrope": ({}, ("longrope", {"long_factor": [1, 2, 3.5, 4]})),
    "longrope, two tables": ({}, ("longrope", TWO_TABLES)),
    "drope": ({}, ("drope", {"scale": 1.1})),
    "drope, QK-norm": ({"qk_norm": True}, ("drope", {"scale": 1.1})),
}

REFUSED_SCHEMES = (
    "learned",
    "sinusoidal",
    "shaw",
    "nezha",
    "xl",
    "t5",
    "alibi",
    "kerple",
    "kerple-power",
    "sandwich",
)
REFUSED_METHODS = (
    "dynamic-pi",
    "dynamic-ntk",
    "dynamic-yarn",
    "ntk-frozen",
    "lm-infinite",
    "self-extend",
)
# models that cannot be exported
REFUSED = {
    **{pos: ({"pos": pos}, None) for pos in REFUSED_SCHEMES},
    **{method: ({}, (method, {})) for method in REFUSED_METHODS},
    "window and sinks": ({"window": 21, "sinks": 2}, None),
    "random positions": ({"random_positions": 512}, None),
    "NoPE in every second layer, QK-norm": ({"layer_pattern": "FN", "qk_norm": True}, None),
    "NoPE in every second layer, biases": ({"layer_pattern": "FN", "bias": "qkv"}, None),
    "nope, biases of q, k and v": ({"pos": "nope", "bias": "qkv"}, None),
    "QK-norm, biases of q, k and v": ({"qk_norm": True, "bias": "qkv"}, None),
    "LayerNorm": ({"norm": "layernorm"}, None),
    "GELU": ({"mlp": "gelu"}, None),
    "biases in all linear layers": ({"bias": "all"}, None),
    "GPT-2's layers with rope": ({**GPT2, "pos": "rope"}, None),
    "GPT-2 with a window": ({**GPT2, "window": 21}, None),
    "GPT-2 with GQA and QK-norm": ({**GPT2, "n_kv_head": 2, "qk_norm": True}, None),
    "longrope, two tables, in half of a head": (
        {"rope_fraction": 0.5},
        ("longrope", {"long_factor": [1.0, 2.0], "short_factor": [1.0, 1.1]}),
    ),
}

# -----------------------------------------------------------------------------
# What is not imported: the config.json of a Llama, and changes of it

BASE_CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": LENGTH,
}
BAD_SETTINGS = [
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("quantization_config", {"bits": 4}),
    ("vision_config", {"depth": 2}),
    ("hidden_size", "48"),
    ("hidden_size", -48),
    ("num_hidden_layers", 2.5),
    ("num_hidden_layers", 60000),
    ("vocab_size", 1 << 29),
    ("num_attention_heads", True),
    ("rms_norm_eps", float("nan")),
    ("tie_word_embeddings", "yes"),
    ("partial_rotary_factor", 0.5),
    ("rope_scaling", {"rope_type": "spiral"}),
    ("rope_scaling", {"rope_type": ["yarn"]}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 0.5}),
    ("rope_scaling", {"rope_type": "yarn", "factor": "4"}),
    ("rope_scaling", {"rope_type": "llama3", "factor": float("inf")}),
    (
        "rope_scaling",
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0],
            "long_factor": [1.0] * 4,
        },
    ),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_scaling", [1]),
    (
        "rope_scaling",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 1.0,
        },
    ),
    ("num_key_value_heads", 4),
    ("head_dim", 7),
]
