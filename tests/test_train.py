"""Training: the update, the loop, and its guarantees with real processes and real signals."""

import json
import random
import shutil
import signal
import threading
import time
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
    Operators,
    assert_refused,
    assert_same_bits,
    assert_success,
    logged,
    newest,
    start,
    wait_for,
)

import data
import train
from model import GPT, GPTConfig
from nanolong import validate
from nanolong.errors import UserError
from nanolong.optim import get_lr, make_optimizers
from nanolong.run.folder import list_steps


def last_step(folder):
    """The last step whose training loss is logged."""
    return max(row["step"] for row in logged(folder) if "loss" in row)


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
    parts = [dataset.batch(index, 2, 16, 1337)[:2] for index in indices]
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


def test_the_update_is_adamw_on_the_mean_over_scored_tokens(cfg, text_data):
    """Targets of <bos> are not scored, so micro-batches count by their scored tokens."""
    model = tiny()
    schedule = {"learning_rate": 1e-2, "warmup_iters": 0, "lr_schedule": "constant"}
    steps = {"gradient_accumulation_steps": 3, "max_iters": 2}
    settings = cfg(**schedule, **steps, grad_clip=0.5, weight_decay=0.3)
    weights = {name: p.detach().clone().double() for name, p in model.named_parameters()}
    start = {name: w.clone() for name, w in weights.items()}
    expected = adamw_by_hand(weights, data.Dataset(text_data), 2, 1e-2, 0.3, 0.5)
    train.train(model, settings)
    for name, p in model.named_parameters():
        way = (weights[name] - start[name]).norm()
        assert (p.double() - weights[name]).norm() < 1e-3 * way, name
    assert logged(settings.out_dir, "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("eval_length", [0, 11])
def test_the_validation_loss_is_the_mean_over_evenly_spaced_sequences(
    eval_length, cfg, text_data, tmp_path
):
    model = tiny()
    result = train.train(model, cfg(max_iters=2, eval_length=eval_length))
    split = data.Dataset(text_data).val
    length = eval_length or 16
    available = int(split.n_sequences(length).sum())
    loss_sum = n_tokens = 0
    for i in range(4):  # eval_iters=2 batches of 2 sequences
        x, y = (torch.from_numpy(part) for part in split.sequence(i * available // 4, length))
        logits = model(x[None])[0]
        loss_sum += F.cross_entropy(logits, y, ignore_index=-1, reduction="sum").item()
        n_tokens += int((y >= 0).sum())
    assert result["val_loss"] == pytest.approx(loss_sum / n_tokens, rel=1e-5)
    assert (result["step"], result["stopped"]) == (2, False)
    assert logged(tmp_path / "run")[-1]["val_loss"] == result["val_loss"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    # a token is a byte, and a bit is ln 2 nats
    assert result["val_bits_per_byte"] == pytest.approx(result["val_loss"] / 0.693147, rel=1e-5)


def test_an_evaluation_beyond_the_context_length_is_refused(cfg):
    with pytest.raises(UserError, match="eval_length=17 is beyond the context length: .* 16"):
        train.train(tiny(), cfg(eval_length=17))


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
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pos", ["rope", "t5", "learned"])
def test_optimizers_hold_every_parameter_once(pos, tied, kind):
    model = tiny(pos=pos, qk_norm=True, tie_embeddings=tied)
    optimizers = make_optimizers(model, train.TrainConfig(optimizer=kind))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    held = sorted(id(p) for group in groups for p in group["params"])
    assert held == sorted(map(id, model.parameters()))
    not_decayed = {id(p) for group in groups if not group["weight_decay"] for p in group["params"]}
    expected = set()
    for name, p in model.named_parameters():
        if p.dim() < 2 or name.startswith("pos."):
            expected.add(id(p))
    assert not_decayed == expected


# -----------------------------------------------------------------------------
# The loop: one read a step, batches prepared ahead.


@pytest.mark.parametrize(
    "settings, factor", [({}, 1), ({"random_positions": 99}, 1), ({}, 4)], ids=str
)
def test_a_step_reads_one_value_from_the_device(settings, factor, cfg, monkeypatch):
    """tolist() and item() wait for a GPU; a step calls one of them once, with PoSE too."""
    model = tiny(**settings)
    if factor > 1:
        model.extend("pi", factor)
    # these two read on a CPU only
    monkeypatch.setattr(validate, "check_inputs", lambda *args, **others: None)
    monkeypatch.setattr(GPT, "check_positions", lambda *args: 1)
    reads = []
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def counted(self, *args, original=original):
            if threading.current_thread() is threading.main_thread():
                reads.append(original.__name__)
            return original(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    counts = []
    real = train.forward_backward

    def forward_backward(*args):
        counts.append(len(reads))
        return real(*args)

    monkeypatch.setattr(train, "forward_backward", forward_backward)
    run_settings = cfg(max_iters=6, eval_interval=100, optimizer="muon")
    train.train(model, run_settings, 11, model.config.block_size if factor > 1 else 0)
    per_step = [b - a for a, b in zip(counts[1:], counts[2:], strict=False)]
    assert per_step == [1] * 4


def test_an_error_of_the_prefetch_thread_is_raised_in_its_turn(cfg, monkeypatch):
    """The third micro-batch is bad: two steps are trained and saved, and then it is said."""
    real = data.Dataset.batch

    def batch(self, index, *args):
        if index == 2:
            raise UserError("the third batch is bad: repair it")
        return real(self, index, *args)

    monkeypatch.setattr(data.Dataset, "batch", batch)
    settings = cfg(max_iters=6, eval_interval=2)
    before = threading.active_count()
    with pytest.raises(UserError, match="third batch"):
        train.train(tiny(), settings)
    assert last_step(settings.out_dir) == 2
    assert [step.name for step in list_steps(settings.out_dir)] == ["step-000000", "step-000002"]
    assert threading.active_count() == before


def test_the_sums_of_a_step_are_joined_where_they_are(monkeypatch):
    """A tensor that is made on the CPU and copied to a GPU waits for it."""
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: self.device.type)
    with Operators() as operators:
        sums = torch.zeros(2, dtype=torch.float64, device="meta")
        assert train.reduce_and_read(sums, [15], torch.ones((), device="meta")) == "meta"
    assert all(len({x.device for x in tensors}) <= 1 for _, tensors in operators.calls)


def test_positions_that_a_dataset_makes_are_checked(cfg, monkeypatch):
    real = data.Dataset.batch

    def batch(self, *args):
        x, y, _, docs = real(self, *args)
        return x, y, np.tile(np.arange(11) - 1, (len(x), 1)), docs

    monkeypatch.setattr(data.Dataset, "batch", batch)
    with pytest.raises(UserError, match="must not be negative"):
        train.train(tiny(), cfg(max_iters=1), 11)


# -----------------------------------------------------------------------------
# Out of memory, and the speed.


def out_of_memory(*args):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def test_out_of_memory_names_what_to_lower(call, text_data, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "forward_backward", out_of_memory)
    done = call("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}")
    assert_refused(done, "out of memory: in training lower --batch_size", "--block_size")


def test_other_errors_of_training_keep_their_traceback(cfg, monkeypatch):
    def fail(*args):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(train, "forward_backward", fail)
    with pytest.raises(RuntimeError, match="^shape mismatch$"):
        train.train(tiny(), cfg())


def test_the_first_step_which_compiles_is_not_in_the_speed(cfg, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    seconds = iter([60.0, *[2.0] * 5])

    def forward_backward(*args):
        clock.now += next(seconds)
        return real(*args)

    real = train.forward_backward
    monkeypatch.setattr("nanolong.run.logger.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(train, "forward_backward", forward_backward)
    settings = cfg(max_iters=6, log_interval=3)
    train.train(tiny(), settings)
    assert logged(settings.out_dir, "tokens_per_second") == [16, 16]  # 2 sequences of 16 in 2 s


# -----------------------------------------------------------------------------
# Guarantee 2: resuming gives the same bits.

KINDS_OF_STATE = [
    [],
    ["--optimizer=muon", "--pos=t5", "--dropout=0.2"],
    pytest.param(["--dtype=bfloat16", "--pos=learned"], marks=pytest.mark.slow),
    ["--dtype=float16", "--lr_schedule=cosine"],
]


@pytest.mark.parametrize("settings", KINDS_OF_STATE, ids=" ".join)
def test_resume_is_bit_exact(settings, call, text_data, tmp_path):
    """The newest checkpoint is lost and the log cut short; then the run is resumed."""
    words = ["train.py", *TINY, f"--dataset={text_data}", *settings]
    whole, part = tmp_path / "a", tmp_path / "b"
    part.mkdir()
    assert_success(call(*words, f"--out_dir={whole}"))
    assert_success(call(*words, f"--out_dir={part}"))
    shutil.rmtree(newest(part))  # as if the machine had died between steps 4 and 8
    with open(part / "log.jsonl", "a") as log:
        log.write('{"step": 8, "lo')
    assert_success(call(*words, f"--out_dir={part}", "--init_from=resume"))
    assert_same_bits(whole, part)
    # Nothing is left to do, and nothing changes.
    assert_success(call(*words, f"--out_dir={part}", "--init_from=resume"))
    assert_same_bits(whole, part)


LONG = [*TINY, "--max_iters=300", "--eval_interval=20"]


@pytest.mark.parametrize(
    ("number", "processes"),
    [
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
        (signal.SIGINT, 0),
        (signal.SIGTERM, 2),
    ],
)  # torchrun turns SIGINT into an error of its own after passing it on
def test_signals_save_and_exit(number, processes, text_data, tmp_path):
    """Guarantee 5."""
    words = [*LONG, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    words.append("--gradient_accumulation_steps=2")
    process = start("train.py", *words, processes=processes)
    log = tmp_path / "run" / "log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("loss") > 30, process)
    signalled = last_step(tmp_path / "run")
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert "stopped and saved" in out
    if not processes:
        assert process.returncode == 0, out
        assert "Traceback" not in out
    saved = int(list_steps(tmp_path / "run")[-1].name[5:])
    assert signalled <= saved <= signalled + 30
    assert saved < 300


def test_a_signal_during_an_evaluation_saves_without_it(run, text_data, tmp_path):
    """The evaluation is done on resume."""
    words = [
        *LONG,
        *("--max_iters=3", "--eval_interval=3", "--eval_iters=500", "--batch_size=1"),
        f"--dataset={text_data}",
    ]
    stopped = tmp_path / "b"
    process = start("train.py", *words, f"--out_dir={stopped}")
    log = stopped / "log.jsonl"
    wait_for(lambda: log.exists() and '"step": 3' in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    meta = json.loads((newest(stopped) / "meta.json").read_text())
    assert meta["step"] == 3
    assert meta["val_loss"] is None
    assert log.read_text().count("val_loss") == 1
    assert_success(run("train.py", *words, f"--out_dir={stopped}", "--init_from=resume"))
    assert_success(run("train.py", *words, f"--out_dir={tmp_path}/a"))
    assert_same_bits(tmp_path / "a", stopped)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_the_process(number, text_data, tmp_path):
    """As it ends any: nothing is saved."""
    words = [*TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run", "--eval_iters=0"]
    # a shell has a job in the background ignore it, and so would the child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start("train.py", *words)
    while not process.stdout.readline().startswith("validation: "):
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
    assert not list_steps(tmp_path / "run")


def test_kill_9_and_resume_is_bit_exact(run, text_data, tmp_path):
    """Guarantees 1, 2 and 7: killed in training and in saving, then resumed each time."""
    words = [*TINY, "--max_iters=40", "--eval_interval=2", f"--dataset={text_data}"]
    assert_success(run("train.py", *words, f"--out_dir={tmp_path}/a"))
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    b = tmp_path / "b"
    killed = 0
    while killed < 2:
        newest = list_steps(b)[-1] if list_steps(b) else None
        resume = ["--init_from=resume"] if b.exists() else []
        process = start("train.py", *words, f"--out_dir={b}", *resume)
        if killed % 3 == 0:
            time.sleep(rng.uniform(1, 2.5))
        else:  # about when a checkpoint is saved
            wait_for(lambda: list_steps(b) and list_steps(b)[-1] != newest, process)  # noqa: B023
        time.sleep(rng.uniform(0, 0.04))
        killed += process.poll() is None
        process.kill()
        out = process.communicate()[0]
        assert "Traceback" not in out
        assert "error" not in out
        saved = int(list_steps(b)[-1].name[5:]) if list_steps(b) else 0
        assert saved < 40, f"the run was over after {killed} kills"
    assert_success(run("train.py", *words, f"--out_dir={b}", "--init_from=resume"))
    assert_same_bits(tmp_path / "a", b)
    assert not list(b.glob(".tmp*"))
    assert len(list_steps(b)) <= 3


# -----------------------------------------------------------------------------
# Guarantee 3: the number of processes does not matter.


@pytest.mark.parametrize(
    ("optimizer", "limit"),
    [("adamw", 1e-5), pytest.param("muon", 1e-3, marks=pytest.mark.slow)],
)
def test_two_processes_train_as_one(optimizer, limit, run, text_data, tmp_path):
    words = [
        "train.py",
        *TINY,
        *("--max_iters=50", "--eval_interval=25", "--eval_iters=5"),
        *("--gradient_accumulation_steps=4", f"--dataset={text_data}", f"--optimizer={optimizer}"),
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    assert_success(run(*words, f"--out_dir={one}"))
    assert_success(run(*words, f"--out_dir={two}", processes=2))
    for name, count, factor in (("loss", 50, 1), ("val_loss", 3, 10)):
        assert len(logged(one, name)) == count
        assert logged(one, name) == pytest.approx(logged(two, name), abs=factor * limit, rel=0)


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


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_not_taken(where, cfg, monkeypatch):
    model, settings = tiny(), cfg(max_iters=6)
    weights = []

    def break_loss(model, loss):
        weights.extend(p.detach().clone() for p in model.parameters())
        if where == "loss":
            return loss * float("inf")
        loss.register_hook(lambda grad: grad * float("nan"))
        return loss

    break_forward(monkeypatch, nth_call(4, training=True), break_loss)
    with pytest.raises(FloatingPointError, match=f"{where} of step 4 .*micro-batches 3 to 3"):
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
    assert [step.name for step in list_steps(settings.out_dir)] == ["step-000000"]
    assert "NaN" not in (Path(settings.out_dir) / "log.jsonl").read_text()


def test_float16_skips_a_step_that_overflows(cfg, monkeypatch):
    """The loss scale is halved, and the run goes on."""
    model, settings = tiny(), cfg(dtype="float16", max_iters=3)
    before_step = []
    real = GPT.forward

    def forward(self, *args, **kwargs):
        loss = real(self, *args, **kwargs)
        if self.training:
            before_step.append([p.detach().clone() for p in self.parameters()])
            if len(before_step) == 2:
                loss.register_hook(lambda grad: grad * float("inf"))
        return loss

    def same(a, b):
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    monkeypatch.setattr(GPT, "forward", forward)
    train.train(model, settings)
    assert not same(before_step[0], before_step[1])
    assert same(before_step[1], before_step[2])
    assert not same(before_step[2], model.parameters())
    meta = json.loads((newest(settings.out_dir) / "meta.json").read_text())
    assert meta["scaler"] == [32768.0, 1]


@pytest.mark.slow
def test_a_compiled_run_has_the_same_bits_again(run, text_data, tmp_path):
    """With two threads, which must not add to the embedding's gradient in any order."""
    words = [
        *TINY,
        *("--compile=true", "--batch_size=16", "--block_size=256", "--n_embd=64"),
        f"--dataset={text_data}",
    ]
    environment = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    for name in ("a", "b", "c"):
        done = run("train.py", *words, f"--out_dir={tmp_path}/{name}", env=environment)
        assert done.returncode == 0, done.stderr
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    assert_same_bits(tmp_path / "a", tmp_path / "c")


# -----------------------------------------------------------------------------
# Run folders.


def test_the_last_two_checkpoints_and_the_best_are_kept(cfg, monkeypatch):
    values = iter([5.0, 3.0, 1.0, 2.0, 4.0, 2.5, 2.2])
    monkeypatch.setattr(train, "estimate_loss", lambda *args: {"val_loss": next(values)})
    settings = cfg(max_iters=12)
    train.train(tiny(), settings)
    names = [step.name for step in list_steps(settings.out_dir)]
    assert names == ["step-000004", "step-000010", "step-000012"]
    assert GPT.load(settings.out_dir, best=True).meta["step"] == 4


def test_the_first_lines_say_what_is_trained_and_validated(cfg, text_data, capsys):
    model = tiny(pos="alibi")
    model.extend("pi", 2.0)
    settings = cfg(max_iters=2)
    train.train(model, settings)
    lines = capsys.readouterr().out.splitlines()
    dataset = data.Dataset(text_data, None)
    n = 2 * settings.batch_size * 32
    available = dataset.val.n_sequences(32).sum()
    assert lines[0].startswith("model: alibi, extended by pi x 2, 0.0")
    epochs = f"{n / len(dataset.train):.2g} epochs of {len(dataset.train):,}"
    assert f"training: {n:,} tokens, {epochs}" in lines
    where = f"val.bin of {text_data}"
    assert f"validation: 4 of {available:,} sequences of 32 tokens, {where}" in lines


def test_operations_are_counted_at_the_length_that_is_trained(cfg, capsys):
    """PoSE trains on sequences shorter than the context."""
    model = tiny(block_size=4096)
    train.train(model, cfg(max_iters=1, eval_length=16), train_length=4)
    line = capsys.readouterr().out.splitlines()[0]
    short, full = (f"{model.flops_per_token(n) / 1e6:.1f} MFLOP" for n in (4, 4096))
    assert short != full and short in line


def test_the_time_left_is_that_of_the_steps(cfg, monkeypatch, capsys):
    """Evaluations take 10 s each by this clock, and a step of training 1 s."""
    clock = SimpleNamespace(now=0.0)

    def advance(seconds, result):
        clock.now += seconds
        return result

    monkeypatch.setattr("nanolong.run.logger.time.perf_counter", lambda: clock.now)
    monkeypatch.setattr(train, "estimate_loss", lambda *args: advance(10, {"val_loss": 1.0}))
    real = train.forward_backward
    monkeypatch.setattr(train, "forward_backward", lambda *args: advance(1, real(*args)))
    train.train(tiny(), cfg(max_iters=20, eval_interval=5))
    lines = [line for line in capsys.readouterr().out.splitlines() if "s left" in line]
    left = [line.rpartition(", ")[2] for line in lines[:3]]
    assert left == ["18 s left", "16 s left", "14 s left"]


def test_a_resumed_run_keeps_the_best_of_all_its_evaluations(cfg, monkeypatch):
    """Also if validation has other sequences now."""
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
    assert_refused(refused, "pos.r1 gets no gradient", "--pos=nope")


def test_a_missing_package_for_the_log_is_named_before_any_work(call, text_data, tmp_path):
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    assert_refused(call(*words, "--wandb=project"), "pip install wandb")
    assert not (tmp_path / "run").exists()


def test_resume_checks_and_logs_settings(call, text_data, tmp_path):
    out = tmp_path / "run"
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={out}"]
    assert_success(call(*words))
    assert_refused(call(*words, "--init_from=resume", "--pos=alibi"), "pos=rope")
    # What is not given stays as it was.
    resume = ["train.py", f"--out_dir={out}", "--init_from=resume"]
    assert_success(call(*resume, "--max_iters=12", "--learning_rate=0.001"))
    changed = logged(out, "changed")
    assert changed == [{"learning_rate": [0.003, 0.001], "max_iters": [8, 12]}]
    assert last_step(out) == 12


def test_resume_with_other_data_is_refused(call, text_data, tmp_path):
    out, other = tmp_path / "run", tmp_path / "other"
    words = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={out}"]
    assert_success(call(*words))
    other.mkdir()
    for split in ("train", "val"):
        data.write_tokens(other / f"{split}.bin", [256, *b"other text " * 99], 257)
    (other / "meta.json").write_text((text_data / "meta.json").read_text())
    words = ["train.py", f"--out_dir={out}", "--init_from=resume", "--max_iters=9"]
    refused = call(*words, f"--dataset={other}")
    assert_refused(refused, "is not the data of")


def test_restarts_need_a_name(text_data, tmp_path, call, monkeypatch):
    """Without one, a restart would resume an older nameless run of the folder."""
    environment = "RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 "
    # as `torchrun --master_port=29511 --max-restarts=2` sets them
    environment += "TORCHELASTIC_RUN_ID=none TORCHELASTIC_MAX_RESTARTS=2"
    for word in environment.split():
        monkeypatch.setenv(*word.split("="))
    out = tmp_path / "run"
    done = call("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={out}")
    assert_refused(done, "--rdzv_id=NAME")
    assert not out.exists()
