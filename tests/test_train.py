"""Training: the update, what is not finite, and which checkpoints are kept."""

import itertools
import json
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    SMALLEST,
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    logged,
    newest,
    write_dataset,
)

import data
import train
from model import GPT, GPTConfig
from nanolong import progress
from nanolong.optim import get_lr, make_optimizers
from nanolong.run import list_steps


@pytest.fixture
def cfg(text_data, tmp_path):
    """Make a TrainConfig for the smallest run."""

    def cfg(**settings):
        places = {"dataset": str(text_data), "out_dir": str(tmp_path / "run")}
        return train.TrainConfig(**{**SMALLEST, **places, **settings})

    return cfg


def tiny(**settings):
    torch.manual_seed(0)
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 257}
    return GPT(GPTConfig(**{**shape, **settings}))


# -----------------------------------------------------------------------------
# The update.


def batches_of_step(dataset, step, accumulation):
    """The micro-batches of a step as one batch of inputs and targets."""
    indices = range(step * accumulation, (step + 1) * accumulation)
    parts = [dataset.batch(2 * index, 2, 16, 1337)[:2] for index in indices]
    return (torch.cat([torch.from_numpy(x) for x in part]) for part in zip(*parts, strict=True))


def adamw_by_hand(weights, dataset, n_steps, lr, decay, clip):
    """AdamW in float64, written out. Updates weights in place and returns the loss of each step."""
    model = tiny().double()
    mean = {name: torch.zeros_like(w) for name, w in weights.items()}
    square = {name: torch.zeros_like(w) for name, w in weights.items()}
    step_losses = []
    for step in range(n_steps):
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(weights[name])
        model.zero_grad()
        x, y = batches_of_step(dataset, step, 3)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        loss.backward()
        step_losses.append(loss.item())
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
        for name, p in model.named_parameters():
            g = p.grad * min(1.0, clip / (norm + 1e-6))
            mean[name] = 0.9 * mean[name] + 0.1 * g
            square[name] = 0.95 * square[name] + 0.05 * g * g
            m = mean[name] / (1 - 0.9 ** (step + 1))
            v = square[name] / (1 - 0.95 ** (step + 1))
            if p.dim() > 1:
                weights[name] *= 1 - lr * decay
            weights[name] -= lr * m / (v.sqrt() + 1e-8)
    return step_losses


def test_the_update_is_adamw_on_the_mean_over_scored_tokens(cfg, tmp_path):
    """A mask leaves targets out, so micro-batches count by their scored tokens."""
    model = tiny()
    model.blocks[0].mlp.down.weight.data.normal_(0, 0.3)
    tokens = np.random.default_rng(0).integers(0, 256, 4000)
    mask = np.ones(4000, np.uint8)
    mask[:2000] = np.arange(2000) % 5 == 0
    mask[::17] |= 2  # a document starts
    folder = write_dataset(tmp_path / "data", tokens, tokens)
    for name in ("train", "val"):
        (folder / f"{name}.mask").write_bytes(mask.tobytes())
    dataset = data.Dataset(folder)
    counts = [(dataset.batch(2 * i, 2, 16, 1337)[1] >= 0).sum() for i in range(6)]
    assert max(counts) > 1.5 * min(counts)  # or this test would find nothing
    schedule = {"learning_rate": 1e-2, "warmup_iters": 0, "lr_schedule": "constant"}
    steps = {"gradient_accumulation_steps": 3, "max_iters": 2}
    settings = cfg(dataset=str(folder), **schedule, **steps, grad_clip=0.5, weight_decay=0.3)
    weights = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    start = {name: w.clone() for name, w in weights.items()}
    expected = adamw_by_hand(weights, dataset, 2, 1e-2, 0.3, 0.5)
    train.train(model, settings)
    for name, p in model.named_parameters():
        way = (weights[name] - start[name]).norm()
        assert (p.double() - weights[name]).norm() < 1e-3 * way, name
    assert logged(settings.out_dir, "loss") == pytest.approx(expected, rel=1e-5)


def test_a_run_that_is_not_deterministic_says_so_and_goes_on_so(cfg, capsys):
    settings = {"max_iters": 4, "log_interval": 1, "eval_iters": 1, "compile": False}
    first = cfg(**settings, deterministic=False, stop_at=2)
    train.train(tiny(), first)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "\nnot deterministic: " in capsys.readouterr().out
    resume = ["--init_from=resume", f"--out_dir={first.out_dir}"]
    changes = (["--stop_at=3"], False), (["--stop_at=4", "--deterministic"], True)
    for words, is_deterministic in changes:
        assert train.main([*resume, *words]) == 0
        assert torch.are_deterministic_algorithms_enabled() == is_deterministic
        printed = capsys.readouterr().out
        assert ("\nnot deterministic: " in printed) == (not is_deterministic)
        assert ("deterministic False -> True" in printed) == is_deterministic


