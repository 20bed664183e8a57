"""The transformer: against float64 maths written out, its initialisation, FLOPs, sampling and checkpoints."""
import json
import math

import pytest
import torch

import kernels
from checkpoint import checkpoint_folder, steps
from model import GPT, POSITIONS, GPTConfig, Refused


def by_hand(model, tokens):
    """A float64 forward pass of a rope model with grouped queries and QK-norm, from the formulas."""
    c, w = model.config, {n: p.detach().double() for n, p in model.named_parameters()}
    norm = lambda x, g: x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * g  # noqa: E731
    x = w["embed.weight"][tokens]
    B, T, D = *tokens.shape, c.head_dim
    angle = torch.arange(T)[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)

    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)
    for i in range(c.n_layer):
        p = f"blocks.{i}."
        h = norm(x, w[p + "attention_norm.weight"])
        q, k, v = ((h @ w[f"{p}attention.{n}.weight"].T).view(B, T, -1, D).transpose(1, 2) for n in "qkv")
        q, k = norm(q, w[p + "attention.q_norm.weight"]), norm(k, w[p + "attention.k_norm.weight"])
        q, k = turn(q), turn(k).repeat_interleave(c.n_head // c.n_kv_head, 1)
        v = v.repeat_interleave(c.n_head // c.n_kv_head, 1)
        s = (q @ k.mT / math.sqrt(D)).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        x = x + (s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1) @ w[p + "attention.o.weight"].T
        h = norm(x, w[p + "mlp_norm.weight"])
        g = h @ w[p + "mlp.gate.weight"].T
        x = x + (g * g.sigmoid() * (h @ w[p + "mlp.up.weight"].T)) @ w[p + "mlp.down.weight"].T
    return norm(x, w["norm.weight"]) @ (w["embed.weight"] if c.tied else w["head.weight"]).T


@pytest.mark.parametrize("tied", [True, False])
def test_forward_by_hand(tied, make):
    model = make(pos="rope", n_head=6, n_kv_head=2, head_dim=10, n_embd=36, qk_norm=True, tied=tied)
    tokens, targets = torch.randint(0, 50, (3, 17)), torch.randint(0, 50, (3, 17))
    targets[0, :5] = -1
    want = by_hand(model, tokens)
    assert (model(tokens).double() - want).norm() / want.norm() < 1e-5
    losses = torch.nn.functional.cross_entropy(want.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(3, 17)
    assert model(tokens, targets).item() == pytest.approx((losses.sum() / (targets >= 0).sum()).item(), rel=1e-5)
    assert torch.allclose(model(tokens, targets, reduction="none").double(), losses, atol=1e-4)
    assert model(tokens, targets, reduction="sum").item() == pytest.approx(losses.sum().item(), rel=1e-5)


@pytest.mark.parametrize("pos", POSITIONS)
def test_every_parameter_learns(pos, make):
    """Gradients reach every parameter, and agree with finite differences of the loss."""
    model = make(pos=pos, n_kv_head=2, qk_norm=True, window=9, sinks=1).double()
    tokens = torch.randint(0, 50, (2, 16))
    model(tokens, tokens).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
        at, step = p.grad.abs().argmax(), 1e-4
        with torch.no_grad():
            p.view(-1)[at] += step
            up = model(tokens, tokens).item()
            p.view(-1)[at] -= 2 * step
            down = model(tokens, tokens).item()
            p.view(-1)[at] += step
        assert (up - down) / (2 * step) == pytest.approx(p.grad.view(-1)[at].item(), rel=2e-2, abs=1e-6), name


def test_initialisation_covers_every_parameter_or_raises():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_embd=256, n_head=4, tied=False))
    w = dict(model.named_parameters())
    assert w["embed.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert w["blocks.0.attention.q.weight"].std().item() == pytest.approx(0.5 / 16, rel=0.02)
    assert not w["blocks.0.mlp.down.weight"].any() and not w["blocks.3.attention.o.weight"].any() and (w["norm.weight"] == 1).all()
    model.blocks[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="blocks.0.extra.weight"):
        model.init_weights()


def test_the_llama_shape():
    """Names and shapes that an exact export needs; hidden width 8/3 C rounded up to 32; 124M with GPT-2's settings."""
    model = GPT(GPTConfig(n_embd=128, n_head=4, n_kv_head=2, vocab_size=65))
    assert model.blocks[0].mlp.gate.weight.shape == (352, 128) and model.blocks[0].attention.k.weight.shape == (64, 128)
    with torch.device("meta"):
        gpt2 = GPT(GPTConfig(pos="t5", n_layer=12, n_head=12, n_embd=768, block_size=1024, vocab_size=50257))
    assert sum(p.numel() for n, p in gpt2.named_parameters() if not n.startswith("pos.")) == 12 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768 + 50257 * 768 == 123_551_232


def test_flops_are_counted_from_the_shapes(make):
    model = make(n_embd=32, n_head=4, n_kv_head=2, n_layer=3, vocab_size=50, window=0)
    C, hidden = 32, 96
    weights = 3 * (C * 32 + 2 * C * 16 + 32 * C + 3 * C * hidden) + 50 * C
    assert model.flops_per_token(100) == 6 * weights + 12 * 3 * 32 * 100
    assert make(window=10, sinks=2).flops_per_token(100) - make(window=10, sinks=2).flops_per_token(5) == 12 * 2 * 32 * (12 - 5)


def test_generate(make):
    model, prompt = make(), torch.randint(0, 50, (2, 5))
    draw = lambda **o: torch.cat(list(model.generate(prompt, 12, generator=torch.Generator().manual_seed(7), **o)), 1)  # noqa: E731
    assert draw().shape == (2, 12) and torch.equal(draw(), draw())
    assert torch.equal(draw(temperature=0), draw(top_k=1)) and torch.equal(draw(temperature=0), draw(top_p=1e-9))
    assert not torch.equal(draw(), draw(temperature=3.0))
    with torch.no_grad():
        first = model(prompt)[:, -1].softmax(-1)
    n = 4000
    big = torch.cat([next(model.generate(prompt[:1].expand(n, -1), 1, top_k=3, generator=torch.Generator().manual_seed(1)))])[:, 0]
    top = first[0].topk(3)
    share = torch.bincount(big, minlength=50)[top.indices] / n
    assert set(big.tolist()) <= set(top.indices.tolist()) and torch.allclose(share, top.values / top.values.sum(), atol=4 * 0.5 / math.sqrt(n))
    p = float(top.values[:2].sum()) - 1e-4  # the two likeliest are the fewest that hold p
    small = torch.cat([next(model.generate(prompt[:1].expand(n, -1), 1, top_p=p, generator=torch.Generator().manual_seed(1)))])[:, 0]
    assert set(small.tolist()) == set(top.indices[:2].tolist())
    with pytest.raises(Refused, match="at least one"):
        list(model.generate(prompt[:, :0], 1))


def test_checkpoints_are_whole_or_refused(make, tmp_path):
    model = make(pos="t5", tied=True)
    model.save(tmp_path / "run" / "step-000005", step=5)
    model.save(tmp_path / "run" / "step-000010", step=10, val_loss=2.0)
    assert not list((tmp_path / "run").glob(".tmp*")) and [p.name for p in steps(tmp_path / "run")] == ["step-000005", "step-000010"]
    again = GPT.load(tmp_path / "run")
    assert again.meta["step"] == 10 and not again.training and again.config == model.config
    for a, b in zip(model.parameters(), again.parameters()):
        assert torch.equal(a, b)
    assert "head.weight" not in (tmp_path / "run/step-000005/model.safetensors").read_bytes()[:4000].decode("latin1")  # stored once
    with pytest.raises(Refused, match="exists"):
        model.save(tmp_path / "run" / "step-000005")
    newest = tmp_path / "run" / "step-000010"
    good, meta = (newest / "model.safetensors").read_bytes(), (newest / "meta.json").read_text()
    for damaged in (good[:-3], good[:60] + bytes([good[60] ^ 1]) + good[61:], good[:-9] + bytes([good[-9] ^ 64]) + good[-8:], b""):
        (newest / "model.safetensors").write_bytes(damaged)
        with pytest.raises(Refused, match="step-000005"):
            GPT.load(tmp_path / "run")
    (newest / "model.safetensors").write_bytes(good)
    for text in (meta[:50], "{}", "[]", meta.replace('"format": 1', '"format": 99'), meta.replace('"n_layer": 2', '"n_layer": 3'), meta.replace('"n_layer": 2', '"n_layer": "two"'),
                 meta.replace('"pos": "t5"', '"pos": "quantum"'), meta.replace('"n_embd": 32', '"n_embd": 1000000'), meta.replace('"dropout"', '"drop_out"')):
        (newest / "meta.json").write_text(text)
        with pytest.raises(Refused):
            GPT.load(tmp_path / "run")
    (newest / "meta.json").unlink()
    assert GPT.load(tmp_path / "run").meta["step"] == 5  # a folder that is not whole is not seen
    with pytest.raises(Refused, match="no checkpoint"):
        checkpoint_folder(tmp_path)
    with pytest.raises(Refused, match="does not exist"):
        GPT.load(tmp_path / "nothing")


def test_best(make, tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None)):
        make().save(tmp_path / f"step-{step:06d}", step=step, val_loss=loss)
    assert GPT.load(tmp_path, best=True).meta["step"] == 2 and GPT.load(tmp_path).meta["step"] == 4
    assert json.loads((tmp_path / "step-000002" / "meta.json").read_text())["torch"] == torch.__version__


def test_compiles_without_breaks(make):
    """One graph, forward and backward, and the numbers of the eager model."""
    for pos, settings in (("rope", {}), ("t5", {}), ("xl", {}), ("shaw", {}), ("kerple-power", {}), ("rope", {"nope_every": 2, "window": 9}), ("learned", {"random_positions": 30})):
        torch._dynamo.reset()
        model = make(pos=pos, qk_norm=True, n_kv_head=2, **settings)
        tokens = torch.randint(0, 50, (2, 24))
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        drawn = model.draw_positions(2, 24, 5)
        loss = compiled(tokens, tokens, drawn, reduction="sum")
        loss.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        want = model(tokens, tokens, drawn, reduction="sum")
        want.backward()
        assert torch.allclose(loss, want, rtol=1e-5)
        short = tokens[:, :13], tokens[:, :13], None if drawn is None else drawn[:, :13]
        assert torch.allclose(compiled(*short), model(*short), rtol=1e-5)  # another length
        for g, p in zip(grads, model.parameters()):
            assert torch.allclose(g, p.grad, rtol=1e-3, atol=1e-4)


def test_kernels_import_nothing_heavy(run):
    import subprocess
    import sys
    from conftest import ROOT
    code = "import sys, kernels; print(sorted({'triton', 'transformers'} & set(sys.modules)), hasattr(kernels, '__version__'))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout == "[] False\n" and not out.stderr
    assert kernels.__all__ == ["rope", "attention", "linear_cross_entropy"]
