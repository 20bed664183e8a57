"""What cannot be done is refused: one sentence that names the repair, status 2, nothing written.

One table for all scripts, of (script, words, phrases). DATA is a dataset of bytes, RUN a run of
RoPE and 32 tokens on it, LETTERS a dataset of three characters.
"""

import json

import pytest
from conftest import TINY, assert_refused, assert_success, content

from model import POSITIONS
from rope_scaling import METHODS

MODEL = [  # settings of the model: of train.py, and of GPTConfig in Python
    ("--pos=cope", ", ".join(POSITIONS), "--entry=FILE.py"),
    ("--n_embd=100 --n_head=3", "does not divide", "--head_dim"),
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
    ("--random_positions=100", "block_size=256"),
    ("--random_positions=999 --pos=alibi", "uses position ids"),
    ("--random_positions=999 --window=8", "without a window"),
    ("--score_scale=ssmax", "none, logn, llama4"),
]
TRAINING = [
    ("--learning_rat=1", "--learning_rate"),
    ("--batch_size=0", "at least 1"),
    ("--beta2=1", "below 1"),
    ("--seed=1e19", "below 2^53"),
    ("--stop_at=9 --max_iters=8", "--stop_at is beyond --max_iters"),
    ("--learning_rate=nan", "finite"),
    ("--dataset=nothing", "prepare.py"),
    ("--dataset=DATA:0.3,LETTERS:0.6", "add up to 0.9"),
    ("--dataset=DATA:0.5,DATA:0.5", "give each name once"),
    ("--dataset=DATA:0.5,LETTERS:0.5", "prepare its text with the tokenizer of"),
    ("--block_size=100000000", "--block_size"),
    ("--eval_length=257", "context length of 256"),
    ("--min_doc=99999999", "--min_doc"),
    ("--tasks=niah:0.1", "there is no setting 'tasks'"),
    ("--device=tpu", "--device=cpu"),
    ("--parallel=fsdp", "torchrun"),
    ("--sequence_parallel=2", "--sequence_parallel=1"),
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
    ("RUN --method=clamp", "--pos=rope has no method 'clamp': use --method"),
    ("RUN --factor=0.5", "factor=0.5"),
    ("RUN --options=beta=1", "beta_fast"),
    ("RUN --options=factor=3", "a flag of its own"),
    ("RUN --options=beta_slow=40", "beta_slow must be below"),
    ("RUN --options=attention_factor=0", "above 0"),
    ("RUN --method=resonance --options=of=dynamic-ntk", "of='dynamic-ntk'"),
    ("RUN --options=bad.json --method=longrope", "bad.json"),
    ("RUN --method=longrope", "long_factor"),
    ("RUN --method=llama3 --options=high_freq_factor=0.5", "low_freq_factor must be below"),
    ("RUN --n_layer=3", "n_layer=2"),
    ("RUN --layers=full", "--layers=all"),
    ("RUN --method=self-extend", "--max_iters=0"),
    ("RUN --method=drope --pose=true", "--pose"),
    ("RUN --min_doc=1000000", "--min_doc"),
    ("RUN --keep_optimizer=true", "has taken all 8 steps", "raise --max_iters"),
    ("RUN --keep_optimizer=true --max_iters=9 --optimizer=muon", "optimizer=adamw, not muon"),
    ("RUN --factor=2 --train_length=65", "the 64 extended tokens"),
    ("RUN --dataset=LETTERS --bos=false", "vocabulary of 3"),
    ("RUN --init_from=RUN", "is for train.py"),
    ("RUN --lora=4 --parallel=fsdp", "give --optimizer=adamw and --parallel=ddp"),
    ("RUN --lora=4 --lora_also=heads", "lora_also is one of norms, embeddings"),
    ("RUN --lora_also=norms", "give --lora=RANK too"),
    ("RUN --lora=4 --keep_optimizer=true --max_iters=9", "lora=0, not 4", "leave --lora out"),
]
OTHERS = [
    ("sample.py", "out/never-made", "train one by python train.py"),
    ("sample.py", "", "there is no run under out/"),
    ("sample.py", "RUN --top_p=0", "top_p=0"),
    ("sample.py", "RUN --chat", "--start=TEXT"),
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
    ("evaluate.py", "RUN --text=x --task=needle", "--text is of --task=loss"),
    ("evaluate.py", "RUN --trials=3", "--trials is of --task=needle or ruler"),
    ("evaluate.py", "RUN --task=ruler --ruler=cwe", "niah, multikey, vt, fwe"),
    ("evaluate.py", "RUN --dataset=nowhere", "nowhere"),
    ("evaluate.py", "a=RUN a=RUN", "same name"),
    ("hf.py", "import", "import SOURCE"),
    ("data/prepare.py", "", "either"),
    ("data/prepare.py", "gone.txt", "gone.txt"),
    ("data/prepare.py", "gone.txt --task=niah:1", "give either"),
    ("data/prepare.py", "gone.txt --length=99", "--length is a setting of --task: give --task too"),
    ("data/prepare.py", "--task=needle:1", "niah, multikey, vt, fwe"),
    ("data/prepare.py", "--task=niah:many", "a fraction above 0"),
    ("data/prepare.py", "--task=fwe:1 --length=64", "fwe need up to", "--length=64 is less"),
    ("data/prepare.py", "--task=vt:1 --documents=0", "--documents=0 makes no dataset"),
    ("data/prepare.py", "--task=vt:1 --val_fraction=2", "is no fraction"),
    ("data/prepare.py", "--task=vt:1 --tokenizer=char", "--tokenizer=char is made of a text"),
    ("data/prepare.py", "--dataset=imagenet", "imagenet"),
    ("experiments/run.py", "leaderboard --arms=rope,ropey", "'ropey'", "rope, rope-window"),
    ("experiments/run.py", "leaderbord", "there is no experiment leaderbord"),
]
TABLE = [("train.py", *row) for row in (*MODEL, *TRAINING)]
TABLE += [("extend.py", *row) for row in EXTENDING] + OTHERS