def test_without_a_terminal_a_run_prints_what_it_logs(cfg, capsys, monkeypatch, compiled_graphs):
    """A slow validation prints its first loss early, and compilation is announced, once each."""
    ticks = itertools.count()
    seconds = 1.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(ticks) * seconds)
    first = {}
    for name, settings in {"slow": {"compile": True}, "fast": {"compile": False}}.items():
        seconds = {"slow": 3.0, "fast": 1.0}[name]
        settings |= {"max_iters": 9, "log_interval": 3, "eval_interval": 100, "eval_iters": 5}
        train.train(tiny(), cfg(out_dir=cfg().out_dir + name, **settings))
        lines = capsys.readouterr().out.splitlines()
        steps = [line.split(":")[0] for line in lines if re.match("step .*/9:", line)]
        assert steps == ["step 1/9", "step 3/9", "step 6/9", "step 9/9"]
        first[name] = [line for line in lines if line.startswith(("validating", "compiling"))]
    model = tiny()
    dataset = data.Dataset(cfg().dataset)
    pairs = [dataset.val.sequence(index, 16) for index in dataset.val.spaced(5, 16)[:2]]
    x, y = (torch.tensor(np.stack(column)) for column in zip(*pairs, strict=True))
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()
    validating, compiling, again = first["slow"]
    assert validating == f"validating: loss {loss:.4f} after the first of 3 batches"
    assert compiling == "compiling the first step, which takes up to a minute"
    assert again.startswith("validating: loss")  # at the last step
    assert not first["fast"]


