"""Compare what an export computes in the programs that people run with what it computes here.

    PYTHONPATH=CLIENTS python experiments/clients.py out/smollm2 --text=wiki.test.txt \\
        --converter=llama.cpp/convert_hf_to_gguf.py

A run folder, imported from a public checkpoint, is extended by every method that can be exported,
without training, and exported, as by extend.py --max_iters=0 and hf.py export. Each export is then
read by transformers, mlx-lm (on a CPU) and llama.cpp (as the GGUF file that its own converter
makes). All of them encode the text by the tokenizer of the export, and compute logits in float32 at
the last positions of a short sequence and of one beyond the original context.

CLIENTS is a folder with the clients that are not installed with this project: mlx-lm and
llama-cpp-python, whose source distribution has the converter. One that cannot be imported is
reported as not run. Every comparison is saved in --work, and a later call makes those that are
missing. Writes the section "Clients" of --out, which is the report of interchange.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip

import contextlib
import hashlib
import importlib.util
import io
import json
import math
import os
import subprocess
import tempfile
import time
import warnings
from dataclasses import dataclass, replace

import torch

from data import tokenizer_from_json
from experiments.clients_scripts import CONTINUE, MAKE_SMOLLM3, QUANTIZE, SCRIPTS
from experiments.report import (
    CLIENTS_SECTION,
    count,
    load_finished_run,
    markdown_table,
    replace_section,
)
from model import GPT, ContextLengthWarning
from nanolong import cli
from nanolong.errors import UserError
from nanolong.hub.exporting import export_checkpoint
from nanolong.hub.gguf_import import import_gguf
from nanolong.provenance import current_commit, provenance
from nanolong.run.checkpoint import open_model
from nanolong.strict_json import to_json, write_json
from nanolong.validate import require

PROMPT = "The capital of France is"
# client -> the package that it is
PACKAGES = {"transformers": "transformers", "mlx-lm": "mlx_lm", "llama.cpp": "llama_cpp"}
N_CHARACTERS = 100_000  # of the text, that are encoded
SHORT = 400  # tokens of the sequence within the original context


@dataclass
class ClientsConfig:
    text: str = ""  # a plain text file
    # methods that are exported, in the order in which they are compared
    methods: str = "yarn,ntk-parts,llama3,pi,ntk,resonance,abf,ntk-lceg"
    factors: str = "4,2"
    # llama.cpp's convert_hf_to_gguf.py; without it llama.cpp reads no export
    converter: str = ""
    beyond: int = 512  # tokens of the long sequence that are beyond the original context
    compared: int = 400  # positions whose logits are compared, the last of a sequence
    # layers, from the first on, that compute the long sequence; 0: all, which takes minutes a cell
    long_layers: int = 4
    work: str = "out/clients"  # folder for exports and finished comparisons
    out: str = "out/interchange.md"  # the report, whose section is replaced
    note: str = ""  # a sentence about the clients, for the report
    redraw: bool = False  # write the report of what is saved, and run nothing

    def __post_init__(self):
        require(bool(self.text), "there is no text to compare on: give --text=FILE")
        require(self.beyond >= 1, f"beyond={self.beyond} is too small: give at least 1")
        require(self.compared >= 2, f"compared={self.compared} is too small: give at least 2")
        require(
            self.long_layers >= 0,
            f"long_layers={self.long_layers} is too small: give 0 for all layers, or more",
        )

    def extensions(self):
        """Return (method, factor) pairs: all methods with the first factor, then the others."""
        factors = [float(factor) for factor in self.factors.split(",")]
        return [(method, factor) for factor in factors for method in self.methods.split(",")]


# -----------------------------------------------------------------------------
# Programs in processes of their own


def run_child(words, folder):
    """Run a command outside of this project and return what it prints.

    transformers would take our kernels/ for a package that it looks for. Raises RuntimeError with
    the last line of the errors.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(lines[-1])
    return done.stdout


def run_script(text, words, folder):
    """Run a script that is given as text, with arguments."""
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return run_child([script, *words], folder)


def convert(export, file, cfg):
    """Let llama.cpp make a GGUF file of an export, with float32 weights."""
    converter = Path(cfg.converter).resolve()
    run_child([converter, export, "--outfile", file, "--outtype", "f32"], file.parent)


def obstacle(client, cfg):
    """Return why a client is not run, or None."""
    if cfg.redraw:
        return "not yet"
    if importlib.util.find_spec(PACKAGES[client]) is None:
        return "not installed"
    if client == "llama.cpp" and not cfg.converter:
        return "no --converter"
    return None


