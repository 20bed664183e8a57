"""Exports in mlx-lm and llama.cpp: every family that mlx-lm has, and a public checkpoint.

Slow, and only if the client is installed: pip install mlx[cpu] mlx-lm, pip install xllamacpp (a
wheel of llama.cpp). Each client runs in a process of its own, outside of this project.
"""

import importlib.util
import json
import os

import pytest
import torch
from conftest import OFFLINE, assert_success, run_python
from interchange import make_theirs, our_logits, quietly
from safetensors.torch import load_file

from data import tokenizer_from_json
from model import GPT
from nanolong.hub.transfer import export_to, import_to

REAL_FILE = os.environ.get("NANOLONG_SMOLLM2", "")
TOKENS = torch.arange(100)[None] * 37 % 127

pytestmark = pytest.mark.slow
needs_mlx = pytest.mark.skipif(
    importlib.util.find_spec("mlx_lm") is None,
    reason="it needs mlx-lm: pip install mlx[cpu] mlx-lm",
)

MLX_SCRIPT = """
import json, sys
import mlx.core as mx
import numpy as np
from pathlib import Path
from safetensors.numpy import save_file
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

mx.set_default_device(mx.cpu)
tokens = mx.array(json.loads(sys.argv[1]))
found = {}
for folder in sys.argv[3:]:
    model, _ = load_model(Path(folder))
    logits = model(tokens, cache=make_prompt_cache(model)).astype(mx.float32)
    found[folder] = np.array(logits)
save_file(found, sys.argv[2])
"""


def compare_with_mlx(folders, tmp_path, tokens=TOKENS):
    """Return mlx-lm's logits of folders: name -> (1, T, V)."""
    words = [json.dumps(tokens.tolist()), tmp_path / "answers", *folders]
    assert_success(run_python(MLX_SCRIPT, *words, cwd=tmp_path, env=OFFLINE))
    return load_file(tmp_path / "answers")


# what mlx-lm has: families -> the largest difference of logits of size 1 to 4
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3"), 2e-5),
    **dict.fromkeys(("phi3", "olmo2", "granite"), 2e-5),
    # its factor of the embeddings is rounded to bfloat16
    "gemma3_text": 2e-2,
    # which has RoPE that is not scaled alone
    "gemma": 5e-3,
}


@needs_mlx
@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_computes_a_family_alike(family, tmp_path):
    """By each type of RoPE that it has, plain, linear, YaRN, llama3 and longrope."""
    is_plain = family == "gemma"
    ropes = ["default"] if is_plain else ["default", "linear", "yarn", "llama3", "longrope"]
    if family == "phi3":
        ropes = ["default", "longrope"]
    expected = {}
    for number, rope in enumerate(ropes):
        place = tmp_path / str(number)
        make_theirs(family, rope, seed=number).save_pretrained(place / "hf")
        quietly(import_to, GPT, str(place / "hf"), place / "run", verify=False)
        text = quietly(export_to, GPT.load(place / "run", dtype=None), place / "exported")
        assert "mlx-lm" not in text
        expected[str(place / "exported")] = our_logits(GPT.load(place / "run"), TOKENS)
    for folder, logits in compare_with_mlx(expected, tmp_path).items():
        assert (logits - expected[folder]).abs().max() < FAMILIES[family], folder


# -----------------------------------------------------------------------------
# SmolLM2-135M

TEXT = "The capital of France is Paris, and that of Japan is Tokyo. In 1969 the first human"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2 extended by YaRN: (folder with a GGUF file, model, tokenizer)."""
    if not REAL_FILE:
        pytest.skip("it needs SmolLM2's file: make smollm2, and set NANOLONG_SMOLLM2")
    folder = tmp_path_factory.mktemp("smollm2")
    quietly(import_to, GPT, REAL_FILE, folder / "run", verify=False)
    model = GPT.load(folder / "run")
    model.extend("yarn", 4.0)
    model.save(folder / "yarn" / "step-000000")
    stored = GPT.load(folder / "yarn", dtype=None)
    quietly(export_to, stored, folder / "model.gguf", verify=False)
    return folder, model, tokenizer_from_json(model.meta["tokenizer"])


LLAMA_SCRIPT = """
import json, sys
import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.n_ctx, params.n_parallel = 1024, 1
params.warmup = False
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
words = {"prompt": json.loads(sys.argv[2]), "n_predict": 24, "temperature": 0}
print(json.dumps(server.handle_completions(words)))
"""


def test_llama_cpp_continues_smollm2_alike(smollm2, tmp_path):
    """Greedy decoding of 24 tokens, from the same text, tokenized there."""
    pytest.importorskip("xllamacpp", reason="it needs llama.cpp: pip install xllamacpp")
    folder, model, tokenizer = smollm2
    ids = tokenizer.encode(TEXT)
    words = [folder / "model.gguf", json.dumps(TEXT)]
    done = assert_success(run_python(LLAMA_SCRIPT, *words, cwd=tmp_path))
    answer = json.loads(done.stdout.splitlines()[-1])
    tokens = [int(token) for token in model.generate(torch.tensor([ids]), 24, temperature=0)]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["text"].encode() == tokenizer.decode(tokens)
