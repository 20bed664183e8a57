"""The evidence: reproduce.py end to end at its smallest, going on after a stop, its judgements; and the search for factors."""
import json
import math
import statistics

import numpy as np
import pytest
import torch

import data
from checkpoint import steps
from conftest import TINY
from experiments import reproduce, search
from model import GPT, STRETCH


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Scripts on models this small are slower on two."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_smallest_budget(run, text_data, tmp_path):
    """All parts from the shell; the same command again measures nothing anew; a part by itself."""
    words = ["experiments/reproduce.py", "--budget=try", f"--dataset={text_data}", f"--runs={tmp_path}/runs", "--device=cpu", f"--out_dir={tmp_path}/results"]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    first = {name: (tmp_path / "results" / name).read_bytes() for name in ("reproduce.md", "reproduce.json", "reproduce.png", "needles.png")}
    text, found = first["reproduce.md"].decode(), json.loads(first["reproduce.json"])
    assert set(found["methods"][0]) == set(reproduce.METHODS) and first["needles.png"][:4] == first["reproduce.png"][:4] == b"\x89PNG"
    for words_of_it in ("## Every method", "### Gap closed", "## Needles", "## Where the position is known", "## How far heads look", "## Which scheme takes which method", "## Orderings", "commit"):
        assert words_of_it in text, words_of_it
    assert {line["number"] for line in found["orderings"]} == {3, 4, 5, 7, 8, 9, 10, 12} and {row["checkpoint"] for row in found["needles"][0]} == set(reproduce.WALL)
    none, dynamic = found["methods"][0]["none"], found["methods"][0]["dynamic-yarn"]
    assert dynamic["0"]["32"] == none["0"]["32"] and set(none) == {"0", "2", "4"} and set(none["0"]) == {"32", "64", "128", "256"} and set(found["methods"][0]["window"]) == {"0"}
    folder = tmp_path / "runs" / f"try-{text_data.name}-1"
    kept = json.loads((folder / "measured.json").read_text())
    gone = kept["values"].pop("method yarn")
    (folder / "measured.json").write_text(json.dumps(kept))
    again = run(*words, cwd=tmp_path)
    assert again.returncode == 0 and again.stdout.count("seed 1: ") == 1 and "method yarn" in again.stdout
    assert json.loads((folder / "measured.json").read_text())["values"]["method yarn"] == gone  # the same to the last digit
    assert json.loads((tmp_path / "results/reproduce.json").read_bytes())["methods"] == found["methods"]
    assert run(*words[:-1], "--parts=table", f"--out_dir={tmp_path}/part", cwd=tmp_path).returncode == 0
    kept["key"]["data"] = "other"
    (folder / "measured.json").write_text(json.dumps(kept))
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2 and "--runs" in done.stderr and len(done.stderr.splitlines()) == 1


def test_judgements():
    """Paired and unpaired intervals, and shares, against the formulas written out; a claim passes only with its whole interval."""
    judge, rng = reproduce.Judge(1), np.random.default_rng(0)
    a, b = rng.normal(0, 1, 50), rng.normal(0, 1, 50)
    judge.pair(3, "paired", list(a), list(a + 0.1 + 0.01 * b), below=0)
    judge.apart(3, "apart", list(a), list(a + 0.1), below=0)
    d = -(0.1 + 0.01 * b)
    assert judge.lines[0]["passed"] and judge.lines[0]["seen"].startswith(f"{d.mean():+.3f} ± {1.96 * d.std(ddof=1) / math.sqrt(50):.3f}")
    assert not judge.lines[1]["passed"] and "not separated" in judge.lines[1]["seen"] and f"± {1.96 * math.sqrt(2 * a.var(ddof=1) / 50):.3f}" in judge.lines[1]["seen"]
    judge.shares(8, "shares", 0.9, 0.5, 64, 64, above=0)
    p, q = (0.9 * 64 + 1) / 66, 33 / 66
    assert judge.lines[2]["passed"] and judge.lines[2]["seen"].startswith(f"{p - q:+.3f} ± {1.96 * math.sqrt(p * (1 - p) / 66 + q * (1 - q) / 66):.3f}")
    judge.shares(8, "certain", 1.0, None, 64, 1, above=0.9)
    judge.add(9, "wrong side", 1.0, 0.1, below=0)
    assert judge.lines[3]["passed"] and not judge.lines[4]["passed"] and "separated" not in judge.lines[4]["seen"]


def test_losses_of_windows(text_data, tmp_path, make, monkeypatch):
    """The last quarter of each window by itself: their mean is evaluate.py's last quarter, of windows that divide the span."""
    import evaluate
    cfg = reproduce.ReproduceConfig(budget="try", runs=str(tmp_path), device="cpu", dtype="float32", dataset=str(text_data))
    seed, model = reproduce.Seed(cfg, 1, data.Dataset(text_data)), make(pos="rope", vocab_size=257)
    for n in (32, 64):
        nats, tokens = evaluate.loss_by_position(model, seed.dataset.val, n, 2048)
        mine = seed.losses(model, n)
        assert len(mine) == 2048 // n and statistics.fmean(mine) == pytest.approx(float(nats[n * 3 // 4:].sum() / tokens[n * 3 // 4:].sum()), abs=2e-5)


