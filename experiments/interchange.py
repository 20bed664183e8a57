"""hf.py against transformers: every architecture it reads, times every RoPE type, tied or not, with random weights, in and out again; every refusal; tokenizers.

    python experiments/interchange.py               all, some minutes; writes results/interchange.md
    python experiments/interchange.py --only=llama  one architecture

Of a model that transformers makes: the largest difference of logits (float32) after import, read at once and token by token with a cache, beyond the trained length; after export, as AutoModelForCausalLM
loads it; and whether export, import, export gives the same bytes. Needs transformers, which runs in processes of its own.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import contextlib
import io
import json
import os
import subprocess
import tempfile
import warnings
from dataclasses import dataclass

import torch

import hf
from config import UserError
from model import GPT, GPTConfig, PastTrainedLength, Refused

L = 64  # the trained length of every case
READ = 144  # tokens read: past it, and a multiple of a quarter of it, as a dynamic scale wants
SHAPE = dict(vocab_size=131, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5)
ARCHITECTURES = {  # model_type, and what differs from SHAPE
    "Llama": ("llama", {}),
    "Llama, wide heads, no GQA": ("llama", {"head_dim": 16, "num_key_value_heads": 6, "vocab_size": 127}),
    "Mistral": ("mistral", {"sliding_window": None}),
    "Mistral, window": ("mistral", {"sliding_window": 21}),
    "Qwen2": ("qwen2", {}),
    "Qwen2, window in some layers": ("qwen2", {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1}),
    "Qwen3": ("qwen3", {}),
    "SmolLM3": ("smollm3", {"no_rope_layers": [1, 0, 1], "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}),
    "SmolLM3, no RoPE at all": ("smollm3", {"no_rope_layers": [0, 0, 0], "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}),
}
ROPES = {  # rope_parameters, or rope_scaling in the old form, and max_position_embeddings
    "default": ({"rope_type": "default", "rope_theta": 5e5}, L),
    "linear": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, L),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, L),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L, "rope_theta": 1e4}, 4 * L),
    "yarn, all options": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": L, "rope_theta": 1e4, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.05}, 4 * L),
    "yarn, old form, mscale": ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": L, "mscale": 0.7, "mscale_all_dim": 0.4}, 4 * L),
    "longrope": ({"rope_type": "longrope", "original_max_position_embeddings": L, "rope_theta": 1e4}, 4 * L),
    "llama3": ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": L, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}, 4 * L),
}

MAKE = """
import json, sys, torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
cases, folder = json.load(open(sys.argv[1])), sys.argv[2]

def read(model, tokens, first, cached):
    out = {"whole": model(tokens).logits, "short": model(tokens[:, :first]).logits}
    if cached:
        cache, parts = None, []
        for a, b in [(0, first), *((t, t + 1) for t in range(first, tokens.shape[1]))]:
            step = model(tokens[:, a:b], past_key_values=cache, use_cache=True)
            cache, parts = step.past_key_values, [*parts, step.logits]
        out["cached"] = torch.cat(parts, 1)
    return {name: value.contiguous() for name, value in out.items()}

answers = {}
with torch.no_grad():
    for number, case in enumerate(cases):
        where = f"{folder}/{case['name']}"
        if case["make"]:
            torch.manual_seed(number)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(case["model_type"], **case["settings"])).eval().float()
            for name, p in model.named_parameters():  # so that logits are of size 1, and nothing is left at its initial value
                p.normal_(1.0 if p.dim() == 1 and name.endswith("weight") else 0.0, 0.1 if p.dim() == 1 else 0.1 if name.split(".")[-2] in ("embed_tokens", "wte", "wpe", "lm_head") else 1 / p.shape[1] ** 0.5)
            model.tie_weights()
            model.save_pretrained(where, max_shard_size=case["shard"])
        else:
            model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
        tokens = torch.randint(case["vocab"], (2, case["read"]), generator=torch.Generator().manual_seed(number))
        for name, value in read(model, tokens, case["first"], case["cached"]).items():
            answers[f"{case['name']}/{name}"] = value
