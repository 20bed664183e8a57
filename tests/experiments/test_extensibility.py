"""Which choices make a model hard to extend: the design, its analysis, and what is published."""

import math
import re
from itertools import product

import pytest
from published import RESULTS, judge_all, make_board, read

from experiments.board import claim_lines
from experiments.extensibility import EFFECTS, FRACTION, MODELS, analyse, effect, rank_correlation
from experiments.run import RunConfig, load_experiment

MEASURES = {"loss": "last-quarter", "exact": "niah accuracy", "gain": "niah gain"}


def published_rows(saved, rename):
    """The rows of a JSON of records. rename: their name of a model -> ours."""
    rows = []
    for record in saved["records"]:
        stage = "" if record["stage"] == "before" else f"/{record['stage']}"
        start = [rename.get(record["model"], record["model"]) + stage, record["seed"]]
        rows += [[*start, MEASURES[m], 64 * record["length"], record[m]] for m in MEASURES]
    return rows


def assert_judged_as_published(name, rows):
    """All claims have the published measurement, bound and verdict, in the same order."""
    claims = load_experiment(name, RunConfig(budget="cpu")).claims
    text = "\n".join(claim_lines(claims, make_board(name, rows)))
    judgements = re.compile(r"^- .*: (\S+ ± \S+, [<>].*)$", re.M).findall
    assert judgements(text) == judgements((RESULTS / f"{name}.md").read_text()) != []


def test_effects_and_interactions_of_two_are_found_exactly():
    """The fraction has resolution 5: none of them is confounded with another."""
    known = {factors: 2.0**-i for i, factors in enumerate(EFFECTS)}
    values = dict.fromkeys(FRACTION, 7.0)
    for name, (factors, size) in product(FRACTION, known.items()):
        signs = (1 if letter in name else -1 for letter in factors)
        values[name] += math.prod(signs) * size / 2
    for factors, size in known.items():
        assert effect(values, factors) == pytest.approx(size, abs=1e-12)


def test_an_excess_is_what_single_changes_do_not_explain():
    costs = {"Q": 1, "N": 2, "G": 4, "W": 8, "S": 16}
    values = {name: 100 - sum(costs.get(letter, 0) for letter in name) for name in MODELS}
    assert set(analyse(values, values)["excess"].values()) == {0}
    values["QGW"] -= 5
    change, excess, *_ = analyse(values, values).values()
    assert (change["QGW"], excess["QGW"]) == (-18, -5)
    assert (change["three"], excess["three"]) == (-19.1, -0.5)


def test_rank_correlations_are_spearmans():
    x, y = [3.0, 1.0, 4.0, 1.5, 9.0, 2.6], [2.0, 7.0, 1.0, 8.0, 3.0, 0.0]
    # of ranks 4 1 5 2 6 3 and 3 5 2 6 4 1: 1 - 6 * sum(d^2) / (n (n^2 - 1))
    assert rank_correlation(x, y) == pytest.approx(1 - 6 * (1 + 16 + 9 + 16 + 4 + 4) / 210)
    # equal numbers: of ranks 1 2.5 2.5 4 and 1 3 2 4
    assert rank_correlation([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(4.5 / math.sqrt(22.5))
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0


def test_published_results_give_the_published_verdicts_and_effects():
    rows = published_rows(read("extensibility"), {"none": "plain"})
    assert_judged_as_published("extensibility", rows)
    cell = make_board("extensibility", rows).cell("NS/fine-tuned", "effect on loss", "4L")
    assert cell == "0.054 ± 0.017"
    board = make_board("extensibility", [row for row in rows if row[:2] != ["QGS/zero-shot", 2]])
    assert board.of("Q/zero-shot", "change", "4L").keys() == {1, 3}
    for row in rows:
        row[4] *= 0.09 if row[0].startswith("plain/") and row[2] == "niah accuracy" else 1
    assert len(judge_all("extensibility", rows)) == 2
