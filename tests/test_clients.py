"""Exports in the programs that people run: transformers, mlx-lm and llama.cpp.

    NANOLONG_CONVERTER=llama.cpp/convert_hf_to_gguf.py PYTHONPATH=CLIENTS \\
        python -m pytest tests/test_clients.py --all

SmolLM2-135M-Instruct (NANOLONG_SMOLLM2, as in test_smollm2.py) is extended by every method that can
be exported, without training. Each client encodes a text by the tokenizer of the export, and
computes logits in float32 at the last positions of a short sequence and of one beyond the original
context. llama.cpp reads the GGUF file that its own converter makes, and those that hf.py writes:
experiments/results/gguf.md has what they compute in the whole model, which --exhaustive runs.
CLIENTS is a folder with mlx-lm and llama-cpp-python, whose source distribution has the converter.
What a client computes otherwise, and why: experiments/results/interchange.md.
"""

import _pydecimal
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import interchange
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_success
from safetensors.torch import load_file

from data import tokenizer_from_json
from model import GPT, ContextLengthWarning
from nanolong.hub.exporting import export_checkpoint
from nanolong.hub.gguf_export import export_gguf
from nanolong.hub.gguf_import import import_gguf

REAL_FILE = os.environ.get("NANOLONG_SMOLLM2", "")
CONVERTER = os.environ.get("NANOLONG_CONVERTER", "")
TEXT = Path(_pydecimal.__file__).read_text(encoding="utf-8")[:40_000]
PROMPT = "The capital of France is"
CONTEXT = 1024  # the original context of a model of a few layers, which computes a long sequence
LENGTHS = (400, CONTEXT + 512)
COMPARED = 400  # positions whose logits are compared, the last of a sequence
METHODS = ("yarn", "ntk-parts", "llama3", "pi", "ntk", "resonance", "abf", "ntk-lceg")
CLIENTS = {"transformers": "transformers", "mlx-lm": "mlx_lm", "llama.cpp": "llama_cpp"}

# The files that hf.py writes: name -> method, its options, the type of matrices. All are extended
# by 4; the frequencies of the last two are the tensor rope_freqs.
ONE_TABLE = {"long_factor": [4 ** (pair / 31) for pair in range(32)]}
GGUF_FILES = {
    "unextended": ("none", {}, "float32"),
    "yarn": ("yarn", {}, "float32"),
    "yarn, float16": ("yarn", {}, "float16"),
    "ntk-parts": ("ntk-parts", {}, "float32"),
    "longrope": ("longrope", ONE_TABLE, "float32"),
    "resonance": ("resonance", {}, "float32"),
}
GGUF_LENGTHS = (2048, 9216)  # the context length of SmolLM2 is 8,192
GGUF_COMPARED = 1000  # so all of them are beyond it in the longer sequence

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not REAL_FILE, reason="it needs SmolLM2's file: make smollm2, and set NANOLONG_SMOLLM2"
    ),
]

# -----------------------------------------------------------------------------
# The clients, each in a process of its own, outside of this project: transformers would take our
# kernels/ for a package that it looks for.

START = """
import json, os, sys
import numpy as np
from safetensors.numpy import save_file

checkpoint, request = sys.argv[1], json.loads(sys.argv[2])
lengths, compared = request["lengths"], request["compared"]
"""
TRANSFORMERS = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

words = {}
if checkpoint.endswith(".gguf"):
    checkpoint, words["gguf_file"] = os.path.split(checkpoint)
tokenizer = AutoTokenizer.from_pretrained(checkpoint, **words)
ids = tokenizer(request["text"], add_special_tokens=False).input_ids
if words:  # of a GGUF file it leaves out the pre-tokenizer, so its ids may be others
    ids = request["ids"]
model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, **words).eval()

@torch.no_grad()
def compute_logits(ids):
    return model(torch.tensor([ids]), logits_to_keep=compared, use_cache=False).logits[0].numpy()
"""
MLX_LM = """
import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

model, tokenizer = mlx_lm.load(checkpoint)
ids = tokenizer.encode(request["text"], add_special_tokens=False)