@pytest.fixture(scope="module")
def run_of_rope(text_data, tmp_path_factory):
    import train

    out_dir = tmp_path_factory.mktemp("runs") / "rope"
    train.main([*TINY, f"--dataset={text_data}", f"--out_dir={out_dir}"])
    return out_dir


@pytest.mark.parametrize("row", TABLE, ids=lambda row: " ".join(row[:2]))
def test_a_request_that_cannot_be_is_refused(row, call, run_of_rope, text_data, character_data):
    script, words, *phrases = row
    folder = character_data.parent
    (folder / "bad.json").write_text(json.dumps([1]))
    places = {"DATA": text_data, "RUN": run_of_rope, "LETTERS": character_data}
    for name, place in places.items():
        words = words.replace(name, str(place))
    words = words.split()
    if script == "train.py" and "--dataset" not in row[1]:
        words.append(f"--dataset={text_data}")
    before = content(folder), content(run_of_rope)
    assert_refused(call(script, *words, cwd=folder), *phrases)
    assert (content(folder), content(run_of_rope)) == before


def test_what_fits_is_not_refused(call, text_data, tmp_path):
    """The edges of the rules above."""
    for number, words in enumerate(
        (
            "--score_scale=llama4 --block_size=1",
            "--rope_base=1",
            "--score_scale=logn --score_scale_layers=nope --layer_pattern=FN",
            "--random_positions=32 --p_rope=0.5",
            "--warmup_iters=2 --max_iters=2 --min_lr=0.003",
        )
    ):
        command = [*TINY, "--max_iters=2", *words.split(), f"--dataset={text_data}"]
        assert_success(call("train.py", *command, f"--out_dir={tmp_path}/{number}"))
