"""The runner of experiments: claims, what is refused, what is kept, what is run again."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from boards import make_board
from conftest import ROOT, assert_refused
from filelock import FileLock

from experiments import board, run
from nanolong.errors import UserError

MINE = """
FLAGS = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --batch_size=4 --max_iters=6 \\
    --warmup_iters=2 --eval_iters=1 --log_interval=1"
ARMS = {
    "rope": "train --pos=rope",
    "rope-yarn": ["train --pos=rope", "extend --method=yarn --factor=2 --max_iters=0"],
    "ssmax": "train --entry=ROOT/examples/schemes/ssmax.py",
    "wrong": ["train --pos=alibi", "extend --method=yarn"],
}
EVALUATE = "--lengths=16,32 --protocol=chunked --max_tokens=512"
CLAIMS = "chunked: rope@16 < rope-yarn@32 + ln 2"
""".replace("ROOT", str(ROOT))


@pytest.fixture
def run_mine(call, tmp_path, text_data, entries_do_not_stay):
    """Run an experiment of a user's in a folder of its own. text: of its file."""

    def run_mine(text, *words, dataset=text_data):
        (tmp_path / "mine.py").write_text(text)
        common = [f"--dataset={dataset}", "--seeds=1", "--device=cpu"]
        return call("experiments/run.py", "mine.py", *common, *words, cwd=tmp_path)

    return run_mine


def test_rows_are_what_evaluate_measures(monkeypatch, tmp_path):
    """Needles at each depth and their mean; of repeats the gain by bucket."""
    needle = {"task": "needle", "length": 64, "ids": "a"}
    repeats = {"task": "loss", "protocol": "repeats", "length": 64, "loss": 2.0, "ids": "b"}
    records = [
        {**needle, "depth": 0.0, "accuracy": {"mean": 0.25}, "control": {"mean": 0.0}},
        {**needle, "depth": 1.0, "accuracy": {"mean": 0.75}, "control": {"mean": 0.5}},
        {**needle, "depth": 0.5, "length": 128, "refused": "too long"},
        {**repeats, "bucket": "far", "gain": {"mean": 0.5}},
        {**repeats, "bucket": "beyond", "tokens": 0},
    ]
    (tmp_path / "records.json").write_text(json.dumps(records))
    monkeypatch.setattr(run, "call", lambda *args: None)
    assert run.evaluate(tmp_path, "out/x", []) == [
        ["needle 0", 64, 0.25, "a"],
        ["needle 1", 64, 0.75, "a"],
        ["needle 0.5", 128, "refused", "a"],
        ["repeats far", 64, 0.5, "b"],
        ["needle", 64, 0.5, "a"],
        ["needle control", 64, 0.25, "a"],
    ]
    found = run.measures_of("--protocol=chunked,repeats --lengths=16,64")
    assert {"chunked", "repeats far", "repeats pair far"} < found.keys() and "repeats" not in found


def test_data_are_made_again_when_the_experiment_changes(tmp_path, text_data):
    made = []

    def make_data(b):
        assert not Path(b.data).exists()
        Path(b.data).mkdir()
        made.append(b)

    file = tmp_path / "mine.py"
    b = SimpleNamespace(dataset=str(text_data), data=str(tmp_path / "data"))
    mine = SimpleNamespace(b=b, make_data=make_data, arms={"a": ["train --pos=rope"]}, file=file)
    for text, n in (("A = 1", 1), ("A = 1", 1), ("A = 2", 2)):
        file.write_text(text)
        run.hash_file.cache_clear()  # as in the next process
        run.prepare_data(mine)
        assert len(made) == n


