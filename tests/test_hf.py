"""hf.py compared with transformers, which runs in processes of its own (see requirements-dev.txt).

By default every architecture and every RoPE type occurs once; all combinations run with --all, and
experiments/results/interchange.md has a report of them.
"""

import json
import math
import sys
from dataclasses import replace

import interchange
import pytest
import torch
from conftest import OFFLINE, ROOT, TINY, assert_refused, assert_success, run_python
from safetensors.torch import load_file, save_file
from test_hf_tokenizer import tokenizers, train_bpe, train_sentencepiece

import data
from data.prepare import prepare_text
from model import GPT
from nanolong.errors import UserError
from nanolong.hub import exporting, verify
from nanolong.hub.families import FAMILIES, LLAMA
from nanolong.hub.layout import UNROTATED, tensor_layout
from nanolong.run import list_steps

# the RoPE type of every architecture in the default part, with tied embeddings or not
SELECTED = {
    ("Llama", "default", True),
    ("Llama, wide heads, no GQA", "linear", False),
    ("Mistral", "dynamic", True),
    ("Mistral, window", "yarn", False),
    ("Qwen2", "yarn, all options", True),
    ("Qwen2, window in some layers", "yarn, old form, mscale", False),
    ("Qwen3", "longrope", True),
    ("SmolLM3", "llama3", False),
    ("SmolLM3, no RoPE at all", "default", True),
    ("GPT-2", "learned", False),
}
# of our own models, those whose logits are compared in the default part
OUR_SELECTED = (
    "rope, layers of all four kinds",
    "rope in half of a head, QK-norm, yarn",
    "heads that do not divide the embedding",
    "nope, QK-norm",
    "GPT-2, scores times 1.3, untied",
    "Olmo 3's blocks, yarn",
    "Gemma 3's blocks",
    "learned sinks",
    "p-RoPE, pi",
    "ntk",
    "longrope, two tables",
    "drope",
    "drope in half of a head",
)
# what our own models become in transformers: architecture and rope_type -> names of OURS
ARCHITECTURE_OF_OURS = {
    ("Llama", "default"): ("rope", "none", "ntk", "abf", "dynamic-ntk at a fixed length"),
    ("Llama", "linear"): ("pi",),
    ("Llama", "yarn"): ("ntk-parts", "yarn", "dynamic-yarn at the extended length"),
    ("Llama", "llama3"): ("ntk-parts, ramp=paper", "llama3"),
    ("Llama", "longrope"): ("p-RoPE, yarn", "yarn, ramp=paper", "longrope, two tables"),
    ("Llama", "proportional"): ("p-RoPE, pi",),
    ("Qwen3", "default"): ("rope, GQA, QK-norm",),
    ("Qwen3", "longrope"): ("nope, QK-norm",),
    ("Qwen2", "default"): ("rope, biases of q, k and v",),
    ("Qwen2", "longrope"): ("nope, biases of q, k and v",),
    ("Mistral", "default"): ("rope, window", "heads that do not divide the embedding"),
    ("SmolLM3", "default"): ("rope, layers of all four kinds", "nope", "drope"),
    ("StableLm", "default"): ("LayerNorm",),
    ("GPT2LMHeadModel", "learned"): ("GPT-2",),
    ("Starcoder2", "default"): ("GPT-2's layers with rope",),
    ("Olmo3", "yarn"): ("Olmo 3's blocks, yarn",),
    ("Gemma3", "default"): ("Gemma 3's blocks",),
    ("GPTNeoX", "default"): ("Pythia's blocks",),
    ("GraniteSWA", "default"): ("learned sinks",),
    ("Ministral3", "yarn"): ("Ministral 3's scores, yarn",),
}


