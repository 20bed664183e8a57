"""Chat templates compared with transformers, and sample.py --chat."""

import itertools
import json
import sys

import pytest
import torch
from test_hf_tokenizer import HARD_TEXTS, train_byte_level

import data
from nanolong import chat
from nanolong.errors import UserError
from nanolong.tokenizer_files import read_tokenizer

tokenizers = pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip(
    "jinja2", reason="these need jinja2: pip install -r requirements-hf.txt"
)

SPECIAL = ["<|end_of_text|>", "<|start|>", "<|end|>", "<|user|>"]
# Indented blocks, and a default system message.
TURNS = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|start|>system\\nBe brief.<|end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|start|>assistant\\n' }}
        {%- generation %}
        {{- message.content | trim + '<|end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
{%- endif %}
"""
# Without a token of its own after an answer; a system message is refused.
WITH_BOS = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ raise_exception('no system message') }}{% elif message['role'] == 'user' %}"
    "[user] {{ message['content'].strip() }} [/user]{% else %} {{ message['content'] }}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
# Everything else that a template may use.
REST = """{% set state = namespace(n=0) %}{% set tools = tools or [] %}
{% if tools is none or documents is not none or pad_token is defined %}wrong{% endif %}
Today: {{ strftime_now("%d %B %Y") }}
{% for message in messages if message.content %}
{% if loop.index > 5 %}{% break %}{% endif %}
    {% set state.n = state.n + 1 %}
{% if state.n > 9 %}{% continue %}{% endif %}
  <|user|>{{ message | tojson }} {{ {'b': '<&>é', 'a': 1} | tojson(indent=2, sort_keys=true) }}
<|end|>
{% endfor %}
{{ messages[1:] | length }}{{ messages[::-1][0].role }}"""
NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TURNS}]

# name -> tokenizer_config.json, chat_template.jinja
TEMPLATES = {
    "turns": ({"chat_template": TURNS}, ""),
    "by name": ({"chat_template": NAMED}, ""),
    "a file counts more": ({"chat_template": "no"}, WITH_BOS),
    "rest": ({}, REST),
}
MESSAGES = [
    [{"role": "user", "content": "What is 1 < 2 & 'é'?\n"}],
    [{"role": "system", "content": "Answer."}, {"role": "user", "content": "  <|end|> {{ 1 }} "}],
    [{"role": "user", "content": "Hi"}, chat.ANSWER],
    *[[{"role": "user", "content": text}] for text in HARD_TEXTS if "\ufeff" not in text],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The folder of a tokenizer for each of TEMPLATES: name -> folder."""
    made = train_byte_level("gpt2", 500, SPECIAL)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": {"__type": "AddedToken", "content": "<|start|>", "special": True},
        "eos_token": "<|end_of_text|>",
        "add_bos_token": True,
    }
    folders = {}
    for name, (config, template) in TEMPLATES.items():
        folders[name] = tmp_path_factory.mktemp("tokenizer")
        made.save(str(folders[name] / "tokenizer.json"))
        (folders[name] / "tokenizer_config.json").write_text(json.dumps(settings | config))
        if template:
            (folders[name] / "chat_template.jinja").write_text(template)
    return folders


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_renders_them(name, folders):
    """Text and token ids, of conversations with and without the start of an answer."""
    transformers = pytest.importorskip("transformers")
    ours = read_tokenizer(folders[name])[0]
    theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
    refused = 0
    for messages, prompt in itertools.product(MESSAGES, (True, False)):
        words = {"add_generation_prompt": prompt, "return_dict": False}
        try:
            ids = theirs.apply_chat_template(messages, **words)
            expected = theirs.apply_chat_template(messages, tokenize=False, **words)
        except jinja2.TemplateError:
            refused += 1
            with pytest.raises(UserError, match="no system message"):
                chat.render(ours, messages, prompt)
            continue
        text = chat.render(ours, messages, prompt)
        assert text == expected
        assert ours.encode_with_special_tokens(text) == ids
    assert refused == (2 if name == "a file counts more" else 0)


@pytest.mark.parametrize("name, stop", [("turns", {0, 2}), ("a file counts more", {0})])
def test_an_answer_ends_where_the_template_ends_a_turn(name, stop, folders):
    tokenizer = read_tokenizer(folders[name])[0]
    ids, found = chat.encode_chat(tokenizer, "Hi")
    assert found == stop
    assert not set(tokenizer.special_tokens.values()).isdisjoint(ids)


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' .* unsafe"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% for %}", "Expected"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_refused(template, message, folders):
    tokenizer = read_tokenizer(folders["turns"])[0]
    tokenizer.files["chat_template.jinja"] = template.encode()
    with pytest.raises(UserError, match=f"{message}.*leave --system out, or --chat"):
        chat.encode_chat(tokenizer, "Hi")


def test_without_a_template_or_jinja_chat_is_refused(folders, monkeypatch):
    tokenizer = read_tokenizer(folders["turns"])[0]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jinja2", None)
        with pytest.raises(UserError, match="jinja2.*pip install -r requirements-hf.txt"):
            chat.encode_chat(tokenizer, "Hi")
    tokenizer.files["tokenizer_config.json"] = b'{"chat_template": [3]}'
    for without in (data.ByteTokenizer(), tokenizer):
        with pytest.raises(UserError, match="no chat template: leave --chat out"):
            chat.encode_chat(without, "Hi")


# -----------------------------------------------------------------------------
# sample.py


@pytest.fixture
def instruct_run(folders, make, tmp_path):
    """The run folder of an untrained model whose tokenizer has a chat template."""
    model = make(vocab_size=500, block_size=64)
    model.meta = {"tokenizer": read_tokenizer(folders["turns"])[0].to_json(), "step": 1}
    model.save(tmp_path / "run" / "step-000001")
    return tmp_path / "run"


def test_the_answer_alone_is_printed_up_to_its_end(call, instruct_run, folders, monkeypatch):
    tokenizer = read_tokenizer(folders["turns"])[0]
    prompts = []

    def generate(model, tokens, *arguments):
        prompts.append(tokens[0].tolist())
        for token in [*tokenizer.encode("It is é."), 2, *tokenizer.encode("not this")]:
            yield torch.tensor([[token]])

    monkeypatch.setattr("model.GPT.generate", generate)
    short = ["--max_new_tokens=20"]
    done = call("sample.py", instruct_run, "--chat", "--start=Hi <|end|>", "--system=S", *short)
    assert (done.returncode, done.stdout, done.stderr) == (0, "It is é.\n", "")
    text = "<|start|>system\nS<|end|>\n<|start|>user\nHi <|end|><|end|>\n<|start|>assistant\n"
    package = tokenizers.Tokenizer.from_file(str(folders["turns"] / "tokenizer.json"))
    assert prompts == [package.encode(text, add_special_tokens=False).ids]

    # as before without --chat: special tokens are text, and the text goes on
    done = call("sample.py", instruct_run, "--start=a<|end|>", *short)
    assert done.stdout == "a<|end|>It is é.not this\n"
    assert prompts[1] == tokenizer.encode("a<|end|>") and 2 not in prompts[1]
    assert done.stderr.startswith("note: '<|end|>' in the prompt is encoded as plain text")