# -----------------------------------------------------------------------------
# One export


@dataclass
class Inputs:
    """What all clients compute."""

    text: str
    ids: list  # of the whole text, by our tokenizer
    lengths: list  # tokens of the sequences, which begin with the text
    compared: int

    def request(self):
        """Return what the clients' scripts read."""
        return {"text": self.text, "lengths": self.lengths, "compared": self.compared}


def make_inputs(model, cfg):
    """Return the Inputs: a short sequence, and one that is longer than the original context."""
    tokenizer = tokenizer_from_json(model.meta.get("tokenizer"))
    require(
        tokenizer is not None,
        f"the tokenizer of {model.folder} is unknown: import a checkpoint that has one",
    )
    try:
        text = Path(cfg.text).read_text(encoding="utf-8")[:N_CHARACTERS]
    except (OSError, ValueError) as error:
        raise UserError(f"--text={cfg.text} cannot be read ({error}): give a text file") from None
    ids = list(tokenizer.encode(text))
    lengths = [SHORT, model.config.original_length + cfg.beyond]
    require(
        len(ids) >= lengths[-1],
        f"--text={cfg.text} has {len(ids)} tokens in its first {N_CHARACTERS} characters, and "
        f"{lengths[-1]} are needed: give a longer text, or another --beyond",
    )
    return Inputs(text, ids, lengths, cfg.compared)


@torch.no_grad()
def our_logits(model, inputs):
    """Return our logits at the last positions of each sequence: name -> (T, V) float32."""
    logits = {}
    for length in inputs.lengths:
        tokens = torch.tensor([inputs.ids[:length]])
        with warnings.catch_warnings():
            # beyond the context is meant
            warnings.simplefilter("ignore", ContextLengthWarning)
            x = model.hidden_states(tokens)
        logits[str(length)] = model.head(x[0, -inputs.compared :]).contiguous()
    return logits


def cached_logits(model, inputs, file):
    """Return our_logits(), from a file where they are in it."""
    from safetensors.torch import load_file, save_file

    if not file.is_file():
        temporary = file.with_suffix(".tmp")
        save_file(our_logits(model, inputs), temporary)
        temporary.replace(file)
    return load_file(file)


def client_logits(client, checkpoint, inputs, folder):
    """Return a client's answers (ids and logits, as tensors), and its version."""
    from safetensors.torch import load_file

    (folder / "request.json").write_text(to_json(inputs.request()), encoding="utf-8")
    words = [checkpoint, folder / "request.json", folder / "answers.safetensors"]
    printed = run_script(SCRIPTS[client], words, folder)
    answers = load_file(folder / "answers.safetensors")
    return answers, printed.strip().splitlines()[-1]


def compare(ours, theirs, inputs):
    """Return what differs between our logits and a client's, by sequence."""
    found = {}
    for name, logits in ours.items():
        other = theirs[name].float()
        same = (logits.argmax(-1) == other.argmax(-1)).float().mean().item()
        targets = torch.tensor(inputs.ids[: int(name)])[-len(logits) :][1:]
        found[name] = {
            "difference": (logits - other).abs().max().item(),
            "largest": logits.abs().max().item(),
            "same_argmax": same,
            "our_perplexity": perplexity(logits, targets),
            "perplexity": perplexity(other, targets),
        }
    return found


def perplexity(logits, targets):
    """Return the perplexity of tokens: the logits at all positions but the last predict them."""
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].double(), targets).item())


def compare_client(client, model, checkpoint, inputs, cfg, logits_file):
    """Return the record of a client: version, seconds, same_ids and lengths, or error.

    checkpoint: an export, or a GGUF file; our logits are kept in logits_file.
    """
    place = checkpoint.parent
    started = time.monotonic()
    try:
        if client == "llama.cpp" and checkpoint.is_dir():
            gguf = place / "exported.gguf"
            convert(checkpoint, gguf, cfg)
            checkpoint = gguf
        answers, version = client_logits(client, checkpoint, inputs, place)
    except RuntimeError as error:
        return {"error": str(error)}
    seconds = time.monotonic() - started
    return {
        "commit": current_commit(),
        "version": version,
        "seconds": seconds,
        "same_ids": answers["ids"].tolist() == inputs.ids,
        "lengths": compare(cached_logits(model, inputs, logits_file), answers, inputs),
    }


