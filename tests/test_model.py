"""The transformer apart from its numbers, which test_reference.py has: initial weights, kinds of
layers, bfloat16 weights, memory, torch.compile, and model.py in another project.
"""

import math
import shutil

import cases
import pytest
import torch
from conftest import ROOT, assert_success, newest, run_python
from safetensors import safe_open

import data
from model import GPT, POSITIONS, GPTConfig
from nanolong.run import save_model

# -----------------------------------------------------------------------------
# Parameters: their shapes, numbers and initial values.


@pytest.mark.parametrize("norm_position", ["pre", "post", "both", "parallel"])
def test_initial_weights_follow_the_table_of_init_weights(norm_position):
    """What feeds the residual stream is zero, but not where a norm follows: it has no gradient."""
    torch.manual_seed(0)
    settings = {"tie_embeddings": False, "bias": "all", "sink_scores": True}
    config = GPTConfig(n_embd=256, n_head=4, norm_position=norm_position, **settings)
    w = dict(GPT(config).named_parameters())
    std = {"embed.weight": 0.02, "head.weight": 0.02}
    std["blocks.0.attention.q.weight"] = std["blocks.1.mlp.gate.weight"] = 0.5 / 16
    is_normed = norm_position in ("post", "both")
    std["blocks.3.attention.o.weight"] = 0.5 / 16 if is_normed else 0
    std["blocks.0.mlp.down.weight"] = 0.5 / math.sqrt(704) if is_normed else 0
    for name, expected in std.items():
        assert w[name].std().item() == pytest.approx(expected, rel=0.02), name
        assert abs(w[name].mean().item()) < 1e-3, name
    for name, p in w.items():
        if name.endswith(("bias", "sink_scores", "norm.weight")):
            assert (p == name.endswith("norm.weight")).all(), name


def test_schemes_share_every_other_initial_weight():
    """With the same seed, two models of different schemes differ in the scheme alone."""
    weights = []
    for pos in POSITIONS:
        torch.manual_seed(5)
        model = GPT(GPTConfig(pos=pos, n_embd=32, n_head=4, n_layer=2))
        named = model.named_parameters()
        weights.append({name: p for name, p in named if not name.startswith("scheme.")})
    for others in weights[1:]:
        assert others.keys() == weights[0].keys()
        for name, p in others.items():
            assert torch.equal(p, weights[0][name]), name


# -----------------------------------------------------------------------------
# Kinds of layers, and what an extension changes in each.


@pytest.mark.parametrize("first", ["auto", "full", "all"])
def test_an_extension_is_of_the_layers_that_were_chosen_first(first, make):
    """By default of those without a window; a second one is of the same layers."""
    bases = {"rope_base": 5e4, "rope_local_base": 300.0}
    model = make(n_layer=3, layer_pattern="WWF", window=5, p_rope=0.75, **bases)
    for kind, base in ((False, 5e4), (True, 300.0)):
        plain = [2 * math.pi * base ** (2 * c / 8) for c in range(3)] + [math.inf]
        assert model.rope_wavelengths(window=kind).tolist() == pytest.approx(plain, rel=1e-12)
    before = [model.rope_wavelengths(), model.rope_wavelengths(window=True)]
    model.extend("pi", 2.0, first)
    model.extend("pi", 2.0)
    assert model.config.extension.get("layers", "all") == ("all" if first == "all" else "full")
    assert model.rope_wavelengths().dtype == torch.float64
    assert torch.allclose(model.rope_wavelengths(), 4 * before[0], rtol=1e-12)
    local = before[1] * (4 if first == "all" else 1)
    assert torch.allclose(model.rope_wavelengths(window=True), local, rtol=1e-12)
    # if no others have positions, those with a window are extended
    model = make(n_layer=2, layer_pattern="WN", window=5)
    before = model.rope_wavelengths(window=True)
    model.extend("pi", 2.0)
    assert torch.equal(model.rope_wavelengths(window=True), 2 * before)


# -----------------------------------------------------------------------------
# Weights in bfloat16: the numbers of float32 weights under autocast, in half the memory.


@pytest.fixture
def loaded(make, tmp_path):
    """A function that stores a model in bfloat16, and loads it in float32 and as it is stored."""

    def loaded(**settings):
        model = make(vocab_size=257, **settings)
        model.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256, "step": 1}
        save_model(model, tmp_path / "run" / "step-000001", dtype=torch.bfloat16)
        return GPT.load(tmp_path / "run"), GPT.load(tmp_path / "run", dtype=None)

    return loaded


@pytest.mark.parametrize(
    "pos, method, stored", [("rope", "yarn", "BF16"), ("learned", "pi", "F32")]
)
def test_an_extended_copy_is_stored_as_its_parent(pos, method, stored, loaded, call, tmp_path):
    """But a learned table is interpolated, which bfloat16 would round."""
    loaded(pos=pos)
    extended = tmp_path / "extended"
    words = [f"--method={method}", "--factor=2", "--max_iters=0", f"--out_dir={extended}"]
    assert_success(call("extend.py", tmp_path / "run", *words))
    with safe_open(newest(extended) / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}
    weights = [GPT.load(folder).blocks[1].mlp.up.weight for folder in (tmp_path / "run", extended)]
    assert torch.equal(*weights)


# -----------------------------------------------------------------------------
# Compiled with activation checkpointing, and in another project.


@pytest.mark.slow
def test_checkpointing_has_the_same_dropout_in_a_compiled_graph():
    """A compiled graph has other samples of it than the model that is not compiled."""
    case = cases.Case("rope", {"n_layer": 1, "dropout": 0.2})
    tokens = torch.randint(0, 50, (2, 24))
    results = []
    for checkpointing in (False, True):
        torch._dynamo.reset()
        model = case.model().train()
        model.activation_checkpointing = checkpointing
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
        torch.manual_seed(5)
        compiled(tokens, tokens).backward()
        results.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


TRAIN_AND_GENERATE = """
import sys
import torch
from model import GPT, GPTConfig

model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50))
tokens = torch.randint(0, 50, (2, 12))
model(tokens[:, :-1], tokens[:, 1:]).backward()
model.extend("yarn", 2)
text = torch.cat(list(model.generate(tokens, 10, temperature=0)), 1)
print(tuple(text.shape), {"data", "transformers", "triton"} & {*sys.modules})
"""


def test_model_py_works_when_copied_into_another_project(tmp_path):
    """With rope_scaling.py, kernels/ and two files of nanolong/ it computes gradients, extends and
    generates, prints nothing, and imports neither triton nor transformers.
    """
    (tmp_path / "nanolong").mkdir()
    for name in ("model.py", "rope_scaling.py", "nanolong/errors.py", "nanolong/inference.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=ignore)
    done = run_python(TRAIN_AND_GENERATE, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert (done.stdout, done.stderr) == ("(2, 10) set()\n", "")
