"""Context extension and passkeys: published measurements by the claim lines, and a small run."""

import json
import re
from statistics import fmean

import pytest
from published import RESULTS, judge_all, make_board, read

from experiments import board, run

NAMES = {"yarn, paper's ramp": "yarn-paper-ramp", "yarn + PoSE": "yarn-pose"}
SAVED = read("reproduce")


def losses_and_needles():
    losses, needles, found = [], [], {}
    for seed in (1, 2):
        curves = {**SAVED["methods"][seed - 1], "native": {"": SAVED["native"][seed - 1]}}
        for name, curve in curves.items():
            for steps, by_length in curve.items():
                arm = f"{NAMES.get(name, name)}+{steps}".removesuffix("+")
                losses += [[arm, seed, "last-quarter", int(n), x] for n, x in by_length.items()]
        for record in SAVED["needles"][seed - 1]:
            arm, _, length, depth, accuracy, *_ = record.values()
            if depth is not None:
                needles.append([arm, seed, f"needle {depth:g}", length, accuracy])
                found.setdefault((arm, seed, "needle", length), []).append(accuracy)
    return losses, needles + [[*cell, fmean(values)] for cell, values in found.items()]


@pytest.mark.parametrize("name", ["reproduce", "needles"])
def test_claims_compare_what_the_published_ones_compared(name):
    """Published intervals were over text or prompts; for these a fraction was shrunk a little."""
    claims, tolerance = (slice(26), 6e-4) if name == "reproduce" else (slice(26, 36), 0.021)
    by_seed = [[c for c in SAVED["claims"] if c["seed"] == seed][claims] for seed in (1, 2)]
    rows = losses_and_needles()[name == "needles"]
    measured, verdicts = make_board(name, rows), judge_all(name, rows)
    for (line, verdict), *old in zip(verdicts.items(), *by_seed, strict=True):
        claim = board.parse_claim(line)
        first, *second = (measured.of(arm, claim.measure, n) for arm, n in claim.sides)
        differences = [first[seed] - sum(values[seed] for values in second) for seed in (1, 2)]
        assert differences == pytest.approx([c["mean"] for c in old], abs=tolerance), line
        bound = old[0]["below" if claim.sign == "<" else "above"]
        assert claim.bound == pytest.approx(bound, rel=1e-6), line
        # intervals over two seeds are mostly wider, and ntk at 2L varies by the text alone
        is_same = (verdict == "pass") == old[0]["passed"] or "ntk+0@2L" in line
        assert is_same or verdict == "FAIL (not separated)", line


def test_gaps_closed_are_those_of_the_published_table():
    text = (RESULTS / "reproduce.md").read_text().partition("### Gap closed")[2].split("\n\n")[1]
    measured = make_board("reproduce", losses_and_needles()[0])
    for row in text.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        for steps, cell in zip((0, 10, 40, 80), cells, strict=True):
            gaps = measured.of(f"{NAMES.get(name, name)}+{steps}", "gap closed", "4L").values()
            found = [fmean(gaps), min(gaps), max(gaps)] if gaps else []
            assert found == pytest.approx(list(map(float, re.findall(r"[-\d.]+", cell))), abs=6e-3)


@pytest.mark.slow
def test_dynamic_methods_and_windows_change_longer_text_alone(text_data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["reproduce", "--budget=try", f"--dataset={text_data}", "--seeds=1", "--device=cpu"]
    assert run.main([*words, "--arms=none+0,dynamic-yarn+0,window+0,yarn-pose+4"]) == 0
    rows = json.loads((run.CACHE / "reproduce.json").read_text())["rows"]
    losses = {(arm, length): value for arm, _, measure, length, value in rows}
    for arm in ("dynamic-yarn+0", "window+0"):
        assert losses[arm, 32] == losses["none+0", 32] and losses[arm, 64] != losses["none+0", 64]
