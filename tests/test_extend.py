"""What extend.py does apart from training: extending alone, reports, stages, resuming.

The methods are tested in test_rope_scaling.py, the path from training to sampling in
test_scripts.py, what is refused in test_refusals.py.
"""

import math
import re
import shutil
from unittest import mock

import pytest
import torch
from conftest import (
    ROOT,
    SMALLEST,
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    logged,
    newest,
)
from test_loss import losses_of

import data
import extend
import train
from model import GPT, GPTConfig
from nanolong.run import list_steps, read_meta

SETTINGS = {**SMALLEST, "batch_size": 4, "max_iters": 2, "eval_iters": 1}
TEXT = (ROOT / "LICENSE").read_bytes()


@pytest.fixture(scope="module")
def trained(text_data, tmp_path_factory):
    """The run folder of a tiny RoPE model of 32 tokens, trained for two steps."""
    out = tmp_path_factory.mktemp("trained") / "rope"
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))
    train.train(model, train.TrainConfig(dataset=str(text_data), out_dir=str(out), **SETTINGS))
    return out


@pytest.fixture
def extend_run(call, tmp_path):
    """A function that runs extend.py; by default it writes the folder extended of tmp_path."""

    def extend_run(run, *words):
        words = [f"--out_dir={tmp_path}/extended", "--device=cpu", "--max_tokens=512", *words]
        return call("extend.py", run, *words)

    return extend_run


# -----------------------------------------------------------------------------
# Extending alone.


def test_extending_alone_opens_no_dataset(trained, extend_run, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "open_dataset", None)
    done = assert_success(extend_run(trained, "--max_iters=0"))
    assert "context length: 32 -> 128 tokens (yarn)" in done.stdout
    assert "loss at" not in done.stdout
    model, parent = GPT.load(tmp_path / "extended"), GPT.load(trained)
    assert model.folder.name == "step-000000"
    assert model.config.block_size == 128
    expected = {"method": "yarn", "factor": 4.0, "options": {}, "original_length": 32}
    assert model.config.extension == expected
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, parent.state_dict()[name])
    for name in ("bos", "tokenizer", "dataset", "data_hash"):
        assert model.meta[name] == parent.meta[name] is not None
    assert model.meta["parent"] == str(parent.folder)
    assert model.meta["train"]["method"] == "yarn"
    assert model.meta["pretraining_tokens"] == parent.meta["tokens"] == 2 * 4 * 32


def test_an_imported_model_is_extended_alone_and_then_fine_tuned(
    save_run, extend_run, text_data, tmp_path
):
    """It has neither data nor a learning rate."""
    run = save_run(n_layer=1)
    needed = ("no record", "give --dataset and --learning_rate, or --max_iters=0")
    assert_refused(extend_run(run), *needed)
    assert_refused(extend_run(run, "--learning_rate=1e-3"), "give --dataset, or --max_iters=0")
    words = [f"--dataset={text_data}", "--min_lr=0"]
    assert_refused(extend_run(run, *words), "give --learning_rate, or --max_iters=0")
    assert_success(extend_run(run, "--factor=2", "--max_iters=0"))
    assert_refused(extend_run(tmp_path / "extended", f"--out_dir={tmp_path}/again"), *needed)
    words = ["--factor=2", "--init_from=resume", "--max_iters=1"]
    assert_refused(extend_run(run, *words), *needed)
    words += [f"--dataset={text_data}", "--learning_rate=1e-3", "--eval_iters=1"]
    done = assert_success(extend_run(run, *words, "--dtype=float32"))
    _, header, *rows = done.stdout.rpartition("loss in nats")[2].splitlines()
    assert (
        header.split() == ["original", "extended", "fine-tuned"] and len(rows) == 4
    )  # at two lengths
    meta = read_meta(newest(tmp_path / "extended"))
    assert (meta["step"], meta["tokens"]) == (1, 48)


