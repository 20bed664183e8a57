"""sample.py on untrained checkpoints: settings, seeds, prompts and notes."""

import itertools
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_refused, assert_success
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from model import GPT
from nanolong.prompts import TextStream, read_prompts


def text_of(call, run, *words):
    words = ["sample.py", run, "--start=def f", "--max_new_tokens=12", "--device=cpu", *words]
    return assert_success(call(*words)).stdout


@pytest.mark.parametrize(
    "words, options",
    [
        ("--temperature=0", {"temperature": 0}),
        ("--top_k=3", {"top_k": 3}),
        ("--top_p=0.4", {"top_p": 0.4}),
        ("--seed=7", {"seed": 7}),
        ("--min_p=0.3", {"min_p": 0.3}),
        ("--max_new_tokens=5", {"max_new_tokens": 5}),
    ],
)
def test_each_setting_reaches_the_model(words, options, call, save_run):
    """The text is that of model.generate() with these settings, and another one without them."""
    run = save_run()
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_k": 200, "seed": 1337, **options}
    options["generator"] = torch.Generator().manual_seed(options.pop("seed"))
    new = GPT.load(run).generate([[256, *b"def f"]], **options)
    new = bytes(itertools.takewhile(lambda token: token < 256, (token.item() for token in new)))
    found = text_of(call, run, *words.split())
    assert found == f"def f{new.decode(errors='replace')}\n"
    assert found != text_of(call, run)


def test_sample_i_uses_seed_plus_i(call, save_run):
    run = save_run()
    both = text_of(call, run, "--seed=1", "--num_samples=2")
    first, second = both.removesuffix("\n").split("\n" + "-" * 16 + "\n")
    assert first == text_of(call, run, "--seed=1").removesuffix("\n")
    assert second == text_of(call, run, "--seed=2").removesuffix("\n") != first


def test_the_prompt_may_come_from_a_file(call, save_run, tmp_path):
    """A text, without a byte order mark; bytes that are none come from the command line alone."""
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9 <|endoftext|>")
    words = ["--start=FILE:prompt.txt", f"--out_dir={save_run()}", "--max_new_tokens=3"]
    done = assert_success(call("sample.py", *words, cwd=tmp_path))
    assert done.stdout.startswith("café <|endoftext|>")
    done = assert_success(call("sample.py", *words, "--start=a\udcff b"))
    assert done.stdout.startswith("a\ufffd b")
    (tmp_path / "rows.jsonl").write_text('{"text": "def f"}\n{"text": "x y"}\n')
    done = assert_success(call("sample.py", *words, "--start=@rows.jsonl", cwd=tmp_path))
    assert done.stdout.startswith("def f") and f"\n{'-' * 16}\nx y" in done.stdout
    done = call("sample.py", *words, "--start=FILE:rows.jsonl", cwd=tmp_path)
    assert_refused(done, "FILE:rows.jsonl is one prompt, and JSON has 2 texts: give @rows.jsonl")
    (tmp_path / "prompt.txt").write_bytes("café".encode("utf-16"))
    for start in ("FILE:prompt.txt", "@prompt.txt"):
        done = call("sample.py", *words, f"--start={start}", cwd=tmp_path)
        assert_refused(done, "prompt.txt is not UTF-8: unpack it, convert it")


def test_a_step_that_cannot_be_compiled_is_refused_before_the_wait_is_announced(call, save_run):
    extension = {"method": "dynamic-ntk", "factor": 2.0, "options": {}, "original_length": 24}
    run = save_run(block_size=48, extension=extension)
    done = call("sample.py", run, "--start=ab", "--max_new_tokens=30", "--compile")
    assert_refused(done, "tables change as the text grows", "leave out --compile")


# -----------------------------------------------------------------------------
# Where a text ends


