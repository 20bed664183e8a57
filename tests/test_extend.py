"""What extend.py does apart from training: extending alone, reports, resuming, refusals.

The methods are tested in test_rope_scaling.py, the path from training to sampling in
test_scripts.py.
"""

import json
import math
import shlex
import shutil
import subprocess

import numpy as np
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

import data
import extend
import rope_scaling
import train
from model import GPT, GPTConfig
from nanolong import scoring
from nanolong.errors import UserError
from nanolong.evaluation.loss import loss_by_position
from nanolong.extension import inherited_settings, read_options
from nanolong.run import list_steps, read_meta

SETTINGS = {**SMALLEST, "batch_size": 4, "max_iters": 2, "eval_iters": 1}
# the heading of a table of losses
REPORT = "last-quarter (the last quarter of each sequence), nats per token"
TEXT = (ROOT / "LICENSE").read_bytes()


def train_run(dataset, out):
    """Train a tiny RoPE model of 32 tokens for two steps; returns its run folder."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=32))
    train.train(model, train.TrainConfig(dataset=str(dataset), out_dir=str(out), **SETTINGS))
    return out


@pytest.fixture(scope="module")
def trained(text_data, tmp_path_factory):
    return train_run(text_data, tmp_path_factory.mktemp("trained") / "rope")


@pytest.fixture
def extend_run(call, tmp_path):
    """A function that runs extend.py; by default it writes the folder extended of tmp_path."""

    def extend_run(run, *words):
        return call("extend.py", run, f"--out_dir={tmp_path}/extended", "--device=cpu", *words)

    return extend_run


# -----------------------------------------------------------------------------
# Extending alone.


@pytest.fixture
def no_data(monkeypatch):
    """Fail where a dataset is opened."""

    def opened(*args):
        raise AssertionError("a dataset was opened")

    monkeypatch.setattr(data, "open_dataset", opened)
    monkeypatch.setattr(scoring, "Dataset", opened)


def test_extending_alone_opens_no_dataset(trained, extend_run, no_data, tmp_path):
    done = assert_success(extend_run(trained, "--max_iters=0"))
    assert "context length: 32 -> 128 tokens (yarn)" in done.stdout
    assert REPORT not in done.stdout
    model = GPT.load(tmp_path / "extended")
    assert model.folder.name == "step-000000"
    assert model.config.block_size == 128
    assert model.config.extension == {
        "method": "yarn",
        "factor": 4.0,
        "options": {},
        "original_length": 32,
    }
    parent = GPT.load(trained)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, parent.state_dict()[name])
    for name in ("bos", "tokenizer", "dataset", "data_hash"):
        assert model.meta[name] == parent.meta[name] is not None
    assert model.meta["parent"] == str(parent.folder)
    assert model.meta["train"]["method"] == "yarn"
    assert model.meta["pretraining_tokens"] == parent.meta["tokens"] == 2 * 4 * 32


def test_extending_alone_needs_no_record_of_training(save_run, extend_run, no_data, tmp_path):
    """Such as an imported checkpoint, which has neither data nor a learning rate."""
    run = save_run()
    assert_refused(extend_run(run), "no record", "--dataset", "--learning_rate", "--max_iters=0")
    assert_success(extend_run(run, "--max_iters=0"))
    assert read_meta(newest(tmp_path / "extended"))["train"] == {}


def test_an_extension_is_named_after_its_run_method_and_factor(save_run, call):
    run = save_run()
    for words, name in (([], "yarn4"), (["--method=pi", "--factor=2.5"], "pi2.5")):
        assert_success(call("extend.py", run, "--max_iters=0", *words))
        assert list_steps(f"{run}-{name}")
    assert_refused(call("extend.py", run, "--max_iters=0"), "yarn4", "--init_from=resume")
    again = [f"{run}-yarn4", "--method=ntk", "--factor=2", "--max_iters=0"]
    done = assert_success(call("extend.py", *again))
    assert "context length: 96 -> 192 tokens, originally 24 (ntk)" in done.stdout
    assert list_steps(f"{run}-ntk8")


def test_the_command_to_go_on_with_can_be_pasted(save_run, call, tmp_path):
    out = tmp_path / "my run"
    done = assert_success(call("extend.py", save_run(), "--max_iters=0", f"--out_dir={out}"))
    assert f"use it with python sample.py '{out}'\n" in done.stdout


# -----------------------------------------------------------------------------
# Reports.


def mean_loss_of_the_last_quarter(model, tokens, length):
    """Over sequences of this length with <bos> first, cut from the start of a text."""
    losses = []
    for start in range(0, len(tokens) - length + 1, length):
        targets = torch.tensor(tokens[start : start + length])
        inputs = torch.cat((torch.tensor([256]), targets[:-1]))
        log_p = model(inputs[None])[0].log_softmax(-1)
        losses += [-log_p[i, targets[i]].item() for i in range(length * 3 // 4, length)]
    return sum(losses) / len(losses)


@torch.no_grad()
def test_a_text_turns_the_report_on(trained, extend_run, no_data, tmp_path, monkeypatch):
    """Of the model extended, on this text, at the original and at the extended length."""
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT[:256])  # two sequences of the extended length
    tables = []

    def format_loss_table(records, lengths):
        tables.append(records)
        return "THE TABLE"

    monkeypatch.setattr(extend.plots, "format_loss_table", format_loss_table)
    done = assert_success(extend_run(trained, "--max_iters=0", f"--text={text}"))
    assert done.stdout.count("THE TABLE") == 1
    (records,) = tables
    last_quarter = {r["length"]: r for r in records if r["protocol"] == "last-quarter"}
    assert last_quarter.keys() == {32, 128}
    model = GPT.load(tmp_path / "extended")
    for length, record in last_quarter.items():
        assert record["checkpoint"] == "extended"
        assert record["tokens"] == 256 // 4
        expected = mean_loss_of_the_last_quarter(model, list(TEXT[:256]), length)
        assert record["loss"] == pytest.approx(expected, rel=1e-5)


def test_fine_tuning_is_measured_on_the_text_before_and_after(trained, extend_run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    done = assert_success(extend_run(trained, "--max_iters=1", "--factor=2", f"--text={text}"))
    first, second = (done.stdout.split(REPORT)[i] for i in (1, 2))
    assert "before" in first and "after" in second
    assert "50.00%" in done.stdout  # one step of the two of pretraining


def test_texts_that_cannot_be_evaluated_are_refused(trained, extend_run, make, tmp_path):
    short = tmp_path / "short.txt"
    short.write_bytes(TEXT[:127])
    assert_refused(extend_run(trained, f"--text={short}"), "127 tokens", "128")
    assert_refused(extend_run(trained, f"--text={tmp_path}/gone.txt"), "gone.txt")
    make(vocab_size=257).save(tmp_path / "nameless" / "step-000001")
    done = extend_run(tmp_path / "nameless", "--max_iters=0", f"--text={short}")
    assert_refused(done, "tokenizer", "--dataset")
    assert not (tmp_path / "extended").exists()


def test_a_warning_says_when_no_document_is_long_enough(trained, extend_run, text_data, tmp_path):
    dataset = tmp_path / "short"
    shutil.copytree(text_data, dataset)
    tokens = data.Dataset(str(text_data)).train.tokens[0][:8000].copy()
    tokens[::100] = 256  # <bos>: documents of 99 bytes
    (dataset / "train.bin").unlink()
    data.write_tokens(dataset / "train.bin", tokens, 257)
    done = assert_success(extend_run(trained, "--max_iters=1", f"--dataset={dataset}"))
    assert "0% of the training tokens are in documents of at least 128 tokens" in done.stdout
    assert "warning: there is almost nothing that long" in done.stdout


# -----------------------------------------------------------------------------
# PoSE.


def test_pose_trains_on_windows_with_positions_in_the_extended_length(
    trained, extend_run, tmp_path, monkeypatch
):
    """The text and the positions skip together from one of two parts to the other."""
    batches = []
    real = data.Dataset.batch

    def batch(*args):
        batches.append(real(*args))
        return batches[-1]

    monkeypatch.setattr(data.Dataset, "batch", batch)
    words = ["--pose=true", "--pose_window=7", "--batch_size=40", "--max_iters=1"]
    words += ["--gradient_accumulation_steps=3", "--eval_iters=1", "--eval_length=96"]
    done = assert_success(extend_run(trained, *words))
    assert "fine-tuning on 840 tokens" in done.stdout
    assert "sequences of 96 tokens" in done.stdout
    assert read_meta(newest(tmp_path / "extended"))["tokens"] == 3 * 40 * 7
    x, y, positions, _ = batches[0]
    assert x.shape == y.shape == positions.shape == (40, 7)
    assert (positions[:, 0] == 0).all()
    assert ((np.diff(positions) > 1).sum(1) <= 1).all()
    assert 32 < positions.max() < 128


def test_a_window_keeps_the_tokens_of_a_step(trained):
    """4 sequences of 32 tokens become 16 of 8, and, extended again without PoSE, 1 of 64."""
    meta = read_meta(newest(trained))
    given = {"pose": True, "pose_window": 8}
    first = inherited(meta, given)
    assert (first["batch_size"], first["gradient_accumulation_steps"]) == (16, 1)
    meta["train"] = {**meta["train"], **first, **given, "method": "yarn"}
    second = inherited(meta, {"factor": 2})
    assert (second["batch_size"], second["gradient_accumulation_steps"]) == (2, 1)
    assert not {"pose_window", "eval_length", "max_tokens"} & second.keys()


# -----------------------------------------------------------------------------
# The method scale.


def test_the_fitted_scale_has_the_lowest_loss_of_all_candidates(make, tmp_path, capsys):
    """Each candidate as if the model had that attn_scale."""
    data.write_tokens(tmp_path / "0.bin", np.random.default_rng(0).integers(0, 49, 2000), 50)
    split = data.Split([tmp_path / "0.bin"], 50, None)
    make(pos="nope").save(tmp_path / "run/step-000001")
    model = GPT.load(tmp_path / "run")
    cfg = extend.ExtendConfig(method="scale", factor=1.0, device="cpu")
    fitted = extend.fit_scale(model, cfg, {}, split)
    losses = {}
    for eighth in range(-4, 13):
        scale = 2 ** (eighth / 8)
        candidate = make(pos="nope", attn_scale=scale)
        loss_sum, n_scored = loss_by_position(candidate, split, 24)
        losses[scale] = float(loss_sum[18:].sum() / n_scored[18:].sum())
    assert fitted == min(losses, key=losses.get)
    assert f"{losses[fitted]:.4f} nats" in capsys.readouterr().out


def test_a_scale_is_given_or_fitted_on_text(save_run, extend_run, no_data, tmp_path):
    run = save_run(pos="nope")
    words = ["--method=scale", "--factor=2", "--max_iters=0"]
    done = extend_run(run, *words)
    assert_refused(done, "--options=scale=NUMBER", "--text=FILE", "--dataset=NAME")
    assert not (tmp_path / "extended").exists()

    given = tmp_path / "given"
    assert_success(extend_run(run, *words, "--options=scale=1.5", f"--out_dir={given}"))
    assert GPT.load(given).config.extension["options"] == {"scale": 1.5}

    text = tmp_path / "text.txt"
    text.write_bytes(TEXT)
    done = assert_success(extend_run(run, *words, f"--text={text}"))
    scale = GPT.load(tmp_path / "extended").config.extension["options"]["scale"]
    assert f"scale {scale:.3f}: the best of 17" in done.stdout
    assert math.log2(scale) * 8 == pytest.approx(round(math.log2(scale) * 8))


def test_a_dataset_named_on_the_command_line_fits_a_scale(save_run, extend_run, text_data):
    words = ["--method=scale", "--factor=2", "--max_iters=0", f"--dataset={text_data}"]
    run = save_run(pos="nope", n_layer=1, n_head=2, n_embd=16)
    done = assert_success(extend_run(run, *words))
    assert "the best of 17" in done.stdout and REPORT in done.stdout


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
    done = assert_success(call("extend.py", *words, f"--out_dir={second}"))
    assert "training goes on at step 4 of 8: 512 tokens to step 8" in done.stdout

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
    assert_refused(call(*resume, "--stop_at=9"), "stop_at=9", "at most 8")


def test_a_stage_keeps_the_schedule_and_changes_the_length(call, text_data, tmp_path):
    """Steps, tokens and learning rates go on; sequences are longer, and as many tokens a step."""
    whole, first = train_stages(call, text_data, tmp_path)
    second, third = tmp_path / "second", tmp_path / "third"
    keep = ["--keep_optimizer=true", "--device=cpu"]
    words = [*keep, "--factor=4", "--train_length=64", "--stop_at=6", f"--out_dir={second}"]
    done = assert_success(call("extend.py", first, *words))
    assert "in documents of at least 64 tokens" in done.stdout
    assert_success(call("extend.py", second, *keep, "--factor=1", f"--out_dir={third}"))
    meta = [read_meta(newest(run)) for run in (second, third)]
    sizes = [(m["step"], m["tokens"], m["train"]["batch_size"]) for m in meta]
    assert sizes == [(6, 6 * 128, 2), (8, 8 * 128, 1)]
    assert [m["config"]["block_size"] for m in meta] == [128, 128]
    rates = [row for run in (first, second, third) for row in logged(run, "lr")]
    assert rates == logged(whole, "lr")
    assert meta[0]["train"]["train_length"] == 64


KEEP = "--keep_optimizer=true"


def test_a_checkpoint_without_its_optimizer_is_refused(
    trained, extend_run, save_run, text_data, tmp_path
):
    keep = ["--keep_optimizer=true", "--max_iters=4"]
    assert_success(extend_run(trained, "--max_iters=0", f"--out_dir={tmp_path}/only"))
    assert_refused(extend_run(tmp_path / "only", *keep), "has no optimizer state to keep")
    words = [f"--dataset={text_data}", "--learning_rate=1e-3", *keep]
    assert_refused(extend_run(save_run(), *words), "has no optimizer state to keep")


def test_moments_of_another_shape_are_refused(call, extend_run, text_data, tmp_path):
    _, first = train_stages(call, text_data, tmp_path, "--pos=learned")
    done = extend_run(first, "--keep_optimizer=true", "--method=pi", "--factor=2")
    assert_refused(done, "changes the shapes of weights", "leave --keep_optimizer out")
    assert not (tmp_path / "extended").exists()


def test_the_table_and_the_training_have_lengths_of_their_own(trained, extend_run, tmp_path):
    """The table of 32 times the length, trained at twice the length, validated at all of it."""
    words = ["--factor=32", "--train_length=64", "--max_iters=2", "--max_tokens=2048"]
    done = assert_success(extend_run(trained, *words, "--eval_iters=1"))
    assert "sequences of 1,024 tokens" in done.stdout
    meta = read_meta(newest(tmp_path / "extended"))
    assert meta["config"]["block_size"] == 1024
    assert (meta["train"]["train_length"], meta["tokens"]) == (64, 2 * 128)  # 4 x 32 tokens a step
    model = GPT.load(tmp_path / "extended")
    inv_freq, _ = rope_scaling.yarn(10000.0, 8, 32, 32.0)
    torch.testing.assert_close(model.pos.inv_freq.double(), inv_freq)


def test_make_stages_trains_at_three_lengths(call, text_data, tmp_path):
    """The commands of the Makefile, on a tiny model of 8 tokens and 40 steps."""
    # this test may itself be run by make, which says then which folder it enters
    words = ["make", "--no-print-directory", "-n", "-o", ".venv/demo", "stages"]
    words += ["PY=python", f"STAGES={tmp_path}"]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = shlex.split(printed.replace("\\\n", " ").replace("\n", " ;\n"))
    tiny = ["--n_layer=1", "--n_embd=16", "--n_head=2", "--block_size=8", "--eval_iters=1"]
    stops = iter([["--max_iters=40", "--stop_at=36", *tiny], ["--stop_at=38"], []])
    while ";" in commands:
        end = commands.index(";")
        _, script, *words = commands[:end]
        commands = commands[end + 1 :]
        if script == "evaluate.py":
            words += ["--lengths=8,32,128"]
        else:
            words += [*next(stops), "--device=cpu", f"--dataset={text_data}"]
        assert_success(call(script, *words))
    steps = [newest(tmp_path / name).name for name in ("256", "1024", "4096")]
    assert steps == ["step-000036", "step-000038", "step-000040"]
    lengths = [GPT.load(tmp_path / name).config.block_size for name in ("256", "1024", "4096")]
    assert lengths == [8, 32, 128]


# -----------------------------------------------------------------------------
# Resuming.


@pytest.mark.parametrize("max_iters", [0, 3])
def test_a_resumed_extension_has_the_same_bits(max_iters, trained, extend_run, tmp_path):
    """As one that was not stopped: before the first step, or before its last checkpoint."""
    words = ["--method=pi", "--factor=2", "--eval_interval=2"]
    once, run = tmp_path / "once", tmp_path / "extended"
    assert_success(extend_run(trained, *words, "--max_iters=3", f"--out_dir={once}"))
    assert_success(extend_run(trained, *words, f"--max_iters={max_iters}"))
    if max_iters:
        shutil.rmtree(newest(run))
    resumed = [*words, "--init_from=resume", "--max_iters=3"]
    done = assert_success(extend_run(trained, *resumed))
    assert "fine-tuning on 384 tokens" in done.stdout  # 3 steps of 4 x 32
    assert newest(run).name == "step-000003"
    assert_same_bits(run, once)
    meta, expected = read_meta(newest(run)), read_meta(newest(once))
    for name in ("parent", "pretraining_tokens", "tokens"):
        assert meta[name] == expected[name]
    done = extend_run(run, "--method=yarn", "--max_iters=0", f"--out_dir={tmp_path}/again")
    assert "note: yarn replaces pi, for which the weights were tuned" in done.stdout


def test_an_imported_model_is_extended_alone_and_then_fine_tuned(
    save_run, extend_run, text_data, tmp_path
):
    run = save_run(n_layer=1)
    assert_success(extend_run(run, "--factor=2", "--max_iters=0"))
    words = ["--factor=2", "--init_from=resume", "--max_iters=1"]
    assert_refused(extend_run(run, *words), "--dataset and --learning_rate")
    words += [f"--dataset={text_data}", "--learning_rate=1e-3", "--eval_iters=1"]
    assert_success(extend_run(run, *words, "--dtype=float32"))
    meta = read_meta(newest(tmp_path / "extended"))
    assert (meta["step"], meta["tokens"]) == (1, 48)


def test_resuming_an_extension_without_more_steps_changes_nothing(trained, extend_run, tmp_path):
    assert_success(extend_run(trained, "--max_iters=0"))
    meta = newest(tmp_path / "extended") / "meta.json"
    before = meta.read_bytes(), meta.stat().st_mtime_ns
    assert_success(extend_run(trained, "--init_from=resume"))
    assert (meta.read_bytes(), meta.stat().st_mtime_ns) == before
    assert newest(tmp_path / "extended").name == "step-000000"


def test_resuming_a_fine_tuning_without_more_steps_changes_nothing(trained, extend_run, tmp_path):
    """A first checkpoint that has been pruned is not written again."""
    words = ["--factor=2", "--eval_interval=1"]
    assert_success(extend_run(trained, *words, "--max_iters=4"))
    before = list_steps(tmp_path / "extended")
    assert before[0].name != "step-000000"
    assert_success(extend_run(trained, *words, "--max_iters=0", "--init_from=resume"))
    assert list_steps(tmp_path / "extended") == before


@pytest.mark.parametrize(
    "words, message",
    [
        (["--method=pi"], "was made with method yarn, not pi"),
        (["--factor=4"], "was made with factor 2.0, not 4.0"),
        (["--options=beta_fast=16"], "was made with options none, not {'beta_fast': 16.0}"),
        (["--n_layer=3"], "n_layer=1"),
    ],
)
def test_resuming_with_another_extension_is_refused(words, message, trained, extend_run, tmp_path):
    assert_success(extend_run(trained, "--factor=2", "--max_iters=0"))
    files = sorted(newest(tmp_path / "extended").iterdir())
    done = extend_run(trained, "--init_from=resume", "--max_iters=1", *words)
    assert_refused(done, message)
    shutil.copytree(trained, tmp_path / "other")
    done = extend_run(tmp_path / "other", "--init_from=resume", "--max_iters=1")
    assert_refused(done, "was made with parent rope, not other")
    assert list_steps(tmp_path / "extended") == [tmp_path / "extended" / "step-000000"]
    assert sorted(newest(tmp_path / "extended").iterdir()) == files


def test_the_fine_tuning_of_an_extension_is_resumed_with_its_factor(trained, extend_run, tmp_path):
    """The factor of the command line is that of the last extension, the model's their product."""
    by2 = tmp_path / "by2"
    assert_success(extend_run(trained, "--factor=2", "--max_iters=0", f"--out_dir={by2}"))
    assert_success(extend_run(by2, "--factor=4", "--max_iters=0"))
    resume = ["--init_from=resume", "--max_iters=1"]
    assert_refused(extend_run(by2, "--factor=2", *resume), "factor 8.0, not 4.0")
    assert_success(extend_run(by2, "--factor=4", *resume))
    assert GPT.load(tmp_path / "extended").config.block_size == 256


