"""public.py on a toy of bytes that is extended from 64 to 256: its cells against evaluate.py's
records, and its report against numbers computed here.
"""

import dataclasses
import itertools
import re
import statistics

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_refused, measure_cells, run_command

import hf
from data import texts
from evaluate import EvaluateConfig
from experiments import public, public_report
from model import GPT
from nanolong import run
from nanolong.errors import UserError

ORIGINAL = 64
FILES = ("model.py", "train.py", "extend.py", "sample.py", "evaluate.py", "rope_scaling.py")


@pytest.fixture
def toy(save_run, tmp_path, monkeypatch):
    """A function that runs public.py on a toy's checkpoint, and returns its cells by key."""
    run_folder = save_run(pos="rope", block_size=ORIGINAL, rope_base=100.0, n_layer=2)
    hf.main(["export", str(run_folder), str(tmp_path / "toy"), "--verify=false"])
    files = {name: ROOT / name for name in FILES}
    # shorter than a document of 257 tokens: fine-tuning is on such modules
    for name in ("short.py", "shorter.py"):
        files[name] = tmp_path / name
        files[name].write_text("a = 1\nb = a + 1\n" * 15)
    monkeypatch.setattr(texts, "standard_library", lambda: files)
    monkeypatch.setattr(public, "read_prose", lambda: {"prose": (ROOT / "README.md").read_text()})
    sizes = {"lengths": "32,64,256", "targets": 64, "documents": 2, "find_length": 320}
    sizes |= {"prompts": 2, "tokens": 128, "train_length": 32, "dtype": "float32"}
    sizes |= {"cells": tmp_path / "cells.jsonl", "cache": tmp_path / "cache", "device": "cpu"}

    def call(*parts, **changed):
        flags = [f"--{name}={value}" for name, value in {**sizes, **changed}.items()]
        words = ["report"] if parts == ("report",) else [str(tmp_path / "toy"), *parts]
        public.main([*words, *flags])
        return public.read_cells(tmp_path / "cells.jsonl")

    return call


@pytest.mark.parametrize("arm", ["yarn", "lm-infinite"])
def test_losses_are_those_of_evaluate(toy, tmp_path, arm):
    """Of targets that fit into half the shorter context, evaluate.py scores the same ones."""
    cells = toy("a", lengths="32,128", targets=16, documents=3, arms=f"untouched,{arm}")
    model = GPT.load(next((tmp_path / "cache").iterdir()) / "imported")
    tokenizer = public.data.tokenizer_from_json(model.meta["tokenizer"])
    documents, _ = public.read_documents(tokenizer, 129)
    n_repeats = 0
    for number, (_, ids) in enumerate(documents[:3]):
        file = tmp_path / "document.txt"
        file.write_bytes(tokenizer.decode(ids[:128].tolist()))
        model = GPT.load(model.folder)
        model.extend(arm, 4.0)
        own = {"text": str(file), "stride": 16, "max_tokens": 128, "dtype": "float32"}
        cfg = EvaluateConfig(protocol=("repeats",), **own)
        records = {
            record["bucket"]: record for record in measure_cells({"": model}, cfg, (32, 128))
        }
        n_repeats += records["far"]["tokens"] + records["near"]["tokens"]
        for bucket, record in records.items():
            name = {"far": "far 128", "pair far": "pair far 128"}.get(bucket, bucket)
            n, nats = cells["repeats", arm, 0, 128, number]["values"].get(name, (0, 0.0))
            if not record["tokens"]:
                assert not n
                continue
            # up to its original length LM-Infinite is the untouched checkpoint
            short_arm = arm if arm == "yarn" else "untouched"
            _, nats_in_short = cells["repeats", short_arm, 0, 32, number]["values"][name]
            assert n == record["tokens"]
            assert nats / n == pytest.approx(record["loss"], abs=1e-4)
            assert (nats_in_short - nats) / n == pytest.approx(record["gain"]["mean"], abs=1e-4)
    assert n_repeats > 0


def test_buckets_are_parts_of_all_targets(toy):
    for cell in toy("a").values():
        counts = {bucket: n for bucket, (n, _) in cell["values"].items() if "pair" not in bucket}
        sums = {bucket: x for bucket, (_, x) in cell["values"].items() if "pair" not in bucket}
        assert counts.pop("all") == sum(counts.values()) == 64
        assert sums.pop("all") == pytest.approx(sum(sums.values()), abs=1e-3)
        assert set(counts) == {"near", "far 64", "far 256", "new"}


@pytest.mark.parametrize("targets", [16, 64, 80])
def test_each_target_is_scored_once_with_half_the_context(targets):
    cfg = public.PublicConfig(lengths=(32, 64, 256), targets=targets)
    for length in cfg.lengths:
        scored = []
        for start, n_context in public.place_targets(cfg, length):
            assert n_context >= length // 2
            scored += range(start + n_context, start + length)
        assert scored == list(range(256 - targets, 256))


