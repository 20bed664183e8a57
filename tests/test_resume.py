"""A run that was stopped, killed or cut goes on with the same weights, moments and log."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import (
    ROOT,
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    command_of,
    logged,
    newest,
    start,
    wait_for,
    write_dataset,
)
from optimizers import Averaging, Counting, Lion
from safetensors.torch import load_file

import data
from model import GPT, Block
from nanolong import progress
from nanolong.run import list_steps, read_meta

slow = pytest.mark.slow

TRAIN = [
    "--optimizer=muon --pos=t5 --dropout=0.2",
    pytest.param("--dtype=float16 --lr_schedule=cosine", marks=slow),
    pytest.param("--dtype=bfloat16 --pos=learned --block_size=64", marks=slow),
    "--dataset=MIXTURE",
    pytest.param("--compile=true --gradient_accumulation_steps=2", marks=slow),
]
EXTEND = [
    "--method=yarn --factor=4",
    pytest.param("--method=drope --factor=2 --options=scale=fit", marks=slow),
    pytest.param("--pose=true --factor=2", marks=slow),
]


def cut(run):
    """Leave a run as a machine that dies between its last two checkpoints: half a line, too."""
    shutil.rmtree(newest(run))
    with open(run / "log.jsonl", "a") as log:
        log.write('{"step": 8, "lo')


@pytest.mark.parametrize("words", TRAIN)
def test_training_goes_on_with_the_same_bits(words, call, text_data, tmp_path):
    short = shutil.copytree(text_data, tmp_path / "short")
    words = words.replace("MIXTURE", f"{text_data}:0.7,{short}:0.3").split()
    words = ["train.py", *TINY, f"--dataset={text_data}", *words]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert_success(call(*words, f"--out_dir={whole}"))
    assert_success(call(*words, f"--out_dir={part}"))
    cut(part)
    for _ in range(2):  # the second time nothing is left to do, and nothing changes
        assert_success(call(*words, f"--out_dir={part}", "--init_from=resume"))
        assert_same_bits(whole, part)


@pytest.mark.parametrize("words", EXTEND)
def test_extending_goes_on_with_the_same_bits(words, call, text_data, tmp_path):
    base = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/base"]
    assert_success(call(*base))
    words = ["extend.py", tmp_path / "base", "--max_iters=6", "--eval_interval=2", *words.split()]
    words += ["--max_tokens=512"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert_success(call(*words, f"--out_dir={whole}"))
    assert_success(call(*words, f"--out_dir={part}"))
    cut(part)
    assert_success(call(*words, f"--out_dir={part}", "--init_from=auto"))
    assert_same_bits(whole, part)
    done = assert_success(call(*words, f"--out_dir={part}", "--init_from=resume"))
    assert "is finished" in done.stdout
    assert_same_bits(whole, part)


@pytest.mark.parametrize("optimizer", [Averaging, Lion])
def test_whatever_an_optimizer_keeps_goes_on(optimizer, call, text_data, tmp_path, monkeypatch):
    """Tensors of any shape and dtype, and numbers; anything else is refused when it is saved."""
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    words = ["train.py", *TINY, f"--dataset={text_data}"]
    whole, part = tmp_path / "whole", tmp_path / "part"
    for out_dir in (whole, part):
        assert_success(call(*words, f"--out_dir={out_dir}"))
    cut(part)
    assert_success(call(*words, f"--out_dir={part}", "--init_from=resume"))
    assert_same_bits(whole, part)
    numbers = [read_meta(newest(folder))["optimizer_numbers"] for folder in (whole, part)]
    assert numbers[0] == numbers[1] and bool(numbers[0]) == (optimizer is Lion)
    names = {key.rpartition(".")[2] for key in load_file(newest(part) / "optim.safetensors")}
    kept = {Averaging: {"exp_avg", "exp_avg_sq", "step", "ema", "norms", "count"}}
    assert names == kept.get(optimizer, {"exp_avg", "count", "fade"})

    step = optimizer.step

    def keep_a_word(self):
        step(self)
        next(iter(self.state.values()))["word"] = "text"

    monkeypatch.setattr(optimizer, "step", keep_a_word)
    done = call(*words, f"--out_dir={tmp_path}/refused")
    assert_refused(done, f"'word' of {optimizer.__name__}", "keep tensors and numbers")


def test_a_value_of_param_groups_that_a_step_changes_is_refused(call, words, tmp_path, monkeypatch):
    """By name and before anything else is trained, unless the state has it too."""
    monkeypatch.setattr(torch.optim, "AdamW", Counting)
    problem = "Counting sets k=1 in its param_groups"
    assert_refused(call(*words), problem, "keep it in state[parameter]['k']")
    assert logged(tmp_path / "run", "step") == [0]
    monkeypatch.setattr(Counting, "keeps", True)
    assert_success(call(*words, "--overwrite"))


def test_kill_9_and_resume_is_bit_exact(call, rng, text_data, tmp_path):
    """Killed in training or in saving; before each operation on files: test_run_folder.py."""
    words = ["train.py", *TINY, "--max_iters=40", "--eval_interval=2", f"--dataset={text_data}"]
    assert_success(call(*words, f"--out_dir={tmp_path}/a"))
    b = tmp_path / "b"
    words += ["--init_from=auto"]  # a new run at first
    process = start(*words, f"--out_dir={b}")
    wait_for(lambda: list_steps(b), process)
    time.sleep(rng.uniform(0, 0.1))
    process.kill()
    process.communicate()
    assert newest(b).name < "step-000040", "the run was over before"
    assert_success(call(*words, f"--out_dir={b}"))
    assert_same_bits(tmp_path / "a", b)
    assert not list(b.glob(".tmp*"))
    assert len(list_steps(b)) <= 3


LONG = [*TINY, "--max_iters=300", "--eval_interval=20", "--gradient_accumulation_steps=2"]


@pytest.fixture(params=["train.py", "extend.py"])
def stoppable(request, save_run, text_data):
    """The command of a run of two steps."""
    model = TINY[:4]
    if request.param == "extend.py":
        model = [save_run(), "--factor=2", "--learning_rate=1e-3", "--max_tokens=512"]
    words = [request.param, *model, *TINY[4:], f"--dataset={text_data}"]
    return [*words, "--max_iters=2", "--eval_iters=1"]


MOMENTS = {"a step": signal.SIGINT, "an evaluation": signal.SIGTERM, "its end": signal.SIGTERM}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_finishes_the_step_and_saves(moment, stoppable, call, tmp_path, monkeypatch):
    """Nothing follows, not even the next block of an evaluation, a sample or a comparison."""
    folder, in_evaluation, is_sent = tmp_path / "new", [], []
    assert_success(call(*stoppable, f"--out_dir={tmp_path}/whole"))
    forward, evaluation = Block.forward, progress.RunLog.evaluation

    def send():
        if not is_sent:
            is_sent.append(True)
            signal.raise_signal(MOMENTS[moment])

    def forward_and_stop(block, *inputs):
        if moment == "a step" and block.training:
            send()
        if (folder / "step-000002").exists() or is_sent:
            in_evaluation.extend([] if block.training else [block])
            if moment == "an evaluation":
                send()
        return forward(block, *inputs)

    def evaluate_and_stop(log, state, metrics):
        evaluation(log, state, metrics)
        if moment == "its end" and state.step == 2:
            send()

    monkeypatch.setattr(Block, "forward", forward_and_stop)
    monkeypatch.setattr(progress.RunLog, "evaluation", evaluate_and_stop)
    # a shell has a job in the background ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    done = assert_success(call(*stoppable, f"--out_dir={folder}"))
    assert "stopped and saved" in done.stdout
    assert "a sample" not in done.stdout and "and trained" not in done.stdout
    blocks = {"a step": 0, "an evaluation": 1, "its end": 2}
    assert len(in_evaluation) == blocks[moment]
    assert newest(folder).name == ("step-000001" if moment == "a step" else "step-000002")
    evaluated = [row["step"] for row in logged(folder) if "val_loss" in row]
    assert evaluated == ([0, 2] if moment == "its end" else [0])
    assert_success(call(*stoppable, f"--out_dir={folder}", "--init_from=resume"))
    # the checkpoint of a signal has no evaluation in either
    assert_same_bits(tmp_path / "whole", folder)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signals")
def test_an_ignored_signal_stays_ignored_and_another_one_saves(call, words, tmp_path, monkeypatch):
    """As under nohup, and from a batch system shortly before the end."""
    sent = iter([signal.SIGHUP, signal.SIGUSR1])
    forward = Block.forward

    def forward_and_send(block, *inputs):
        if block.training and block.attention.layer == 0:
            signal.raise_signal(next(sent))
        return forward(block, *inputs)

    monkeypatch.setattr(Block, "forward", forward_and_send)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = assert_success(call(*words))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "stopped and saved" in done.stdout
    assert newest(tmp_path / "run").name == "step-000002"


@slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="Windows has no such terminals")
def test_a_closed_terminal_saves(text_data, tmp_path):
    """The process writes to it no more, which would be an error before the checkpoint."""
    import fcntl
    import termios

    master, slave = os.openpty()
    words = command_of("train.py", *LONG, f"--dataset={text_data}", f"--out_dir={tmp_path}/run")
    process = subprocess.Popen(
        words,
        **dict.fromkeys(("stdin", "stdout", "stderr"), slave),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    shown = b""
    while b"step 20:" not in shown:
        shown += os.read(master, 1 << 16)
    os.close(master)
    assert process.wait(60) == 0
    saved = int(newest(tmp_path / "run").name[5:])
    assert 0 < saved == logged(tmp_path / "run", "step")[-1] < 300


HANG_UP = """
import os, signal
from nanolong.run import StopSignals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # if the tests run under nohup
with StopSignals() as stop:
    signal.raise_signal(signal.SIGHUP)