# -----------------------------------------------------------------------------
# Settings.


def test_options_are_numbers_booleans_or_text():
    options = read_options("ramp=paper,beta_fast=16,truncate=True")
    assert options == {"ramp": "paper", "beta_fast": 16.0, "truncate": True}
    assert read_options("") == {}


@pytest.mark.parametrize(
    "options, message",
    [
        *[(text, "is malformed: give NAME=VALUE") for text in ("beta", "=1", "2x=1", "self=1")],
        ("factor=3", "sets factor, which is no option of a method: give --factor=3"),
        ("method=pi", "sets method, which is no option of a method: give --method=pi"),
        ("w=0.3,w=0.4", "gives w twice: give it once"),
    ],
)
def test_malformed_options_are_refused(options, message):
    with pytest.raises(UserError, match=f"--options={options} {message}"):
        read_options(options)


def test_options_may_come_from_a_file(tmp_path):
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"long_factor": [1.0, 2.0]}))
    assert read_options(str(file)) == {"long_factor": [1.0, 2.0]}
    for text in ("[1]", "{", '{"factor": 2}', "[" * 100_000):
        file.write_text(text)
        with pytest.raises(UserError, match="cannot be read"):
            read_options(str(file))


def inherited(meta, given):
    """The settings that extend.py takes over, with its own defaults."""
    return inherited_settings(meta, {"method": "yarn", "factor": 4.0, "max_iters": 60, **given}, "")


def test_the_first_fine_tuning_lowers_the_learning_rate_and_later_ones_keep_it(trained):
    meta = read_meta(newest(trained))
    first = inherited(meta, {})
    assert first["learning_rate"] == pytest.approx(0.3 * meta["train"]["learning_rate"])
    assert (first["batch_size"], first["gradient_accumulation_steps"]) == (1, 1)  # 1 x 128 tokens
    trained_by_extend = {**meta["train"], "method": "yarn", "pose": False}
    second = inherited({**meta, "train": trained_by_extend}, {"factor": 2})
    assert second["learning_rate"] == meta["train"]["learning_rate"]
    assert "max_iters" not in first and "weight_decay" not in first  # extend.py's own defaults