@pytest.mark.parametrize("extra", [0, 1])
def test_a_bucket_is_the_shortest_context_that_shows_the_repeat(extra):
    """extra: 1 if the first token of a document is no target, as without a bos."""
    cfg = public.PublicConfig(lengths=(32, 64, 256), targets=48)
    tokens = np.random.default_rng(1).integers(0, 7, 257)
    found = public.split_targets(cfg, tokens, extra)
    starts = {length: [] for length in cfg.lengths}
    for length, own in starts.items():
        for start, n_context in public.place_targets(cfg, length):
            own += [start] * (length - n_context)
    for i in range(48):
        end = 256 - 48 + i + extra
        wanted = list(tokens[end - 2 : end + 1])
        places = [j for j in range(end - 2) if list(tokens[j : j + 3]) == wanted]
        names = {32: "near", 64: "far 64", 256: "far 256"}
        shown = [names[n] for n in cfg.lengths if places and places[-1] >= starts[n][i]]
        expected = {"all", *(shown or ["new"])[:1]}
        assert {name for name, x in found.items() if x[i] and "pair" not in name} == expected


def test_only_missing_cells_are_measured(toy, tmp_path, capsys):
    file = tmp_path / "cells.jsonl"
    toy("a", documents=1)
    first = file.read_text()
    cells = toy("a", documents=2)
    assert file.read_text().startswith(first) and len(cells) == 2 * first.count("\n")
    # of each document untouched comes first
    assert list(cells)[0].arm == "untouched" and {key.document for key in list(cells)[:5]} == {0}
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:3] + lines[4:]) + "\n")
    capsys.readouterr()
    again = toy("a", documents=2)
    assert capsys.readouterr().out.count(": repeats ") == 1
    assert list(again)[-1] == list(cells)[3]
    assert {k: again[k]["values"] for k in cells} == {k: cells[k]["values"] for k in cells}
    file.write_text(first + lines[0][:40])
    with pytest.raises(UserError, match=f"line {first.count(chr(10)) + 1} .* is no cell"):
        toy("a")


def test_another_checkpoint_or_other_documents_are_refused(toy, tmp_path):
    toy("a", documents=1, arms="untouched")
    with pytest.raises(UserError, match="of other --lengths or --targets"):
        toy("a", lengths="32,128")
    weights = tmp_path / "toy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="cells of another checkpoint"):
        toy("a")


def test_arms_that_are_not_measured_are_the_untouched_checkpoint(toy, tmp_path):
    toy("a", documents=1, arms="untouched")
    folder = next((tmp_path / "cache").iterdir()) / "imported"
    tokens = torch.arange(ORIGINAL)[None] * 7 % 257
    for arm, fraction in public_report.SAME_UP_TO.items():
        n = int(ORIGINAL * fraction)
        model = GPT.load(folder)
        expected = model(tokens[:, :n])
        model.extend(arm, 4.0)
        assert model(tokens[:, :n]).sub(expected).abs().max() < 1e-5, arm


def test_answers_are_those_of_ruler(toy, tmp_path):
    """And a task that the untouched checkpoint does not solve is asked no further."""
    cells = toy("b", find="niah,nth")
    assert {(key.task, key.length) for key in cells} == {("niah", ORIGINAL), ("nth", ORIGINAL)}
    model = GPT.load(next((tmp_path / "cache").iterdir()) / "imported")
    cfg = EvaluateConfig(task=("ruler",), ruler=("niah", "nth"), trials=2, dtype="float32")
    for record in measure_cells({"": model}, cfg, (ORIGINAL,)):
        for prompt, (nats, right, gain, guessed) in enumerate(record["by_prompt"]):
            values = cells[record["kind"], "untouched", 0, ORIGINAL, prompt]["values"]
            assert (values["right"], values["right without"]) == (right, guessed)
            assert values["nats"] == pytest.approx(nats, abs=1e-3)
            assert values["nats without"] - values["nats"] == pytest.approx(gain, abs=1e-3)


def test_a_task_that_is_solved_is_asked_of_all_arms():
    cfg = public.PublicConfig(prompts=2, find=("niah", "nth"))
    ceiling = list(itertools.islice(public.plan_prompts(cfg, 8192, {}), 4))
    assert {key[:4] for key in ceiling} == {(t, "untouched", 0, 8192) for t in ("niah", "nth")}
    cells = {key: {"values": {"right": key.task == "nth"}} for key in ceiling}
    rest = list(public.plan_prompts(cfg, 8192, cells))[4:]
    expected = itertools.product(["nth"], cfg.finders, [0], [12288], [0, 1])
    assert sorted(rest) == sorted(expected) and [key.document for key in rest[:4]] == [0] * 4


