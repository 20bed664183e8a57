"""What cannot be done is refused: one sentence that names the repair, status 2, nothing written.

One table for all scripts, of (script, words, phrases). DATA is a dataset of bytes, RUN a run of
RoPE and 32 tokens on it, WINDOW one with a window and sinks, LETTERS a dataset of three characters.
"""

import importlib
import json
import math
import typing

import pytest
from conftest import SMALLEST, TINY, assert_refused, assert_success, content, logged, write_dataset

import data
import train
from model import GPT, POSITIONS, GPTConfig
from nanolong import settings
from nanolong.errors import UserError
from rope_scaling import ATTENTION, METHODS

MODEL = [  # settings of the model: of train.py, and of GPTConfig in Python
    ("--pos=rop", "unknown scheme 'rop': did you mean 'rope'?"),
    ("--pos=cope", ", ".join(POSITIONS), "--entry=FILE.py"),
    ("--n_embd=100 --n_head=3", "--n_embd=100 is not a multiple of --n_head=3", "--head_dim"),
    ("--n_head=0", "at least 1"),
    ("--n_head=4 --n_kv_head=3", "n_kv_head=3"),
    ("--n_embd=99", "head_dim=33 is odd"),
    ("--n_embd=99 --pos=sinusoidal", "n_embd=99 is odd"),
    ("--norm=batchnorm", "rmsnorm, layernorm"),
    ("--mlp=relu", "swiglu"),
    ("--rope_fraction=1.5", "rope_fraction"),
    ("--rope_fraction=0.05", "rotates 3 of 64", "even number"),
    ("--p_rope=1.5", "no fraction"),
    ("--dropout=1", "no fraction"),
    ("--rope_local_base=1e4", "layer_pattern of both"),
    ("--layer_pattern=FX", "F, W, N and S"),
    ("--layer_pattern=FFFFFFFFN", "4 layers"),
    ("--layer_pattern=W", "give --window=N"),
    ("--window=5 --layer_pattern=F", "give --window=N"),
    ("--sinks=2", "give --window=N"),
    ("--pos=learned --layer_pattern=FN", "acts in no layer"),
    ("--query_scale=ssmax", "none, logn:LENGTH"),
    ("--query_scale=logn:9:0.1", "none, logn:LENGTH"),
    ("--query_scale=llama4:9.5", "llama4:LENGTH:COEFFICIENT:OFFSET"),
    ("--query_scale=llama4:9:nan", "llama4:LENGTH:COEFFICIENT:OFFSET"),
    ("--query_scale=llama4@rope", "@nope at the end"),
    ("--attn_scale=0", "attn_scale must be above 0"),
    ("--norm_eps=1e39", "finite in float32"),
]
TRAINING = [
    ("--parallel=fsdp", "--parallel went: nanoLong trains by DDP", "torchtitan"),
    ("--sequence_parallel=2", "--sequence_parallel went", "torchtitan"),
    ("--random_positions=512", "--random_positions went", "--pose=true"),
    ("--learning_rat=1", "--learning_rate"),
    ("--batch_size=0", "at least 1"),
    ("--beta2=1", "below 1"),
    ("--seed=1e19", "below 2^53"),
    ("--stop_at=9 --max_iters=8", "--stop_at is beyond --max_iters"),
    ("--learning_rate=nan", "finite"),
    ("--batch_size=99999999", "out of memory: in training lower --batch_size"),
    ("--batch_size=9999999999", "out of memory: in training lower --batch_size"),
    ("--device=cuda:x", "--device=cpu"),
    ("--dataset=nothing", "prepare.py"),
    ("--dataset=DATA:0.3,LETTERS:0.6", "add up to 0.9"),
    ("--dataset=DATA:0.5,DATA:0.5", "give each name once"),
    ("--dataset=DATA:0.5,LETTERS:0.5", "prepare its text with the tokenizer of"),
    ("--block_size=100000000", "--block_size"),
    ("--eval_length=257", "context length of 256"),
    ("--min_doc=99999999", "--min_doc"),
    ("--tasks=niah:0.1", "unknown setting --tasks"),
    ("--device=tpu", "--device=cpu"),
    ("--out_dir=/proc/x", "nothing can be written to /proc: choose another --out_dir"),
    ("--wandb=project", "pip install wandb"),
    ("--out_dir=RUN --overwrite --wandb=project", "pip install wandb"),
    ("--init_from=resume --out_dir=out/never-made", "never-made to resume: leave --init_from out"),
    ("--init_from=out/never-made", "no checkpoint in out/never-made"),
    ("--init_from=RUN --dataset=LETTERS", "no <bos>: prepare its text with"),
    ("--init_from=RUN --n_layer=3", "leave --n_layer out"),
    ("--out_dir=RUN", "--overwrite"),
    ("--out_dir=RUN --init_from=resume --n_layer=3", "leave --n_layer out"),
    ("config/gone.toml", "debug.toml"),
    ("word", "--name=value"),
]
EXTENDING = [
    ("", "run folder"),
    ("out/never-made", "train one by python train.py"),
    ("RUN --method=magic", ", ".join(METHODS)),
    ("RUN --method=clamp", "unknown method of --pos=rope 'clamp'"),
    ("RUN --factor=0.5", "factor=0.5"),
    ("RUN --factor=0", "factor=0.0 does not extend the context: give at least 1"),
    ("RUN --learning_rate=0", "no record of its training: give --learning_rate, or --max_iters=0"),
    ("RUN --options=beta=1", "beta_fast"),
    ("RUN --options=factor=3", "an option that has its own flag"),
    ("RUN --options=beta_slow=40", "beta_slow must be below"),
    ("RUN --options=attention_factor=0", "above 0"),
    ("RUN --method=resonance", "resonance", "none, pi, ntk"),
    ("RUN --method=yarn --options=ramp=progressive,truncate=false", "needs whole ends"),
    ("RUN --options=bad.json --method=longrope", "bad.json"),
    ("RUN --method=longrope", "long_factor"),
    ("RUN --method=llama3 --options=high_freq_factor=0.5", "low_freq_factor must be below"),
    ("RUN --n_layer=3", "n_layer=2"),
    ("RUN --layers=full", "--layers=all"),
    *((f"RUN --method={method}", f"'{method}'", "--max_iters=0") for method in ATTENTION),
    ("RUN --method=drope --pose=true", "--pose"),
    ("WINDOW --pose=true", "a window counts tokens: give --pose=false"),
    (
        "WINDOW --separate_docs=true",
        "sinks are the first tokens of the text",
        "separate_docs=false",
    ),
    ("RUN --min_doc=1000000", "--min_doc"),
    ("RUN --keep_optimizer=true", "has taken all 8 steps", "raise --max_iters"),
    ("RUN --keep_optimizer=true --max_iters=9 --optimizer=muon", "optimizer=adamw, not muon"),
    ("RUN --factor=2 --train_length=65", "the 64 extended tokens"),
    ("RUN --dataset=LETTERS --bos=false", "other tokens than"),
    ("RUN --init_from=RUN", "unknown --init_from", "choose from scratch, resume, auto"),
    ("RUN --init_from=resume --out_dir=RUN", "was not written by extend.py: resume it by train.py"),
    ("RUN --method=jet-long --options=window=33 --max_iters=0", "for a window at most 32"),
    (
        "RUN --lora=4 --lora_also=heads",
        "unknown --lora_also 'heads': choose from norms, embeddings",
    ),
    ("RUN --lora_also=norms", "give --lora=RANK too"),
    ("RUN --lora=4 --keep_optimizer=true --max_iters=9", "lora=0, not 4", "leave --lora out"),
]
OTHERS = [
    ("sample.py", "out/never-made", "train one by python train.py"),
    ("sample.py", "", "there is no run under out/"),
    ("sample.py", "RUN --top_p=0", "top_p=0"),
    ("sample.py", "LETTERS", "is a dataset, and no checkpoint: give a run folder"),
    ("sample.py", "RUN --chat", "--start=TEXT"),
    ("evaluate.py", "RUN --length=256", "did you mean --lengths?"),
    ("sample.py", "RUN --system=x --start=y", "--chat"),
    ("sample.py", "RUN --start=FILE:gone.txt", "gone.txt"),
    ("sample.py", "RUN --weights=bfloat16 --dtype=float32", "--dtype=bfloat16"),
    ("evaluate.py", "", "run folder"),
    ("evaluate.py", "RUN --protocol=sliding-ish", "chunked, last-quarter, position, sliding"),
    ("evaluate.py", "RUN --protocol=", "name one at least"),
    ("evaluate.py", "RUN --plot=a.jpg", ".png"),
    ("evaluate.py", "--curves=a.png", "at least one run folder"),
    ("evaluate.py", "LETTERS --curves=a.png", "has logged no training step"),
    ("evaluate.py", "RUN --curves=a.png --json=a.json", "leave --plot, --json and --report out"),
    ("evaluate.py", "RUN --report=a.pdf", ".html"),
    ("evaluate.py", "RUN --lengths=0", "at least 1"),
    ("evaluate.py", "RUN --text=x --task=needle", "--text needs --task=loss"),
    ("evaluate.py", "RUN --trials=3", "--trials needs --task=needle or ruler"),
    (
        "evaluate.py",
        "RUN --task=ruler --ruler=cwe",
        "unknown --ruler 'cwe'",
        "as in --ruler=niah,multikey",
    ),
    ("evaluate.py", "RUN --lengths=32,abc", "'abc' in --lengths=32,abc", "as in --lengths=1,2,3"),
    ("evaluate.py", "RUN --dataset=nowhere", "nowhere"),
    ("evaluate.py", "a=RUN a=RUN", "same name"),
    ("hf.py", "import", "import SOURCE"),
    ("data/prepare.py", "", "either"),
    ("data/prepare.py", "gone.txt", "gone.txt"),
    ("data/prepare.py", "gone.txt --task=niah:1", "give either"),
    ("data/prepare.py", "gone.txt --length=99", "--length is a setting of --task: give --task too"),
    ("data/prepare.py", "--task=needle:1", "niah, multikey, nth, last"),
    ("data/prepare.py", "--task=niah:many", "a number above 0, as in"),
    ("data/prepare.py", "--task=nth:1 --length=9", "nth need up to", "--length=9 is less"),
    ("data/prepare.py", "--task=nth:1 --documents=0", "--documents=0 makes no dataset"),
    ("data/prepare.py", "--task=nth:1 --val_fraction=2", "is no fraction"),
    ("data/prepare.py", "--task=nth:1 --tokenizer=char", "--tokenizer=char is made of a text"),
    ("data/prepare.py", "/dev/null", "there is no file or folder /dev/null"),
    ("data/prepare.py", "--dataset=fineweb10B --shards=0", "--shards must be at least 1"),
    ("data/prepare.py", "gone.txt --shards=3", "--shards is of --dataset=fineweb10B"),
    ("data/prepare.py", "--dataset=imagenet", "imagenet"),
    ("experiments/run.py", "leaderboard --arms=rope,ropey", "'ropey'", "rope, rope-window"),
    (
        "experiments/run.py",
        "leaderbord",
        "unknown experiment 'leaderbord': did you mean 'leaderboard'?",
    ),
]
TABLE = [("train.py", *row) for row in (*MODEL, *TRAINING)]
TABLE += [("extend.py", *row) for row in EXTENDING] + OTHERS


