"""sample.py on untrained checkpoints: settings, seeds, prompts and notes."""

import os

import pytest
import torch
from conftest import assert_success

from model import GPT, Block


def text_of(call, run, *words):
    words = ["sample.py", run, "--start=def f", "--max_new_tokens=12", "--device=cpu", *words]
    return assert_success(call(*words)).stdout


@pytest.mark.parametrize(
    "words, options",
    [
        ("--temperature=0", {"temperature": 0}),
        ("--temperature=2", {"temperature": 2}),
        ("--top_k=3", {"top_k": 3}),
        ("--top_k=0", {"top_k": 0}),
        ("--top_p=0.4", {"top_p": 0.4}),
        ("--seed=7", {"seed": 7}),
        ("--max_new_tokens=5", {"max_new_tokens": 5}),
        ("--max_new_tokens=0", {"max_new_tokens": 0}),
    ],
)
def test_each_setting_reaches_the_model(words, options, call, save_run):
    """The text is that of model.generate() with these settings, and another one without them."""
    run = save_run()
    options = {"max_new_tokens": 12, "temperature": 0.8, "top_k": 200, "seed": 1337, **options}
    options["generator"] = torch.Generator().manual_seed(options.pop("seed"))
    new = GPT.load(run).generate([[256, *b"def f"]], **options)
    new = bytes(token.item() for token in new if token < 256)
    found = text_of(call, run, *words.split())
    assert found == f"def f{new.decode(errors='replace')}\n"
    assert found != text_of(call, run)


def test_sample_i_uses_seed_plus_i(call, save_run):
    run = save_run()
    both = text_of(call, run, "--seed=1", "--num_samples=2")
    first, second = both.removesuffix("\n").split("\n" + "-" * 16 + "\n")
    assert first == text_of(call, run, "--seed=1").removesuffix("\n")
    assert second == text_of(call, run, "--seed=2").removesuffix("\n") != first


def test_greedy_text_that_is_rounded_is_not_printed_without_a_note(call, save_run, monkeypatch):
    """Other programs compute in float32. A user who samples, or who chose the dtype, knows."""
    words = ["sample.py", save_run(), "--max_new_tokens=3", "--device=cpu"]
    assert not call(*words, "--temperature=0").stderr  # a small model, in float32
    monkeypatch.setattr("sample.MIN_PARAMETERS_BFLOAT16", 0)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for greedy in ("--temperature=0", "--top_k=1"):
        assert "--dtype=float32" in call(*words, greedy).stderr
        assert not call(*words, greedy, "--dtype=bfloat16").stderr
    assert not call(*words).stderr


def test_the_prompt_may_come_from_a_file(call, save_run, tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"caf\xc3\xa9 \xff <|endoftext|>")
    words = ["--start=FILE:prompt.txt", f"--out_dir={save_run()}", "--max_new_tokens=3"]
    done = assert_success(call("sample.py", *words, cwd=tmp_path))
    assert done.stdout.startswith("café \ufffd <|endoftext|>")


def test_beyond_the_context_length_a_note_says_how_to_extend_it(call, save_run, tmp_path):
    """Of the newest run, which is used without a folder. ALiBi needs no extension."""
    for name, seconds in (("out/a run", 2), ("out/deep/b", 1)):
        meta = save_run(name) / "step-000001/meta.json"
        os.utime(meta, (10**9 + seconds, 10**9 + seconds))
    assert "extend.py" not in call("sample.py", "--max_new_tokens=23", cwd=tmp_path).stderr
    done = assert_success(call("sample.py", "--max_new_tokens=60"))  # and <bos>: 61 tokens
    assert "python extend.py 'out/a run' --method=yarn --factor=3" in done.stderr
    alibi = call("sample.py", save_run("alibi", pos="alibi"), "--max_new_tokens=60")
    assert "61 tokens" in alibi.stderr and "extend.py" not in alibi.stderr


@pytest.mark.parametrize("method", ["none", "self-extend"])
def test_slow_computation_says_how_long_it_will_take(method, call, save_run, monkeypatch):
    """Five layers of 4 s; Self-Extend computes the whole text for every token."""
    extension = {"method": method, "factor": 2.0, "options": {}, "original_length": 24}
    words = ["sample.py", save_run(n_layer=5, extension=extension), "--start=abc", "--seed=1"]
    quick = call(*words, "--max_new_tokens=4")
    now = [0.0]
    monkeypatch.setattr("nanolong.prompts.time.perf_counter", lambda: now[0])
    original = Block.forward

    def forward(block, *args):
        now[0] += 4
        return original(block, *args)

    monkeypatch.setattr(Block, "forward", forward)
    slow = call(*words, "--max_new_tokens=4")
    assert "prompt of 4 tokens: 2 of 5 layers, about 12 s left\n" in slow.stderr
    every_token = "every new token computes the whole text again, about 20 s each"
    assert (every_token in slow.stderr) == (method == "self-extend")
    assert slow.stdout == quick.stdout