def test_a_fine_tuned_arm_is_trained_once_by_its_command(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(public, "TUNED", ("yarn",))
    cells = toy("c", documents=1)
    trained = [key for key in cells if key.task == "train"]
    assert [(key.arm, key.seed) for key in trained] == [("yarn+128", 1), ("yarn+128", 2)]
    folder = next((tmp_path / "cache").iterdir()) / "yarn+128-1"
    meta = run.read_meta(run.find_checkpoint(folder))
    assert (meta["tokens"], meta["config"]["block_size"]) == (128, 256)
    assert (meta["train"]["pose"], meta["train"]["train_length"]) == (True, 32)
    values = [cells["repeats", "yarn+128", seed, 256, 0]["values"]["all"] for seed in (1, 2)]
    assert values[0] != values[1]
    lengths = [[k.length for k in cells if k[:3] == ("repeats", "yarn+128", s)] for s in (1, 2)]
    assert lengths == [[32, 64, 256], [32, 256]]
    capsys.readouterr()
    toy("c", documents=2)
    assert "train yarn" not in capsys.readouterr().out


def test_report_has_the_means_and_intervals_of_the_cells(toy, tmp_path):
    """Student's t for 5 documents, 2.776, and the ratio estimator."""
    cells = toy("a", documents=5)
    toy("report", documents=6)
    report = (tmp_path / "cells.md").read_text()
    tables = [part.splitlines() for part in re.findall(r"(?:^\|.*\n)+", report, re.M)]

    def interval(rows):
        sums, counts = zip(*rows, strict=True)
        mean = sum(sums) / sum(counts)
        residuals = [total - mean * n for total, n in rows]
        deviation = statistics.fmean(x * x for x in residuals) * 5 / 4
        return mean, 2.776 * (5 * deviation) ** 0.5 / sum(counts)

    def values(arm, length, *buckets):
        found = [cells["repeats", arm, 0, length, d]["values"] for d in range(5)]
        return [[sum(x[b][i] for b in buckets) for i in (1, 0)] for x in found]

    def row(table, arm):
        return next(line.split(" | ") for line in table if line.startswith(f"| {arm} |"))

    mean, width = interval(values("yarn", 256, "all"))
    assert row(tables[0], "yarn")[3] == f"{mean:.3f} ± {width:.3f}"
    # of LM-Infinite the shorter context is the untouched checkpoint's
    for arm, short_arm in (("yarn", "yarn"), ("lm-infinite", "untouched")):
        pairs = zip(values(short_arm, 64, "far 256"), values(arm, 256, "far 256"), strict=True)
        mean, width = interval([(a - b, n) for (a, n), (b, _) in pairs])
        assert row(tables[2], arm)[3] == f"{mean:+.3f} ± {width:.3f}"
    pairs = zip(values("yarn", 256, "all"), values("lm-infinite", 256, "all"), strict=True)
    mean, width = interval([(a - b, n) for (a, n), (b, _) in pairs])
    assert row(tables[3], "yarn")[1] == f"{mean:+.3f} ± {width:.3f}"
    # what is not measured yet is nobody's loss
    file = tmp_path / "cells.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(x for x in lines if '"self-extend", "seed": 0, "length": 256' not in x))
    toy("report")
    table = re.search(r"(?:^\|.*\n)+", (tmp_path / "cells.md").read_text(), re.M)[0].splitlines()
    assert row(table, "self-extend")[3] == "–" and row(table, "self-extend")[1] != "–"


def test_damaged_requests_are_refused(toy):
    for parts, words in ((("d",), "parts of a, b, c"), (("report",), "has no cells")):
        with pytest.raises(UserError, match=words):
            toy(*parts)
    wrong = {"arms": "rope", "tokens": "64", "targets": "300", "documents": 0, "find": "needle"}
    for name, value in wrong.items():
        with pytest.raises(UserError, match=f"--{name}|there is no arm rope"):
            toy("a", **{name: value})


def test_the_version_for_a_gpu_gives_known_settings(tmp_path):
    script = ROOT / "experiments/gpu_smollm2.sh"
    known = {field.name for field in dataclasses.fields(public.PublicConfig)}
    found = set(re.findall(r"--(\w+)=", script.read_text()))
    assert found <= known and "lengths" in found
    assert_refused(run_command([script, tmp_path / "absent"]), "is no checkpoint")


def test_a_fine_tuning_that_a_signal_stopped_is_not_measured(tmp_path, monkeypatch):
    checkpoints = public.Checkpoints.__new__(public.Checkpoints)
    checkpoints.cfg, checkpoints.cache = public.PublicConfig(), tmp_path
    (tmp_path / "modules").mkdir()
    monkeypatch.setattr(public.extend, "main", lambda words: 0)  # as after SIGTERM
    with pytest.raises(UserError, match="was stopped: the same command goes on"):
        checkpoints.tune("yarn+65536", 1, {})
