"""Commands of tests, which replace some flags of a common list: scripts take a flag only once."""

# the settings of a run that takes a second or two
TINY = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=32",
    "--block_size=32",
    "--batch_size=4",
    "--max_iters=8",
    "--warmup_iters=2",
    "--eval_interval=4",
    "--eval_iters=8",
    "--log_interval=1",
    "--compile=false",
    "--dtype=float32",
    "--device=cpu",
]

# the same for train.TrainConfig, and shorter still
SMALLEST = {
    "batch_size": 2,
    "max_iters": 4,
    "warmup_iters": 1,
    "eval_interval": 2,
    "eval_iters": 4,
    "log_interval": 1,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
}


def last_of_each_flag(words):
    """Drop every --name=value that a later one replaces."""
    words = [str(word) for word in words]
    last = {word.partition("=")[0]: i for i, word in enumerate(words) if word.startswith("--")}
    return [word for i, word in enumerate(words) if last.get(word.partition("=")[0], i) == i]