def check_record(record):
    """Check a record of interchange.py; one without `exported` was not loaded by transformers."""
    assert record.get("largest_logit", 1) > 0.5, record
    assert record.get("imported", 0) <= 1e-5, record
    assert (record.get("cached") or 0) <= 1e-5, record
    if "refused" in record:
        return
    assert record["bytes"] == "same", record
    # transformers computes with a table in float32 where it is exported as longrope's
    limit = 5e-5 if record.get("rope") == "longrope" else 1e-5
    assert record.get("exported", 0) <= limit, record


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The default part: folder, cases, transformers' logits, and the two lists of records."""
    folder = tmp_path_factory.mktemp("interchange")
    cases = []
    for case in interchange.make_cases():
        tied = case.settings["tie_word_embeddings"]
        if (case.architecture, case.rope, tied) in SELECTED:
            cases.append(case)
    answers = interchange.run_transformers(cases, folder)
    imports, exported = interchange.compare_imports(cases, answers, folder)
    ours, exported_ours = interchange.export_ours(interchange.OURS, folder)
    exported += [item for item in exported_ours if item.record["name"] in OUR_SELECTED]
    for item in exported:
        item.case.with_cache = False  # the imports are compared with one
    interchange.compare_exports(exported, folder)
    return folder, cases, answers, imports, ours


# -----------------------------------------------------------------------------
# Logits


def test_imports_agree_with_transformers(compared):
    folder, cases, answers, imports, ours = compared
    assert {case.architecture for case in cases} == {*interchange.ARCHITECTURES, "GPT-2"}
    assert {case.rope for case in cases} == {*interchange.ROPES, "learned"}
    for record in imports:
        check_record(record)
        assert ("refused" in record) == (record["rope"] == "dynamic"), record
        assert ("exported" in record) == (record["rope"] != "dynamic"), record


def test_exports_of_our_models_agree_with_transformers(compared):
    *_, ours = compared
    for record in ours:
        check_record(record)
        assert ("exported" in record) == (record["name"] in OUR_SELECTED)


def test_our_models_become_the_architecture_that_they_are(compared):
    *_, ours = compared
    found = {record["name"]: (record["architecture"], record["rope"]) for record in ours}
    for kind, names in ARCHITECTURE_OF_OURS.items():
        assert {name: found[name] for name in names} == dict.fromkeys(names, kind)


def test_a_context_extension_that_is_left_out_is_noticed(compared):
    """The comparison can fail: as plain RoPE, each extended model has other logits."""
    folder, cases, answers, imports, ours = compared
    for case in cases:
        model = GPT.load(folder / f"run-{case.name}")
        if model.config.extension is None:
            continue
        model.pos.extend("none", 1.0)
        case = replace(case, with_cache=False)
        logits = interchange.compute_logits(model, case)
        difference = interchange.differences(logits, answers, case)["long"]
        assert difference > 1e-3, (case.architecture, case.rope)


# layer patterns, and the architecture that has each
PATTERNS = {
    "W": "Mistral",
    "FW": "SmolLM3",
    "WWWF": "SmolLM3",
    "FFFN": "SmolLM3",
    "FFS": "SmolLM3",
    "WWWN": "SmolLM3",
    "NS": "SmolLM3",
}


def pattern_models():
    """An extended model of each pattern, as interchange.py exports them."""
    models = {}
    for pattern in (*PATTERNS, "FW, QK-norm"):
        letters = pattern.partition(",")[0]
        settings = {"layer_pattern": letters, "n_layer": len(letters) + 1}
        settings["qk_norm"] = letters != pattern
        if not set(letters).isdisjoint("WS"):
            settings["window"] = 21
        models[pattern] = (settings, ("yarn", {"layers": "all"}))
    return models


@pytest.mark.slow
def test_exports_of_layer_patterns_agree_with_transformers(tmp_path):
    records, exported = interchange.export_ours(pattern_models(), tmp_path)
    found = {record["name"]: record["architecture"] for record in records}
    assert found == {**PATTERNS, "FW, QK-norm": "Qwen3"}
    for item in exported:
        item.case.with_cache = False
    interchange.compare_exports(exported, tmp_path)
    for item in exported:
        check_record(item.record)


def save_and_open(model, run):
    """Save a model, and return it as an export takes it."""
    model.save(run / "step-000000")
    return interchange.open_run(run)


def test_exported_tables_are_strict_json(tmp_path, make):
    """Of a pair that is not rotated; frequencies that no table can hold are refused."""

    def refuse(constant):
        raise AssertionError(constant)

    model = save_and_open(make(), tmp_path / "run")
    model.pos.inv_freq[-1] = 0
    interchange.capture_output(exporting.export_checkpoint, model, tmp_path / "a", verify=False)
    config = json.loads((tmp_path / "a/config.json").read_text(), parse_constant=refuse)
    assert config["rope_parameters"]["long_factor"] == [1.0, 1.0, 1.0, UNROTATED]
    for wrong in (float("nan"), -1.0):
        model.pos.inv_freq[-1] = wrong
        with pytest.raises(UserError, match="frequencies that are negative or not finite"):
            exporting.export_checkpoint(model, tmp_path / "b", verify=False)
    assert {file.name for file in tmp_path.iterdir()} == {"a", "run"}


