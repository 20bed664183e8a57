"""Exported GGUF files: read back by our importer, and a real one compared with its original.

tests/test_clients.py compares llama.cpp's logits, if its Python package is installed.
"""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import data
import rope_scaling
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.hub.exporting import export_checkpoint
from nanolong.hub.gguf_export import export_gguf
from nanolong.hub.gguf_file import read_header
from nanolong.hub.gguf_import import import_gguf
from nanolong.hub.gguf_tokenizer import PRE_TOKENIZERS, empty_bpe, tokenizer_metadata

gguf = pytest.importorskip("gguf", reason="these need the gguf package: pip install gguf")
tokenizers = pytest.importorskip("tokenizers", reason="these need the tokenizers package")

REAL_FILE = os.environ.get("NANOLONG_SMOLLM2", "")
# rows that are blocks of 32, and those of the MLP's output that are none
SHAPE = {
    "n_layer": 4,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 96,
    "head_dim": 16,
    "mlp_dim": 72,
    "vocab_size": 70,
}
LONGROPE = {"long_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.6, 3.3, 4.0]}


@pytest.fixture
def saved(make, tmp_path):
    """A function that saves a random model, extended or not: (model, the opened checkpoint)."""

    def save(settings, extension=None, **meta):
        model = make(**{**SHAPE, **settings}).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p) * 0.2 + (p.dim() == 1))
        if extension:
            method, options = extension
            model.extend(method, 4.0, **options)
        model.meta = meta
        model.save(tmp_path / "run" / "step-000000")
        return model, GPT.load(tmp_path / "run", dtype=None)

    return save


def relative_difference(one, other, length=150):
    """The largest difference of logits, as a fraction of the largest logit."""
    torch.manual_seed(3)
    tokens = torch.randint(0, one.config.vocab_size, (2, length))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a, b = one(tokens), other(tokens)
    return ((a - b).abs().max() / a.abs().max()).item()


# name -> settings, extension, and the architecture and method that come back
CASES = {
    "llama": ({}, None, "llama", None),
    "heads that do not divide": ({"n_embd": 100}, None, "llama", None),
    "untied": ({"tie_embeddings": False}, None, "llama", None),
    "qwen2": ({"bias": "qkv"}, None, "qwen2", None),
    "qwen3": ({"qk_norm": "head"}, ("yarn", {}), "qwen3", "yarn"),
    "smollm3": ({"layer_pattern": "FFFN"}, ("pi", {}), "smollm3", "pi"),
    "no positions": ({"pos": "nope"}, None, "llama", None),
    "scaled scores": ({"attn_scale": 1.3}, ("yarn", {}), "llama", "yarn"),
    "a part of each head": ({"rope_fraction": 0.5}, ("yarn", {}), "llama", "longrope"),
    "the fastest pairs": ({"p_rope": 0.5}, None, "llama", "longrope"),
    "linear": ({}, ("pi", {}), "llama", "pi"),
    "ntk": ({}, ("ntk", {}), "llama", None),
    "ntk-parts": ({}, ("ntk-parts", {}), "llama", "yarn"),
    "yarn": ({}, ("yarn", {}), "llama", "yarn"),
    "yarn, other factor": ({}, ("yarn", {"attention_factor": 1.0}), "llama", "yarn"),
    "yarn, other betas": ({}, ("yarn", {"beta_fast": 16.0}), "llama", "longrope"),
    "yarn, paper's ramp": ({}, ("yarn", {"ramp": "paper"}), "llama", "longrope"),
    "llama3": ({}, ("llama3", {}), "llama", "llama3"),
    "longrope": ({}, ("longrope", LONGROPE), "llama", "longrope"),
    "resonance": ({}, ("resonance", {}), "llama", "longrope"),
    "abf": ({}, ("abf", {}), "llama", None),
    "drope": ({}, ("drope", {}), "llama", None),
}


