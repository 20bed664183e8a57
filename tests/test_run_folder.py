"""Run folders: an old run is renamed and nothing of it removed, and the newest run."""

import shutil
from pathlib import Path

import pytest
from conftest import TINY, assert_refused, assert_success, content

import train
from model import GPT
from nanolong.run.folder import latest_run, list_steps, rename_old


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


def test_a_newest_step_without_its_meta_is_named(words, call):
    """sample.py takes the step before it; training does not, which would write over it."""
    assert_success(call(*words))
    run = words[-1].partition("=")[2]
    (Path(run) / "step-000008/meta.json").unlink()
    sampled = assert_success(call("sample.py", run, "--max_new_tokens=2"))
    assert "note" in sampled.stderr and "step-000008 has no meta.json" in sampled.stderr
    assert "step-000004 is used" in sampled.stderr
    assert_refused(call(*words, "--init_from=resume"), "step-000008 is damaged")


def test_the_newest_run_is_none_that_was_renamed(old_run):
    before = content(old_run)
    assert latest_run(old_run.parent) == old_run
    (old_run.parent / "run.old1").mkdir()
    assert rename_old(old_run) == old_run.parent / "run.old2"
    assert content(old_run.parent / "run.old2") == before
    assert latest_run(old_run.parent) is None


# -----------------------------------------------------------------------------
# The command line.


def test_overwrite_renames_a_run_and_removes_nothing(call, words, tmp_path):
    """With whatever else is in its folder."""
    run = tmp_path / "run"
    assert_success(call(*words, "--max_iters=16", "--eval_interval=2"))
    (run / "notes.txt").write_text("mine")
    before = content(run)
    assert_refused(call(*words, "--pos=alibi"), "--overwrite")
    assert content(run) == before
    done = assert_success(call(*words, "--pos=alibi", "--max_iters=4", "--overwrite"))
    assert f"the run in {run} is {run}.old1 now\n" in done.stdout
    assert content(tmp_path / "run.old1") == before
    assert GPT.load(run).config.pos == "alibi"
    names = ["curve.png", "lock", "log.jsonl", "step-000000", "step-000004"]
    assert sorted(item.name for item in run.iterdir()) == names
    second = content(run)
    assert_success(call(*words, "--overwrite"))
    assert content(tmp_path / "run.old1") == before and content(tmp_path / "run.old2") == second
    # also where there is nothing to rename
    assert_success(call(*words, "--overwrite", f"--out_dir={tmp_path}/new"))


def test_a_start_that_fails_leaves_the_old_run_as_it_was(call, words, tmp_path, monkeypatch):
    run = tmp_path / "run"
    assert_success(call(*words))
    before = content(run)
    failing = ["--overwrite", "--learning_rate=0.1"]

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device", str(run))

    for module, place in ((train, "estimate_loss"), (train.optim, "make_optimizers")):
        with monkeypatch.context() as patch:
            patch.setattr(module, place, fail)
            done = call(*words, *failing)
        assert done.returncode == 2 and "No space left" in done.stderr, place
        assert content(run) == before, place
    refused = call(*words, *failing, "--dataset=nowhere")
    assert refused.returncode == 2 and content(run) == before


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


def test_overwrite_is_refused_where_the_run_is_used(call, words, tmp_path):
    run = tmp_path / "run"
    assert_success(call(*words))
    before = content(run)
    refused = call(*words, "--overwrite", "--init_from=resume")
    assert refused.returncode == 2 and "leave one of them out" in refused.stderr
    extend = ["extend.py", run, "--max_iters=0", "--method=pi", "--factor=2", "--overwrite"]
    refused = call(*extend, f"--out_dir={run}")
    assert refused.returncode == 2 and "which is to be extended" in refused.stderr
    assert content(run) == before

    # An extension may be overwritten, and is named after its options too.
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
