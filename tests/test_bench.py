"""experiments/bench.py from the command line, and what its reports say about the measurements."""

import json
import shutil
import time

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

from experiments import bench, bench_train


@pytest.fixture
def quick(monkeypatch):
    """Time one call of each operator per turn."""

    def one_call(self, run, seconds):
        start = time.perf_counter()
        run()
        return 1000 * (time.perf_counter() - start)

    monkeypatch.setattr(bench.Benchmark, "median_ms", one_call)


def test_operators_are_measured_and_reported(quick, call, tmp_path):
    flags = ["--lengths=65", f"--out_dir={tmp_path}", "--device=cpu"]
    done = call("experiments/bench.py", "--only=attention,decode", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"attention", "decode"}
    report = (tmp_path / "bench.md").read_text()
    for row in rows:
        assert row["ms"] > 0 and row["rate"] > 0
        first = next(other for other in rows if other["case"] == row["case"])
        assert abs(row["speedup"] - first["ms"] / row["ms"]) < 1e-9
        assert f"{row['ms']:.3f}" in report
    assert (tmp_path / "bench.png").stat().st_size > 10_000

    # 12 heads; causal: half of the 4 T^2 D
    row = next(row for row in rows if row["case"].startswith("forward D64 T65"))
    gflop = 12 * 4 * 65 * 65 * 64 / 2 / 1e9
    assert row["unit"] == "GFLOP/s"
    assert row["rate"] == pytest.approx(gflop / (row["ms"] / 1000), rel=1e-6)


@pytest.mark.slow
def test_other_operators_are_measured(quick, call, tmp_path):
    flags = [f"--out_dir={tmp_path}", "--device=cpu"]
    done = call("experiments/bench.py", "--only=ceilings,rope,step", *flags)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"ceilings", "rope", "step"}
    assert all(row["ms"] > 0 for row in rows)


def test_the_losses_that_are_timed_agree():
    x = torch.randn(9, 8, requires_grad=True)
    weight = torch.randn(20, 8, requires_grad=True)
    targets = torch.randint(0, 20, (9,))
    expected = bench.materialised_loss(x, weight, targets)
    assert torch.allclose(bench.our_loss(x, weight, targets), expected)
    if hasattr(F, "linear_cross_entropy"):
        assert torch.allclose(bench.torch_loss(x, weight, targets), expected)


@pytest.mark.parametrize("section", ["bench", "train", "sample"])
def test_redraw_writes_the_report_of_the_json(section, call, tmp_path):
    """And the reports in results/ are those of their JSON."""
    folder = ROOT / "results" / "cpu"
    shutil.copy(folder / f"{section}.json", tmp_path)
    sections = [] if section == "bench" else [section]
    done = call(
        "experiments/bench.py", *sections, "--redraw=true", "--device=cpu", f"--out_dir={tmp_path}"
    )
    assert done.returncode == 0, done.stderr
    for suffix in ("md", "json"):
        name = f"{section}.{suffix}"
        assert (tmp_path / name).read_text() == (folder / name).read_text()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--only=speed"], "'speed'"),
        (["trains"], "'trains'"),
        (["--lengths=0"], "at least 1"),
        (["--rounds=0"], "above 0"),
        (["train"], "--nanogpt=PATH"),
        (["train", "--nanogpt=nowhere"], "nowhere has no train.py"),
        (["train", "--iterations=3"], "at least 8"),
        (["sample", "--baseline=nowhere"], "nowhere has no model.py"),
        (["train", "--redraw=true"], "train.json, which does not exist"),
    ],
)
def test_bad_settings_are_rejected(flags, words, call, tmp_path):
    done = call("experiments/bench.py", *flags, "--device=cpu", f"--out_dir={tmp_path}")
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_speedup_is_relative_to_the_first_row():
    """An implementation that fails, or is left out, has the reason instead."""
    benchmark = bench.Benchmark(bench.BenchConfig(), torch.device("cpu"))
    benchmark.median_ms = lambda run, seconds: run()

    def fail():
        raise RuntimeError("not for this shape\nand more")

    implementations = {
        "first": lambda: 2.0,
        "bad": fail,
        "absent": "left out: minutes",
        "second": lambda: 8.0,
    }
    benchmark.compare("rope", "case", implementations, 6e9, "GB/s")
    rows = {row.name: row for row in benchmark.rows}
    assert rows["first"].speedup == 1 and rows["second"].speedup == 0.25
    assert rows["second"].rate == pytest.approx(6 / 0.008)
    assert rows["bad"].note == "not for this shape" and rows["bad"].ms is None
    assert rows["absent"].note == "left out: minutes"


# -----------------------------------------------------------------------------
# bench_train.py


def test_training_times_of_nanogpt_are_those_it_logs(tmp_path):
    (tmp_path / "train.py").write_text(
        "for i in range(12):\n"
        "    ms = 1000 if i < 5 else 20 + i\n"
        "    print(f'iter {i}: loss 1.0, time {ms:.2f}ms, mfu -100.00%')\n"
    )
    timing = bench_train.time_nanogpt(tmp_path, {"n_layer": 1}, False, 12, tmp_path)
    assert timing.step == pytest.approx(0.028)
    assert 0 < timing.first_step < 30 and timing.peak_mb > 1


@pytest.mark.slow
def test_training_times_of_ours_are_those_it_logs(text_data, tmp_path):
    flags = ["config/debug.toml"]
    timing = bench_train.time_nanolong(ROOT, flags, text_data, 128, 12, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    fastest = min(128 / row["tokens_per_second"] for row in rows if "loss" in row)
    assert fastest <= timing.step < 5
    assert timing.first_step > 0.5 and timing.peak_mb > 100


def test_a_training_that_fails_is_reported(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit('no data')")
    with pytest.raises(bench_train.UserError, match="no data"):
        bench_train.time_nanogpt(tmp_path, {}, False, 12, tmp_path)
