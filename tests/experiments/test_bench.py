"""experiments/bench.py: turns and ratios, what the timed functions compute, and the reports."""

import json
from pathlib import Path

import pytest
import torch
from conftest import assert_success
from torch.utils._pytree import tree_map

from experiments import bench


def test_ratios_are_of_pairs_and_a_failure_has_its_reason():
    in_order = iter([9.0, 9.0, 2.0, 1.0, 30.0, 10.0, 1.0, 5.0]).__next__
    # called as ab, and then ba, ab, ba: a / b is 0.5, 3 and 5, and that of the medians is 2.5
    clocks = {"a": in_order, "b": in_order, "bad": iter(()).__next__}
    rows = bench.compare("rope", "case", clocks, 3, 6.0, "GB/s", warmup=1)
    assert "| 3.00 (1.75 to 4.00) | 3,000.0 GB/s" in bench.format_table(rows).splitlines()[3]
    assert (rows[1]["ms"], rows[2]["ms"], rows[2]["note"]) == (2.0, None, "StopIteration()")


def test_what_is_timed_is_attention(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for name, arguments, options, work, *_ in bench.attention_cases(torch.device("cpu"), (33,)):
        assert abs(work / (12 * 4 * 33 * 33 * 64 / 2 / 1e9) - 1) < 1e-9
        functions = (bench.plain_attention, bench.reference.attention)
        if not options.get("relative"):
            functions += (bench.flex_attention,)
        arguments, options = tree_map(
            lambda x: x if x is None else x.detach(), (arguments, options)
        )
        found = [f(*arguments, **options) for f in functions]
        for y in found[1:]:
            torch.testing.assert_close(found[0], y, msg=name)


def test_schemes_have_a_row_each(call, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", lambda model: model)
    words = ("schemes", "--shapes=alibi,fox", "--lengths=64", "--steps=1", "--device=cpu")
    assert_success(call("experiments/bench.py", *words, f"--out_dir={tmp_path}"))
    rows = json.loads((tmp_path / "schemes.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["rope", "alibi", "fox"]
    assert all(row["ms"] for row in rows)


def test_one_kernel_has_another_tile(monkeypatch):
    flash = pytest.importorskip("kernels.flash")
    q = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16)

    def tiles(*_):
        return [flash.tile_for(q, flash.NONE.value, name) for name in flash.KERNELS]

    before = tiles()
    for i, kernel in enumerate(flash.KERNELS):
        assert bench.clock_tile(flash, kernel, 0, tiles) == [*before[:i], 0, *before[i + 1 :]]
    assert tiles() == before
    cases = [("none", (), {}, 1.0, "x", 3), ("Shaw", (), {"relative": ()}, 1.0, "x", 3)]
    monkeypatch.setattr(bench, "attention_cases", lambda *words: cases)
    monkeypatch.setattr(bench, "clock_operator", lambda *words: 2.0)
    rows = bench.time_tiles(bench.BenchConfig(rounds=1), torch.device("cuda"))
    assert all(row["ms"] == 2 for row in rows)
    names = [row["name"] for row in rows if (row["section"], row["case"]) == ("dq", "Shaw")]
    assert names[0] == "now" and "(64, 64, 4, 1)" in names and "(64, 32, 4, 3)" not in names


def test_operators_are_reported_as_gpu_check_reads_them(call, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "clock_operator", lambda *words: 2.0)
    assert_success(call("experiments/bench.py", f"--out_dir={tmp_path}", "--device=cpu"))
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    fields = {"section", "case", "name", "ms", "rate", "unit", "note"}
    assert fields <= set(rows[0]) and len(rows) == 2 * 2 * (2 + 2 * 5 + 2)
    report = (tmp_path / "bench.md").read_text()
    assert all(word in report for word in ("commit ", " thread", " torch "))
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("avx2" in report) == ("avx2" in flags)