def test_an_extension_is_named_after_its_run_method_and_factor(save_run, call):
    run = save_run()
    for words, name in (([], "yarn4"), (["--method=pi", "--factor=2.5"], "pi2.5")):
        assert_success(call("extend.py", run, "--max_iters=0", *words))
        assert list_steps(f"{run}-{name}-zero")
    assert_refused(call("extend.py", run, "--max_iters=0"), "yarn4-zero", "--init_from=resume")
    again = [f"{run}-yarn4-zero", "--factor=2", "--max_iters=0"]
    assert_refused(call("extend.py", *again, "--method=ntk"), "give --method=yarn, abf or")
    done = assert_success(call("extend.py", *again, "--method=yarn"))
    assert "context length: 96 -> 192 tokens, originally 24 (yarn)\n" in done.stdout
    assert list_steps(f"{run}-yarn8-zero") and "by default" not in done.stdout
    before = {"method": "yarn", "factor": 4.0}
    for parent, given, name in (
        ("rope", {"lora": 8}, "rope-yarn2-lora8"),
        ("rope", {"max_iters": 60, "options": "beta_fast=16"}, "rope-yarn2-beta_fast=16"),
        ("rope-yarn4-lora16", {}, "rope-yarn8"),
        ("rope-yarn4", {"max_iters": 0}, "rope-yarn8-zero"),
        ("rope-yarn40", {}, "rope-yarn40-yarn2"),
    ):
        asked = {"method": "yarn", "factor": 2.0, **given}
        assert extend.default_out_dir(parent, asked, before) == name


@pytest.mark.parametrize("pos, method", [("shaw", "pi"), ("fox", "none"), ("fox-rope", "yarn")])
def test_the_default_method_is_one_that_the_scheme_has(pos, method, save_run, call):
    run = save_run(pos=pos)
    done = call("sample.py", run, "--max_new_tokens=40", "--start=ab", "--device=cpu")
    advice = f"; to extend it: python extend.py {run} --factor=2"
    assert assert_success(done).stderr.endswith(f"{advice}\n")
    done = assert_success(call("extend.py", run, "--factor=2", "--max_iters=0"))
    others = [name for name in GPT.load(run).scheme.methods if name != method]
    also = ", ".join(others) or "no other"
    assert f"\n--method={method} by default; {pos} also has {also}\n" in done.stdout
    assert GPT.load(f"{run}-{method}2-zero").config.extension["method"] == method


@pytest.mark.parametrize(
    "words, settings, is_said",
    [
        ("--method=yarn", {}, True),
        ("--method=none", {}, False),
        ("--method=yarn", {"layer_pattern": "WF"}, False),
        ("--method=yarn", {"window": 25}, False),
        ("--method=yarn", {"sinks": 2}, False),
    ],
)
def test_extending_rope_whose_distances_stay_is_said(words, settings, is_said, save_run, call):
    """Within a window of at most the original 24 tokens; sinks are farther away."""
    run = save_run(**{"layer_pattern": "WN", "window": 8, **settings})
    done = assert_success(call("extend.py", run, "--factor=2", "--max_iters=0", words))
    assert ("layers with a window of 8 tokens only" in done.stderr) == is_said


# -----------------------------------------------------------------------------
# Reports.


def losses_of_sequences(model, tokens, length):
    """The losses (N, length) of sequences with <bos> first, cut from the start of a text."""
    targets = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)
    inputs = torch.cat((torch.full((len(targets), 1), 256), targets[:, :-1]), 1)
    return torch.stack([losses_of(model, x, y) for x, y in zip(inputs, targets, strict=True)])


