"""Every model family compared with transformers: import, cache, extension and export.

By default every family occurs once; --all has every RoPE type of each. Run as a script, this file
writes the table of all differences, experiments/results/families.md.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import interchange
import pytest
import torch
from conftest import OFFLINE, assert_success, run_python
from interchange import LENGTH, ORIGINAL, SHAPE, VOCAB_SIZE
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import kernels
from experiments.board import table_lines
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.evaluation.provenance import provenance
from nanolong.hub.families import FAMILIES
from nanolong.hub.importing import import_checkpoint, read_settings
from nanolong.hub.layout import tensor_layout

TOKENS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}
LLAMA_SHAPE = {**SHAPE, **TOKENS}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
DENSE_HYBRID = {
    **MULTIPLIERS,
    "num_local_experts": 0,
    "shared_intermediate_size": 80,
    "layer_types": ["full_attention"] * 3,
    "mamba_n_heads": 1,
}
# of every model the sizes are odd; windows are shorter than both lengths that are compared
FAMILY_SETTINGS = {
    "phi3": {"partial_rotary_factor": 0.75, **ORIGINAL},
    "phi3, window": {"sliding_window": 21, "tie_word_embeddings": True, **ORIGINAL},
    "starcoder2": {"sliding_window": 21, "norm_epsilon": 1e-4},
    "starcoder2, no biases": {"use_bias": False, "hidden_act": "gelu"},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-4},
    "seed_oss": {"head_dim": 12},
    "olmo2": {},
    "olmo3": {"sliding_window": 21, "num_hidden_layers": 5},
    "exaone4": {"sliding_window": 21, "num_hidden_layers": 5},
    "exaone4, no window": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "gemma3_text": {
        "sliding_window": 21,
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "query_pre_attn_scalar": 10,
        "tie_word_embeddings": True,
    },
    "gemma": {"num_key_value_heads": 1, "head_dim": 12, "tie_word_embeddings": True},
    "gpt_neox": {"rotary_pct": 0.5, "layer_norm_eps": 1e-4, "intermediate_size": 100},
    "gpt_neox, pre": {"rotary_pct": 0.75, "use_parallel_residual": False},
    "granite": {**MULTIPLIERS, "tie_word_embeddings": True},
    "granite_swa": {
        **MULTIPLIERS,
        "sliding_window": 21,
        "num_hidden_layers": 5,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "layer_rope_theta": [0, 1e3, 1e3, 1e3, 0],
        "tie_word_embeddings": True,
    },
    "granitemoehybrid": {**DENSE_HYBRID, "position_embedding_type": "rope"},
    "granitemoehybrid, no positions": {**DENSE_HYBRID, "position_embedding_type": None},
    "bloom": {"n_layer": 3, "n_head": 6, "tie_word_embeddings": True},
    "mpt": {
        "d_model": 48,
        "n_heads": 6,
        "n_layers": 3,
        "max_seq_len": 160,
        "attn_config": {"softmax_scale": 0.4, "attn_pdrop": 0},
    },
    "ministral3": {"head_dim": 12},
    "ministral3, window": {"sliding_window": 21, "tie_word_embeddings": True},
}
WITHOUT_ROPE = ("bloom", "mpt")
BY_KIND = ("olmo3", "gemma3_text")
# the RoPE types of transformers, and the methods by which our own extension is compared
ROPE_TYPES = ("default", "linear", "yarn", "longrope")
METHODS = {
    "pi": {},
    "yarn": {},
    "longrope": {"long_factor": [1.0, 2.5, 4.0, 5.5, 7.0, 8.5], "attention_factor": 1.1},
}


def make_case(name, rope):
    """Return the Case of a family with a RoPE type."""
    model_type = name.partition(",")[0]
    if model_type in WITHOUT_ROPE:
        sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "tie_word_embeddings": True, **TOKENS}
        settings = {**sizes, **FAMILY_SETTINGS[name]}
    else:
        settings = {**LLAMA_SHAPE, "tie_word_embeddings": False, **FAMILY_SETTINGS[name]}
        settings |= rope_fields(model_type, settings, rope)
    # transformers keeps keys of the other table of longrope
    with_cache = rope != "longrope"
    return interchange.Case(
        name=f"{name}-{rope}".replace(", ", "-").replace(" ", "-"),
        seed=len(name),
        architecture=name,
        rope=rope,
        model_type=model_type,
        settings=settings,
        with_cache=with_cache,
        shard_size="20KB",
    )


def rope_fields(model_type, settings, rope):
    """Return what a config.json says of RoPE."""
    fraction = settings.get("partial_rotary_factor", settings.get("rotary_pct", 1.0))
    head_dim = settings["head_dim"]
    fields = interchange.rope_settings(rope, int(head_dim * fraction) // 2)
    if model_type == "ministral3":
        fields["rope_parameters"] |= {"llama_4_scaling_beta": 0.3, **ORIGINAL}
    if model_type in BY_KIND:
        local = {"rope_type": "default", "rope_theta": 500.0}
        kinds = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
        fields |= {"rope_parameters": kinds}
        if rope == "linear":
            fields["max_position_embeddings"] = 4 * LENGTH
    return fields


def rope_types(name):
    """The RoPE types of transformers that a family has."""
    model_type = name.partition(",")[0]
    if model_type in WITHOUT_ROPE or name.endswith("no positions"):
        return ("default",)
    return ("default", "longrope") if model_type == "phi3" else ROPE_TYPES


def compare(cases, methods, folder):
    """Compare cases with transformers, and the models extended by `methods` of each family.

    Returns a record of each: architecture, rope, and differences as fractions of the largest logit.
    """
    answers = interchange.run_transformers(cases, folder)
    records, exported = interchange.compare_imports(cases, answers, folder)
    for item in exported:
        item.case.with_cache = False  # the imports are compared with one
    for case in cases:
        for method in methods(case):
            records.append({"architecture": case.architecture, "rope": f"{method}, by extend.py"})
            exported += extend_and_export(case, method, folder, records[-1])
    interchange.compare_exports(exported, folder)
    for record in records:
        for key in ("imported", "cached", "exported"):
            if record.get(key) is not None:
                record[key] /= record["largest_logit"]
    return records


def extend_and_export(case, method, folder, record):
    model = GPT.load(folder / f"run-{case.name}")
    fraction = int(model.config.rope_fraction * model.config.head_dim) // 2
    options = {
        key: value[:fraction] if isinstance(value, list) else value
        for key, value in METHODS[method].items()
    }
    layers = "all" if "N" in model.config.layer_pattern else "auto"
    model.extend(method, 4.0, layers, **options)
    name = f"{case.name}-{method}"
    model.save(folder / f"run-{name}" / "step-000000")
    assert interchange.export_twice(folder / f"run-{name}", folder, record, name), record
    config = json.loads((folder / f"exported-{name}/config.json").read_text())
    assert config["model_type"] == case.model_type  # that of the import
    new_case = replace(case, name=f"exported-{name}", settings=None, with_cache=False)
    record["largest_logit"] = interchange.compute_logits(model, new_case)["long"].abs().max().item()
    return [interchange.Exported(new_case, record, model)]


def check(records):
    for record in records:
        assert record["largest_logit"] > 0.3, record
        assert record.get("bytes", "same") == "same", record
        for key in ("imported", "cached", "exported"):
            assert (record.get(key) or 0) <= 1e-5, record
        assert ("refused" in record) == (record["architecture"] == "bloom"), record


def all_methods(case):
    """The methods by which a model with RoPE is extended, from its plain form."""
    return METHODS if case.rope == "default" and len(rope_types(case.architecture)) > 1 else ()


def proportional_cases():
    """The Cases of rope_type proportional: of Llama, and of both kinds of layers of Gemma 3."""
    cases = []
    for model_type, factor in (("llama", None), ("llama", 4.0), ("gemma3_text", 4.0)):
        rope = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.6}
        if factor:
            rope["factor"] = factor
        settings = {**LLAMA_SHAPE, **FAMILY_SETTINGS.get(model_type, {}), "head_dim": 12}
        settings |= {"rope_parameters": rope, "max_position_embeddings": 4 * LENGTH}
        settings["tie_word_embeddings"] = True
        if model_type == "gemma3_text":
            settings["rope_parameters"] = {"full_attention": rope, "sliding_attention": rope}
        name = f"proportional-{model_type}-{factor}"
        cases.append(interchange.Case(name, 3, model_type, "proportional", model_type, settings))
    return cases


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """Every family with one RoPE type and one method of extension: (folder, records)."""
    folder = tmp_path_factory.mktemp("families")
    cases = []
    for number, name in enumerate(name for name in FAMILY_SETTINGS if "," not in name):
        types = rope_types(name)
        cases.append(make_case(name, types[number % len(types)]))

    def one_method(case):
        return [method for n, method in enumerate(all_methods(case)) if n == case.seed % 3]

    return folder, compare(cases + proportional_cases(), one_method, folder)


def test_every_family_agrees_with_transformers(compared):
    _, records = compared
    check(records)
    tested = {name.partition(",")[0] for name in FAMILY_SETTINGS}
    assert tested | {"llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2"} == FAMILIES.keys()


def test_proportional_rope_is_p_rope(compared):
    folder, _ = compared
    for factor in (None, 4.0):
        model = GPT.load(folder / f"run-proportional-llama-{factor}")
        assert (model.config.p_rope, model.config.rope_fraction) == (0.6, 1.0)
        assert (model.pos.inv_freq == 0).tolist() == [False] * 3 + [True] * 3
        config = json.loads(
            (folder / f"exported-proportional-llama-{factor}/config.json").read_text()
        )
        exported = config["rope_parameters"]
        assert (exported["rope_type"], exported["partial_rotary_factor"]) == ("proportional", 0.6)
        assert exported["factor"] == (factor or 1.0)


def all_cases():
    return [make_case(name, rope) for name in FAMILY_SETTINGS for rope in rope_types(name)]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_every_rope_type_of_every_family_agrees_with_transformers(part, tmp_path):
    check(compare(all_cases()[part::4], all_methods, tmp_path))


# -----------------------------------------------------------------------------
# RoPE by kind of layer

ROTATE_SCRIPT = """
import importlib
import json
import sys

