"""The Triton kernels without a GPU: their numbers under the interpreter, and what they cost once compiled, each in a process of its own."""
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (it exists for Linux only)")


@needs_triton
@pytest.mark.parametrize("half", ["against_float64", "not against_float64"])
def test_numbers_under_the_interpreter(half, request):
    """tests/interpreted, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", ROOT / "tests/interpreted", *(["--all"] if request.config.getoption("--all") else []), "-k", half]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-6000:])
    assert done.returncode == 0 and " passed" in done.stdout


@needs_triton
def test_compiled_ahead_of_time_for_every_architecture(request):
    """With the tile sizes that would run: no spills, shared memory within each card's limit, tensor cores, no atomics, no 2-byte loads, and a term's loop not much longer than the unbiased one."""
    everything = request.config.getoption("--all")
    done = subprocess.run([sys.executable, ROOT / "tests/aot.py", *(["--all"] if everything else [])], env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    spec = importlib.util.spec_from_file_location("aot", ROOT / "tests/aot.py")
    aot = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(aot)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["target"] for row in rows} == set(aot.SHARED) and len(rows) == len(list(aot.cases(everything)))
    for row in rows:
        known = "fp32" in row["kernel"] or row["target"] == "gfx942" and aot.faults(row) == ["2-byte loads"]  # results/aot.md names each
        assert not aot.faults(row) or everything and known and not row["atomics"] and row["shared"] <= aot.SHARED[row["target"]], row
    for D in (64, 128):
        per = {term: (count, row["tile"]) for term, count, row in aot.ratios(rows, D)}
        for term, limit in (("slopes", 1.03), ("table", 1.25)):
            if per[term][1] == per["none"][1]:  # of the same tile; without the trick that no added term can have, a multiplication an element
                assert per[term][0] <= limit * (per["none"][0] + 1), per
                assert per[term][0] <= 1.31 * per["none"][0], per


@needs_triton
@pytest.mark.parametrize("file", ["rotary", "flash", "decode"])
def test_a_kernel_can_be_lifted_out(file, tmp_path):
    """Copied alone into a folder, and called there."""
    (tmp_path / f"{file}.py").write_text((ROOT / f"kernels/{file}.py").read_text())
    call = "rope(q, q, torch.ones(3, 4), torch.zeros(3, 4))[0]" if file == "rotary" else "attention(q, q, q, bias=torch.zeros(2, 3))[:, :, :1]"
    code = f"import torch; from {file} import *; q = torch.randn(1, 2, 3, 8); y = {call}; print(tuple(y.shape), bool((y - q[:, :, :y.shape[2]]).abs().max() < 1e-6))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.endswith("True\n"), (done.stdout, done.stderr)


def test_dispatch(run):
    """The environment switch, and no triton where it is not needed."""
    code = ("import sys, torch, kernels; q = torch.randn(1, 2, 3, 8); c = torch.ones(3, 4); kernels.rope(q, q, c, c); kernels.rope(q.double(), q.double(), c, c); "
            "print('kernels.rotary' in sys.modules, 'triton' in sys.modules, kernels._triton_runs('cpu', None))")
    for env, said in (({}, "False False False"), ({"NANOLONG_REFERENCE": "1", "TRITON_INTERPRET": "1"}, "False False False"), ({"TRITON_INTERPRET": "1"}, "True True True")):
        if importlib.util.find_spec("triton") or "True" not in said:
            clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "NANOLONG_REFERENCE")}
            done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**clean, **env}, capture_output=True, text=True)
            assert done.stdout.strip() == said, (env, done.stdout, done.stderr)
