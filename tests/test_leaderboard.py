"""The leaderboard: an entry of one's own, stopping and going on, and the arithmetic of its claims."""
import json
import math
import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import leaderboard  # noqa: E402
from config import UserError  # noqa: E402

@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Scripts on models this small are slower on two."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


OWN = '''
import torch
from model import NoPE

class Decay(NoPE):
    """Scores fall with the square root of distance."""
    by_index = True

    def bias(self, n, layer):
        return -torch.arange(n).sqrt().expand(self.config.n_head, n)
'''


def test_an_entry_of_ones_own(run, text_data, tmp_path):
    """From a file, beside two schemes; the same command again computes nothing anew; one more seed adds to what is there."""
    (tmp_path / "my_decay.py").write_text(OWN)
    words = ["experiments/leaderboard.py", "--budget=try", "--entries=rope,learned", f"--entry={tmp_path}/my_decay.py", f"--dataset={text_data}", "--max_tokens=2000", f"--runs={tmp_path}/runs",
             f"--out_dir={tmp_path}/results", "--device=cpu"]
    done = run(*words, "--seeds=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    board = json.loads((tmp_path / "results/leaderboard.json").read_text())
    assert set(board["speed"]) == {"rope", "learned", "my_decay"} and board["speed"]["rope"][1] == 1.0
    lengths = {16, 32, 36, 64, 128, 512}
    for name in board["speed"]:
        mine = [row for row in board["rows"] if row["checkpoint"] == name and row["protocol"] == "last-quarter"]
        assert {row["length"] for row in mine} == lengths and all(("refused" in row) == (name == "learned" and row["length"] > 16) for row in mine)
    text = (tmp_path / "results/leaderboard.md").read_text()
    assert "my_decay" in text and "refused" in text and "commit" in text and (tmp_path / "results/leaderboard.png").read_bytes()[:4] == b"\x89PNG"
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*.safetensors")}
    assert len(stamps) >= 6
    (again,) = (tmp_path / "runs").rglob("rope-1/scores.json")
    again.unlink()  # scored anew from its checkpoint: the same to the bit
    done = run(*words, "--seeds=2", cwd=tmp_path)
    second = json.loads((tmp_path / "results/leaderboard.json").read_text())["rows"]
    assert [row for row in second if row["seed"] == 1] == board["rows"]
    assert done.returncode == 0 and all(p.stat().st_mtime_ns == stamp for p, stamp in stamps.items())
    assert "± " in (tmp_path / "results/leaderboard.md").read_text()
    (tmp_path / "my_decay.py").write_text(OWN + "\nclass Second(NoPE):\n    pass\n")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == 2 and "2 classes" in done.stderr and len(done.stderr.splitlines()) == 1
    done = run(*words[:-3], "--max_tokens=1000", *words[-3:], cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_what_is_no_entry(tmp_path):
    for name, text, words in (("rope.py", OWN, "already"), ("empty.py", "x = 1", "0 classes"), ("broken.py", "import nothing_of_that_name", "ModuleNotFoundError"), ("wrong.py", "def", "SyntaxError")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=words):
            leaderboard.load_entry(str(tmp_path / name))


def test_interval():
    """Student's t of three values by hand: mean 2, standard deviation 1, 4.303 / sqrt(3)."""
    mean, half = leaderboard.interval([1.0, 2.0, 3.0])
    assert mean == 2 and half == pytest.approx(4.303 / math.sqrt(3), rel=1e-4) and math.isnan(leaderboard.interval([1.0])[1])


def test_claims_are_judged_by_their_whole_interval():
    """The differences are paired by seed: what all seeds share does not blur them."""
    rows = [{"checkpoint": name, "protocol": "chunked", "length": 64, "seed": seed, "loss": base + shared} for name, base in (("alibi", 1.0), ("t5", 1.1), ("nope", 1.5))
            for seed, shared in enumerate((0.0, 3.0, -2.0))]
    board = leaderboard.Orderings(rows, 64)
    key = lambda name: (name, "chunked", 64)  # noqa: E731
    board.claim(2, "a", key("alibi"), key("t5"), below=0)
    board.claim(2, "b", key("t5"), key("alibi"), below=0)
    board.claim(2, "c", key("nope"), key("alibi"), above=0.45)
    board.claim(2, "d", key("nope"), key("alibi"), above=0.55)
    board.claim(2, "nobody", key("nope"), key("gone"), above=0.55)
    assert [passed for passed, _ in board.lines] == [True, False, True, False] and "the other way round" in board.lines[1][1] and "-0.100" in board.lines[0][1]
    rows[0]["loss"] += 2.0
    noisy = leaderboard.Orderings(rows, 64)
    noisy.claim(2, "e", key("alibi"), key("t5"), below=0)
    assert not noisy.lines[0][0] and "within the interval" in noisy.lines[0][1]
    assert {line.split(".")[0] for _, line in leaderboard.Orderings([{**row, "checkpoint": n, "protocol": p, "length": f} for row in rows[:3] for n in ("alibi", "sinusoidal", "rope", "t5", "nope", "learned")
                                                                    for p in ("chunked", "last-quarter") for f in (64, 84, 128, 256, 512, 2048)], 64).judge()} == {"1", "2", "13", "14"}
