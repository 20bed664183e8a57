"""What does extending the context of a public checkpoint buy, what does it cost, what does it find?

    make smollm2                                       downloads SmolLM2-135M-Instruct, 94 MB
    export NANOLONG_SMOLLM2=FILE.gguf                  the file that it names
    python experiments/run.py public --seeds=1         about three hours on two cores
    python experiments/run.py public --seeds=1 --budget=try        about twenty minutes

Another checkpoint may be named: a GGUF file or a Hugging Face directory, of a model with RoPE and a
context length of 8,192 tokens. It is imported and extended 4 times by each method, without
training, and by two methods with brief fine-tuning (PoSE, config/finetune_public.toml) on the
standard library without its longest module. Scored is that module: by position, in one sequence
from its start, and in sequences of 2,048 tokens, where the untouched checkpoint needs no extension;
what a method loses there is its price. Needles are from --task=ruler --ruler=niah: the question of
--task=needle is a format that small models are trained on, and this one is not.

There is one text and one checkpoint, which more seeds do not change (only the fine-tuned arms
depend on them): so there are no intervals, and no claims. The checkpoint may have seen the text in
training: compare methods, not texts. The times are of cores that multiply bfloat16.
"""

import os
import shlex
import tempfile
from pathlib import Path

import hf
from data import prepare, texts
from nanolong.errors import UserError

TITLE = "A public checkpoint, extended"
ABOUT = (
    "The context length is extended 4 times; a step of fine-tuning has 4,096 tokens. Losses are in "
    "nats per token."
)
BUDGETS = {
    "cpu": "L=8192 longest=32768 scored=16384 needles=[2048,8192,16384] steps=40",
    "try": "L=8192 longest=4096 scored=2048 needles=[2048] steps=2",
}
METHODS = ("pi", "ntk", "yarn", "dynamic-yarn", "llama3", "self-extend", "lm-infinite")
TUNED = ("yarn", "ntk")  # without training the best at 32,768 tokens of those that can be trained
SHORT = 2048


def checkpoint():
    """Return the path of the checkpoint, or if it is not set the variable, for messages."""
    return os.environ.get("NANOLONG_SMOLLM2") or "$NANOLONG_SMOLLM2"


def longest_module():
    """Return the largest module of Python's standard library."""
    return max(texts.standard_library().values(), key=os.path.getsize)


def make_data(b):
    """Write the dataset modules: all others, in the checkpoint's tokens."""
    if not Path(checkpoint()).exists():
        raise UserError(
            f"there is no checkpoint {checkpoint()}: run make smollm2, and set NANOLONG_SMOLLM2 to "
            "the file that it names"
        )
    longest = longest_module()
    source = f"the standard library without {longest.name}"
    files = {name: file for name, file in texts.standard_library().items() if file != longest}
    Path(b.data).mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=b.data) as folder:  # only for its tokenizer
        hf.main(["import", checkpoint(), f"{folder}/run", "--store=bfloat16"])
        tokenizer = prepare.find_tokenizer(f"{folder}/run")
    modules = texts.Texts(files, source, as_bytes=False, val_fraction=0.1)
    with modules.progress("encoding") as bar:
        documents = modules.documents(bar)
        texts.write_dataset(Path(b.data) / "modules", tokenizer, documents, {"source": source})


def ARMS(b):
    untouched = f"hf import {shlex.quote(checkpoint())}"
    # evaluated in training at 1,024 tokens, the length of its sequences
    tune = (
        f"extend config/finetune_public.toml --factor=4 --max_iters={b.steps} --dtype=auto "
        f"--eval_length=1024 --eval_iters=8 --max_tokens=8192 --dataset={b.data}/modules"
    )
    arms = {"untouched": untouched}
    for method in METHODS:
        arms[method] = [untouched, f"extend --method={method} --factor=4 --max_iters=0"]
    for method in TUNED:
        arms[f"{method}-tuned"] = [untouched, f"{tune} --method={method}"]
    return arms


def EVALUATE(b):
    lengths = ",".join(map(str, b.needles))
    text = f"--text={shlex.quote(str(longest_module()))}"
    return {
        "long": f"{text} --protocol=position --lengths={b.longest} --max_tokens={b.longest}",
        "short": f"{text} --protocol=chunked --lengths={SHORT} --max_tokens={b.scored}",
        "": f"--task=ruler --ruler=niah --lengths={lengths} --trials=2",
    }


def derive(board):
    """Average the 16 losses by position between 0, 2,048, 4,096 and so on, up to `longest`."""
    part = board.b.longest // 16
    for arm in board.arms:
        start, end = 0, SHORT
        while end <= board.b.longest:
            parts = [
                board.of(arm, f"long position {p}", board.b.longest)
                for p in range(start, end, part)
            ]
            for seed in parts[0]:
                yield [arm, seed, "loss", end, sum(values[seed] for values in parts) / len(parts)]
            start, end = end, 2 * end


MEASURES = {"loss": "nats per token"}
TABLES = [
    (
        "Loss by position: from half a column's number (the first: from 0) to that number",
        "loss",
        ["2048", "4096", "8192", "16384", "32768"],
    ),
    ("Loss in sequences of 2,048 tokens", "short chunked", ["2048"]),
    ("Needles found", "niah accuracy", ["2048", "8192", "16384"]),
    ("Nats that the needles save", "niah gain", ["2048", "8192", "16384"]),
]
