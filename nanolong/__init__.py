"""The plumbing behind the scripts, which somebody who changes the model need not read."""
