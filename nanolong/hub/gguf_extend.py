"""Extend a GGUF file: write a new header, and copy the bytes of its tensors."""

import math
import shutil

from transformers import LlamaConfig

import rope_scaling
from nanolong.errors import require
from nanolong.hub.folder import check_absent, place_file, whole
from nanolong.hub.gguf_header import ROPE_TABLES, align, open_file, read_tensor, write_head
from nanolong.hub.gguf_model import ARCHITECTURES, own_metadata, read_architecture, read_rope
from nanolong.hub.rope import HERE, ORIGINAL, agrees, compute, make_plan
from nanolong.hub.verify import as_user_error


def extend_file(source, target, method, factor, options):
    """Write a GGUF file, or all parts of one, with the keys of a longer context."""
    require(target.suffix.lower() == ".gguf", f"{source} is a file: name a .gguf, not {target}")
    with as_user_error(source):
        header, metadata, places = open_file(source)
        parts = find_parts(source, target, metadata.get("split.count", 1))
        for part in (target, *parts):
            check_absent(part)
        plan, keys, table = plan_keys(source, metadata, places, method, factor, options)
        head, n_copied = write_head(header, metadata, places, keys, table)

    def write(part):
        with open(source, "rb") as old, open(part, "wb") as new:
            new.write(head)
            old.seek(align(header.position, metadata))
            shutil.copyfileobj(old, new, 1 << 24)
            if table is not None:
                new.seek(len(head) + n_copied)
                new.truncate()
                new.write(table.numpy().tobytes())
        for place, other in parts.items():
            place_file(other, part.with_name(place.name))
        with as_user_error(source):
            _, found, places = open_file(part)
            is_same = all(found[key] == x for key, x in metadata.items() if key not in keys)
            found = compute(*read_config(part, found, places))
            is_same &= agrees(found, plan.frequencies(plan.length), plan)
            require(is_same, "it was not written as it was meant: please report it")

    whole(target, write)
    print(f"{target}: {plan.before:,} -> {plan.length:,} tokens ({method}), with the same weights")


def find_parts(source, target, n):
    """Return the other parts of a model: path to write to -> path to read."""
    if n <= 1:
        return {}
    first = f"-00001-of-{n:05d}.gguf"
    for file in (source, target):
        problem = f"the model has {n} parts, and {file} does not end in {first}"
        require(file.name.endswith(first), f"{problem}: give the name of the first part")
    parts = {}
    for i in range(2, n + 1):
        last = f"-{i:05d}-of-{n:05d}.gguf"
        old, new = (x.with_name(x.name.removesuffix(first) + last) for x in (source, target))
        require(old.is_file(), f"{old}, a part of the model, is absent: download it")
        parts[new] = old
    return parts


def read_config(file, metadata, places):
    """Return a config of transformers with the RoPE of a file, and its rope_parameters."""
    arch = read_architecture(file, metadata)
    own = own_metadata(metadata, arch)
    # llama.cpp's default of freq_base is 10,000
    has_rope = {"rope.freq_base", "rope.dimension_count"} & own.keys() or arch in ARCHITECTURES
    problem = f"{file} has no keys of RoPE, or no context_length"
    require(has_rope and "context_length" in own, f"{problem}: choose another file")
    tables = {name: read_tensor(file, places[name]) for name in ROPE_TABLES if name in places}
    dim = own.get("rope.dimension_count") or own.get("attention.key_length")
    dim = dim or own["embedding_length"] // own["attention.head_count"]
    shape = {"hidden_size": dim, "num_attention_heads": 1, "head_dim": dim}
    p = read_rope(file, own, tables)
    c = LlamaConfig(**shape, max_position_embeddings=own["context_length"], rope_parameters=p)
    return c, c.rope_parameters


def plan_keys(file, metadata, places, method, factor, options):
    """Return (Plan, metadata that change, the table that divides the frequencies or None)."""
    arch = read_architecture(file, metadata)
    c, p = read_config(file, metadata, places)
    # llama.cpp extends them all, and the others here have no window in it
    has_window = metadata.get(f"{arch}.attention.sliding_window") and arch not in ARCHITECTURES
    require(
        not has_window or p["rope_type"] != "default",
        f"only layers without a window are to be extended; {arch!r} has no RoPE for these: {HERE}",
    )
    wrong = {"beta_fast", "beta_slow", "truncate", "short_factor"} & options.keys()
    require(not wrong, f"llama.cpp has no {', '.join(sorted(wrong))}: leave it out")
    plan = make_plan(c, p, None, c.head_dim, method, factor, options)
    keys, table = {"context_length": plan.length}, None
    if "rope_theta" in plan.p:
        problem = "its table of llama3 is a tensor, which depends on the base"
        require(p["rope_type"] != "llama3", f"{problem}: {HERE}")
        keys["rope.freq_base"] = plan.p["rope_theta"]
    elif method in ("pi", "yarn"):
        keys |= {"rope.scaling.type": plan.p["rope_type"], "rope.scaling.factor": plan.p["factor"]}
    else:
        is_whole = arch == "llama" and metadata.get("split.count", 1) <= 1
        has_table = not places.keys().isdisjoint(ROPE_TABLES)
        problem = f"the table of {method!r} is one more tensor, which only a whole 'llama' can have"
        require(is_whole and not has_table, f"{problem}, once: use --method=yarn, or {HERE}")
        plain, _ = rope_scaling.none(plan.scaling[1], plan.dim, 1, 1.0)
        table = (plain / plan.frequencies(plan.length)[0]).float()
    if ORIGINAL in plan.p:
        keys["rope.scaling.original_context_length"] = plan.p[ORIGINAL]
    attention_factor = plan.frequencies(plan.length)[1]
    usual = 0.1 * math.log(plan.scaling[3]) + 1 if plan.scaling[0] == "yarn" else 1.0
    if "rope_theta" not in plan.p and not math.isclose(attention_factor, usual):
        keys["rope.scaling.attn_factor"] = attention_factor / usual
    return plan, {f"{arch}.{key}": x for key, x in keys.items()}, table