def test_an_experiment_trains_extends_evaluates_and_says_which_arm_failed(
    run_mine, tmp_path, capfd
):
    done = run_mine(MINE)
    assert done.returncode == 1, done.stderr
    saved = json.loads((tmp_path / "out/experiments/mine.json").read_text())
    assert saved["failed"].keys() == {"wrong"} and "yarn" in saved["failed"]["wrong"]
    rows = [row for row in saved["rows"] if row[2] == "chunked"]
    losses = {(arm, n): loss for arm, _, _, n, loss, _ in rows}
    assert losses.keys() == {(a, n) for a in ("rope", "rope-yarn", "ssmax") for n in (16, 32)}
    # YaRN changes nothing but RoPE, and evaluate.py measures the same of the same folder
    assert losses["rope", 16] != losses["rope-yarn", 16]
    trained = (tmp_path / "out/experiments").glob("train-*/step-*/meta.json")
    folder = next(meta for meta in trained if '"pos": "rope"' in meta.read_text()).parent
    words = [folder, "--lengths=16,32", "--protocol=chunked", "--max_tokens=512", "--device=cpu"]
    record = tmp_path / "records.json"
    subprocess.run([sys.executable, ROOT / "evaluate.py", *words, f"--json={record}"], check=True)
    assert json.loads(record.read_text())[0]["loss"] == losses["rope", 16]
    assert run_mine(MINE, "--arms=wrong").returncode == 1  # a report without any number
    report = (tmp_path / "out/experiments/mine.md").read_text()
    assert "- wrong, seed 1:" in report and "[mine.json](mine.json)" in report
    assert run_mine(MINE).returncode == 1
    report = (tmp_path / "out/experiments/mine.md").read_text()
    assert "| wrong | failed: seed 1:" in report and "(a single seed has no interval)" in report
    weights = json.loads((folder / "meta.json").read_text())["checksums"]["model.safetensors"]
    assert ["rope", 1, weights] in saved["weights"]
    assert "--n_embd=16" in saved["flags"] and saved["arms"]["rope"] == ["train --pos=rope"]
    assert saved["folders"]["rope"] == [str(folder.parent.relative_to(tmp_path))]


def test_arms_of_other_tokens_are_not_judged(run_mine, tmp_path, character_data):
    """evaluate.py says the same of the same folders; names of arms may have spaces."""
    other = f"train --pos=rope --dataset={character_data} --max_iters=5"
    text = MINE.replace(
        '"wrong": ["train --pos=alibi", "extend --method=yarn"]', f'"of abc": "{other}"'
    )
    text = text.replace("--lengths=16,32", "--lengths=16").replace(
        "rope-yarn@32 + ln 2", "of abc@16"
    )
    done = run_mine(text, "--seeds=1,2", "--arms=rope,of abc")
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "out/experiments/mine.json").read_text())
    claim = (
        "- chunked: rope@16 < of abc@16: not judged, for the arms were scored on other token ids"
    )
    assert saved["claims"] == [claim] and claim in done.stdout
    assert "Claims: 1 not judged." in done.stdout
    assert (
        "unequal token ids: chunked compares arms within a group only: rope; of abc" in done.stdout
    )
    words = [f"{arm}={tmp_path / saved['folders'][arm][1]}" for arm in ("rope", "of abc")]
    words += ["--lengths=16", "--protocol=chunked", "--max_tokens=512", "--device=cpu"]
    command = [sys.executable, ROOT / "evaluate.py", *words]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    expected = re.findall(r"^unequal (?:steps|trained tokens|training data): .*", output, re.M)
    assert len(expected) == 3 and saved["unequal"] == expected


def test_a_second_seed_runs_only_what_is_new_and_arms_share_commands(run_mine, monkeypatch):
    calls = []
    original = run.call
    monkeypatch.setattr(run, "call", lambda *args: (calls.append(args), original(*args)))
    text = re.sub('    "(ssmax|wrong)".*\n', "", MINE)
    assert run_mine(text).returncode == 0
    assert [script for script, _ in calls] == ["train", "evaluate", "extend", "evaluate"]
    calls.clear()
    assert run_mine(text).returncode == 0 and calls == []
    assert run_mine(text.replace("--max_tokens=512", "--max_tokens=256")).returncode == 0
    assert [script for script, _ in calls] == ["evaluate", "evaluate"]
    calls.clear()
    # --entry adds to the arms that --arms chooses
    entry = f"--entry={ROOT}/examples/schemes/ssmax.py"
    assert run_mine(text, "--seeds=1,2", "--arms=rope", entry).returncode == 0
    assert [script for script, _ in calls] == ["train", "evaluate"] * 3


