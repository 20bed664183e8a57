"""A model of transformers, as its config and tensors, becomes ours, and back.

This pair is the one form of whatever is read and written: a folder of Hugging Face (folder.py), a
GGUF file (gguf_model.py). In it tensors have transformers' names of today.
"""

import dataclasses
import math
import re

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from nanolong import parallel, run
from nanolong.errors import UserError, require
from nanolong.hub.families import (
    ACTIVATIONS,
    FAMILIES,
    FIELDS,
    has_positions,
    head_dim,
    letter,
    tensor_layout,
)
from nanolong.hub.rope import read_rope, write_rope

# Settings that an export computes or may leave out. Every other one has a value that its family
# names, or its default: a new one is refused until an export computes it.
FREE = set(FIELDS) - {"mlp"} | {"embed_scale", "attn_scale", "dropout", "extension"}
FREE |= {"rope_base", "rope_local_base", "rope_fraction", "p_rope", "window", "layer_pattern"}

# BLOOM's norm of the embeddings became part of them. An ERNIE is a Llama with its rows in another
# order, and a Llama 4 a Qwen 3: more programs read those, and scale their RoPE.
NOT_WRITTEN = ("bloom", "ernie4_5", "llama4_text")

# -----------------------------------------------------------------------------
# Import


def import_model(GPT, c, tensors, context_length=0):
    """Return our model of a config of transformers and its tensors, name -> tensor.

    A parameter shares the memory of its tensor, and has its dtype, unless it is computed.
    context_length: the user's, in tokens, or 0. Raises UserError for settings without an
    equivalent.
    """
    family = FAMILIES[c.model_type]
    stored = dict(tensors)
    if c.model_type == "bloom":
        fold_bloom(stored, c)
    if c.model_type == "gpt2":
        fold_gpt2(stored, c)
    settings = read_settings(c, family, stored)
    if context_length:
        settings |= change_length(c, settings, context_length)
    model = parallel.build_without_weights(GPT, GPT.config_class(**settings))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if settings["tie_embeddings"]:
        del stored["lm_head.weight"]
    weights = {}
    for name, ours, fold in tensor_layout(family, model.config.n_layer, shapes):
        if name not in stored and "norm." in ours[0]:
            # norms have no biases in an MPT and a Cohere 2, and no weights on queries in a Llama 4
            kind = float(name.endswith("weight"))
            weights |= {one: torch.full(shapes[one], kind) for one in ours}
            continue
        x = fold.read(stored.pop(name), c)
        require(
            x.isfinite().all(),
            f"{name} has values that are not finite, so the model computes nothing: download it "
            "again, or choose another checkpoint",
        )
        # fused matrices have the rows of several of ours
        n_rows = [shapes[one][0] for one in ours]
        weights |= zip(ours, x.split(n_rows), strict=True)
    require(
        not stored,
        f"there is no parameter here for {', '.join(list(stored)[:3])}: choose another checkpoint",
    )
    # the tensors become its parameters, so that no second copy of them is made
    run.load_weights(model, weights, None)
    return model.eval().requires_grad_(False)


def fold_bloom(stored, c):
    """BLOOM's embeddings are normed, which unties the head."""
    name = "transformer.word_embeddings"
    plain = stored[f"{name}.weight"].float()
    norm = [stored.pop(f"{name}_layernorm.{x}").float() for x in ("weight", "bias")]
    stored[f"{name}.weight"] = F.layer_norm(plain, norm[0].shape, *norm, c.layer_norm_epsilon)
    stored["lm_head.weight"] = plain


def fold_gpt2(stored, c):
    """Factors of a layer's scores, which some GPT-2 have, become part of its queries."""
    for layer in range(c.num_hidden_layers):
        factor = 1 / (layer + 1) if c.scale_attn_by_inverse_layer_idx else 1.0
        factor *= 1.0 if c.scale_attn_weights else math.sqrt(head_dim(c))
        if factor == 1:
            continue
        for kind in ("weight", "bias"):
            name = f"transformer.h.{layer}.attn.c_attn.{kind}"
            # queries are the first columns; the comparison needs the original
            stored[name] = stored[name].float().clone()
            stored[name][..., : c.hidden_size] *= factor


def read_settings(c, family, stored):
    """Return the settings of GPTConfig for a config; stored: name -> tensor."""
    fields = FIELDS | family.fields
    # the settings of the family, then those in its config
    settings = {ours: choices[0] for ours, choices in family.has.items()}
    for ours, theirs in fields.items():
        value = getattr(c, theirs, None) if theirs else None
        if value is not None:
            settings[ours] = value
    if fields["mlp"]:
        # an unknown one is refused as a setting of ours
        known = [mlp for mlp in family.has["mlp"] if settings["mlp"] in ACTIVATIONS[mlp]]
        settings["mlp"] = known[0] if known else settings["mlp"]
    settings.setdefault("mlp_dim", 4 * c.hidden_size)
    settings.setdefault("block_size", 2048)
    settings["head_dim"] = settings.get("head_dim") or head_dim(c)
    if settings["tie_embeddings"]:
        # the head can be another tensor, whatever a config says
        embedding = next(module for module, held in family.top.items() if held == "embed")
        tied = torch.equal(stored["lm_head.weight"], stored[f"{embedding}.weight"])
        settings["tie_embeddings"] = tied
    if settings["pos"] == "rope":
        settings |= read_layers(c, family)
    return settings | family.read(c)