# methods whose attention factor is not the one that clients compute from a config.json
ATTENTION_FACTORS = {
    "ntk-parts": {},
    "yarn": {"attention_factor": 1.3},
    "resonance": {},
    "longrope": {"long_factor": [1, 2, 3.5, 4], "attention_factor": 1.3},
}


def attention_factor_of_clients(rope, length):
    """cos and sin's factor as mlx-lm 0.32 computes it, and llama.cpp of 2026 for yarn."""
    if rope["rope_type"] == "yarn":
        return 0.1 * math.log(rope["factor"]) + 1
    original_length = rope["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(length / original_length) / math.log(original_length))


@pytest.mark.parametrize("method", ATTENTION_FACTORS)
def test_clients_that_read_no_attention_factor_compute_the_same(tmp_path, method, make):
    """The queries' weights hold what is missing; attention_factor says what the clients do."""
    model = make()
    model.extend(method, 4.0, **ATTENTION_FACTORS[method])
    stored = save_and_open(model, tmp_path / "run")
    interchange.capture_output(exporting.export_checkpoint, stored, tmp_path / "a", verify=False)
    config = json.loads((tmp_path / "a/config.json").read_text())
    rope = config["rope_parameters"]
    theirs = attention_factor_of_clients(rope, config["max_position_embeddings"])
    assert rope.get("attention_factor", theirs) == pytest.approx(theirs, rel=1e-12)
    tensors = load_file(tmp_path / "a/model.safetensors")
    ours = model.blocks[1].attention.q.weight.detach()
    scale = (model.pos.attention_factor / theirs) ** 2
    assert scale != pytest.approx(1, abs=1e-3)
    exported = tensors["model.layers.1.self_attn.q_proj.weight"]
    torch.testing.assert_close(exported, ours * scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method, rope_type", [("dynamic-pi", "linear"), ("dynamic-yarn", "yarn")])
def test_a_dynamic_method_fixed_to_the_extended_length_is_static(method, rope_type, make):
    """At another length it is a table, which llama.cpp has not for these architectures."""
    for factor, written in ((4.0, rope_type), (3.0, "longrope")):
        model = make()
        model.extend(method, 4.0, length=factor * model.config.block_size)
        rope = exporting.write_rope(model.config, model.pos, LLAMA)
        assert rope.parameters["rope_type"] == written


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_import_agrees_with_transformers(part, tmp_path):
    cases = interchange.make_cases()[part::4]
    answers = interchange.run_transformers(cases, tmp_path)
    imports, exported = interchange.compare_imports(cases, answers, tmp_path)
    interchange.compare_exports(exported, tmp_path)
    for record in imports:
        check_record(record)
        assert ("refused" in record) == (record["rope"] == "dynamic"), record


@pytest.mark.slow
def test_every_export_agrees_with_transformers(tmp_path):
    ours, exported = interchange.export_ours(interchange.OURS, tmp_path)
    interchange.compare_exports(exported, tmp_path)
    for record in ours:
        check_record(record)
        assert "exported" in record


# -----------------------------------------------------------------------------
# Refusals


def test_what_transformers_has_no_equivalent_of_is_not_exported(tmp_path):
    records, exported = interchange.export_ours(interchange.REFUSED, tmp_path)
    messages = {record["name"]: record["refused"] for record in records}
    assert not exported
    assert all(len(message.splitlines()) == 1 for message in messages.values())
    assert "--layer_pattern=FN" in messages["NoPE in every second layer, QK-norm"]
    assert "--layer_pattern=FN" in messages["NoPE in every second layer, biases"]
    assert "--score_scale=none" in messages["logn"]
    assert "--score_scale_length=16" in messages["Ministral 3's scores from another length on"]
    assert "--layer_pattern=W" in messages["GPT-2 with a window"]
    assert "--qk_norm=none, --n_kv_head=6" in messages["GPT-2 with GQA and QK-norm"]
    assert "--method" not in messages["yarn in layers without a window"]
    assert "--layers=all" in messages["yarn in layers without a window"]
    assert not list(tmp_path.glob("exported*"))


def test_what_cannot_be_imported_is_refused(tmp_path):
    """Each with one sentence, and nothing is written: list_refusals() checks that."""
    refusals = dict(interchange.list_refusals(tmp_path))
    assert len(refusals) > 50
    assert all(len(message.splitlines()) == 1 for message in refusals.values())
    assert "encoder-decoder" in refusals["model_type: 't5'"]
    assert "pytorch_model.bin" in refusals["a pickle"]
    assert "LoRA" in refusals["an adapter"]
    assert "F8_E4M3" in refusals["8-bit floats"]
    assert "images" in refusals["vision_config: {'depth': 2}"]
    assert "secret" in refusals["an index whose file is outside the folder"]
    assert "60000 layers" in refusals["num_hidden_layers: 60000"]


@pytest.mark.slow
def test_a_wrong_export_leaves_nothing(tmp_path, monkeypatch, make):
    model = make(block_size=32)
    model.extend("yarn", 4.0)
    model = save_and_open(model, tmp_path / "run")
    right = exporting.write_rope

    def wrong(*arguments):
        rope = right(*arguments)
        rope.parameters["factor"] = 5.0
        return rope

    monkeypatch.setattr(exporting, "write_rope", wrong)
    message = "other logits .* nothing was written: if you have edited the scheme or method"
    with pytest.raises(UserError, match=message):
        exporting.export_checkpoint(model, tmp_path / "folder" / "exported")
    assert not list((tmp_path / "folder").iterdir())


def test_an_export_is_whole_or_absent(tmp_path, monkeypatch, make):
    """An existing directory stays as it is; without transformers the export is not verified."""
    model = save_and_open(make(), tmp_path / "run")
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    (tmp_path / "exported").mkdir()
    output = interchange.capture_output(exporting.export_checkpoint, model, tmp_path / "exported")
    assert "transformers is not installed" in output[-1]
    before = interchange.compare_files(tmp_path / "exported", tmp_path / "exported")
    assert before == "same"
    with pytest.raises(UserError, match="exists already"):
        exporting.export_checkpoint(model, tmp_path / "exported")
    with pytest.raises(UserError, match="no tokenizer files"):
        exporting.export_checkpoint(model, tmp_path / "other", tokenizer_from=str(tmp_path))
    assert {file.name for file in tmp_path.iterdir()} == {"exported", "run"}


# -----------------------------------------------------------------------------
# Tensors and settings


def shapes_of(folder):
    """The shapes of the tensors that fit the config.json in a folder, by name."""
    return interchange.tensor_shapes(json.loads((folder / "config.json").read_text()))


def write_directory(folder, dtype=torch.float32, has_weights=True, **settings):
    """Write a Hugging Face directory with random weights, by default a Llama; return them."""
    values = {
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        **settings,
    }
    tensors = {name: x.to(dtype) for name, x in interchange.random_tensors(values).items()}
    interchange.write_directory(folder, values, tensors if has_weights else None)
    return tensors


def check_weights(run, tensors):
    model = GPT.load(run)
    params = dict(model.named_parameters())
    shapes = {name: p.shape for name, p in params.items()}
    for name, held in tensor_layout(FAMILIES["llama"], model.config, shapes).items():
        ours = torch.cat([params[parameter] for parameter in held.parameters])
        assert torch.equal(ours, tensors[name].float())


def test_weights_may_be_in_several_files(tmp_path, rng):
    """With computed tables and a tied head, which are left out; a wrong index is refused."""
    folder = tmp_path / "hf"
    tensors = write_directory(folder, has_weights=False)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": torch.ones(3),
    }
    names = sorted(tensors)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({name: tensors[name] for name in names[::2]} | extra, folder / files[0])
    save_file({name: tensors[name] for name in names[1::2]}, folder / files[1])
    file_of = {name: files[i % 2] for i, name in enumerate(names)}
    file_of |= dict.fromkeys(extra, files[0])
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_of}))
    interchange.import_quietly(folder, tmp_path / "run")
    check_weights(tmp_path / "run", tensors)

    file_of[names[0]] = files[1]
    index.write_text(json.dumps({"weight_map": file_of}))
    with pytest.raises(UserError, match="says that"):
        interchange.import_quietly(folder, tmp_path / "other")


