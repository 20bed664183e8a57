"""The scripts as a user meets them: errors in one line, and the path from training to sampling."""

import json
import shutil
import subprocess

import pytest
from conftest import (
    TINY,
    assert_refused,
    assert_same_bits,
    assert_success,
    command_of,
    logged,
    newest,
    run_python,
    write_dataset,
)

from model import POSITIONS
from nanolong.run import read_meta

PNG = b"\x89PNG"


def train_in_a_process(*words):
    command = command_of("train.py", *TINY, *words)
    done = assert_success(subprocess.run(command, capture_output=True, text=True))
    assert "a sample:" in done.stdout


@pytest.fixture(scope="module")
def trained(text_data, tmp_path_factory):
    """The run folder of a tiny RoPE model."""
    out = tmp_path_factory.mktemp("runs") / "rope"
    train_in_a_process(f"--dataset={text_data}", f"--out_dir={out}")
    return out


# -----------------------------------------------------------------------------
# Errors.


# -----------------------------------------------------------------------------
# The path from training to sampling.


@pytest.mark.parametrize("pos", POSITIONS)
def test_every_scheme_goes_from_training_to_sampling(pos, call, text_data, tmp_path):
    """It is evaluated and samples beyond its length, or says in one line why it cannot; it is
    extended by a method of its own.
    """
    out, longer = tmp_path / "run", tmp_path / "longer"
    words = [f"--pos={pos}", "--max_iters=4", f"--dataset={text_data}", f"--out_dir={out}"]
    assert_success(call("train.py", *TINY, *words))
    losses = logged(out, "val_loss")
    assert losses[-1] < losses[0]
    bounded = POSITIONS[pos].bounded
    beyond = call("sample.py", out, "--max_new_tokens=60")
    if bounded:
        assert_refused(beyond, "--max_new_tokens=32")
    else:
        assert len(assert_success(beyond).stdout) > 50

    file = tmp_path / "records.json"
    protocols = "--protocol=chunked,sliding,token-aligned"
    words = ["--lengths=16,96", protocols, "--stride=8", "--max_tokens=480", f"--json={file}"]
    assert_success(call("evaluate.py", out, *words))
    records = json.loads(file.read_text())
    assert [record.get("stride") for record in records] == [None, 8, 8, None, 8, 8]
    assert ["refused" in record for record in records] == [False] * 3 + [bounded] * 3

    method = next(iter(POSITIONS[pos].methods))
    words = ["--factor=2", "--max_iters=2", "--max_tokens=512", f"--out_dir={longer}"]
    if "yarn" not in POSITIONS[pos].methods:
        refused = call("extend.py", out, "--method=yarn", *words)
        assert_refused(refused, f"--pos={pos}", f"--method={method}")
    assert_success(call("extend.py", out, f"--method={method}", *words))
    assert_success(call("sample.py", longer, "--max_new_tokens=40"))


@pytest.mark.parametrize(
    "words",
    [
        "--layer_pattern=WN --window=8 --sinks=2",
        "--random_positions=100",
        "--norm=layernorm --mlp=gelu --bias=all",
    ],
)
def test_the_checkpoint_remembers_the_architecture(words, call, text_data, tmp_path):
    """Resuming, sampling and evaluating need no flags."""
    out = tmp_path / "run"
    flags = [*words.split(), f"--dataset={text_data}", f"--out_dir={out}"]
    assert_success(call("train.py", *TINY, *flags))
    cut = shutil.copytree(out, tmp_path / "cut")
    shutil.rmtree(newest(cut))
    assert_success(call("train.py", f"--out_dir={cut}", "--init_from=resume"))
    assert_same_bits(cut, out)
    assert_success(call("sample.py", out, "--max_new_tokens=50"))
    if words == "--random_positions=100":
        done = call("extend.py", out, "--factor=2", f"--out_dir={tmp_path}/x")
        assert_refused(done, "--random_positions")


# -----------------------------------------------------------------------------
# Which run, and whose tokens.


def write_letters(folder, characters, tokenizer=True):
    """A dataset of these characters; without a tokenizer, bare token files."""
    ids = [i * i % len(characters) for i in range(400)]
    spec = {"kind": "char", "characters": characters, "bos": False} if tokenizer else None
    meta = {"tokenizer": spec, "vocab_size": len(characters), "bos": None, "bos_default": False}
    return write_dataset(folder, ids, ids[:200], **meta)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    """(run folder, dataset) of a model of the letters ACGT, which has no newline to start with."""
    folder = tmp_path_factory.mktemp("letters")
    dataset = write_letters(folder / "acgt", "ACGT")
    train_in_a_process(f"--dataset={dataset}", f"--out_dir={folder}/run")
    return folder / "run", dataset


def test_a_sample_consists_of_the_letters_of_the_text(letters, call):
    done = assert_success(call("sample.py", letters[0], "--max_new_tokens=5"))
    assert set(done.stdout.strip()) <= set("ACGT")


def test_bare_token_files_do_not_erase_the_tokenizer(letters, call, tmp_path):
    run, _ = letters
    bare = write_letters(tmp_path / "bare", "ACGT", tokenizer=False)
    words = [f"--dataset={bare}", "--max_iters=1", "--factor=2", f"--out_dir={tmp_path}/y"]
    assert_success(call("extend.py", run, *words))
    assert read_meta(newest(tmp_path / "y"))["tokenizer"]["characters"] == "ACGT"


# -----------------------------------------------------------------------------
# The machine.


HIDE_TRITON = """
import sys

class Hide:
    def find_spec(self, name, *rest):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named triton")

sys.meta_path.insert(0, Hide())
"""


@pytest.mark.slow
def test_everything_but_the_kernels_works_without_triton(run, text_data, tmp_path):
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(HIDE_TRITON)
    env = {"PYTHONPATH": str(tmp_path / "hide")}
    probe = run_python("import triton", env=env)
    assert "ModuleNotFoundError" in probe.stderr
    longer = tmp_path / "long"
    for words in (
        ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"],
        ["extend.py", tmp_path / "run", "--max_iters=2", f"--out_dir={longer}"],
        ["evaluate.py", longer, "--lengths=32,64", "--max_tokens=500"],
        ["sample.py", longer, "--max_new_tokens=5"],
    ):
        assert_success(run(*words, env=env))
