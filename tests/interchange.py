"""What the tests compare with transformers: models of each side, imported, exported and refused.

transformers makes every architecture that hf.py imports with every RoPE type, with tied embeddings
or not, and random weights, in a process of its own. Compared are all logits, in float32 and beyond
the original context length: after the import, in one forward pass and token by token with a cache;
and after an export, as AutoModelForCausalLM loads it. Then our own models are exported. Export,
import and export again should give the same bytes. Run as a script, this file prints the section of
refusals of experiments/results/interchange.md.
"""

import contextlib
import filecmp
import io
import itertools
import json
import tempfile
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch
from conftest import BUILT_IN, OFFLINE, assert_success, run_python
from safetensors.torch import load_file, save, save_file

from model import GPT, ContextLengthWarning, GPTConfig
from nanolong.errors import UserError
from nanolong.hub.exporting import export_checkpoint
from nanolong.hub.families import FAMILIES, UNSUPPORTED
from nanolong.hub.importing import import_checkpoint, read_settings, read_values
from nanolong.hub.layout import stored_shapes, tensor_layout
from nanolong.inference import KVCache
from rope_scaling import EVALUATION_ONLY

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
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, **ORIGINAL}
YARN_OPTIONS = {"beta_fast": 8, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.05}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **ORIGINAL}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, **ORIGINAL}
# name -> rope_parameters (or rope_scaling, in the older form)
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn, all options": {**YARN, **YARN_OPTIONS},
    "yarn, old form, mscale": {
        "type": "yarn",
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        **ORIGINAL,
    },
    "longrope": {**LONGROPE, "short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS},
    "llama3": {**LLAMA3, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}

# -----------------------------------------------------------------------------
# Our own models: name -> settings of GPTConfig, and None or an extension method with its options

GPT2 = {"norm": "layernorm", "mlp": "gelu", "bias": "all", "pos": "learned", "block_size": 160}
TWO_TABLES = {"long_factor": [1.0, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
OLMO3 = {
    "norm_position": "post",
    "qk_norm": "all",
    "window": 21,
    "layer_pattern": "WF",
    "rope_local_base": 500.0,
}
GEMMA3 = {
    "norm_position": "both",
    "mlp": "geglu",
    "qk_norm": "head",
    "embed_scale": 48**0.5,
    "attn_scale": 1.1,
    "window": 21,
    "layer_pattern": "WF",
}
PYTHIA = {
    "norm": "layernorm",
    "norm_position": "parallel",
    "mlp": "gelu_exact",
    "bias": "all",
    "rope_fraction": 0.5,
}
MPT = {"norm": "layernorm", "mlp": "gelu_exact", "pos": "alibi", "block_size": 160}
EXPORTED_METHODS = ("none", "pi", "ntk", "ntk-parts", "yarn", "abf", "llama3", "ntk-lceg")
# models that can be exported
OURS = {
    "rope": ({}, None),
    "rope, GQA, QK-norm": ({"n_kv_head": 2, "qk_norm": "head"}, None),
    "rope, biases of q, k and v": ({"bias": "qkv"}, None),
    "rope, window": ({"window": 21}, None),
    "rope, NoPE and window in turn": ({"window": 21, "layer_pattern": "WN"}, None),
    "rope, layers of all four kinds": ({"n_layer": 4, "window": 21, "layer_pattern": "FWNS"}, None),
    "rope, scores times 1.3": ({"attn_scale": 1.3}, None),
    "rope in half of a head": ({"rope_fraction": 0.5}, None),
    "rope in half of a head, QK-norm, yarn": (
        {"rope_fraction": 0.5, "qk_norm": "head"},
        ("yarn", {}),
    ),
    "heads that do not divide the embedding": ({"n_embd": 50, "head_dim": 8}, None),
    "untied": ({"tie_embeddings": False}, None),
    "nope": ({"pos": "nope"}, None),
    "nope, QK-norm": ({"pos": "nope", "qk_norm": "head"}, None),
    "nope, biases of q, k and v": ({"pos": "nope", "bias": "qkv"}, None),
    "LayerNorm": ({"norm": "layernorm"}, None),
    "nope, scale": ({"pos": "nope"}, ("scale", {"scale": 1.2})),
    "GPT-2": (GPT2, None),
    "GPT-2, scores times 1.3, untied": ({**GPT2, "attn_scale": 1.3, "tie_embeddings": False}, None),
    "GPT-2's layers with rope": ({**GPT2, "pos": "rope"}, None),
    "GPT-2, pi": (GPT2, ("pi", {})),
    "Olmo 3's blocks, yarn": (OLMO3, ("yarn", {})),
    "Olmo 3's blocks, yarn in all layers": (OLMO3, ("yarn", {"layers": "all"})),
    "Gemma 3's blocks": (GEMMA3, None),
    "Gemma 3's blocks, pi": (GEMMA3, ("pi", {})),
    "Pythia's blocks": (PYTHIA, None),
    "learned sinks": ({"sink_scores": True}, None),
    "Ministral 3's scores": ({"score_scale": "llama4"}, None),
    "Ministral 3's scores, yarn": ({"score_scale": "llama4"}, ("yarn", {})),
    "p-RoPE": ({"p_rope": 0.5}, None),
    "p-RoPE, pi": ({"p_rope": 0.5}, ("pi", {})),
    "p-RoPE, yarn": ({"p_rope": 0.5}, ("yarn", {})),
    **{method: ({}, (method, {})) for method in EXPORTED_METHODS},
    "ntk-parts, ramp=paper": ({}, ("ntk-parts", {"ramp": "paper"})),
    "yarn, ramp=paper": ({}, ("yarn", {"ramp": "paper"})),
    "yarn, options": ({"rope_base": 5e5}, ("yarn", YARN_OPTIONS)),
    "dynamic-ntk at a fixed length": ({}, ("dynamic-ntk", {"length": 200.0})),
    "dynamic-yarn at the extended length": ({}, ("dynamic-yarn", {"length": 4.0 * LENGTH})),
    "resonance of yarn": ({}, ("resonance", {})),
    "resonance of pi": ({}, ("resonance", {"of": "pi"})),
    "longrope": ({}, ("longrope", {"long_factor": [1, 2, 3.5, 4]})),
    "longrope, two tables": ({}, ("longrope", TWO_TABLES)),
    "drope": ({}, ("drope", {"scale": 1.1})),
    "drope in half of a head": ({"rope_fraction": 0.5}, ("drope", {"scale": 1.1})),
    "drope, QK-norm": ({"qk_norm": "head"}, ("drope", {"scale": 1.1})),
}

REFUSED_SCHEMES = [pos for pos in BUILT_IN if pos not in ("rope", "nope")]
REFUSED_METHODS = ["dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen", *EVALUATION_ONLY]
# models that cannot be exported
REFUSED = {
    **{pos: ({"pos": pos}, None) for pos in REFUSED_SCHEMES},
    **{method: ({}, (method, {})) for method in REFUSED_METHODS},
    "MPT's blocks, biases in the norms": (MPT, None),
    "learned sinks, QK-norm": ({"sink_scores": True, "qk_norm": "head"}, None),
    "logn": ({"score_scale": "logn"}, None),
    "Llama 4's scores": ({"score_scale": "llama4", "score_scale_offset": 1}, None),
    "Ministral 3's scores from another length on": (
        {"score_scale": "llama4", "score_scale_length": 16},
        ("yarn", {}),
    ),
    "post-norms": ({"norm_position": "post"}, None),
    "yarn in layers without a window": ({"window": 21, "layer_pattern": "WF"}, ("yarn", {})),
    "window and sinks": ({"window": 21, "sinks": 2}, None),
    "random positions": ({"random_positions": 512}, None),
    "NoPE in every second layer, QK-norm": ({"layer_pattern": "FN", "qk_norm": "head"}, None),
    "NoPE in every second layer, biases": ({"layer_pattern": "FN", "bias": "qkv"}, None),
    "QK-norm, biases of q, k and v": ({"qk_norm": "head", "bias": "qkv"}, None),
    "GELU": ({"mlp": "gelu"}, None),
    "biases in all linear layers": ({"bias": "all"}, None),
    "GPT-2 with a window": ({**GPT2, "window": 21}, None),
    "GPT-2 with GQA and QK-norm": ({**GPT2, "n_kv_head": 2, "qk_norm": "head"}, None),
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
        {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [1.0] * 4},
    ),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_scaling", [1]),
    (
        "rope_scaling",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
    ),
    ("num_key_value_heads", 4),
    ("head_dim", 7),
]

N_PROMPT = 41  # these are the first forward pass of a comparison with a cache


@dataclass
class Case:
    """A model for the process that runs transformers."""

    name: str  # of its Hugging Face directory
    seed: int  # of its weights and tokens
    architecture: str = ""  # key of ARCHITECTURES
    rope: str = ""  # key of ROPES
    model_type: str = ""
    settings: dict | None = None  # of its config; None: the directory is there already
    vocab_size: int = VOCAB_SIZE
    with_cache: bool = True  # decode token by token, too
    shard_size: str = "5GB"

    @property
    def tokens(self):
        """What both sides compute the logits of: (2, N_TOKENS) int64."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.vocab_size, (2, N_TOKENS), generator=generator)


# -----------------------------------------------------------------------------
# transformers

TRANSFORMERS_SCRIPT = """
import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

folder, n_prompt = sys.argv[1], int(sys.argv[2])


def make_model(case, path):
    torch.manual_seed(case["seed"])
    config = AutoConfig.for_model(case["model_type"], **case["settings"])
    model = AutoModelForCausalLM.from_config(config).eval().float()
    # random, so that no term is hidden by an initial 0 or 1; the logits are of size 1
    for name, p in model.named_parameters():
        module = name.split(".")[-2]
        is_norm = p.dim() == 1 and name.endswith("weight")
        # Gemma adds 1 to the weights of its norms
        mean = 1.0 if is_norm and not case["model_type"].startswith("gemma") else 0.0
        std = 0.1
        if p.dim() == 2 and module not in ("embed_tokens", "wte", "wpe", "lm_head"):
            std = p.shape[1] ** -0.5
        p.normal_(mean, std)
    model.tie_weights()
    model.save_pretrained(path, max_shard_size=case["shard_size"])
    return model


def decode(model, tokens, n_prompt):
    ends = range(n_prompt, tokens.shape[1] + 1)
    start, cache, logits = 0, None, []
    for end in ends:
        step = model(tokens[:, start:end], past_key_values=cache, use_cache=True)
        start, cache = end, step.past_key_values
        logits.append(step.logits)
    return torch.cat(logits, 1)


answers = {}
with open("cases.json") as file:
    cases = json.load(file)
for case in cases:
    path = f"{folder}/{case['name']}"
    tokens = torch.tensor(case["tokens"])
    with torch.no_grad():
        if case["settings"] is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        else:
            model = make_model(case, path)
        answers[f"{case['name']}/long"] = model(tokens).logits
        answers[f"{case['name']}/short"] = model(tokens[:, :n_prompt]).logits
        if case["with_cache"]:
            answers[f"{case['name']}/cached"] = decode(model, tokens, n_prompt)
save_file({name: logits.contiguous() for name, logits in answers.items()}, "answers")
"""


def run_transformers(cases, folder):
    """Return transformers' logits, `<name>/long`, `/short` and `/cached` -> (2, T, V).

    Cases with settings are made and written into the folder first.
    """
    described = [{**asdict(case), "tokens": case.tokens.tolist()} for case in cases]
    (folder / "cases.json").write_text(json.dumps(described))
    # outside of the project, whose kernels/ transformers would take for a package
    assert_success(run_python(TRANSFORMERS_SCRIPT, folder, N_PROMPT, cwd=folder, env=OFFLINE))
    return load_file(folder / "answers")


def make_cases():
    """Return a Case for each architecture, RoPE type, and tied embeddings or not."""
    described = []
    for architecture, (model_type, more) in ARCHITECTURES.items():
        ropes = ["default"] if "no RoPE" in architecture else list(ROPES)
        for rope, tied in itertools.product(ropes, (True, False)):
            settings = {**SHAPE, **more, "tie_word_embeddings": tied}
            settings |= rope_settings(rope, settings["head_dim"] // 2)
            described.append((architecture, rope, model_type, settings))
    for tied in (True, False):
        settings = {"n_positions": 160, "n_embd": 48, "n_layer": 3, "n_head": 6}
        settings |= {"vocab_size": VOCAB_SIZE, "tie_word_embeddings": tied}
        settings["n_inner"] = None if tied else 100
        described.append(("GPT-2", "learned", "gpt2", settings))
    return [make_case(number, *case) for number, case in enumerate(described)]


def make_case(number, architecture, rope, model_type, settings):
    return Case(
        name=str(number),
        seed=number,
        architecture=architecture,
        rope=rope,
        model_type=model_type,
        settings=settings,
        vocab_size=settings["vocab_size"],
        # transformers' cache keeps keys of the older scale
        with_cache=rope not in ("dynamic", "longrope"),
        # several files, and one file
        shard_size="20KB" if settings["tie_word_embeddings"] else "5GB",
    )


def rope_settings(rope, n_pairs):
    """Return what a config says of a RoPE type; n_pairs: the pairs of channels of a head."""
    parameters = dict(ROPES[rope])
    for key in {"short_factor", "long_factor"} & parameters.keys():
        parameters[key] = parameters[key][:n_pairs]
    key = "rope_scaling" if "type" in parameters else "rope_parameters"
    times = 1 if rope in ("default", "linear", "dynamic") else 4
    return {"max_position_embeddings": times * LENGTH, key: parameters}


# -----------------------------------------------------------------------------
# Comparisons


@torch.no_grad()
def compute_logits(model, case):
    """Return our logits of a case, as run_transformers() returns transformers'."""
    tokens = case.tokens
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextLengthWarning)
        logits = {"long": model(tokens), "short": model(tokens[:, :N_PROMPT])}
        if case.with_cache:
            cache = KVCache()
            parts = [tokens[:, :N_PROMPT], *tokens[:, N_PROMPT:].split(1, 1)]
            logits["cached"] = torch.cat([model(part, cache=cache) for part in parts], 1)
    return logits


def differences(logits, answers, case):
    """Return the largest difference to transformers' logits, by name."""
    found = {}
    for name, ours in logits.items():
        found[name] = (ours - answers[f"{case.name}/{name}"]).abs().max().item()
    return found


def capture_output(function, *arguments, **options):
    """Call a function and return what it prints, as lines."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        function(*arguments, **options)
    return output.getvalue().strip().splitlines()


def read_config(folder):
    """Return the GPTConfig that a directory's config.json describes."""
    return GPTConfig(**read_settings(folder / "config.json", read_values(folder)))


def import_quietly(source, target):
    return capture_output(import_checkpoint, GPT, source, target)


def export_quietly(run, target):
    return capture_output(export_checkpoint, open_run(run), target, verify=False)


def open_run(run):
    """Return a model as export_checkpoint() takes it."""
    return GPT.load(run, dtype=None)


@dataclass
class Exported:
    """A model of ours that is exported, and that transformers has not loaded yet."""

    case: Case
    record: dict
    model: GPT


def compare_imports(cases, answers, folder):
    """Import cases, compare them with the answers of run_transformers(), and export them again.

    Returns (records, exported). A record has architecture, rope, tied; largest_logit, imported and
    cached (differences after import; cached may be None); refused (why there is no export), or
    bytes: "same", or the files that differ after export, import and export.
    """
    records, exported = [], []
    for case in cases:
        run = folder / f"run-{case.name}"
        import_quietly(folder / case.name, run)
        model = GPT.load(run)
        logits = compute_logits(model, case)
        found = differences(logits, answers, case)
        record = {
            "architecture": case.architecture,
            "rope": case.rope,
            "tied": case.settings["tie_word_embeddings"],
            "largest_logit": logits["long"].abs().max().item(),
            "imported": max(found["long"], found["short"]),
            "cached": found.get("cached"),
        }
        records.append(record)
        if export_twice(run, folder, record, case.name):
            new_case = replace(case, name=f"exported-{case.name}", settings=None)
            exported.append(Exported(new_case, record, model))
    return records, exported


def export_ours(models, folder):
    """Export our own models, from OURS or REFUSED, with random weights.

    Returns (records, exported). A record has name; refused, or architecture and rope (in
    transformers) and bytes.
    """
    records, exported = [], []
    for number, (name, (settings, extension)) in enumerate(models.items()):
        record = {"name": name}
        records.append(record)
        model = make_our_model(number, settings)
        run = folder / f"run-ours-{number}"
        if extension:
            method, options = extension
            model.extend(method, 4.0, **options)
        model.save(run / "step-000000")
        if not export_twice(run, folder, record, f"ours-{number}"):
            continue
        target = folder / f"exported-ours-{number}"
        config = json.loads((target / "config.json").read_text())
        record["architecture"] = config["architectures"][0].partition("For")[0]
        rope = config.get("rope_parameters", {})
        record["rope"] = rope.get("full_attention", rope).get("rope_type", "learned")
        # transformers' cache keeps keys of the other table
        case = Case(target.name, number, with_cache=name != "longrope, two tables")
        exported.append(Exported(case, record, model))
    return records, exported


@torch.no_grad()
def make_our_model(seed, settings):
    """Return a model with random weights whose logits are of size 1."""
    defaults = {"n_layer": 2, "n_head": 6, "n_embd": 48}
    defaults |= {"block_size": LENGTH, "vocab_size": VOCAB_SIZE}
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**defaults, **settings})).eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.normal_(0.0 if name.endswith("bias") else 1.0, 0.1)
        elif name.startswith(("embed", "head", "pos")):
            p.normal_(0.0, 0.1)
        else:
            p.normal_(0.0, p.shape[1] ** -0.5)
    return model


