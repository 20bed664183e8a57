"""hf.py against transformers and the tokenizers package; both are in requirements-dev.txt. The full product is experiments/interchange.py, and --all."""
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import config
import data
import hf
from data import tokenizer_json
from experiments import interchange
from model import GPT, GPTConfig


def judged(rows):
    for row in rows:
        if "refused" not in row:
            assert row.get("size", 1) > 0.5 and max(row.get("whole", 0), row.get("cached") or 0) <= 1e-5 and row["bytes"] == "same", row
            assert row["exported"] <= (3e-5 if row.get("name") == "resonance of yarn" else 1e-5), row  # its table is rounded to float32 there
    return rows


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.slow] if part else []) for part in range(4)])
def test_every_architecture_and_rope_type(part, tmp_path):
    """A quarter of the product, with each architecture and each RoPE type in it, tied and not; the rest with --all."""
    cases = [case for i, case in enumerate(interchange.cases_of()) if (i // 2 + i // 16 + i) % 4 == part]
    assert {case["architecture"] for case in cases} >= set(interchange.ARCHITECTURES) - {"SmolLM3, no RoPE at all"} and {case["rope"] for case in cases} >= set(interchange.ROPES)
    rows = judged(interchange.there_and_back(cases, tmp_path))
    assert all(("refused" in row) == (row["rope"] == "dynamic") for row in rows)


def test_the_comparison_can_fail(tmp_path):
    """Each RoPE type is another function: read as plain RoPE, logits are far from transformers'."""
    cases = [case for case in interchange.cases_of("llama") if case["tied"] and case["architecture"] == "Llama" and case["rope"] != "default"]
    wanted = interchange.theirs(cases, tmp_path)
    for case in cases:
        interchange.quietly(hf.import_checkpoint, tmp_path / case["name"], tmp_path / "run" / case["name"])
        model = GPT.load(tmp_path / "run" / case["name"])
        model.pos.stretch("none", 1.0)
        tokens = torch.randint(131, (2, case["read"]), generator=torch.Generator().manual_seed(cases.index(case)))
        assert (interchange.read(model, tokens, 41, False)["whole"] - wanted[f"{case['name']}/whole"]).abs().max() > 1e-3, case["rope"]


def test_every_model_of_ours(tmp_path):
    rows = judged(interchange.ours_out(tmp_path))
    there = {row["name"]: row.get("there", "refused") for row in rows}
    assert there["yarn"] == "Llama, yarn" and there["pi"] == "Llama, linear" and there["ntk"] == "Llama, default" and there["rope in half of a head"] == "Llama, longrope" and there["nope"] == "SmolLM3, default"
    assert there["rope, GQA, QK-norm"] == "Qwen3, default" and there["drope"] == "SmolLM3, default" and [*there.values()].count("refused") == 20


def test_every_refusal(tmp_path):
    """Each in one sentence, and nothing written (refusals() itself asserts that all were refused)."""
    said = interchange.refusals(tmp_path)
    assert len(said) > 50 and all(len(sentence.splitlines()) == 1 for _, sentence in said)
    for what, word in (("model_type bloom", "ALiBi"), ("a pickle", "pytorch_model.bin"), ("an index whose file leaves the folder", "secret"), ("num_hidden_layers: 60000", "n_layer")):
        assert word in dict(said)[what]


def checkpoint(folder, dtype=torch.float32, name="model.safetensors", **more):
    """A Llama directory with random weights; returns its tensors."""
    values = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, **more}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    with torch.device("meta"):
        found = hf.read_config(folder)
        model = hf.FAMILIES.get(found.family, GPT)(found)
    shapes = {p: q.shape for p, q in model.named_parameters()}
    tensors = {theirs: torch.randn(sum(shapes[o][0] for o in ours), *shapes[ours[0]][1:]).to(dtype) * 0.1 for theirs, (ours, _) in hf.layout(found).items()}
    tensors = {theirs: tensor.t().contiguous() if hf.layout(found)[theirs][1] else tensor for theirs, tensor in tensors.items()}
    if name:
        save_file(tensors, folder / name)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_the_files(dtype, tmp_path, rng):
    """Every dtype, in one file and in shards, with old buffers and a tied head beside them."""
    tensors = checkpoint(tmp_path / "one", dtype)
    checkpoint(tmp_path / "many", name=None)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "lm_head.weight": torch.ones(3)}
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]} | extra, tmp_path / "many" / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[1::2]}, tmp_path / "many" / "model-00002-of-00002.safetensors")
    places = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)} | {n: "model-00001-of-00002.safetensors" for n in extra}
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    for name in ("one", "many"):
        interchange.quietly(hf.import_checkpoint, tmp_path / name, tmp_path / "run" / name)
        params = dict(GPT.load(tmp_path / "run" / name).named_parameters())
        for theirs, (ours, _) in hf.layout(GPT.load(tmp_path / "run" / name).config).items():
            assert torch.equal(torch.cat([params[o] for o in ours]), tensors[theirs].float())
    places[names[0]] = "model-00002-of-00002.safetensors"
    (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(config.UserError, match="says that"):
        hf.import_checkpoint(tmp_path / "many", tmp_path / "other")


def test_a_wrong_export_leaves_nothing(tmp_path, monkeypatch, rng):
    """transformers reads other logits: one sentence, and neither the directory nor a temporary one is there."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32))
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.o.weight)
    model.stretch("yarn", 4.0)
    model.save(tmp_path / "run" / "step-000000")
    right = hf.write_rope
    monkeypatch.setattr(hf, "write_rope", lambda m: ({**right(m)[0], "factor": 5.0}, *right(m)[1:]))
    with pytest.raises(config.UserError, match="other logits"):
        hf.export_checkpoint(tmp_path / "run", tmp_path / "out" / "there")
    assert [*(tmp_path / "out").iterdir()] == []
    monkeypatch.setattr(hf, "write_rope", right)
    monkeypatch.setattr(hf.importlib.util, "find_spec", lambda name: None)
    assert "not verified" in interchange.quietly(hf.export_checkpoint, tmp_path / "run", tmp_path / "out" / "there")[-1]
    with pytest.raises(config.UserError, match="exists already"):
        hf.export_checkpoint(tmp_path / "run", tmp_path / "out" / "there")


def test_gpt2_with_its_own_names_stretched(tmp_path, rng):
    """GPT-2's published files leave the prefix `transformer.` out. Its learned vectors are interpolated, and it is written as a GPT-2 of the new length."""
    values = {"model_type": "gpt2", "vocab_size": 90, "n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "activation_function": "gelu_new"}
    checkpoint(tmp_path / "hf", **values)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | {"h.0.attn.bias": torch.ones(1, 1, 40, 40)}, tmp_path / "hf" / "model.safetensors")
    interchange.quietly(hf.import_checkpoint, tmp_path / "hf", tmp_path / "run")
    model = GPT.load(tmp_path / "run")
    assert torch.equal(model.blocks[1].attention.k.weight, tensors["transformer.h.1.attn.c_attn.weight"][:, 32:64].t()) and type(model).__name__ == "GPT2"
    model.stretch("pi", 2.0)
    model.save(tmp_path / "long" / "step-000000")
    assert "verified" in interchange.quietly(hf.export_checkpoint, tmp_path / "long", tmp_path / "out")[-1]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_positions"] == 80


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers.

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@pytest.fixture(scope="module")
def trained_bpe():
    """Byte-level tokenizers trained by the tokenizers package in the ways of GPT-2, Llama 3, Qwen and SmolLM: name -> (Tokenizer, special tokens)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    texts = [path.read_text()[:20000] for path in sorted(ROOT.glob("*.py"))] + [tokenizer_json.SAMPLE * 3]
    made = {}
    split = lambda pattern: pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])  # noqa: E731
    for name, before, normalizer in (("gpt2", pre_tokenizers.ByteLevel(add_prefix_space=False), None), ("llama3", split(LLAMA3), None), ("qwen", split(QWEN2), normalizers.NFC()),
                                     ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]), None)):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
        if normalizer:
            tokenizer.normalizer = normalizer
        special = ["<|begin|>", "<|end|>"] if name != "smollm" else [f"<|{i}|>" for i in range(17)]  # first in the vocabulary, as SmolLM has them
        tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=700, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
        if name == "llama3":
            tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))])
        made[name] = tokenizer
    return made


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", "smollm"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data_=st.data())
def test_text_is_encoded_as_the_package_encodes_it(name, trained_bpe, data_):
    tokenizer = trained_bpe[name]
    text = data_.draw(st.one_of(st.text(max_size=60), st.text(alphabet="ab1 2'st\n\r\t =é\u0301½٣ \u00a0", max_size=40)))
    mine = _imported(name, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert mine.encode(text) == ids and mine.decode(ids).decode() == tokenizer.decode(ids)
    assert int(mine.lengths[ids].sum()) == len(tokenizer.decode(ids).encode())


_made = {}


def _imported(name, tokenizer):
    if name not in _made:
        spec = json.loads(tokenizer.to_str())
        added = {token["content"]: token["id"] for token in spec["added_tokens"]}
        _made[name] = data.from_json(json.loads(json.dumps(tokenizer_json.from_spec(spec, added, min(added.values()), None, 707).to_json())))  # and through a checkpoint
    return _made[name]


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen", "smollm", "tiktoken", "bytes", "char"])
def test_a_tokenizer_there_and_back(name, trained_bpe, tmp_path, rng):
    """Written, read by the tokenizers package, which encodes alike; imported again, and the same bytes written."""
    from tokenizers import Tokenizer
    if name == "tiktoken":
        try:
            mine = data.BPE.named("gpt2")
        except config.UserError:
            pytest.skip("the gpt2 vocabulary is not here")
    else:
        mine = data.Bytes() if name == "bytes" else data.Char("".join(sorted(set("hello wörld\n"))), True) if name == "char" else _imported(name, trained_bpe[name])
    starts = bool(rng.integers(2))
    tokenizer_json.write(tmp_path, mine, starts, 64)
    theirs, drawn = Tokenizer.from_file(str(tmp_path / "tokenizer.json")), random.Random(int(rng.integers(1 << 30)))
    special = mine.encoding._special_tokens if isinstance(mine, data.BPE) else {} if mine.bos is None else {"<bos>": mine.bos}
    assert all(theirs.token_to_id(token) == i and theirs.id_to_token(i) == token for token, i in special.items())
    ordinary = [i for i in range(mine.vocab_size) if i not in special.values() and len(mine.decode([i]))]
    assert all(theirs.decode([i]) == mine.decode([i]).decode(errors="replace") for i in ordinary)  # also those that no text below happens to hold
    letters = mine.characters if name == "char" else "ab1 2'stT\n\r =é½٣e\u0301 \u00a0中🙂aaa   "
    for _ in range(200):
        text = "".join(drawn.choices(letters, k=drawn.randint(1, 50)))
        assert theirs.encode(text, add_special_tokens=False).ids == mine.encode(text)
        assert theirs.encode(text).ids == [mine.bos] * starts + mine.encode(text)
        if name != "qwen":  # which composes
            assert theirs.decode(mine.encode(text)) == text
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": mine.bos, "eos_token_id": mine.bos}))
    again, bos, note = tokenizer_json.read(tmp_path, mine.vocab_size, hf.read_json)
    assert type(again) is type(mine) and bos == (mine.bos if starts else None) and not note
    (tmp_path / "two").mkdir()
    tokenizer_json.write(tmp_path / "two", again, starts, 64)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_what_tiktoken_cannot_read_is_noticed(trained_bpe, tmp_path):
    """Tokens out of the order of their merges, a normalizer, a prefix space, damaged files."""
    spec = json.loads(trained_bpe["gpt2"].to_str())
    added = {token["content"]: token["id"] for token in spec["added_tokens"]}
    a, b = [token for token, i in spec["model"]["vocab"].items() if i in (400, 500)]
    swapped = json.loads(json.dumps(spec))
    swapped["model"]["vocab"][a], swapped["model"]["vocab"][b] = swapped["model"]["vocab"][b], swapped["model"]["vocab"][a]
    less = json.loads(json.dumps(spec))
    used = max(trained_bpe["gpt2"].encode(tokenizer_json.SAMPLE).ids)
    less["model"]["merges"] = [merge for merge in less["model"]["merges"] if less["model"]["vocab"]["".join(merge)] != used]
    for bad, why in ((swapped, "order"), (less, "otherwise"), ({**spec, "normalizer": {"type": "Lowercase"}}, "Lowercase"),
                     ({**spec, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "space"), ({**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, {"type": "ByteLevel"}]}}, "Punctuation"),
                     ({**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}, {"type": "ByteLevel", "use_regex": False}]}}, "cannot read")):
        with pytest.raises(tokenizer_json.OtherKind, match=why):
            tokenizer_json.from_spec(bad, added, 0, None, 700)
    (tmp_path / "config.json").write_text("{}")
    for damaged in ("{", "[]", "{}", json.dumps({**spec, "model": 3}), json.dumps({**spec, "added_tokens": [{"id": "x"}]}), json.dumps({**spec, "added_tokens": [{"id": 10**9, "content": "x"}]})):
        (tmp_path / "tokenizer.json").write_text(damaged)
        with pytest.raises(config.UserError, match="tokenizer.json"):
            tokenizer_json.read(tmp_path, 700, hf.read_json)


def test_a_sentencepiece_vocabulary(tmp_path, monkeypatch, run, rng):
    """Token ids work; text through the tokenizers package; without it one sentence that says so. Exported, the file is the same."""
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator([tokenizer_json.SAMPLE[:150]] * 3, trainers.BpeTrainer(vocab_size=280, special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))], show_progress=False))
    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    checkpoint(tmp_path / "hf", vocab_size=400, bos_token_id=1, eos_token_id=2)
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": True, "bos_token": "<s>"}))
    said = interchange.quietly(hf.import_checkpoint, tmp_path / "hf", tmp_path / "run")
    assert "pip install tokenizers" in said[-1]
    meta = GPT.load(tmp_path / "run").meta
    mine = data.from_json(meta["tokenizer"])
    assert meta["bos"] == 1 and mine.eos == 2
    theirs = Tokenizer.from_str(json.dumps(spec))
    for text in ("The quick fox", "fünf 中 🙂 \n x"):
        ids = mine.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False).ids and mine.decode(ids).decode() == " " + text
    done = run("sample.py", tmp_path / "run", "--start=The quick", "--max_new_tokens=5", "--temperature=0")
    assert done.returncode == 0 and done.stdout.startswith("The quick"), done.stderr
    interchange.quietly(hf.export_checkpoint, tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "tokenizer.json").read_text()) == spec
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(config.UserError, match="pip install tokenizers"):
        data.from_json(meta["tokenizer"])
    said = interchange.quietly(hf.import_checkpoint, tmp_path / "hf", tmp_path / "ids")
    assert "not installed" in said[-1] and GPT.load(tmp_path / "ids").meta["tokenizer"] is None
    shutil.rmtree(tmp_path / "ids")


def test_a_tokenizer_of_another_model_is_refused(trained_bpe, tmp_path, rng):
    checkpoint(tmp_path / "hf")
    trained_bpe["gpt2"].save(str(tmp_path / "hf" / "tokenizer.json"))
    with pytest.raises(config.UserError, match="belongs to another model"):
        hf.import_checkpoint(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_whole_way_from_the_shell(trained_bpe, tmp_path, run, rng):
    """A checkpoint with a padded vocabulary and a byte-level BPE: import, prepare a text with its tokenizer, evaluate, stretch and fine-tune, sample, export with its own tokenizer files, and refusals."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    checkpoint(tmp_path / "hf", vocab_size=720, bos_token_id=0, eos_token_id=1)
    trained_bpe["llama3"].save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}", "bos_token": "<|begin|>", "tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "text.txt").write_text("".join(path.read_text() for path in sorted(ROOT.glob("*.py"))))

    def went(*words, **options):
        done = run(*words, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    name = f"hf-test-{os.getpid()}"
    try:
        assert "64 tokens" in went("hf.py", "import", tmp_path / "hf", tmp_path / "run")
        went("data/prepare.py", tmp_path / "text.txt", f"--tokenizer={tmp_path / 'run'}", f"--name={name}")
        meta = json.loads((ROOT / "data" / name / "meta.json").read_text())
        assert meta["vocab_size"] == 720 and meta["bos"] == 0
        done = run("evaluate.py", tmp_path / "run", "--lengths=64")
        assert done.returncode == 2 and "--tokenizer=" in done.stderr and len(done.stderr.splitlines()) == 1
        went("evaluate.py", tmp_path / "run", f"--dataset={name}", "--lengths=64,128", "--max_tokens=1000")
        went("extend.py", tmp_path / "run", f"--dataset={name}", "--learning_rate=1e-4", "--max_iters=2", "--factor=2", "--eval_iters=1", f"--out_dir={tmp_path / 'long'}", "--dtype=float32", "--compile=false")
        assert GPT.load(tmp_path / "long").config.block_size == 128
        assert went("sample.py", tmp_path / "long", "--start=def ", "--max_new_tokens=5").startswith("def ")
        said = went("hf.py", "export", tmp_path / "long", tmp_path / "out", f"--tokenizer={tmp_path / 'hf'}")
        assert "verified by transformers" in said and "text is encoded alike" in said
        assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
        assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 1
    finally:
        shutil.rmtree(ROOT / "data" / name, ignore_errors=True)
    for words, sentence in ((["import", tmp_path / "hf", tmp_path / "run"], "holds a run already"), (["export", tmp_path / "nowhere", tmp_path / "x"], "no checkpoint"), (["import", tmp_path / "hf", tmp_path / "y", "--best=true"], "is for export"),
                            (["convert"], "hf.py import DIR"), (["export", tmp_path / "long", tmp_path / "out"], "exists already")):
        done = run("hf.py", *words)
        assert done.returncode == 2 and sentence in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_our_bytes_in_transformers(run, tmp_path, text_data):
    """A run of ours, exported: transformers loads it, encodes as we do with <bos> first, and continues a text with the tokens that sample.py writes."""
    assert run("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}").returncode == 0
    done = run("hf.py", "export", tmp_path / "run", tmp_path / "out")
    assert done.returncode == 0 and "text is encoded alike" in done.stdout, done.stderr
    code = ("import sys, transformers as t; tok = t.AutoTokenizer.from_pretrained(sys.argv[1]); m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); x = tok('def f(', return_tensors='pt'); "
            "print(x['input_ids'].tolist()); print(repr(tok.decode(m.generate(**x, max_new_tokens=12, do_sample=False)[0])))")
    theirs = subprocess.run([sys.executable, "-c", code, tmp_path / "out"], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert theirs.returncode == 0, theirs.stderr
    ids, text = theirs.stdout.strip().splitlines()[-2:]
    model = GPT.load(tmp_path / "run")
    mine = [*model.generate(torch.tensor([[256, *b"def f("]]), 12, temperature=0)]
    assert json.loads(ids) == [[256, *b"def f("]] and text == repr("<bos>" + bytes([*b"def f(", *(int(t) for t in mine if t < 256)]).decode("utf-8", "replace"))
    assert load_file(tmp_path / "out" / "model.safetensors").keys() >= {"model.embed_tokens.weight"} and not Path(tmp_path / ".tmp-out").exists()
