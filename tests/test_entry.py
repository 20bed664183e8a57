"""Schemes from files: loading them, and using them in every script."""

import contextlib
import shlex
import sys

import pytest
import torch
from conftest import TINY, assert_refused, assert_success

from model import POSITIONS
from nanolong.entry import check_scheme, load_entries, load_entry
from nanolong.errors import UserError

DECAY = """
import torch
from model import NoPE

def falling(n):
    return -torch.arange(n).sqrt()

class Decay(NoPE):
    methods = {"none": ()}

    def bias(self, x, layer, context):
        n = context.n_keys
        return falling(n).expand(self.config.n_head, n)
"""

pytestmark = pytest.mark.usefixtures("entries_do_not_stay")


@pytest.fixture
def entry(tmp_path):
    file = tmp_path / "my decay.py"
    file.write_text(DECAY)
    return file


@pytest.fixture
def call_anew(call):
    """Call a script as in a process of its own."""

    def call_anew(*words):
        POSITIONS.pop("my decay", None)
        return call(*words)

    return call_anew


def test_an_entry_may_be_loaded_twice_and_its_functions_compiled(entry, make, tmp_path):
    assert load_entry(entry, POSITIONS) == "my decay"
    model = make(pos="my decay")
    assert load_entries([entry], POSITIONS) == ["my decay"]
    assert POSITIONS["my decay"] is type(model.scheme)
    tokens = torch.randint(0, 50, (1, 20))
    assert torch.equal(torch.compile(model, backend="eager")(tokens), model(tokens))
    # a file with the name of a module that is in use does not replace it
    for name in ("json", "sys"):
        (tmp_path / f"{name}.py").write_text(DECAY)
        load_entry(tmp_path / f"{name}.py", POSITIONS)
        assert sys.modules[name].__name__ == name and not hasattr(sys.modules[name], "Decay")


def test_an_entry_goes_from_training_to_every_script(entry, call_anew, text_data, tmp_path):
    """The checkpoint names the file, and does not run it by itself."""
    run = tmp_path / "run"
    words = [f"--dataset={text_data}", f"--entry={entry}", "--pos=my decay", f"--out_dir={run}"]
    assert f"--entry={entry}" in assert_success(call_anew("train.py", *TINY, *words)).stdout
    for words in (
        ["sample.py", run],
        ["evaluate.py", run, "--lengths=32", "--max_tokens=64"],
        ["extend.py", run, "--method=none", "--max_iters=0"],
        ["train.py", f"--out_dir={run}", "--init_from=resume", "--max_iters=10"],
        ["sample.py", f"{run}-none4-zero", "--max_new_tokens=3"],
    ):
        assert "damaged" not in assert_refused(call_anew(*words), f"--entry='{entry}'")
        assert_success(call_anew(*words, f"--entry={entry}"))
    # not the folder, which holds a run by now
    again = ["extend.py", run, "--method=none", "--max_iters=0"]
    assert_refused(call_anew(*again), f"--entry='{entry}'")


def test_a_preset_that_wins_over_an_entry_is_named(entry, call_anew, text_data, tmp_path):
    words = [*TINY, "--max_iters=1", f"--dataset={text_data}", f"--out_dir={tmp_path}/run"]
    done = assert_success(call_anew("train.py", *words, f"--entry={entry}", "--pos=alibi"))
    assert "--pos=alibi is trained, and no scheme of --entry" in done.stderr


