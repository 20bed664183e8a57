"""Chat templates compared with transformers, and sample.py --chat."""

import itertools
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import assert_refused, assert_success, logged
from test_hf_tokenizer import HARD_TEXTS, train_byte_level

import data
from model import GPT
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
# Conversations to train on

# As of SmolLM2 and Llama 3. The marks of generation are for transformers, and ours go without.
CHATML = """{% for message in messages %}{% if loop.first and message.role != 'system' %}
{{ '<|start|>system\nBe kind<|end|>\n' }}{% endif %}{% if message.role == 'assistant' %}
{{ '<|start|>assistant\n' }}{% generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{{ '\n' }}{% else %}
{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' + '\n' }}
{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"""
LLAMA = """{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}
{{ '<|user|>' + message.role + '<|user|>\n\n' }}{% if message.role == 'assistant' %}
{% generation %}{{ message.content | trim + '<|end|>' }}{% endgeneration %}{% else %}
{{ message.content | trim + '<|end|>' }}{% endif %}{% endfor %}
{% if add_generation_prompt %}{{ '<|user|>assistant<|user|>\n\n' }}{% endif %}"""
CHATML, LLAMA = (text.replace("%}\n", "%}") for text in (CHATML, LLAMA))
# The space at the end of a prompt is a part of the token of the next word.
SPACED = """{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}
{{- m.content + '<|end|>' }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
# What Qwen3's does with thoughts: those of earlier answers go.
FORGETS = (
    "{% for m in messages %}{{ m.role }}: {% if loop.last %}{{ m.content }}{% else %}"
    "{{ m.content.split('=')[-1] }}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def turns(*contents, system=""):
    """Messages of the user and the assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    return [{"role": "system", "content": system}] * bool(system) + messages


CHATS = [
    turns("What is 1 < 2 & 'é'?", "Yes: 1 < 2."),
    turns("Hi", "Hello \U0001f600", "And then?", "", "More", "  a b\n\n", system="Be é."),
    turns("a", "b", "c"),
    [*turns("a", "b"), *turns("c", "d")[1:], *turns("e", "<|user|> f")],
]


@pytest.mark.parametrize("template", [CHATML, LLAMA, SPACED, TURNS])
def test_the_tokens_of_answers_are_scored_as_transformers_marks_them(template, folders):
    """Those and the end of each turn, by return_assistant_tokens_mask."""
    transformers = pytest.importorskip("transformers")
    ours = read_tokenizer(folders["turns"])[0]
    theirs = transformers.AutoTokenizer.from_pretrained(folders["turns"])
    theirs.chat_template = template
    plain = template if template == TURNS else re.sub("{% (end)?generation %}", "", template)
    ours.files["chat_template.jinja"] = plain.encode()
    words = {"return_assistant_tokens_mask": True, "return_dict": True}
    for messages in CHATS:
        expected = theirs.apply_chat_template(messages, **words)
        ids, is_scored = chat.encode_conversation(ours, messages)
        assert ids == expected["input_ids"]
        assert is_scored.tolist() == [bool(x) for x in expected["assistant_masks"]]
        n_answers = sum(message["role"] == "assistant" for message in messages)
        assert [i for i, scored in zip(ids, is_scored, strict=True) if scored].count(2) == n_answers


@pytest.mark.parametrize(
    "template, messages, problem",
    [
        (FORGETS, turns("a", "x=b", "c", "d"), "writes message 2 in another way.*its first answer"),
        ("{{ messages[-1].content }}", turns("a", "ab"), "ends an answer with no token"),
        (WITH_BOS, turns("a", "b", system="s"), "no system message.*change this conversation"),
    ],
)
def test_a_conversation_without_plain_answers_is_refused(template, messages, problem, folders):
    tokenizer = read_tokenizer(folders["turns"])[0]
    plain = re.sub("{% (end)?generation %}", "", template)
    tokenizer.files["chat_template.jinja"] = plain.encode()
    with pytest.raises(UserError, match=problem):
        chat.encode_conversation(tokenizer, messages)
    # a template that changes earlier turns takes one answer
    if template == FORGETS:
        ids, is_scored = chat.encode_conversation(tokenizer, turns("a", "x=b"))
        answer = [*tokenizer.encode("x=b"), 2]
        assert ids[-len(answer) :] == answer
        assert is_scored.tolist() == [False] * (len(ids) - len(answer)) + [True] * len(answer)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_instruct_model_is_trained_on_answers_alone(call, instruct_run, tmp_path, monkeypatch):
    """The files are read by code of its own, and the loss is the model's on what they score."""
    monkeypatch.setattr(data.token_files, "HERE", tmp_path)
    rows = [{"messages": turns(f"Is it {i}?", f"It is {i}.", "Why", f"é{i}")} for i in range(40)]
    for row in rows[::3]:
        row["messages"][1]["content"] = "a long answer " * 20
    path = write_rows(tmp_path / "chats.jsonl", rows)
    done = call("data/prepare.py", path, f"--tokenizer={instruct_run}")
    assert_success(done)
    tokenizer = data.tokenizer_from_json(GPT.load(instruct_run).meta["tokenizer"])
    answers = {"train": [], "val": []}
    for split in answers:
        ids = np.fromfile(tmp_path / f"chats/{split}.bin", "<u2", offset=1024)
        mask = np.fromfile(tmp_path / f"chats/{split}.mask", np.uint8)
        scored = np.split(ids[mask & 1 == 1], np.flatnonzero(ids[mask & 1 == 1] == 2) + 1)
        answers[split] = [tokenizer.decode(part).decode() for part in scored[:-1]]
        n_documents = np.count_nonzero(mask & 2)
        assert f"{n_documents} {split} conversations of {len(ids):,} tokens, " in done.stdout
        assert f"{np.count_nonzero(mask & 1):,} of them scored" in done.stdout
        assert len(answers[split]) == 2 * n_documents
    wanted = [row["messages"][i]["content"] for row in rows for i in (1, 3)]
    assert sorted(answers["train"] + answers["val"]) == sorted(text.strip() for text in wanted)
    assert 0 < len(answers["val"]) < 20

    mask = np.fromfile(tmp_path / "chats/train.mask", np.uint8)
    sizes = np.diff([*np.flatnonzero(mask & 2), len(mask)])
    long = f"{sizes[sizes >= 64].sum() / sizes.sum():.0%} of the training tokens are in documents"
    words = ["--method=none", "--factor=1", f"--dataset={tmp_path / 'chats'}", "--batch_size=2"]
    words += ["--learning_rate=0.01", "--max_iters=2", "--device=cpu", "--dtype=float32"]
    for extra in ([], ["--lora=8"]):
        run = tmp_path / f"trained{len(extra)}"
        done = call("extend.py", instruct_run, *words, *extra, f"--out_dir={run}")
        assert_success(done)
        assert long in done.stdout
        assert "are too long for 64 tokens, and are split" in done.stdout
        model = GPT.load(run)
        assert model.meta["bos"] == GPT.load(instruct_run).meta["bos"]
        # the first loss of validation is the mean over the scored targets
        loss = validation_loss(GPT.load(instruct_run), tmp_path / "chats")
        assert logged(run, "val_loss")[0] == pytest.approx(loss, rel=1e-5)
        done = call("sample.py", run, "--chat", "--start=Is it 3?", "--max_new_tokens=4")
        assert_success(done)


