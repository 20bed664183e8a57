"""The measurements of context extension, the search for factors, and two tables of their own."""

import json
import math
import statistics

import numpy as np
import pytest
import torch
from conftest import TINY, assert_refused
from try_budget import try_words

import data
from experiments import report, reproduce, search
from model import GPT, POSITIONS
from nanolong.losses import loss_by_position
from rope_scaling import METHODS


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Models this small are slower on two."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def seed_run(text_data, tmp_path):
    """The smallest budget's first seed; nothing is trained yet."""
    settings = {"budget": "try", "device": "cpu", "dtype": "float32", "dataset": str(text_data)}
    cfg = reproduce.ReproduceConfig(runs=str(tmp_path), **settings)
    return reproduce.SeedRun(cfg, 1, data.Dataset(text_data))


# -----------------------------------------------------------------------------
# reproduce.py: measuring.


@pytest.mark.slow
def test_all_parts_of_the_smallest_budget(run, text_data, tmp_path):
    """As a script; the same command measures only what is missing, with the same result."""
    words = try_words("reproduce", tmp_path, text=text_data)
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "results/reproduce.md").read_text()
    board = json.loads((tmp_path / "results/reproduce.json").read_text())
    for figure in ("reproduce.png", "needles.png"):
        assert (tmp_path / "results" / figure).read_bytes()[:4] == b"\x89PNG"
    for heading in ("Every method", "Needles", "Where the position is known", "Orderings"):
        assert f"\n## {heading}\n" in text
    assert set(board["methods"][0]) == set(reproduce.VARIANTS)
    assert {r["checkpoint"] for r in board["needles"][0]} == set(reproduce.NEEDLE_VARIANTS)
    assert len(board["claims"]) == 44

    # A measurement that is missing is made again, and it alone.
    file = tmp_path / "runs" / f"try-{text_data.name}-1" / "measured.json"
    measured = json.loads(file.read_text())
    expected = measured["values"].pop("method yarn")
    file.write_text(json.dumps(measured))
    again = run(*words, cwd=tmp_path)
    assert again.returncode == 0
    assert again.stdout.count(f"{file.parent.name}: ") == 1
    assert f"{file.parent.name}: method yarn" in again.stdout
    assert json.loads(file.read_text())["values"]["method yarn"] == expected
    again = json.loads((tmp_path / "results/reproduce.json").read_text())
    assert again["methods"] == board["methods"]
    done = run(*words, "--parts=table", f"--out_dir={tmp_path}/part", cwd=tmp_path)
    assert done.returncode == 0

    measured["key"]["data"] = "other"
    file.write_text(json.dumps(measured))
    assert_refused(run(*words, cwd=tmp_path), "--runs")


def test_methods_are_evaluated_before_and_after_fine_tuning(seed_run):
    """A dynamic method equals the untouched model at the original length; models stay apart."""
    none = seed_run.method_losses("none")
    assert {step: list(none[step]) for step in none} == {
        0: [32, 64, 128, 256],
        2: [128],
        4: [32, 64, 128, 256],
    }
    assert len(none[0][128]) == 2048 // 128
    assert none[4][128] != none[0][128]
    dynamic = seed_run.method_losses("dynamic-yarn")
    assert dynamic[0][32] == none[0][32] and dynamic[0][128] != none[0][128]
    window = seed_run.method_losses("window")
    assert list(window) == [0] and window[0][32] == none[0][32] and window[0][64] != none[0][64]
    pose = seed_run.method_losses("yarn + PoSE")
    yarn = seed_run.method_losses("yarn")
    assert pose[0] == yarn[0] and pose[4] != yarn[4]
    assert seed_run.method_losses("none") == none  # nothing above has changed the model


def test_needles_are_asked_at_every_length_and_depth(seed_run):
    records = seed_run.needle_records("drope")
    cells = [(record["length"], record["depth"]) for record in records]
    depths = [0.0, 0.25, 0.5, 0.75, 1.0, None]
    assert cells == [(n, depth) for n in (24, 48, 72, 96, 144, 192) for depth in depths]
    assert all(0 <= record["accuracy"] <= 1 and record["trials"] == 4 for record in records)


