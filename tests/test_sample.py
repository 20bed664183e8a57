"""sample.py on untrained checkpoints: prompts, seeds, notes and errors."""

import os

import torch
from conftest import assert_refused, assert_success

from model import Block


def test_the_same_seed_gives_the_same_text(call, save_run):
    words = ["sample.py", save_run(), "--start=def f", "--max_new_tokens=15"]
    first, again, other = (call(*words, f"--seed={seed}") for seed in (1, 1, 2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("def f")
    assert first.stdout == again.stdout != other.stdout


def test_sample_i_uses_seed_plus_i(call, save_run):
    words = ["sample.py", save_run(), "--start=a", "--max_new_tokens=10"]
    both = call(*words, "--seed=1", "--num_samples=2").stdout
    first, second = both.removesuffix("\n").split("\n" + "-" * 16 + "\n")
    assert first == call(*words, "--seed=1").stdout.removesuffix("\n")
    assert second == call(*words, "--seed=2").stdout.removesuffix("\n")


def test_temperature_zero_is_greedy(call, save_run):
    words = ["sample.py", save_run(), "--max_new_tokens=10", "--temperature=0"]
    assert call(*words, "--seed=1").stdout == call(*words, "--seed=2").stdout
    assert call(*words[:-1], "--top_k=1").stdout == call(*words).stdout


def test_greedy_text_that_is_rounded_is_not_printed_without_a_note(call, save_run, monkeypatch):
    """Other programs compute in float32. A user who samples, or who chose the dtype, knows."""
    words = ["sample.py", save_run(), "--max_new_tokens=3", "--device=cpu"]
    assert not call(*words, "--temperature=0").stderr  # a small model, in float32
    monkeypatch.setattr("sample.MIN_PARAMETERS_BFLOAT16", 0)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for greedy in ("--temperature=0", "--top_k=1"):
        note = call(*words, greedy).stderr
        assert note.startswith("note: matrix products in bfloat16") and "--dtype=float32" in note
        assert note.count("\n") == 1
        for dtype in ("bfloat16", "float32"):
            assert not call(*words, greedy, f"--dtype={dtype}").stderr
    assert not call(*words).stderr


def test_the_prompt_may_come_from_a_file(call, save_run, tmp_path):
    run = save_run()
    (tmp_path / "prompt.txt").write_bytes(b"caf\xc3\xa9 \xff <|endoftext|>")
    words = ["--start=FILE:prompt.txt", f"--out_dir={run}", "--max_new_tokens=3"]
    done = assert_success(call("sample.py", *words, cwd=tmp_path))
    assert done.stdout.startswith("café \ufffd <|endoftext|>")


def test_no_new_tokens_prints_the_prompt(call, save_run):
    assert call("sample.py", save_run(), "--start=abc", "--max_new_tokens=0").stdout == "abc\n"


def test_beyond_the_context_length_a_note_says_how_to_extend_it(call, save_run):
    run = save_run()
    within = call("sample.py", run, "--max_new_tokens=23")
    assert within.stderr == ""
    beyond = call("sample.py", run, "--max_new_tokens=60")  # and <bos>: 61 tokens
    assert beyond.returncode == 0
    assert f"python extend.py {run} --method=yarn --factor=3" in beyond.stderr
    spaced = call("sample.py", save_run("a run"), "--max_new_tokens=60")
    assert f"python extend.py '{run.parent}/a run' --method=yarn" in spaced.stderr
    alibi = call("sample.py", save_run("alibi", pos="alibi"), "--max_new_tokens=60")
    assert "61 tokens" in alibi.stderr
    assert "extend.py" not in alibi.stderr


def test_without_a_folder_the_newest_run_is_used(call, save_run, tmp_path):
    assert_refused(call("sample.py", cwd=tmp_path), "train.py")
    for name, seconds in (("out/a", 2), ("out/deep/b", 1)):
        meta = save_run(name) / "step-000001/meta.json"
        os.utime(meta, (10**9 + seconds, 10**9 + seconds))
    done = assert_success(call("sample.py", "--max_new_tokens=40", cwd=tmp_path))
    assert "extend.py out/a " in done.stderr


def test_errors_say_what_to_do(call, save_run, tmp_path):
    run = save_run()
    assert_refused(call("sample.py", run, tmp_path), "one")
    assert_refused(call("sample.py", run, f"--out_dir={run}"), "one")
    assert_refused(call("sample.py", tmp_path / "gone"), "gone")
    assert_refused(call("sample.py", run, "--top_p=0"), "top_p")
    assert_refused(call("sample.py", run, "--temperature=nan"), "temperature")
    assert_refused(call("sample.py", run, "--start=FILE:gone.txt"), "gone.txt", "--start=FILE:PATH")
    assert_refused(call("sample.py", run, "--start=" + "a" * 1600), "1601 tokens", "extend.py")
    bare = save_run("bare", {"tokenizer": None})
    assert_refused(call("sample.py", bare), "tokenizer", "another checkpoint")


class Clock:
    """time.perf_counter() that every layer moves on by some seconds."""

    def __init__(self, monkeypatch, seconds):
        self.now = 0.0
        monkeypatch.setattr("nanolong.prompts.time.perf_counter", lambda: self.now)
        original = Block.forward

        def forward(block, *args):
            self.now += seconds
            return original(block, *args)

        monkeypatch.setattr(Block, "forward", forward)


def test_a_slow_prompt_says_how_long_it_will_take(call, save_run, monkeypatch):
    """Five layers of 4 s: after 8 s three are left, which take 12 s."""
    words = ["sample.py", save_run(n_layer=5), "--start=abc", "--max_new_tokens=4", "--seed=1"]
    quick = call(*words)
    assert not quick.stderr
    Clock(monkeypatch, 4)
    slow = call(*words)
    assert slow.stderr.splitlines() == [
        "prompt of 4 tokens: 2 of 5 layers, about 12 s left",
        "prompt of 4 tokens: 4 of 5 layers, about 4 s left",
    ]
    assert slow.stdout == quick.stdout


def test_a_method_without_cached_keys_says_what_every_token_costs(call, save_run, monkeypatch):
    """Self-Extend computes the whole text for each; yarn computes it once."""
    Clock(monkeypatch, 4)
    for method, is_slow in (("self-extend", True), ("yarn", False), ("dynamic-ntk", False)):
        run = save_run(method, n_layer=2, extension=extension(method))
        done = assert_success(call("sample.py", run, "--start=abc", "--max_new_tokens=2"))
        note = "note: every new token computes the whole text again, about 8 s each"
        assert (note in done.stderr) == is_slow, method


def extension(method):
    return {"method": method, "factor": 2.0, "options": {}, "original_length": 24}