def export_twice(run, folder, record, name):
    """Export a run to exported-NAME, import that and export it again.

    Returns whether there was an export; records why not (refused), or whether the two are alike
    (bytes).
    """
    first, second = folder / f"exported-{name}", folder / f"exported-again-{name}"
    try:
        export_quietly(run, first)
    except UserError as refusal:
        record["refused"] = str(refusal)
        return False
    import_quietly(first, folder / f"imported-again-{name}")
    export_quietly(folder / f"imported-again-{name}", second)
    record["bytes"] = compare_files(first, second)
    return True


def compare_files(first, second):
    """Return "same", or the names of the files in which two directories differ."""
    names = {file.name for place in (first, second) for file in place.iterdir()}
    _, differing, errors = filecmp.cmpfiles(first, second, sorted(names), shallow=False)
    return ", ".join(differing + errors) or "same"


def compare_exports(exported, folder):
    """Let transformers load what was exported, and record the difference of logits (exported)."""
    answers = run_transformers([item.case for item in exported], folder)
    for item in exported:
        logits = compute_logits(item.model, item.case)
        item.record["exported"] = max(differences(logits, answers, item.case).values())


# -----------------------------------------------------------------------------
# Directories


def tensor_shapes(values):
    """Return the shapes of the tensors that fit a config.json, by name."""
    config = GPTConfig(**read_settings(Path("config.json"), values))
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(config).named_parameters()}
    layout = tensor_layout(FAMILIES[values["model_type"]], config, shapes)
    return stored_shapes(layout, shapes)