@pytest.fixture(scope="module")
def run_of_rope(text_data, tmp_path_factory):
    import train

    out_dir = tmp_path_factory.mktemp("runs") / "rope"
    train.main([*TINY, f"--dataset={text_data}", f"--out_dir={out_dir}"])
    words = ["--window=9", "--sinks=2", "--max_iters=1"]
    train.main([*TINY, *words, f"--dataset={text_data}", f"--out_dir={out_dir.parent / 'window'}"])
    return out_dir


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row[:2]))
def test_a_request_that_cannot_be_is_refused(row, call, run_of_rope, text_data, character_data):
    script, words, *phrases = row
    folder = character_data.parent
    (folder / "bad.json").write_text(json.dumps([1]))
    places = {"DATA": text_data, "RUN": run_of_rope, "LETTERS": character_data}
    places["WINDOW"] = run_of_rope.parent / "window"
    for name, place in places.items():
        words = words.replace(name, str(place))
    words = words.split()
    if script == "extend.py":
        words.append("--max_tokens=256")  # because the report comes before some refusals
    if script == "train.py" and "--dataset" not in row[1]:
        words.append(f"--dataset={text_data}")
    before = content(folder), content(run_of_rope)
    assert_refused(call(script, *words, cwd=folder), *phrases)
    assert (content(folder), content(run_of_rope)) == before