def test_the_report_compares_with_the_parent_on_a_text(trained, extend_run, monkeypatch, tmp_path):
    """Two sequences of the extended length, eight of the original; half the width by Student."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT[:256])
    monkeypatch.setattr(data, "open_dataset", None)
    done = assert_success(extend_run(trained, "--max_iters=0", f"--text={text}"))
    parent, model = GPT.load(trained), GPT.load(tmp_path / "extended")
    quantiles = {32: 2.365, 128: 12.706}  # of 7 and 1 degrees of freedom
    for length in (32, 128):
        old, new = (losses_of_sequences(m, list(TEXT[:256]), length) for m in (parent, model))
        rows = [row for row in done.stdout.splitlines() if f" {length} tokens, " in row]
        n_sequences = "8 sequences  " if length == 32 else "2 sequences: noisy "
        assert n_sequences in rows[0] and "last quarter" in rows[1]
        for part, first in zip(rows, (0, length * 3 // 4), strict=True):
            before, after = old[:, first:], new[:, first:]
            assert re.search(f"{before.mean():.4f} +{after.mean():.4f} \\(", part)
            changes = (after - before).mean(1)
            if length == 32:
                half_width = quantiles[length] * changes.std() / math.sqrt(len(changes))
                assert f"({changes.mean():+.3f} ± {half_width:.3f})" in part


# -----------------------------------------------------------------------------
# PoSE, and the tokens of a step.


def test_pose_trains_on_windows_with_positions_in_the_extended_length(
    trained, extend_run, tmp_path, monkeypatch
):
    batches = []
    real = data.Dataset.batch

    def batch(*args):
        batches.append(real(*args))
        return batches[-1]

    monkeypatch.setattr(data.Dataset, "batch", batch)
    words = ["--pose=true", "--train_length=7", "--batch_size=40", "--max_iters=1"]
    words += ["--gradient_accumulation_steps=3", "--eval_iters=1", "--eval_length=96"]
    done = assert_success(extend_run(trained, *words))
    assert "sequences of 96 tokens" in done.stdout
    assert read_meta(newest(tmp_path / "extended"))["tokens"] == 3 * 40 * 7
    x, _, positions, _ = batches[0]
    assert x.shape == positions.shape == (40, 7)
    assert 32 < positions.max() < 128


@pytest.mark.parametrize("words, is_apart", [([], True), (["--separate_docs=false"], False)])
def test_fine_tuning_keeps_documents_apart_by_default(
    words, is_apart, trained, extend_run, monkeypatch
):
    seen = []
    real = GPT.forward

    def forward(model, *args, **settings):
        if model.training:
            seen.append(settings["docs"] is not None)
        return real(model, *args, **settings)

    monkeypatch.setattr(GPT, "forward", forward)
    assert_success(extend_run(trained, "--factor=2", "--max_iters=1", "--eval_iters=1", *words))
    assert set(seen) == {is_apart}


def test_settings_that_are_inherited(trained):
    """4 sequences of 32 tokens become 1 of 128, or 16 of 8; extended again, 1 of 64.

    A micro-batch of two sequences becomes one of four times the length, in half as many.
    """
    meta = read_meta(newest(trained))
    trained_settings = dict(meta["train"])

    def sizes(**given):
        saved = extend.inherited_settings(meta, asked | given)
        rate = saved["learning_rate"] / trained_settings["learning_rate"]
        return saved["batch_size"], saved["gradient_accumulation_steps"], pytest.approx(rate)

    asked = {"method": "yarn", "factor": 4.0}
    given = {"pose": True, "train_length": 8}
    assert sizes() == (1, 1, 0.3)
    assert sizes(**given) == (16, 1, 0.3)
    assert sizes(method="drope") == (4, 1, 0.3)  # at the original length
    first = extend.inherited_settings(meta, asked | given)
    meta["train"] |= {**first, **given, "method": "yarn"}
    assert sizes(factor=2) == (2, 1, 0.3)
    meta["train"] = {**trained_settings, "batch_size": 2, "gradient_accumulation_steps": 4}
    meta["train"]["eval_iters"] = 64
    assert sizes() == (1, 2, 0.3)
    assert extend.inherited_settings(meta, asked)["eval_iters"] == 16


# -----------------------------------------------------------------------------
# The factor on the scores.


def test_the_fitted_scale_has_the_lowest_loss_of_all_candidates(save_run, extend_run, tmp_path):
    """Each candidate as if the model had that attn_scale."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT[:960])
    run = save_run(pos="nope")
    words = [run, "--method=scale", "--factor=1", "--max_iters=0", "--max_tokens=960"]
    assert_refused(extend_run(*words), "give --text, --dataset or a scale")
    done = assert_success(extend_run(*words, f"--text={text}"))
    fitted = GPT.load(tmp_path / "extended").config.extension["options"]["scale"]
    losses = {}
    for eighth in range(-4, 13):
        scale = 2 ** (eighth / 8)
        candidate = GPT(GPTConfig(**{**vars(GPT.load(run).config), "attn_scale": scale}))
        candidate.load_state_dict(GPT.load(run).state_dict())
        found = losses_of_sequences(candidate, list(TEXT[:960]), 24)
        losses[scale] = float(found[:, 18:].mean())
    assert fitted == min(losses, key=losses.get)
    assert f"{losses[fitted]:.4f} nats" in done.stdout
    assert_success(extend_run(*words, "--options=scale=1.5", f"--out_dir={tmp_path}/given"))
    assert GPT.load(tmp_path / "given").config.extension["options"] == {"scale": 1.5}


