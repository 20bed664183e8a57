"""The window schedule of training: --window_schedule."""

import pytest
import torch
from conftest import TINY, assert_refused, assert_same_bits, assert_success, logged, newest

import rope_scaling
import train
from model import GPT
from nanolong import run, validate
from nanolong.losses import loss_by_position
from nanolong.run.windows import allow_compilations, window_at


def settings(**changes):
    defaults = {"max_iters": 100, "window_schedule": "4:24"}
    return train.TrainConfig(**{**defaults, **changes})


@pytest.mark.parametrize("changes, steps, last", [(8, 0, 60), (5, 33, 33), (1, 50, 50)])
def test_the_window_grows_in_equal_stages(changes, steps, last):
    """From START, by the same number of tokens after equal times, to END at the last change."""
    cfg = settings(window_changes=changes, window_steps=steps)
    for step in range(120):
        stage = min(changes, int(step / (last / changes) + 1e-9))
        assert window_at(cfg, step) == 4 + int(20 * stage / changes + 1e-9), step
    assert window_at(cfg, last - 1) < window_at(cfg, last) == 24


@pytest.mark.parametrize(
    "model, schedule, windows",
    [
        ({}, "4:24", [4, 4]),
        ({"layer_pattern": "WF", "window": 10}, "4:24", [4, 4]),
        ({"layer_pattern": "WF", "window": 3}, "4:24", [3, 4]),
        ({"layer_pattern": "WF", "window": 10}, "4:10", [4, 0]),
        ({"layer_pattern": "SN", "window": 10, "sinks": 2}, "4:10", [4, 0]),
    ],
    ids=str,
)
@torch.no_grad()
def test_layers_see_the_window_of_the_step(make, model, schedule, windows):
    """As a model whose layers have these windows; the final ones are those of the model."""
    model = make(**model)
    before = [block.attention.window for block in model.blocks]
    tokens = torch.randint(0, 50, (2, 24))
    whole = model(tokens)
    cfg = settings(window_schedule=schedule)
    run.set_window(model, cfg, 0)
    assert [block.attention.window for block in model.blocks] == windows
    # a change of what lies outside all windows together changes nothing in the last token
    seen = sum((window or 24) - 1 for window in windows) + 1
    limited = model(tokens)[:, -1]
    assert not torch.allclose(limited, whole[:, -1])
    if seen < 24 and not model.config.sinks:
        changed = tokens.clone()
        changed[:, : 24 - seen] = 49 - changed[:, : 24 - seen]
        torch.testing.assert_close(model(changed)[:, -1], limited)
    run.set_window(model, cfg)
    assert [block.attention.window for block in model.blocks] == before
    assert torch.equal(model(tokens), whole)


def test_operations_are_counted_in_the_window(make):
    model = make()
    full = model.flops_per_token(24)
    run.set_window(model, settings(), 0)
    assert full - model.flops_per_token(24) == 12 * 2 * 4 * 8 * (24 - 4)  # layers, heads, channels


WORDS = ["train.py", *TINY, "--window_schedule=4:32", "--window_steps=6", "--window_changes=3"]