raise SystemExit(os.isatty(1) + 2 * os.isatty(2) + 4 * (not stop))
"""


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="Windows has no such terminals")
def test_neither_output_goes_to_a_terminal_that_closes():
    _, terminal = os.openpty()
    command = [sys.executable, "-c", HANG_UP]
    assert subprocess.run(command, stdout=terminal, stderr=terminal, cwd=ROOT).returncode == 0


@slow
def test_a_signal_before_the_loop_ends_the_process_as_ever(text_data, tmp_path):
    process = start("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run")
    time.sleep(1)  # it imports torch
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM and not (tmp_path / "run").exists()


# -----------------------------------------------------------------------------
# What a run takes over.


@pytest.fixture
def words(text_data, tmp_path):
    return ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]


def test_a_resumed_run_keeps_its_settings_but_for_those_that_are_given(call, words, tmp_path):
    """What `auto` meant, too: dtype and compilation are in meta.json."""
    assert_success(call(*words, "--dtype=auto", "--compile=auto"))
    trained = GPT.load(tmp_path / "run").meta["train"]
    assert trained["dtype"] in ("float32", "bfloat16") and trained["compile"] is False
    assert_refused(call(*words, "--init_from=resume", "--pos=alibi"), "pos=rope", "leave --pos out")
    resume = ["train.py", f"--out_dir={tmp_path}/run", "--init_from=resume"]
    assert_success(call(*resume, "--max_iters=12", "--learning_rate=0.001"))
    again = GPT.load(tmp_path / "run").meta["train"]
    changed = {"max_iters": 12, "learning_rate": 0.001, "init_from": "resume"}
    assert again == {**trained, **changed}
    assert max(row["step"] for row in logged(tmp_path / "run")) == 12


def test_what_a_resumed_run_changes_is_printed_and_logged(call, words, tmp_path):
    """TINY has 8 steps and the peak 0.004; the rates are written out here."""
    assert_success(call(*words, "--warmup_iters=0", "--learning_rate=0.004"))
    resume = ["train.py", f"--out_dir={tmp_path}/run", "--init_from=resume"]
    done = assert_success(call(*resume, "--max_iters=20", "--batch_size=3", "--stop_at=9"))
    # step 8 had 0.004 (1 - (7/8 - 0.6) / 0.4), and step 9 is before the last 40 % of 20
    changes = "batch_size 4 -> 3, max_iters 8 -> 20"
    jump = "so the learning rate goes from 0.00125 to 0.004"
    assert f"\nresumed from step 8; {changes}, {jump}\n" in done.stdout
    row = {"step": 8, "changed": {"batch_size": [4, 3], "max_iters": [8, 20]}}
    assert row in logged(tmp_path / "run") and len(logged(tmp_path / "run", "changed")) == 1
    (tmp_path / "run").rename(tmp_path / "moved")
    resume[1] = f"--out_dir={tmp_path}/moved"
    done = assert_success(call(*resume, "--stop_at=10"))
    assert "\nresumed from step 9\n" in done.stdout
    done = assert_success(call(*resume, "--learning_rate=0.002", "--stop_at=11"))
    assert "\nresumed from step 10; learning_rate 0.004 -> 0.002\n" in done.stdout
    assert len(logged(tmp_path / "moved", "changed")) == 2


@pytest.mark.parametrize("mixed", [False, True])
def test_another_batch_size_goes_on_with_the_next_sequence(
    mixed, call, words, tmp_path, monkeypatch
):
    """Of a text with several epochs in these steps, and of a mixture: each number once."""
    short = write_dataset(tmp_path / "short", list(range(200)) * 4)
    dataset = f"{short}:0.5,{words[-2].partition('=')[2]}:0.5" if mixed else short
    numbers = []
    kind = data.Mixture if mixed else data.Dataset
    training_sequence = kind.training_sequence

    def spied(self, index, *arguments):
        numbers.append(index)
        return training_sequence(self, index, *arguments)

    monkeypatch.setattr(kind, "training_sequence", spied)
    seen = 0
    for stop, batch_size, accumulation in ((3, 4, 1), (5, 6, 2), (8, 2, 1)):
        numbers.clear()
        how = ["--init_from=auto", f"--stop_at={stop}", f"--batch_size={batch_size}"]
        how.append(f"--gradient_accumulation_steps={accumulation}")
        done = assert_success(call(*words, f"--dataset={dataset}", *how))
        steps = {3: 3, 5: 2, 8: 3}[stop]
        n = steps * batch_size * accumulation
        assert mixed or f", {32 * (seen + n):,} tokens (" in done.stdout
        # one micro-batch more is read ahead
        assert numbers == list(range(seen, seen + n + batch_size))
        seen += n
        meta = GPT.load(tmp_path / "run").meta
        assert (meta["sequences"], meta["tokens"]) == (seen, 32 * seen)


def test_a_run_starts_from_the_weights_of_another(call, words, text_data, tmp_path):
    """With a new optimizer and step, on data with its tokens; of an extended model, too."""
    assert_success(call(*words))
    extend = ["extend.py", tmp_path / "run", "--method=yarn", "--factor=2", "--max_iters=0"]
    assert_success(call(*extend, f"--out_dir={tmp_path}/longer"))
    other = shutil.copytree(text_data, tmp_path / "other")
    begin = ["train.py", *TINY[4:], f"--dataset={other}", f"--init_from={tmp_path}/longer"]
    assert_success(call(*begin, f"--out_dir={tmp_path}/new", "--max_iters=2", "--eval_interval=2"))
    model = GPT.load(tmp_path / "new/step-000000")
    source = GPT.load(tmp_path / "longer")
    assert model.config == source.config and model.config.extension["method"] == "yarn"
    for p, expected in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(p, expected)
    assert model.meta["step"] == 0 and model.meta["parent"] == str(source.folder)
    assert newest(tmp_path / "new").name == "step-000002"
    assert_success(call(*begin, "--max_iters=0", cwd=tmp_path))
    assert list_steps(tmp_path / "out/other-rope")


def test_what_cannot_be_resumed_is_refused(call, words, save_run, tmp_path):
    assert_success(call(*words))
    other = write_dataset(tmp_path / "other", [256, *b"other text " * 99])
    resume = ["train.py", f"--out_dir={tmp_path}/run", "--init_from=resume", "--max_iters=9"]
    assert_refused(call(*resume, f"--dataset={other}"), "is not the data of")
    assert_refused(call(*resume, "--optimizer=muon"), "optimizer=adamw, not muon")
    extend = ["extend.py", tmp_path / "run", "--max_iters=1", "--eval_iters=1", "--factor=2"]
    assert_success(call(*extend, "--max_tokens=512", f"--out_dir={tmp_path}/longer"))
    refused = call("train.py", f"--out_dir={tmp_path}/longer", "--init_from=resume")
    assert_refused(refused, "resume it by its own command and --init_from=resume")
    refused = call("train.py", f"--out_dir={save_run('imported')}", "--init_from=resume")
    assert_refused(refused, "was not written by training")
