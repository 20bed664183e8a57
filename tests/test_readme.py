"""What the README shows is true: its scheme works, its files and settings exist."""
import re

import pytest
import torch

import model as room
from conftest import ROOT
from model import GPT, KVCache, GPTConfig

README = (ROOT / "README.md").read_text()


def test_the_scheme_in_the_readme(monkeypatch, tmp_path):
    code = re.search(r"```python\n(class .*?)```", README, re.S)[1]
    assert len([line for line in code.splitlines() if line.strip()]) < 20
    monkeypatch.setattr(room, "POSITIONS", dict(room.POSITIONS))
    exec(code, vars(room))
    torch.manual_seed(0)
    model = GPT(GPTConfig(pos="log", n_layer=2, n_head=4, n_embd=32, block_size=32, vocab_size=50))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    tokens = torch.randint(0, 50, (2, 20))
    model(tokens, tokens).backward()
    assert model.pos.rate.grad.abs().min() > 0
    cache, whole = KVCache(), model(tokens)
    assert torch.allclose(torch.cat([model(t, cache=cache) for t in tokens.split([12, 1, 7], 1)], 1), whole, atol=1e-5)
    model.save(tmp_path / "step-000000")
    assert torch.equal(GPT.load(tmp_path)(tokens), whole)
    model.extend("none", 2)
    with pytest.raises(room.UserError):
        model.extend("yarn", 2)


def test_files_and_presets_exist():
    for name in re.findall(r"`((?:config|data|kernels|tests|results)/[\w./-]*|\w+\.(?:py|txt|toml))`", README):
        assert any((ROOT / folder / name).exists() for folder in (".", "config", "experiments")), name
    for image in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / image).read_bytes()[:4] == b"\x89PNG"
    for scheme in room.POSITIONS:
        assert f"| `{scheme}`" in README
    for method in room.METHODS:
        assert f"| `{method}` |" in README