@torch.no_grad()
def validation_loss(model, folder):
    """The mean loss of the scored tokens of val.bin, of parts of 64 targets of its documents."""
    ids = np.fromfile(folder / "val.bin", "<u2", offset=1024).astype(np.int64)
    mask = np.fromfile(folder / "val.mask", np.uint8)
    starts = [*np.flatnonzero(mask & 2), len(ids)]
    losses = []
    for start, stop in itertools.pairwise(starts):
        for first in range(start, stop - 1, 64):
            last = min(first + 64, stop - 1)
            logits = model(torch.from_numpy(ids[first:last])[None])[0].log_softmax(-1)
            for place in range(first, last):
                if mask[place + 1] & 1:
                    losses.append(-logits[place - first, ids[place + 1]].item())
    return np.mean(losses)


@pytest.mark.parametrize(
    "line, problem",
    [
        ('{"text": "a"}', 'JSON without "messages" in line 2'),
        ('{"text": "a", "messages": []}', 'JSON with both "text" and "messages" in line 2'),
        ('{"messages": []}', 'JSON with "messages" that are empty, or no list in line 2'),
        ('{"messages": "Hi"}', 'JSON with "messages" that are empty, or no list in line 2'),
        ('{"messages": [{"role": "user"}]}', 'whose "role" or "content" is no text in line 2'),
        ('{"messages": [3]}', 'whose "role" or "content" is no text in line 2'),
        ('{"messages": [{"role": "bot", "content": ""}]}', "the role 'bot', which is none of syst"),
        ('{"messages": [{"role": "user", "content": ""}]}', "without a message of the assistant"),
        ("{", "no JSON in line 2"),
    ],
)
def test_a_row_that_is_no_conversation_is_refused(line, problem, call, instruct_run, tmp_path):
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": turns("a", "b")}])
    path.write_text(path.read_text() + line)
    done = call("data/prepare.py", path, f"--tokenizer={instruct_run}")
    assert_refused(done, f"{path} is ", problem, "write a list, or a row a line")
    # in a file of texts each conversation is one
    path.write_text('{"text": "a"}\n' + json.dumps({"messages": turns("a", "b")}))
    assert_refused(call("data/prepare.py", path), 'JSON without a "text" in line 2')


def test_conversations_need_a_chat_template(call, save_run, instruct_run, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "chats.jsonl", [{"messages": turns("a", "b")}] * 2)
    for words in ([], ["--tokenizer=char"], [f"--tokenizer={save_run('bytes')}"]):
        done = call("data/prepare.py", path, *words)
        assert_refused(done, "has no chat template: give --tokenizer=RUN of an Instruct model")
    # what the template refuses is of one row
    write_rows(path, [{"messages": turns("a", "b")}, {"messages": turns("a", "b")[1:]}])
    broken = "{% for m in messages %}{% if loop.first and m.role != 'user' %}{{ "
    broken += "raise_exception('begins wrong') }}{% endif %}{{ m.content }}<|end|>{% endfor %}"
    model = GPT.load(instruct_run)
    model.meta["tokenizer"]["files"]["chat_template.jinja"] = broken.encode()
    model.save(tmp_path / "broken" / "step-000001")
    done = call("data/prepare.py", path, f"--tokenizer={tmp_path / 'broken'}")
    assert_refused(done, f"{path}:2: ", "begins wrong", "change this conversation")
    assert not data.dataset_folder("chats").exists()
    # a folder of texts leaves out a file of conversations, by name
    (tmp_path / "texts").mkdir()
    shutil.copy(path, tmp_path / "texts")
    (tmp_path / "texts" / "a.txt").write_text("text " * 9)
    monkeypatch.setattr(data.token_files, "HERE", tmp_path)
    done = call("data/prepare.py", tmp_path / "texts", "--name=texts-only")
    assert_success(done)
    left_out = 'left out chats.jsonl (JSON with the "messages" of conversations, as in row 1: trai'
    assert left_out in done.stdout


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