# -----------------------------------------------------------------------------
# Stages of one run, and the length that is trained at.


def train_stages(call, dataset, tmp_path, *words):
    """A run of 8 steps, and the same one that ends after 4; returns their folders."""
    whole, first = tmp_path / "whole", tmp_path / "first"
    words = ["train.py", *TINY, f"--dataset={dataset}", *words]
    assert_success(call(*words, f"--out_dir={whole}"))
    done = assert_success(call(*words, "--stop_at=4", f"--out_dir={first}"))
    assert "step 4 of 8: go on with --init_from=resume" in done.stdout
    assert newest(first).name == "step-000004"
    return whole, first


def assert_same_tensors(run, other):
    """Weights and moments of the newest checkpoints are the same files."""
    for file in ("model.safetensors", "optim.safetensors"):
        assert (newest(run) / file).read_bytes() == (newest(other) / file).read_bytes()


@pytest.mark.parametrize(
    "method, settings",
    [
        ("none", ["--dropout=0.2"]),
        pytest.param("yarn", ["--optimizer=muon", "--dtype=float16"], marks=pytest.mark.slow),
    ],
)
def test_stages_of_one_length_are_one_run(method, settings, call, text_data, tmp_path):
    """Weights, moments and log are the same to the bit; of the best loss only its own is known."""
    settings = ["--weight_decay=0.2", "--lr_schedule=cosine", "--seed=5", *settings]
    whole, first = train_stages(call, text_data, tmp_path, *settings)
    second = tmp_path / "second"
    words = [first, f"--method={method}", "--factor=1", "--keep_optimizer=true", "--device=cpu"]
    assert_success(call("extend.py", *words, f"--out_dir={second}"))
    log = [{**row, "tokens_per_second": 0} for row in logged(first) + logged(second)]
    # the evaluation of step 4 is made twice
    assert log.pop(log.index({**logged(second)[0], "tokens_per_second": 0})) in log
    assert log == [{**row, "tokens_per_second": 0} for row in logged(whole)]
    assert_same_tensors(second, whole)
    meta, expected = read_meta(newest(second)), read_meta(newest(whole))
    for name in ("step", "tokens", "loss_scale", "bos", "tokenizer", "data_hash"):
        assert meta[name] == expected[name]

    # A stage that is interrupted goes on as any run does.
    shutil.rmtree(newest(second))
    assert_success(call("extend.py", *words, f"--out_dir={second}", "--init_from=resume"))
    assert_same_tensors(second, whole)