from safetensors.torch import load_file, save_file
from transformers import AutoConfig

cases_file, tensors_file, answers_file = sys.argv[1:]
tensors = load_file(tensors_file)
answers = {}
for name, values in json.load(open(cases_file)).items():
    module, prefix = {"gemma3_text": ("gemma3", "Gemma3"), "olmo3": ("olmo3", "Olmo3")}[
        values["model_type"]
    ]
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    rope = getattr(modeling, f"{prefix}RotaryEmbedding")(AutoConfig.for_model(**values))
    for kind in ("full_attention", "sliding_attention"):
        cos, sin = rope(tensors["q"], tensors["positions"][None], kind)
        q, k = modeling.apply_rotary_pos_emb(tensors["q"], tensors["k"], cos, sin)
        answers[f"{name}/{kind}/q"], answers[f"{name}/{kind}/k"] = q, k
save_file(answers, answers_file)
"""


def test_rotated_queries_and_keys_are_those_of_transformers(tmp_path):
    """Beyond the window and beyond 4,096 positions, by linear and yarn in full-attention layers."""
    configs = {}
    for model_type in BY_KIND:
        for rope in ("linear", "yarn"):
            settings = make_case(model_type, rope).settings | {"head_dim": 16}
            configs[f"{model_type} {rope}"] = {"model_type": model_type, **settings}
    positions = torch.cat(
        (torch.arange(15, 40), torch.arange(4090, 4130), torch.arange(9000, 9020))
    )
    q, k = torch.randn(2, 1, 2, len(positions), 16)
    save_file({"q": q, "k": k, "positions": positions}, tmp_path / "tensors")
    (tmp_path / "cases").write_text(json.dumps(configs))
    words = ["cases", "tensors", "answers"]
    assert_success(run_python(ROTATE_SCRIPT, *words, cwd=tmp_path, env=OFFLINE))
    answers = load_file(tmp_path / "answers")
    for name, values in configs.items():
        model = GPT(GPTConfig(**read_settings("config.json", values)))
        assert model.config.extension["layers"] == "full"
        local = model.pos.local
        schemes = {"full": (model.pos, local), "sliding": (local, model.pos)}
        for kind, (scheme, other) in schemes.items():
            layer = model.config.layer_pattern.index("F" if kind == "full" else "W")
            assert model.pos.of_layer(layer) is scheme
            ours = kernels.rope(q, k, *scheme.cos_sin(positions))
            others = kernels.rope(q, k, *other.cos_sin(positions))
            for x, y, letter in zip(ours, others, "qk", strict=True):
                theirs = answers[f"{name}/{kind}_attention/{letter}"]
                # their angles are float32, whose error grows with the position
                error = (x - theirs).abs().amax((0, 1, 3)) / (1 + positions)
                assert error.max() < 1e-6, (name, kind)
                assert (y - theirs).abs().max() > 0.5, "the other kind's rotation"


# -----------------------------------------------------------------------------
# Gradients

GRADIENT_SCRIPT = """
import sys

