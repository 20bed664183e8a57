"""What experiments/results/ holds, as rows of experiments/run.py."""

import json

from conftest import ROOT

from experiments import board, run

RESULTS = ROOT / "experiments" / "results"


def read(name):
    """The committed JSON of a report, such as "leaderboard" or "nope/nope"."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def make_board(name, rows, budget="cpu"):
    """A Board of rows [arm, seed, measure, length, value], with an experiment's arms and budget."""
    experiment = run.load_experiment(name, run.RunConfig(budget=budget))
    saved = {"budget": vars(experiment.b), "arms": experiment.arms, "rows": rows, "failed": {}}
    return board.Board({**saved, "command": "", "note": ""}, experiment.derive)


def judge_all(name, rows, budget="cpu"):
    """The claims of an experiment on these rows: claim -> verdict, without claims not measured."""
    experiment = run.load_experiment(name, run.RunConfig(budget=budget))
    measured = make_board(name, rows, budget)
    verdicts = {}
    for line in experiment.claims:
        judged = None if line.startswith("#") else board.judge(line, measured)
        if judged:
            verdicts[line] = judged.rpartition(": ")[2]
    return verdicts
