"""A training step and four tokens on the simulated GPU, with every instruction of our kernels
executed as compiled: emulated.py.

    NANOLONG_EMULATED=FOLDER python -m pytest tests/simulated_gpu/test_emulated.py --all

writes what was measured to FOLDER, a file of JSON for each case, and does not measure again what is
there.

train.py resumes a model that a CPU has trained, takes one step, evaluates it and saves it; then
sample.py continues a text. The same commands are run with plain PyTorch, on the simulated GPU in
the same dtype and on the CPU in float32. With --beta1=0 the mean gradient in the checkpoint is the
gradient of the step.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT, json_lines
from safetensors.torch import load_file

from nanolong.evaluation.provenance import provenance

STEPS = 30  # of the CPU
TEXT = "    def forward(self, x):\n"  # longer than the few tokens that the decoding kernel takes
N_TOKENS = 4
STEP = "--batch_size=2 --eval_iters=1 --eval_interval=1000 --log_interval=1 --compile=false".split()
STEP += "--n_embd=64 --n_head=4 --n_kv_head=2 --beta1=0 --grad_clip=0 --warmup_iters=0".split()
STEP += "--learning_rate=1e-2 --lr_schedule=constant".split()
SAMPLE = ["--temperature=0", f"--start={TEXT}", f"--max_new_tokens={N_TOKENS}"]
VERSIONS = ("emulated", "plain PyTorch", "float32")


class Case(NamedTuple):
    pos: str
    dtype: str
    target: str
    # more than the longest tile, and no multiple of 8
    length: int = 132
    n_layer: int = 2


FAST = Case("rope", "float32", "sm_80", length=40, n_layer=1)
CASES = [
    FAST,
    Case("rope", "bfloat16", "sm_80"),
    Case("alibi", "bfloat16", "sm_80"),
    Case("t5", "bfloat16", "sm_80"),
    Case("xl", "bfloat16", "sm_80"),
    Case("rope", "float16", "sm_80"),
    Case("rope", "bfloat16", "sm_90"),
    Case("t5", "float32", "sm_80"),
]
# dtype -> bounds on relative errors: of losses, of gradients, of logits
BOUNDS = {
    "float32": (1e-6, 2e-5, 1e-5),
    "float16": (1e-4, 5e-3, 1e-3),
    "bfloat16": (5e-4, 3e-2, 1e-2),
}
KERNELS = {"forward", "dq", "dkdv", "split", "combine"}
MORE_KERNELS = {"rope": {"rotate"}, "alibi": set(), "t5": {"sweep"}, "xl": {"sweep"}}


def name_of(case):
    return f"{case.pos}-{case.dtype}-{case.target}"


def measure(case, simulate, text_data, folder):
    """Run a case in a folder. Returns its row of results."""
    words = [f"--pos={case.pos}", f"--block_size={case.length}", f"--n_layer={case.n_layer}", *STEP]
    words.append(f"--dataset={text_data}")
    start = folder / "start"
    cpu = ["--device=cpu", "--dtype=float32"]
    run_on_cpu("train.py", *words, *cpu, f"--max_iters={STEPS}", f"--out_dir={start}")
    row = {"case": case._asdict(), "provenance": provenance(torch.device("cpu"))}
    row["command"] = f"train.py {' '.join(map(str, words[:-1]))} --dtype={case.dtype}"
    for version in VERSIONS:
        run = folder / version
        shutil.copytree(start, run)
        train = ["train.py", *words, "--init_from=resume", f"--max_iters={STEPS + 1}"]
        train.append(f"--out_dir={run}")
        sample = ["tests/simulated_gpu/sample_logits.py", run / "logits.json", run, *SAMPLE]
        if version == "float32":
            run_on_cpu(*train, *cpu)
            run_on_cpu(*sample, *cpu)
            continue
        settings = {"values": "emulated", "capability": case.target.removeprefix("sm_")}
        if version == "plain PyTorch":
            settings |= {"values": True, "env": {"NANOLONG_REFERENCE": "1"}}
        for program, command in (("train.py", train), ("sample.py", sample)):
            clock = time.monotonic()
            done = simulate(*command, "--device=cuda", f"--dtype={case.dtype}", **settings)
            assert done.returncode == 0, done.stderr[-3000:]
            if version == "emulated":
                row[program] = {**done.report["emulated"], "counts": done.report["counts"]}
                row[program]["seconds"] = round(time.monotonic() - clock)
    return {**row, **compare([folder / version for version in VERSIONS])}


def run_on_cpu(*words):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


def compare(runs):
    """Losses and tokens of each version; relative errors of gradients and logits from float32."""
    losses, tokens, logits, gradients = {}, {}, {}, {}
    for version, run in zip(VERSIONS, runs, strict=True):
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        last = [row for row in rows if row["step"] == STEPS + 1]
        losses[version] = [row[key] for key in ("loss", "val_loss") for row in last if key in row]
        logits[version] = torch.tensor(json.loads((run / "logits.json").read_text())).double()
        tokens[version] = logits[version].argmax(-1).tolist()
        moments = load_file(run / f"step-{STEPS + 1:06d}" / "optim.safetensors")
        gradients[version] = {
            name.removesuffix(".exp_avg"): moment.double()
            for name, moment in moments.items()
            if name.endswith(".exp_avg")
        }
    rows = {
        name: {
            "norm": float(exact.norm()),
            **{v: relative_error(gradients[v][name], exact) for v in VERSIONS[:2]},
        }
        for name, exact in gradients["float32"].items()
    }
    logit_errors = {v: relative_error(logits[v], logits["float32"]) for v in VERSIONS[:2]}
    return {"losses": losses, "tokens": tokens, "logits": logit_errors, "gradients": rows}


def relative_error(x, exact):
    error = float((x - exact).norm() / exact.norm())
    return error if math.isfinite(error) else None  # None: JSON has no NaN


@pytest.fixture
def row(request, simulate, text_data, tmp_path):
    """What was measured of a case, now or before."""
    case = request.param
    folder = os.environ.get("NANOLONG_EMULATED")
    file = Path(folder or tmp_path) / f"{name_of(case)}.json"
    if not file.exists():
        row = measure(case, simulate, text_data, tmp_path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(row, indent=1) + "\n")
    return json.loads(file.read_text())


def check_kernels(row):
    """Each kernel ran as often as the step and the tokens need it, and did nothing wrong."""
    case = Case(**row["case"])
    train, sample = row["train.py"], row["sample.py"]
    for program in (train, sample):
        assert program["faults"] == []
        assert program["targets"] == [case.target]
        assert program["counts"].get("illegal", 0) == 0
    expected = {f"_{name}_kernel" for name in KERNELS | MORE_KERNELS[case.pos]}
    assert train["kernels"].keys() == expected
    # training tries its batch before the step
    passes, rest = divmod(train["kernels"]["_dq_kernel"]["launches"], case.n_layer)
    assert passes >= 1 and rest == 0
    assert train["kernels"]["_dkdv_kernel"]["launches"] == passes * case.n_layer
    # the first token comes from the prefill; warming up takes two steps, and a capture none
    assert sample["counts"]["graph launches"] == N_TOKENS - 1
    decoded = sample["kernels"]["_split_kernel"]["launches"]
    assert decoded == (N_TOKENS - 1 + 2) * case.n_layer


def check_gradients(row, bound):
    """Each is as near to float32 as plain PyTorch's in the same dtype, to a bound.

    The bound is relative to the gradient, or to a tenth of the largest one of its block: where
    attention is nearly uniform, gradients of queries and keys are small differences of large terms.
    """
    for name, found in row["gradients"].items():
        block = name.split(".")[:2]
        largest = max(x["norm"] for n, x in row["gradients"].items() if n.split(".")[:2] == block)
        scale = max(1, largest / 10 / found["norm"])
        assert found["emulated"] is not None, name
        assert found["emulated"] <= found["plain PyTorch"] + bound * scale, name


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(case, id=name_of(case), marks=[] if case == FAST else pytest.mark.slow)
        for case in CASES
    ],
    indirect=True,
)
def test_a_step_and_tokens_as_compiled_are_those_of_plain_pytorch(row):
    check_kernels(row)
    dtype = row["case"]["dtype"]
    of_losses, of_gradients, of_logits = BOUNDS[dtype]
    losses, tokens = row["losses"], row["tokens"]
    assert len(losses["emulated"]) == 2
    assert losses["emulated"] == pytest.approx(losses["plain PyTorch"], rel=of_losses)
    # As near to float32 as plain PyTorch in the same dtype. How near that is depends on the model
    # that the CPU has trained, which is another one on another machine.
    for found, plain, exact in zip(*(losses[version] for version in VERSIONS), strict=True):
        assert abs(found - exact) <= abs(plain - exact) + of_losses * exact
    check_gradients(row, of_gradients)
    assert row["logits"]["emulated"] <= row["logits"]["plain PyTorch"] + of_logits
    assert tokens["emulated"] == tokens["plain PyTorch"] == tokens["float32"]
    assert len(tokens["emulated"]) == N_TOKENS


def test_faults_at_a_launch_and_in_the_ptx_are_found(simulate):
    script = "tests/simulated_gpu/faulty_launches.py"
    rows = json_lines(simulate(script, values="emulated", capability=80))
    rows = {row["fault"]: row for row in rows}
    assert rows.pop("no_fault")["error"] < 1e-6
    for name in ("one_token_too_many", "a bound"):
        assert "out of bounds" in rows.pop(name)["reported"][0]
    for name in ("one_block_too_few", "one_head_too_few"):  # nobody writes the rest
        assert rows.pop(name)["error"] == "nan"
    for name in ("swapped_strides", "a sign"):
        assert rows.pop(name)["error"] > 0.1
    assert not rows