def compute_logits(ids):
    cache = make_prompt_cache(model)
    for start in range(0, len(ids) - compared, 256):
        end = min(start + 256, len(ids) - compared)
        model(mx.array([ids[start:end]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    return np.array(model(mx.array([ids[-compared:]]), cache=cache)[0])
"""
# What the file says holds, as in llama-cli: llama_cpp.Llama has values of its own for YaRN.
# type_k and type_v: a cache in float32.
LLAMA_CPP = """
import llama_cpp

model = llama_cpp.Llama(
    checkpoint,
    n_ctx=max(lengths),
    n_batch=256,
    n_ubatch=256,
    type_k=llama_cpp.GGML_TYPE_F32,
    type_v=llama_cpp.GGML_TYPE_F32,
    yarn_attn_factor=-1.0,
    yarn_beta_fast=-1.0,
    yarn_beta_slow=-1.0,
    verbose=False,
)
ids = model.tokenize(request["text"].encode(), add_bos=False, special=False)

def compute_logits(ids):
    context, n_vocab = model.ctx, model.n_vocab()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(256, 0, 1)
    rows = []
    for start in range(0, len(ids), 256):
        part = ids[start : start + 256]
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i] = token, start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = start + i >= len(ids) - compared
        assert llama_cpp.llama_decode(context, batch) == 0
        for i in range(len(part)):
            if batch.logits[i]:
                row = llama_cpp.llama_get_logits_ith(context, i)
                rows.append(np.ctypeslib.as_array(row, (n_vocab,)).copy())
    return np.stack(rows)
"""
CONTINUE = """
answer = model(request["prompt"], max_tokens=8, temperature=0.0)
print(answer["choices"][0]["text"], end="")
"""
END = """
answers = {str(length): compute_logits(ids[:length]) for length in lengths}
save_file({"ids": np.array(ids), **answers}, "answers")
"""
SCRIPTS = {"transformers": TRANSFORMERS, "mlx-lm": MLX_LM, "llama.cpp": LLAMA_CPP}
# arguments: a GGUF file, the file to write, and its type, as llama.h names it
QUANTIZE = """
import sys, llama_cpp

source, target, file_type = sys.argv[1:]
options = llama_cpp.llama_model_quantize_default_params()
options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{file_type}")
options.allow_requantize = True
assert llama_cpp.llama_model_quantize(source.encode(), target.encode(), options) == 0
"""


def run_child(words, folder):
    """Run Python in a folder; returns what it prints."""
    words = [sys.executable, *map(str, words)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=environment)
    return assert_success(done).stdout


def run_client(client, checkpoint, lengths, folder, end=END, compared=COMPARED, ids=()):
    """Return what a client prints about a checkpoint; END leaves its answers in the folder."""
    request = {"text": TEXT, "lengths": lengths, "compared": compared, "prompt": PROMPT}
    request["ids"] = ids
    words = ["-c", START + SCRIPTS[client] + end, checkpoint, json.dumps(request)]
    return run_child(words, folder)


def skip_without(client, converter=CONVERTER):
    if importlib.util.find_spec(CLIENTS[client]) is None:
        pytest.skip(f"{client} is not installed")
    if client == "llama.cpp" and not converter:
        pytest.skip("it needs NANOLONG_CONVERTER, llama.cpp's convert_hf_to_gguf.py")


def convert(export):
    """Let llama.cpp make a GGUF file of an export, with float32 weights; return it."""
    file = export.with_suffix(".gguf")
    run_child([CONVERTER, export, "--outfile", file, "--outtype", "f32"], export.parent)
    return file


# -----------------------------------------------------------------------------
# Our side


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """SmolLM2, and its first layers, which predict nothing but compute all that a client may."""
    folder = tmp_path_factory.mktemp("clients")
    interchange.capture_output(import_gguf, GPT, Path(REAL_FILE), folder / "whole")
    model = GPT.load(folder / "whole")
    model.blocks = model.blocks[:4]
    model.config = replace(model.config, n_layer=4, block_size=CONTEXT)
    model.save(folder / "layers" / "step-000000")
    return folder


def extend_and_export(run, export, method="none", factor=1.0):
    """Extend and export a run, as extend.py --max_iters=0 and hf.py do; return the model."""
    stored, model = interchange.open_run(run), GPT.load(run)
    for extended in (stored, model):
        if factor > 1:
            extended.extend(method, factor)
    interchange.capture_output(export_checkpoint, stored, export, verify=False)
    return model


class Agreement(NamedTuple):
    """Of the logits at the last positions of a sequence."""

    difference: float  # the largest, as a fraction of the largest logit
    same: float  # the fraction of positions with the same most probable token
    perplexity: float  # ours
    their_perplexity: float


@torch.no_grad()
def compute_logits(model, ids, compared):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ContextLengthWarning)
        x = model.hidden_states(torch.tensor([ids]))
    return model.head(x[0, -compared:])


def measure(ours, theirs, targets):
    """Return the Agreement of two tables of logits; targets: the token after each position."""
    difference = (ours - theirs).abs().max() / ours.abs().max()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    losses = [F.cross_entropy(x.double(), torch.tensor(targets)) for x in (ours, theirs)]
    return Agreement(difference.item(), same.item(), *(loss.exp().item() for loss in losses))


def encode(model):
    return list(tokenizer_from_json(model.meta["tokenizer"]).encode(TEXT))


def compare(client, model, checkpoint, lengths, folder, compared=COMPARED):
    """Return the Agreement of a client with a model at each length."""
    ids = encode(model)
    run_client(client, checkpoint, lengths, folder, compared=compared, ids=ids)
    answers = load_file(folder / "answers")
    assert answers["ids"].tolist() == ids
    found = []
    for length in lengths:
        ours = compute_logits(model, ids[:length], compared)
        targets = ids[length - compared + 1 : length + 1]
        found.append(measure(ours, answers[str(length)].float(), targets))
        print(f"{client}, {length}: {found[-1]}", flush=True)
    return found


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("factor", [4.0, 2.0])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("part", ["layers", pytest.param("whole", marks=pytest.mark.exhaustive)])
def test_an_export_computes_the_same(part, method, factor, client, runs, tmp_path):
    """llama.cpp has no tables for a Llama: it computes plain RoPE for `resonance`."""
    skip_without(client)
    if part == "whole" and (client, method, factor) != (client, "yarn", 4.0):
        pytest.skip("of the whole model one is enough")
    model = extend_and_export(runs / part, tmp_path / "export", method, factor)
    is_gguf = client == "llama.cpp"
    checkpoint = convert(tmp_path / "export") if is_gguf else tmp_path / "export"
    lengths = LENGTHS if part == "layers" else LENGTHS[:1]
    for found in compare(client, model, checkpoint, lengths, tmp_path):
        agrees = found.difference < 1e-3 and found.same > 0.99
        assert agrees == ((client, method) != ("llama.cpp", "resonance"))


@pytest.mark.parametrize("dequantized, limit, least_same", [(False, 0.1, 0.9), (True, 1e-4, 0.99)])
def test_a_gguf_file_is_read_as_llama_cpp_does(dequantized, limit, least_same, runs, tmp_path):
    """Of Q4_K_M llama.cpp rounds activations to 8 bits; dequantised by itself, it does not."""
    skip_without("llama.cpp")
    extend_and_export(runs / "whole", tmp_path / "export")
    quantized, read = tmp_path / "quantized.gguf", tmp_path / "dequantized.gguf"
    words = [convert(tmp_path / "export"), quantized, "MOSTLY_Q4_K_M"]
    run_child(["-c", QUANTIZE, *words], tmp_path)
    run_child(["-c", QUANTIZE, quantized, read, "ALL_F32"], tmp_path)
    interchange.capture_output(import_gguf, GPT, quantized, tmp_path / "run")
    checkpoint = read if dequantized else quantized
    model = GPT.load(tmp_path / "run")
    (found,) = compare("llama.cpp", model, checkpoint, LENGTHS[:1], tmp_path)
    assert found.difference < limit and found.same > least_same


# Activations are rounded to the 11 bits of float16 before llama.cpp multiplies such weights.
GGUF_LIMITS = {"float32": (1e-3, 1e-4), "float16": (1e-2, 5e-3)}


@pytest.mark.parametrize("client", ["llama.cpp", "transformers"])
@pytest.mark.parametrize("name", GGUF_FILES)
@pytest.mark.parametrize("part", ["layers", pytest.param("whole", marks=pytest.mark.exhaustive)])
def test_a_client_reads_the_gguf_file_that_we_write(part, name, client, runs, tmp_path):
    """Its logits are those of our own import of the file, which are those of the model."""
    skip_without(client, converter="not needed")
    if client == "transformers" and name != "unextended":
        pytest.skip("its reader of GGUF files ignores RoPE scaling")
    method, options, store = GGUF_FILES[name]
    stored, model = interchange.open_run(runs / part), GPT.load(runs / part)
    if method != "none":
        for extended in (stored, model):
            extended.extend(method, 4.0, **options)
    file = tmp_path / "model.gguf"
    interchange.capture_output(export_gguf, stored, file, store)
    interchange.capture_output(import_gguf, GPT, file, tmp_path / "run")
    back = GPT.load(tmp_path / "run")
    lengths, compared = (LENGTHS, COMPARED) if part == "layers" else (GGUF_LENGTHS, GGUF_COMPARED)
    largest, relative = GGUF_LIMITS[store]

    ids = encode(model)[: lengths[0] + 1]
    logits = [compute_logits(x, ids[:-1], compared) for x in (model, back)]
    found = measure(*logits, ids[-compared:])
    print(f"{name}: the model and our import of the file, {lengths[0]}: {found}", flush=True)
    assert found.difference < largest and found.same > 1 - largest

    for found in compare(client, back, file, lengths, tmp_path, compared):
        assert found.difference < largest and found.same > 1 - largest
        assert found.their_perplexity == pytest.approx(found.perplexity, rel=relative)


@pytest.mark.parametrize("client", ["mlx-lm", "llama.cpp"])
def test_a_client_continues_a_prompt(client, runs, tmp_path):
    skip_without(client)
    extend_and_export(runs / "whole", tmp_path / "export", "yarn", 4.0)
    if client == "mlx-lm":
        words = ["--model", tmp_path / "export", "--prompt", PROMPT, "--ignore-chat-template"]
        words += ["--max-tokens", 8, "--temp", 0, "--verbose", "False"]
        text = run_child(["-m", "mlx_lm", "generate", *words], tmp_path)
    else:
        text = run_client(client, convert(tmp_path / "export"), LENGTHS, tmp_path, CONTINUE)
    assert "Paris" in text