def change_length(c, settings, length):
    """Return the settings of another context length than the one that the files say."""
    extension = settings.get("extension")
    require(
        settings["pos"] != "learned",
        f"--context_length={length} cannot be, because there is a table of "
        f"{settings['block_size']} positions: leave it out, and extend by extend.py --method=pi",
    )
    is_known = "original_max_position_embeddings" in str(c.rope_parameters)
    if extension and extension["method"] == "pi" and not is_known:
        extension["original_length"] = max(1, round(length / extension["factor"]))
    return {"block_size": length}


def read_layers(c, family):
    """Return the settings of GPTConfig for RoPE and for layers that differ from one another."""
    n_layer = c.num_hidden_layers
    window = getattr(c, "sliding_window", None) if "W" in "".join(family.patterns) else None
    usual = ["sliding_attention" if window else "full_attention"] * n_layer
    kinds = {"full_attention": False, "sliding_attention": (window or 0) > 0}
    if (getattr(c, "attention_chunk_size", None) or 0) >= c.max_position_embeddings:
        kinds["chunked_attention"] = False  # the text is one chunk
    types = getattr(c, "layer_types", None) or usual
    others = ", ".join(sorted(set(types) - kinds.keys()))
    problem = f"its layers of the type {others} are not computed here"
    require(not others, f"{problem}: choose another checkpoint")
    uses_window = [kinds[kind] for kind in types]
    bases = getattr(c, "layer_rope_theta", None)
    uses_rope = (getattr(c, "no_rope_layers", None) or bases or [1] * n_layer)[:n_layer]
    if c.model_type == "cohere2":
        uses_rope = uses_window
    elif getattr(c, "position_embedding_type", "rope") != "rope":
        uses_rope = [0] * n_layer
    settings = read_rope(c, uses_window)
    settings["window"] = window if any(uses_window) else 0
    if not any(uses_rope):
        settings |= {"pos": "nope", "extension": None}
        uses_rope = [1] * n_layer
    word = "".join(letter(*kind) for kind in zip(uses_rope, uses_window, strict=True))
    # the shortest beginning that gives the word when it is repeated
    period = next(n for n in range(1, n_layer + 1) if word.startswith(word[n:]))
    return settings | {"layer_pattern": word[:period]}


# -----------------------------------------------------------------------------
# Export


def export_model(model):
    """Return transformers' config of our model, and its tensors: name -> tensor.

    Raises UserError for a model that has no equivalent there.
    """
    allowed = {name: x for name, x in FAMILIES.items() if name not in NOT_WRITTEN}
    c, factors = write_config(model, choose_family(model, allowed))
    return c, export_tensors(model, c, factors)


def choose_family(model, allowed):
    """Return the model_type of the first family that a model is; the family of its import is first.

    allowed: model_type -> Family. Raises UserError with the
    nearest family, and the settings that it would need.
    """
    imported = model.meta.get("family")
    found = {}
    for name, family in sorted(allowed.items(), key=lambda item: item[0] != imported):
        missing = find_obstacles(model, name, family)
        if not missing:
            return name
        found[name] = missing
    nearest = min(found, key=lambda name: len(found[name]))
    missing = found[nearest]
    raise UserError(
        f"{' with '.join(missing)} has no equivalent among the models written for transformers: "
        f"to be a {nearest}, which is nearest, it needs {', '.join(missing.values())}"
    )


def find_obstacles(model, name, family):
    """Return the settings of a model that a family lacks: setting -> the value it would need."""
    config = model.config
    fields = [x for x in dataclasses.fields(config) if x.name not in FREE]
    allowed = {x.name: (x.default,) for x in fields} | family.has
    allowed["embed_scale"] = (family.embed_scale(config),)
    scale = config.read_query_scale()
    if scale and (scale.kind, scale.nope_only, scale.offset) == ("llama4", False, 0):
        if "llama4" in allowed["query_scale"]:  # with any length and coefficient
            allowed["query_scale"] = (config.query_scale,)
    if "N" in "".join(family.patterns):
        allowed["pos"] += ("nope",)
    # a family without the field has this value
    usual = {
        "head_dim": config.n_embd // config.n_head,
        "n_kv_head": config.n_head,
        "mlp_dim": 4 * config.n_embd,
    }
    without = [setting for setting in usual if (FIELDS | family.fields)[setting] is None]
    allowed |= {setting: (usual[setting],) for setting in without}
    positions = [has_positions(config, layer) for layer in range(config.n_layer)]
    if not family.partial and any(positions):
        allowed["rope_fraction"] = (1.0,)
    found = {}
    for setting, choices in allowed.items():
        value = getattr(config, setting)
        is_near = type(value) is float and math.isclose(value, choices[0], rel_tol=1e-6)
        if value not in choices and not is_near:
            found[f"--{setting}={value}"] = f"--{setting}={choices[0]}"
    # kinds of layers, whatever their order
    kinds = {letter(has, config.uses_window(layer)) for layer, has in enumerate(positions)}
    if not any(kinds <= set(pattern) for pattern in family.patterns):
        needed = " or ".join(family.patterns)
        found[f"layers of the kinds {''.join(sorted(kinds))}"] = f"--layer_pattern={needed}"
    if config.n_embd % config.n_head and name in ("llama", "smollm3", "gemma3_text"):
        found[f"--n_head={config.n_head}"] = f"an --n_head that divides {config.n_embd}"
    if getattr(model.scheme, "local", None) and kinds >= {"F", "W"} and not family.by_kind:
        found["RoPE that differs in layers with a window"] = "--rope_local_base=0 and --layers=all"
    return found


