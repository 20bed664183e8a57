"""nanoLong as a model of lm_eval: its log-likelihoods and texts, on a task of a test's own."""

import json

import pytest
import torch
from conftest import ROOT, assert_success

from model import GPT, POSITIONS
from nanolong.entry import load_entries

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")

ROWS = [
    {"q": "a", "right": " b", "wrong": " cde", "text": "abc"},
    {"q": "the cat sat on", "right": " the mat", "wrong": " a", "text": "x" * 40 + "é"},
    {"q": "x" * 50, "right": " yes", "wrong": " no", "text": "to be or not to be"},
    {"q": "", "right": "one", "wrong": "two", "text": "q"},
]
SCORE = """
task: choose
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{[right, wrong]}}"
doc_to_target: 0
target_delimiter: ""
"""
ROLL = """
task: roll
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}]
"""
WRITE = """
task: write
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{right}}"
generation_kwargs: {until: ["e", "zz"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of three tasks on the same rows."""
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = (
        f"dataset_path: json\ntest_split: test\ndataset_kwargs: {{data_files: {{test: {data}}}}}"
    )
    for name, task in (("choose", SCORE), ("roll", ROLL), ("write", WRITE)):
        (tmp_path / "tasks").mkdir(exist_ok=True)
        (tmp_path / "tasks" / f"{name}.yaml").write_text(f"{source}\n{task}")
    return tmp_path / "tasks"


@pytest.fixture
def evaluate(call, tasks, tmp_path):
    """Run lm_eval's command line: what it ends with, and by task the results of each row."""

    def evaluate(model, arguments, names="choose,roll,write", *more):
        folder = tmp_path / f"results-{model}"
        words = f"--model {model} --model_args {arguments} --tasks {names} --include_path {tasks}"
        words += f" --batch_size 3 --log_samples --output_path {folder}"
        done = call("evaluate.py", "lm_eval", *words.split(), *more)
        results = {}
        for file in sorted(folder.rglob("samples_*.jsonl")):
            rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda r: r["doc_id"])
            results[file.name.split("_")[1]] = [row["filtered_resps"] for row in rows]
        return done, results

    return evaluate


def log_probability(model, ids, n):
    """The log-probability of the last n ids in float64, of no more context than a model has, and
    whether each is the most likely one.
    """
    ids = torch.tensor(ids[-model.config.max_positions - 1 :])
    with torch.no_grad():
        logits = model.double()(ids[None, :-1])[0].log_softmax(-1)[-n:]
    targets = ids[-n:]
    total = logits.gather(1, targets[:, None]).sum().item()
    return total, bool((logits.argmax(-1) == targets).all())


def numbers(results):
    """Pairs (log-likelihood, whether it is greedy) as lm_eval writes them, which is as text."""
    return [(float(value), str(greedy) == "True") for value, greedy in results]


@pytest.mark.parametrize("pos, words", [("rope", ""), ("fox", ""), ("p_rope", ",entry=ENTRY")])
def test_lm_eval_gets_the_models_probabilities_and_texts(
    pos, words, evaluate, save_run, entries_do_not_stay
):
    """Of texts of unequal length in one batch, longer than the context, empty, and not ASCII."""
    entry = ROOT / "examples/schemes/p_rope.py"
    load_entries([entry] if words else [], POSITIONS)
    folder = save_run(pos=pos)
    arguments = f"run={folder},dtype=float32{words.replace('ENTRY', str(entry))}"
    done, results = evaluate("nanolong", arguments)
    assert_success(done)
    assert "|choose" in done.stdout

    model = GPT.load(folder)
    for row, choices in zip(ROWS, results["choose"], strict=True):
        for text, found in zip((row["right"], row["wrong"]), numbers(choices), strict=True):
            ids = [256, *(row["q"] + text).encode()]
            expected = log_probability(model, ids, len(text))
            assert found == (pytest.approx(expected[0], abs=1e-3), expected[1])
    for row, found in zip(ROWS, results["roll"], strict=True):
        ids = list(row["text"].encode())
        # of a longer text the first 24, and the rest with as much context as there is room for
        expected = log_probability(model, [256, *ids[:24]], min(len(ids), 24))[0]
        if ids[24:]:
            expected += log_probability(model, ids[-25:], len(ids) - 24)[0]
        assert float(found[0]) == pytest.approx(expected, abs=1e-3)
    model.float()
    for row, found in zip(ROWS, results["write"], strict=True):
        prompt = [256, *row["q"].encode()][-15:]
        ids = [int(i) for i in model.generate(torch.tensor([prompt]), 9, temperature=0)]
        ids = ids[: ids.index(256)] if 256 in ids else ids
        text = bytes(ids).decode(errors="replace")
        assert found[0] == text.split("e")[0].split("zz")[0]


def test_exported_model_has_the_same_probabilities_in_lm_evals_own_class(
    evaluate, save_run, call, tmp_path
):
    folder = save_run()
    assert_success(call("hf.py", "export", folder, tmp_path / "exported"))
    done, ours = evaluate("nanolong", f"run={folder},dtype=float32", "choose")
    assert_success(done)
    arguments = f"pretrained={tmp_path / 'exported'},dtype=float32,max_length=24"
    done, theirs = evaluate("hf", arguments, "choose", "--device", "cpu")
    assert_success(done)
    for one, other in zip(ours["choose"], theirs["choose"], strict=True):
        for found, expected in zip(numbers(one), numbers(other), strict=True):
            assert found == (pytest.approx(expected[0], abs=1e-3), expected[1])


@pytest.mark.parametrize(
    "arguments, names, more, problem",
    [
        ("dtype=float32", "choose", (), "no checkpoint: give --model_args run=out/NAME"),
        ("run={},best_of=3", "choose", (), "there is no setting 'best_of'"),
        ("run={}", "write", ("--gen_kwargs", "max_gen_toks=24"), "24 new tokens fill the context"),
        ("run={}", "write", ("--apply_chat_template",), "lm_eval cannot write chats of nanoLong"),
        ("run={},max_length=2", "choose", (), "a text of 4 tokens is longer than the context"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(
    arguments, names, more, problem, evaluate, save_run
):
    done, _ = evaluate("nanolong", arguments.format(save_run()), names, *more)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {problem}")
