"""Weights in bfloat16: the numbers of float32 weights under autocast, in half the memory."""

import pytest
import torch
from conftest import assert_success
from safetensors import safe_open

import data
from model import GPT, POSITIONS
from nanolong.devices import autocast, set_weights_dtype
from nanolong.errors import UserError
from nanolong.inference import KVCache, cast_weights
from nanolong.run import save_model

# of a norm of queries in bfloat16 with float32 weights, which is meant
pytestmark = pytest.mark.filterwarnings("ignore:Mismatch dtype")

CPU = torch.device("cpu")
BLOCKS = {
    "llama": {"n_kv_head": 2},
    "gpt2": {"norm": "layernorm", "mlp": "gelu", "bias": "all", "tie_embeddings": False},
    "qwen": {"qk_norm": "head", "bias": "qkv"},
}
all_schemes_and_blocks = pytest.mark.parametrize(
    "settings",
    [{"pos": pos} for pos in POSITIONS] + [{"pos": "rope", **BLOCKS[name]} for name in BLOCKS],
    ids=str,
)


@pytest.fixture
def loaded(make, tmp_path):
    """A function that stores a model in bfloat16, and loads it in float32 and as it is stored."""

    def loaded(**settings):
        model = make(vocab_size=257, **settings)
        model.meta = {"tokenizer": data.ByteTokenizer().to_json(), "bos": 256, "step": 1}
        save_model(model, tmp_path / "run" / "step-000001", dtype=torch.bfloat16)
        return GPT.load(tmp_path / "run"), GPT.load(tmp_path / "run", dtype=None)

    return loaded


def decode(model, tokens):
    """The logits of tokens that enter a cache one by one."""
    cache = KVCache()
    return torch.cat([model(token, cache=cache) for token in tokens.split(1, 1)], 1)


@all_schemes_and_blocks
@torch.no_grad()
def test_they_compute_what_float32_weights_compute_under_autocast(settings, loaded):
    """To the bit, also where the caller does not use autocast; close to float32 products."""
    wide, narrow = loaded(**settings)
    assert narrow.blocks[0].attention.q.weight.dtype == torch.bfloat16
    tokens = torch.randint(0, 257, (2, 24))
    exact, exact_loss = wide(tokens), wide(tokens, tokens)
    with autocast(CPU, torch.bfloat16):
        expected, expected_loss = wide(tokens), wide(tokens, tokens)
        logits, loss = narrow(tokens), narrow(tokens, tokens)
        one_by_one = decode(narrow, tokens)
        assert one_by_one.equal(decode(wide, tokens))
    assert logits.equal(expected) and loss.equal(expected_loss)
    assert narrow(tokens).equal(expected)
    assert loss.dtype == torch.float32
    # a decoding step of fixed shape does not copy them
    name = "blocks.0.attention.q.weight"
    assert cast_weights(narrow, torch.bfloat16)[name] is narrow.blocks[0].attention.q.weight
    for result in (logits, one_by_one):
        assert (result - exact).abs().max() < 0.03 * exact.abs().max()
    assert loss.item() == pytest.approx(exact_loss.item(), abs=0.01)


# -----------------------------------------------------------------------------
# --weights


def test_weights_become_float32_unless_products_are_bfloat16(loaded):
    wide, narrow = loaded(pos="rope")
    set_weights_dtype(narrow, "auto", torch.bfloat16)
    assert narrow.embed.weight.dtype == torch.bfloat16
    with pytest.raises(UserError, match="give --dtype=bfloat16 too"):
        set_weights_dtype(narrow, "bfloat16", torch.float32)
    set_weights_dtype(narrow, "auto", torch.float32)
    assert narrow.head.weight is narrow.embed.weight
    for p, expected in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert p.dtype == torch.float32 and p.equal(expected)


@pytest.fixture
def dtypes_of_weights(monkeypatch):
    """The dtype of the embedding of each model that sample.py or evaluate.py has computed with."""
    found = []
    hidden_states = GPT.hidden_states

    def record(self, *args, **options):
        found.append(self.embed.weight.dtype)
        return hidden_states(self, *args, **options)

    monkeypatch.setattr(GPT, "hidden_states", record)
    return found


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--dtype=bfloat16"], torch.bfloat16),
        (["--dtype=float32"], torch.float32),
        (["--dtype=bfloat16", "--weights=float32"], torch.float32),
        (["--dtype=bfloat16", "--weights=bfloat16"], torch.bfloat16),
    ],
    ids=str,
)
def test_sample_and_evaluate_take_the_weights_that_are_asked_for(
    words, expected, loaded, call, tmp_path, text_data, dtypes_of_weights
):
    loaded(pos="rope")
    run = tmp_path / "run"
    done = call("sample.py", run, "--start=a", "--max_new_tokens=4", "--device=cpu", *words)
    assert done.returncode == 0, done.stderr
    settings = ["--lengths=16", "--max_tokens=64", f"--dataset={text_data}", "--device=cpu"]
    assert_success(call("evaluate.py", run, *settings, *words))
    assert set(dtypes_of_weights) == {expected}


# -----------------------------------------------------------------------------
# Extended copies


@pytest.mark.parametrize(
    "pos, method, stored",
    [("rope", "yarn", "BF16"), ("learned", "pi", "F32")],
)
def test_an_extended_copy_is_stored_as_its_parent(pos, method, stored, loaded, call, tmp_path):
    """But a learned table is interpolated, which bfloat16 would round."""
    loaded(pos=pos)
    extended = tmp_path / "extended"
    words = [f"--method={method}", "--factor=2", "--max_iters=0", f"--out_dir={extended}"]
    assert_success(call("extend.py", tmp_path / "run", *words))
    with safe_open(extended / "step-000000/model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {stored}
    parent, model = GPT.load(tmp_path / "run"), GPT.load(extended)
    assert model.config.block_size == 48
    assert model.blocks[1].mlp.up.weight.equal(parent.blocks[1].mlp.up.weight)
