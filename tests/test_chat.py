"""Conversations: ids and ends against transformers' AutoTokenizer, and sample.py --chat."""

import sys

import pytest
import torch
import transformers
from makers import HARD_TEXTS, byte_level, write_tokenizer

import data
from nanolong import chat
from nanolong.errors import UserError
from nanolong.tokenizer_files import read_tokenizer

SPECIAL = ["<|end_of_text|>", "<|start|>", "<|end|>", "<|user|>"]
# The template has a token of its own after an answer.
TURNS = """{% for m in messages %}<|start|>{{ m.role }}
{{ m.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
# An answer ends as a text does; a system message is refused.
WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system\nmessage') }}{% elif m.role == 'user' %}"
    "[user] {{ m.content }} [/user]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NAMED = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TURNS}]


@pytest.fixture(scope="module", params=[(TURNS, {0, 2}), (NAMED, {0, 2}), (WITH_BOS, {0})])
def instruct(request, tmp_path_factory):
    """A folder of tokenizer files with a chat template, and the ids that end an answer."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<|start|>", "special": True},
        "eos_token": "<|end_of_text|>",
        "chat_template": request.param[0],
    }
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, byte_level(SPECIAL), tokenizer_config=settings)
    return folder, request.param[1]


def test_a_message_is_encoded_as_transformers_encodes_it(instruct):
    folder, stops = instruct
    ours = read_tokenizer(folder)[0]
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ["What is 1 < 2 & 'é'?\n", "  <|end|> {{ 1 }} ", *HARD_TEXTS]:
        messages = [{"role": "user", "content": text}]
        words = {"add_generation_prompt": True, "return_dict": False}
        expected = theirs.apply_chat_template(messages, **words)
        assert chat.encode_chat(ours, text) == (expected, stops)
    if stops == {0}:
        with pytest.raises(UserError, match="no system message.*leave --system out, or --chat"):
            chat.encode_chat(ours, "Hi", "Be brief.")


def test_what_cannot_be_rendered_is_refused(instruct, monkeypatch):
    tokenizer = read_tokenizer(instruct[0])[0]
    for template, problem in [("{{ ''.__class__.__mro__ }}", "unsafe"), ("{% for %}", "Expected")]:
        # a file of its own counts more than tokenizer_config.json
        tokenizer.files["chat_template.jinja"] = template.encode()
        with pytest.raises(UserError, match=f"{problem}.*leave --system out, or --chat"):
            chat.encode_chat(tokenizer, "Hi")
    with pytest.raises(UserError, match="no chat template: leave --chat out"):
        chat.encode_chat(data.ByteTokenizer(), "Hi")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match="transformers.*pip install -r requirements-hf.txt"):
        chat.encode_chat(tokenizer, "Hi")


@pytest.mark.parametrize("instruct", [(TURNS, {0, 2})], indirect=True)
def test_the_answer_alone_is_printed_up_to_its_end(call, instruct, make, tmp_path, monkeypatch):
    tokenizer = read_tokenizer(instruct[0])[0]
    model = make(vocab_size=tokenizer.vocab_size, block_size=64)
    model.meta = {"tokenizer": tokenizer.to_json(), "step": 1}
    model.save(tmp_path / "run" / "step-000001")
    prompts = []

    def generate(model, tokens, max_new_tokens, **options):
        prompts.append(tokens[0].tolist())
        for token in [*tokenizer.encode("It is é."), 2, *tokenizer.encode("not this")]:
            yield torch.tensor([[token]])

    monkeypatch.setattr("model.GPT.generate", generate)
    run = [tmp_path / "run", "--max_new_tokens=20"]
    done = call("sample.py", *run, "--chat", "--start=Hi <|end|>", "--system=S")
    assert (done.returncode, done.stdout, done.stderr) == (0, "It is é.\n", "")
    text = "<|start|>system\nS<|end|>\n<|start|>user\nHi <|end|><|end|>\n<|start|>assistant\n"
    assert prompts == [tokenizer.encode_with_special_tokens(text)]

    # without --chat special tokens are text, and the text goes on
    done = call("sample.py", *run, "--start=a<|end|>")
    assert done.stdout == "a<|end|>It is é.not this\n"
    assert done.stderr.startswith("note: '<|end|>' in the prompt is encoded as plain text")