def test_a_run_that_ended_early_is_resumed_to_the_same_bits(call, text_data, tmp_path):
    whole, first = train_stages(call, text_data, tmp_path)
    resume = ["train.py", f"--out_dir={first}", "--init_from=resume"]
    done = assert_success(call(*resume, "--stop_at=4"))
    assert "is finished: to train on, raise --stop_at or leave it out" in done.stdout
    assert_success(call(*resume))
    assert_same_bits(whole, first)


def test_a_stage_keeps_the_schedule_and_changes_the_length(call, text_data, tmp_path):
    """Steps, tokens and learning rates go on; sequences are longer, and as many tokens a step."""
    whole, first = train_stages(call, text_data, tmp_path)
    second, third = tmp_path / "second", tmp_path / "third"
    keep = ["--keep_optimizer=true", "--max_tokens=512", "--device=cpu"]
    words = [*keep, "--factor=4", "--train_length=64", "--stop_at=6", f"--out_dir={second}"]
    assert_success(call("extend.py", first, *words))
    assert_success(call("extend.py", second, *keep, "--factor=1", f"--out_dir={third}"))
    meta = [read_meta(newest(run)) for run in (second, third)]
    sizes = [(m["step"], m["tokens"], m["train"]["batch_size"]) for m in meta]
    assert sizes == [(6, 6 * 128, 2), (8, 8 * 128, 1)]
    assert [m["config"]["block_size"] for m in meta] == [128, 128]
    rates = [row for run in (first, second, third) for row in logged(run, "lr")]
    assert rates == logged(whole, "lr")
    assert meta[0]["train"]["train_length"] == 64


def test_an_optimizer_that_cannot_be_kept_is_refused(
    call, extend_run, save_run, text_data, tmp_path
):
    """There is none, or weights have other shapes now."""
    words = [f"--dataset={text_data}", "--learning_rate=1e-3", "--keep_optimizer=true"]
    assert_refused(extend_run(save_run(), *words, "--max_iters=4"), "no optimizer's state to keep")
    _, first = train_stages(call, text_data, tmp_path, "--pos=learned")
    done = extend_run(first, "--keep_optimizer=true", "--method=pi", "--factor=2")
    assert_refused(done, "changes the shape of a weight", "leave --keep_optimizer out")
    assert not list_steps(tmp_path / "extended")


# -----------------------------------------------------------------------------
# Resuming.


def test_resuming_with_another_extension_is_refused(trained, extend_run, tmp_path):
    """The factor is that of the last extension; a run that was made from another has its own."""
    by2 = tmp_path / "by2"
    assert_success(extend_run(trained, "--factor=2", "--max_iters=0", f"--out_dir={by2}"))
    assert_success(extend_run(by2, "--factor=4", "--max_iters=0"))
    files = sorted(newest(tmp_path / "extended").iterdir())
    resume = ["--init_from=resume", "--max_iters=1"]
    for words, message in (
        (["--method=pi"], "was made with method=yarn, not pi"),
        (["--factor=2"], "was made with factor=4.0, not 2.0"),
        (["--options=beta_fast=16"], "was made with options=, not beta_fast=16"),
    ):
        assert_refused(extend_run(by2, *resume, *words), message)
    assert_refused(extend_run(trained, *resume), "was made from by2, not rope")
    assert sorted(newest(tmp_path / "extended").iterdir()) == files
    assert_success(extend_run(by2, *resume))
    assert GPT.load(tmp_path / "extended").config.block_size == 256


def test_a_scale_is_fitted_on_training_sequences(save_run, extend_run, text_data, monkeypatch):
    real = extend.loss.loss_by_position
    spy = mock.Mock(side_effect=real)
    monkeypatch.setattr(extend.loss, "loss_by_position", spy)
    monkeypatch.setattr(extend, "report", lambda *args: None)
    words = ["--method=scale", "--factor=1", "--max_iters=0", f"--dataset={text_data}"]
    assert_success(extend_run(save_run(pos="nope"), *words))
    assert {call.args[1].files[0].name for call in spy.call_args_list} == {"train.bin"}
