"""What hf_import.py and hf_export.py share of Hugging Face's format.

The fields of a config.json with transformers' defaults, and the names of the tensors.
"""

import json
from typing import NamedTuple

from nanolong.errors import UserError

MAX_JSON_BYTES = 1 << 28

# The defaults of transformers for what a config.json may leave out, by model_type.
LLAMA_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "sliding_window": None,
    "rope_theta": 1e4,
}
CONFIG_DEFAULTS = {
    "llama": LLAMA_DEFAULTS,
    "mistral": {
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "smollm3": {
        **LLAMA_DEFAULTS,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "no_rope_layer_interval": 4,
    },
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "n_positions": 1024,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
}

# Why other well-known model types cannot be imported: the end of "it is of model_type X, which".
UNSUPPORTED = {
    "gpt_neox": "computes attention and MLP in parallel",
    "gptj": "computes attention and MLP in parallel",
    "phi": "computes attention and MLP in parallel",
    "falcon": "computes attention and MLP in parallel",
    "cohere": "computes attention and MLP in parallel",
    "bloom": "combines ALiBi with a norm of its embeddings",
    "mpt": "combines ALiBi with LayerNorms without biases",
    "opt": "has ReLU and learned positions that are offset by two",
    "gpt_neo": "does not scale its attention scores",
    "gemma": "scales its embeddings and adds one to the weights of its norms",
    "gemma2": "caps its attention scores and adds one to the weights of its norms",
    "gemma3_text": "adds one to the weights of its norms",
    "phi3": "fuses its matrices",
    "olmo": "has norms without weights",
    "olmo2": "has its norms after attention and MLP",
    "granite": "multiplies its residuals and logits",
    "mixtral": "is a mixture of experts",
    "qwen2_moe": "is a mixture of experts",
    "qwen3_moe": "is a mixture of experts",
    "gpt_oss": "is a mixture of experts",
    "llama4_text": "is a mixture of experts",
    "deepseek_v3": "has latent attention and a mixture of experts",
    "t5": "is an encoder-decoder",
    "bert": "is an encoder",
    "mamba": "has no attention",
}

# The longrope factor of a pair that is not rotated: its angle vanishes in float32 at any position.
UNROTATED = 1e30


def read_json(file):
    """Read a JSON object. Raises UserError, also for a file that is unreasonably large."""
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is larger than 256 MB")
        values = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}: {error}): download it again"
        ) from None
    return values


