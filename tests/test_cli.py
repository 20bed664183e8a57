"""The scripts as a user meets them: settings, errors in one sentence, the whole path, and the counts that keep the house small."""
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import config
import data
import evaluate
import extend
import sample
import train
from conftest import ROOT, TINY
from data import prepare
from checkpoint import read_meta, steps
from model import GPT, POSITIONS, GPTConfig


INTERNAL = {"vocab_size", "norm_eps", "mlp_width", "qkv_bias", "family", "stretch", "nope_layers", "window_layers"}  # of GPTConfig: no settings


@pytest.fixture(scope="module")
def trained(text_data, tmp_path_factory):
    """A finished tiny run of each kind that the tests below need; made once."""
    out = tmp_path_factory.mktemp("runs") / "rope"
    done = subprocess.run([sys.executable, ROOT / "train.py", *TINY, f"--dataset={text_data}", f"--out_dir={out}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "a sample:" in done.stdout
    return out


def one_sentence(done, *words):
    """Exit status 2, one line on stderr, no traceback, and the words in it."""
    assert done.returncode == 2, (done.returncode, done.stdout[-500:], done.stderr[-1500:])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize("words,say", [
    (["train.py", "--learning_rat=1"], ["learning_rat", "did you mean 'learning_rate'"]),
    (["train.py", "--n_layer=four"], ["--n_layer=four", "a whole number"]),
    (["train.py", "--n_layer=2.5"], ["a whole number"]),
    (["train.py", "--n_layer"], ["--n_layer=4"]),
    (["train.py", "--optimizer=sgd"], ["adamw, muon"]),
    (["train.py", "--tied=perhaps"], ["true or false"]),
    (["train.py", "--pos=cope"], ["nope, learned, sinusoidal, shaw, nezha, xl, t5, alibi, kerple, kerple-power, sandwich, rope"]),
    (["train.py", "--vocab_size=3"], ["vocab_size"]),
    (["train.py", "rope"], ["--name=value"]),
    (["train.py", "config/nothing.toml"], ["demo.toml"]),
    (["train.py", "--batch_size=0"], ["at least 1"]),
    (["train.py", "--learning_rate=nan"], ["learning_rate=nan"]),
    (["train.py", "--dataset=nothing"], ["prepare.py"]),
    (["train.py", "--device=tpu"], ["--device=cpu"]),
    (["train.py", "--n_embd=100", "--n_head=3"], ["not divisible"]),
    (["train.py", "--init_from=resume", "--out_dir=out/never-made"], ["no run in out/never-made"]),
    (["train.py", "--block_size=100000000", "--dataset=DATA"], ["--block_size"]),
    (["train.py", "--bos=maybe"], ["true or false"]),
    (["extend.py"], ["run folder"]),
    (["extend.py", "out/never-made"], ["does not exist"]),
    (["extend.py", "RUN", "--method=yarm"], ["none, pi, ntk, ntk-parts, yarn, abf, llama3, dynamic-pi, dynamic-ntk, dynamic-yarn, ntk-frozen"]),
    (["extend.py", "RUN", "--factor=0.5"], ["at least 1"]),
    (["extend.py", "RUN", "--options=beta"], ["NAME=VALUE"]),
    (["extend.py", "RUN", "--options=beta=1"], ["beta_fast"]),
    (["extend.py", "RUN", "--plot=a.svg"], [".png"]),
    (["extend.py", "RUN", "--method=llama3", "--options=high_freq_factor=0.5"], ["low_freq_factor=1.0", "high_freq_factor=0.5"]),
    (["train.py", "--nope_every=9"], ["choose 2 to 4"]),
    (["train.py", "--pos=learned", "--nope_every=2"], ["--pos=learned", "leave it out"]),
    (["train.py", "--pos=alibi", "--random_positions=999"], ["--pos=alibi", "rope"]),
    (["train.py", "--random_positions=100"], ["block_size=256"]),
    (["train.py", "--attn_scale=0"], ["attn_scale=0.0"]),
    (["evaluate.py", "RUN", "--protocol=sliding", "--stride=0"], ["stride"]),
    (["experiments/leaderboard.py", "--entries=rope,ropey"], ["'ropey'", "rope, window"]),
    (["experiments/leaderboard.py", "--entry=gone.py"], ["gone.py"]),
    (["sample.py", "out/never-made"], ["does not exist"]),
    (["sample.py", "RUN", "--top_p=0"], ["top_p"]),
    (["sample.py", "RUN", "--start=FILE:gone.txt"], ["gone.txt"]),
    (["evaluate.py"], ["run folder"]),
    (["evaluate.py", "RUN", "--protocol=sliding-ish"], ["chunked, last-quarter, position, sliding, token-aligned"]),
    (["evaluate.py", "RUN", "--lengths=0"], ["at least 1"]),
    (["data/prepare.py"], ["either"]),
    (["data/prepare.py", "gone.txt"], ["gone.txt"]),
    (["data/prepare.py", "--dataset=imagenet"], ["imagenet"]),
], ids=lambda v: " ".join(v) if isinstance(v, list) and v[0].endswith(".py") else "")
def test_errors(words, say, call, trained, text_data, tmp_path):
    words = [str(trained) if w == "RUN" else w.replace("DATA", str(text_data)) for w in words]
    before = sorted(p for p in tmp_path.rglob("*"))
    one_sentence(call(*words, cwd=tmp_path), *say)
    assert sorted(p for p in tmp_path.rglob("*")) == before


def test_errors_of_real_processes(run, trained, tmp_path):
    """What the cases above look like from a shell."""
    for words, say in ((["train.py", "--learning_rat=1"], "learning_rate"), (["extend.py", trained, "--method=yarm"], "ntk-parts"), (["sample.py", "gone"], "gone"), (["evaluate.py", "gone"], "gone"),
                       (["data/prepare.py", "gone"], "gone")):
        one_sentence(run(*words, cwd=tmp_path), say)


def test_an_existing_run_is_not_overwritten(call, trained, text_data):
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    one_sentence(call("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={trained}"), "--init_from=resume", "--out_dir")
    one_sentence(call("extend.py", trained, f"--out_dir={trained}"), "--init_from=resume", "--out_dir")
    assert {p: p.stat().st_mtime_ns for p in trained.rglob("*")} == before


def test_damaged_data_and_checkpoints(call, trained, text_data, tmp_path):
    """Each damage is named by file; the step before a damaged checkpoint is offered."""
    import numpy as np
    import data
    bad = tmp_path / "data"
    shutil.copytree(text_data, bad)
    whole = (bad / "train.bin").read_bytes()
    words = ["train.py", *TINY, f"--dataset={bad}", f"--out_dir={tmp_path}/run"]
    (bad / "train.bin").write_bytes(whole[:-10])
    one_sentence(call(*words), "train.bin", "truncated")
    tokens = np.frombuffer(whole[1024:], "<u2").copy()
    tokens[:] = 999
    (bad / "train.bin").unlink()
    data.write_tokens(bad / "train.bin", tokens, 1000)
    one_sentence(call(*words), "train.bin", "999", "vocabulary of 257")
    (bad / "meta.json").write_text("{")
    one_sentence(call(*words), "meta.json")
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    model = steps(copy)[-1] / "model.safetensors"
    bits = bytearray(model.read_bytes())
    bits[len(bits) // 2] ^= 4
    model.write_bytes(bits)
    for words in (["sample.py", copy], ["evaluate.py", copy], ["extend.py", copy, f"--out_dir={tmp_path}/x"], ["train.py", f"--out_dir={copy}", "--init_from=resume", "--max_iters=20"]):
        one_sentence(call(*words), "model.safetensors", "checksum", steps(copy)[-2].name)
    (steps(copy)[-1] / "optim.safetensors").write_bytes(b"")
    shutil.copy(steps(trained)[-1] / "model.safetensors", model)
    one_sentence(call("train.py", f"--out_dir={copy}", "--init_from=resume", "--max_iters=20"), "optim.safetensors")
    assert call("sample.py", copy, "--max_new_tokens=5").returncode == 0  # sampling does not need it


def test_the_whole_path(run, trained, text_data, tmp_path):
    """extend, stretch again, resume, evaluate and sample, on a real run, from another folder."""
    yarn = tmp_path / "yarn"
    done = run("extend.py", trained, "--method=yarn", "--factor=2", "--max_iters=6", "--eval_interval=3", f"--out_dir={yarn}", "--plot=plots/w.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plots/w.png").read_bytes()[:4] == b"\x89PNG" and "the trained 32" in done.stdout and "D target 64" in done.stdout
    meta = json.loads((steps(yarn)[-1] / "meta.json").read_text())
    assert meta["config"]["stretch"] == {"method": "yarn", "factor": 2.0, "options": {}, "trained_length": 32} and meta["config"]["block_size"] == 64
    assert meta["parent"] == str(steps(trained)[-1]) and meta["pretraining_tokens"] == 8 * 4 * 32 and meta["train"]["batch_size"] == 2 and meta["train"]["learning_rate"] == pytest.approx(0.9e-3)
    assert "75.00%" in done.stdout and done.stdout.count("last-quarter, nats per token") == 2
    shutil.copytree(yarn, tmp_path / "cut")
    shutil.rmtree(steps(tmp_path / "cut")[-1])
    assert run("extend.py", trained, "--method=yarn", "--factor=2", "--max_iters=6", "--eval_interval=3", f"--out_dir={tmp_path}/cut", "--init_from=resume").returncode == 0
    for file in ("model.safetensors", "optim.safetensors"):
        assert (steps(tmp_path / "cut")[-1] / file).read_bytes() == (steps(yarn)[-1] / file).read_bytes()
    drawn = (tmp_path / "plots/w.png").stat().st_mtime_ns
    done = run("extend.py", trained, "--method=yarn", "--factor=2", f"--out_dir={yarn}", "--init_from=resume", cwd=tmp_path)
    assert done.returncode == 0 and "w.png" not in done.stdout and (tmp_path / "plots/w.png").stat().st_mtime_ns == drawn  # going on draws nothing that it was not asked to
    one_sentence(run("extend.py", trained, "--method=pi", f"--out_dir={tmp_path}/cut", "--init_from=resume", cwd=tmp_path), "method yarn")
    again = run("extend.py", yarn, "--method=pi", "--factor=4", "--max_iters=0", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert GPT.load(tmp_path / "yarn-pi4").config.stretch == {"method": "pi", "factor": 8.0, "options": {}, "trained_length": 32}
    done = run("evaluate.py", f"short={trained}", yarn, tmp_path / "yarn-pi4", "--lengths=24,32,64,700,9999999", "--max_tokens=2000", "--protocol=chunked,last-quarter,position", "--plot=plots/a.png",
               "--json=b/a.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "b" / "a.json").read_text())
    assert len(rows) == 3 * (4 * (2 + 16) + 3) and {row["checkpoint"] for row in rows} == {"short", str(yarn), str(tmp_path / "yarn-pi4")}
    assert all(row["task"] == "loss" and ("refused" in row) == (row["length"] == 9999999) for row in rows)
    assert len({row["tokens"] for row in rows if row["protocol"] == "chunked" and "tokens" in row}) == 1  # the same span at all lengths
    assert (tmp_path / "plots" / "a.png").read_bytes()[:4] == b"\x89PNG" and "A short" in done.stdout
    texts = [run("sample.py", yarn, "--start=def f", "--max_new_tokens=80", *more) for more in ([], [], ["--seed=7"], ["--temperature=0", "--num_samples=2"])]
    assert all(t.returncode == 0 and t.stdout.startswith("def f") for t in texts) and texts[0].stdout == texts[1].stdout != texts[2].stdout
    assert f"python extend.py {yarn} --method=yarn --factor=2" in texts[0].stderr and len(set(texts[3].stdout.split("\n" + "-" * 16 + "\n")[i].strip() for i in (0, 1))) == 1
    (tmp_path / "prompt.txt").write_bytes(b"caf\xc3\xa9 \xff <|endoftext|>")
    from_file = run("sample.py", "--start=FILE:prompt.txt", f"--out_dir={yarn}", "--max_new_tokens=3", cwd=tmp_path)
    assert from_file.returncode == 0 and from_file.stdout.startswith("café \ufffd <|endoftext|>")


@pytest.mark.parametrize("pos", POSITIONS)
def test_every_scheme_goes_the_whole_path(pos, call, text_data, tmp_path):
    """Trains, samples past its length, is evaluated there and extended, or says in one sentence why not."""
    out, learned, method = tmp_path / "run", pos == "learned", "pi" if pos == "learned" else "none"
    assert call("train.py", *TINY, f"--pos={pos}", "--max_iters=4", f"--dataset={text_data}", f"--out_dir={out}").returncode == 0
    losses = [json.loads(line)["val_loss"] for line in (out / "log.jsonl").read_text().splitlines() if "val_loss" in line]
    assert losses[-1] < losses[0] and len((call("sample.py", out, "--max_new_tokens=20", "--temperature=0").stdout)) > 15
    far = call("sample.py", out, "--max_new_tokens=60")
    one_sentence(far, "--max_new_tokens=32") if learned else None
    assert far.returncode == (2 if learned else 0)
    rows = tmp_path / "rows.json"
    assert call("evaluate.py", out, "--lengths=16,96", "--protocol=chunked,sliding,token-aligned", "--stride=8", "--max_tokens=480", f"--json={rows}").returncode == 0
    assert [("refused" in row, row.get("stride")) for row in json.loads(rows.read_text())] == [(learned and far, stride) for far in (False, True) for stride in (None, 8, 8)]
    if pos == "rope":
        for method in ("abf", "llama3", "dynamic-ntk", "ntk-lceg", "self-extend"):
            updates = 0 if method == "self-extend" else 2
            done = call("extend.py", out, f"--method={method}", "--factor=2", f"--max_iters={updates}", f"--out_dir={tmp_path}/{method}", f"--plot={tmp_path}/{method}.png")
            assert done.returncode == 0 and (tmp_path / f"{method}.png").exists(), done.stderr
            assert call("sample.py", tmp_path / method, "--max_new_tokens=60").returncode == 0
    else:
        one_sentence(call("extend.py", out, "--method=yarn", "--factor=2", f"--out_dir={tmp_path}/yarn"), f"--pos={pos}", f"--method={method}")
        done = call("extend.py", out, f"--method={method}", "--factor=2", "--max_iters=2", f"--out_dir={tmp_path}/longer")
        assert done.returncode == 0 and call("sample.py", tmp_path / "longer", "--max_new_tokens=40").returncode == 0, done.stderr
        one_sentence(call("extend.py", out, f"--method={method}", f"--plot={tmp_path}/w.png", f"--out_dir={tmp_path}/plot"), f"--pos={pos}", "--plot")


def test_other_ways_to_train_longer(call, text_data, tmp_path):
    """PoSE and DroPE train in windows of the trained length; a scale is fitted and kept on resume; a table comes from a file; long documents, packing and passkeys go through the shell."""
    rope, nope = tmp_path / "rope", tmp_path / "nope"
    assert call("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={rope}", "--passkey=0.3", "--separate_docs=true", "--upsample_docs=2").returncode == 0
    assert call("train.py", *TINY, "--pos=nope", f"--dataset={text_data}", f"--out_dir={nope}", "--min_doc=1000").returncode == 0
    for name, words, tokens in (("pose", ["--pose=true"], 32), ("drope", ["--method=drope"], 32), ("yarn", [], 64)):
        done = call("extend.py", rope, "--factor=2", "--max_iters=3", *words, f"--out_dir={tmp_path / name}")
        meta = json.loads((steps(tmp_path / name)[-1] / "meta.json").read_text())
        batch = meta["train"]["batch_size"] * meta["train"]["gradient_accumulation_steps"]
        assert done.returncode == 0 and meta["config"]["block_size"] == 64 and batch == 4 * 32 // tokens and meta["tokens"] == 3 * 128, done.stderr
        assert f"fine-tuning on {3 * 128:,} tokens" in done.stdout and "100% of the training tokens lie in documents of at least 64 tokens" in done.stdout
    assert call("extend.py", rope, "--method=drope", "--factor=2", "--init_from=resume", "--max_iters=4", f"--out_dir={tmp_path}/drope").returncode == 0
    done = call("extend.py", nope, "--method=scale", "--factor=2", "--max_iters=2", f"--out_dir={tmp_path}/scale")
    scale = GPT.load(tmp_path / "scale").pos.score_scale
    assert done.returncode == 0 and f"scores multiplied by {scale:.3f}" in done.stdout and GPT.load(tmp_path / "scale").config.stretch["options"] == {"scale": scale}
    assert call("extend.py", nope, "--method=scale", "--factor=2", "--max_iters=3", "--init_from=resume", f"--out_dir={tmp_path}/scale").returncode == 0
    (tmp_path / "table.json").write_text(json.dumps({"long_factor": [1.0 + i / 4 for i in range(8)]}))
    done = call("extend.py", rope, "--method=longrope", f"--options={tmp_path}/table.json", "--max_iters=0", f"--out_dir={tmp_path}/table")
    assert done.returncode == 0 and GPT.load(tmp_path / "table").config.stretch["options"]["long_factor"][7] == 2.75, done.stderr
    (tmp_path / "bad.json").write_text("[1]")
    for words, say in ((["--method=self-extend"], ["self-extend", "--max_iters=0"]), (["--method=drope", "--pose=true"], ["--pose"]), (["--method=longrope"], ["long_factor"]), ([f"--options={tmp_path}/bad.json"], ["bad.json"]),
                       ([f"--options={tmp_path}/none.json"], ["none.json"]), (["--min_doc=1000000"], ["--min_doc"]), (["--passkey=2"], ["passkey"])):
        one_sentence(call("extend.py", rope, *words, f"--out_dir={tmp_path}/no"), *say)
        assert not (tmp_path / "no").exists()
    one_sentence(call("extend.py", nope, "--method=none", "--pose=true", f"--out_dir={tmp_path}/no"), "--pose", "--pos=nope")


def test_hybrids_and_random_positions_from_the_shell(call, text_data, tmp_path):
    """They are in the checkpoint: resuming, sampling and evaluating need no flags."""
    for name, words in (("hybrid", ["--nope_every=2", "--window=8", "--sinks=2"]), ("random", ["--random_positions=100"]), ("scale", ["--pos=nope", "--attn_scale=1.5"])):
        out = tmp_path / name
        assert call("train.py", *TINY, *words, f"--dataset={text_data}", f"--out_dir={out}").returncode == 0
        shutil.copytree(out, tmp_path / "cut")
        shutil.rmtree(steps(tmp_path / "cut")[-1])
        assert call("train.py", f"--out_dir={tmp_path}/cut", "--init_from=resume").returncode == 0
        for file in ("model.safetensors", "optim.safetensors"):
            assert (steps(tmp_path / "cut")[-1] / file).read_bytes() == (steps(out)[-1] / file).read_bytes(), name
        shutil.rmtree(tmp_path / "cut")
        assert call("sample.py", out, "--max_new_tokens=50").returncode == 0 and call("evaluate.py", out, "--lengths=32,64", "--max_tokens=640").returncode == 0
    one_sentence(call("extend.py", tmp_path / "random", "--factor=2", f"--out_dir={tmp_path}/x"), "--random_positions")


def test_sampling_the_newest_run(run, trained, tmp_path):
    one_sentence(run("sample.py", cwd=tmp_path), "train.py")
    shutil.copytree(trained, tmp_path / "out" / "deep" / "run")
    assert run("sample.py", "--max_new_tokens=2", cwd=tmp_path).returncode == 0


def test_an_imported_run_may_be_the_newest(trained, tmp_path, call):
    """It has no log; the time is that of the checkpoint."""
    for name, n in (("a", 2), ("b", 1)):
        shutil.copytree(trained, tmp_path / "out" / name)
        for meta in (tmp_path / "out" / name).glob("step-*/meta.json"):
            os.utime(meta, (10**9 + n, 10**9 + n))
    (tmp_path / "out" / "a" / "log.jsonl").unlink()
    done = call("sample.py", "--max_new_tokens=40", "--start=a prompt", cwd=tmp_path)
    assert done.returncode == 0 and "out/a --method" in done.stderr and "out/b" not in done.stderr, done.stderr


def letters(folder, characters):
    """A dataset of these letters alone, by characters."""
    folder.mkdir()
    for split, n in (("train", 400), ("val", 200)):
        data.write_tokens(folder / f"{split}.bin", [i * i % len(characters) for i in range(n)], len(characters))
    (folder / "meta.json").write_text(json.dumps({"tokenizer": {"kind": "char", "characters": characters, "bos": False}, "vocab_size": len(characters), "bos": None, "bos_default": False}))
    return folder


def test_whose_tokens_they_are(call, tmp_path):
    """Vocabularies of one size are told apart by what they stand for; the hash under a picture is that of what was read; no newline is needed to begin."""
    mine, other = letters(tmp_path / "acgt", "ACGT"), letters(tmp_path / "wxyz", "WXYZ")
    run = tmp_path / "run"
    done = call("train.py", *TINY, f"--dataset={mine}", f"--out_dir={run}")
    assert done.returncode == 0 and "a sample:" in done.stdout
    done = call("sample.py", run, "--max_new_tokens=5")
    assert done.returncode == 0 and set(done.stdout.strip()) <= set("ACGT")
    one_sentence(call("evaluate.py", run, f"--dataset={other}"), "stand for other text", "--tokenizer=RUN")
    one_sentence(call("extend.py", run, f"--dataset={other}", "--max_iters=0", f"--out_dir={tmp_path}/x"), "stand for other text")
    assert not (tmp_path / "x").exists()
    bare = letters(tmp_path / "bare", "ACGT")
    (bare / "meta.json").write_text(json.dumps({"tokenizer": None, "vocab_size": 4, "bos": None, "bos_default": False}))
    assert call("extend.py", run, f"--dataset={bare}", "--max_iters=0", "--factor=2", f"--out_dir={tmp_path}/y").returncode == 0
    assert read_meta(steps(tmp_path / "y")[-1])["tokenizer"]["characters"] == "ACGT"  # of token files that do not say
    drawn = {}
    picture, evaluate.picture = evaluate.picture, lambda rows, lengths, file, note: drawn.update(note=note)
    try:
        assert call("evaluate.py", run, "--lengths=32", f"--plot={tmp_path}/p.png", "--max_tokens=999999").returncode == 0
        assert f"200 tokens of {mine}, data {data.Dataset(str(mine)).hash}" == drawn["note"]
        data.write_tokens(mine / "more_val.bin", [1] * 50, 4)
        done = call("evaluate.py", run, "--lengths=32")
        assert done.returncode == 0 and "may have seen in training" in done.stderr
    finally:
        evaluate.picture = picture
    for words in ((f"--plot={tmp_path}/none.png", f"--json={tmp_path}/none.json", tmp_path / "nothing"), (f"--plot={tmp_path}/none.png", run, f"--dataset={other}")):
        assert call("evaluate.py", *words).returncode == 2 and not (tmp_path / "none.png").exists() and not (tmp_path / "none.json").exists()


def test_who_resumes_what(call, trained, text_data, tmp_path):
    """train.py would read windows of another length than the fine-tuning that it goes on with."""
    words = ["extend.py", trained, "--factor=4", "--pose=true", "--max_iters=2", f"--out_dir={tmp_path}/pose"]
    assert call(*words).returncode == 0
    one_sentence(call("train.py", "--init_from=resume", f"--out_dir={tmp_path}/pose"), "extend.py")
    meta = read_meta(steps(tmp_path / "pose")[-1])["train"]
    assert meta["batch_size"] == 4  # windows of the trained length: 4 x 32
    for name, parent, more, batch in (("a", "pose", ["--factor=2"], 1), ("b", "pose", ["--factor=2", "--pose=true"], 4)):  # the parent's tokens an iteration: 128
        assert call("extend.py", tmp_path / parent, *more, "--max_iters=0", f"--out_dir={tmp_path}/{name}").returncode == 0
        assert read_meta(steps(tmp_path / name)[-1])["train"]["batch_size"] == batch, name


@pytest.mark.parametrize("words", [["--method=lm-infinite", "--options=sinks=inf"], ["--method=lm-infinite", "--options=sinks=nan"], ["--method=llama3", "--options=low_freq_factor=true"], ["--method=yarn", "--options=beta_fast=1e308"],
                                   ["--method=ntk-lceg", "--options=length=1e308"], ["--method=self-extend", "--options=window=inf"], ["--method=abf", "--options=new_base=true"], ["--method=ntk", "--factor=1e6"]])
def test_options_that_lead_nowhere(words, call, trained, tmp_path):
    done = call("extend.py", trained, *words, "--max_iters=0", f"--out_dir={tmp_path}/x")
    if done.returncode:
        one_sentence(done)
        assert not (tmp_path / "x").exists()


def test_a_reader_that_goes_away(trained):
    """python sample.py | head -c 1: no traceback."""
    process = subprocess.Popen([sys.executable, ROOT / "sample.py", trained, "--max_new_tokens=300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.read(1)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait(60)


def test_without_triton(run, trained, text_data, tmp_path):
    """With triton unimportable, train, extend, evaluate and sample still run."""
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "sitecustomize.py").write_text(
        "import sys\nclass Hide:\n    def find_spec(self, name, *a):\n        if name.split('.')[0] == 'triton':\n            raise ModuleNotFoundError('No module named triton')\nsys.meta_path.insert(0, Hide())\n")
    env = {"PYTHONPATH": str(tmp_path / "hide")}
    assert "ModuleNotFoundError" in subprocess.run([sys.executable, "-c", "import triton"], env={**__import__("os").environ, **env}, capture_output=True, text=True).stderr
    for words in (["train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path}/run"], ["extend.py", f"{tmp_path}/run", "--max_iters=2", f"--out_dir={tmp_path}/long"],
                  ["evaluate.py", f"{tmp_path}/long", "--lengths=32,64", "--max_tokens=500"], ["sample.py", f"{tmp_path}/long", "--max_new_tokens=5"]):
        done = run(*words, env=env)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["train.py", "extend.py", "evaluate.py", "sample.py", "data/prepare.py", "hf.py", "experiments/leaderboard.py"])
def test_help_lists_every_setting_with_its_line(script, call):
    done = call(script, "--help")
    assert done.returncode == 0 and not done.stderr
    classes = {"train.py": (GPTConfig, train.TrainConfig), "extend.py": (extend.ExtendConfig,), "evaluate.py": (evaluate.EvaluateConfig,), "sample.py": (sample.SampleConfig,),
               "data/prepare.py": (prepare.PrepareConfig,), "hf.py": (__import__("hf").HFConfig,), "experiments/leaderboard.py": ()}[script]
    for cls in classes:
        for name in cls.__dataclass_fields__:
            if name not in INTERNAL:
                assert re.search(rf"^  --{name}=\S+ +\S+ +\S+", done.stdout, re.M), name


def test_settings_parser(tmp_path, monkeypatch):
    (tmp_path / "a.toml").write_text('n_layer = 7\nlearning_rate = 1\ntied = false\n')
    (tmp_path / "b.toml").write_text('n_layer = 8\n')
    monkeypatch.chdir(tmp_path)
    parse = lambda *argv, **o: config.parse(GPTConfig, train.TrainConfig, presets=True, argv=argv, **o)  # noqa: E731
    gpt, cfg, given, _ = parse("--n_layer", "9", "a.toml", "b.toml", "--qk_norm", "--max_iters=1e3", "--bos", "false", "--compile=auto")
    assert (gpt.n_layer, cfg.learning_rate, gpt.tied, gpt.qk_norm, cfg.max_iters, cfg.bos, cfg.compile) == (9, 1.0, False, True, 1000, False, None)  # presets stack, flags win
    assert isinstance(cfg.learning_rate, float) and given == {"n_layer", "learning_rate", "tied", "qk_norm", "max_iters", "bos", "compile"}
    assert parse("a.toml", "b.toml")[0].n_layer == 8 and parse("--n_head=1", defaults=lambda given, paths: {"n_layer": 3 * given["n_head"]})[0].n_layer == 3
    for text in ("n_layer = 'x'", "n_layer = 1.5", "n_layers = 3", "n_layer = ", "n_layer = true", "pos = 3", "[n_layer]\na = 1"):
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(config.UserError, match="c.toml"):
            parse("c.toml")
    assert parse("--dtype=auto")[1].dtype == "auto"
    with pytest.raises(config.UserError, match="dtype is one of"):
        parse("--dtype=none")
    for preset in (ROOT / "config").glob("*.toml"):
        gpt, cfg, *_ = parse(str(preset))
        plain = parse()
        assert (gpt, cfg) != plain[:2]


def test_a_python_too_old_is_told_so():
    """Before anything else is imported, in one sentence. The check is run with a version that it thinks too old."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.version_info = (3, 9, 18); import config"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "3.11" in done.stderr and "3.9" in done.stderr and len(done.stderr.splitlines()) == 1
    for script in ("train.py", "extend.py", "evaluate.py", "sample.py", "hf.py"):
        first = next(node for node in ast.parse((ROOT / script).read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom)))
        assert first.names[0].name == "config", script


def test_the_house_stays_small():
    """At most 1,300 lines in the four files that a newcomer reads, and 58 settings of them."""
    files = ["model.py", "train.py", "sample.py", "extend.py"]
    assert sum(len((ROOT / file).read_text().splitlines()) for file in files) <= 1300
    names = {name for cls in (GPTConfig, train.TrainConfig, extend.ExtendConfig, sample.SampleConfig) for name in cls.__dataclass_fields__} - INTERNAL
    assert len(names) <= 58, len(names)


def test_who_imports_whom():
    """extend -> train, evaluate -> model -> kernels; train, evaluate, sample -> data, config; and never the other way."""
    allowed = {"kernels/__init__.py": {"kernels"}, "kernels/reference.py": set(), "kernels/rotary.py": set(), "kernels/flash.py": set(), "kernels/decode.py": set(), "checkpoint.py": set(), "stretch.py": {"kernels", "checkpoint"}, "generate.py": {"kernels", "checkpoint"}, "model.py": {"kernels", "checkpoint", "generate", "stretch", "hf"}, "config/__init__.py": set(), "data/__init__.py": {"config"}, "data/prepare.py": {"config", "data", "checkpoint"},
               "optim.py": set(), "train.py": {"config", "data", "checkpoint", "model", "optim"}, "evaluate.py": {"config", "data", "model"}, "sample.py": {"config", "data", "model"},
               "extend.py": {"config", "data", "checkpoint", "stretch", "model", "train", "evaluate"}, "data/tokenizer_json.py": {"config", "data"}, "hf.py": {"config", "data", "checkpoint", "model"}}
    ours = {"kernels", "checkpoint", "stretch", "generate", "optim", "model", "config", "data", "train", "evaluate", "sample", "extend", "hf", "experiments"}
    for file, may in allowed.items():
        tree = ast.parse((ROOT / file).read_text())
        uses = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names} | {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module and not n.level}
        assert uses & ours <= may, file
    schemes = set(__import__("model").POSITIONS)
    for cls in ("Attention", "Block"):
        body = re.search(rf"class {cls}\(.*?(?=\nclass )", (ROOT / "model.py").read_text(), re.S)[0]
        assert not [word for word in re.findall(r"[\"'](\w+)[\"']", body) if word in schemes] and ".pos ==" not in body, cls
    assert not re.search(r"\bimport pickle|\bpickle\.|(?<![.\w])(eval|exec)\(", "".join((ROOT / f).read_text() for f in allowed if f != "data/__init__.py"))


def test_model_works_alone(tmp_path):
    """from model import GPT needs neither settings nor data."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from model import GPT, GPTConfig; GPT(GPTConfig()); assert not {{'config', 'data', 'train', 'triton'}} & set(sys.modules); print('ok')"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True).stdout == "ok\n"


def test_the_checkout_is_clean_of_big_files():
    for file in Path(ROOT).rglob("*"):
        if file.is_file() and not set(file.relative_to(ROOT).parts) & {".git", ".venv", "out", "__pycache__", ".pytest_cache", ".hypothesis", ".ruff_cache"} and file.relative_to(ROOT).parts[0] != "data":
            assert file.stat().st_size < 1_000_000 or file.suffix == ".png", file