@pytest.mark.parametrize("name", CASES)
def test_an_exported_file_is_the_same_model(name, saved, tmp_path):
    settings, extension, architecture, method = CASES[name]
    model, opened = saved(settings, extension)
    file = tmp_path / "model.gguf"
    export_gguf(opened, file)
    assert read_header(file).metadata["general.architecture"] == architecture
    import_gguf(GPT, file, tmp_path / "back")
    back = GPT.load(tmp_path / "back")
    # llama.cpp's tables are float32
    assert relative_difference(model, back) < 3e-5
    assert back.config.block_size == model.config.block_size
    assert (back.config.extension or {}).get("method") == method
    if method is not None:  # extending again counts from the same length
        assert back.config.original_length == model.config.original_length


@pytest.mark.parametrize("store", ["float32", "float16", "bfloat16", "q8_0"])
def test_weights_are_stored_as_asked(store, saved, tmp_path, capsys):
    model, opened = saved({})
    file = tmp_path / "model.gguf"
    export_gguf(opened, file, store)
    # the rows of the MLP's output are no blocks of 32
    assert ("4 tensors" in capsys.readouterr().out) == (store == "q8_0")
    types = {name: x.type.name for name, x in read_header(file).tensors.items()}
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[store]
    assert types["blk.0.attn_q.weight"] == short
    assert types["blk.0.attn_norm.weight"] == types["output_norm.weight"] == "F32"

    import_gguf(GPT, file, tmp_path / "back")
    found = dict(GPT.load(tmp_path / "back").named_parameters())
    for name, p in model.named_parameters():
        dtype = torch.float16 if store == "q8_0" else getattr(torch, store)
        expected = p.to(dtype).float() if p.dim() == 2 else p
        if store == "q8_0" and p.dim() == 2 and p.shape[1] % 32 == 0:
            # a step of a block is a 127th of its largest value, itself rounded to float16
            largest = p.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True)
            error = (found[name] - p).unflatten(1, (-1, 32)).abs()
            assert (error <= largest / 127 * 0.55).all(), name
        else:
            assert torch.equal(found[name], expected), name