class ConfigFields:
    """The fields of a config.json. Each method returns a value of the type that it names.

    Raises UserError for any other value, and for one out of range.
    """

    def __init__(self, file, values, defaults):
        self.file = file
        self.values = values
        self.defaults = defaults

    def get(self, key):
        """Return a field as it stands, by default transformers' default."""
        return self.values.get(key, self.defaults.get(key))

    def integer(self, key, low=1, high=1 << 30):
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong_value(key, f"an integer from {low} to {high}")
        return value

    def real(self, key, low, high):
        value = self.get(key)
        # not bool, which is an int
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.wrong_value(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def wrong_value(self, key, expected):
        return UserError(
            f"{self.file}: {key} is {self.get(key)!r}, where {expected} is expected: "
            "download it again"
        )

    def optional_integer(self, key):
        return None if self.get(key) is None else self.integer(key)

    def flag(self, key):
        value = self.values.get(key, self.defaults.get(key, False))
        if not isinstance(value, bool):
            raise self.wrong_value(key, "true or false")
        return value

    def list_per_layer(self, key, n_layer, choices):
        """Return a list with one of the choices for each layer, or None if there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        whole = isinstance(value, list) and len(value) >= n_layer
        if not whole or not all(choice in choices for choice in value):
            names = " or ".join(str(choice) for choice in choices)
            raise UserError(
                f"{self.file}: {key} does not name {names} for each of the {n_layer} layers: "
                "download it again"
            )
        return value[:n_layer]

    def require(self, key, choices):
        """Raise UserError unless a field has one of these values."""
        value = self.get(key)
        if value not in choices:
            raise UserError(
                f"{self.file}: {key} is {value!r}, and only {choices[0]!r} is supported: "
                "choose another checkpoint"
            )

    def require_off(self, key):
        if self.values.get(key):
            raise UserError(
                f"{self.file}: {key} is on, which is not supported: choose another checkpoint"
            )


# -----------------------------------------------------------------------------
# Tensors

# The tables below: Hugging Face's name -> our parameters, which the tensor holds one after the
# other along its first dimension.
LLAMA_MODEL = {
    "model.embed_tokens.weight": ["embed.weight"],
    "model.norm.weight": ["norm.weight"],
}
LLAMA_LAYER = {
    "input_layernorm.weight": ["attention_norm.weight"],
    "post_attention_layernorm.weight": ["mlp_norm.weight"],
    "self_attn.q_proj.weight": ["attention.q.weight"],
    "self_attn.k_proj.weight": ["attention.k.weight"],
    "self_attn.v_proj.weight": ["attention.v.weight"],
    "self_attn.o_proj.weight": ["attention.o.weight"],
    "mlp.gate_proj.weight": ["mlp.gate.weight"],
    "mlp.up_proj.weight": ["mlp.up.weight"],
    "mlp.down_proj.weight": ["mlp.down.weight"],
}
# Qwen2 has these too
QKV_BIAS = {
    "self_attn.q_proj.bias": ["attention.q.bias"],
    "self_attn.k_proj.bias": ["attention.k.bias"],
    "self_attn.v_proj.bias": ["attention.v.bias"],
}
# Qwen3 has these too
QK_NORM = {
    "self_attn.q_norm.weight": ["attention.q_norm.weight"],
    "self_attn.k_norm.weight": ["attention.k_norm.weight"],
}

GPT2_MODEL = {
    "transformer.wte.weight": ["embed.weight"],
    "transformer.wpe.weight": ["pos.table"],
    "transformer.ln_f.weight": ["norm.weight"],
    "transformer.ln_f.bias": ["norm.bias"],
}
GPT2_LAYER = {
    "ln_1.weight": ["attention_norm.weight"],
    "ln_1.bias": ["attention_norm.bias"],
    "ln_2.weight": ["mlp_norm.weight"],
    "ln_2.bias": ["mlp_norm.bias"],
    "attn.c_attn.weight": ["attention.q.weight", "attention.k.weight", "attention.v.weight"],
    "attn.c_attn.bias": ["attention.q.bias", "attention.k.bias", "attention.v.bias"],
    "attn.c_proj.weight": ["attention.o.weight"],
    "attn.c_proj.bias": ["attention.o.bias"],
    "mlp.c_fc.weight": ["mlp.up.weight"],
    "mlp.c_fc.bias": ["mlp.up.bias"],
    "mlp.c_proj.weight": ["mlp.down.weight"],
    "mlp.c_proj.bias": ["mlp.down.bias"],
}
# GPT-2 stores its matrices as (in, out), where torch's Linear has (out, in).
GPT2_TRANSPOSED = {
    "attn.c_attn.weight",
    "attn.c_proj.weight",
    "mlp.c_fc.weight",
    "mlp.c_proj.weight",
}


class HFTensor(NamedTuple):
    """What a tensor of a Hugging Face checkpoint holds."""

    # names of ours, concatenated along the first dimension
    parameters: list
    # whether the tensor is the transpose of that
    transposed: bool = False


def tensor_layout(config):
    """Return Hugging Face's names of all tensors of a model: name -> HFTensor."""
    if config.norm == "layernorm":
        layout = gpt2_layout(config)
    else:
        layout = llama_layout(config)
    if not config.tie_embeddings:
        layout["lm_head.weight"] = HFTensor(["head.weight"])
    return layout


def llama_layout(config):
    """Return the layout of Llama and the architectures of its shape."""
    layer_table = dict(LLAMA_LAYER)
    if config.bias == "qkv":
        layer_table |= QKV_BIAS
    if config.qk_norm != "none":
        layer_table |= QK_NORM
    layout = {name: HFTensor(parameters) for name, parameters in LLAMA_MODEL.items()}
    for layer in range(config.n_layer):
        for name, parameters in layer_table.items():
            ours = [f"blocks.{layer}.{parameter}" for parameter in parameters]
            layout[f"model.layers.{layer}.{name}"] = HFTensor(ours)
    return layout


def gpt2_layout(config):
    """Return the layout of GPT-2."""
    layout = {name: HFTensor(parameters) for name, parameters in GPT2_MODEL.items()}
    for layer in range(config.n_layer):
        for name, parameters in GPT2_LAYER.items():
            ours = [f"blocks.{layer}.{parameter}" for parameter in parameters]
            layout[f"transformer.h.{layer}.{name}"] = HFTensor(ours, name in GPT2_TRANSPOSED)
    return layout


def stored_shape(tensor, shapes):
    """Return the shape that an HFTensor has, from the shapes of our parameters."""
    parts = [shapes[parameter] for parameter in tensor.parameters]
    shape = (sum(part[0] for part in parts), *parts[0][1:])
    return shape[::-1] if tensor.transposed else shape


def is_redundant(name, tie_embeddings):
    """Return whether a tensor is one that no model needs: a computed table, or a tied head."""
    if name == "lm_head.weight":
        return tie_embeddings
    return name.endswith(("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))
