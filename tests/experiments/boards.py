"""Boards of numbers that a test has made up."""

from experiments import board, run


def make_board(name, rows, budget="cpu", weights=()):
    """A Board of rows [arm, seed, measure, length, value], with an experiment's arms and budget."""
    experiment = run.load_experiment(name, run.RunConfig(budget=budget))
    saved = {"budget": vars(experiment.b), "arms": experiment.arms, "rows": rows, "failed": {}}
    saved["weights"] = weights
    return board.Board({**saved, "command": "", "note": ""}, experiment.derive)