import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

checkpoint, tokens_file, answers_file = sys.argv[1:]
tokens = load_file(tokens_file)["tokens"]
model = AutoModelForCausalLM.from_pretrained(checkpoint).float()
logits = model(tokens[:, :-1]).logits
F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
save_file({name: p.grad for name, p in model.named_parameters()}, answers_file)
"""


def gradients_by_their_names(model, folder, tokens):
    """Our gradients of the tensors of a checkpoint, through the folds that make weights of them."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(p.shape) for name, p in parameters.items()}
    values = json.loads((folder / "config.json").read_text())
    layout = tensor_layout(FAMILIES[values["model_type"]], model.config, shapes, values)
    model(tokens[:, :-1], tokens[:, 1:].contiguous()).backward()
    found = {}
    tensors = load_file(folder / "model.safetensors")
    for name, held in layout.items():
        stored = tensors[name].requires_grad_()
        ours = dict(held.split(stored, shapes))
        assert all(torch.equal(x, parameters[n]) for n, x in ours.items()), name
        grads = [parameters[n].grad for n in ours]
        (found[name],) = torch.autograd.grad(list(ours.values()), stored, grads)
    return found


def test_gradients_with_learned_sinks_are_those_of_transformers(tmp_path):
    """Of every parameter, in layers with and without a window and positions."""
    case = replace(make_case("granite_swa", "default"), shard_size="5GB")
    interchange.run_transformers([case], tmp_path)
    save_file({"tokens": case.tokens}, tmp_path / "tokens")
    words = [case.name, "tokens", "answers"]
    assert_success(run_python(GRADIENT_SCRIPT, *words, cwd=tmp_path, env=OFFLINE))
    answers = load_file(tmp_path / "answers")
    model = import_and_load(tmp_path / case.name, tmp_path / "run")
    assert {*model.config.layer_pattern} == {"N", "W"}
    found = gradients_by_their_names(model, tmp_path / case.name, case.tokens)
    assert found.keys() == answers.keys()
    assert sum(name.endswith("sinks") for name in found) == model.config.n_layer
    for name, theirs in answers.items():
        assert (found[name] - theirs).abs().max() <= 1e-5 * theirs.abs().max(), name


