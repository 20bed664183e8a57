"""Extend a checkpoint where it lies: RoPE is in its settings, so no tensor is read or written."""

import copy
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import rope_scaling
from nanolong.errors import UserError, require
from nanolong.hub import rope
from nanolong.hub.folder import WEIGHTS, check_absent, check_folder, find_folder, place_file, whole
from nanolong.hub.verify import as_user_error
from nanolong.strict_json import replace_text

# keys that say how RoPE is scaled; any other key stays
SCALING = {"rope_type", "type", "factor", rope.ORIGINAL, "attention_factor"}
SCALING |= {"short_mscale", "long_mscale"}.union(*rope.OPTIONS.values())
WINDOWS = {"sliding_attention", "chunked_attention"}


def extend_to(source, target, method, factor, options):
    """Write a folder or a GGUF file of a longer context. Raises UserError, with nothing written."""
    problem = f"no file has method {method!r} in its settings"
    repair = f"give --method={', '.join(rope.TYPES)}, or {rope.HERE}"
    if method in rope_scaling.ATTENTION:
        repair += ", or for transformers nanolong.hub.attention (docs/checkpoints.md)"
    require(method in rope.TYPES, f"{problem}: {repair}")
    known = set(rope_scaling.OPTIONS[method]) - {"ramp", "length"}
    problem = f"no file has {', '.join(sorted(options.keys() - known))} for method {method!r}"
    names = ", ".join(sorted(known)) or "no options"
    require(known >= options.keys(), f"{problem}: give {names}, or {rope.HERE}")
    if Path(source).is_file():
        from nanolong.hub import gguf_extend  # needs the gguf package, and folders do not

        gguf_extend.extend_file(Path(source), Path(target), method, factor, options)
    else:
        extend_folder(str(source), Path(target), method, factor, options)


# -----------------------------------------------------------------------------
# A folder


def extend_folder(source, target, method, factor, options):
    """Write a folder with the weights of another, and the settings of a longer context."""
    require(target.suffix.lower() != ".gguf", f"{source} is a folder: name a folder, not {target}")
    check_absent(target)
    folder = find_folder(source)
    check_folder(folder)
    is_inside = folder.resolve() in target.resolve().parents
    require(not is_inside, f"{target} lies inside of {folder}: choose another place")
    files = list(folder.rglob("*"))
    for file in files:
        require(file.exists(), f"{file} is a link to nothing: download it again")
    has_weights = any(file.suffix in WEIGHTS for file in files)
    require(has_weights, f"{folder} has no weights: download its .safetensors")
    config, tokenizer = folder / "config.json", folder / "tokenizer_config.json"
    written = {}
    for file in (tokenizer, config):
        if file.is_file():
            with as_user_error(file):
                written[file.name] = json.loads(file.read_text(encoding="utf-8"))
    with as_user_error(config):
        limits = written.get(tokenizer.name, {})
        plan, module = change_config(written[config.name], limits, method, factor, options)
        if not raise_lengths(limits, plan):
            written.pop(tokenizer.name, None)

    def write(part):
        hidden = shutil.ignore_patterns(".*")
        shutil.copytree(folder, part, ignore=hidden, copy_function=place_file)
        for name, values in written.items():
            replace_text(part / name, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    whole(target, write)
    print(f"{target}: {plan.before:,} -> {plan.length:,} tokens ({method}), with the same weights")
    print(f"verified: transformers' {module} has the frequencies of {method}")


def read_config(values):
    """Return transformers' config of the values in a config.json, whose code is not run."""
    kind = values.get("model_type")
    problem = f"transformers has no model_type {kind!r}, and a folder's code is not run"
    require(kind in CONFIG_MAPPING, f"{problem}: choose another checkpoint")
    return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(values))


def change_config(values, limits, method, factor, options):
    """Change the values of a config.json; return the Plan, and the class that agrees with it.

    limits: tokenizer_config.json, which may have an extended length that is nowhere else.
    """
    c = read_config(values)
    text = c.get_text_config()
    place = values
    if text is not c:
        name = next((x for x in c.sub_configs if getattr(c, x, None) is text), None)
        require(name in values, "its config.json has no text_config: choose another checkpoint")
        place = values[name]
    text.length_of_tokenizer = limits.get("model_max_length")
    parameters = getattr(text, "rope_parameters", None)
    require(parameters, f"its model_type {text.model_type!r} has no settings of RoPE: {rope.HERE}")
    rope.check_types(text)
    kinds = [key for key, value in parameters.items() if isinstance(value, dict)]
    kind = "full_attention" if kinds else None
    p = parameters.get(kind, {}) if kind else parameters
    # layers with a window stay as they were trained, unless they are extended already
    layers = set(getattr(text, "layer_types", None) or ())
    is_hybrid = layers & WINDOWS and not kind and p.get("rope_type") == "default"
    require(
        p and not (is_hybrid and layers - WINDOWS),
        "only its layers without a window are to be extended, and they have no RoPE of their own: "
        f"{rope.HERE}",
    )
    problem = f"its norm after the rotation removes the attention factor of {method!r}"
    is_normed = text.model_type == "llama4_text" and text.use_qk_norm
    require(not is_normed or method not in ("yarn", "longrope"), f"{problem}: use another --method")
    before, _ = find_rotary(text)
    plan = rope.make_plan(text, p, kind, 2 * len(before[kind][0]), method, factor, options)
    write_keys(place, text, kind, plan)
    return plan, check_rotary(values, plan, kind, before, method)