def test_losses_of_sequences_are_evaluates_last_quarter(seed_run, make):
    """Their mean is evaluate.py's loss, for sequences that divide the span."""
    model = make(pos="rope", vocab_size=257)
    for length in (32, 64):
        loss_sum, n_scored = loss_by_position(
            model, seed_run.dataset.val, length, 2048, lengths=(32, 64, 128, 256)
        )
        last_quarter = slice(length * 3 // 4, None)
        expected = float(loss_sum[last_quarter].sum() / n_scored[last_quarter].sum())
        losses = seed_run.last_quarter_losses(model, length)
        assert len(losses) == 2048 // length
        assert statistics.fmean(losses) == pytest.approx(expected, abs=2e-5)


def test_every_scheme_is_tried_with_every_method():
    errors = reproduce.try_methods()
    assert set(errors) == set(POSITIONS)
    assert all(set(row) == set(errors["rope"]) >= set(METHODS) for row in errors.values())
    assert all(not errors["rope"][method] for method in METHODS)
    assert not errors["alibi"]["pi"] and "--method=" in errors["alibi"]["yarn"]
    assert not errors["learned"]["pi"] and errors["learned"]["none"]


# -----------------------------------------------------------------------------
# reproduce.py: claims and the report.


def test_intervals_of_paired_and_unpaired_differences():
    rng = np.random.default_rng(0)
    a = rng.normal(0, 1, 50)
    noise = rng.normal(0, 1, 50)
    claims = reproduce.SeedClaims(1)
    claims.losses("topic", "paired", list(a), list(a + 0.1 + 0.01 * noise), True, below=0)
    claims.losses("topic", "unpaired", list(a), list(a + 0.1), False, below=0)
    paired, unpaired = claims.claims
    differences = -(0.1 + 0.01 * noise)
    assert paired["passed"] and paired["mean"] == pytest.approx(differences.mean())
    standard_error = differences.std(ddof=1) / math.sqrt(50)
    assert paired["half_width"] == pytest.approx(1.96 * standard_error)
    assert not unpaired["passed"] and unpaired["mean"] == pytest.approx(-0.1)
    standard_error = math.sqrt(2 * a.var(ddof=1) / 50)
    assert unpaired["half_width"] == pytest.approx(1.96 * standard_error)


def test_intervals_of_fractions_are_agresti_and_caffos():
    claims = reproduce.SeedClaims(1)
    claims.fractions("topic", "two", 0.9, 64, 0.5, above=0)
    claims.fractions("topic", "one", 1.0, 64, above=0.9)
    two, one = claims.claims
    p, q = (0.9 * 64 + 1) / 66, 33 / 66
    variance = p * (1 - p) / 66 + q * (1 - q) / 66
    assert two["passed"] and two["mean"] == pytest.approx(p - q)
    assert two["half_width"] == pytest.approx(1.96 * math.sqrt(variance))
    p = 65 / 66
    assert one["passed"] and one["mean"] == pytest.approx(p)
    assert one["half_width"] == pytest.approx(1.96 * math.sqrt(p * (1 - p) / 66))


def test_losses_are_judged_by_the_side_that_is_predicted(seed_run):
    """Made-up losses on which every claim on methods passes, and then their negatives."""
    at_target = {"ntk-parts": 1.0, "yarn": 1.1, "ntk": 2.0, "none": 3.0, "pi": 2.5}
    at_original = {"none": 1.0, "ntk": 1.1, "ntk-parts": 1.2, "yarn": 1.25, "pi": 1.6}
    losses = {}
    for name in reproduce.VARIANTS:
        target = at_target.get(name, 2.0)
        original = at_original.get(name, 1.0)
        before = {"32": original, "64": original + 0.01, "128": target, "256": 4.0}
        after = {"32": 1.0, "64": 1.0, "128": 0.9, "256": 3.0}
        losses[name] = {"0": before, "4": after}
    losses["dynamic-yarn"]["0"]["256"] = 3.0
    losses["ntk-lceg"]["4"]["256"] = 2.0

    def judge(sign):
        methods = {}
        for name, curve in losses.items():
            methods[name] = {}
            for step, by_length in curve.items():
                # a little noise that all methods share
                values = {n: [sign * x, sign * x + 1e-4] for n, x in by_length.items()}
                methods[name][step] = values
        parts = {"methods": methods, "needles": None, "probe": None, "heads": None}
        return {claim["text"]: claim["passed"] for claim in reproduce.judge(seed_run, parts)}

    passed = judge(1)
    assert len(passed) == 26 and all(passed.values())
    # Negated, only what is equal, or compared with a bound on the other side, still passes.
    still = {text for text, ok in judge(-1).items() if ok}
    assert still == {
        *(f"dynamic-{name} equals none at 32, to the bit" for name in ("pi", "ntk", "yarn")),
        "ntk-frozen equals none at 32, to the bit",
        "ntk at 64: within 10 % of its perplexity at 32",
    }


def test_needles_and_probes_are_judged_by_the_side_that_is_predicted(seed_run):
    """Made-up measurements on which every claim passes, and then their opposites."""
    accuracy = {"none": 0.1, "ntk": 0.4, "ntk-parts": 0.7, "yarn": 1.0, "nope": 0.9}
    error = {("nope", 0): 10.0, ("nope", 1): 2.0}  # a random guess is 10.7 off

    def judge(opposite):
        needles = []
        for name in reproduce.NEEDLE_VARIANTS:
            for length in reproduce.needle_lengths(48):
                for depth in reproduce.DEPTHS:
                    value = accuracy.get(name, 1.0 if depth == 1 else 0.0)
                    value = 1 - value if opposite else value
                    cell = {"checkpoint": name, "length": length, "depth": depth}
                    needles.append({**cell, "accuracy": value})
        probe = []
        for name in reproduce.PROBED:
            for layer in range(3):
                value = error.get((name, layer), 0.1)
                value = 16 - value if opposite else value
                probe.append({"task": "probe", "checkpoint": name, "layer": layer, "error": value})
        heads = []
        for name in reproduce.MEASURED_HEADS:
            is_short = (name == "alibi") != opposite
            heads.append({"checkpoint": name, "distance": 10.0 if is_short else 20.0})
            if name == "alibi":
                heads[-1]["range"] = 8.0
        found = {"methods": None, "needles": needles, "probe": probe, "heads": heads}
        return {claim["text"]: claim["passed"] for claim in reproduce.judge(seed_run, found)}

    # With this budget's four trials the intervals would be too wide.
    needle = {**seed_run.budget["needle"], "trials": 64}
    seed_run.budget = {**seed_run.budget, "needle": needle}
    passed = judge(opposite=False)
    assert len(passed) == 18 and all(passed.values())
    assert not any(judge(opposite=True).values())


def test_gap_closed_is_zero_untouched_and_one_native():
    def losses(at_target):
        return {"0": dict.fromkeys(("64", "128", "256", "512"), at_target)}

    methods = {"none": losses(3.0), "half": losses(2.0), "native": losses(1.0)}
    board = {
        "methods": [methods, methods],
        "native": [{"256": 1.0}, {"256": 2.0}],
        "budget": {"model": {"block_size": 64}, "tuning_steps": [0, 10]},
    }
    curves = reproduce.MethodCurves(board)
    assert curves.names == ["native", "half", "none"]
    assert curves.gap_closed("none", 0) == [0, 0]
    assert curves.gap_closed("half", 0) == [0.5, 1.0]
    assert curves.gap_closed("native", 0) == [1.0, 2.0]
    assert reproduce.spread([0.5, 1.0], 2) == "0.75 (0.50, 1.00)"
    assert reproduce.spread([0.5]) == "0.500"


# -----------------------------------------------------------------------------
# search.py.


def test_the_search_starts_from_known_methods():
    tables = search.initial_tables(1e4, 16, 64, 4.0)
    assert tables["pi"].tolist() == [4.0] * 8
    plain, _ = METHODS["none"](1e4, 16, 64, 1.0)
    yarn, _ = METHODS["yarn"](1e4, 16, 64, 4.0)  # the frequencies of NTK-by-parts
    assert tables["ntk-parts"] == pytest.approx((plain / yarn).numpy(), abs=0.0051)


def test_evolution_finds_a_hidden_table():
    """All tables are legal, none is judged twice, and the best one is never lost."""
    target = np.array([1.0, 1.0, 1.3, 2.2, 3.1, 4.0, 4.0, 5.0])
    start = list(search.initial_tables(1e4, 16, 64, 4.0).values())
    judged = []

    def distance(table):
        return float(np.abs(table - target).sum())

    def fitness(table):
        assert (np.diff(table) >= 0).all() and table.min() >= 1 and table.max() <= 6
        assert np.allclose(table * 100, np.round(table * 100))
        judged.append(table)
        return distance(table)

    rng = np.random.default_rng(0)
    best, value = search.evolve(start, fitness, 4.0, population=16, rounds=25, rng=rng)
    assert value == distance(best) == min(map(distance, judged))
    assert value < 0.6 * min(map(distance, start))
    assert len({tuple(table) for table in judged}) == len(judged) < 16 * 26


def test_a_searched_table_extends_the_model(call, text_data, tmp_path):
    rope, alibi, longer = tmp_path / "rope", tmp_path / "alibi", tmp_path / "longer"
    train = ["train.py", *TINY, f"--dataset={text_data}"]
    assert call(*train, "--tasks=passkey:0.5", f"--out_dir={rope}").returncode == 0
    assert call(*train, "--pos=alibi", "--max_iters=1", f"--out_dir={alibi}").returncode == 0
    words = ["--factor=2", "--population=4", "--rounds=2", "--trials=4", "--device=cpu"]
    table_file = tmp_path / "factors.json"
    done = call("experiments/search.py", rope, *words, f"--out={table_file}")
    assert done.returncode == 0 and "searched" in done.stdout, done.stderr
    table = json.loads(table_file.read_text())["long_factor"]
    assert len(table) == 8

    words = ["--method=longrope", "--factor=2", f"--options={table_file}", "--max_iters=0"]
    assert call("extend.py", rope, *words, f"--out_dir={longer}").returncode == 0
    before, after = GPT.load(rope).pos, GPT.load(longer).pos
    ratio = before.inv_freq / after.inv_freq
    assert torch.allclose(ratio, torch.tensor(table, dtype=torch.float64))
    expected = math.sqrt(1 + math.log(2) / math.log(32))
    assert after.attention_factor == pytest.approx(expected)

    for words in ((alibi,), (longer,), (rope, "--factor=1"), (), (rope, "--out=x.txt")):
        assert_refused(call("experiments/search.py", *words))


# -----------------------------------------------------------------------------
# nope_tables.py


def test_nope_tables_train_each_length_and_size_once(call, text_data, tmp_path, monkeypatch):
    words = [f"--datasets={text_data}", "--pos=nope,alibi", "--max_tokens=500"]
    words = try_words("papers/nope_tables", tmp_path, *words)
    done = call(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    results = tmp_path / "results/nope.json"
    records = json.loads(results.read_text())["records"]
    runs = sorted((record["pos"], record["length"], record["n_embd"]) for record in records)
    columns = [(8, 64), (16, 32), (16, 64)]
    assert runs == [(pos, *column) for pos in ("alibi", "nope") for column in columns]
    assert all(4 < record["loss"] < 6 for record in records)
    assert "By length" in results.with_suffix(".md").read_text()

    monkeypatch.setattr(report, "train", None)
    assert call(*words).returncode == 0
    assert json.loads(results.read_text())["records"] == records
    assert_refused(call(*words, "--max_tokens=600"), "--runs")
