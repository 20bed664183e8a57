"""The cases of golden.py that run the scripts: data, training, extending, sampling, hf, refusals.

The main training runs are processes of their own, as from a shell; all other scripts run in this
process, which saves their imports.
"""

import hashlib
import inspect
import io
import json
import os
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import torch
from flags import TINY as SEQUENCES
from flags import last_of_each_flag
from golden_models import GPT2, make_model, model_options, random_tokens, record_extended
from safetensors.torch import load_file

from data import Dataset
from model import GPT, POSITIONS
from rope_scaling import METHODS

ROOT = Path.cwd()
DATASET = ROOT / "data" / "golden"
TEXT = ROOT.parent.parent / "text"
# older checkouts count the batches of an evaluation, of four sequences here
OLD = (ROOT / "nanolong" / "cli.py").exists()
TINY = [word.replace("eval_iters=8", "eval_iters=2") if OLD else word for word in SEQUENCES]
HF_GPT2 = ROOT.parent.parent / "gpt2"


# -------------------------------------------------------------------------------------------------
# Running scripts.


def call_script(script, *words):
    """Run a script in this process as `python SCRIPT WORDS` does: (exit status, stdout, stderr)."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    argv, status = sys.argv, 0
    sys.argv = [script, *last_of_each_flag(words)]
    try:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as exit:
        status = exit.code or 0
    finally:
        sys.argv = argv
    for stream in (out, err):
        stream.flush()
    return status, *(stream.buffer.getvalue().decode("utf-8") for stream in (out, err))


def must_call(script, *words):
    """call_script(), which must succeed; returns what it printed."""
    status, out, err = call_script(script, *words)
    if status:
        raise RuntimeError(f"{script} {' '.join(map(str, words))}: status {status}: {err[-2000:]}")
    return out


def run_script(script, *words, processes=0):
    """Run a script as a process of its own, or as several by torchrun; returns what it printed."""
    launch = [sys.executable]
    if processes:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launch, script, *last_of_each_flag(words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{script} {' '.join(map(str, words))}: {done.stderr[-2000:]}")
    return done.stdout


def dataset():
    """The dataset of all runs, prepared by this checkout when it is first asked for."""
    if not DATASET.is_dir():
        must_call("data/prepare.py", TEXT, "--name=golden")
    return DATASET


def trained(folder, name, *words):
    """A run folder of eight steps, trained when it is first asked for."""
    run = folder / "runs" / name
    if not run.is_dir():
        must_call("train.py", *TINY, f"--dataset={dataset()}", f"--out_dir={run}", *words)
    return run


def saved(folder, name, method="", **settings):
    """A step folder of a byte model with random weights, extended where a method is given."""
    step = folder / "saved" / name
    if not step.is_dir():
        model = make_model(**{"vocab_size": 257, "block_size": 32, **settings})
        if method:
            model.extend(method, 2.0, **model_options(method))
        model.meta = {"tokenizer": {"kind": "bytes"}, "bos": 256, "dataset": str(dataset())}
        model.save(step)
    return step


def record_run(found, run):
    """Record a run's log, and the tensors of its last step."""
    log = run / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
    for key in ("loss", "lr", "norm", "tokens", "val_loss", "val_bits_per_byte"):
        found[f"log {key}"] = [[row["step"], row[key]] for row in rows if key in row]
    steps = sorted(run.glob("step-*"))
    meta = last_meta(run)
    found["steps"] = [step.name for step in steps]
    for file in ("model", "optim"):
        if (steps[-1] / f"{file}.safetensors").is_file():
            for name, tensor in load_file(steps[-1] / f"{file}.safetensors").items():
                found[f"{file} {name}"] = tensor
    for key in ("step", "tokens", "bos", "pretraining_tokens"):
        found[f"meta {key}"] = meta.get(key)