def test_what_fits_is_not_refused(call, text_data, tmp_path):
    """The edges of the rules above."""
    for number, words in enumerate(
        (
            "--query_scale=llama4 --block_size=1",
            "--rope_base=1",
            "--query_scale=logn@nope --layer_pattern=FN",
            "--p_rope=0.5",
            "--warmup_iters=2 --max_iters=2 --min_lr=0.003",
        )
    ):
        command = [*TINY, "--max_iters=2", *words.split(), f"--dataset={text_data}"]
        assert_success(call("train.py", *command, f"--out_dir={tmp_path}/{number}"))


# -----------------------------------------------------------------------------
# Every number of every script, whatever the dataclasses have.

# script -> (its dataclasses, words of a run of a second)
SCRIPTS = {
    "train.py": ("train.TrainConfig model.GPTConfig", [*TINY, "--max_iters=2", "--dataset=DATA"]),
    "extend.py": (
        "extend.ExtendConfig",
        "RUN --factor=2 --max_iters=2 --warmup_iters=1 --dataset=DATA --max_tokens=64 "
        "--eval_iters=1".split(),
    ),
    "sample.py": ("sample.SampleConfig", ["RUN", "--start=ab", "--max_new_tokens=3"]),
    "evaluate.py": (
        "evaluate.EvaluateConfig",
        "RUN --task=loss,needle --lengths=16,128 --trials=1 --depths=1 --max_tokens=256".split(),
    ),
    "hf.py": ("hf.HFConfig", ["export", "RUN", "exported"]),
    "data/prepare.py": (
        "data.prepare.PrepareConfig",
        ["t.txt", "--name=x", "--tokenizer=bpe", "--vocab_size=270"],
    ),
}


