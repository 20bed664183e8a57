"""Compare hf.py with transformers: import, export and import again, and list what is refused.

    python experiments/interchange.py                 everything, some minutes
    python experiments/interchange.py --only=llama    the architectures with llama in their name

Every architecture that hf.py imports, times every RoPE type, with tied embeddings or not, is made by
transformers with random weights. Measured is the largest difference of logits, in float32 and beyond
the original context length: after the import, in one forward pass and token by token with a cache;
and after an export, as AutoModelForCausalLM loads it. Then our own models, exported. Whether export,
import and export give the same bytes is checked as well.

Needs transformers, which runs in processes of its own. Writes results/interchange.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import contextlib
import io
import json
import os
import subprocess
import tempfile
import warnings
from dataclasses import asdict, dataclass, replace

import torch

from experiments.report import markdown_table
from model import GPT, POSITIONS, ContextLengthWarning, GPTConfig
from nanolong import cli
from nanolong.errors import UserError
from nanolong.hf_export import export_checkpoint
from nanolong.hf_import import import_checkpoint
from nanolong.hf_layout import UNSUPPORTED
from nanolong.inference import KVCache
from nanolong.provenance import provenance

LENGTH = 64  # the original context length of every model
# Beyond the context length, and a multiple of a quarter of it, which is where our dynamic scales
# are the same as transformers'.
N_TOKENS = 144
N_PROMPT = 41  # these are the first forward pass of a comparison with a cache
VOCAB_SIZE = 131

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

# Our own models: name -> settings of GPTConfig, and a method of extension with its options
GPT2 = {"norm": "layernorm", "mlp": "gelu", "bias": "all", "pos": "learned"}
YARN_OPTIONS = {"beta_fast": 8, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.05}
TWO_TABLES = {"long_factor": [1.0, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]}
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


@dataclass
class InterchangeConfig:
    only: str = ""  # architectures whose name contains this
    out: str = "results/interchange.md"  # the report


@dataclass
class Case:
    """A model for the process that runs transformers."""

    name: str  # of its Hugging Face directory
    seed: int  # of its weights and tokens
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

cases_file, folder, answers_file = sys.argv[1:]


def make_model(case, path):
    torch.manual_seed(case["seed"])
    config = AutoConfig.for_model(case["model_type"], **case["settings"])
    model = AutoModelForCausalLM.from_config(config).eval().float()
    # nothing keeps its initial value, and the logits are of size 1
    for name, p in model.named_parameters():
        module = name.split(".")[-2]
        mean = 1.0 if p.dim() == 1 and name.endswith("weight") else 0.0
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
with open(cases_file) as file:
    cases = json.load(file)
for case in cases:
    path = f"{folder}/{case['name']}"
    tokens = torch.tensor(case["tokens"])
    n_prompt = case["n_prompt"]
    with torch.no_grad():
        if case["settings"] is None:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        else:
            model = make_model(case, path)
        answers[f"{case['name']}/long"] = model(tokens).logits
        answers[f"{case['name']}/short"] = model(tokens[:, :n_prompt]).logits
        if case["with_cache"]:
            answers[f"{case['name']}/cached"] = decode(model, tokens, n_prompt)
save_file({name: logits.contiguous() for name, logits in answers.items()}, answers_file)
"""


def run_transformers(cases, folder):
    """Return transformers' logits, `<name>/long`, `/short` and `/cached` -> (2, T, V).

    Cases with settings are made and written into the folder first.
    """
    from safetensors.torch import load_file

    described = []
    for case in cases:
        more = {"tokens": case.tokens.tolist(), "n_prompt": N_PROMPT}
        described.append({**asdict(case), **more})
    (folder / "cases.json").write_text(json.dumps(described))
    (folder / "script.py").write_text(TRANSFORMERS_SCRIPT)
    # outside of the project, whose kernels/ transformers would take for a package
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, "script.py", "cases.json", str(folder), "answers"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return load_file(folder / "answers")


