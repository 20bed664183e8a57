"""A package, or python experiments/run.py would find another package of this name."""
