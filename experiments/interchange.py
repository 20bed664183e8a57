"""Compare hf.py with transformers: import, export and import again, and list what is refused.

    python experiments/interchange.py                 everything, some minutes
    python experiments/interchange.py --only=llama    the architectures with llama in their name

transformers makes every architecture that hf.py imports with every RoPE type, with tied embeddings
or not, and random weights. Measured is the largest difference of logits, in float32 and beyond the
original context length: after the import, in one forward pass and token by token with a cache; and
after an export, as AutoModelForCausalLM loads it. Then our own models are exported. Export, import
and export again should give the same bytes.

Needs transformers, which runs in processes of its own. Writes the report to --out, and keeps the
sections there that bench_files.py and clients.py are the source of.
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

from experiments.interchange_cases import (
    ARCHITECTURES,
    BAD_SETTINGS,
    BASE_CONFIG,
    LENGTH,
    N_TOKENS,
    OURS,
    REFUSED,
    ROPES,
    SHAPE,
    VOCAB_SIZE,
)
from experiments.report import CLIENTS_SECTION, MEMORY_SECTION, markdown_table, read_section
from model import GPT, ContextLengthWarning, GPTConfig
from nanolong import cli
from nanolong.errors import UserError
from nanolong.hub.exporting import export_checkpoint
from nanolong.hub.importing import import_checkpoint
from nanolong.hub.layout import UNSUPPORTED
from nanolong.inference import KVCache
from nanolong.provenance import provenance
from nanolong.run.checkpoint import open_model

N_PROMPT = 41  # these are the first forward pass of a comparison with a cache


@dataclass
class InterchangeConfig:
    only: str = ""  # architectures whose name contains this
    out: str = "out/interchange.md"  # the report


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

cases_file, folder, answers_file = sys.argv[1:]


def make_model(case, path):
    torch.manual_seed(case["seed"])
    config = AutoConfig.for_model(case["model_type"], **case["settings"])
    model = AutoModelForCausalLM.from_config(config).eval().float()
    # random, so that no term is hidden by an initial 0 or 1; the logits are of size 1
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
    """Return a Case for each architecture, RoPE type, and tied embeddings or not."""
    cases = []
    for architecture, (model_type, more) in ARCHITECTURES.items():
        ropes = ["default"] if "no RoPE" in architecture else list(ROPES)
        for rope in ropes:
            for tie_embeddings in (True, False):
                settings = {**SHAPE, **more, "tie_word_embeddings": tie_embeddings}
                settings |= rope_settings(rope, settings["head_dim"] // 2)
                cases.append((architecture, rope, model_type, settings))
    for tie_embeddings in (True, False):
        cases.append(("GPT-2", "learned", "gpt2", gpt2_settings(tie_embeddings)))

    wanted = [case for case in cases if only.lower() in case[0].lower()]
    if not wanted:
        names = ", ".join([*ARCHITECTURES, "GPT-2"])
        raise UserError(f"--only={only} is in no architecture's name: choose from {names}")
    return [make_case(number, *case) for number, case in enumerate(wanted)]


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
    parameters, max_position_embeddings = ROPES[rope]
    parameters = dict(parameters)
    for key in ("short_factor", "long_factor"):
        if key in parameters:
            parameters[key] = parameters[key][:n_pairs]
    key = "rope_scaling" if "type" in parameters else "rope_parameters"
    return {"max_position_embeddings": max_position_embeddings, key: parameters}


def gpt2_settings(tie_embeddings):
    return {
        "vocab_size": VOCAB_SIZE,
        "n_positions": 160,
        "n_embd": 48,
        "n_layer": 3,
        "n_head": 6,
        "n_inner": None if tie_embeddings else 100,
        "tie_word_embeddings": tie_embeddings,
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
    return capture_output(import_checkpoint, GPT, source, target)


def export_quietly(run, target):
    return capture_output(export_checkpoint, open_run(run), target, verify=False)


def open_run(run):
    """Return a model as export_checkpoint() takes it."""
    return open_model(GPT, run)


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
        tied = case.settings["tie_word_embeddings"]
        record = {"architecture": case.architecture, "rope": case.rope, "tied": tied}
        records.append(record)
        run = folder / f"run-{case.name}"
        import_quietly(folder / case.name, run)
        model = GPT.load(run)
        logits = compute_logits(model, case)
        found = differences(logits, answers, case)
        record["largest_logit"] = logits["long"].abs().max().item()
        record["imported"] = max(found["long"], found["short"])
        record["cached"] = found.get("cached")
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
        record["rope"] = "learned"
        if "rope_parameters" in config:
            record["rope"] = config["rope_parameters"]["rope_type"]
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
    contents = []
    for place in (first, second):
        contents.append({file.name: file.read_bytes() for file in place.iterdir()})
    names = sorted(contents[0].keys() | contents[1].keys())
    differing = [name for name in names if contents[0].get(name) != contents[1].get(name)]
    return ", ".join(differing) or "same"


def compare_exports(exported, folder):
    """Let transformers load what was exported, and record the difference of logits (exported)."""
    answers = run_transformers([item.case for item in exported], folder)
    for item in exported:
        logits = compute_logits(item.model, item.case)
        item.record["exported"] = max(differences(logits, answers, item.case).values())


# -----------------------------------------------------------------------------
# What is not imported


def base_tensors():
    """Return the tensors of BASE_CONFIG."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB_SIZE, 48),
        "model.norm.weight": (48,),
        "lm_head.weight": (VOCAB_SIZE, 48),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name in "qkvo":
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (48, 48)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (80, 48)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (80, 48)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (48, 80)
        shapes[f"{prefix}.input_layernorm.weight"] = (48,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (48,)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def write_directory(folder, settings=None, tensors=None, index=None, files=None):
    """Write a Hugging Face directory: changes of BASE_CONFIG, tensors, an index, other files."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**BASE_CONFIG, **(settings or {})}))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name, content in (files or {}).items():
        (folder / name).write_bytes(content)


def bad_directories():
    """Return directories that are not imported: what is wrong -> arguments of write_directory()."""
    from safetensors.torch import save

    good = base_tensors()
    bad = {}
    for model_type in [*UNSUPPORTED, "something_else", None]:
        bad[f"model_type {model_type}"] = {
            "settings": {"model_type": model_type},
            "tensors": good,
        }
    for key, value in BAD_SETTINGS:
        bad[f"{key}: {value!r}"] = {"settings": {key: value}, "tensors": good}

    norm, bias = "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"
    without_norm = {name: tensor for name, tensor in good.items() if name != norm}
    integer_norm = torch.zeros(48, dtype=torch.int8)
    bad["a tensor is missing"] = {"tensors": without_norm}
    bad["a tensor has another shape"] = {"tensors": {**good, norm: torch.zeros(47)}}
    bad["a tensor too many"] = {"tensors": {**good, bias: torch.zeros(48)}}
    bad["an integer tensor"] = {"tensors": {**good, norm: integer_norm}}

    outside, missing = {norm: "../../secret.safetensors"}, {norm: "a.safetensors"}
    bad["an adapter"] = {"files": {"adapter_config.json": b'{"peft_type": "LORA"}'}}
    bad["8-bit floats"] = {"tensors": {**good, norm: good[norm].to(torch.float8_e4m3fn)}}
    bad["a pickle"] = {"files": {"pytorch_model.bin": b"\x80\x04."}}
    bad["no weights"] = {}
    bad["an index whose file is outside the folder"] = {"index": {"weight_map": outside}}
    bad["an index without a map"] = {"index": {"weight_map": [1]}}
    bad["an index that names a missing file"] = {"index": {"weight_map": missing}}
    too_long = (2**40).to_bytes(8, "little") + b"{}"
    bad["a header longer than the file"] = {"files": {"model.safetensors": too_long}}
    bad["a truncated file"] = {"files": {"model.safetensors": save(good)[:5000]}}
    bad["a config.json of brackets"] = {"files": {"config.json": b"[" * 100000}}
    return bad


def list_refusals(folder):
    """Try to import every kind of directory that is refused. Returns (what, message) pairs."""
    refusals = []
    for number, (what, arguments) in enumerate(bad_directories().items()):
        place = folder / str(number)
        place.mkdir()
        write_directory(place / "checkpoint", **arguments)
        refusals.append((what, message_of_import(what, place)))
    refusals.append(("no directory", message_of_import("no directory", folder)))
    return refusals


def message_of_import(what, place):
    """Return the message with which PLACE/checkpoint is refused."""
    try:
        import_quietly(place / "checkpoint", place / "run")
    except UserError as refusal:
        message = str(refusal).replace(f"{place}/", "")
    else:
        raise AssertionError(f"{what} was imported")
    if (place / "run").exists():
        raise AssertionError(f"{what} was refused, and left something behind")
    return message


# -----------------------------------------------------------------------------
# The report


def main():
    cfg, _, _ = cli.parse(InterchangeConfig, about=__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cases = make_cases(cfg.only)
        answers = run_transformers(cases, folder)
        imports, exported_again = compare_imports(cases, answers, folder)
        ours, exported = export_ours({**OURS, **REFUSED}, folder)
        compare_exports(exported_again + exported, folder)
    with tempfile.TemporaryDirectory() as name:
        refusals = list_refusals(Path(name))
    text = "\n".join(format_report(imports, ours, refusals)) + "\n"
    print(text, end="")
    # the sections of bench_files.py and clients.py stay
    sections = [read_section(Path(cfg.out), name) for name in (MEMORY_SECTION, CLIENTS_SECTION)]
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    Path(cfg.out).write_text("".join([text, *sections]), encoding="utf-8")


def format_report(imports, ours, refusals):
    """Return the report in Markdown, as lines."""
    lines = [
        "# In and out of Hugging Face's format",
        "",
        f"`python experiments/interchange.py`, {provenance(torch.device('cpu'))}. Random weights, "
        f"float32. A difference is the largest of all logits of two texts of {N_TOKENS} tokens "
        f"(the original context length is {LENGTH}); *cached*: after {N_PROMPT} tokens one by one.",
        "",
        "## transformers' models, imported",
        "",
        *import_table(imports),
        "",
        summarize_imports(imports),
        "",
        "## Our models, exported",
        "",
        *export_table(ours),
        "",
        "## What is refused",
        "",
        "Exports:",
        "",
    ]
    for record in ours:
        if "refused" in record:
            lines.append(f"- {record['name']}: {record['refused']}")
    lines += ["", "Imports:", ""]
    lines += [f"- {what}: {message}" for what, message in refusals]
    return lines


def import_table(imports):
    header = ["architecture", "rope type", "tied", "import", "cached", "exported again"]
    rows = []
    for record in imports:
        cached, exported, same = "", "refused", ""
        if record["cached"] is not None:
            cached = f"{record['cached']:.1e}"
        if "refused" not in record:
            exported = f"{record['exported']:.1e}"
            same = f"{record['bytes']} bytes"
        tied = "yes" if record["tied"] else "no"
        imported = f"{record['imported']:.1e}"
        rows.append(
            [record["architecture"], record["rope"], tied, imported, cached, exported, same]
        )
    return markdown_table([*header, "export, import, export"], rows)


def summarize_imports(imports):
    logits = [record["largest_logit"] for record in imports]
    found = []
    for record in imports:
        found += [record["imported"], record["cached"] or 0.0, record.get("exported", 0.0)]
    return (
        f"The largest logit of a model is {min(logits):.1f} to {max(logits):.1f}. The largest "
        f"difference of all is {max(found):.1e}. `dynamic`, and longrope with its two tables, are "
        "compared without a cache: transformers keeps keys of the older scale there."
    )


def export_table(ours):
    header = ["model", "in transformers", "exported", "export, import, export"]
    rows = []
    for record in ours:
        if "refused" in record:
            continue
        architecture = f"{record['architecture']}, {record['rope']}"
        exported = f"{record['exported']:.1e}"
        rows.append([record["name"], architecture, exported, f"{record['bytes']} bytes"])
    return markdown_table(header, rows)


if __name__ == "__main__":
    cli.run_main(main)
