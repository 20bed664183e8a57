"""Experiments at the smallest budget, run whole: what should differ does, and what should not."""

import json

import pytest
import torch
import torch.nn.functional as F
from boards import make_board
from conftest import ROOT, assert_refused, assert_success

import data
from data import texts
from experiments import run
from model import GPT

pytestmark = pytest.mark.slow
FLAGS = ("--budget=try", "--seeds=1", "--device=cpu", "--arms=untouched,ntk,ntk-tuned")


def test_a_checkpoint_is_extended_and_scored(call, save_run, text_data, tmp_path, monkeypatch):
    """A toy of bytes in the place of the public one: losses are those of the model."""
    files = {name: ROOT / name for name in ("model.py", "train.py", "extend.py")}
    monkeypatch.setattr(texts, "standard_library", lambda: files)
    words = ("experiments/run.py", "public", *FLAGS, f"--dataset={text_data}")
    monkeypatch.setenv("NANOLONG_SMOLLM2", "")
    assert_refused(call(*words, cwd=tmp_path), "make smollm2")
    original = save_run(pos="rope", block_size=2048)
    assert_success(call("hf.py", "export", original, tmp_path / "toy", "--verify=false"))
    monkeypatch.setenv("NANOLONG_SMOLLM2", str(tmp_path / "toy"))
    assert_success(call(*words, cwd=tmp_path))

    folder = tmp_path / "out" / "experiments"
    board = make_board("public", json.loads((folder / "public.json").read_text())["rows"], "try")
    tokens = torch.tensor([[256, *files["model.py"].read_bytes()[:4096]]])
    model = GPT.load(original)
    model.extend("ntk", 4.0)
    losses = F.cross_entropy(model(tokens[:, :-1])[0].double(), tokens[0, 1:], reduction="none")
    for start, end in ((0, 2048), (2048, 4096)):
        assert board.of("ntk", "loss", end)[1] == pytest.approx(losses[start:end].mean().item())
    assert board.of("ntk", "loss", 4096) != board.of("ntk-tuned", "loss", 4096)
    modules = data.Dataset(str(folder / "data-public-try-text" / "modules"))
    assert modules.train.tokens[0].size < files["model.py"].stat().st_size  # it is not there


def test_all_models_are_extended_and_differ_where_they_should(call, text_data, tmp_path):
    names = "FFFF FFFF-logn WWWF-full WWWF-all WWWN-none WWWN-all WWWN-logn-none".split()
    words = ["layers", "--budget=try", "--seeds=1", "--device=cpu", f"--dataset={text_data}"]
    arms = ",".join(f"{name}/zero-shot" for name in names)
    done = call("experiments/run.py", *words, f"--arms={arms}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "out/experiments/layers.json").read_text())
    loss = {(row[0].split("/")[0], row[3]): row[4] for row in saved["rows"] if "last" in row[2]}
    # logn changes no weights, and nothing within the training length
    assert loss["FFFF-logn", 48] == loss["FFFF", 48]
    assert loss["FFFF-logn", 384] != loss["FFFF", 384]
    assert loss["WWWN-logn-none", 48] == loss["WWWN-none", 48] != loss["WWWN-all", 48]
    assert loss["WWWF-full", 48] != loss["WWWF-all", 48]


def test_dynamic_methods_and_windows_change_longer_text_alone(text_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "--budget=try", f"--dataset={text_data}", "--seeds=1", "--device=cpu"]
    assert run.main([*words, "--arms=none+0,dynamic-yarn+0,window+0,yarn-pose+4"]) == 0
    rows = json.loads((run.CACHE / "reproduce.json").read_text())["rows"]
    losses = {(arm, length): value for arm, _, measure, length, value in rows}
    for arm in ("dynamic-yarn+0", "window+0"):
        assert losses[arm, 32] == losses["none+0", 32] and losses[arm, 64] != losses["none+0", 64]