def make_cases(only=""):
    """Return names and a Case for each architecture, RoPE type, and tied embeddings or not.

    A list of (architecture, RoPE type, tied, Case).
    """
    cases = []

    def add(architecture, rope, tied, **case):
        number = len(cases)
        shard_size = "20KB" if tied else "5GB"
        case = Case(str(number), number, shard_size=shard_size, **case)
        cases.append((architecture, rope, tied, case))

    for architecture, (model_type, more) in ARCHITECTURES.items():
        if only.lower() not in architecture.lower():
            continue
        ropes = ["default"] if "no RoPE" in architecture else list(ROPES)
        for rope in ropes:
            for tied in (True, False):
                settings = rope_settings(rope, {**SHAPE, **more, "tie_word_embeddings": tied})
                add(
                    architecture,
                    rope,
                    tied,
                    model_type=model_type,
                    settings=settings,
                    vocab_size=settings["vocab_size"],
                    # transformers' cache keeps keys of an older scale
                    with_cache=rope not in ("dynamic", "longrope"),
                )
    if only.lower() in "gpt-2":
        for tied in (True, False):
            settings = gpt2_settings(tied)
            add("GPT-2", "learned", tied, model_type="gpt2", settings=settings)
    if not cases:
        names = ", ".join([*ARCHITECTURES, "GPT-2"])
        raise UserError(f"--only={only} is in no architecture's name: choose from {names}")
    return cases


def rope_settings(rope, settings):
    """Return the settings of a config with those of a RoPE type."""
    parameters, max_position_embeddings = ROPES[rope]
    if rope == "longrope":
        n_pairs = settings["head_dim"] // 2
        tables = {key: parameters[key][:n_pairs] for key in ("short_factor", "long_factor")}
        parameters = {**parameters, **tables}
    key = "rope_scaling" if "type" in parameters else "rope_parameters"
    return {**settings, "max_position_embeddings": max_position_embeddings, key: parameters}


def gpt2_settings(tied):
    return {
        "vocab_size": VOCAB_SIZE,
        "n_positions": 160,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": None if tied else 100,
        "tie_word_embeddings": tied,
    }


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
            logits["cached"] = decode(model, tokens)
    return logits


def decode(model, tokens):
    cache = KVCache()
    logits = [model(tokens[:, :N_PROMPT], cache=cache)]
    for t in range(N_PROMPT, tokens.shape[1]):
        logits.append(model(tokens[:, t : t + 1], cache=cache))
    return torch.cat(logits, 1)


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


def import_quietly(source, target):
    return capture_output(import_checkpoint, GPT, GPTConfig, POSITIONS, source, target)


def export_quietly(run, target):
    return capture_output(export_checkpoint, GPT.load(run), target, verify=False)


@dataclass
class Exported:
    """An exported model that transformers has not loaded yet."""

    case: Case
    record: dict
    logits: dict


def compare_imports(cases, folder):
    """Import the cases of make_cases() and export them again.

    Returns (records, exported). A record has architecture, rope, tied; largest_logit, imported and
    cached (differences after import; cached may be None); refused (why there is no export), or
    bytes: "same", or the files that differ after export, import and export.
    """
    answers = run_transformers([case for *_, case in cases], folder)
    records, exported = [], []
    for architecture, rope, tied, case in cases:
        record = {"architecture": architecture, "rope": rope, "tied": tied}
        records.append(record)
        run = folder / f"run-{case.name}"
        import_quietly(folder / case.name, run)
        logits = compute_logits(GPT.load(run), case)
        found = differences(logits, answers, case)
        record["largest_logit"] = logits["long"].abs().max().item()
        record["imported"] = max(found["long"], found["short"])
        record["cached"] = found.get("cached")
        if export_twice(run, folder, record, case.name):
            new_case = replace(case, name=f"exported-{case.name}", settings=None)
            exported.append(Exported(new_case, record, logits))
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
        try:
            if extension:
                method, options = extension
                model.extend(method, 4.0, **options)
        except UserError as refusal:
            record["refused"] = str(refusal)
            continue
        model.save(run / "step-000000")
        if not export_twice(run, folder, record, f"ours-{number}"):
            continue
        target = folder / f"exported-ours-{number}"
        config = json.loads((target / "config.json").read_text())
        record["architecture"] = config["architectures"][0].partition("For")[0]
        record["rope"] = config.get("rope_parameters", {"rope_type": "learned"})["rope_type"]
        # transformers' cache keeps keys of the other table
        case = Case(target.name, number, with_cache=name != "longrope, two tables")
        if model.pos.bounded:
            case = replace(case, with_cache=True)
        exported.append(Exported(case, record, compute_logits(model, case)))
    return records, exported
