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
    "",
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
    pytest.param("--factor=2 --keep_optimizer=true --max_iters=12", marks=slow),
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
    stop = ["--stop_at=8", "--max_iters=12"] if "keep_optimizer" in words else []
    base = ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/base", *stop]
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
    """Killed in training and in saving, then resumed each time."""
    words = ["train.py", *TINY, "--max_iters=40", "--eval_interval=2", f"--dataset={text_data}"]
    assert_success(call(*words, f"--out_dir={tmp_path}/a"))
    b = tmp_path / "b"
    killed = 0
    while killed < 2:
        before = list_steps(b)[-1:]
        process = start(*words, f"--out_dir={b}", "--init_from=auto")
        wait_for(lambda: list_steps(b)[-1:] != before, process)  # noqa: B023
        time.sleep(rng.uniform(0, 0.1))
        killed += process.poll() is None
        process.kill()
        out = process.communicate()[0]
        assert "Traceback" not in out and "error" not in out
        assert newest(b).name < "step-000040", f"the run was over after {killed} kills"
    assert_success(call(*words, f"--out_dir={b}", "--init_from=auto"))
    assert_same_bits(tmp_path / "a", b)
    assert not list(b.glob(".tmp*"))
    assert len(list_steps(b)) <= 3


LONG = [*TINY, "--max_iters=300", "--eval_interval=20", "--gradient_accumulation_steps=2"]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=slow)])
def test_a_signal_in_training_finishes_the_step_and_saves(number, call, text_data, tmp_path):
    words = ["train.py", *LONG, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    # a shell has a job in the background ignore it, and so would the child
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(*words)
    log = tmp_path / "run" / "log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("loss") > 30, process)
    process.send_signal(number)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "stopped and saved" in out and "Traceback" not in out
    saved = int(newest(tmp_path / "run").name[5:])
    assert saved == max(row["step"] for row in logged(tmp_path / "run") if "loss" in row) < 300
    more = [f"--stop_at={saved + 3}", "--init_from=resume"]
    assert_success(call(*words, *more))
    assert_success(call(*words, f"--out_dir={tmp_path}/whole", f"--stop_at={saved + 3}"))
    # the signal's checkpoint has no evaluation in either
    assert_same_bits(tmp_path / "whole", tmp_path / "run")


def test_a_signal_in_an_evaluation_gives_it_up(call, text_data, tmp_path):
    """The checkpoint is written before; the evaluation is done on resume."""
    words = ["train.py", *LONG, "--max_iters=3", "--eval_interval=3", "--eval_iters=500"]
    words += ["--batch_size=1", f"--dataset={text_data}"]
    stopped = tmp_path / "b"
    process = start(*words, f"--out_dir={stopped}")
    wait_for(lambda: (stopped / "step-000003/meta.json").exists(), process)
    process.send_signal(signal.SIGTERM)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0, out
    assert [row["step"] for row in logged(stopped) if "val_loss" in row] == [0]
    assert_success(call(*words, f"--out_dir={stopped}", "--init_from=resume"))
    assert_success(call(*words, f"--out_dir={tmp_path}/a"))
    assert_same_bits(tmp_path / "a", stopped)


@pytest.fixture(params=["train.py", "extend.py"])
def stoppable(request, save_run, text_data, tmp_path):
    """The command of a run in the folder `new`."""
    model = TINY[:4]
    if request.param == "extend.py":
        model = [save_run(), "--factor=2", "--learning_rate=1e-3", "--max_tokens=512"]
    words = [request.param, *model, *TINY[4:], f"--dataset={text_data}"]
    return [*words, f"--out_dir={tmp_path}/new"]


@pytest.mark.parametrize("moment", ["in its batch", "after it"])
def test_a_signal_in_the_last_evaluation_is_followed_by_nothing(
    moment, stoppable, call, tmp_path, monkeypatch
):
    """Not even by the next block of the batch, and not by a sample or a comparison."""
    folder, blocks = tmp_path / "new", []
    forward, evaluation = Block.forward, progress.RunLog.evaluation

    def forward_and_stop(block, *inputs):
        if (folder / "step-000002").exists():
            blocks.append(block)
            if moment == "in its batch" and len(blocks) == 1:
                signal.raise_signal(signal.SIGTERM)
        return forward(block, *inputs)

    def evaluate_and_stop(log, state, metrics):
        evaluation(log, state, metrics)
        if state.step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Block, "forward", forward_and_stop)
    monkeypatch.setattr(progress.RunLog, "evaluation", evaluate_and_stop)
    done = assert_success(call(*stoppable, "--max_iters=2", "--eval_iters=1"))
    assert "stopped and saved" in done.stdout
    assert "a sample" not in done.stdout and "and trained" not in done.stdout
    assert len(blocks) == (1 if moment == "in its batch" else 2)
    evaluated = [row["step"] for row in logged(folder) if "val_loss" in row]
    assert evaluated == ([0] if moment == "in its batch" else [0, 2])


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no such signals")
def test_an_ignored_signal_stays_ignored_and_another_one_saves(stoppable, tmp_path):
    """As under nohup, and from a batch system shortly before the end."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a child has it from its parent
    process = start(*stoppable, "--max_iters=2000", "--eval_interval=2000")
    signal.signal(signal.SIGHUP, before)
    log = tmp_path / "new/log.jsonl"
    wait_for(lambda: log.exists() and log.read_text().count("norm") > 3, process)
    process.send_signal(signal.SIGHUP)
    n = log.read_text().count("norm")
    wait_for(lambda: log.read_text().count("norm") > n + 3, process)
    process.send_signal(signal.SIGUSR1)
    out = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "stopped and saved" in out and "and trained" not in out
    saved = int(newest(tmp_path / "new").name[5:])
    assert n + 3 < saved == logged(tmp_path / "new", "step")[-1] < 2000


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


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="Windows has no such terminals")
def test_neither_output_goes_to_a_terminal_that_closes():
    _, terminal = os.openpty()
    code = "import os; from nanolong import run; run.discard_terminal()"
    command = [sys.executable, "-c", f"{code}; raise SystemExit(os.isatty(1) + 2 * os.isatty(2))"]
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


def test_two_processes_go_on_like_one_with_another_batch_size(call, run, words, tmp_path):
    begin = ["--stop_at=3", "--gradient_accumulation_steps=2", "--eval_interval=100"]
    assert_success(call(*words, *begin))
    shutil.copytree(tmp_path / "run", tmp_path / "two")
    go_on = ["train.py", "--init_from=resume", "--stop_at=6", "--batch_size=3"]
    assert_success(call(*go_on, f"--out_dir={tmp_path}/run"))
    env = {"OMP_NUM_THREADS": "1"}
    assert_success(run(*go_on, f"--out_dir={tmp_path}/two", processes=2, env=env))
    one, two = (logged(tmp_path / name, "loss") for name in ("run", "two"))
    assert len(one) == 6 and one == pytest.approx(two, rel=1e-5)


def test_auto_starts_a_run_or_goes_on(call, words, tmp_path):
    for max_iters in (4, 6):
        assert_success(call(*words, f"--max_iters={max_iters}", "--init_from=auto"))
        assert newest(tmp_path / "run").name == f"step-00000{max_iters}"
    assert logged(tmp_path / "run", "step")[0] == 0


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
    extend = ["extend.py", tmp_path / "run", "--max_iters=2", f"--out_dir={tmp_path}/longer"]
    assert_success(call(*extend))
    refused = call("train.py", f"--out_dir={tmp_path}/longer", "--init_from=resume")
    assert_refused(refused, "resume it by its own command and --init_from=resume")
    refused = call("train.py", f"--out_dir={save_run('imported')}", "--init_from=resume")
    assert_refused(refused, "was not written by training")
