"""What a step and a token cost the host, on the CUDA path: synchronisations, copies, launches."""

import pytest
from conftest import json_lines

STEP = (
    "--device=cuda --compile=false --dtype=bfloat16 --n_layer=2 --n_head=2 --n_embd=64 "
    "--block_size=64 --batch_size=2 --max_iters=5 --eval_interval=100 --eval_iters=1"
).split()
SCRIPT = "tests/simulated_gpu/counted.py"


def steps(simulate, run, *flags, script="train.py"):
    """The counts of each step; numbers are not needed for them."""
    words = [script, *STEP, *flags, f"--out_dir={run}"]
    return json_lines(simulate(SCRIPT, "step", *words, values=False))


@pytest.mark.parametrize(
    "flags",
    [
        ["--pos=rope"],
        ["--pos=rope", "--gradient_accumulation_steps=2"],
        ["--pos=rope", "--random_positions=256"],
        ["--pos=rope", "--optimizer=muon"],
        ["--pos=rope", "--checkpoint_activations=true", "--separate_docs=true"],
        ["--pos=alibi", "--window=16"],
        ["--pos=t5"],
        ["--pos=shaw"],
        ["--pos=xl"],
        ["--pos=learned", "--norm=layernorm", "--mlp=gelu", "--bias=all"],
    ],
    ids=" ".join,
)
def test_a_step_waits_for_the_gpu_once(simulate, text_data, tmp_path, flags):
    rows = steps(simulate, tmp_path / "run", f"--dataset={text_data}", *flags)
    assert len(rows) == 5
    micro_batches = 2 if "--gradient_accumulation_steps=2" in flags else 1
    for row in rows[1:]:  # the first one loads kernels
        counts = row["counts"]
        assert counts["synchronisations"] == 1, row["lines"]
        assert counts["pageable reads"] == 1
        assert counts.get("pageable copies", 0) == 0
        assert counts["pinned copies"] <= 4 * micro_batches  # x, y, positions, documents
        assert counts.get("illegal", 0) == 0
    assert len({row["counts"]["launches of torch"] for row in rows[2:]}) == 1


def test_a_step_of_an_extended_model_waits_once(simulate, text_data, tmp_path):
    """Also where position ids skip, and where the tables of a scheme are indexed by distance."""
    for pos, flags in (
        ("rope", ["--method=yarn", "--pose=true"]),
        ("shaw", ["--method=pi"]),
        ("t5", ["--method=pi"]),
        ("rope", ["--method=dynamic-ntk"]),
    ):
        run = tmp_path / pos
        if not run.exists():
            steps(simulate, run, f"--dataset={text_data}", f"--pos={pos}", "--max_iters=1")
        words = [run, "--factor=2", "--max_iters=4", "--device=cuda", "--compile=false", *flags]
        words += ["--dtype=bfloat16", "--eval_iters=1", f"--out_dir={run}-{flags[0]}"]
        rows = json_lines(simulate(SCRIPT, "step", "extend.py", *words, values=False))
        assert [row["counts"]["synchronisations"] for row in rows[1:]] == [1] * 3, rows[-1]["lines"]


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "shaw", "xl"])
@pytest.mark.parametrize("words", [[], ["deterministic"], ["sampled"]], ids=" ".join)
def test_a_token_is_one_graph_launch_and_one_read(simulate, pos, words):
    rows = json_lines(simulate(SCRIPT, "token", pos, *words, values=False))
    assert len(rows) == 8
    for row in rows[2:]:  # after the prefill, and the capture
        counts = row["counts"]
        assert counts["graph launches"] == counts["pageable reads"] == 1
        assert counts["synchronisations"] == 1, row["lines"]
        assert counts.get("launches of Triton", 0) == counts.get("matrix products", 0) == 0
        # the sampling: the largest logit, or probabilities and a random number
        assert counts["launches of torch"] <= (20 if "sampled" in words else 1)
        assert counts.get("illegal", 0) == 0


def test_decoding_after_training_launches_no_more_kernels(simulate):
    """Training leaves PyTorch deterministic; its version of writing into the cache would sort."""
    launches = []
    for words in ([], ["deterministic"]):
        rows = json_lines(simulate(SCRIPT, "token", "rope", *words, values=False))
        launches.append(rows[1]["counts"]["launches of torch"])  # two warm-up runs and the capture
    assert launches[0] == launches[1]
