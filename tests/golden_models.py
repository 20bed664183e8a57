"""The cases of golden.py that call the model itself: operators, schemes, extension, generation."""

import copy
import warnings
import zlib
from dataclasses import asdict

import torch

import rope_scaling
from kernels import eager, linear_cross_entropy
from model import GPT, POSITIONS, GPTConfig
from nanolong import devices
from nanolong.inference import KVCache

SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 61}
SHAPES = {
    "plain": {},
    "window": {"window": 7},
    "window and sinks": {"window": 7, "sinks": 2},
    "grouped queries": {"n_kv_head": 2},
    "QK-norm": {"qk_norm": "head"},
    "untied, scaled scores": {"tie_embeddings": False, "attn_scale": 0.7},
    "wide heads, biases": {"head_dim": 12, "mlp_dim": 40, "bias": "qkv", "norm_eps": 1e-6},
    "six heads": {"n_head": 6, "n_kv_head": 3, "head_dim": 8},
    "all at once": {"n_kv_head": 2, "qk_norm": "head", "window": 7, "sinks": 2, "bias": "qkv"},
}
HYBRIDS = ("FN", "FFFN", "WN", "WF", "SF", "WFNS")
GPT2 = {"pos": "learned", "norm": "layernorm", "mlp": "gelu", "bias": "all"}


# -------------------------------------------------------------------------------------------------
# Models, and what is recorded of them.


@torch.no_grad()
def fill(model):
    """Give every parameter random values that depend on its name alone, none of them zero."""
    for name, p in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        std = 1.0 if name.startswith("pos.") else 0.3
        p.copy_(torch.randn(p.shape, generator=generator) * std)
    return model.eval()


def make_model(**settings):
    """A small model in eval mode with weights that are the same in every checkout."""
    return fill(GPT(GPTConfig(**{**SMALL, **settings})))


def random_tokens(rows, length, vocab_size=61, seed=0):
    """Token ids (rows, length), int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (rows, length), generator=generator)


def record_pass(found, model, tokens, name="", **inputs):
    """Record logits, loss and the gradient of every parameter; the loss ignores three targets."""
    targets = tokens.roll(-1, 1).clone()
    targets[:, -3:] = -1
    with torch.no_grad():
        found[f"{name}logits"] = model(tokens, **inputs)
    record_loss(found, model, tokens, targets, name, **inputs)


def record_loss(found, model, tokens, targets, name="", **inputs):
    """Record the loss and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    loss = model(tokens, targets, **inputs)
    loss.backward()
    found[f"{name}loss"] = loss
    found[f"{name}parameters"] = [parameter for parameter, _ in model.named_parameters()]
    for parameter, p in model.named_parameters():
        if p.grad is not None:
            found[f"{name}gradient of {parameter}"] = p.grad


@torch.no_grad()
def cached_logits(model, tokens, sizes, capacity=0, **inputs):
    """Logits of tokens that are read in pieces of these sizes."""
    cache, pieces, start = KVCache(capacity), [], 0
    for size in sizes:
        piece = slice(start, start + size)
        more = {name: x[..., piece] for name, x in inputs.items()}
        pieces.append(model(tokens[:, piece], cache=cache, **more))
        start += size
    assert start == tokens.shape[1]
    return torch.cat(pieces, 1)


def record_cached(found, model, tokens, pieces, **inputs):
    """Record the logits of cached passes: token by token (one row, and all), and in pieces."""
    first = {key: value[:1] if value.dim() == 2 else value for key, value in inputs.items()}
    length = tokens.shape[1]
    each = [1] * length
    found["token by token"] = cached_logits(model, tokens[:1], each, **first)
    found["token by token, with capacity"] = cached_logits(model, tokens, each, length, **inputs)
    found["in pieces"] = cached_logits(model, tokens, pieces, **inputs)


# -------------------------------------------------------------------------------------------------
# The operators.