@pytest.mark.parametrize("eval_length", [0, 7])
def test_the_validation_loss_is_the_mean_over_evenly_spaced_sequences(
    eval_length, cfg, text_data, tmp_path
):
    """Five of them in batches of two."""
    model = tiny()
    result = train.train(model, cfg(max_iters=2, eval_length=eval_length, eval_iters=5))
    split = data.Dataset(text_data).val
    length = eval_length or 16
    available = int(split.n_sequences(length).sum())
    loss_sum = n_tokens = text_sum = n_bytes = 0
    for i in range(5):
        x, y = (torch.from_numpy(part) for part in split.sequence(i * available // 5, length))
        logits = model(x[None])[0]
        losses = F.cross_entropy(logits, y, reduction="none")
        loss_sum += losses.sum().item()
        n_tokens += len(y)
        text_sum += losses[y < 256].sum().item()
        n_bytes += int((y < 256).sum())
    assert result["val_loss"] == pytest.approx(loss_sum / n_tokens, rel=1e-5)
    assert (result["step"], result["stopped"]) == (2, False)
    assert logged(tmp_path / "run")[-1]["val_loss"] == result["val_loss"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    # a token but <bos> is a byte, and a bit is ln 2 nats
    assert result["val_bits_per_byte"] == pytest.approx(text_sum / n_bytes / 0.693147, rel=1e-5)


def test_learning_rate_schedules():
    def lr(step, **settings):
        cfg = train.TrainConfig(learning_rate=1.0, max_iters=100, warmup_iters=10, **settings)
        return get_lr(cfg, step)

    assert lr(0) == pytest.approx(1 / 11)
    assert lr(9) == pytest.approx(10 / 11)
    assert lr(10) == lr(50) == lr(63) == 1.0
    assert lr(82) == pytest.approx(0.5)
    last = 1 - (89 / 90 - 0.6) / 0.4
    assert lr(99, min_lr=0.1) == pytest.approx(0.1 + 0.9 * last)
    assert lr(55, lr_schedule="cosine", min_lr=0.2) == pytest.approx(0.6)
    assert lr(99, lr_schedule="constant") == 1.0


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("pos, tied", [("rope", False), ("t5", True), ("learned", True)])
def test_optimizers_hold_every_parameter_once(pos, tied, kind):
    model = tiny(pos=pos, qk_norm="head", tie_embeddings=tied)
    optimizers = make_optimizers(model, train.TrainConfig(optimizer=kind))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = sorted(id(p) for group in groups for p in group["params"])
    assert held == sorted(map(id, model.parameters()))
    not_decayed = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    expected = set()
    for name, p in model.named_parameters():
        if p.dim() < 2 or name.startswith("scheme."):
            expected.add(id(p))
    assert not_decayed == expected


# -----------------------------------------------------------------------------
# Guarantee 4: nothing that is not finite is kept.


def break_forward(monkeypatch, is_bad, break_loss):
    """Have GPT.forward return break_loss(loss) in the calls for which is_bad(model) is true."""
    real = GPT.forward

    def forward(self, *args, **kwargs):
        loss = real(self, *args, **kwargs)
        return break_loss(self, loss) if is_bad(self) else loss

    monkeypatch.setattr(GPT, "forward", forward)


def nth_call(n, training):
    """Whether this is the n-th forward pass in training, or in evaluation."""
    calls = []

    def is_nth(model):
        if model.training == training:
            calls.append(model)
        return model.training == training and len(calls) == n

    return is_nth


@pytest.mark.parametrize("where", ["loss", "gradient", "parameter"])
def test_a_step_that_is_not_finite_is_not_taken(where, cfg, monkeypatch):
    model, settings = tiny(), cfg(max_iters=6)
    weights = []

    def break_loss(model, loss):
        weights.extend(p.detach().clone() for p in model.parameters())
        if where == "loss":
            return loss * float("inf")
        source = model.norm.weight if where == "parameter" else loss
        source.register_hook(lambda grad: grad * float("nan"))
        return loss

    break_forward(monkeypatch, nth_call(4, training=True), break_loss)
    named = r" \(of norm.weight alone\)" if where == "parameter" else ""
    with pytest.raises(FloatingPointError, match=f"of step 4{named} is not finite: stopped before"):
        train.train(model, settings)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    steps = list_steps(settings.out_dir)
    assert [step.name for step in steps] == ["step-000000", "step-000002"]
    assert GPT.load(settings.out_dir).meta["step"] == 2
    assert "NaN" not in (Path(settings.out_dir) / "log.jsonl").read_text()


def test_a_validation_loss_that_is_not_finite_stops_the_run(cfg, monkeypatch):
    settings = cfg(max_iters=6)
    is_bad = nth_call(3, training=False)  # two batches in the evaluation at step 0
    break_forward(monkeypatch, is_bad, lambda model, loss: loss * float("nan"))
    with pytest.raises(FloatingPointError, match="validation loss at step 2"):
        train.train(tiny(), settings)
    last = logged(settings.out_dir)[-1]
    assert last["step"] == 2 and "val_loss" not in last
    assert "NaN" not in (Path(settings.out_dir) / "log.jsonl").read_text()


def test_float16_skips_a_step_that_overflows(cfg, monkeypatch):
    """The loss scale is halved, and the run goes on."""
    model, settings = tiny(), cfg(dtype="float16", max_iters=3)
    before_step = []

    def break_second(model, loss):
        before_step.append([p.detach().clone() for p in model.parameters()])
        if len(before_step) == 2:
            loss.register_hook(lambda grad: grad * float("inf"))
        return loss

    def same(a, b):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    break_forward(monkeypatch, lambda model: model.training, break_second)
    train.train(model, settings)
    assert not same(before_step[0], before_step[1])
    assert same(before_step[1], before_step[2])
    assert not same(before_step[2], model.parameters())
    meta = json.loads((newest(settings.out_dir) / "meta.json").read_text())
    assert (meta["loss_scale"], meta["good_steps"]) == (32768.0, 1)


@pytest.mark.slow
def test_a_compiled_run_has_the_same_bits_again(run, text_data, tmp_path):
    """With two threads, which must not add to the embedding's gradient in any order."""
    words = [*TINY, "--compile=true", "--batch_size=16", "--block_size=256", "--n_embd=64"]
    environment = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("a", "b"):
        words += [f"--dataset={text_data}", f"--out_dir={tmp_path}/{name}"]
        assert_success(run("train.py", *words, env=environment))
    assert_same_bits(tmp_path / "a", tmp_path / "b")


# -----------------------------------------------------------------------------
# Run folders.


def test_the_last_two_checkpoints_and_the_best_are_kept(cfg, monkeypatch):
    """The best of all evaluations of a resumed run, also if it has other sequences now."""
    values = iter([5.0, 1.0, 4.0, 4.1, 3.9, 3.0, 3.5, 3.6, 3.7])
    monkeypatch.setattr(train, "estimate_loss", lambda *args: {"val_loss": next(values)})
    settings = cfg(max_iters=6, batch_size=4, eval_iters=4)
    train.train(tiny(), settings)
    resumed = replace(settings, max_iters=14, init_from="resume", eval_iters=1)
    train.train(GPT.load(settings.out_dir), resumed)
    names = [step.name for step in list_steps(settings.out_dir)]
    assert names == ["step-000002", "step-000012", "step-000014"]
    assert GPT.load(settings.out_dir, best=True).meta["step"] == 2


def test_a_parameter_without_a_gradient_is_named(call, text_data, tmp_path):
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    refused = call(*words, "--pos=kerple", "--layer_pattern=N")
    assert_refused(refused, "scheme.r1 gets no gradient", "--pos=nope")


def test_the_seed_is_of_weights_batches_and_dropout(cfg, text_data):
    settings = cfg(seed=7)
    dataset = data.Dataset(text_data)
    shape = vars(tiny().config)
    args = SimpleNamespace(cfg=settings, model_config=GPTConfig(**shape), given=set())
    model = train.make_model(args)
    torch.manual_seed(7)
    expected = GPT(GPTConfig(**shape))
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    seeds = []
    for seed in (7, 8):
        batches = train.Batches(dataset, model, cfg(seed=seed), 16, 0, 0)
        for first in (0, 2, 4):
            inputs, _, dropout_seed = batches.read(first)
            x, *_ = dataset.batch(first, 2, 16, seed)
            assert np.array_equal(inputs["tokens"], x)
            seeds.append(dropout_seed)
    assert len(set(seeds)) == 6


def test_the_loss_scale_doubles_after_2000_good_steps(cfg):
    for dtype, loss_scale in (("float16", 8.0), ("float32", 4.0)):
        state = train.TrainState(loss_scale=4.0, good_steps=1999)
        train.update([], [torch.ones(1)], 1.0, 1.0, state, cfg(dtype=dtype))
        assert (state.loss_scale, state.good_steps) == (loss_scale, 2000)


@pytest.mark.parametrize("bos", [True, False])
def test_a_run_from_another_keeps_what_starts_and_ends_a_text(bos, text_data, call, tmp_path):
    """Whatever the dataset has by default; a setting changes it."""
    model = tiny()
    meta = {"tokenizer": data.ByteTokenizer().to_json(), "ends": [65, 256], "family": "llama"}
    model.meta = {**meta, "bos": 256 if bos else None}
    model.save(tmp_path / "parent/step-000000")
    words = [f"--init_from={tmp_path}/parent", f"--dataset={text_data}", "--max_iters=1"]
    words += ["--eval_iters=2", "--batch_size=2", "--compile=false", "--device=cpu"]
    for name, more, expected in (("a", [], bos), ("b", [f"--bos={not bos}".lower()], not bos)):
        assert_success(call("train.py", *words, f"--out_dir={tmp_path / name}", *more))
        found = GPT.load(tmp_path / name).meta
        assert found["bos"] == (256 if expected else None)
        assert {key: found[key] for key in meta} == meta


def test_with_min_doc_the_end_of_a_document_is_a_target(cfg, tmp_path):
    """The token that separates it from the next one."""
    documents = [256, *b"short", 256, *b"a longer one", 256, *b"the last one of these"]
    folder = write_dataset(tmp_path / "data", documents)
    dataset = train.open_dataset(tiny(block_size=8), cfg(dataset=str(folder), min_doc=9), 8)
    assert [bytes(part[:-1].tolist()) for part in dataset.train.tokens[:1]] == [b"a longer one"]
    assert dataset.train.tokens[0][-1] == 256


def test_bos_and_documents_are_those_of_the_settings(cfg, text_data):
    model = tiny(block_size=64)
    whole = data.Dataset(text_data)
    shortest = min(np.diff(np.flatnonzero(np.append(whole.train.tokens[0], 256) == 256)))
    dataset = train.open_dataset(model, cfg(min_doc=int(shortest) + 1), 16)
    assert (len(whole.train.tokens), len(dataset.train.tokens)) == (1, 2)  # one file, two documents
    dataset = train.open_dataset(model, cfg(bos=False), 16)
    assert (dataset.batch(0, 8, 16, 1)[0][:, 0] != 256).any()


def test_before_any_training_no_learning_rate_is_blamed(tmp_path):
    cfg = train.TrainConfig(out_dir=str(tmp_path))
    train.check_finite("the loss", cfg, 0, 1.0)
    with pytest.raises(FloatingPointError, match="before any training: check the scheme"):
        train.check_finite("the loss", cfg, 0, float("nan"))
    with pytest.raises(FloatingPointError, match="with a lower --learning_rate"):
        train.check_finite("the loss", cfg, 1, 1.0, float("inf"))