def random_tensors(values):
    return {name: 0.1 * torch.randn(shape) for name, shape in tensor_shapes(values).items()}


def write_directory(folder, values, tensors=None, index=None, files=None):
    """Write a Hugging Face directory: config.json, tensors, an index, other files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)


def bad_directories():
    """Return directories that are not imported: what is wrong -> arguments of write_directory()."""
    good = random_tensors(BASE_CONFIG)
    settings = [("model_type", name) for name in (*UNSUPPORTED, "something_else", None)]
    bad = {}
    for key, value in settings + BAD_SETTINGS:
        values = {**BASE_CONFIG, key: value}
        bad[f"{key}: {value!r}"] = {"values": values, "tensors": good}

    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    wrong_tensors = {
        "a tensor is missing": {name: tensor for name, tensor in good.items() if name != norm},
        "a tensor has another shape": {**good, norm: torch.zeros(47)},
        "a tensor too many": {**good, bias: torch.zeros(48)},
        "an integer tensor": {**good, norm: torch.zeros(48, dtype=torch.int8)},
        "8-bit floats": {**good, norm: good[norm].to(torch.float8_e4m3fn)},
    }
    wrong_files = {
        "an adapter": {"adapter_config.json": b'{"peft_type": "LORA"}'},
        "a pickle": {"pytorch_model.bin": b"\x80\x04."},
        "no weights": {},
        "a header longer than the file": {
            "model.safetensors": (2**40).to_bytes(8, "little") + b"{}"
        },
        "a truncated file": {"model.safetensors": save(good)[:5000]},
        "a config.json of brackets": {"config.json": b"[" * 100000},
    }
    wrong_maps = {
        "an index whose file is outside the folder": {norm: "../../secret.safetensors"},
        "an index without a map": [1],
        "an index that names a missing file": {norm: "a.safetensors"},
    }
    bad |= {what: {"tensors": tensors} for what, tensors in wrong_tensors.items()}
    bad |= {what: {"files": files} for what, files in wrong_files.items()}
    bad |= {what: {"index": {"weight_map": value}} for what, value in wrong_maps.items()}
    return bad


def list_refusals(folder):
    """Try to import every kind of directory that is refused. Returns (what, message) pairs."""
    refusals = []
    for number, (what, arguments) in enumerate(
        [*bad_directories().items(), ("no directory", None)]
    ):
        place = folder / str(number)
        place.mkdir()
        if arguments is not None:
            write_directory(place / "checkpoint", **{"values": BASE_CONFIG, **arguments})
        with pytest.raises(UserError) as refusal:
            import_quietly(place / "checkpoint", place / "run")
        assert not (place / "run").exists(), f"{what} was refused, and left something behind"
        refusals.append((what, str(refusal.value).replace(f"{place}/", "")))
    return refusals


def print_refusals():
    """Print what is not exported and not imported, as Markdown."""
    with tempfile.TemporaryDirectory() as folder:
        records, _ = export_ours(REFUSED, Path(folder))
        imports = list_refusals(Path(folder))
    print("Exports:\n")
    for record in records:
        print(f"- {record['name']}: {record['refused']}")
    families = ", ".join(FAMILIES)
    print(f"\nImports; FAMILIES is {families}:\n")
    for what, message in imports:
        print(f"- {what}: {message.replace(families, 'FAMILIES')}")


if __name__ == "__main__":
    print_refusals()