save_file(answers, sys.argv[3])
"""


@dataclass
class InterchangeConfig:
    only: str = ""                         # architectures whose name holds this
    out: str = "results/interchange.md"    # the table is written here


def theirs(cases, folder):
    """transformers' logits of directories under a folder, which it makes first where asked to: `name/whole`, `/short`, `/cached` -> (2, T, V)."""
    from safetensors.torch import load_file
    (folder / "cases.json").write_text(json.dumps(cases))
    (folder / "make.py").write_text(MAKE)
    done = subprocess.run([sys.executable, folder / "make.py", folder / "cases.json", folder, folder / "answers"], cwd=folder, capture_output=True, text=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "TRANSFORMERS_VERBOSITY": "error"})
    if done.returncode:
        raise RuntimeError(done.stderr)
    return load_file(folder / "answers")


def cases_of(only=""):
    """One case for each architecture, RoPE type and tied or not, as the child process takes them."""
    cases = []
    for architecture, (kind, more) in ARCHITECTURES.items():
        for rope, (parameters, length) in ROPES.items():
            for tied in (True, False):
                if only.lower() not in architecture.lower() or "at all" in architecture and rope != "default":
                    continue
                shape = {**SHAPE, **more}
                if rope == "longrope":
                    half = shape["head_dim"] // 2
                    parameters = {**parameters, "short_factor": [1.0 + 0.1 * i for i in range(half)], "long_factor": [1.0 + 1.5 * i for i in range(half)]}
                settings = {**shape, "max_position_embeddings": length, "tie_word_embeddings": tied, ("rope_scaling" if "type" in parameters else "rope_parameters"): parameters}
                dynamic = rope == "dynamic"
                cases.append(dict(name=f"{len(cases)}", architecture=architecture, rope=rope, tied=tied, model_type=kind, settings=settings, vocab=shape["vocab_size"], read=READ, first=41,
                                  cached=not dynamic and rope != "longrope", shard="20KB" if tied else "5GB", make=True))  # its cache keeps keys of the older scale
    for tied in (True, False):
        if only.lower() in "gpt-2":
            cases.append(dict(name=f"{len(cases)}", architecture="GPT-2", rope="learned", tied=tied, model_type="gpt2", settings=dict(vocab_size=131, n_positions=160, n_embd=48, n_layer=3, n_head=6, n_inner=None if tied else 100, tie_word_embeddings=tied),
                              vocab=131, read=READ, first=41, cached=True, shard="20KB" if tied else "5GB", make=True))
    if not cases:
        raise UserError(f"--only={only} is in no architecture's name: choose from {', '.join([*ARCHITECTURES, 'GPT-2'])}")
    return cases


@torch.no_grad()
def read(model, tokens, first, cached):
    """Our logits, as the child process's read() gives transformers'."""
    from generate import Cache
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PastTrainedLength)
        out, cache, parts = {"whole": model(tokens), "short": model(tokens[:, :first])}, Cache(), []
        if cached:
            for a, b in [(0, first), *((t, t + 1) for t in range(first, tokens.shape[1]))]:
                parts.append(model(tokens[:, a:b], cache=cache))
            out["cached"] = torch.cat(parts, 1)
    return out


