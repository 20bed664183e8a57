"""Attention functions of transformers compared with our own model, and what they refuse."""

import copy
import functools
import sys

import interchange
import pytest
import torch
import transformers
from conftest import ROOT
from interchange import LENGTH, imported, load_folder, make_theirs, our_logits
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from model import KVCache
from nanolong.errors import UserError
from nanolong.hub import attention
from rope_scaling import ATTENTION

attention.register(factor=4)
# random, and above 0, which generate() takes for padding
TOKENS = torch.randint(1, 127, (2, 555), generator=torch.Generator().manual_seed(0))


def assert_close(found, expected):
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


# -----------------------------------------------------------------------------
# The same as our model, imported and extended

SLOW = pytest.mark.slow
# each family of docs/checkpoints.md that has RoPE and no window; of "default" the original length
# is 64, and of other types 256
WHOLE = [
    ("llama", "default"),
    pytest.param("llama", "linear", marks=SLOW),
    pytest.param("llama", "llama3", marks=SLOW),
    pytest.param("llama, wide heads", "yarn", marks=SLOW),
    pytest.param("mistral", "default", marks=SLOW),
    pytest.param("ministral3", "default", marks=SLOW),
    pytest.param("qwen2", "default", marks=SLOW),
    ("qwen3", "yarn, options"),
    ("smollm3", "default"),
    pytest.param("smollm3", "yarn, mscale", marks=SLOW),
    ("phi3", "default"),
    pytest.param("olmo2", "default", marks=SLOW),
    pytest.param("gemma", "default", marks=SLOW),
    ("gpt_neox", "default"),
    pytest.param("gpt_neox, pre", "yarn", marks=SLOW),
    pytest.param("granite", "default", marks=SLOW),
    ("granitemoehybrid", "default"),
]


@pytest.fixture
def pair(tmp_path):
    """A function that makes transformers' model of a case, and our import, extended by a method."""

    @functools.cache
    def load(family, rope):
        make_theirs(family, rope, seed=len(family)).save_pretrained(tmp_path / "hf")
        return load_folder(tmp_path / "hf"), imported(tmp_path / "hf", tmp_path)[0]

    def make(method, family="llama", rope="default"):
        theirs, ours = (copy.deepcopy(x).requires_grad_(False) for x in load(family, rope))
        theirs.set_attn_implementation(method)
        ours.extend(method, 4)
        return theirs, ours

    return make


@pytest.mark.parametrize("family, rope", WHOLE)
def test_logits_and_tokens_are_ours(family, rope, pair):
    """Of two rows, in three pieces, whose ends have the same group, and greedily by a cache."""
    length = LENGTH if rope == "default" else 4 * LENGTH
    tokens = TOKENS[:, : 2 * length + 43]
    for method in ATTENTION:
        theirs, ours = pair(method, family, rope)
        expected = our_logits(ours, tokens)
        assert_close(theirs(tokens).logits, expected)
        pieces, cache = tokens.split((2 * length + 5, 7, 31), 1), DynamicCache()
        found = [theirs(piece, past_key_values=cache).logits for piece in pieces]
        assert_close(torch.cat(found, 1), expected)
        if family == "llama" or method == "jet-long":  # because the others take as long again
            prompt = tokens[:1, : 2 * length + 10]
            theirs.generation_config.eos_token_id = None
            found = theirs.generate(prompt, max_new_tokens=40, do_sample=False)
            expected = torch.cat([*ours.generate(prompt, 40, temperature=0)], 1)
            assert torch.equal(found[:, prompt.shape[1] :], expected)