# -----------------------------------------------------------------------------
# All exports


def compare_exports(run, inputs, cfg, folder):
    """Compare every export in every client; return the records, one for each of both.

    The short sequences of all exports are first, since the long ones take most of the time.
    """
    records = []
    for method, factor in cfg.extensions():
        for client in PACKAGES:
            record = {"method": method, "factor": factor, "client": client, "lengths": {}}
            records.append({**record, "obstacle": obstacle(client, cfg)})
    for length in inputs.lengths:
        one_length = replace(inputs, lengths=[length])
        if length > inputs.lengths[0]:
            run = first_layers(run, cfg.long_layers, folder)
        for method, factor in cfg.extensions():
            wanted = (method, factor)
            clients = [r for r in records if (r["method"], r["factor"]) == wanted]
            add_finished(clients, run, one_length, folder)
            if any(not client["obstacle"] for client in missing(clients, length)):
                compare_export(run, clients, one_length, cfg, folder)
    return records


def first_layers(run, n_layer, folder):
    """Return the folder of a run that has the first layers of a run; with 0, the run itself."""
    if n_layer == 0:
        return run
    target = folder / f"{run.name}-{n_layer}-layers"
    if not target.is_dir():
        model = GPT.load(run)
        n_all = model.config.n_layer
        require(
            n_layer <= n_all,
            f"long_layers={n_layer} is more than the {n_all} layers of {run}: give 0 for all",
        )
        model.blocks = model.blocks[:n_layer]
        model.config = replace(model.config, n_layer=n_layer)
        model.save(target / "step-000000")
    return target


def missing(records, length):
    """Return the records that have no comparison at a length."""
    return [record for record in records if str(length) not in record["lengths"]]


def record_file(record, inputs, folder):
    (length,) = inputs.lengths
    return folder / f"{record['method']}{record['factor']:g}-{length}-{record['client']}.json"


def run_key(run, inputs):
    """Return what a saved comparison was made of."""
    text = hashlib.sha256(inputs.text.encode()).hexdigest()
    return {"run": run.name, "text": text, "lengths": inputs.lengths, "compared": inputs.compared}


def add_finished(records, run, inputs, folder):
    """Add to records what was found before, at one length."""
    for record in records:
        finished = load_finished_run(record_file(record, inputs, folder), run_key(run, inputs))
        if finished:
            add_found(record, finished["found"])


def add_found(record, found):
    """Add to a record what was found at one length."""
    lengths = record["lengths"] | found.get("lengths", {})
    same_ids = record.get("same_ids", True) and found.get("same_ids", True)
    commits = record.get("commits", [])
    if "error" not in found:
        commits = [*commits, found.get("commit", "not recorded")]
    record |= {**found, "lengths": lengths, "same_ids": same_ids, "commits": commits}


def compare_export(run, records, inputs, cfg, folder):
    """Extend and export a run, and add to records what their clients compute at one length."""
    method, factor = records[0]["method"], records[0]["factor"]
    (length,) = inputs.lengths
    with tempfile.TemporaryDirectory(dir=folder) as name:
        export = Path(name) / "exported"
        model = extend_and_export(run, method, factor, export)
        config = json.loads((export / "config.json").read_text(encoding="utf-8"))
        logits_file = folder / f"{method}{factor:g}-{length}-ours.safetensors"
        for record in missing(records, length):
            if record["obstacle"]:
                continue
            found = compare_client(record["client"], model, export, inputs, cfg, logits_file)
            found["rope"] = config["rope_parameters"]["rope_type"]
            print(f"{method} x {factor:g}, {record['client']}: {to_json(found)}", flush=True)
            add_found(record, found)
            if "error" not in found:
                saved = {"key": run_key(run, inputs), "found": found}
                write_json(record_file(record, inputs, folder), saved)


def extend_and_export(run, method, factor, export):
    """Extend and export a run, as extend.py and hf.py do; return the extended model.

    Without hf.py's verification: the logits of transformers are compared here.
    """
    export_quietly(run, export, method, factor)
    model = GPT.load(run)
    model.extend(method, factor)
    return model


def export_quietly(run, export, method="none", factor=1.0):
    model = open_model(GPT, run)
    if factor > 1:
        model.extend(method, factor)
    with contextlib.redirect_stdout(io.StringIO()):
        export_checkpoint(model, export, verify=False)


# -----------------------------------------------------------------------------
# GGUF files, and the two commands