def test_other_data_is_another_run(run_mine, tmp_path, text_data):
    text = re.sub('    "(rope-yarn|ssmax|wrong)".*\n', "", MINE).replace("CLAIMS", "NOTHING")
    other = tmp_path / "text"
    other.mkdir()
    for file in text_data.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == "train.bin":
            content[-2] ^= 1
        (other / file.name).write_bytes(content)
    for dataset in (text_data, other):
        assert run_mine(text, dataset=dataset).returncode == 0
        run.hash_data.cache_clear()
    assert len(list((tmp_path / "out/experiments").glob("train-*/"))) == 2


def test_code_that_has_changed_is_another_run(tmp_path, monkeypatch):
    patterns = (*run.TRAINING_CODE, *run.EVALUATION_CODE, *run.MEASURING_CODE)
    assert all(list(ROOT.glob(pattern)) for pattern in patterns)  # none has been renamed
    monkeypatch.setattr(run, "ROOT", tmp_path)

    def hash_with(**texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        run.hash_file.cache_clear()
        return run.hash_code("model.py", "t*.py")

    first = hash_with(model="1", train="2")
    assert len({first, hash_with(train="3"), hash_with(model="3"), hash_with(other="1")}) == 3
    assert hash_with(model="1", train="2") == first


@pytest.mark.parametrize(
    "old, new, words, phrase",
    [
        ("", "", ["--arms=rope,ropes"], "unknown arm 'ropes'"),
        ("rope@16 <", "ropes@16 <", [], "there is no arm 'ropes'"),
        ("chunked: rope@16", "chunky: rope@16", [], "there is no measure 'chunky'"),
        ("rope-yarn@32", "rope-yarn@64", [], "64 is not among --lengths"),
        ("+ ln 2", "+ a bit", [], "there is no arm 'a bit'"),
        (" < rope-yarn@32", " = rope-yarn@32", [], "is no claim"),
        ("rope-yarn@32", "rope-yarn@L", [], "state BUDGETS"),
        ("--lengths=16,32", "--lengths=16,2L", [], "in EVALUATE: give numbers"),
        ("", "", ["--budget=gpu"], "unknown budget 'gpu'"),
        ("", "", ["--seeds=1-3"], "or several, as in --seeds=1,2,3"),
        ("ARMS", "ARM", [], "states no ARMS"),
        ('"ssmax"', '"a, b"', [], "arm 'a, b' is a number, or has a comma"),
        ('"ssmax"', '"0.5"', [], "arm '0.5' is a number, or has a comma"),
        ("CLAIMS", "CLAIM", [], "did you mean CLAIMS?"),
        ("ARMS = {", "ARMS = {{", [], "mine.py cannot be run (SyntaxError"),
        ("", "", ["--redraw"], "mine.json, which is not there"),
        ("--log_interval=1", "--log_interval=1 --seed=7", [], "leave it to run.py's --seeds"),
        ("--pos=alibi", "--pos=alibi --seed 7", [], "leave it to run.py's --seeds"),
    ],
)
def test_what_is_unknown_is_refused_before_anything_runs(
    run_mine, tmp_path, old, new, words, phrase
):
    assert_refused(run_mine(MINE.replace(old, new), *words), phrase)
    assert not (tmp_path / "out").exists()


def test_a_stop_in_the_last_step_or_its_evaluation_is_a_stop(run_mine, tmp_path, monkeypatch):
    """The checkpoint is that of the last step then, and the log has no validation loss of it."""
    done = run_mine(MINE, "--arms=rope")
    assert done.returncode == 0
    (log,) = (tmp_path / "out/experiments").glob("train-*/log.jsonl")
    rows = log.read_text().splitlines(keepends=True)
    assert "val_loss" in rows[-1]
    monkeypatch.setattr(run, "call", lambda *_: log.write_text("".join(rows[:-1])))
    with pytest.raises(KeyboardInterrupt):
        run.run(log.parent, "train", None, [])


def test_what_another_process_makes_is_left_to_it(tmp_path):
    with FileLock(tmp_path / ".train-1.lock"), pytest.raises(UserError, match="another run.py"):
        run.run(tmp_path / "train-1", "train", None, [])


# -----------------------------------------------------------------------------
# Values and claims.


def test_the_interval_is_students_t():
    # 4.302653 is the 97.5 % quantile for 2 degrees of freedom
    mean, half_width = board.interval([1.0, 2.0, 4.0])
    assert mean == pytest.approx(7 / 3)
    assert half_width == pytest.approx(4.302653 * math.sqrt(7 / 3) / math.sqrt(3), rel=2e-4)
    assert board.interval([1.0, 3.0])[1] == pytest.approx(12.706, rel=1e-3)
    assert math.isnan(board.interval([1.0])[1])


@pytest.mark.parametrize(
    "values, sign, bound, verdict",
    [
        ([0.9, 1.0, 1.1], ">", 0.5, "pass"),
        ([0.9, 1.0, 1.1], "<", 1.5, "pass"),
        ([0.9, 1.0, 1.1], ">", 0.9, "undecided"),
        ([0.9, 1.0, 1.1], ">", 2.0, "smaller"),
        ([0.9, 1.0, 1.1], "<", 0.0, "contradicted"),
        ([0.9, 1.0, 1.1], "<", 0.5, "contradicted"),
        ([-0.9, -1.0, -1.1], ">", 0.5, "contradicted"),
        ([1.0], ">", 0.5, "not judged (a single seed has no interval)"),
    ],
)
def test_a_claim_passes_with_its_whole_interval(values, sign, bound, verdict):
    assert board.find_verdict(values, sign, bound) == verdict


@pytest.mark.parametrize(
    "values, text",
    [
        ([0.02, 0.9, 0.95], "0.02, 0.90, 0.95"),  # two humps
        ([0.94, 0.96, 0.98], "0.960 ± 0.050"),
        ([0.5, 0.6, 0.55], "0.550 ± 0.124"),
        ([1.02, 0.1, 0.9], "0.673 ± 1.243"),  # no fractions
    ],
)
def test_fractions_of_two_humps_are_printed_by_seed(values, text):
    assert board.format_values(values) == text


def test_sums_are_paired_by_seed_and_numbers_go_into_the_bound():
    values = {1: 1.0, 2: 2.0, 3: 3.0}
    rows = [["rope", seed, "chunked", 64, value] for seed, value in values.items()]
    rows += [["alibi", seed, "chunked", 256, value + 0.5] for seed, value in values.items()]
    rows += [["alibi", 4, "chunked", 256, 99.0], ["nope", 1, "chunked", 64, math.nan]]
    measured = make_board("leaderboard", rows)
    judged = board.judge("chunked: alibi@4L > rope@L + ln 1.5", measured)
    assert judged.endswith(": +0.500 ± 0.000, > 0.4055: pass, on 3 of 4 seeds")
    assert "> -0.5: pass" in board.judge("chunked: rope@64 > -0.5", measured)
    # 0.5 - 0.3 on the left, ln 3 on the right
    judged = board.judge("chunked: alibi@4L - rope@L - 0.3 < nope@L - nope@L + ln 3", measured)
    assert judged is None  # one of them is not finite
    judged = board.judge("chunked: alibi@4L - rope@L - 0.3 < rope@L - alibi@4L + ln 3", measured)
    assert ": +1.000 ± 0.000, < 1.399: pass" in judged
    assert board.judge("chunked: nope@L < rope@L", measured) is None
    assert measured.cell("nope", "chunked", "L") == "not finite"


def test_seeds_of_the_same_weights_are_one_run():
    """Three values, twice the same weights: the interval of two; if all are the same, of none."""
    rows = [["rope", seed, "chunked", 64, value] for seed, value in ((1, 1.0), (2, 3.0), (3, 1.0))]
    rows += [["alibi", seed, "chunked", 64, 2.0] for seed in (1, 2, 3)]
    weights = [["rope", 1, "a"], ["rope", 2, "b"], ["rope", 3, "a"]]
    weights += [["alibi", seed, "c"] for seed in (1, 2, 3)]
    measured = make_board("leaderboard", rows, weights=weights)
    assert measured.cell("rope", "chunked", "64") == "2.000 ± 12.706"
    assert measured.cell("alibi", "chunked", "64") == "2.000"
    assert measured.points("rope", "chunked", ["64"])[0][2] == pytest.approx(12.706, rel=1e-3)
    judged = board.judge("chunked: alibi@64 < 3", measured)
    assert judged.endswith("not judged (a single seed has no interval), on 1 of 3 seeds")
    assert "undecided, on 2 of 3 seeds" in board.judge("chunked: rope@64 < alibi@64", measured)
    assert measured.unequal == [
        "3 seeds of alibi count as 1: the others have equal weights",
        "3 seeds of rope count as 2: the others have equal weights",
    ]


def test_only_arms_of_the_same_tokens_are_compared_by_a_measure():
    """Of a length that one arm lacks nothing is known; what follows from losses goes with them."""
    rows = [["rope", 1, "chunked", 64, 1.0, "x"], ["rope", 1, "chunked", 256, 2.0, "y"]]
    rows += [["alibi", 1, "chunked", 64, 1.5, "x"], ["nope", 1, "chunked", 64, 9.0, "z"]]
    rows += [[arm, 1, "niah nats", 64, 3.0, "w"] for arm in ("rope", "nope")]
    rows += [
        [arm, 1, name, 0, 4.0] for arm in ("rope", "alibi", "nope") for name in ("gap", "seconds")
    ]
    measured = make_board("leaderboard", rows)
    alike = {
        (second, measure): measured.scored_alike(["rope", second], measure)
        for second in ("alibi", "nope")
        for measure in ("chunked", "niah nats", "gap", "seconds")
    }
    assert [pair for pair, same in alike.items() if not same] == [
        ("nope", "chunked"),
        ("nope", "gap"),
    ]
    assert "not judged, for" in board.judge("chunked: nope@64 > rope@256", measured)
    assert measured.other_tokens("niah nats") == []


def test_a_figure_marks_the_training_length_and_shows_curves_that_coincide(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(board.figures, "save", lambda figure, file: shown.append(figure))
    lengths = (64, 256, 512, 2048)
    rows = [[arm, 1, "last-quarter", n, 1.25] for arm in ("rope", "alibi") for n in lengths]
    rows += [["nope", 1, "last-quarter", n, n / 64] for n in lengths]
    measured = make_board("leaderboard", rows)
    table = ("Loss", "last-quarter", ["L", "4L", "8L", "32L"])
    board.plot_tables([table], measured, tmp_path / "a.png")
    (axis,) = shown[0].axes
    assert axis.get_ylabel() == "loss (last-quarter), nats per byte"
    assert axis.get_xlabel() == "length of the text, bytes"
    assert {text.get_text() for text in axis.texts} == {"rope", "alibi", "nope"}
    curves = [container[0] for container in axis.containers]
    assert sorted(curve.get_ydata()[-1] for curve in curves) == [1.25, 1.25, 32.0]
    (marked,) = [line for line in axis.lines if line.get_label() == "training length"]
    assert set(marked.get_xdata()) == {64}  # L of the budget
    first, second = (curve for curve in curves if curve.get_ydata()[-1] == 1.25)
    assert first.get_linewidth() > second.get_linewidth() + 0.3
    assert first.get_linestyle() != second.get_linestyle()
    assert board.label_of("distance", {"distance": "tokens"}) == "distance, tokens"
    assert board.label_of("niah accuracy", {}) == "niah accuracy, fraction of prompts"


@pytest.mark.parametrize("name", run.available())
def test_the_claims_of_every_experiment_are_about_what_it_measures(name):
    for budget in ("cpu", "try"):
        experiment = run.load_experiment(name, run.RunConfig(budget=budget))
        run.check_claims(experiment)
        # and its report has no number yet, but the sizes
        report = board.format_report(experiment, make_board(name, [], budget))
        assert experiment.about and any(x.startswith(f"Budget {budget}: `") for x in report)


def test_the_example_of_the_docs_states_an_experiment(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(FLAGS.*?)```", page, re.S)
    assert len(block.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(block)
    experiment = run.load_experiment("mine.py", run.RunConfig())
    run.check_claims(experiment)
    for commands in experiment.arms.values():
        files = re.findall(r"--entry=(\S+)", " ".join(commands))
        assert all((ROOT / file).is_file() for file in files)