@pytest.mark.parametrize(
    "settings, extension, message",
    [
        ({"window": 8}, None, "llama.cpp loads"),
        ({"layer_pattern": "FN"}, None, "llama.cpp loads"),
        ({"pos": "alibi"}, None, "llama.cpp loads"),
        ({"norm_position": "both"}, None, "llama.cpp loads"),
        ({"mlp": "geglu"}, None, "llama.cpp loads"),
        ({"sink_scores": True}, None, "llama.cpp loads"),
        ({"embed_scale": 2.0}, None, "llama.cpp loads"),
        ({"score_scale": "llama4"}, None, "llama.cpp loads"),
        ({"qk_norm": "head"}, ("llama3", {}), "no RoPE table for qwen3"),
        ({}, ("longrope", {**LONGROPE, "short_factor": [1.0] * 8}), "leave out short_factor"),
        ({}, ("dynamic-ntk", {}), "follows the length"),
        ({}, ("self-extend", {}), "replaces attention"),
    ],
    ids=str,
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(
    settings, extension, message, saved, tmp_path
):
    _, opened = saved(settings, extension)
    with pytest.raises(UserError, match=message):
        export_gguf(opened, tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_setting_that_no_export_knows_is_refused(saved, tmp_path):
    """Somebody adds a setting to GPTConfig, and forgets the exports."""
    _, opened = saved({})

    @dataclass
    class Changed(GPTConfig):
        score_cap: float = 0.0

    settings = vars(opened.config)
    opened.config = Changed(**settings)
    export_gguf(opened, tmp_path / "default.gguf")
    opened.config = Changed(**settings, score_cap=30.0)
    with pytest.raises(UserError, match="--score_cap=30.0 has no equivalent .* --score_cap=0.0"):
        export_gguf(opened, tmp_path / "model.gguf")
    with pytest.raises(UserError, match="--score_cap=30.0 has no equivalent"):
        export_checkpoint(opened, tmp_path / "exported")


def test_an_existing_file_is_kept_and_a_failure_leaves_none(saved, tmp_path, monkeypatch):
    _, opened = saved({})
    file = tmp_path / "model.gguf"
    file.write_bytes(b"mine")
    with pytest.raises(UserError, match="exists already"):
        export_gguf(opened, file)
    assert file.read_bytes() == b"mine"
    monkeypatch.setattr("nanolong.hub.gguf_export.export_tensor", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export_gguf(opened, tmp_path / "other.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "run"]


# -----------------------------------------------------------------------------
# Tokenizers

TEXT = "def f(x):\n    return  {1234: 'Größe', '🙂': x}\n" * 3


def test_a_trained_vocabulary_is_written(saved, tmp_path):
    tokenizer = data.tokenizer.train_bpe([TEXT * 20], 300)
    settings = {"vocab_size": tokenizer.vocab_size + 7}  # padded
    _, opened = saved(settings, tokenizer=tokenizer.to_json(), bos=tokenizer.bos)
    export_gguf(opened, tmp_path / "model.gguf")
    import_gguf(GPT, tmp_path / "model.gguf", tmp_path / "back")
    loaded = GPT.load(tmp_path / "back")
    back = data.tokenizer_from_json(loaded.meta["tokenizer"])
    assert back.encode(TEXT) == tokenizer.encode(TEXT)
    assert back.decode(back.encode(TEXT)) == TEXT.encode()
    assert loaded.meta["bos"] == tokenizer.bos


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_splitter_that_is_read_is_written_by_its_name(name):
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: i for i, character in enumerate([*alphabet, "ab"])}
    tokenizer = empty_bpe(PRE_TOKENIZERS[name], vocab, [("a", "b")])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    imported = data.ImportedTokenizer(files, None, None, 257)
    metadata = tokenizer_metadata(imported, 260, False)
    assert metadata["tokenizer.ggml.pre"] == name
    assert metadata["tokenizer.ggml.merges"] == ["a b"]
    assert metadata["tokenizer.ggml.tokens"][256:] == ["ab", "[PAD257]", "[PAD258]", "[PAD259]"]
    assert metadata["tokenizer.ggml.token_type"][255:] == [1, 1, 5, 5, 5]


@pytest.mark.parametrize("tokenizer", [data.CharTokenizer("abc", bos=True), data.ByteTokenizer()])
def test_other_vocabularies_are_refused_unless_ids_are_enough(tokenizer, saved, tmp_path):
    settings = {"vocab_size": tokenizer.vocab_size}
    _, opened = saved(settings, tokenizer=tokenizer.to_json(), bos=tokenizer.bos)
    with pytest.raises(UserError, match="--tokenizer=none"):
        export_gguf(opened, tmp_path / "model.gguf")
    export_gguf(opened, tmp_path / "model.gguf", tokenizer_from="none")
    assert read_header(tmp_path / "model.gguf").metadata["tokenizer.ggml.model"] == "none"
    import_gguf(GPT, tmp_path / "model.gguf", tmp_path / "again")
    assert GPT.load(tmp_path / "again").meta["bos"] == tokenizer.bos


def test_the_command_line_exports_a_file(saved, tmp_path, run):
    saved({})
    file = tmp_path / "model.gguf"
    done = run("hf.py", "export", tmp_path / "run", file, "--store=q8_0")
    assert done.returncode == 0, done.stderr
    assert "llama, 24 tokens, q8_0" in done.stdout
    for words in (["--store=q8_0"], ["--verify=false"]):
        target = tmp_path / ("other.gguf" if "--verify=false" in words else "folder")
        done = run("hf.py", "export", tmp_path / "run", target, *words)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert not target.exists()


@pytest.mark.slow
@pytest.mark.skipif(not REAL_FILE, reason="it needs SmolLM2's file: make smollm2")
def test_a_real_file_comes_out_as_it_went_in(tmp_path):
    import_gguf(GPT, REAL_FILE, tmp_path / "run")
    export_gguf(GPT.load(tmp_path / "run", dtype=None), tmp_path / "model.gguf")
    before = read_header(Path(REAL_FILE)).metadata
    after = read_header(tmp_path / "model.gguf").metadata
    for key, value in before.items():
        if key.startswith(("tokenizer.", "llama.")):
            assert after[key] == value, key


def test_every_static_method_is_a_case():
    methods = {extension[0] for _, extension, _, _ in CASES.values() if extension}
    dynamic = {name for name, options in rope_scaling.OPTIONS.items() if "length" in options}
    expected = set(rope_scaling.METHODS) - dynamic - set(rope_scaling.EVALUATION_ONLY)
    missing = expected - {"none", "longrope"} - methods
    assert not missing, f"add {missing} to CASES"