# -----------------------------------------------------------------------------
# Files


def write_checkpoint(folder, model_type):
    """Write a checkpoint with random weights; returns its tensors."""
    values = {"model_type": model_type, **make_case(model_type, "default").settings}
    if model_type in BY_KIND:
        values["layer_types"] = ["full_attention", "sliding_attention"] * 4
    tensors = interchange.random_tensors(values)
    interchange.write_directory(folder, values, tensors)
    return tensors


def import_and_load(folder, run):
    interchange.import_quietly(folder, run)
    return GPT.load(run)


def same_weights(first, second):
    ours, others = dict(first.named_parameters()), dict(second.named_parameters())
    return ours.keys() == others.keys() and all(torch.equal(ours[n], others[n]) for n in ours)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_half_of_a_model_of_images_and_text_is_imported(prefix, tmp_path, rng):
    tensors = write_checkpoint(tmp_path / "text", "gemma3_text")
    text = json.loads((tmp_path / "text/config.json").read_text())
    (tmp_path / "both").mkdir()
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 2}}
    (tmp_path / "both/config.json").write_text(json.dumps(outer))
    both = {prefix + name.removeprefix("model."): x for name, x in tensors.items()}
    both["vision_tower.embeddings.weight"] = torch.ones(3, 3)
    save_file(both, tmp_path / "both/model.safetensors")
    models = [
        import_and_load(tmp_path / name, tmp_path / f"run-{name}") for name in ("text", "both")
    ]
    assert models[0].config == models[1].config
    assert same_weights(*models)
    assert models[1].meta["family"] == "gemma3_text"


def test_gemma_multiplies_embeddings_by_the_exact_root(tmp_path, rng):
    """Not by that of bfloat16; norms are stored without the 1 that is added to them."""
    tensors = write_checkpoint(tmp_path / "hf", "gemma3_text")
    output = interchange.capture_output(
        import_checkpoint, GPT, tmp_path / "hf", tmp_path / "run", "bfloat16"
    )
    assert "rounded to bfloat16" in output[-1]
    model = GPT.load(tmp_path / "run")
    assert model.config.embed_scale == 48**0.5
    weight = tensors["model.layers.1.self_attn.q_norm.weight"]
    assert torch.equal(model.blocks[1].attention.q_norm.weight, (weight + 1).bfloat16().float())
    model = import_and_load(tmp_path / "hf", tmp_path / "float32")
    assert torch.equal(model.blocks[1].attention.q_norm.weight, weight + 1)