def test_a_text_ends_with_its_document(call, save_run, monkeypatch):
    """The model is one that writes "é", <bos> and "x"."""

    def generate(model, tokens, max_new_tokens, **options):
        for token in (0xC3, 0xA9, 256, ord("x")):
            yield torch.tensor([[token]])

    run = save_run()
    monkeypatch.setattr("model.GPT.generate", generate)
    assert text_of(call, run) == "def fé\n"
    assert text_of(call, run, "--stop_at_eos=false") == "def féx\n"
    words = [run, "--stop_at_eos=false", "--stop=y,é"]
    assert text_of(call, *words) == "def féx\n"
    assert text_of(call, *words, "--stop=é") == "def f\n"


@pytest.mark.parametrize("end", [65, 66, 67, 256])
def test_a_text_ends_at_any_token_that_ends_one(end):
    """256 separates documents."""
    tokenizer = data.ByteTokenizer()
    cfg = SimpleNamespace(start="a", chat=False, stop_at_eos=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data.ByteTokenizer, "ends", [65, 66, 67])
        (prompt,) = read_prompts(cfg, tokenizer, None)
    stream = TextStream(tokenizer, prompt.end_ids, [])
    assert "".join(map(stream.add, (*b"xy", end, *b"z"))) == "xy"


TEXTS = st.text(alphabet="abé☃\n", max_size=20)


@given(TEXTS, st.lists(st.text(alphabet="abé☃\n", min_size=1, max_size=4), max_size=3))
@settings(deadline=None, max_examples=300)
def test_a_text_ends_before_the_texts_that_end_it(text, ends):
    """Before the one that is whole first; nothing that may be one of them is printed too early."""
    stream = TextStream(data.ByteTokenizer(), {256}, ends)
    printed = ""
    found = [(text.index(end) + len(end), text.index(end)) for end in ends if end in text]
    expected = text[: min(found)[1]] if found else text
    for token in [*text.encode(), 256, *b"more"]:
        printed += stream.add(token)
        assert expected.startswith(printed)
    assert stream.is_done
    assert printed + stream.flush() == expected


# -----------------------------------------------------------------------------
# Several prompts


@pytest.mark.parametrize("method", ["none", "dynamic-ntk"])
def test_prompts_of_a_file_are_continued_as_each_alone(method, call, save_run, tmp_path):
    """One a line, whatever its line ends, in batches; empty lines are none."""
    extension = {"method": method, "factor": 2.0, "options": {}, "original_length": 24}
    run = save_run(block_size=48, extension=extension)
    lines = [b"def f", b"import a", b"x", *[b"class %d:" % i for i in range(15)]]
    (tmp_path / "prompts.txt").write_bytes(b"\r\n".join([*lines, b"", b""]))
    words = ["sample.py", run, "--max_new_tokens=9", "--temperature=0", "--device=cpu"]
    done = assert_success(call(*words, f"--start=@{tmp_path}/prompts.txt"))
    found = done.stdout.removesuffix("\n").split("\n" + "-" * 16 + "\n")
    assert len(found) == len(lines) == 18
    for i in (0, 2, 16):  # the last of them is in the second batch
        alone = call(*words, f"--start={lines[i].decode()}").stdout
        assert found[i] == alone.removesuffix("\n")
    done = call(*words[:3], f"--start=@{tmp_path}/prompts.txt", "--num_samples=2", "--seed=3")
    found = done.stdout.removesuffix("\n").split("\n" + "-" * 16 + "\n")
    assert len(found) == 36 and found[0] != found[1]
    (tmp_path / "empty.txt").write_bytes(b"\n")
    assert_refused(call(*words, f"--start=@{tmp_path}/empty.txt"), "has no prompts")
    assert_refused(call(*words, "--start=@property"), "property cannot be used")


@pytest.mark.parametrize(
    "value, words", [(math.nan, "--temperature=0"), (math.inf, "--top_k=0 --top_p=0.5")]
)
def test_logits_that_are_no_numbers_print_no_text(value, words, call, save_run):
    run = save_run()
    model = GPT.load(run)
    with torch.no_grad():
        model.embed.weight[ord("i")] = value
    shutil.rmtree(run)
    model.save(run / "step-000001")
    done = call("sample.py", run, "--start=if", "--max_new_tokens=4", *words.split())
    assert_refused(done, "the model's logits are not numbers: give --dtype=float32")
    assert not done.stdout