@pytest.mark.slow
@pytest.mark.parametrize("yarn", [[], ["--window_yarn=true"]], ids=["", "yarn"])
def test_a_resumed_schedule_has_the_same_bits(yarn, call, text_data, tmp_path):
    """It goes on between two changes; what is saved and validated has the final window."""
    words = [*WORDS, *yarn, f"--dataset={text_data}", "--eval_interval=3", "--eval_iters=0"]
    whole, part = tmp_path / "a", tmp_path / "b"
    done = call(*words, f"--out_dir={whole}")
    assert_success(done)
    assert "window: 4 to 32 tokens in 3 changes over 6 steps" in done.stdout
    assert ("rescaled by yarn" in done.stdout) == bool(yarn)
    assert_success(call(*words, f"--out_dir={part}", "--max_iters=8", "--stop_at=3"))
    assert newest(part).name == "step-000003"
    assert_success(call(*words, f"--out_dir={part}", "--init_from=resume", "--stop_at=0"))
    assert_same_bits(whole, part)

    model = GPT.load(whole)
    assert [block.attention.window for block in model.blocks] == [0] * model.config.n_layer
    dataset = train.data.open_dataset(str(text_data))
    loss_sum, n_scored = loss_by_position(model, dataset.val, 32, 10**9)
    expected = float(loss_sum.sum() / n_scored.sum())
    assert logged(whole, "window") == [4, 4, 13, 13, 22, 22, 32, 32]
    assert logged(whole, "val_loss")[-1] == pytest.approx(expected, abs=1e-5)
    extension = {"method": "yarn", "factor": 8.0, "options": {}, "original_length": 4}
    assert model.config.extension == (extension if yarn else None)


def test_yarn_rescales_rope_at_each_change(make):
    """By window / START on an original length of START; in the end as the checkpoint says."""
    cfg = settings(window_yarn=True, window_changes=4)
    config = make().config
    run.prepare_schedule(config, cfg)
    model = GPT(config)
    final = model.pos.inv_freq
    for step in (0, 15, 50, 70):
        run.set_window(model, cfg, step)
        expected, factor = rope_scaling.yarn(10000.0, 8, 4, window_at(cfg, step) / 4)
        torch.testing.assert_close(model.pos.inv_freq, expected)
        assert model.pos.attention_factor == pytest.approx(factor)
    assert torch.equal(model.pos.inv_freq, final)


@pytest.mark.slow
def test_the_model_is_compiled_once_for_each_window(make):
    cfg = settings(window_changes=10, max_iters=100, window_steps=50)
    model = make().train()
    allow_compilations(model, cfg)
    compiled = []
    torch._dynamo.reset()

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    forward = torch.compile(model, backend=count)
    tokens = torch.randint(0, 50, (2, 24))
    for step in range(60):
        run.set_window(model, cfg, step)
        forward(tokens, tokens)
        with torch.no_grad():  # validation does not compile the last window again
            run.set_window(model, cfg)
            model(tokens)
    assert len(compiled) == 11


@pytest.mark.parametrize(
    "words, phrase",
    [
        (["--window_schedule=4"], "give START:END"),
        (["--window_schedule=0:16"], "give START:END"),
        (["--window_schedule=16:4"], "give START:END"),
        (["--window_schedule=4:12"], "end at 32"),
        (["--window_schedule=4:12", "--window=8"], "end at 8 or 32"),
        (["--window_schedule=4:32", "--window_steps=9"], "window_steps=9 is beyond the last step"),
        (["--window_schedule=4:32", "--window_changes=0"], "window_changes"),
        (["--window_steps=4"], "--window_schedule=START:END"),
        (["--window_yarn=true"], "--window_schedule=START:END"),
        (["--window_schedule=4:32", "--window_yarn=true", "--pos=alibi"], "not pos=alibi"),
        (["--window_schedule=4:32", "--random_positions=64"], "random_positions=64"),
    ],
    ids=str,
)
def test_impossible_schedules_are_refused(words, phrase, call, text_data, tmp_path):
    done = call("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'a'}", *words)
    assert_refused(done, phrase)
    assert not (tmp_path / "a").exists()


def test_yarn_with_the_window_is_refused_for_an_extended_model(save_run, call, text_data, tmp_path):
    folder = save_run("parent")
    words = ["extend.py", folder, "--max_iters=4", f"--dataset={text_data}"]
    words += ["--learning_rate=1e-3", f"--out_dir={tmp_path / 'b'}"]
    words += ["--window_schedule=4:96", "--window_yarn=true", "--device=cpu"]
    assert_refused(call(*words), "window_yarn=true")
    assert validate.read_window_schedule("4:96") == (4, 96)