def compare_ggufs(run, inputs, cfg, folder):
    """Compare our import of GGUF files with llama.cpp's reading of them; return records by name."""
    # within the context, and our reading of a file is the model
    short = replace(inputs, lengths=inputs.lengths[:1])
    records = {}
    for name, make in GGUFS.items():
        key = run_key(run, short)
        file = folder / f"gguf-{name}.json"
        finished = load_finished_run(file, key)
        if finished:
            records[name] = finished["found"]
        elif not obstacle("llama.cpp", cfg) and not obstacle("transformers", cfg):
            with tempfile.TemporaryDirectory(dir=folder) as place:
                records[name] = compare_gguf(run, make, short, cfg, Path(place))
            print(f"{name}: {to_json(records[name])}", flush=True)
            if "error" not in records[name]:
                write_json(file, {"key": key, "found": records[name]})
    return records


def compare_gguf(run, make, inputs, cfg, place):
    """Return the record of llama.cpp for the GGUF file that a function makes, and we import."""
    export, gguf, imported = place / "exported", place / "made.gguf", place / "imported"
    export_quietly(run, export)
    theirs = make(export, gguf, cfg)
    with contextlib.redirect_stdout(io.StringIO()):
        import_gguf(GPT, gguf, imported)
    model = GPT.load(imported)
    return compare_client("llama.cpp", model, theirs, inputs, cfg, place / "ours.safetensors")


def make_quantized(export, gguf, cfg):
    """Write a Q4_K_M file by llama.cpp's quantiser, from an export; return what llama.cpp reads."""
    whole = gguf.with_name("whole.gguf")
    convert(export, whole, cfg)
    run_script(QUANTIZE, [whole, gguf, "MOSTLY_Q4_K_M"], gguf.parent)
    return gguf


def make_dequantized(export, gguf, cfg):
    """Write a Q4_K_M file; return what llama.cpp makes of it in float32."""
    make_quantized(export, gguf, cfg)
    whole = gguf.with_name("dequantized.gguf")
    run_script(QUANTIZE, [gguf, whole, "ALL_F32"], gguf.parent)
    return whole


def make_smollm3(export, gguf, cfg):
    """Write a SmolLM3 with random weights and the tokenizer of an export; return its file."""
    checkpoint = gguf.with_name("smollm3")
    run_script(MAKE_SMOLLM3, [export, checkpoint], gguf.parent)
    convert(checkpoint, gguf, cfg)
    return gguf


# what is imported -> the function that makes it
GGUFS = {
    "Q4_K_M": make_quantized,
    "Q4_K_M in float32": make_dequantized,
    "smollm3": make_smollm3,
}


def continue_prompt(run, cfg, folder):
    """Return what clients continue PROMPT with after YaRN x 4: client -> text."""
    file = folder / "continued.json"
    finished = load_finished_run(file, {"run": run.name}) or {"found": {}}
    found = finished["found"]
    wanted = []
    for client in ("mlx-lm", "llama.cpp"):
        if client not in found and not obstacle(client, cfg):
            wanted.append(client)
    if wanted:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            export = Path(place) / "exported"
            extend_and_export(run, "yarn", 4.0, export)
            for client in wanted:
                # a client may lack a package of its own: the others still answer
                try:
                    found[client] = continue_by(client, export, cfg)
                except RuntimeError as error:
                    print(f"{client} did not continue the prompt: {error}", flush=True)
        write_json(file, {"key": {"run": run.name}, "found": found})
    return found


def continue_by(client, export, cfg):
    """Return what a client continues PROMPT with. Raises RuntimeError if it fails."""
    if client == "mlx-lm":
        words = ["--model", export, "--prompt", PROMPT, "--ignore-chat-template"]
        words += ["--max-tokens", 8, "--temp", 0, "--verbose", "False"]
        return run_child(["-m", "mlx_lm", "generate", *words], export.parent).strip()
    gguf = export.with_suffix(".gguf")
    convert(export, gguf, cfg)
    return run_script(CONTINUE, [gguf, PROMPT], export.parent).strip()


# -----------------------------------------------------------------------------
# The report