def numbers_of(classes):
    """The settings of dataclasses, without their bases', that are numbers, or lists of numbers."""
    for name in classes.split():
        module, _, cls = name.rpartition(".")
        cls = getattr(importlib.import_module(module), cls)
        for setting, (hint, _, _) in settings.settings_of(cls).items():
            is_number = {int, float} & {hint, *typing.get_args(hint)}
            if is_number and setting in cls.__annotations__:
                yield setting


NUMBERS = [(script, name) for script, (cls, _) in SCRIPTS.items() for name in numbers_of(cls)]


@pytest.mark.parametrize("script, name", NUMBERS)
def test_a_number_is_refused_in_a_sentence_or_means_something(
    script, name, call, run_of_rope, tmp_path, monkeypatch
):
    """Nothing ends in a traceback, and no loss that is not finite is printed as if it were one."""
    (tmp_path / "t.txt").write_text("def f(x):\n    return 'a' * x\n" * 40)
    tokens = [256, *(tmp_path / "t.txt").read_bytes()]
    small = write_dataset(tmp_path / "small", tokens)
    monkeypatch.setattr(data.token_files, "HERE", tmp_path)
    places = {"RUN": run_of_rope, "--dataset=DATA": f"--dataset={small}"}
    words = [places.get(word, word) for word in SCRIPTS[script][1]]
    if script in ("train.py", "extend.py"):
        words.append("--out_dir=run")
    for value in ("-1", "inf", "nan", "1e99", ""):
        if (name, value) != ("lengths", ""):  # an empty list is the default
            done = call(script, *words, f"--{name}={value}", cwd=tmp_path)
            assert_refused(done, f"--{name}={value}: {name} must be a")
    done = call(script, *words, f"--{name}=0", cwd=tmp_path)
    if done.returncode:
        assert_refused(done, name)
    elif script in ("train.py", "extend.py") and (tmp_path / "run/log.jsonl").is_file():
        losses = logged(tmp_path / "run", "loss") + logged(tmp_path / "run", "val_loss")
        assert all(map(math.isfinite, losses)) and (losses or name == "max_iters")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"optimizer": "lyon"}, "unknown optimizer in TrainConfig 'lyon'"),
        ({"lr_schedule": "cosin"}, "did you mean 'cosine'"),
        ({"learning_rate": -1.0}, "learning_rate must be a number from 0 on"),
        ({"out_dir": ""}, "has no folder: give out_dir"),
        ({"init_from": "scrach"}, "init_from='scrach', and the model was not loaded"),
        ({"init_from": "resume"}, "init_from='resume', and the model was not loaded"),
    ],
)
def test_python_is_refused_what_the_command_line_is(settings, words, text_data, tmp_path):
    """Of a fresh model; nothing is written but a lock."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16))
    with pytest.raises(UserError, match=words):
        settings = {"out_dir": str(tmp_path / "run"), "dataset": str(text_data), **settings}
        train.train(model, train.TrainConfig(**{**SMALLEST, **settings}))
    assert [file.name for file in tmp_path.iterdir()] in ([], [".run.lock"])