def write_config(model, name):
    """Return transformers' config of a model, and its factors of cos and sin by uses_window()."""
    config, family = model.config, FAMILIES[name]
    values = dataclasses.asdict(config) | {"mlp": ACTIVATIONS[config.mlp][0]}
    fields = {theirs: values[ours] for ours, theirs in (FIELDS | family.fields).items() if theirs}
    # the classes' defaults are Llama's or another model's
    fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    factors = {}
    if "rope" in family.has["pos"]:
        ropes, factors = write_ropes(model, family)
        some = next(iter(ropes.values()), {"rope_type": "default", "rope_theta": 1e4})
        full, local = ropes.get(False, some), ropes.get(True, some)
        fields["rope_parameters"] = some
        if family.by_kind:
            fields["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
            # transformers looks for it here
            fields["rope_parameters"] |= {k: x for k, x in full.items() if k == "truncate"}
        elif some["rope_type"] == "linear":
            # transformers has the original length here, and other programs multiply it
            fields["max_position_embeddings"] = config.original_length
    if name == "ministral3":
        # RoPE is extended from the same length there
        scale = config.read_query_scale()
        some["llama_4_scaling_beta"] = scale.coefficient
        some["original_max_position_embeddings"] = scale.length or config.original_length
    return AutoConfig.for_model(name, **fields | family.write(config)), factors


def write_ropes(model, family):
    """Return rope_parameters and the factor of cos and sin of layers, each by uses_window()."""
    config = model.config
    ropes, factors = {}, {}
    for layer in range(config.n_layer):
        has_window = config.uses_window(layer)
        if has_window in ropes or not has_positions(config, layer):
            continue
        scheme = model.scheme.of_layer(layer)
        own = scheme.config
        if scheme is not model.scheme:
            # it has the base of its layers, and maybe the extension of the model
            extends_all = config.extension and "layers" not in config.extension
            own = dataclasses.replace(own, block_size=config.block_size)
            own.extension = config.extension if extends_all else None
        ropes[has_window], factors[has_window] = write_rope(own, scheme, family)
    return ropes, factors


def export_tensors(model, c, factors):
    """Return the tensors of a config of transformers: name -> tensor.

    factors: attention factors of cos and sin, by uses_window().
    """
    weights = dict(model.named_parameters())
    if model.config.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    tensors = {}
    for theirs, ours, fold in tensor_layout(FAMILIES[c.model_type], model.config.n_layer, weights):
        parts = [scale_queries(model, n, weights[n].detach(), factors, c) for n in ours]
        joined = torch.cat(parts) if len(parts) > 1 else parts[0]
        tensors[theirs] = fold.write(joined, c).contiguous()
    if c.model_type in ("mpt", "cohere2"):
        # whose norms have no biases
        tensors = {name: x for name, x in tensors.items() if not name.endswith("bias")}
    return tensors


def scale_queries(model, name, x, factors, c):
    """Return a parameter with the factors of the scores for which transformers has no setting.

    Those become part of the queries' weights, whose first channels are rotated.
    """
    config = model.config
    match = re.fullmatch(r"blocks\.(\d+)\.attention\.(q_norm|q)\.(weight|bias)", name)
    if not match or (match[2] == "q") != (config.qk_norm == "none"):
        return x
    layer = int(match[1])
    scheme = model.scheme_of(layer)
    scale = torch.full((config.head_dim,), float(scheme.extra_scale))
    if not hasattr(c, "attention_multiplier"):
        scale *= config.attn_scale
    if config.pos == "rope" and config.uses_positions(layer):
        # queries and keys have both factors; DroPE's is all that is left of it
        factor = scheme.of_layer(layer).attention_factor
        scale[: scheme.rotary_dim] *= (factor / factors.get(config.uses_window(layer), 1.0)) ** 2
    if (scale == 1).all():
        return x
    heads = x.float().unflatten(0, (-1, config.head_dim))  # (H, D) or (H, D, C)
    return (heads * scale.view(-1, *[1] * (x.dim() - 1))).flatten(0, 1)