# What a client computes otherwise, by its source of the version that is measured
NOTES = (
    "**YaRN's attention factor.** mlx-lm (`YarnRoPE`) reads `mscale` and `mscale_all_dim`, "
    "llama.cpp (`llama_context`) for Llama nothing at all: both multiply cos and sin by "
    "`0.1 ln(factor) + 1`, whatever `attention_factor` says. `ntk-parts` is YaRN with a factor of "
    "1. Exported with `attention_factor: 1.0` it was right in transformers alone. An export "
    "leaves the factor at theirs, and multiplies the queries' weights by the square of what is "
    "missing, so that the scores are ours everywhere.",
    "**longrope's attention factor.** mlx-lm (`SuScaledRoPE`) takes "
    "`sqrt(1 + ln(L / L0) / ln L0)` of the two context lengths. An export says the same in "
    "`attention_factor`, and multiplies the queries' weights by what is missing. mlx-lm uses "
    "`long_factor` at every length: an export with two tables is another model there up to the "
    "original length.",
    "**Tables in llama.cpp.** Its converter writes a longrope table for Phi-3 and MiniCPM alone. "
    "Of a Llama it writes the type without the table, and llama.cpp computes plain RoPE without a "
    "warning: this is what the row of `resonance` shows, and holds for `longrope`, and for "
    "`yarn` with `ramp=paper`, too. Export `yarn`, `ntk-parts`, `llama3`, `pi` or `ntk` instead.",
    "**Another base.** `ntk`, `abf` and `ntk-lceg` are plain RoPE with another `rope_theta`, and "
    "nothing in the file says that the context was extended.",
    "**Options of YaRN.** `truncate: false` is read by transformers alone. llama-cpp-python's "
    "class `Llama` puts its own `beta_fast` and `beta_slow` in the place of the file's: pass -1 "
    "for both, as was done here. llama-cli reads the file.",
    "**Layers without RoPE** (`drope`, `--layer_pattern` with N) are SmolLM3's in an export. "
    "llama.cpp leaves out RoPE in every fourth layer of a SmolLM3, whatever `no_rope_layers` "
    "says. Not run.",
)


def main():
    cfg, _, paths = cli.parse(ClientsConfig, about=__doc__, paths="RUN")
    require(len(paths) == 1, "clients.py compares one run: name its folder")
    run = Path(paths[0]).resolve()
    folder = Path(cfg.work).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    model = GPT.load(run)
    inputs = make_inputs(model, cfg)
    continued = continue_prompt(run, cfg, folder)
    ggufs = compare_ggufs(run, inputs, cfg, folder)
    records = compare_exports(run, inputs, cfg, folder)
    lines = format_report(run, records, ggufs, continued, inputs, cfg)
    replace_section(Path(cfg.out), CLIENTS_SECTION, lines)
    print("\n".join(lines))


def format_report(run, records, ggufs, continued, inputs, cfg):
    """Return the section of the report, as lines."""
    short, long = inputs.lengths
    original_length = long - cfg.beyond
    source = provenance(torch.device("cpu"), commits_of(records, ggufs))
    text = (
        f"`python experiments/clients.py {run.name} --text={Path(cfg.text).name} "
        f"--converter=convert_hf_to_gguf.py`, {source}. "
        f"{run.name} (context {original_length:,}), extended without training and exported; "
        f"{versions(records)}. llama.cpp reads what its own converter writes with "
        "`--outtype=f32`, and has a cache in float32. vLLM: not run."
    )
    if cfg.note:
        text += f" {cfg.note}"
    layers = ""
    if cfg.long_layers:
        layers = (
            f", through the first {count(cfg.long_layers, 'layer')} of the model, which predict "
            "nothing but have all that a client may compute otherwise"
        )
    how = (
        f"*within*: all {short} positions of {short} tokens; *beyond*: the last {inputs.compared} "
        f"of {long:,} tokens{layers}. A cell: the largest difference to our logits, the fraction "
        "of positions with the same most probable token, the perplexity. "
        f"{tokenizer_summary(records)}"
    )
    lines = [text, "", how, "", *client_table(records, inputs), ""]
    lines += ["What a client computes otherwise, and why:", ""]
    lines += [f"- {note}" for note in NOTES]
    lines += ["", "### GGUF files in", "", *gguf_lines(ggufs)]
    lines += ["", "### What a user types", "", *command_lines(continued)]
    return lines


def commits_of(records, ggufs):
    """Return the commits at which what is reported was measured."""
    commits = [found.get("commit", "not recorded") for found in ggufs.values()]
    for record in records:
        commits += record.get("commits", [])
    return commits


def versions(records):
    """Return which clients were run, and which not, and why."""
    found = {}
    for record in records:
        found.setdefault(record["client"], set())
        if record.get("version"):
            found[record["client"]].add(record["version"])
    parts = []
    for client, names in found.items():
        parts.append(" and ".join(sorted(names)) or f"{client}: not run")
    return ", ".join(parts)