def test_the_cache_of_jet_long_keeps_keys_of_a_smaller_group(pair):
    """Token by token, over two changes of the group; without a cache each length is ours."""
    theirs, ours = pair("jet-long")
    tokens, cache, our_cache = TOKENS[:, :150], DynamicCache(), KVCache()
    pieces = tokens.split(1, 1)
    found = torch.cat([theirs(piece, past_key_values=cache).logits for piece in pieces], 1)
    expected = torch.cat([ours(piece, cache=our_cache) for piece in pieces], 1)
    assert_close(found[:, :LENGTH], expected[:, :LENGTH])
    difference = (found - expected).abs().max() / expected.abs().max()
    assert 1e-3 < difference < 0.5
    assert_close(theirs(tokens).logits[:, -1], expected[:, -1])


def test_gradients_are_ours(pair):
    """After a pass in inference mode, and with the activations computed again."""
    theirs, ours = pair("self-extend")
    attention.make_terms.cache_clear()
    tokens = TOKENS[:, :150]
    with torch.inference_mode():
        theirs(tokens)
    theirs.train().requires_grad_(True).activation_checkpointing_enable()
    theirs(tokens, labels=tokens).loss.backward()
    ours.requires_grad_(True)(tokens[:, :-1], tokens[:, 1:]).backward()
    assert_close(theirs.model.embed_tokens.weight.grad, ours.embed.weight.grad)


# -----------------------------------------------------------------------------
# What is refused, and what is right

APART = " rotates pairs of channels that are not half a head apart"
# the other families of docs/checkpoints.md, and further ones -> a phrase of the sentence
REFUSED = {
    "mistral, window": "mistral attends with sliding_window",
    "qwen2, window in some layers": "qwen2 attends with sliding_window",
    "phi3, window": "phi3 attends with sliding_window",
    "olmo3": "olmo3 attends with sliding_window",
    "gemma3_text": "gemma3_text attends with sliding_window",
    "granite_swa": "granite_swa attends with s_aux",
    "cohere2": "cohere2" + APART,
    "ernie4_5": "ernie4_5" + APART,
    "llama4_text": "llama4_text does not rotate as Llama does",
    "granitemoehybrid, no positions": "granitemoehybrid does not rotate as Llama does",
    "gpt2": "gpt2 has no RoPE",
    "bloom": "bloom has no RoPE",
    "mpt": "mpt has no RoPE",
    "glm": "glm" + APART,
    "gemma2": "gemma2 attends with sliding_window, softcap",
    "gpt_neox_japanese": "gpt_neox_japanese calls no attention function",
    # its norms follow the rotation
    "hunyuan_v1_dense": "hunyuan_v1_dense" + APART,
}


def build(family="llama", rope="default", **changes):
    """Return transformers' model of a family, with random weights."""
    if family in interchange.FAMILIES:
        theirs = make_theirs(family, rope, **changes)
    else:
        shape = {**interchange.SHAPE, "max_position_embeddings": LENGTH, **changes}
        c = transformers.AutoConfig.for_model(family, **shape)
        theirs = AutoModelForCausalLM.from_config(c).eval().requires_grad_(False)
        for p in theirs.parameters():
            p.mul_(torch.rand(p.shape))
    theirs.config._attn_implementation = "jet-long"  # as from_pretrained() does
    return theirs


@pytest.mark.parametrize("family", REFUSED)
def test_another_family_is_refused_by_name(family):
    with pytest.raises(UserError, match=REFUSED[family]) as caught:
        build(family)(TOKENS[:, :150])
    assert ": " in str(caught.value) and "\n" not in str(caught.value)


X = TOKENS[:, :150]
LEFT, RIGHT = torch.ones(2, 2, 150, dtype=torch.int64)
LEFT[0, :20] = RIGHT[0, -20:] = 0
CAUSAL = torch.ones(150, 150, dtype=torch.bool).tril()[None, None]
PACKED = torch.cat((torch.arange(70), torch.arange(80)))[None]


def static(model, capacity=200):
    return StaticCache(model.config, max_cache_len=capacity)


