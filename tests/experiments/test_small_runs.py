"""Experiments at the smallest budget, run whole: what should differ does, and what should not."""

import json

import pytest
import torch
import torch.nn.functional as F
from boards import make_board
from conftest import ROOT, assert_refused, assert_success

import data
from data import texts
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
