"""A package, or python experiments/run.py would find experiments/examples.py in its place."""