def test_gpt2_is_imported_without_the_prefix_of_its_names(tmp_path, rng):
    """As GPT-2's own files have them. Extended by pi, it is exported with the new length."""
    folder = tmp_path / "hf"
    values = {"n_positions": 40, "n_embd": 32, "n_layer": 2, "n_head": 4}
    tensors = write_directory(folder, model_type="gpt2", **values)
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    save_file(bare, folder / "model.safetensors")
    interchange.import_quietly(folder, tmp_path / "run")
    model = GPT.load(tmp_path / "run")
    keys = tensors["transformer.h.1.attn.c_attn.weight"][:, 32:64]
    assert torch.equal(model.blocks[1].attention.k.weight, keys.t())
    assert (model.config.norm, model.config.mlp, model.config.bias) == ("layernorm", "gelu", "all")

    model.extend("pi", 2.0)
    model.save(tmp_path / "long" / "step-000000")
    interchange.export_quietly(tmp_path / "long", tmp_path / "exported")
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["n_positions"] == 80


WINDOW = {"sliding_window": 9, "use_sliding_window": True}


@pytest.mark.parametrize(
    "settings, pattern",
    [
        ({}, "F"),
        ({"model_type": "mistral", "sliding_window": 9}, "W"),
        ({"model_type": "mistral", "sliding_window": None}, "F"),
        ({"model_type": "qwen2", **WINDOW, "max_window_layers": 3}, "FFFWWW"),
        ({"model_type": "qwen3", **WINDOW}, "F"),
        ({"model_type": "qwen3", "sliding_window": 9}, "F"),
        ({"model_type": "smollm3"}, "FFFN"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 2}, "FN"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1, 0, 1]}, "FNF"),
        ({"model_type": "smollm3", **WINDOW}, "FFFS"),
        ({"model_type": "smollm3", "no_rope_layers": [0] * 6}, "F"),
        (
            {
                "model_type": "smollm3",
                **WINDOW,
                "no_rope_layers": [1, 0, 1, 1, 0, 0],
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 4,
            },
            "WSFFNN",
        ),
    ],
)
def test_layers_that_differ_become_the_shortest_pattern(settings, pattern, tmp_path):
    write_directory(tmp_path, has_weights=False, num_hidden_layers=6, **settings)
    config = interchange.read_config(tmp_path)
    assert config.layer_pattern == pattern
    assert bool(config.window) == (not set(pattern).isdisjoint("WS"))
    assert config.pos == ("nope" if settings.get("no_rope_layers") == [0] * 6 else "rope")


