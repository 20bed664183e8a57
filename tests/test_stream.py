"""Training on data of one's own: whatever has the methods of data.Stream."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SMALLEST, assert_refused, assert_same_bits, logged, newest

import data
import train
from data import Stream
from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.run import read_meta


class Counting(Stream):
    """Sequence i counts up in steps of i, modulo 257."""

    hash = "counting in steps, 1"

    def batch(self, first, batch_size, length, seed, max_position):
        steps = np.arange(first, first + batch_size)[:, None]
        tokens = (seed + steps * np.arange(length + 1)) % 257
        return tokens[:, :-1], tokens[:, 1:], None, None


class CountingDown:
    """A validation set of five sequences."""

    def spaced(self, n, length):
        return list(range(5))[: n or 5]

    def sequence(self, index, length):
        tokens = np.arange(length + index, index - 1, -1)
        return tokens[:-1], tokens[1:]


def tiny(**settings):
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 257}
    return GPT(GPTConfig(**{**shape, **settings}))


def cfg(out, **settings):
    return train.TrainConfig(**{**SMALLEST, "out_dir": str(out), **settings})


def go_on(settings, stream, **changed):
    """Resume a run."""
    settings = replace(settings, init_from="resume", **changed)
    return train.train(GPT.load(settings.out_dir), settings, dataset=stream)


def test_a_stream_trains_and_goes_on_with_the_same_bits(tmp_path, capsys):
    """Without a validation set the log has no evaluation; the checkpoint names no dataset."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    settings = {"max_iters": 6}
    result = train.train(tiny(dropout=0.1), cfg(whole, **settings), dataset=Counting())
    assert (result["last_step"], result["stopped"]) == (6, False) and "val_loss" not in result
    printed = capsys.readouterr().out
    assert "data: Counting, 192 tokens\n" in printed and "validation" not in printed
    assert not any("val_loss" in row for row in logged(whole))
    meta = read_meta(newest(whole))
    kept = [meta[name] for name in ("dataset", "data_hash", "tokenizer", "bos", "sequences")]
    assert kept == ["", Counting.hash, None, None, 12] and meta["train"]["dataset"] == ""

    stopped = cfg(part, **settings, stop_at=3)
    train.train(tiny(dropout=0.1), stopped, dataset=Counting())
    go_on(stopped, Counting(), stop_at=0)
    # the stop has a checkpoint of its own
    assert_same_bits(whole, part)
    go_on(stopped, Counting(), stop_at=0)  # nothing is left to do
    assert_same_bits(whole, part)


def test_any_batch_size_sees_each_sequence_once(tmp_path, monkeypatch):
    """Two micro-batches compute the step of one; a resumed run goes on with the next sequence."""
    seen = []
    forward = GPT.forward

    def spied(self, tokens, *args, **kwargs):
        seen.extend(((tokens[:, 1] - 1337) % 257).tolist())
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(GPT, "forward", spied)
    losses = []
    for name, size, accumulation in (("one", 4, 1), ("two", 2, 2)):
        seen.clear()
        sizes = {"batch_size": size, "gradient_accumulation_steps": accumulation}
        settings = cfg(tmp_path / name, **sizes)
        train.train(tiny(), settings, dataset=Counting())
        assert seen == list(range(16))
        losses.append(logged(tmp_path / name, "loss"))
    assert len(losses[0]) == 4 and losses[0] == pytest.approx(losses[1], rel=1e-5)
    go_on(settings, Counting(), batch_size=3, max_iters=6)
    assert seen == list(range(16 + 2 * 3 * 2))


def test_a_stream_may_have_a_validation_set(tmp_path):
    stream = Counting()
    stream.val = CountingDown()
    model = tiny()
    result = train.train(model, cfg(tmp_path / "run", eval_iters=0), dataset=stream)
    x, y = zip(*(stream.val.sequence(i, 16) for i in range(5)), strict=True)
    x, y = torch.from_numpy(np.stack(x)), torch.from_numpy(np.stack(y))
    with torch.no_grad():
        expected = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    assert result["val_loss"] == pytest.approx(expected, rel=1e-5)
    evaluations = [row for row in logged(tmp_path / "run") if "val_loss" in row]
    assert [row["step"] for row in evaluations] == [0, 2, 4]
    assert not any("val_bits_per_byte" in row for row in evaluations)