def test_settings_that_the_scheme_does_not_use_are_noted_once(
    entry, call_anew, text_data, tmp_path
):
    """A scheme names its own; a resumed run has them already."""
    entry.write_text(DECAY.replace("methods", 'settings = ("rope_base",)\n    methods'))
    of_entry = f"--entry='{entry}' --rope_base=5 --p_rope=0.5"
    cases = {
        "--pos=alibi --rope_base=5e5 --n_head=2": {"--pos=alibi does not use --rope_base"},
        "--pos=rope --rope_base=5e5 --p_rope=0.5": set(),
        "--pos=fox-rope --rope_base=5e5": set(),
        "--pos=shaw --rope_fraction=1": set(),  # the default
        of_entry: {"--pos=my decay does not use --p_rope"},
        "--pos=fox --window=9 --sinks=2": {"--pos=fox forgets the --sinks"},
    }
    for number, (words, expected) in enumerate(cases.items()):
        run = [*shlex.split(words), f"--dataset={text_data}", f"--out_dir={tmp_path}/{number}"]
        for more, notes in (("--max_iters=0", expected), ("--init_from=resume", set())):
            if more == "--init_from=resume" and not expected:
                continue
            done = assert_success(call_anew("train.py", *TINY, *run, "--max_iters=1", more))
            found = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
            assert {line.removeprefix("note: ").split(":")[0] for line in found} == notes


def write_scheme(folder, body):
    """The file of a scheme with this body of its class."""
    file = folder / "mine.py"
    file.write_text(f"import torch\nfrom model import NoPE\nclass Mine(NoPE):\n    {body}\n")
    return file


@pytest.mark.parametrize(
    "result",
    [
        "torch.zeros(4, context.n_keys + 1)",  # more distances than keys
        "torch.zeros(4, context.n_keys, dtype=torch.float64)",
        "[0.0] * 4",
        "None",
    ],
)
def test_a_bias_that_attention_cannot_take_is_refused(result, tmp_path, make):
    body = f"def bias(self, x, layer, context): return {result}"
    load_entry(write_scheme(tmp_path, body), POSITIONS)
    refused = pytest.raises(UserError, match=r"Mine.bias\(x, layer, context\) must return None")
    with contextlib.nullcontext() if result == "None" else refused:
        check_scheme(make(pos="mine", n_head=4))


@pytest.mark.parametrize("pos", ["alibi", "t5", "fox"])  # slopes, a table, sums along the text
def test_stacked_queries_need_a_bias_that_is_stacked_alike(pos, make):
    scheme, context = make(pos=pos).scheme, make(pos=pos).make_context(9)
    bias = scheme.bias(torch.randn(1, 9, 32), 0, context)
    q, k, v = (torch.randn(1, heads, 9, 8) for heads in (4, 2, 2))
    pairs = torch.stack((q, -q), 2).flatten(1, 2)
    y = scheme.attend(pairs, k, v, bias.repeat_interleave(2, bias.dim() // 3), 0, context)
    for i, one in enumerate((q, -q)):
        torch.testing.assert_close(y[:, i::2], scheme.attend(one, k, v, bias, 0, context))
    with pytest.raises(UserError, match="8 heads with a bias of 4: stack the bias"):
        scheme.attend(pairs, k, v, bias, 0, context)


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ("def bais(self, n, layer): pass", "bias"),
        ("method = {}", "methods"),
        ("def helper(self): pass", ""),
        ("base = 500_000.0", ""),  # a number is not a misspelt bias()
    ],
)
def test_a_misspelt_hook_is_noted(body, meant, tmp_path, capfd):
    load_entry(write_scheme(tmp_path, body), POSITIONS)
    noted = capfd.readouterr().err
    assert noted.endswith(f"is no hook: did you mean {meant}?\n") if meant else not noted


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (
            "bias(self, n, layer)",
            r"bias\(\) has the arguments \(self, n, layer\): give it \(self, x,",
        ),
        (
            "attend(self, q, k, v, pos, layer, cache, **mask)",
            r"give it \(self, q, k, v, bias, layer",
        ),
        ("angles(self, x, layer, past)", r"the hook angles\(\) went: override rotate\(\)"),
        ("gates(self, x, layer, past)", r"the hook gates\(\) went: override bias\(\)"),
    ],
)
def test_a_hook_of_the_first_edition_is_refused_by_name(hook, problem, tmp_path):
    with pytest.raises(UserError, match=problem):
        load_entry(write_scheme(tmp_path, f"def {hook}: pass"), POSITIONS)