def decode_static(model):
    """Prefill a static cache by sdpa, and decode a token by jet-long."""
    cache = static(model)
    model.set_attn_implementation("sdpa")
    model(X[:, :149], past_key_values=cache)
    model.set_attn_implementation("jet-long")
    model(X[:, 149:], past_key_values=cache)


TEXT = "position ids of .* are not a whole text's: give rows of one length"
HYBRID = {"family": "granitemoehybrid"}  # which keeps position ids from its attention
# changes of the model, and what a user may do -> a phrase of the sentence
MISUSES = [
    ({}, lambda m: m(X, attention_mask=LEFT), TEXT),
    ({}, lambda m: m(X, attention_mask=RIGHT), TEXT),
    ({}, lambda m: m(X, attention_mask=CAUSAL), TEXT),
    ({}, lambda m: m.generate(X, attention_mask=LEFT, max_new_tokens=1), TEXT),
    ({}, lambda m: m(X[:1], position_ids=PACKED, use_cache=False), TEXT),
    ({}, lambda m: m(X[:1], position_ids=PACKED), TEXT),
    ({}, lambda m: m(X, cu_seq_lens_q=torch.tensor([0, 150])), "attends with cu_seq_lens_q"),
    ({}, lambda m: m(X, position_ids=torch.arange(5, 155)[None]), TEXT),
    (HYBRID, lambda m: m(X, past_key_values=static(m)), TEXT),
    ({}, decode_static, TEXT),
    ({}, lambda m: m.generate(X, max_new_tokens=2, cache_implementation="static"), TEXT),
    ({}, lambda m: m(X, output_attentions=True), "attends with output_attentions"),
    ({"attention_dropout": 0.1}, lambda m: m.train()(X), "attends with dropout"),
    ({"rope": "dynamic"}, lambda m: m(X), "has RoPE of the type dynamic"),
    ({"family": "phi3", "rope": "longrope"}, lambda m: m(X), "has RoPE of the type longrope"),
    ({}, lambda m: attention.register(0.5), "factor=0.5 does not extend the context"),
]


@pytest.mark.parametrize("changes, use, phrase", MISUSES)
def test_a_misuse_is_refused(changes, use, phrase):
    with pytest.raises(UserError, match=phrase):
        use(build(**changes))


def offloaded(model):
    """A model whose weights come to its layers one after the other."""
    return pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")


RIGHT_USES = [
    lambda m: m(X, attention_mask=torch.ones_like(X)),
    lambda m: m(X, past_key_values=static(m, 150)),
    lambda m: m.train()(X),
    lambda m: offloaded(m)(X),
    pytest.param(lambda m: torch.compile(m, backend="eager")(X), marks=SLOW),
]


@pytest.mark.parametrize("use", RIGHT_USES)
def test_a_use_does_not_change_logits_or_random_numbers(use):
    expected, model = build()(X).logits, build()
    torch.manual_seed(3)
    numbers = torch.rand(2)
    torch.manual_seed(3)
    assert_close(use(model).logits, expected)
    assert torch.equal(torch.rand(2), numbers)


def test_a_module_runs_with_the_methods(tmp_path, monkeypatch, capsys):
    """Without the folder of evaluate.py, because lm_eval imports a package of this name."""
    print_all = "import sys\nprint(sys.argv[1:], __name__, sys.path)"
    (tmp_path / "some_module.py").write_text(print_all)
    monkeypatch.setattr(sys, "path", [str(ROOT), str(tmp_path), *sys.path])
    for words in ([], ["--factor=4"], ["--factor=x", "some_module"], ["--factor=4", "absent"]):
        monkeypatch.setattr(sys, "argv", ["", *words])
        with pytest.raises(UserError, match="--factor=4 lm_eval"):
            attention.main()
    monkeypatch.setattr(sys, "argv", ["", "--factor=4", "some_module", "--x"])
    attention.main()
    printed = capsys.readouterr().out
    assert printed.startswith("['--x'] __main__") and f"'{ROOT}'" not in printed