def quietly(function, *arguments, **options):
    """What a function prints, as lines."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        function(*arguments, **options)
    return said.getvalue().strip().splitlines()


def there_and_back(cases, folder):
    """Run every case. Returns rows: dicts with architecture, rope, tied, size (of the largest logit), whole, cached (differences after import), exported, bytes ("same", or what differs), or refused."""
    wanted, rows, out = theirs(cases, folder), [], []
    for number, case in enumerate(cases):
        name = case["name"]
        row = {key: case[key] for key in ("architecture", "rope", "tied")}
        rows.append(row)
        quietly(hf.import_checkpoint, folder / name, folder / f"run-{name}")
        model = GPT.load(folder / f"run-{name}")
        tokens = torch.randint(case["vocab"], (2, case["read"]), generator=torch.Generator().manual_seed(number))
        mine = read(model, tokens, case["first"], case["cached"])
        row["size"] = mine["whole"].abs().max().item()
        apart = {key: (value - wanted[f"{name}/{key}"]).abs().max().item() for key, value in mine.items()}
        row["whole"], row["cached"] = max(apart["whole"], apart["short"]), apart.get("cached")
        try:
            quietly(hf.export_checkpoint, folder / f"run-{name}", folder / f"out-{name}", verify=False)
        except UserError as refusal:
            row["refused"] = str(refusal)
            continue
        out.append({**case, "name": f"out-{name}", "make": False, "number": number})
        quietly(hf.import_checkpoint, folder / f"out-{name}", folder / f"again-{name}")
        quietly(hf.export_checkpoint, folder / f"again-{name}", folder / f"out2-{name}", verify=False)
        first, second = ({file.name: file.read_bytes() for file in (folder / f"{stem}-{name}").iterdir()} for stem in ("out", "out2"))
        row["bytes"] = "same" if first == second else ", ".join(sorted(file for file in {**first, **second} if first.get(file) != second.get(file)))
    again = theirs([{**case, "make": False} for case in out], folder)
    for i, case in enumerate(out):  # its tokens are another number's: read anew
        tokens = torch.randint(case["vocab"], (2, case["read"]), generator=torch.Generator().manual_seed(i))
        mine = read(GPT.load(folder / f"run-{case['name'][4:]}"), tokens, case["first"], case["cached"])
        rows[case["number"]]["exported"] = max((value - again[f"{case['name']}/{key}"]).abs().max().item() for key, value in mine.items())
    return rows


# our own models: settings of GPTConfig, a method with its factor and options, and what they become there
OURS = {
    "rope": ({}, None), "rope, GQA, QK-norm": ({"n_kv_head": 2, "qk_norm": True}, None), "rope, window": ({"window": 21}, None), "rope, NoPE in every second block, window in the others": ({"nope_every": 2, "window": 21}, None),
    "rope, scores times 1.3": ({"attn_scale": 1.3}, None), "rope in half of a head": ({"rope_fraction": 0.5}, None), "rope in half of a head, QK-norm, yarn": ({"rope_fraction": 0.5, "qk_norm": True}, ("yarn", {})),
    "heads that do not divide the width": ({"n_embd": 50, "head_dim": 8}, None), "untied": ({"tied": False}, None),
    "nope": ({"pos": "nope"}, None), "nope, QK-norm": ({"pos": "nope", "qk_norm": True}, None), "nope, scale": ({"pos": "nope"}, ("scale", {"scale": 1.2})),
    "none": ({}, ("none", {})), "pi": ({}, ("pi", {})), "ntk": ({}, ("ntk", {})), "ntk-parts": ({}, ("ntk-parts", {})), "ntk-parts, ramp=paper": ({}, ("ntk-parts", {"ramp": "paper"})), "yarn": ({}, ("yarn", {})),
    "yarn, ramp=paper": ({}, ("yarn", {"ramp": "paper"})), "yarn, options": ({"rope_base": 5e5}, ("yarn", {"beta_fast": 8, "beta_slow": 2.0, "truncate": False, "attention_factor": 1.05})), "abf": ({}, ("abf", {})),
    "llama3": ({}, ("llama3", {})), "ntk-lceg": ({}, ("ntk-lceg", {})), "dynamic-ntk at a fixed length": ({}, ("dynamic-ntk", {"length": 200.0})), "resonance of yarn": ({}, ("resonance", {})), "resonance of pi": ({}, ("resonance", {"of": "pi"})),
    "longrope": ({}, ("longrope", {"long_factor": [1, 2, 3.5, 4]})), "longrope, two tables": ({}, ("longrope", {"long_factor": [1.0, 2.0, 3.5, 4.0], "short_factor": [1.0, 1.1, 1.2, 1.3]})),
    "drope": ({}, ("drope", {"scale": 1.1})), "drope, QK-norm": ({"qk_norm": True}, ("drope", {"scale": 1.1})),
    # refused
    **{pos: ({"pos": pos}, None) for pos in ("learned", "sinusoidal", "shaw", "nezha", "xl", "t5", "alibi", "kerple", "kerple-power", "sandwich")},
    "window and sinks": ({"window": 21, "sinks": 2}, None), "random positions": ({"random_positions": 512}, None), "NoPE in every second block beside QK-norm": ({"nope_every": 2, "qk_norm": True}, None),
    "longrope, two tables, in half of a head": ({"rope_fraction": 0.5}, ("longrope", {"long_factor": [1.0, 2.0], "short_factor": [1.0, 1.1]})),
    **{method: ({}, (method, {})) for method in ("dynamic-pi", "dynamic-ntk", "dynamic-yarn", "ntk-frozen", "lm-infinite", "self-extend")},
}


def ours_out(folder, names=OURS):
    """Export models of ours with random weights. Returns rows: name, there (the architecture and rope_type), exported (largest difference of logits), bytes, or refused."""
    rows, out, models = [], [], {}
    for number, name in enumerate(names):
        settings, stretched = OURS[name]
        torch.manual_seed(number)
        model = GPT(GPTConfig(**{**dict(n_layer=2, n_head=6, n_embd=48, block_size=L, vocab_size=131), **settings})).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(1.0 if p.dim() == 1 else 0.0, 0.1 if p.dim() == 1 else 0.1 if p is model.embed.weight or p is model.head.weight else 1 / p.shape[1] ** 0.5)
        rows.append(row := {"name": name})
        try:
            if stretched:
                model.stretch(stretched[0], 4.0, **stretched[1])
            model.save(folder / f"ours-{number}" / "step-000000")
            quietly(hf.export_checkpoint, folder / f"ours-{number}", folder / f"o-{number}", verify=False)
        except (UserError, Refused) as refusal:
            row["refused"] = str(refusal)
            continue
        written = json.loads((folder / f"o-{number}" / "config.json").read_text())
        row["there"] = f"{written['architectures'][0].removesuffix('ForCausalLM')}, {written['rope_parameters']['rope_type']}"
        quietly(hf.import_checkpoint, folder / f"o-{number}", folder / f"oursagain-{number}")
        quietly(hf.export_checkpoint, folder / f"oursagain-{number}", folder / f"o2-{number}", verify=False)
        first, second = ({file.name: file.read_bytes() for file in (folder / f"{stem}-{number}").iterdir()} for stem in ("o", "o2"))
        row["bytes"] = "same" if first == second else ", ".join(sorted(file for file in {**first, **second} if first.get(file) != second.get(file)))
        models[f"o-{number}"] = model, row
        out.append(dict(name=f"o-{number}", vocab=131, read=READ, first=41, cached=name != "longrope, two tables", make=False))
    answers = theirs(out, folder)
    for i, case in enumerate(out):
        model, row = models[case["name"]]
        mine = read(model, torch.randint(131, (2, READ), generator=torch.Generator().manual_seed(i)), 41, case["cached"])
        row["exported"] = max((value - answers[f"{case['name']}/{key}"]).abs().max().item() for key, value in mine.items())
    return rows


def main():
    cfg, _, _ = config.parse(InterchangeConfig, about=__doc__)
    text = ["# In and out of Hugging Face's format", "", f"`python experiments/interchange.py`, {config.provenance(torch.device('cpu'))}. Random weights, float32. A difference is the largest over {READ} tokens "
            f"({L} trained), two texts; *cached* after 41 tokens at once, one by one.", ""]
    with tempfile.TemporaryDirectory() as place:
        rows = there_and_back(cases_of(cfg.only), Path(place))
    text += ["## transformers' models, imported", "", "| architecture | rope type | tied | import | cached | exported again | export, import, export |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        text.append(f"| {row['architecture']} | {row['rope']} | {'yes' if row['tied'] else 'no'} | {row['whole']:.1e} | " + ("" if row["cached"] is None else f"{row['cached']:.1e}")
                    + (" | refused | |" if "refused" in row else f" | {row['exported']:.1e} | {row['bytes']} bytes |"))
    sizes = [row["size"] for row in rows]
    text += ["", f"The largest logit of a model is {min(sizes):.1f} to {max(sizes):.1f}. Largest difference of all: {max(max(row['whole'], row['cached'] or 0, row.get('exported', 0)) for row in rows):.1e}. `dynamic` is compared without a cache, and longrope with two tables too: transformers keeps keys of the older scale there.", ""]
    with tempfile.TemporaryDirectory() as place:
        mine = ours_out(Path(place))
    text += ["## Our models, exported", "", "| model | there | exported | export, import, export |", "|---|---|---|---|"]
    text += [f"| {row['name']} | {row['there']} | {row['exported']:.1e} | {row['bytes']} bytes |" for row in mine if "there" in row]
    text += ["", "## What is refused", "", "Exports:", ""] + [f"- {row['name']}: {row['refused']}" for row in mine if "refused" in row]
    text += ["", "Imports:", ""]
    with tempfile.TemporaryDirectory() as place:
        text += [f"- {name}: {sentence}" for name, sentence in refusals(Path(place))]
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    Path(cfg.out).write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))


def refusals(folder):
    """(what, the sentence) of every kind of directory that is not imported, each made and tried."""
    from safetensors.torch import save_file
    base = {"model_type": "llama", "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": L}
    good = {name: torch.zeros(shape) for name, shape in {"model.embed_tokens.weight": (131, 48), "lm_head.weight": (131, 48), "model.norm.weight": (48,), **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in {
        **{f"self_attn.{p}_proj": (48, 48) for p in "qkvo"}, "mlp.gate_proj": (80, 48), "mlp.up_proj": (80, 48), "mlp.down_proj": (48, 80), "input_layernorm": (48,), "post_attention_layernorm": (48,)}.items()}}.items()}
    without = {name: tensor for name, tensor in good.items() if name != "model.norm.weight"}
    tries = [(f"model_type {kind}", {"model_type": kind}, good) for kind in [*hf.WHY_NOT, "something_else", None]]
    tries += [(f"{key}: {value!r}", {key: value}, good) for key, value in (
        ("hidden_act", "gelu"), ("attention_bias", True), ("mlp_bias", True), ("quantization_config", {"bits": 4}), ("hidden_size", "48"), ("hidden_size", -48), ("num_hidden_layers", 2.5), ("num_hidden_layers", 60000), ("vocab_size", 1 << 29),
        ("num_attention_heads", True), ("rms_norm_eps", float("nan")), ("tie_word_embeddings", "yes"), ("partial_rotary_factor", 0.5), ("rope_scaling", {"rope_type": "spiral"}), ("rope_scaling", {"rope_type": "yarn", "factor": 0.5}),
        ("rope_scaling", {"rope_type": "yarn", "factor": "4"}), ("rope_scaling", {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0], "long_factor": [1.0] * 4}), ("rope_parameters", {"full_attention": {"rope_type": "default"}}), ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}), ("num_key_value_heads", 4), ("head_dim", 7))]
    tries += [("a tensor is missing", {}, without), ("a tensor has another shape", {}, {**good, "model.norm.weight": torch.zeros(47)}), ("a tensor too many", {}, {**good, "model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
              ("an integer tensor", {}, {**good, "model.norm.weight": torch.zeros(48, dtype=torch.int8)})]
    said = []

    def attempt(what, place):
        try:
            quietly(hf.import_checkpoint, place, folder / "never")
            raise AssertionError(f"{what} was imported")
        except (UserError, Refused) as refusal:
            said.append((what, str(refusal).replace(str(folder) + "/", "")))
        assert not (folder / "never").exists(), what

    for number, (what, more, tensors) in enumerate(tries):
        place = folder / f"checkpoint{number}"
        place.mkdir()
        (place / "config.json").write_text(json.dumps({**base, **more}))
        save_file(tensors, place / "model.safetensors")
        attempt(what, place)

    def directory(name, index=None, **files):
        place = folder / name
        place.mkdir()
        (place / "config.json").write_text(json.dumps(base))
        for file, content in files.items():
            (place / file.replace("_json", ".json").replace("_safetensors", ".safetensors").replace("_bin", ".bin")).write_bytes(content)
        if index is not None:
            (place / "model.safetensors.index.json").write_text(json.dumps(index))
        return place

    attempt("nothing there", folder / "nowhere")
    attempt("a pickle", directory("pickle", pytorch_model_bin=b"\x80\x04."))
    attempt("no weights", directory("empty"))
    attempt("an index whose file leaves the folder", directory("leaves", {"weight_map": {"model.norm.weight": "../../secret.safetensors"}}))
    attempt("an index without a map", directory("nomap", {"weight_map": [1]}))
    attempt("an index that names a missing file", directory("missing", {"weight_map": {"model.norm.weight": "a.safetensors"}}))
    attempt("a header that promises more than the file holds", directory("short", model_safetensors=(2**40).to_bytes(8, "little") + b"{}"))
    attempt("a truncated file", directory("cut", model_safetensors=(folder / "checkpoint0" / "model.safetensors").read_bytes()[:5000]))
    (place := directory("broken") / "config.json").write_text("[" * 100000)
    attempt("a config.json of brackets", place.parent)
    return said


if __name__ == "__main__":
    config.main(main, Refused)
