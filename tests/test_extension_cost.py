"""What extend.py prints of an extension's effect: the loss before and after, and drift."""

import copy
import re

import pytest
import torch
from conftest import assert_success

import data
from nanolong.extension_cost import describe_change, layer_cosines
from nanolong.losses import loss_by_position


@torch.no_grad()
def states_after_blocks(model, tokens):
    """The hidden states after each block, computed block by block."""
    x = model.pos.embed(model.embed(tokens), torch.arange(tokens.shape[1]))
    states = []
    for layer, block in enumerate(model.blocks):
        x = block(x, model.scheme_of(layer), torch.arange(tokens.shape[1]), None, {})
        states.append(x)
    return states


@pytest.mark.parametrize("pos, method", [("rope", "yarn"), ("learned", "pi"), ("alibi", "pi")])
def test_the_drift_is_the_cosine_of_the_hidden_states(make, pos, method):
    original = make(pos=pos, n_layer=3)
    tokens = torch.randint(0, 50, (1, 24))
    assert layer_cosines(original, original, tokens) == pytest.approx([1, 1, 1], abs=1e-6)
    model = copy.deepcopy(original)
    model.extend(method, 4.0)
    expected = []
    pairs = zip(
        states_after_blocks(original, tokens), states_after_blocks(model, tokens), strict=True
    )
    for a, b in pairs:
        a, b = a[0].double(), b[0].double()
        cosines = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
        expected.append(cosines.mean().item())
    assert expected[-1] < 0.99999
    assert layer_cosines(original, model, tokens) == pytest.approx(expected, abs=1e-5)


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
    assert lines[2].startswith("drift of hidden states on 24 tokens of text")


def test_a_scheme_that_ends_at_its_context_is_not_compared_beyond_it(make, text_data):
    original = make(vocab_size=257, block_size=24, pos="learned")
    model = copy.deepcopy(original)
    model.extend("pi", 2.0)
    split = data.open_dataset(str(text_data)).val
    lines = describe_change(original, model, {"text": split}, (24, 48), 4096, torch.float32)
    assert "a change of" in lines[0]
    assert lines[1].startswith("loss at 48 tokens, text: not compared (")


def test_without_text_the_drift_is_that_on_random_tokens(save_run, call, tmp_path, text_data):
    folder = save_run("parent")
    words = ["extend.py", folder, "--max_iters=0", "--method=pi", "--device=cpu"]
    done = call(*words, f"--out_dir={tmp_path / 'a'}")
    assert_success(done)
    assert "was not measured: give --text=FILE" in done.stdout
    assert re.search(r"random tokens, cosine by layer: 0\.\d{3}", done.stdout)
    again = call(*words, f"--out_dir={tmp_path / 'b'}")
    assert again.stdout.splitlines()[-1] == done.stdout.splitlines()[-1]


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