def test_evolution():
    """Tables stay legal, the best one never gets worse, and a hidden target is found better than by any beginning."""
    rng, target = np.random.default_rng(0), np.array([1.0, 1.0, 1.3, 2.2, 3.1, 4.0, 4.0, 5.0])
    start, seen = search.beginnings(1e4, 16, 64, 4.0), []
    plain = STRETCH["none"](1e4, 16, 64, 1.0)[0]
    assert start["pi"].tolist() == [4.0] * 8 and start["ntk-parts"] == pytest.approx((plain / STRETCH["yarn"](1e4, 16, 64, 4.0)[0]).numpy(), abs=0.0051)

    def fitness(table):
        assert (np.diff(table) >= 0).all() and table.min() >= 1 and table.max() <= 6 and np.allclose(table * 100, np.round(table * 100))
        seen.append(float(np.abs(table - target).sum()))
        return seen[-1]

    best, value = search.evolve(list(start.values()), fitness, 4.0, 16, 25, rng)
    assert value == min(seen) == pytest.approx(np.abs(best - target).sum()) and value < 0.6 * min(np.abs(t - target).sum() for t in start.values()) and len(seen) < 16 * 26


def test_search_from_the_shell(call, run, text_data, tmp_path):
    """Searched, written, applied by extend.py; what cannot be searched is refused."""
    rope, alibi = tmp_path / "rope", tmp_path / "alibi"
    assert call("train.py", *TINY, "--passkey=0.5", f"--dataset={text_data}", f"--out_dir={rope}").returncode == 0
    assert call("train.py", *TINY, "--pos=alibi", "--max_iters=1", f"--dataset={text_data}", f"--out_dir={alibi}").returncode == 0
    done = call("experiments/search.py", rope, "--factor=2", "--population=4", "--rounds=2", "--trials=4", f"--out={tmp_path}/f.json", "--device=cpu")
    table = json.loads((tmp_path / "f.json").read_text())["long_factor"]
    assert done.returncode == 0 and "searched" in done.stdout and len(table) == 8, done.stderr
    assert call("extend.py", rope, "--method=longrope", "--factor=2", f"--options={tmp_path}/f.json", "--max_iters=0", f"--out_dir={tmp_path}/longer").returncode == 0
    longer, plain = GPT.load(tmp_path / "longer"), GPT.load(rope)
    assert torch.allclose(plain.pos.inv_freq / longer.pos.inv_freq, torch.tensor(table, dtype=torch.float64)) and longer.pos.attention_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(32)))
    for words in ((alibi,), (tmp_path / "longer",), (rope, "--factor=1"), (), (rope, "--out=x.txt")):
        done = call("experiments/search.py", *words)
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert steps(rope)


def test_tables_without_positions(run, text_data, tmp_path):
    """Each length and size once, resumed from what is there, and refused with other settings."""
    words = ["experiments/nope_tables.py", "--budget=try", f"--datasets={text_data}", "--pos=nope,alibi", f"--runs={tmp_path}/runs", f"--out_dir={tmp_path}", "--device=cpu", "--max_tokens=500"]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "nope.json").read_text())["rows"]
    assert sorted({(row["length"], row["width"]) for row in rows}) == [(8, 64), (16, 32), (16, 64)] and len(rows) == 6 and all(4 < row["loss"] < 6 for row in rows)
    assert "By length" in (tmp_path / "nope.md").read_text()
    again = run(*words, cwd=tmp_path)
    assert again.returncode == 0 and "tokens/s" not in again.stdout and json.loads((tmp_path / "nope.json").read_text())["rows"] == rows
    done = run(*words[:-1], "--max_tokens=600", cwd=tmp_path)
    assert done.returncode == 2 and "--runs" in done.stderr and len(done.stderr.splitlines()) == 1


def test_long_code(run, text_data, tmp_path):
    """Every method, factor and share; the share is of the pretraining tokens; going on trains nothing anew."""
    words = ["experiments/long_code.py", "--budget=try", f"--dataset={text_data}", "--methods=none,yarn", "--factors=4", f"--runs={tmp_path}/runs", f"--out_dir={tmp_path}", "--device=cpu"]
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "long_code.json").read_text())["rows"]
    assert [(row["method"], row["share"]) for row in rows] == [("untouched", 0), *((method, share) for method in ("none", "yarn") for share in (0, 0.001, 0.01, 0.1))]
    assert rows[0]["loss"] == rows[1]["loss"] and set(rows[0]["loss"]) == {"16", "64"}
    tuned = GPT.load(tmp_path / f"runs/try-{text_data.name}/yarn-4-0.1")
    assert tuned.config.block_size == 64 and tuned.meta["step"] == 2 and tuned.meta["tokens"] * 10 == GPT.load(tmp_path / f"runs/try-{text_data.name}/base").meta["tokens"]
    again = run(*words, cwd=tmp_path)
    assert again.returncode == 0 and json.loads((tmp_path / "long_code.json").read_text())["rows"] == rows and "tokens/s" not in again.stdout
    assert run(*words[:-1], "--methods=yarm", cwd=tmp_path).returncode == 2
