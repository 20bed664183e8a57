"""The training loop's promises, with real processes and real signals."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from config import UserError
from conftest import ROOT, TINY
from checkpoint import steps
from model import GPT, GPTConfig


def rows(folder):
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def losses(folder):
    return {row["step"]: row["loss"] for row in rows(folder) if "loss" in row}


def same_bits(a, b):
    """The newest checkpoints of two runs hold the same tensors, and their logs the same losses."""
    a_step, b_step = steps(a)[-1], steps(b)[-1]
    assert a_step.name == b_step.name
    for file in ("model.safetensors", "optim.safetensors"):
        x, y = load_file(a_step / file), load_file(b_step / file)
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x), file
    strip = lambda folder: [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows(folder) if "changed" not in row]  # noqa: E731
    assert strip(a) == strip(b)


@pytest.fixture
def cfg(text_data, tmp_path):
    """A TrainConfig for the smallest run."""
    def cfg(**settings):
        return train.TrainConfig(**{"dataset": str(text_data), "out_dir": str(tmp_path / "run"), "batch_size": 2, "max_iters": 4, "warmup_iters": 1, "eval_interval": 2, "eval_iters": 2, "log_interval": 1,
                                    "device": "cpu", "dtype": "float32", "compile": False, **settings})
    return cfg


def tiny(**settings):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16, "vocab_size": 257, **settings}))


def test_the_update_is_adamw_on_the_mean_over_scored_tokens(cfg, text_data):
    """Two accumulated iterations against float64 AdamW written out; targets of <bos> do not count, so micro-batches weigh by their tokens."""
    import data
    model, c = tiny(), cfg(gradient_accumulation_steps=3, max_iters=2, learning_rate=1e-2, warmup_iters=0, lr_schedule="constant", grad_clip=0.5, weight_decay=0.3, batch_size=2)
    weights = {n: p.detach().clone().double() for n, p in model.named_parameters()}
    twin, split = tiny().double(), data.Dataset(text_data).train
    m, v = ({n: torch.zeros_like(w) for n, w in weights.items()} for _ in range(2))
    logged = []
    for step in range(2):
        with torch.no_grad():
            for n, p in twin.named_parameters():
                p.copy_(weights[n])
        twin.zero_grad()
        x, y = (torch.cat(t) for t in zip(*(map(torch.from_numpy, split.batch(step * 3 + i, 2, 16, 1337)) for i in range(3))))
        if step == 0:
            assert (y >= 0).sum() <= y.numel()
        loss = torch.nn.functional.cross_entropy(twin(x).flatten(0, 1), y.flatten(), ignore_index=-1)
        loss.backward()
        logged.append(loss.item())
        norm = torch.stack([p.grad.norm() for p in twin.parameters()]).norm()
        for n, p in twin.named_parameters():
            g = p.grad * min(1.0, 0.5 / (norm.item() + 1e-6))
            m[n], v[n] = 0.9 * m[n] + 0.1 * g, 0.95 * v[n] + 0.05 * g * g
            if p.dim() > 1:
                weights[n] *= 1 - 1e-2 * 0.3
            weights[n] -= 1e-2 * (m[n] / (1 - 0.9 ** (step + 1))) / ((v[n] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-8)
    result = train.train(model, c)
    for n, p in model.named_parameters():
        assert (p.double() - weights[n]).norm() < 1e-3 * (weights[n] - dict(tiny().named_parameters())[n].double()).norm(), n  # of the way it went
    assert list(losses(c.out_dir).values()) == pytest.approx(logged, rel=1e-5)
    sums = [0, 0]
    val = data.Dataset(text_data).val
    count = int(val.count(16).sum())
    for i in (j * count // 4 for j in range(4)):  # eval_iters=2 of 2 windows, evenly spaced
        x, y = map(torch.from_numpy, val.window(i, 16))
        sums[0] += torch.nn.functional.cross_entropy(model(x[None])[0], y, ignore_index=-1, reduction="sum").item()
        sums[1] += int((y >= 0).sum())
    assert result["val_loss"] == pytest.approx(sums[0] / sums[1], rel=1e-5) and result["step"] == 2
    assert result["val_bits_per_byte"] == pytest.approx(result["val_loss"] / 0.693147, rel=1e-5)  # bytes: a token is a byte


def test_schedules():
    rate = lambda step, **o: train.learning_rate(train.TrainConfig(learning_rate=1.0, max_iters=100, warmup_iters=10, **o), step)  # noqa: E731
    assert rate(0) == pytest.approx(1 / 11) and rate(9) == pytest.approx(10 / 11) and rate(10) == rate(50) == rate(63) == 1.0
    assert rate(82) == pytest.approx(0.5) and rate(99, min_lr=0.1) == pytest.approx(0.1 + 0.9 * (1 - (89 / 90 - 0.6) / 0.4))
    assert rate(55, lr_schedule="cosine", min_lr=0.2) == pytest.approx(0.6) and rate(99, lr_schedule="constant") == 1.0


@pytest.mark.parametrize("pos", ["rope", "t5", "learned"])
def test_optimizers_hold_every_parameter_once(pos):
    for tied in (True, False):
        model = tiny(pos=pos, qk_norm=True, tied=tied)
        for kind in ("adamw", "muon"):
            groups = [g for o in train.make_optimizers(model, train.TrainConfig(optimizer=kind)) for g in o.param_groups]
            assert sorted(id(p) for g in groups for p in g["params"]) == sorted(map(id, model.parameters()))
            undecayed = {id(p) for g in groups if not g["weight_decay"] for p in g["params"]}
            assert undecayed == {id(p) for n, p in model.named_parameters() if p.dim() < 2 or n.startswith("pos.")}


@pytest.mark.parametrize("settings", [[], ["--optimizer=muon", "--pos=t5", "--dropout=0.2"], ["--dtype=bfloat16", "--pos=learned"], ["--dtype=float16", "--lr_schedule=cosine"]], ids=" ".join)
def test_resume_gives_the_same_bits(settings, run, text_data, tmp_path):
    """The newest checkpoint lost and the log cut short, then resumed (promise 2), in every kind of state there is."""
    words = ["train.py", *TINY, f"--dataset={text_data}", *settings]
    assert run(*words, f"--out_dir={tmp_path}/a").returncode == 0
    whole = tmp_path / "a"
    part = tmp_path / "b"
    part.mkdir()
    assert run(*words, f"--out_dir={part}").returncode == 0
    import shutil
    shutil.rmtree(steps(part)[-1])  # as if the machine had died between step 4 and step 8
    (part / "log.jsonl").write_text((part / "log.jsonl").read_text() + '{"step": 8, "lo')  # and in the middle of a line
    done = run(*words, f"--out_dir={part}", "--init_from=resume")
    assert done.returncode == 0, done.stderr
    same_bits(whole, part)
    again = run(*words, f"--out_dir={part}", "--init_from=resume")  # nothing left to do: nothing changes
    assert again.returncode == 0
    same_bits(whole, part)


def start(*words, processes=0):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else [sys.executable]
    return subprocess.Popen([*launch, str(ROOT / "train.py"), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def wait_for(condition, process, seconds=120):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end and process.poll() is None, process.communicate()[0] if process.poll() is not None else "too slow"
        time.sleep(0.01)


LONG = [*[w for w in TINY if not w.startswith(("--max_iters", "--eval_interval"))], "--max_iters=300", "--eval_interval=20"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("processes", [0, 2])
def test_signals_save_and_exit(number, processes, text_data, tmp_path):
    """SIGTERM and SIGINT save within a step and exit 0 (promise 5); resuming on one process gives the bits of a run that was left alone."""
    if processes and number == signal.SIGINT:
        pytest.skip("torchrun turns SIGINT into an error of its own after passing it on")
    words = [*LONG, f"--dataset={text_data}", "--gradient_accumulation_steps=2", f"--out_dir={tmp_path}/run"]
    process = start(*words, processes=processes)
    log = tmp_path / "run" / "log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("loss") > 30, process)
    at = max(losses(tmp_path / "run"))
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert processes or process.returncode == 0, out
    assert "stopped and saved" in out and (processes or "Traceback" not in out)
    saved = int(steps(tmp_path / "run")[-1].name[5:])
    assert at <= saved <= at + 30 and saved < 300


def test_a_signal_during_evaluation(run, text_data, tmp_path):
    """It is cut short, the step saved without it, and taken up again on resume."""
    words = [*LONG[:-2], "--max_iters=6", "--eval_interval=3", "--eval_iters=0", "--batch_size=1", f"--dataset={text_data}"]
    process = start(*words, f"--out_dir={tmp_path}/b")
    wait_for(lambda: (tmp_path / "b" / "log.jsonl").exists(), process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    meta = json.loads((steps(tmp_path / "b")[-1] / "meta.json").read_text())
    assert meta["step"] == 0 and meta["val_loss"] is None and "val_loss" not in (tmp_path / "b" / "log.jsonl").read_text()
    assert run("train.py", *words, f"--out_dir={tmp_path}/b", "--init_from=resume").returncode == 0
    assert run("train.py", *words, f"--out_dir={tmp_path}/a").returncode == 0
    same_bits(tmp_path / "a", tmp_path / "b")


def test_kill_nine_and_resume(run, text_data, tmp_path):
    """Killed at twelve moments, in training and in saving, then resumed each time: the bits of an undisturbed run (promises 1, 2, 7)."""
    import random
    words = [*[w for w in TINY if not w.startswith(("--max_iters", "--eval_interval"))], "--max_iters=600", "--eval_interval=2", f"--dataset={text_data}"]
    assert run("train.py", *words, f"--out_dir={tmp_path}/a").returncode == 0
    seed = random.randrange(10**6)
    print("seed", seed)
    draw, killed, b = random.Random(seed), 0, tmp_path / "b"
    while killed < 12:
        at = steps(b)[-1].name if b.exists() and steps(b) else None
        process = start(*words, f"--out_dir={b}", *(["--init_from=resume"] if b.exists() else []))
        wait_for(lambda: process.poll() is not None or b.exists() and steps(b) and steps(b)[-1].name != at, process) if killed % 3 else time.sleep(draw.uniform(1, 2.5))
        time.sleep(draw.uniform(0, 0.04))
        killed += process.poll() is None
        process.kill()
        out = process.communicate()[0]
        assert "Traceback" not in out and "error" not in out, out
        assert not steps(b) or int(steps(b)[-1].name[5:]) < 600, f"the run was over after {killed} kills"
    assert run("train.py", *words, f"--out_dir={b}", "--init_from=resume").returncode == 0
    same_bits(tmp_path / "a", b)
    assert not list(b.glob(".tmp*")) and len(steps(b)) <= 3


@pytest.mark.parametrize("optimizer,limit", [("adamw", 1e-5), ("muon", 1e-3)])
def test_two_processes_train_as_one(optimizer, limit, run, text_data, tmp_path):
    """The same batches, and losses that agree over 50 steps (promise 3); validation is shared out and agrees too."""
    words = ["train.py", *[w for w in TINY if "max_iters" not in w and "eval_i" not in w], "--max_iters=50", "--eval_interval=25", "--eval_iters=5", "--gradient_accumulation_steps=4", f"--dataset={text_data}",
             f"--optimizer={optimizer}"]
    assert run(*words, f"--out_dir={tmp_path}/one").returncode == 0
    done = run(*words, f"--out_dir={tmp_path}/two", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 50 and one.keys() == two.keys() and max(abs(one[s] - two[s]) for s in one) < limit
    one, two = ([r["val_loss"] for r in rows(tmp_path / n) if "val_loss" in r] for n in ("one", "two"))
    assert len(one) == 3 and one == pytest.approx(two, abs=10 * limit)
    refused = run(*words, "--gradient_accumulation_steps=3", f"--out_dir={tmp_path}/three", processes=2)
    assert refused.returncode and "multiple of 2" in refused.stderr and refused.stderr.count("error: ") == 1


@pytest.mark.parametrize("where", ["loss", "gradient", "validation"])
def test_nothing_non_finite_is_kept(where, cfg, monkeypatch):
    """A NaN in loss or gradient stops the run before the update and names the iteration; weights and disk keep the last good state (promise 4)."""
    model, c, calls = tiny(), cfg(max_iters=6), []
    weights = []
    real = GPT.forward

    def forward(self, *a, **k):
        out = real(self, *a, **k)
        calls.append(self.training)
        if where == "validation" and not self.training and sum(calls) == 2:
            return out * float("nan")
        if self.training and len([t for t in calls if t]) == 4:
            weights.extend(p.detach().clone() for p in self.parameters())
            if where == "loss":
                return out * float("inf")
            if where == "gradient":
                out.register_hook(lambda g: g * float("nan"))
        return out
    monkeypatch.setattr(GPT, "forward", forward)
    with pytest.raises(FloatingPointError, match="step 2" if where == "validation" else "iteration 4 .*micro-batches 3 to 3"):
        train.train(model, c)
    assert all(p.isfinite().all() for p in model.parameters())
    if weights:
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
    kept = steps(c.out_dir)
    assert [p.name for p in kept] == (["step-000000"] if where == "validation" else ["step-000000", "step-000002"])
    assert GPT.load(c.out_dir).meta["step"] == int(kept[-1].name[5:]) and "NaN" not in (Path(c.out_dir) / "log.jsonl").read_text()


def test_float16_skips_an_overflow(cfg, monkeypatch):
    """With float16 an overflowing gradient halves the scale and skips the update instead of ending the run."""
    model, c, calls, before = tiny(), cfg(dtype="float16", max_iters=3), [], []
    real = GPT.forward

    def forward(self, *a, **k):
        out = real(self, *a, **k)
        if self.training:
            calls.append([p.detach().clone() for p in self.parameters()])
            if len(calls) == 2:
                out.register_hook(lambda g: g * float("inf"))
        return out
    monkeypatch.setattr(GPT, "forward", forward)
    train.train(model, c)
    same = lambda a, b: all(torch.equal(x, y) for x, y in zip(a, b))  # noqa: E731
    assert not same(calls[0], calls[1]) and same(calls[1], calls[2]) and not same(calls[2], list(model.parameters()))
    assert json.loads((steps(c.out_dir)[-1] / "meta.json").read_text())["scaler"] == [32768.0, 1] and not before


def test_what_is_kept(cfg, monkeypatch):
    """The last two checkpoints and the best; a run folder is not overwritten (promise 6)."""
    model, c = tiny(), cfg(max_iters=12)
    values = iter([5.0, 3.0, 1.0, 2.0, 4.0, 2.5, 2.2])
    monkeypatch.setattr(train, "validate", lambda *a, **k: (next(values), 1, None))
    train.train(model, c)
    assert [p.name for p in steps(c.out_dir)] == ["step-000004", "step-000010", "step-000012"]
    assert GPT.load(c.out_dir, best=True).meta["step"] == 4
    before = sorted(p.stat().st_mtime_ns for p in Path(c.out_dir).rglob("*"))
    with pytest.raises(UserError, match="--init_from=resume.*--out_dir"):
        train.train(tiny(), c)
    assert sorted(p.stat().st_mtime_ns for p in Path(c.out_dir).rglob("*")) == before


def test_the_lock(run, text_data, tmp_path):
    """A second writer is refused while the first lives; a dead one's lock does not bind."""
    words = [*LONG, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    process = start(*words)
    wait_for(lambda: (tmp_path / "run").exists() and steps(tmp_path / "run"), process)
    process.send_signal(signal.SIGSTOP)  # or it might end before the second begins
    second = run("train.py", *words, "--init_from=resume")
    process.send_signal(signal.SIGCONT)
    assert second.returncode == 2 and re.search(rf"process {process.pid} is writing", second.stderr), second.stderr
    process.kill()
    process.communicate()
    assert run("train.py", *words, "--init_from=resume", "--max_iters=2").returncode == 0


def test_resume_knows_its_settings(run, text_data, tmp_path):
    """A contradicting model flag is refused; changed training flags are logged; what is not said stays as it was."""
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    assert run(*words).returncode == 0
    refused = run(*words, "--init_from=resume", "--pos=alibi")
    assert refused.returncode == 2 and "pos=rope" in refused.stderr and "Traceback" not in refused.stderr
    more = run("train.py", f"--out_dir={tmp_path}/run", "--init_from=resume", "--max_iters=12", "--learning_rate=0.001")
    assert more.returncode == 0, more.stderr
    changed = [row["changed"] for row in rows(tmp_path / "run") if "changed" in row]
    assert changed == [{"max_iters": [8, 12], "learning_rate": [0.003, 0.001]}] and max(losses(tmp_path / "run")) == 12
    other = tmp_path / "other"
    other.mkdir()
    import data
    for split in ("train", "val"):
        data.write_tokens(other / f"{split}.bin", [256, *b"other text " * 99], 257)
    (other / "meta.json").write_text((text_data / "meta.json").read_text())
    assert "not those" in run("train.py", f"--out_dir={tmp_path}/run", "--init_from=resume", f"--dataset={other}").stderr


def test_torchrun_restarts_from_the_checkpoint(run, text_data, tmp_path):
    """TORCHELASTIC_RESTART_COUNT > 0 means resume."""
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    assert run(*words).returncode == 0 and run(*words).returncode == 2
    done = run(*words, "--max_iters=10", env={"TORCHELASTIC_RESTART_COUNT": "1"})
    assert done.returncode == 0 and max(losses(tmp_path / "run")) == 10, done.stderr


def test_restarts_need_a_name(text_data, tmp_path, call, monkeypatch):
    """Without one a restart would take an older run of the folder, of another launch without a name, for its own."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "2"}.items():
        monkeypatch.setenv(name, value)  # as torchrun --master_port=29511 --max-restarts=2 has them
    done = call("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}")
    assert done.returncode == 2 and "--rdzv_id=NAME" in done.stderr and not (tmp_path / "run").exists()


def test_train_is_importable_and_returns_its_last_evaluation(cfg):
    c = cfg(eval_iters=0, max_iters=3)
    result = train.train(tiny(pos="alibi", window=8, sinks=2), c)
    assert result["step"] == 3 and result["stopped"] is False and rows(c.out_dir)[-1]["val_loss"] == result["val_loss"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and os.environ.get("RANK") is None
