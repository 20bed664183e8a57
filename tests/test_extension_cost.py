"""What extend.py prints of an extension's effect: the loss before and after."""

import copy
import re

import pytest
import torch
from conftest import assert_success

import data
from nanolong.extension_cost import describe_change
from nanolong.losses import loss_by_position


def test_the_loss_is_that_of_the_same_text_before_and_after(make, text_data):
    original = make(vocab_size=257, block_size=24)
    model = copy.deepcopy(original)
    model.extend("pi", 4.0)
    split = data.open_dataset(str(text_data)).val
    lines = describe_change(original, model, {"text": split}, (24, 96), 4096, torch.float32)
    for length, line in zip((24, 96), lines, strict=False):
        losses = []
        for one in (original, model):
            loss_sum, n_scored = loss_by_position(one, split, length, 4096)
            losses.append(float(loss_sum.sum() / n_scored.sum()))
        found = [float(number) for number in re.findall(r"-?\d+\.\d{3,}", line)]
        assert found[:3] == pytest.approx([*losses, losses[1] - losses[0]], abs=1e-3)
        assert line.startswith(f"loss at {length} tokens, text: ")


def test_a_scheme_that_ends_at_its_context_is_not_compared_beyond_it(make, text_data):
    original = make(vocab_size=257, block_size=24, pos="learned")
    model = copy.deepcopy(original)
    model.extend("pi", 2.0)
    split = data.open_dataset(str(text_data)).val
    lines = describe_change(original, model, {"text": split}, (24, 48), 4096, torch.float32)
    assert "a change of" in lines[0]
    assert lines[1].startswith("loss at 48 tokens, text: not compared (")


def test_without_text_it_says_how_to_measure_the_change(save_run, call, tmp_path):
    words = ["--max_iters=0", "--method=pi", "--device=cpu", f"--out_dir={tmp_path / 'a'}"]
    done = assert_success(call("extend.py", save_run("parent"), *words))
    assert "was not measured: give --text=FILE" in done.stdout


def test_a_parent_that_is_gone_does_not_fail_a_finished_run(save_run, call, tmp_path, text_data):
    """It is moved between two commands, and the run resumed under its new name."""
    folder = save_run("parent")
    words = ["--method=pi", "--max_iters=2", "--learning_rate=1e-3", "--eval_iters=1"]
    words += [f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}", "--device=cpu"]
    assert_success(call("extend.py", folder, *words, "--stop_at=1"))
    moved = tmp_path / "elsewhere" / folder.name
    moved.parent.mkdir()
    folder.rename(moved)
    done = call("extend.py", moved, *words, "--init_from=resume", "--stop_at=0")
    assert_success(done)
    assert "what extending has changed was not measured" in done.stdout
