"""experiments/bench.py: turns and ratios, what the timed functions compute, and the reports."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, assert_refused, assert_success
from torch.utils._pytree import tree_map

import kernels
from experiments import bench, operators, turns

CPU = torch.device("cpu")


def test_ratios_are_of_pairs_and_a_failure_has_its_reason():
    in_order = iter([9.0, 9.0, 2.0, 1.0, 30.0, 10.0, 1.0, 5.0]).__next__
    # called as ab, and then ba, ab, ba: a / b is 0.5, 3 and 5, and that of the medians is 2.5
    clocks = {"a": in_order, "b": in_order, "bad": iter(()).__next__}
    rows = turns.compare("rope", "case", clocks, 3, 6.0, "GB/s", warmup=1)
    assert "| 3.00 (1.75 to 4.00) | 3,000.0 GB/s" in turns.format_table(rows).splitlines()[3]
    assert (rows[1]["ms"], rows[2]["ms"], rows[2]["note"]) == (2.0, None, "StopIteration()")


def test_what_is_timed_is_attention():
    cfg = bench.BenchConfig(lengths=(33,))
    for name, arguments, options, work, *_ in operators.attention_cases(cfg, CPU):
        assert abs(work / (12 * 4 * 33 * 33 * 64 / 2 / 1e9) - 1) < 1e-9
        functions = (
            operators.plain_attention,
            operators.reference.attention,
            operators.flex_attention,
        )
        arguments, options = tree_map(
            lambda x: x if x is None else x.detach(), (arguments, options)
        )
        found = [f(*arguments, **options) for f in functions]
        for y in found[1:]:
            torch.testing.assert_close(found[0], y, msg=name)


@pytest.mark.parametrize("term", ["none", "slopes", "table", "gates"])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_pytorch_computes_our_attention(term, mask, rng):
    """Of six query heads and two key heads."""
    T = 45
    q, k, v = (torch.randn(2, heads, T, 16) for heads in (6, 2, 2))
    options = {"scale": 0.3}
    if term == "slopes":
        options["bias"] = torch.rand(6)
    elif term == "table":
        options["bias"] = torch.randn(6, 9)
    elif term == "gates":
        options["gates"] = -torch.rand(2, 6, T, dtype=torch.float64).cumsum(2)
    if mask == "window":
        options["window"] = 7
    elif mask == "documents":
        options["docs"] = torch.stack((torch.arange(T) // 10, torch.arange(T) // 17))
    right = kernels.attention(q.double(), k.double(), v.double(), **options)
    found = operators.peer_attention(q, k, v, **options)
    torch.testing.assert_close(found, right.float(), rtol=1e-4, atol=1e-5)


def test_kernels_are_of_the_kinds_that_their_names_say():
    names = {
        "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT": "products",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "products",
        "_forward_kernel": "attention, forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": "attention, forward",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16": "attention, backward",
        "void pytorch_flash::flash_fwd_kernel<...>": "attention, forward",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel": "attention, backward",
        "_dkdv_kernel": "attention, dk and dv",
        "triton_red_fused__log_softmax_2": "loss",
        "triton_per_fused__fused_rms_norm_add_3": "norms",
        "triton_poi_fused_mul_silu_silu_backward_7": "activation",
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>": "AdamW",
        "void at::native::multi_tensor_apply_kernel<LpNormFunctor>": "clipping",
        "triton_poi_fused__to_copy_1": "copies",
    }
    assert {name: bench.kind_of(name) for name in names} == names


def test_schemes_have_a_row_each(call, tmp_path):
    words = ("schemes", "--toy", "--shapes=alibi,fox", "--steps=1", "--device=cpu")
    assert_success(call("experiments/bench.py", *words, f"--out_dir={tmp_path}"))
    rows = json.loads((tmp_path / "schemes.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["rope", "alibi", "fox"]
    assert all(row["ms"] for row in rows)


def test_a_profile_adds_up(call, tmp_path):
    words = ("profile", "--toy", "--shapes=GPT-2", "--compiled=false", "--device=cpu")
    assert_success(call("experiments/bench.py", *words, f"--out_dir={tmp_path}"))
    rows = json.loads((tmp_path / "profile.json").read_text())["rows"]
    for case in {row["case"] for row in rows}:
        of_case = [row for row in rows if row["case"] == case]
        ms = {row["section"]: row["ms"] for row in of_case}
        assert 0 < ms["busy"] and 0 < ms["host, until queued"] <= ms["wall"]
        kinds = sum(row["ms"] for row in of_case if row["section"] == "kind of kernel")
        assert kinds == pytest.approx(ms["busy"], rel=0.2)
        # one product for q, k and v
        products = [row["name"] for row in of_case if row["section"] == "product"]
        assert any("96x32 by 32x96" in name for name in products), products


def test_a_table_is_written_as_it_grows(call, monkeypatch, tmp_path):
    def stopped(cfg, device):
        """A benchmark."""
        yield [turns.single_row("section", "case", "name", 1.5)]
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.BENCHMARKS, "sample", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench.main(["sample", "--device=cpu", f"--out_dir={tmp_path}"])
    assert json.loads((tmp_path / "sample.json").read_text())["rows"][0]["ms"] == 1.5
    assert "1.500 (1.500 to 1.500)" in (tmp_path / "sample.md").read_text()


def test_what_a_benchmark_has_not_is_refused(call, tmp_path):
    for words, phrases in (
        (["kernels", "--device=cpu"], ["no kernel of Triton runs on a cpu", "TRITON_INTERPRET=1"]),
        (["sample", "--nanogpt=nowhere"], ["sample has no --nanogpt", "train"]),
        (["train", "--nanogpt=nowhere"], ["nowhere/model.py is missing"]),
        (["train", "--rounds=0"], ["--rounds"]),
        (["tilez"], ["unknown benchmark 'tilez'", "schemes"]),
    ):
        done = call("experiments/bench.py", *words, f"--out_dir={tmp_path}")
        assert_refused(done, *phrases)


def test_operators_are_reported_as_gpu_check_reads_them(call, monkeypatch, tmp_path):
    monkeypatch.setattr(operators, "clock_call", lambda *words: 2.0)
    assert_success(call("experiments/bench.py", f"--out_dir={tmp_path}", "--device=cpu"))
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    fields = {"section", "case", "name", "ms", "rate", "unit", "note"}
    assert fields <= set(rows[0]) and len(rows) == 2 * 2 * (2 + 2 * 3 + 2)
    report = (tmp_path / "bench.md").read_text()
    assert all(word in report for word in ("commit ", " thread", " torch "))
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("avx2" in report) == ("avx2" in flags)


# -----------------------------------------------------------------------------
# experiments/gpu_minutes.sh

MINUTES = ROOT / "experiments/gpu_minutes.sh"


def statuses(folder):
    files = sorted(folder.glob("steps/*/status"))
    return {file.parent.name: file.read_text().strip() for file in files}


@pytest.mark.slow
def test_the_minutes_of_a_gpu_are_tried_on_a_cpu(tmp_path):
    """Killed at the third step, and called again: that step begins again, others do not."""
    command = [MINUTES, "--try", f"--out={tmp_path / 'out'}", f"--copy={tmp_path / 'copy'}"]
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "2"}
    options = {"text": True, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, start_new_session=True, **options)
    while "02-train" not in statuses(tmp_path / "out"):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    first = statuses(tmp_path / "out")
    assert first["01-profile"].startswith("done in") and first["02-train"].startswith("begun")
    assert "# profile" in (tmp_path / "copy/minutes.md").read_text()
    # too little time for what takes longest
    done = subprocess.run([*command, "--seconds=1"], **options)
    assert done.returncode == 3 and "02-train: left for the next call" in done.stdout
    done = subprocess.run([*command, "--seconds=600"], **options)
    assert done.returncode == 0, done.stdout
    assert "01-profile: done in" in done.stdout and "(an earlier call)" in done.stdout
    last = statuses(tmp_path / "out")
    assert all(status.startswith("done in") for status in last.values()) and len(last) == 9
    steps = json.loads((tmp_path / "copy/minutes.json").read_text())
    assert [step["step"] for step in steps] == sorted(last)
    rows = {step["step"]: [row for t in step["tables"] for row in t["rows"]] for step in steps}
    assert all(rows[name] for name in last)
    # FlexAttention has no backward pass on a CPU, which has no cuDNN
    failed = {
        row["name"] for found in rows.values() for row in found if row["note"] and not row["ms"]
    }
    assert failed <= {"PyTorch's attention", "FlexAttention", "cuDNN", "compared"}, failed


def test_wrong_words_are_refused_by_gpu_minutes(tmp_path):
    done = subprocess.run([MINUTES, "--help"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and "--patience=N" in done.stdout
    for word, phrase in (
        ("--seconds=1.5", "--seconds=1.5 is no whole number"),
        ("--nanogpt=nowhere", "nowhere/model.py is missing"),
        ("--tries", "there is no option --tries"),
    ):
        done = subprocess.run([MINUTES, word], capture_output=True, text=True, cwd=tmp_path)
        assert_refused(done, phrase)