def kernels(record, folder):
    """The operators where the model does not take them: masks, biases and lengths of all kinds."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator).requires_grad_()

    docs = torch.tensor([[0] * 9 + [1] * 11, [0] * 4 + [2] * 16])
    positions = torch.arange(20) * 3
    biases = {
        "no bias": {},
        "slopes": {"bias": torch.tensor([0.5, 0.25, 0.1, 0.05])},
        "table": {"bias": random(4, 30)},
        "short table": {"bias": random(4, 6)},
        "relative": {"relative": (random(1, 8, 8), random(1, 8, 8), None)},
        "offsets": {"relative": (random(4, 20, 8), None, (random(4, 8), random(4, 8)))},
    }
    masks = {
        "causal": {},
        "bidirectional": {"causal": False},
        "window": {"window": 5, "sinks": 2},
        "documents": {"docs": docs},
        "window at positions": {"window": 10, "sinks": 4, "positions": positions, "docs": docs},
        "log-sum-exp": {"return_lse": True, "scale": 0.2},
    }
    for bias_name, bias in biases.items():
        for mask_name, mask in masks.items():
            for n_queries in (20, 3, 1):
                name = f"attention, {bias_name}, {mask_name}, {n_queries} queries"
                with record.case(name) as found:
                    inputs = random(2, 4, n_queries, 8), random(2, 2, 20, 8), random(2, 2, 20, 8)
                    record_operator(found, eager.attention, inputs, **bias, **mask)
    for half in (4, 2):
        with record.case(f"rope, {half} pairs") as found:
            angle = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01])[:half]
            inputs = random(2, 4, 20, 8), random(2, 2, 20, 8)
            record_operator(found, eager.rope, inputs, cos=angle.cos(), sin=angle.sin())
    for reduction in ("mean", "sum", "none"):
        with record.case(f"linear_cross_entropy, {reduction}") as found:
            targets = random_tokens(1, 40)[0]
            targets[5:9] = -1
            inputs = random(40, 32), random(61, 32)
            options = {"targets": targets, "reduction": reduction}
            record_operator(found, linear_cross_entropy, inputs, **options)


def record_operator(found, operator, inputs, **options):
    """Record an operator's outputs and its gradients by its tensors."""
    outputs = operator(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    for i, output in enumerate(outputs):
        found[f"output {i}"] = output
    sum(output.float().square().sum() for output in outputs).backward()
    for i, tensor in enumerate(inputs):
        found[f"gradient {i}"] = tensor.grad
    for name, tensor in options.items():
        if torch.is_tensor(tensor) and tensor.grad is not None:
            found[f"gradient of {name}"] = tensor.grad
            tensor.grad = None


# -------------------------------------------------------------------------------------------------
# The schemes.


def models(record, folder):
    """Every scheme in every shape; then what a scheme alone does not say."""
    for pos in POSITIONS:
        for shape, settings in SHAPES.items():
            shape_cases(record, f"{pos}, {shape}", pos=pos, **settings)
        for pattern in HYBRIDS:
            if pos in ("nope", "learned", "sinusoidal") and set(pattern) & {"N", "S"}:
                continue  # these do nothing in the layers, so no layer can be without them
            window = {"window": 7, "sinks": 2} if set(pattern) & {"W", "S"} else {}
            settings = {"pos": pos, "n_layer": 4, "layer_pattern": pattern, **window}
            shape_cases(record, f"{pos}, pattern {pattern}", **settings)
        length_cases(record, pos)
        position_cases(record, pos)
        training_cases(record, pos)
    for fraction in (0.0, 0.5):
        settings = {"pos": "rope", "rope_fraction": fraction, "rope_base": 5e5, "window": 9}
        shape_cases(record, f"rope, fraction {fraction}", **settings)
    for settings in ({}, {"tie_embeddings": False}):
        shape_cases(record, f"GPT-2's shape, {settings}", **GPT2, **settings)


def shape_cases(record, name, **settings):
    """A model of a shape: a pass over whole sequences, one inside documents, and cached ones."""
    model = make_model(**settings)
    tokens = random_tokens(2, 24)
    docs = torch.tensor([[0] * 10 + [1] * 14, [3] * 5 + [4] * 1 + [5] * 18])
    with record.case(name) as found:
        record_pass(found, model, tokens)
        if hasattr(model, "flops_per_token"):  # before the core was rewritten
            found["flops"] = [model.flops_per_token(), model.flops_per_token(60)]
        else:
            lengths = (model.config.block_size, 60)
            found["flops"] = [devices.flops_per_token(model, length) for length in lengths]
    with record.case(f"{name}, cached") as found:
        record_cached(found, model, tokens, [5, 1, 9, 9])
    with record.case(f"{name}, documents") as found:
        record_pass(found, model, tokens, docs=docs)
    with record.case(f"{name}, documents, cached") as found:
        record_cached(found, model, tokens, [5, 1, 9, 9], docs=docs)


def length_cases(record, pos):
    """Sequences shorter than a bias table, and longer than block_size."""
    for shape in ("plain", "window and sinks"):
        model = make_model(pos=pos, **SHAPES[shape])
        for length in (1, 5, 60):
            tokens = random_tokens(2, length)
            name = f"{pos}, {shape}, {length} tokens"
            with record.case(name) as found:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    record_pass(found, model, tokens)
                found["warnings"] = len(caught)
            with record.case(f"{name}, cached") as found:
                pieces = [1] if length == 1 else [length - length // 2, length // 2]
                record_cached(found, model, tokens, pieces)
    with record.case(f"{pos}, long enough for several pieces of attention") as found:
        model = make_model(pos=pos, block_size=1500)
        record_pass(found, model, random_tokens(2, 1500))


def position_cases(record, pos):
    """Explicit positions: with an offset, with gaps, by row, and from 0 in each document."""
    generator = torch.Generator().manual_seed(1)
    far = 24 if pos == "learned" else 5000
    gaps = torch.randperm(far, generator=generator)[:12].sort().values
    rows = torch.stack([torch.randperm(far, generator=generator)[:12].sort().values for _ in "ab"])
    docs = torch.tensor([[0] * 5 + [1] * 7] * 2)
    cases = {
        "offset": {"positions": torch.arange(4, 16)},
        "gaps": {"positions": gaps},
        "gaps by row": {"positions": rows},
        "by document": {
            "positions": torch.cat((torch.arange(5), torch.arange(7)))[None].repeat(2, 1),
            "docs": docs,
        },
        "negative": {"positions": torch.arange(-1, 11)},
    }
    tokens = random_tokens(2, 12)
    for shape in ("plain", "window and sinks"):
        model = make_model(pos=pos, **SHAPES[shape])
        for case, inputs in cases.items():
            with record.case(f"{pos}, {shape}, positions {case}") as found:
                record_pass(found, model, tokens, **inputs)
            with record.case(f"{pos}, {shape}, positions {case}, cached") as found:
                record_cached(found, model, tokens, [3, 1, 8], **inputs)


def training_cases(record, pos):
    """Dropout, activation checkpointing, reductions, mixed precision and other dtypes."""
    tokens = random_tokens(2, 24)
    for recompute in (False, True):
        with record.case(f"{pos}, dropout, activation checkpointing {recompute}") as found:
            model = make_model(pos=pos, dropout=0.2, n_kv_head=2).train()
            model.activation_checkpointing = recompute
            torch.manual_seed(7)
            record_loss(found, model, tokens, tokens.roll(-1, 1))
    model = make_model(pos=pos)
    for reduction in ("sum", "none"):
        with record.case(f"{pos}, reduction {reduction}") as found:
            found["loss"] = model(tokens, tokens.roll(-1, 1), reduction=reduction)
    for shape in ("plain", "all at once"):
        model = make_model(pos=pos, **SHAPES[shape])
        with torch.autocast("cpu", torch.bfloat16):
            with record.case(f"{pos}, {shape}, autocast") as found:
                record_pass(found, model, tokens)
            with record.case(f"{pos}, {shape}, autocast, cached") as found:
                record_cached(found, model, tokens, [5, 1, 9, 9])
    for dtype in (torch.float64, torch.bfloat16):
        with record.case(f"{pos}, {dtype}") as found, torch.no_grad():
            found["logits"] = make_model(pos=pos).to(dtype)(tokens)


# -------------------------------------------------------------------------------------------------
# Extension.

# (base, rotary_dim, original_length, factor)
SIZES = (
    (1e4, 16, 64, 4.0),
    (5e5, 64, 1024, 8.0),
    (1e4, 4, 24, 1.0),
    (1e6, 6, 48, 2.5),
    (1e4, 2, 48, 2.0),
    (1e4, 64, 8192, 1e6),
)
LENGTHS = (None, 10, 64, 65, 100, 700, 20000)
OPTIONS = {
    "ntk-parts": (
        {"beta_fast": 16, "beta_slow": 2},
        {"ramp": "paper"},
        {"truncate": False},
        {"ramp": "steep"},
        {"beta_fast": 1.0, "beta_slow": 2.0},
    ),
    "yarn": (
        {"attention_factor": 1.2, "ramp": "paper"},
        {"beta_fast": 8.0, "truncate": False},
        {"attention_factor": 0},
    ),
    "abf": ({"new_base": 1e6}, {"new_base": 1}),
    "llama3": (
        {"low_freq_factor": 2.0, "high_freq_factor": 8.0},
        {"low_freq_factor": 4.0, "high_freq_factor": 4.0},
    ),
    "ntk-frozen": ({"multiplier": 3.0, "length": 200}, {"multiplier": -1}),
    "ntk-lceg": ({"multiplier": 3.0, "length": 200}, {"multiplier": True}),
    "resonance": tuple(
        {"of": method} for method in ("none", "pi", "ntk", "ntk-parts", "abf", "llama3", "drope")
    ),
    "drope": ({"scale": 1.3}, {"scale": 0}),
    "lm-infinite": ({"sinks": 4}, {"sinks": 1e6}),
    "self-extend": ({"window": 8, "group": 3}, {"group": 0.5}),
}


def extension(record, folder):
    """Every method's table, and every scheme's model extended by every method that it takes."""
    for method in rope_scaling.METHODS:
        for size in SIZES:
            for options in method_options(method, size[1] // 2):
                with record.case(f"table of {method}, {size}, {options}") as found:
                    table = rope_scaling.frequencies(method, *size, **options)
                    found["inv_freq"], found["attention_factor"] = table
    for pos in POSITIONS:
        model = make_model(pos=pos)
        methods = model.pos.methods
        with record.case(f"{pos}, its methods") as found:
            found["methods"] = {name: list(options) for name, options in methods.items()}
        for method in [*methods, "yarm"]:
            extended_cases(record, pos, method)
        for method, again in (("pi", "pi"), ("none", "pi"), ("pi", "scale"), ("clamp", "none")):
            if {method, again} <= methods.keys():
                twice_cases(record, pos, method, again)
    for method, again in (
        ("yarn", "yarn"),
        ("dynamic-ntk", "yarn"),
        ("yarn", "dynamic-yarn"),
        ("self-extend", "ntk"),
        ("pi", "lm-infinite"),
        ("drope", "none"),
    ):
        twice_cases(record, "rope", method, again)


def method_options(method, n_pairs):
    """The options that a method's table is computed with: none first."""
    signature = POSITIONS["rope"].methods[method]
    options = [{}, *OPTIONS.get(method, ())]
    if method == "longrope":
        long = [1.0 + i for i in range(n_pairs)]
        short = [1.0 + i / 8 for i in range(n_pairs)]
        both = {"long_factor": long, "short_factor": short}
        options += [{"long_factor": long}, {"long_factor": long[1:]}]
        options += [{"long_factor": long, "attention_factor": 1.1}]
        options += [{**both, "length": length} for length in (10, 64, 700)]
    elif "length" in signature:
        options += [{"length": length} for length in LENGTHS]
    return options


def model_options(method, head_dim=8):
    """Options with which a model is extended by a method."""
    if method == "longrope":
        n_pairs = head_dim // 2
        return {
            "long_factor": [1.0 + i for i in range(n_pairs)],
            "short_factor": [1.0 + i / 8 for i in range(n_pairs)],
        }
    return {"scale": {"scale": 1.3}, "lm-infinite": {"sinks": 3}}.get(method, {})


def record_extended(found, model):
    """Record what extending made of the configuration and the tables."""
    extension = dict(model.config.extension)
    original_length = extension.pop("original_length")
    found["block_size"] = model.config.block_size
    found["extension"] = [extension, original_length]
    found["original_length"] = model.config.original_length
    for length in (10, 24, 25, 40, 100, 30):
        found[f"set_length({length})"] = model.pos.set_length(length)
        for name in ("inv_freq", "slopes", "attention_factor"):
            if hasattr(model.pos, name):
                found[f"{name} at {length}"] = getattr(model.pos, name)


def record_lengths(found, model):
    """Record passes below, at and beyond the extended length, and cached ones."""
    for length in (10, 24, 48, 70):
        if length > model.config.block_size and model.pos.bounded:
            continue
        record_pass(found, model, random_tokens(2, length), f"{length} tokens, ")
    tokens = random_tokens(2, 48)
    record_cached(found, model, tokens, [20, 1, 7, 20])


def extended_cases(record, pos, method):
    """A model extended by a method: its tables, numbers, and a copy made of its configuration."""
    shapes = {"": {}}
    if pos == "rope":
        shapes["window, "] = {"window": 30, "sinks": 2}
        shapes["half the channels, "] = {"rope_fraction": 0.5, "layer_pattern": "FN"}
    for shape, settings in shapes.items():
        name = f"{pos}, {shape}{method}"
        model = make_model(pos=pos, **settings)
        options = model_options(method, 4 if "half" in shape else 8)
        with record.case(name) as found:
            model.extend(method, 2.0, **options)
            record_extended(found, model)
            record_lengths(found, model)
        with record.case(f"{name}, made of its configuration") as found:
            same = GPT(GPTConfig(**copy.deepcopy(asdict(model.config))))
            tokens = random_tokens(2, 48)
            found["logits"] = fill(same)(tokens)
        with record.case(f"{name}, documents") as found:
            docs = torch.tensor([[0] * 20 + [1] * 28] * 2)
            record_pass(found, model, random_tokens(2, 48), docs=docs)
        with record.case(f"{name}, autocast, cached") as found:
            with torch.autocast("cpu", torch.bfloat16):
                record_cached(found, model, random_tokens(2, 48), [20, 1, 7, 20])


def twice_cases(record, pos, method, again):
    """A model extended by 2 and then by 1.5: a second extension replaces the method."""
    with record.case(f"{pos}, {method} and then {again}") as found:
        model = make_model(pos=pos)
        model.extend(method, 2.0, **model_options(method))
        model.extend(again, 1.5, **model_options(again))
        record_extended(found, model)
        record_lengths(found, model)


# -------------------------------------------------------------------------------------------------
# Generation.

SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.9},
    "top_k": {"temperature": 1.1, "top_k": 5},
    "top_p": {"top_p": 0.7},
    "top_k and top_p": {"top_k": 20, "top_p": 0.8},
}
PROMPTS = {
    "one prompt": [7],
    "two prompts": [7, 7],
    "unequal prompts": [3, 9, 1],
}


def generation(record, folder):
    """Generated ids of every scheme; of rope also extended, windowed and under autocast."""
    for pos in POSITIONS:
        generated_cases(record, pos, make_model(pos=pos), 14)
    for shape in ("window and sinks", "all at once"):
        generated_cases(record, f"rope, {shape}", make_model(pos="rope", **SHAPES[shape]), 30)
    generated_cases(record, "GPT-2's shape", make_model(**GPT2), 14)
    generated_cases(record, "random", make_model(pos="rope", random_positions=96), 14)
    for method in ("yarn", "dynamic-ntk", "dynamic-yarn", "longrope", "self-extend"):
        model = make_model(pos="rope")
        model.extend(method, 2.0, **model_options(method))
        generated_cases(record, method, model, 40)
    alibi = make_model(pos="alibi")
    alibi.extend("dynamic-pi", 2.0)
    generated_cases(record, "dynamic alibi", alibi, 40)
    with torch.autocast("cpu", torch.bfloat16):
        model = make_model(pos="rope", qk_norm="head", bias="qkv", n_kv_head=2)
        generated_cases(record, "autocast", model, 14)


def generated_cases(record, name, model, max_new_tokens):
    for prompt, lengths in PROMPTS.items():
        tokens = [random_tokens(1, length, seed=length)[0] for length in lengths]
        if len(set(lengths)) == 1:
            tokens = torch.stack(tokens)
        for sampler, settings in SAMPLERS.items():
            with record.case(f"{name}, {prompt}, {sampler}") as found:
                settings = {"generator": torch.Generator().manual_seed(5), **settings}
                found["ids"] = generated(model, tokens, max_new_tokens, **settings)
        with record.case(f"{name}, {prompt}, a generator for each") as found:
            generators = [torch.Generator().manual_seed(i) for i in range(len(lengths))]
            found["ids"] = generated(model, tokens, max_new_tokens, generator=generators)


def generated(model, tokens, max_new_tokens, **settings):
    return torch.cat(list(model.generate(tokens, max_new_tokens, **settings)), 1)