def tokenizer_summary(records):
    """Return whether the clients' own tokenizers agree with ours."""
    measured = [record for record in records if record["lengths"]]
    differing = {record["client"] for record in measured if not record["same_ids"]}
    if not measured:
        return "Nothing is measured yet."
    if differing:
        return f"The text has other token ids in {', '.join(sorted(differing))}."
    return "Each client encodes the whole text by its own tokenizer to the same token ids as ours."


def client_table(records, inputs):
    """Return a row for each export and sequence."""
    header = ["method", "factor", "rope type", "positions", "our perplexity", *PACKAGES]
    rows = []
    exports = {}
    methods = list(dict.fromkeys(record["method"] for record in records))
    for record in sorted(records, key=lambda r: (methods.index(r["method"]), r["factor"])):
        exports.setdefault((record["method"], record["factor"]), []).append(record)
    for (method, factor), clients in exports.items():
        for name, positions in zip(map(str, inputs.lengths), ("within", "beyond"), strict=True):
            measured = [record for record in clients if name in record["lengths"]]
            rope, ours = "", ""
            if measured:
                rope = measured[0]["rope"]
                ours = format_perplexity(measured[0]["lengths"][name]["our_perplexity"])
            cells = [client_cell(record, name) for record in clients]
            rows.append([method, f"{factor:g}", rope, positions, ours, *cells])
    return markdown_table(header, rows)


def client_cell(record, name):
    if name not in record["lengths"]:
        if "error" in record:
            return f"fails: {record['error'][:80]}"
        return f"not run: {record['obstacle']}"
    found = record["lengths"][name]
    theirs = format_perplexity(found["perplexity"])
    return f"{found['difference']:.1e}, {100 * found['same_argmax']:.4g} %, {theirs}"


def format_perplexity(perplexity):
    """Return it as text; a part of a model predicts nothing, and its perplexity is huge."""
    return f"{perplexity:.4f}" if perplexity < 1e5 else f"{perplexity:.4e}"


def gguf_lines(ggufs):
    """Return what is said of GGUF files that llama.cpp has written."""
    if not ggufs:
        return ["Not run: llama.cpp is not installed."]
    what = {
        "Q4_K_M": "Q4_K_M, by llama.cpp's quantiser from the export of the model",
        "Q4_K_M in float32": "the same file, which llama.cpp's quantiser dequantises to float32 "
        "before llama.cpp reads it",
        "smollm3": "smollm3, random weights, float32, by llama.cpp's converter",
    }
    rows = []
    for name, found in ggufs.items():
        if "error" in found:
            rows.append([what[name], f"fails: {found['error'][:80]}", "", "", ""])
            continue
        (measured,) = found["lengths"].values()
        rows.append(
            [
                what[name],
                f"{measured['difference']:.1e} of {measured['largest']:.3g}",
                f"{100 * measured['same_argmax']:.4g} %",
                f"{measured['our_perplexity']:.4f}",
                f"{measured['perplexity']:.4f}",
            ]
        )
    header = ["file", "largest difference", "same argmax", "our perplexity", "llama.cpp's"]
    return [
        "The file imported by `hf.py import` compared with llama.cpp's own reading of it, at "
        f"{SHORT} positions. llama.cpp rounds activations to 8 bits where it multiplies them by "
        "quantised weights; we dequantise the weights and compute in float32.",
        "",
        *markdown_table(header, rows),
    ]


def command_lines(continued):
    """Return the commands for an export in the folder exported/, and what they print here."""
    said = "not run"
    if "mlx-lm" in continued:
        said = to_json(continued["mlx-lm"])
    llama_said = "not run"
    if "llama.cpp" in continued:
        llama_said = to_json(continued["llama.cpp"])
    return [
        "```",
        f'mlx_lm.generate --model exported --prompt "{PROMPT}" --ignore-chat-template --temp 0',
        "python convert_hf_to_gguf.py exported --outfile exported.gguf",
        f'llama-cli -m exported.gguf -no-cnv --temp 0 -p "{PROMPT}"',
        "```",
        "",
        f"Extended by YaRN x 4, the first continues the prompt with {said}, and llama.cpp (through "
        f"llama-cpp-python, as llama-cli is not in it) with {llama_said}.",
    ]


if __name__ == "__main__":
    cli.run_main(main)
