"""Schemes from files: loading them, using them in every script, and the identity of code."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, TINY, assert_refused, assert_success

import data
from model import GPT, POSITIONS
from nanolong.entry import load_entries, load_entry
from nanolong.errors import UserError
from nanolong.run import list_steps, note_other_code, read_meta

DECAY = '''
import torch
from model import NoPE

class Decay(NoPE):
    """Scores fall with the square root of the distance."""
    methods = {"none": ()}

    def bias(self, n, layer):
        return -torch.arange(n).sqrt().expand(self.config.n_head, n)
'''


pytestmark = pytest.mark.usefixtures("entries_do_not_stay")


@pytest.fixture
def entry(tmp_path):
    file = tmp_path / "my decay.py"
    file.write_text(DECAY)
    return file


NO_ENTRIES = [
    ("rope.py", DECAY, "already"),
    ("empty.py", "x = 1", "0 classes"),
    ("two.py", DECAY + "\nclass Second(NoPE):\n    pass\n", "2 classes"),
    ("broken.py", "import nothing_of_that_name", "ModuleNotFoundError"),
    ("wrong.py", "def", "SyntaxError"),
    ("bare.py", DECAY.replace("from model import NoPE", ""), "'NoPE' is not defined.: .* import"),
    ("README.md", "# Not Python", "README.md is no Python file: give the path of one"),
    ("absent.py", None, "absent.py is no Python file: give the path of one"),
]


@pytest.mark.parametrize("name, text, message", NO_ENTRIES)
def test_a_file_that_is_no_entry_is_refused(name, text, message, tmp_path):
    if text:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        load_entry(tmp_path / name, POSITIONS)
    with pytest.raises(UserError, match="is one file: give a list of files"):
        load_entries(str(tmp_path / name), POSITIONS)


def test_an_entry_may_be_loaded_twice_but_not_changed(entry):
    assert load_entry(entry, POSITIONS) == "my decay"
    scheme = POSITIONS["my decay"]
    assert load_entry(entry, POSITIONS) == "my decay" and POSITIONS["my decay"] is scheme
    entry.write_text(DECAY.replace("sqrt", "log1p"))
    with pytest.raises(UserError, match="already"):
        load_entry(entry, POSITIONS)


HELPER = """
import torch
from model import NoPE

def falling(n):
    return -torch.arange(n).sqrt()

class Decay(NoPE):
    def bias(self, n, layer):
        return falling(n).expand(self.config.n_head, n)
"""


def test_an_entry_with_functions_can_be_compiled(make, tmp_path):
    file = tmp_path / "with_function.py"
    file.write_text(HELPER)
    load_entry(file, POSITIONS)
    model = make(pos="with_function")
    tokens = torch.randint(0, 50, (1, 20))
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(tokens), model(tokens))
    # a file with the name of a module that is in use does not replace it
    for name in ("json", "sys"):
        (tmp_path / f"{name}.py").write_text(HELPER)
        load_entry(tmp_path / f"{name}.py", POSITIONS)
        assert sys.modules[name].__name__ == name and not hasattr(sys.modules[name], "Decay")


def test_an_entry_goes_from_training_to_sampling(entry, call, text_data, tmp_path):
    run = tmp_path / "run"

    def call_anew(*words):
        POSITIONS.pop("my decay", None)  # as in a process of its own
        note_other_code.cache_clear()
        return call(*words)

    words = [f"--dataset={text_data}", f"--entry={entry}", "--pos=my decay", f"--out_dir={run}"]
    assert_success(call_anew("train.py", *TINY, *words))
    assert str(entry) in read_meta(list_steps(run)[-1])["code"]

    # The checkpoint names the file, and does not run it by itself.
    for words in (
        ["sample.py", run],
        ["evaluate.py", run, "--lengths=32"],
        ["extend.py", run, "--method=none", "--max_iters=0"],
        ["train.py", f"--out_dir={run}", "--init_from=resume", "--max_iters=10"],
    ):
        assert "damaged" not in assert_refused(call_anew(*words), f"--entry='{entry}'")
        assert_success(call_anew(*words, f"--entry={entry}"))
    words = ["sample.py", f"{run}-none4", f"--entry={entry}", "--max_new_tokens=3"]
    assert_success(call_anew(*words))


PARTIAL = """
from model import RoPE