def test_a_run_does_not_go_on_with_other_data(call, text_data, tmp_path):
    """A stream without a hash is taken for any other without one, but not for token files."""
    nameless = Counting()
    nameless.hash = ""
    streams = {"named": Counting(), "nameless": nameless, "files": None}
    for name, stream in streams.items():
        settings = cfg(tmp_path / name, dataset=str(text_data))
        train.train(tiny(), settings, dataset=stream)
        for other_name, other in streams.items():
            if other_name != name:
                with pytest.raises(UserError, match="is not the data of"):
                    go_on(settings, other, max_iters=6)
        go_on(settings, stream, max_iters=6)
    words = ["train.py", f"--out_dir={tmp_path}/nameless", "--init_from=resume"]
    assert_refused(call(*words, f"--dataset={text_data}", "--max_iters=9"), "is not the data of")
    # the settings of the checkpoint name no data
    assert_refused(call(*words, "--max_iters=9"), "pass data of your own to train()")
    done = call("evaluate.py", tmp_path / "nameless", "--lengths=16")
    assert_refused(done, "does not say on which text it was trained")


def test_the_tokenizer_of_a_loaded_model_stays_with_it(text_data, tmp_path):
    """A stream of its tokens needs to have none."""
    train.train(tiny(), cfg(tmp_path / "first", dataset=str(text_data)))
    model = GPT.load(tmp_path / "first")
    train.train(model, cfg(tmp_path / "second"), dataset=Counting())
    first, second = (read_meta(newest(tmp_path / name)) for name in ("first", "second"))
    assert first["tokenizer"] == second["tokenizer"] == {"kind": "bytes"}
    assert first["bos"] == second["bos"] == 256
    assert first["data_hash"] == data.Dataset(text_data).hash


def test_contributing_has_this_stream():
    assert inspect.getsource(Counting) in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda parts: parts[:2], "return these four"),
        (lambda parts: (parts[0][:1], *parts[1:]), r"arrays \(2, 16\) of int64"),
        (lambda parts: (parts[0][:, :-1], *parts[1:]), r"arrays \(2, 16\) of int64"),
        (lambda parts: (parts[0].astype(np.uint16), *parts[1:]), r"arrays \(2, 16\) of int64"),
        (lambda parts: (*parts[:3], parts[0][0]), r"arrays \(2, 16\) of int64"),
    ],
)
def test_a_batch_that_is_none_is_refused_by_name(wrong, words):
    x = np.zeros((2, 16), np.int64)
    data.check_batch((x, x, None, None), (2, 16), "Mine")
    with pytest.raises(UserError, match=f"Mine.batch.*{words}"):
        data.check_batch(wrong((x, x, None, None)), (2, 16), "Mine")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"optimizer": "lyon"}, "optimizer is one of"),
        ({"lr_schedule": "cosin"}, "lr_schedule is one of"),
        ({"learning_rate": -1.0}, "learning_rate must be a number from 0 on"),
        ({"out_dir": ""}, "has no folder: give out_dir"),
        ({"init_from": "scrach"}, "init_from='scrach', and the model was not loaded"),
        ({"init_from": "resume"}, "init_from='resume', and the model was not loaded"),
    ],
)
def test_python_is_refused_what_the_command_line_is(settings, words, tmp_path):
    """Of a fresh model; nothing is written but a lock."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16))
    with pytest.raises(UserError, match=words):
        cfg = train.TrainConfig(**{**SMALLEST, "out_dir": str(tmp_path / "run"), **settings})
        train.train(model, cfg, dataset=Counting())
    assert [file.name for file in tmp_path.iterdir()] in ([], [".run.lock"])