def test_fields_of_old_files_mean_the_same(tmp_path):
    """Gemma 3 of 2025, Phi-3 of 2024, Pythia of 2023."""
    settings = make_case("gemma3_text", "yarn").settings
    kinds = settings.pop("rope_parameters")
    full = dict(kinds["full_attention"])
    new = read_settings("", {"model_type": "gemma3_text", **settings, "rope_parameters": kinds})
    old = {"rope_theta": full.pop("rope_theta"), "rope_local_base_freq": 500.0}
    old["rope_scaling"] = {"type": full.pop("rope_type"), **full}
    assert read_settings("", {"model_type": "gemma3_text", **settings, **old}) == new
    assert (new["rope_base"], new["rope_local_base"]) == (1e4, 500.0)
    assert new["extension"]["layers"] == "full"

    settings = {"model_type": "phi3", **make_case("phi3", "longrope").settings}
    new = read_settings("", settings)
    assert (new["rope_fraction"], new["extension"]["method"]) == (0.75, "longrope")
    for name in ("su", "yarn"):
        settings["rope_parameters"]["rope_type"] = name
        assert read_settings("", settings) == new

    settings = {"model_type": "gpt_neox", **make_case("gpt_neox", "default").settings}
    del settings["rope_parameters"]
    old = read_settings("", {**settings, "rotary_emb_base": 500.0})
    assert (old["rope_base"], old["rope_fraction"]) == (500.0, 0.5)
    assert old["norm_position"] == "parallel"


# -----------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    "model_type, changes, message",
    [
        ("llama", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("llama", {"hidden_act": None}, "hidden_act is None"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mpt", {"attn_config": {"clip_qkv": 8}}, "clip_qkv is 8"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi is False"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts is 4"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "Mamba layers"),
        ("llama", {"vision_config": {}}, "without a text_config"),
        (
            "olmo3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "differs from that of its full_attention layers",
        ),
        ("phi3", {"rope_parameters": {"rope_type": "llama3"}}, "no rope_type 'llama3'"),
        ("gpt_oss", {}, "is a mixture of experts"),
        ("gemma4", {}, "has embeddings for each layer"),
        ("qwen3_next", {}, "has layers of linear attention"),
        ("t5", {}, "is an encoder-decoder"),
        ("nanochat", {}, "has a squared ReLU"),
    ],
)
def test_what_is_not_computed_is_refused(model_type, changes, message, tmp_path):
    known = FAMILY_SETTINGS.get(model_type, {}) | changes
    values = {"model_type": model_type, **LLAMA_SHAPE, **known}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=message) as error:
        interchange.read_config(tmp_path)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value, tmp_path, rng):
    tensors = write_checkpoint(tmp_path / "hf", "olmo2")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, tmp_path / "hf/model.safetensors")
    with pytest.raises(UserError, match="blocks.1.mlp.up.weight has values that are not finite"):
        interchange.import_quietly(tmp_path / "hf", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_fold_that_training_has_made_impossible_is_refused(tmp_path, rng):
    write_checkpoint(tmp_path / "hf", "mpt")
    model = import_and_load(tmp_path / "hf", tmp_path / "run")
    with torch.no_grad():
        model.blocks[1].mlp_norm.bias[2] = 0.01
    model.save(tmp_path / "trained/step-000000")
    with pytest.raises(UserError, match="the norms have biases since the model was trained"):
        interchange.export_quietly(tmp_path / "trained", tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


# -----------------------------------------------------------------------------
# The table


def write_table(file):
    with tempfile.TemporaryDirectory() as folder:
        records = compare(all_cases(), all_methods, Path(folder))
    check(records)
    rows = []
    for record in records:
        row = [record["architecture"], record["rope"]]
        for key in ("imported", "cached", "exported"):
            row.append("" if record.get(key) is None else f"{record[key]:.1e}")
        rows.append(row)
    header = ["family", "RoPE", "import", "cached", "exported"]
    lines = [
        "# Model families, compared with transformers",
        "",
        f"`python tests/test_families.py`, {provenance(torch.device('cpu'))}. Random weights, "
        f"norms and biases, float32; {interchange.N_PROMPT} and {interchange.N_TOKENS} tokens, "
        f"windows of 21, original context length {LENGTH}. The largest difference of logits as a "
        "fraction of the largest logit: after the import, token by token with a cache, and of what "
        "is exported, as transformers loads it. By extend.py: the imported model, extended by 4 "
        "and exported.",
        "",
        *table_lines(header, rows),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table(Path(__file__).resolve().parent.parent / "experiments/results/families.md")
