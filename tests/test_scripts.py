"""The scripts as a user meets them: the path from training to sampling, and the machine."""

import json

import pytest
from conftest import (
    TINY,
    assert_refused,
    assert_success,
    logged,
    newest,
    run_python,
    write_dataset,
)

import data
from model import POSITIONS
from nanolong.run import read_meta

# -----------------------------------------------------------------------------
# The path from training to sampling.


# one of each kind; the others are slow
KINDS = ("rope", "learned", "t5", "shaw", "fox")
EACH = [pytest.param(x, marks=() if x in KINDS else pytest.mark.slow) for x in POSITIONS]


@pytest.mark.parametrize("pos", EACH)
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
    beyond = call("sample.py", out, "--max_new_tokens=60", "--stop_at_eos=false")
    if bounded:
        assert_refused(beyond, "--max_new_tokens=32")
    else:
        assert len(assert_success(beyond).stdout) > 15

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
        assert_refused(refused, f"unknown method of --pos={pos} 'yarn'", method)
    assert_success(call("extend.py", out, f"--method={method}", *words))
    assert_success(call("sample.py", longer, "--max_new_tokens=40"))


def test_bare_token_files_do_not_erase_the_tokenizer(call, save_run, tmp_path):
    spec = data.CharTokenizer("ACGT").to_json()
    run = save_run(meta={"tokenizer": spec, "bos": None}, vocab_size=4)
    meta = {"tokenizer": None, "vocab_size": 4, "bos": None, "bos_default": False}
    bare = write_dataset(tmp_path / "bare", [i * i % 4 for i in range(400)], **meta)
    words = [f"--dataset={bare}", "--learning_rate=1e-3", "--max_iters=1", "--warmup_iters=1"]
    words += ["--factor=2", "--eval_iters=1", f"--out_dir={tmp_path}/longer"]
    assert_success(call("extend.py", run, *words))
    assert read_meta(newest(tmp_path / "longer"))["tokenizer"] == spec


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
    assert "ModuleNotFoundError" in run_python("import triton", env=env).stderr
    longer = tmp_path / "long"
    for words in (
        ["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"],
        ["extend.py", tmp_path / "run", "--max_iters=2", f"--out_dir={longer}"],
        ["evaluate.py", longer, "--lengths=32,64", "--max_tokens=500"],
        ["sample.py", longer, "--max_new_tokens=5"],
    ):
        assert_success(run(*words, env=env))
