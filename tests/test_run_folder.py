"""Run folders: replacing a run whole, whatever happens on the way, and the newest run."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
from conftest import TINY, assert_refused, assert_success, content, newest

import train
from model import GPT
from nanolong.errors import UserError
from nanolong.run.folder import (
    check_only_run,
    latest_run,
    list_steps,
    readable_steps,
    run_items,
    set_aside,
    settle_replaced,
)


@pytest.fixture
def words(text_data, tmp_path):
    return ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]


@pytest.fixture
def old_run(tmp_path):
    """A run folder with two checkpoints and a log, made of empty files."""
    run = tmp_path / "run"
    for step in (10, 20):
        (run / f"step-{step:06d}").mkdir(parents=True)
        (run / f"step-{step:06d}/meta.json").write_text(str(step))
    (run / "log.jsonl").write_text("old\n")
    return run


def new_checkpoint(run, step=5):
    (run / "log.jsonl").write_text("new\n")
    (run / f"step-{step:06d}").mkdir()
    (run / f"step-{step:06d}/meta.json").write_text("new")


def test_a_newest_step_without_its_meta_is_named(words, call):
    """sample.py takes the step before it; training does not, which would write over it."""
    assert_success(call(*words))
    run = words[-1].partition("=")[2]
    (Path(run) / "step-000008/meta.json").unlink()
    sampled = assert_success(call("sample.py", run, "--max_new_tokens=2"))
    assert "note" in sampled.stderr and "step-000008 has no meta.json" in sampled.stderr
    assert "step-000004 is used" in sampled.stderr
    assert_refused(call(*words, "--init_from=resume"), "step-000008 is damaged")


# -----------------------------------------------------------------------------
# The files.


def test_the_old_run_is_back_where_the_new_one_has_no_checkpoint(old_run):
    before = content(old_run)
    set_aside(old_run)
    assert not run_items(old_run)
    (old_run / "log.jsonl").write_text("of the new run\n")
    settle_replaced(old_run)
    assert content(old_run) == before and not (old_run / ".replaced").exists()
    settle_replaced(old_run)
    assert content(old_run) == before


def test_the_old_run_goes_with_the_first_checkpoint_of_the_new_one(old_run):
    set_aside(old_run)
    new_checkpoint(old_run)
    settle_replaced(old_run)
    assert content(old_run) == {"log.jsonl": b"new\n", "step-000005/meta.json": b"new"}


def test_a_run_that_is_moved_in_part_is_read_whole(old_run):
    set_aside(old_run)
    (old_run / ".replaced/complete").unlink()
    os.rename(old_run / ".replaced/step-000010", old_run / "step-000010")
    assert [step.name for step in readable_steps(old_run)] == ["step-000010", "step-000020"]


def test_a_new_run_counts_when_it_has_trained_or_is_finished(old_run):
    before = content(old_run)
    set_aside(old_run)
    new_checkpoint(old_run, step=0)
    assert [step.name for step in readable_steps(old_run)] == ["step-000010", "step-000020"]
    settle_replaced(old_run)
    assert content(old_run) == before and readable_steps(old_run) == list_steps(old_run)
    set_aside(old_run)
    new_checkpoint(old_run, step=0)
    settle_replaced(old_run, finished=True)
    assert list(content(old_run)) == ["log.jsonl", "step-000000/meta.json"]


def test_a_crash_at_any_moment_of_replacing_leaves_one_whole_run(old_run, monkeypatch):
    """Every rename, file and folder operation is the last one once; then the next start repairs."""
    before = content(old_run)
    spare = old_run.parent / "spare"
    shutil.copytree(old_run, spare)
    new = {"log.jsonl": b"new\n", "step-000005/meta.json": b"new"}

    class Crash(BaseException):
        pass

    def crashing_after(n):
        count = itertools.count()

        def guard(real):
            def operation(*args, **kwargs):
                if next(count) >= n:
                    raise Crash
                return real(*args, **kwargs)

            return operation

        return guard

    outcomes = []
    for n in range(40):
        shutil.rmtree(old_run)
        shutil.copytree(spare, old_run)
        completed = False
        with monkeypatch.context() as patch:
            guard = crashing_after(n)
            patch.setattr(os, "rename", guard(os.rename))
            for name in ("mkdir", "touch", "unlink", "rmdir"):
                patch.setattr(f"pathlib.Path.{name}", guard(getattr(type(old_run), name)))
            patch.setattr(shutil, "rmtree", guard(shutil.rmtree))
            try:
                set_aside(old_run)
                if n % 2:
                    new_checkpoint(old_run)
                settle_replaced(old_run)
                completed = True
            except Crash:
                pass
        settle_replaced(old_run)
        shutil.rmtree(old_run / ".tmp-replaced", ignore_errors=True)
        found = content(old_run)
        assert found in (before, new), n
        outcomes.append((found == before, completed))
    assert {outcome for outcome, _ in outcomes} == {True, False}
    assert any(completed for _, completed in outcomes)


@pytest.mark.parametrize("name", ["notes.txt", "step-000010/notes.txt", "plots/loss.png"])
def test_a_folder_that_holds_more_than_a_run_is_not_replaced(name, old_run):
    check_only_run(old_run)
    (old_run / name).parent.mkdir(exist_ok=True)
    (old_run / name).write_text("mine")
    with pytest.raises(UserError, match=f"would remove .*{name.split('/')[0]}"):
        check_only_run(old_run)


def test_the_newest_run_is_none_that_is_being_replaced(old_run):
    assert latest_run(old_run.parent) == old_run
    set_aside(old_run)
    assert latest_run(old_run.parent) is None


# -----------------------------------------------------------------------------
# The command line.


def test_overwrite_replaces_a_run_whole(call, words, tmp_path):
    run = tmp_path / "run"
    assert_success(call(*words))
    assert_refused(call(*words, "--pos=alibi"), "--overwrite")
    assert_success(call(*words, "--pos=alibi", "--max_iters=4", "--overwrite"))
    assert [step.name for step in list_steps(run)] == ["step-000000", "step-000004"]
    assert GPT.load(run).config.pos == "alibi"
    names = ["curve.png", "lock", "log.jsonl", "step-000000", "step-000004"]
    assert sorted(item.name for item in run.iterdir()) == names
    # also where there is nothing to replace
    assert_success(call(*words, "--overwrite", f"--out_dir={tmp_path}/new"))


def test_a_start_that_fails_leaves_the_old_run_as_it_was(call, words, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert_success(call(*words))
    before = content(run)
    failing = ["--overwrite", "--learning_rate=0.1"]

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device", str(run))

    for module, place in (
        (train.run, "save"),
        (train, "estimate_loss"),
        (train.optim, "make_optimizers"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, place, fail)
            done = call(*words, *failing)
        assert done.returncode == 2 and "No space left" in done.stderr, place
        assert content(run) == before, place
    refused = call(*words, *failing, "--dataset=nowhere")
    assert refused.returncode == 2 and content(run) == before


def test_after_a_crash_while_replacing_the_old_run_is_read_and_resumed(call, words, tmp_path):
    run = tmp_path / "run"
    assert_success(call(*words, "--learning_rate=1e-4"))
    set_aside(run)
    new_checkpoint(run, step=0)
    assert_success(call("sample.py", run, "--max_new_tokens=2"))
    resumed = call("train.py", f"--out_dir={run}", "--init_from=resume", "--max_iters=9")
    assert resumed.returncode == 0, resumed.stderr
    assert "changed since the checkpoint: max_iters 8 -> 9\n" in resumed.stdout
    assert newest(run).name == "step-000009"


def test_resuming_wins_over_a_preset_that_overwrites(call, words, tmp_path):
    words = ["train.py", "config/debug.toml", *words[1:]]
    assert_success(call(*words))
    assert_success(call(*words, "--init_from=resume", "--max_iters=9"))
    assert '"step": 1,' in (tmp_path / "run/log.jsonl").read_text()


def test_a_preset_that_overwrites_does_so_in_its_own_folder_only(call, words, tmp_path):
    """config/debug.toml names out/debug: a finished run elsewhere is not replaced."""
    assert_success(call(*words))
    before = content(tmp_path / "run")
    assert_refused(call("train.py", "config/debug.toml", *words[1:]), "holds a run already")
    assert content(tmp_path / "run") == before


def test_overwrite_is_refused_where_it_would_lose_something(call, words, text_data, tmp_path):
    run = tmp_path / "run"
    assert_success(call(*words))
    before = content(run)
    refused = call(*words, "--overwrite", "--init_from=resume")
    assert refused.returncode == 2 and "leave one of them out" in refused.stderr
    extend = ["extend.py", run, "--max_iters=0", "--method=pi", "--factor=2", "--overwrite"]
    refused = call(*extend, f"--out_dir={run}")
    assert refused.returncode == 2 and "which is to be extended" in refused.stderr
    (run / "notes.txt").write_text("mine")
    assert_refused(call(*words, "--overwrite"), "notes.txt")
    (run / "notes.txt").unlink()
    assert content(run) == before

    # An extension may be replaced, and is named after its options too.
    for _ in range(2):
        assert_success(call(*extend))
    assert_success(call(*extend, "--max_iters=2"))
    done = call("extend.py", run, "--max_iters=0", "--options=beta_fast=16,ramp=paper")
    assert done.returncode == 0, done.stderr
    assert list_steps(tmp_path / "run-yarn4-beta_fast=16-ramp=paper")
    assert list_steps(tmp_path / "run-pi2")[-1].name == "step-000002"


def test_a_restart_by_torchrun_resumes_and_replaces_nothing(call, words, tmp_path, monkeypatch):
    assert_success(call(*words))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert_success(call(*words, "--max_iters=10", "--overwrite"))
    log = (tmp_path / "run/log.jsonl").read_text()
    assert '"step": 1,' in log and '"step": 10,' in log


def test_a_finished_run_says_so(call, words, tmp_path):
    assert_success(call(*words))
    before = content(tmp_path / "run")
    for more in ([], ["--max_iters=3"], ["--learning_rate=1e-4"]):
        done = assert_success(call(*words, "--init_from=resume", *more))
        assert done.stdout.splitlines() == [
            f"{tmp_path}/run/step-000008 is finished: to train beyond step 8, raise --max_iters"
        ]
        assert content(tmp_path / "run") == before


def test_a_finished_run_is_tidied(call, words, tmp_path):
    """A crash may have come between the last checkpoint and the removal of older ones."""
    run = tmp_path / "run"
    assert_success(call(*words))
    before = content(run)
    shutil.copytree(list_steps(run)[0], run / "step-000001")
    shutil.copytree(list_steps(run)[0], run / ".tmp-step-000003")
    assert_success(call(*words, "--init_from=resume"))
    assert content(run) == before