# -----------------------------------------------------------------------------
# Tokenizers


def write_sentencepiece_model(folder):
    """Write a directory with a tokenizer such as Llama 2's; return its files: name -> bytes."""
    write_directory(folder, vocab_size=707, bos_token_id=1, eos_token_id=2)
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    files = {
        "tokenizer.json": train_sentencepiece("llama2").to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "chat_template.jinja": b"{{ messages }}",
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def test_a_tokenizer_is_kept_as_it_is(tmp_path, call, rng):
    """Imported, extended, sampled from and exported: the same files, also the chat template."""
    files = write_sentencepiece_model(tmp_path / "hf")
    imported, extended, exported = tmp_path / "run", tmp_path / "long", tmp_path / "exported"
    interchange.import_quietly(tmp_path / "hf", imported)
    model = GPT.load(imported)
    ours = data.tokenizer_from_json(model.meta["tokenizer"])
    assert (model.meta["bos"], ours.bos, ours.eos) == (1, 1, 2)

    options = ["--method=yarn", "--factor=2", "--max_iters=0", f"--out_dir={extended}"]
    done = assert_success(call("extend.py", imported, *options))
    assert GPT.load(extended).meta["tokenizer"] == model.meta["tokenizer"]
    options = ["--start=The quick", "--max_new_tokens=5", "--temperature=0"]
    done = assert_success(call("sample.py", extended, *options))
    assert done.stdout.startswith("The quick")
    interchange.export_quietly(extended, exported)
    for name, content in files.items():
        assert (exported / name).read_bytes() == content
    interchange.import_quietly(exported, tmp_path / "again")
    options = ["--chat", "--start=The quick", "--max_new_tokens=5", "--temperature=0"]
    answers = [call("sample.py", folder, *options) for folder in (extended, tmp_path / "again")]
    assert answers[0].returncode == 0, answers[0].stderr
    assert answers[0].stdout.strip() and answers[0].stdout == answers[1].stdout
    assert json.loads((exported / "config.json").read_text())["bos_token_id"] == 1


def test_training_keeps_the_tokenizer_in_every_step(tmp_path, call, rng, monkeypatch):
    """Also in steps after the first one is gone; the dataset has the files, too."""
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(data.dataset, "HERE", tmp_path / "data")
    files = write_sentencepiece_model(tmp_path / "hf")
    imported, extended, new = tmp_path / "run", tmp_path / "long", tmp_path / "new"
    interchange.import_quietly(tmp_path / "hf", imported)
    (tmp_path / "text.txt").write_text((ROOT / "model.py").read_text())
    dataset = prepare_text(tmp_path / "text.txt", "mine", tokenizer=str(imported))
    training = ["--max_iters=4", "--eval_interval=1", "--eval_iters=1", "--learning_rate=1e-4"]
    training += ["--dtype=float32", "--compile=false", f"--dataset={dataset}"]
    done = call("extend.py", imported, "--factor=2", *training, f"--out_dir={extended}")
    assert done.returncode == 0, done.stderr
    steps = list_steps(extended)
    assert steps[-1].name == "step-000004"
    assert len(steps) in (2, 3)
    for name, content in files.items():
        assert (dataset / name).read_bytes() == content
    for step in steps:
        assert GPT.load(step).meta["tokenizer"]["files"] == files
    # a model that starts on this text has its tokenizer
    done = call("train.py", *TINY, "--bos=true", f"--dataset={dataset}", f"--out_dir={new}")
    assert done.returncode == 0, done.stderr
    kept = GPT.load(new).meta["tokenizer"]
    assert kept == GPT.load(imported).meta["tokenizer"]

    # tokens that stand for other text
    write_directory(tmp_path / "qwen", vocab_size=707)
    train_bpe("qwen").save(str(tmp_path / "qwen" / "tokenizer.json"))
    interchange.import_quietly(tmp_path / "qwen", tmp_path / "other")
    done = call("evaluate.py", tmp_path / "other", f"--dataset={dataset}", "--lengths=64")
    assert_refused(done, "stand for other text")


def test_without_the_tokenizers_package_token_ids_work(tmp_path, monkeypatch, rng):
    write_sentencepiece_model(tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    output = interchange.import_quietly(tmp_path / "hf", tmp_path / "ids")
    assert "pip install -r requirements-hf.txt" in output[-1]
    assert GPT.load(tmp_path / "ids").meta["tokenizer"] is None


def test_a_tokenizer_of_another_model_is_refused(tmp_path, rng):
    write_directory(tmp_path / "hf")
    for content, message in (
        (train_bpe("gpt2").to_str(), "700 tokens and the model 300, so it belongs to another"),
        ("{" * 1000, "damaged"),
    ):
        (tmp_path / "hf" / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=message):
            interchange.import_quietly(tmp_path / "hf", tmp_path / "run")
        assert not (tmp_path / "run").exists()


# -----------------------------------------------------------------------------
# From the shell


def test_hf_py_says_what_it_needs(call, tmp_path, make):
    write_directory(tmp_path / "hf")
    assert "64 tokens" in call("hf.py", "import", tmp_path / "hf", tmp_path / "run").stdout
    options = ["--verify=false"]
    done = call("hf.py", "export", tmp_path / "run", tmp_path / "exported", *options)
    assert done.returncode == 0
    assert "not verified" in done.stdout
    for words, message in (
        (["import", "hf", "run"], "holds a run already"),
        (["import", "hf", "other", "--best=true"], "is for export"),
        (["import", "hf", "other", "--store=float16"], "is for export"),
        (["export", "nowhere", "other"], "no checkpoint"),
        (["export", "run", "exported"], "exists already"),
        (["export", "run", "other", "--store=bfloat16"], "--store is for import"),
        (["convert"], "hf.py import DIR"),
    ):
        assert_refused(call("hf.py", *words, cwd=tmp_path), message)
    assert {file.name for file in tmp_path.iterdir()} == {"hf", "run", "exported"}


def prepare_bpe(folder, monkeypatch):
    """Make a dataset with a vocabulary of its own, of four modules; return its folder."""
    monkeypatch.setattr(data.dataset, "HERE", folder)
    (folder / "src").mkdir()
    for name in ("model", "train", "sample", "hf"):
        (folder / "src" / f"{name}.py").write_text((ROOT / f"{name}.py").read_text())
    return prepare_text(folder / "src", "mine", tokenizer="bpe", vocab_size=400)


def test_a_vocabulary_of_its_own_needs_no_flag_after_prepare(tmp_path, call, monkeypatch):
    """Train, sample, evaluate, extend and export; the tokens and bytes are the package's."""
    dataset = prepare_bpe(tmp_path, monkeypatch)
    trained, extended, exported = tmp_path / "run", tmp_path / "long", tmp_path / "exported"

    def output(*words):
        done = assert_success(call(*words))
        return done.stdout

    output("train.py", *TINY, "--bos=true", f"--dataset={dataset}", f"--out_dir={trained}")
    assert GPT.load(trained).config.vocab_size == 400
    words = ["--start=def né", "--max_new_tokens=5"]
    assert output("sample.py", trained, *words).startswith("def né")
    options = ["--method=yarn", "--factor=2", "--max_iters=0", f"--out_dir={extended}"]
    output("extend.py", trained, *options)

    text = "Grüße, <|endoftext|> def f(x):\n" * 20
    (tmp_path / "text.txt").write_text(text)
    words = [f"--text={tmp_path / 'text.txt'}", f"--json={tmp_path / 'records.json'}"]
    printed = output("evaluate.py", extended, *words, "--lengths=32", "--protocol=chunked")
    assert "bits per byte" in printed
    (record,) = json.loads((tmp_path / "records.json").read_text())

    output("hf.py", "export", extended, exported, "--verify=false")
    package = tokenizers.Tokenizer.from_file(str(exported / "tokenizer.json"))
    package.encode_special_tokens = True
    ids = package.encode(text, add_special_tokens=False).ids
    assert package.encode(text).ids == [0, *ids]
    assert (record["tokens"], record["bytes"]) == (len(ids), len(text.encode()))
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    assert settings["bos_token"] == settings["eos_token"] == "<|endoftext|>"


GENERATE_SCRIPT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("def f(", return_tensors="pt")
print(inputs["input_ids"].tolist())
tokens = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
print(repr(tokenizer.decode(tokens)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind, bos", [("bytes", "<bos>"), ("bpe", "<|endoftext|>")])
def test_transformers_continues_a_text_as_we_do(kind, bos, run, tmp_path, text_data, monkeypatch):
    """A model that is trained here: transformers puts bos first and generates the same text."""
    trained, exported = tmp_path / "run", tmp_path / "exported"
    dataset = prepare_bpe(tmp_path, monkeypatch) if kind == "bpe" else text_data
    words = [*TINY, "--bos=true", f"--dataset={dataset}", f"--out_dir={trained}"]
    assert_success(run("train.py", *words))
    done = assert_success(run("hf.py", "export", trained, exported))
    assert "text is encoded alike" in done.stdout
    theirs = assert_success(run_python(GENERATE_SCRIPT, exported, cwd=tmp_path, env=OFFLINE))
    ids, text = theirs.stdout.strip().splitlines()[-2:]
    model = GPT.load(trained)
    tokenizer = data.tokenizer_from_json(model.meta["tokenizer"])
    prompt = [tokenizer.bos, *tokenizer.encode("def f(")]
    assert json.loads(ids) == [prompt]
    generated = [int(t) for t in model.generate(torch.tensor([prompt]), 12, temperature=0)]
    ours = tokenizer.decode([*prompt, *generated]).decode("utf-8", "replace")
    assert text == repr(bos + ours)
    assert "model.embed_tokens.weight" in load_file(exported / "model.safetensors")
    assert not (tmp_path / ".tmp-exported").exists()