def write_keys(place, text, kind, plan):
    """Change the keys of a config.json, in the form that they have there."""
    parameters, scaling = place.get("rope_parameters"), dict(plan.p)
    base = scaling.pop("rope_theta", None)
    outside = {"rope_type", "factor", rope.ORIGINAL} - (place.get("rope_scaling") or {}).keys()
    if parameters:
        replace_scaling(parameters.get(kind) or parameters, plan.p)
    if scaling and (not parameters or "rope_scaling" in place):
        # the name of rope_type until transformers 4.43
        older = {"type": scaling["rope_type"]} if "rope_type" in scaling else {}
        inside = older | scaling
        if rope.ORIGINAL in place and older.get("type") == "longrope":
            # a Phi-3 may have three keys there, and the factor follows from the lengths
            inside = {key: x for key, x in inside.items() if key not in outside}
        place["rope_scaling"] = place.get("rope_scaling") or {}
        replace_scaling(place["rope_scaling"], inside)
    names = {"rope_theta", "rotary_emb_base"} & place.keys()
    if not parameters and not names:
        names = {"rotary_emb_base" if text.model_type == "gpt_neox" else "rope_theta"}
    if base:
        place.update(dict.fromkeys(names, base))
    # llama.cpp's converter looks for it outside for llama3, and transformers 4 for longrope
    is_outside = scaling.get("rope_type") in ("llama3", "longrope") or hasattr(text, rope.ORIGINAL)
    if rope.ORIGINAL in scaling and is_outside:
        place[rope.ORIGINAL] = scaling[rope.ORIGINAL]
    length = "max_position_embeddings"
    names = {length, text.attribute_map.get(length)} & place.keys() or {length}
    place.update(dict.fromkeys(names, plan.length))
    raise_lengths(place, plan)


def replace_scaling(p, new):
    """Change a dict of RoPE's parameters; another base alone leaves the others."""
    if "rope_type" in new:
        for key in SCALING & p.keys():
            del p[key]
    p.update(new)


def raise_lengths(values, plan):
    """Raise other names of the context length; return those that there are."""
    # 1e30 stands for no limit
    names = [x for x in rope.LENGTHS if 1 <= (values.get(x) or 0) <= plan.before]
    values.update(dict.fromkeys(names, plan.length))
    return names


# -----------------------------------------------------------------------------
# The check


def find_rotary(c, length=None):
    """Return (kind of layer or None -> (inverse frequencies, attention factor), class's name).

    The rotary module of the family's own class has them, in a model of one layer of each kind
    without memory. length: of a text, if they follow it.
    """
    small = copy.deepcopy(c)
    n_layer = c.num_hidden_layers
    kinds = list(getattr(c, "layer_types", None) or [None])[:n_layer]
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == n_layer:
            setattr(small, name, [value[i] for i in chosen])
    small.num_hidden_layers = len(chosen)
    with torch.device("meta"):
        model = AutoModel.from_config(small, trust_remote_code=False)
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        prefixes = [x.removesuffix("inv_freq") for x in names if x.endswith("inv_freq")]
        prefixes = [x for x in prefixes if "original" not in x]
        if not prefixes:
            continue
        module = type(module)(small)
        found = {}
        for prefix in prefixes:
            kind = prefix.removesuffix("_")
            if length:
                module(torch.zeros(1, 1, 1), torch.tensor([[length - 1]]), *[kind] * bool(kind))
            inv_freq = getattr(module, f"{prefix}inv_freq").double()
            found[kind or None] = inv_freq, float(getattr(module, f"{prefix}attention_scaling"))
        return found, type(module).__name__
    raise UserError(
        f"transformers computes RoPE of {c.model_type!r} without such settings: {rope.HERE}"
    )


def check_rotary(values, plan, kind, before, method):
    """Return the class that computes a Plan from a config.json, or raise UserError."""
    try:
        c = read_config(values).get_text_config()
        is_longrope = plan.scaling[0] == "longrope"
        for length in (plan.scaling[2], plan.length) if is_longrope else (None,):
            found, name = find_rotary(c, length)
            expected = before | {kind: plan.frequencies(length)}
            for key in expected:
                require(rope.agrees(found[key], expected[key], plan), "other frequencies")
        return name
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        problem = f"transformers does not compute method {method!r} in this family ({reason})"
        raise UserError(f"{problem}: choose another --method, or {rope.HERE}") from None
