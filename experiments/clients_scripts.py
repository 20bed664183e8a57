"""What experiments/clients.py runs in processes of its own: a script for each client.

A script of SCRIPTS gets a checkpoint, a request (JSON) and the file to write. It encodes the text
of the request, computes the logits at the last positions of each sequence, in float32, and writes
both; the last line that it prints is its version.
"""

TRANSFORMERS = """
import json
import sys

import torch
import transformers
from safetensors.torch import save_file

folder, request_file, answers_file = sys.argv[1:]
with open(request_file, encoding="utf-8") as file:
    request = json.load(file)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
ids = tokenizer(request["text"], add_special_tokens=False)["input_ids"]
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
answers = {"ids": torch.tensor(ids)}
for length in request["lengths"]:
    tokens = torch.tensor([ids[:length]])
    keep = min(length, request["compared"])
    with torch.no_grad():
        logits = model(tokens, logits_to_keep=keep, use_cache=False).logits
    answers[str(length)] = logits[0].contiguous()
save_file(answers, answers_file)
print(f"transformers {transformers.__version__}")
"""

MLX_LM = """
import json
import sys

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from safetensors.numpy import save_file

CHUNK = 256

folder, request_file, answers_file = sys.argv[1:]
with open(request_file, encoding="utf-8") as file:
    request = json.load(file)
model, tokenizer = mlx_lm.load(folder)
ids = tokenizer.encode(request["text"], add_special_tokens=False)
answers = {"ids": np.array(ids)}
for length in request["lengths"]:
    cache = make_prompt_cache(model)
    first_kept = length - min(length, request["compared"])
    kept = []
    for start in range(0, length, CHUNK):
        end = min(start + CHUNK, length)
        logits = model(mx.array([ids[start:end]]), cache=cache)
        # logits that nobody asks for are not computed
        mx.eval([layer.state for layer in cache])
        if end > first_kept:
            kept.append(np.array(logits[0, max(0, first_kept - start) :]))
    answers[str(length)] = np.concatenate(kept)
save_file(answers, answers_file)
print(f"mlx-lm {mlx_lm.__version__} (mlx {mx.__version__}, {mx.default_device()})")
"""

# What the file says holds, as in llama-cli: llama_cpp.Llama has values of its own for YaRN.
# type_k and type_v: a cache in float32.
LLAMA_OPTIONS = """
OPTIONS = {
    "n_batch": 256,
    "n_ubatch": 256,
    "n_threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())),
    "type_k": llama_cpp.GGML_TYPE_F32,
    "type_v": llama_cpp.GGML_TYPE_F32,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "verbose": False,
}
OPTIONS["n_threads_batch"] = OPTIONS["n_threads"]
"""

LLAMA_CPP = f"""
import json
import os
import sys

import llama_cpp
import numpy as np
from safetensors.numpy import save_file

{LLAMA_OPTIONS}


def compute_logits(model, ids, n_kept):
    context, n_vocab = model.ctx, model.n_vocab()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    batch = llama_cpp.llama_batch_init(OPTIONS["n_batch"], 0, 1)
    rows = []
    for start in range(0, len(ids), OPTIONS["n_batch"]):
        part = ids[start : start + OPTIONS["n_batch"]]
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i] = token
            batch.pos[i] = start + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = start + i >= len(ids) - n_kept
        if llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama_decode fails at token {{start}}")
        for i in range(len(part)):
            if batch.logits[i]:
                row = llama_cpp.llama_get_logits_ith(context, i)
                rows.append(np.ctypeslib.as_array(row, (n_vocab,)).copy())
    llama_cpp.llama_batch_free(batch)
    return np.stack(rows)


checkpoint, request_file, answers_file = sys.argv[1:]
with open(request_file, encoding="utf-8") as file:
    request = json.load(file)
model = llama_cpp.Llama(checkpoint, n_ctx=max(request["lengths"]), **OPTIONS)
ids = model.tokenize(request["text"].encode(), add_bos=False, special=False)
answers = {{"ids": np.array(ids)}}
for length in request["lengths"]:
    n_kept = min(length, request["compared"])
    answers[str(length)] = compute_logits(model, ids[:length], n_kept)
save_file(answers, answers_file)
print(f"llama.cpp (llama-cpp-python {{llama_cpp.__version__}})")
"""

SCRIPTS = {"transformers": TRANSFORMERS, "mlx-lm": MLX_LM, "llama.cpp": LLAMA_CPP}

# arguments: a GGUF file and a prompt; prints what follows it, greedily
CONTINUE = f"""
import os
import sys

import llama_cpp

{LLAMA_OPTIONS}
file, prompt = sys.argv[1:]
model = llama_cpp.Llama(file, n_ctx=512, **OPTIONS)
print(model(prompt, max_tokens=8, temperature=0.0)["choices"][0]["text"], end="")
"""

# arguments: a GGUF file, the file to write, and its type, as llama.h names it
QUANTIZE = """
import sys

import llama_cpp

source, target, file_type = sys.argv[1:]
options = llama_cpp.llama_model_quantize_default_params()
options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{file_type}")
options.allow_requantize = True
options.nthread = 1
if llama_cpp.llama_model_quantize(source.encode(), target.encode(), options):
    raise SystemExit("llama_model_quantize fails")
"""

# arguments: a directory with a tokenizer, and the directory to write. Random weights, so that no
# term is hidden by an initial 0 or 1; five layers, so that the fourth has no RoPE and others have.
MAKE_SMOLLM3 = """
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

source, target = map(Path, sys.argv[1:])
torch.manual_seed(0)
config = AutoConfig.for_model(
    "smollm3",
    vocab_size=len(AutoTokenizer.from_pretrained(source)),
    hidden_size=96,
    intermediate_size=160,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_parameters={"rope_type": "default", "rope_theta": 2e6},
    pad_token_id=None,
    bos_token_id=0,
    eos_token_id=0,
)
model = AutoModelForCausalLM.from_config(config).eval().float()
with torch.no_grad():
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.normal_(1.0, 0.1)
        elif "embed_tokens" in name:
            p.normal_(0.0, 0.1)
        else:
            p.normal_(0.0, p.shape[1] ** -0.5)
model.tie_weights()
model.save_pretrained(target)
for file in source.glob("*token*"):
    shutil.copyfile(file, target / file.name)
"""