def last_meta(run):
    """What meta.json of a run's last step says."""
    step = sorted(run.glob("step-*"))[-1]
    return json.loads((step / "meta.json").read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------------------
# Data.


def data(record, folder):
    """Token files of every kind, the batches made of them, and tokenizers."""
    text = TEXT / "textwrap.py"
    prepared = {
        "golden-folder": [TEXT],
        "golden-char": [TEXT, "--tokenizer=char"],
        "golden-file": [text, "--val_fraction=0.3"],
        "golden-char-file": [text, "--tokenizer=char"],
    }
    if "TIKTOKEN_CACHE_DIR" in os.environ:  # its vocabularies are downloaded otherwise
        prepared["golden-gpt2"] = [TEXT, "--tokenizer=gpt2"]
    for name, words in prepared.items():
        with record.case(f"prepared {name}") as found:
            must_call("data/prepare.py", *words, f"--name={name}")
            for file in sorted((ROOT / "data" / name).glob("*.bin")):
                found[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
            meta = json.loads((ROOT / "data" / name / "meta.json").read_text(encoding="utf-8"))
            found["meta.json"] = {key: meta[key] for key in ("tokenizer", "vocab_size", "bos")}
        with record.case(f"dataset {name}") as found:
            record_dataset(found, Dataset(str(ROOT / "data" / name)))
    for case, select, batch in (
        ("plain", {}, ()),
        ("long documents", {"min_doc": 20000, "separate": True}, ()),
        ("PoSE", {}, (128,)),
        ("PoSE, separate documents", {"separate": True}, (128,)),
    ):
        for bos in (None, False):
            with record.case(f"batches, {case}, bos {bos}") as found:
                chosen = Dataset(str(dataset()), bos)
                # older checkouts select by the length of a sequence, too
                takes_length = "length" in inspect.signature(chosen.select).parameters
                chosen.select(*[32] * takes_length, **select)
                for index in (0, 1, 5000, 20001):
                    batches = chosen.batch(index, 4, 32, 1337, *batch)
                    for i, part in enumerate(batches):
                        found[f"batch {index}, {i}"] = part


def record_dataset(found, dataset):
    """What a dataset says about itself."""
    found["vocab_size, bos, hash"] = [dataset.vocab_size, dataset.bos, dataset.hash]
    found["tokenizer"] = dataset.tokenizer.to_json()
    found["byte_lengths"] = dataset.tokenizer.byte_lengths
    for split in (dataset.train, dataset.val):
        name = "train" if split is dataset.train else "val"
        found[f"{name}, length"] = len(split)
        found[f"{name}, sequences"] = split.n_sequences(32)
        inputs, targets = split.sequence(3, 32)
        found[f"{name}, inputs"], found[f"{name}, targets"] = inputs, targets
    x = np.array(dataset.train.sequence(1, 64)[1])[None]
    found["bytes"] = float(dataset.count_bytes(x))
    if dataset.separator is not None:
        found["long_fraction"] = dataset.long_fraction(30000)


# -------------------------------------------------------------------------------------------------
# Training.

TRAINED = {  # each a process of its own, or two
    "AdamW": "",
    "Muon": "--optimizer=muon",
    "AdamW, default dtype": "--dtype=auto",
    "Muon, default dtype, accumulation": "--optimizer=muon --dtype=auto "
    "--gradient_accumulation_steps=3",
    "AdamW, two processes": "--gradient_accumulation_steps=2",
    "Muon, default dtype, two processes": "--optimizer=muon --dtype=auto "
    "--gradient_accumulation_steps=4",
}
QUICK = {  # in this process
    "float16": "--dtype=float16",
    "random positions": "--random_positions=64",
    "long documents": "--min_doc=20000 --separate_docs=true",
    "every shape": "--n_kv_head=1 --qk_norm=head --tie_embeddings=false --dropout=0.1 --window=8 "
    "--sinks=2 --attn_scale=1.2 --checkpoint_activations=true",
    "hybrid": "--layer_pattern=FN",
    "hybrid with a window": "--layer_pattern=WN --window=8",
    "cosine": "--lr_schedule=cosine --min_lr=1e-4 --grad_clip=0 --beta1=0.8",
    "constant, everything evaluated": "--lr_schedule=constant --eval_iters=0 --eval_interval=20 "
    "--log_interval=5 --block_size=512 --weight_decay=0",
    "no bos": "--bos=false --seed=7 --rope_base=500 --rope_fraction=0.5",
}


def training(record, folder):
    """Runs by the command line: what their logs say, and the tensors of their last steps."""
    longer = [*TINY, "--max_iters=20", "--eval_interval=10", f"--dataset={dataset()}"]
    for name, words in TRAINED.items():
        with record.case(name) as found:
            run = folder / "runs" / name
            words = [*longer, *words.split(), f"--out_dir={run}"]
            out = run_script("train.py", *words, processes=2 if "two" in name else 0)
            record_run(found, run)
            found["end of the sample"] = out.strip()[-12:]
    for name in ("AdamW", "Muon, default dtype, accumulation", "AdamW, two processes"):
        with record.case(f"{name}, resumed") as found:
            run = folder / "runs" / f"{name}, resumed"
            shutil.copytree(folder / "runs" / name, run)
            shutil.rmtree(run / "step-000020")
            words = [f"--out_dir={run}", "--init_from=resume"]
            run_script("train.py", *words, processes=2 if "two" in name else 0)
            record_run(found, run)
    for name, words in {**QUICK, **{f"scheme {pos}": f"--pos={pos}" for pos in POSITIONS}}.items():
        with record.case(name) as found:
            record_run(found, trained(folder, name, *words.split()))
    with record.case("more steps than at first") as found:
        run = trained(folder, "more steps")
        must_call("train.py", f"--out_dir={run}", "--init_from=resume", "--max_iters=14")
        record_run(found, run)
    with record.case("compiled training") as found:
        run = folder / "runs" / "compiled"
        words = ["--max_iters=4", "--compile=true", f"--out_dir={run}"]
        run_script("train.py", *longer, *words)
        record_run(found, run)


# -------------------------------------------------------------------------------------------------
# Extending.

EXTENDED = {  # name: (the run that is extended, the settings)
    "yarn": ("rope", "--method=yarn --factor=4 --max_iters=4"),
    "options": ("rope", "--method=ntk-parts --options=ramp=paper,beta_fast=16 --factor=2"),
    "PoSE": ("rope", "--factor=4 --pose=true"),
    "drope": ("rope", "--method=drope --factor=2"),
    "dynamic-ntk": ("rope", "--method=dynamic-ntk --factor=2"),
    "longrope": ("rope", "--method=longrope --factor=2 --options={table}"),
    "Muon": ("muon", "--method=pi --factor=2 --dtype=auto"),
    "hybrid": ("hybrid", "--factor=2 --learning_rate=1e-3"),
    "fitted scale": ("nope", "--method=scale --factor=2"),
    "fitted drope": ("rope", "--method=drope --factor=2 --options=scale=fit"),
    "alibi": ("alibi", "--method=dynamic-pi --factor=2"),
    "learned": ("learned", "--method=pi --factor=2"),
    "xl": ("xl", "--method=clamp --factor=2"),
    "long documents": ("rope", "--factor=2 --min_doc=20000"),
    "extended again": ("yarn", "--method=ntk --factor=2 --max_iters=2"),
    "extended only, lm-infinite": ("rope", "--method=lm-infinite --max_iters=0"),
    "extended only, resonance": ("rope", "--method=resonance --max_iters=0"),
    "extended only, alibi": ("alibi", "--method=pi --factor=2 --max_iters=0"),
}


def parent_run(folder, name):
    """The run that a case extends: that of the case "yarn", or one trained for this."""
    if name == "yarn":
        return folder / "extended" / name
    words = {"muon": "--optimizer=muon", "hybrid": "--layer_pattern=FN"}
    return trained(folder, f"parent {name}", words.get(name, f"--pos={name}"))


def extending(record, folder):
    """extend.py by several methods with few steps; resumed, and by two processes."""
    table = folder / "table.json"
    table.write_text(json.dumps({"long_factor": [1 + i / 2 for i in range(8)]}))
    for name, (parent, words) in EXTENDED.items():
        # the default of older checkouts
        words = ["--separate_docs=false", *words.format(table=table).split()]
        if not any(word.startswith("--max_iters") for word in words):
            words.append("--max_iters=3")
        with record.case(name) as found:
            run = folder / "extended" / name
            source = parent_run(folder, parent)
            must_call("extend.py", source, *words, f"--out_dir={run}")
            record_run(found, run)
            record_extended(found, GPT.load(run))
            settings = last_meta(run)["train"]
            for key in ("batch_size", "gradient_accumulation_steps", "learning_rate"):
                found[f"meta {key}"] = settings[key]
    source = parent_run(folder, "rope")
    with record.case("PoSE, two processes") as found:
        run = folder / "extended" / "two processes"
        words = ["--pose=true", "--max_iters=3", "--gradient_accumulation_steps=2"]
        words.append("--separate_docs=false")
        run_script("extend.py", source, *words, f"--out_dir={run}", processes=2)
        record_run(found, run)
    with record.case("resumed") as found:
        run = folder / "extended" / "resumed"
        words = [source, "--factor=2", "--max_iters=6", "--eval_interval=3", f"--out_dir={run}"]
        words.append("--separate_docs=false")
        must_call("extend.py", *words)
        shutil.rmtree(run / "step-000006")
        must_call("extend.py", *words, "--init_from=resume")
        record_run(found, run)


# -------------------------------------------------------------------------------------------------
# Sampling and evaluation.


SAMPLED = {
    "rope": {"pos": "rope"},
    "alibi": {"pos": "alibi"},
    "learned": {"pos": "learned", "block_size": 64},
    "extended": {"pos": "rope", "method": "dynamic-yarn"},
}
EVALUATED = {
    **SAMPLED,
    "random positions": {"pos": "rope", "random_positions": 96},
    "hybrid": {"pos": "rope", "layer_pattern": "WN", "window": 8, "sinks": 2},
    "lm-infinite": {"pos": "rope", "method": "lm-infinite"},
}


def sampling(record, folder):
    """sample.py's text."""
    prompt = folder / "prompt.txt"
    prompt.write_bytes("def naïve(\xff".encode("latin-1"))
    for name, words in {
        "defaults": [],
        "greedy": ["--start=def f", "--temperature=0"],
        "several": ["--num_samples=3", "--top_k=0", "--top_p=0.7", "--seed=3"],
        "from a file": [f"--start=FILE:{prompt}", "--top_k=5"],
        "bfloat16": ["--start=import ", "--dtype=bfloat16"],
        "none": ["--max_new_tokens=0", "--start=import "],
    }.items():
        for model, settings in SAMPLED.items():
            with record.case(f"{model}, {name}") as found:
                step = saved(folder, model, **settings)
                found["text"] = must_call("sample.py", step, "--max_new_tokens=25", *words)
    with record.case("compiled, rope") as found:
        words = ["--max_new_tokens=6", "--compile=true", "--temperature=0"]
        found["text"] = must_call("sample.py", saved(folder, "rope", **SAMPLED["rope"]), *words)
    with record.case("of a run, its best step") as found:
        run = trained(folder, "sampled", "--learning_rate=0.3")
        found["text"] = must_call("sample.py", run, "--best=true", "--max_new_tokens=40")


# Of evaluate.py's records: where they were computed, of which commit, and the hash of token ids.
NOT_COMPARED = ("folder", "commit", "key", "ids")


def evaluation(record, folder):
    """The values of evaluate.py --json: losses by every protocol, and needles."""
    models = [f"{name}={saved(folder, name, **model)}" for name, model in EVALUATED.items()]
    protocols = "--protocol=chunked,last-quarter,position,sliding,token-aligned"
    needle = ["--task=needle", "--depths=3", "--trials=8"]
    long = ["--lengths=16500", "--max_tokens=16500", "--protocol=chunked", "--dtype=float32"]
    float32 = ["--max_tokens=960", "--dtype=float32"]  # auto was bfloat16 on more CPUs
    rope = saved(folder, "rope", **SAMPLED["rope"])
    for name, words in {
        "protocols": [*models, "--lengths=16,32,96", protocols, "--stride=8", *float32],
        "defaults": [rope, f"--dataset={dataset()}", "--max_tokens=4096", "--dtype=float32"],
        "bfloat16": [rope, "--lengths=32,64", "--max_tokens=640", "--dtype=bfloat16"],
        "read in pieces": [rope, *long],
        "needle": [*models, *needle, "--lengths=40,64"],
        "needle, bfloat16": [rope, *needle, "--lengths=40,64", "--dtype=bfloat16", "--seed=2"],
        "needle, defaults": [rope, "--task=needle", "--trials=2"],
    }.items():
        with record.case(name) as found:
            file = folder / "evaluated.json"
            # what `auto` means differs on CPUs with bfloat16 that have no matrix units for it
            dtype = [] if "--dtype=bfloat16" in words else ["--dtype=float32"]
            must_call("evaluate.py", *words, *dtype, f"--json={file}")
            for i, row in enumerate(json.loads(file.read_text(encoding="utf-8"))):
                row["checkpoint"] = Path(row["checkpoint"]).name
                for key in NOT_COMPARED:
                    row.pop(key, None)
                found[f"row {i}"] = {**row, "refused": "refused" in row}


# -------------------------------------------------------------------------------------------------
# Hugging Face's format.

EXPORTED = {
    "llama": {"n_kv_head": 2, "tie_embeddings": False},
    "llama, plain": {},
    "mistral": {"window": 8},
    "qwen2": {"bias": "qkv"},
    "qwen2, window in some layers": {"bias": "qkv", "window": 8, "layer_pattern": "FFWW"},
    "qwen3": {"qk_norm": "head", "attn_scale": 1.5},
    "smollm3": {"layer_pattern": "FFFN"},
    "smollm3, window": {"layer_pattern": "WWWN", "window": 8},
    "smollm3, window in its other layers": {"layer_pattern": "FFFS", "window": 8},
    "nope": {"pos": "nope"},
    "nope, QK-norm": {"pos": "nope", "qk_norm": "head"},
    "scaled": {"attn_scale": 2.0, "bias": "qkv", "rope_base": 5e5},
    "half the channels": {"rope_fraction": 0.5, "head_dim": 16},
    "wide heads": {"head_dim": 12, "mlp_dim": 40, "norm_eps": 1e-6},
    "sinks": {"window": 8, "sinks": 2},
    "t5": {"pos": "t5"},
    "random positions": {"random_positions": 96},
    "half the channels, yarn": {"rope_fraction": 0.5, "head_dim": 16, "method": "yarn"},
    "nope, scale": {"pos": "nope", "method": "scale"},
}


def hf(record, folder):
    """What is exported, and what an import makes of it again."""
    exported = {name: {"n_layer": 4, **settings} for name, settings in EXPORTED.items()}
    for method in METHODS:
        exported[f"method {method}"] = {"method": method}
    for name, settings in exported.items():
        settings = {"pos": "rope", **settings}
        with record.case(name) as found:
            step = saved(folder, f"hf {name}", **settings)
            target = folder / "exported" / name
            export_and_record(found, step, target)
        if target.is_dir():
            with record.case(f"{name}, imported again") as found:
                import_and_record(found, target, folder / "imported" / name)
    if HF_GPT2.is_dir():
        with record.case("GPT-2") as found:
            import_and_record(found, HF_GPT2, folder / "imported" / "gpt2")
            target = folder / "exported" / "gpt2"
            export_and_record(found, folder / "imported" / "gpt2", target)
        with record.case("GPT-2, extended") as found:
            model = GPT.load(folder / "imported" / "gpt2")
            model.extend("pi", 2.0)
            found["logits"] = model(random_tokens(2, 48))
            model.save(folder / "saved" / "extended gpt2")
            again = GPT.load(folder / "saved" / "extended gpt2")
            found["logits of what was saved"] = again(random_tokens(2, 48))
    with record.case("GPT-2's shape") as found:
        step = saved(folder, "hf GPT-2's shape", mlp_dim=128, **GPT2)
        export_and_record(found, step, folder / "exported" / "gpt2's shape")


def export_and_record(found, source, target):
    status, _, err = call_script("hf.py", "export", source, target, "--verify=false")
    found["status"] = status
    if status not in (0, 2):
        raise RuntimeError(err[-2000:])
    if status:
        return
    for file in sorted(target.iterdir()):
        if file.suffix == ".json":
            found[file.name] = json.loads(file.read_text(encoding="utf-8"))
    for name, tensor in load_file(target / "model.safetensors").items():
        found[f"tensor {name}"] = tensor


def import_and_record(found, source, target):
    must_call("hf.py", "import", source, target)
    model = GPT.load(target)
    for name, p in model.named_parameters():
        found[f"imported {name}"] = p
    found["bos, tokenizer"] = [model.meta.get("bos"), model.meta.get("tokenizer")]
    found["block_size"] = model.config.block_size
    found["original_length"] = model.config.original_length
    extension = model.config.extension
    found["extension"] = extension and [extension[key] for key in ("method", "factor", "options")]
    vocab_size = model.config.vocab_size
    with torch.no_grad():
        found["imported logits"] = model(random_tokens(2, 24, vocab_size))


# -------------------------------------------------------------------------------------------------
# Exit statuses.

COMMANDS = """
train.py --help
train.py --learning_rat=1
train.py --n_layer=four
train.py --n_layer=2.5
train.py --n_layer
train.py --optimizer=sgd
train.py --tie_embeddings=perhaps
train.py --pos=cope
train.py --vocab_size=3
train.py rope
train.py config/nothing.toml
train.py --batch_size=0
train.py --learning_rate=nan
train.py --dataset=nothing
train.py --device=tpu
train.py --n_embd=100 --n_head=3
train.py --init_from=resume --out_dir={out}/never-made
train.py --block_size=100000000 --dataset={data} --out_dir={out}/a
train.py --bos=maybe
train.py --layer_pattern=FFFFN
train.py --pos=learned --layer_pattern=FN
train.py --pos=alibi --random_positions=999
train.py --random_positions=100
train.py --window=-1
train.py --sinks=2
train.py --dropout=1
train.py --tasks=niah:2
train.py --beta2=1
train.py --n_embd=30 --n_head=2 --pos=rope
train.py --rope_fraction=1.5
train.py --out_dir={run} --dataset={data}
train.py --out_dir={run} --init_from=resume --n_layer=3
train.py --out_dir={cut_optimizer} --init_from=resume
train.py --out_dir={run} --init_from=resume --max_iters=8
train.py --out_dir={run} --init_from=resume --max_iters=8 --n_layer=2
train.py config/debug.toml --dataset={data} --out_dir={out}/b --min_doc=99999999
train.py config/debug.toml --dataset={data} --out_dir={out}/c --max_iters=3 --learning_rate=1e30
train.py config/debug.toml --dataset={data} --out_dir={out}/d --tasks=niah:0.5 --block_size=16
train.py config/debug.toml --dataset={data} --out_dir={out}/e --max_iters=0
extend.py --help
extend.py
extend.py {out}/never-made
extend.py {run} --method=yarm
extend.py {run} --factor=0.5
extend.py {run} --options=beta
extend.py {run} --options=beta=1
extend.py {run} --method=llama3 --options=high_freq_factor=0.5
extend.py {run} --method=self-extend
extend.py {run} --method=drope --pose=true
extend.py {run} --method=longrope
extend.py {run} --options=gone.json --method=longrope
extend.py {run} --out_dir={run}
extend.py {step} --max_iters=0
extend.py {step} --method=pi --max_iters=0 --dataset={data} --learning_rate=1e-3 --out_dir={out}/f
extend.py {run} --method=pi --factor=2 --max_iters=0 --out_dir={out}/g
sample.py --help
sample.py {out}/never-made
sample.py {run} --top_p=0
sample.py {run} --temperature=-1
sample.py {run} --start=FILE:gone.txt
sample.py {run} {run}
sample.py {learned} --max_new_tokens=1000
sample.py {run} --max_new_tokens=40
sample.py
sample.py {cut_weights}
sample.py {cut_meta}
evaluate.py --help
evaluate.py
evaluate.py {run} --protocol=sliding-ish
evaluate.py {run} --protocol=sliding --stride=-1
evaluate.py {run} --lengths=0
evaluate.py {run} --plot=a.svg
evaluate.py {run} --task=needle --depths=0
evaluate.py a={run} a={step}
evaluate.py {out}/never-made
evaluate.py {step} --lengths=32 --max_tokens=640 --plot={out}/e.png
evaluate.py {step} --task=needle --lengths=32 --trials=2 --plot={out}/n.png
hf.py --help
hf.py
hf.py import
hf.py import {out}/never-made {out}/g
hf.py import {data} {out}/g
hf.py export {run} {data} --verify=false
hf.py import {data} {out}/g --verify=false
data/prepare.py --help
data/prepare.py
data/prepare.py gone.txt
data/prepare.py --dataset=imagenet
data/prepare.py {text} --name=../x
data/prepare.py {text} --name=golden
data/prepare.py {text} --name=y --val_fraction=1
data/prepare.py {text} --name=y --tokenizer={out}/never-made
"""


def damaged(folder, file):
    """A copy of a run in whose last step a file lacks its last bytes."""
    run = folder / f"damaged {file}"
    shutil.copytree(trained(folder, "for statuses"), run)
    damaged_file = run / "step-000008" / file
    damaged_file.write_bytes(damaged_file.read_bytes()[:-20])
    return run


def statuses(record, folder):
    """Exit statuses at the command line, mostly of what is refused; and what is left of it."""
    paths = {
        "run": trained(folder, "for statuses"),
        "step": saved(folder, "rope", **SAMPLED["rope"]),
        "learned": saved(folder, "learned", **SAMPLED["learned"]),
        "data": dataset(),
        "text": TEXT,
        "out": folder / "statuses",
        "cut_weights": damaged(folder, "model.safetensors"),
        "cut_optimizer": damaged(folder, "optim.safetensors"),
        "cut_meta": damaged(folder, "meta.json"),
    }
    (folder / "statuses").mkdir()
    for line in COMMANDS.strip().splitlines():
        with record.case(line) as found:
            status, _, err = call_script(*(word.format(**paths) for word in line.split()))
            found["status"] = status
            found["an error line"] = "error: " in err and "Traceback" not in err
    with record.case("what is left") as found:
        out = folder / "statuses"
        made = [*out.glob("**/step-*/*"), *out.glob("*.png")]
        found["files"] = sorted(str(file.relative_to(out)) for file in made)