class Partial(RoPE):
    pass
"""


def test_analyses_and_exports_take_an_entry(call, make, text_data, tmp_path):
    """The scheme is one that a Hugging Face model cannot have, which the export then says."""
    file = tmp_path / "partial.py"
    file.write_text(PARTIAL)
    run = tmp_path / "run"
    load_entry(file, POSITIONS)
    model = make(pos="partial", vocab_size=257)
    model.meta = {"dataset": str(text_data), "bos": 256}
    model.meta["tokenizer"] = data.ByteTokenizer().to_json()
    model.save(run / "step-000001")
    probes = ["--lengths=16", "--probe_steps=1", "--device=cpu"]
    search = ["--factor=2", "--population=4", "--rounds=1", "--trials=4", "--device=cpu"]
    for words in (
        ["experiments/probes.py", run, *probes],
        ["experiments/search.py", run, *search, f"--out={tmp_path}/f.json"],
        ["hf.py", "export", run, tmp_path / "exported"],
    ):
        POSITIONS.pop("partial", None)  # as in a process of its own
        assert_refused(call(*words), f"give --entry={file}")
        done = call(*words, f"--entry={file}")
        if words[0] == "hf.py":
            assert_refused(done, "--pos=partial has no equivalent")
        else:
            assert_success(done)


def test_the_advice_for_a_notebook_loads_the_checkpoint(entry, make, tmp_path):
    """It is Python that can be pasted, with a blank in the file's name."""
    load_entry(entry, POSITIONS)
    make(pos="my decay").save(tmp_path / "run/step-000001")
    POSITIONS.pop("my decay")
    with pytest.raises(UserError) as refused:
        GPT.load(tmp_path / "run")
    (file,) = shlex.split(re.search(r"give --entry=(.*)$", str(refused.value))[1])
    load_entries([file], POSITIONS)
    assert type(GPT.load(tmp_path / "run").pos) is POSITIONS["my decay"]


def test_an_edited_entry_is_named_with_old_weights(entry, call, text_data, tmp_path):
    """In one line, by every script."""
    run = tmp_path / "run"

    def call_anew(*words):
        POSITIONS.pop("my decay", None)  # as in a process of its own
        note_other_code.cache_clear()
        done = assert_success(call(*words, f"--entry={entry}"))
        return done

    call_anew("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={run}")
    trained = read_meta(list_steps(run)[-1])["code"]
    assert not call_anew("sample.py", run, "--max_new_tokens=1").stderr
    entry.write_text(DECAY.replace("sqrt", "log1p"))
    extended = tmp_path / "extended"
    line = "note: my decay.py changed since {} was trained: it may be another model\n"
    for words, used in (
        (["sample.py", run, "--max_new_tokens=1"], run),
        (["evaluate.py", run, "--lengths=32", "--max_tokens=64"], run),
        (["extend.py", run, "--method=none", "--max_iters=0", f"--out_dir={extended}"], run),
        (["sample.py", extended, "--max_new_tokens=1"], extended),
    ):
        assert line.format(list_steps(used)[-1]) in call_anew(*words).stderr, words
    resume = ["train.py", f"--out_dir={run}", "--init_from=resume"]
    step = list_steps(run)[-1]
    done = call_anew(*resume, "--max_iters=10")
    assert done.stderr == line.format(step)
    edited = read_meta(list_steps(run)[-1])["code"]
    assert edited.keys() == trained.keys() and edited != trained
    # these weights were trained with the edited file
    done = call_anew(*resume, "--max_iters=12")
    assert not done.stderr


# -----------------------------------------------------------------------------
# NANOLONG_ENTRY.


def pytest_with_entries(*words, entry):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    environment = {**os.environ, "NANOLONG_ENTRY": entry}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_tests_over_all_schemes_run_on_those_of_files():
    names = ["p_rope", "ssmax", "two_bases"]
    files = ",".join(f"examples/schemes/{name}.py" for name in names)
    selected = ["tests/test_positions.py", "-k", " or ".join(names)]
    done = pytest_with_entries(*selected, entry=files)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 3 * 15


def test_a_file_that_is_no_entry_ends_pytest_with_a_sentence():
    done = pytest_with_entries("tests/test_positions.py", entry="absent.py")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "NANOLONG_ENTRY: --entry=absent.py is no Python file: give the path" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
