"""Nothing that is not finite reaches the weights, and the same command gives the same bits."""

import hashlib
import math
import shutil

import numpy as np
import torch
from harness import assert_same, assert_whole, attempt, fingerprint, read_log

from data import Dataset
from model import GPT, POSITIONS, Block
from nanolong.run.folder import list_steps

N_STEPS = 12  # of the tiny run, with two micro-batches each


def trials(harness):
    """Yield (description, what went wrong or None) for each trial."""
    yield from not_finite(harness)
    yield from bad_tokens(harness)
    yield from repeated_commands(harness)


# -----------------------------------------------------------------------------
# NaN and Inf.


def hash_weights(model):
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def inject(place, value, call, notes):
    """In a child: put a value into one forward or backward pass of training.

    place: "the loss", "the gradients" or "the activations". call: which training forward pass of
    this process, from 0; None: never. notes: a file to which the hash of the weights is appended
    before each forward pass and at the end, by the function that is returned.
    """
    model_forward, block_forward = GPT.forward, Block.forward
    models = []  # the model, once for each forward pass

    def note_weights():
        with open(notes, "a") as file:
            file.write(hash_weights(models[-1]) + "\n")

    def forward_model(model, *args, **kwargs):
        if not model.training:
            return model_forward(model, *args, **kwargs)
        models.append(model)
        note_weights()
        loss = model_forward(model, *args, **kwargs)
        return loss * value if place == "the loss" and len(models) - 1 == call else loss

    def forward_block(block, *args, **kwargs):
        out = block_forward(block, *args, **kwargs)
        if not block.training or len(models) - 1 != call:
            return out
        if place == "the activations":
            return spoiled(out)
        if place == "the gradients":
            out.register_hook(spoiled)
        return out

    def spoiled(x):
        x = x.clone()
        x[0, -1, 0] = value
        return x

    GPT.forward, Block.forward = forward_model, forward_block
    return note_weights


def not_finite(harness):
    """NaN or Inf in a random micro-batch of a random rank."""

    def trial(run, place, value, n_processes):
        micro = harness.rng.randrange(2 * N_STEPS)
        step = micro // 2
        bad_rank = micro % n_processes
        notes = [harness.new_path("notes") for _ in range(n_processes)]

        def before(rank):
            call = micro // n_processes if rank == bad_rank else None
            return inject(place, value, call, notes[rank])

        children = harness.start_ranks(harness.train_command(run), n_processes, before=before)
        output = [child.expect(status=1) for child in children][0]
        check_message(output, place, step, micro)

        last = set()
        for file in notes:
            hashes = file.read_text().split()
            assert hashes[-1] == hashes[-2], "the last update has changed the weights"
            assert len(set(hashes)) == step + 1, "the weights have changed within a step"
            last.add(hashes[-1])
        assert len(last) == 1, "the ranks have different weights"
        assert_whole(run)
        last_evaluation = step // 3 * 3
        assert list_steps(run)[-1].name == f"step-{last_evaluation:06d}"
        assert "NaN" not in (run / "log.jsonl").read_text()
        shutil.rmtree(run)

    processes = [(math.nan, 1), (math.nan, 2), (math.inf, 1)]
    if not harness.cfg.fast:
        processes = [(value, n) for value in (math.nan, math.inf, -math.inf) for n in (1, 2)]
    for place in ("the loss", "the gradients", "the activations"):
        yield from harness.repeat(
            f"NaN or Inf in {place}: stopped before the update on all ranks, step and "
            "micro-batches named",
            trial,
            4,
            cases=[(place, *case) for case in processes],
        )


def check_message(output, place, step, micro):
    """The error names what is not finite, the step (from 1) and the micro-batches (from 0)."""
    what = "gradient" if place == "the gradients" else "loss"
    first, last = 2 * step, 2 * step + 1
    assert f"the {what} of step {step + 1} (micro-batches {first} to {last}" in output, output
    assert "stopped before the update" in output, output
    if what == "loss":
        assert f"first of micro-batch {micro}" in output, output


# -----------------------------------------------------------------------------
# Tokens.


def bad_tokens(harness):
    """A token outside the vocabulary, in a random micro-batch."""

    def trial(run, n_processes):
        folder = harness.new_path("text")
        shutil.copytree(harness.dataset, folder)
        micro = harness.rng.randrange(2, 2 * N_STEPS)
        spoil_token(folder, micro, harness.rng)
        command = harness.train_command(run, f"--dataset={folder}")
        children = harness.start_ranks(command, n_processes)
        statuses = sorted(child.wait() for child in children)
        output = "".join(child.read_output() for child in children)
        assert "Traceback" not in output, output
        # the rank that meets the token ends with 2, its peer with 1
        assert statuses == ([1, 2] if n_processes == 2 else [2]), output
        assert "train.bin: token" in output and "outside the vocabulary of 257" in output, output
        assert_whole(run)
        losses = [row for row in read_log(run) if "val_loss" not in row]
        assert len(losses) == micro // 2
        shutil.rmtree(run)

    yield from harness.repeat(
        "a token outside the vocabulary: stopped before the update on all ranks, file and token "
        "named",
        trial,
        5,
        cases=[(1,), (2,)],
    )


def spoil_token(folder, micro, rng):
    """Write a token that does not exist into a random sequence of a micro-batch."""
    batch_size, block_size, seed = 4, 32, 1337  # of the tiny run
    index = micro * batch_size + rng.randrange(batch_size)
    file, start = Dataset(folder).train.training_location(index, block_size, seed)
    assert file == 0
    header_bytes = 1024
    tokens = np.memmap(folder / "train.bin", "<u2", "r+", header_bytes)
    tokens[start + rng.randrange(block_size)] = rng.choice((257, 65535, 300))
    tokens.flush()


# -----------------------------------------------------------------------------
# The same command twice.

OTHER_FLAGS = [["--optimizer=muon"], ["--dropout=0.3"], ["--dtype=bfloat16"], ["--dtype=float16"]]
OTHER_FLAGS += [["--random_positions=99"], ["--tasks=passkey:0.5"], ["--window=8", "--sinks=2"]]
OTHER_FLAGS += [["--layer_pattern=FN", "--qk_norm=true"]]


def repeated_commands(harness):
    """On a CPU, and if there is one on a GPU: in whole processes, for CUDA survives no fork."""
    flags = [[f"--pos={pos}"] for pos in POSITIONS]

    def trial(words, on_gpu):
        runs = [harness.new_path(), harness.new_path()]
        for run in runs:
            command = harness.train_command(run, *words)
            if not on_gpu:
                harness.run(command, seconds=120)
                continue
            of_cpu = ("--device=cpu", "--dtype=float32")
            process, output_file = harness.launch([w for w in command if w not in of_cpu])
            assert process.wait(300) == 0, output_file.read_text()[-2000:]
        assert_same(runs[1], fingerprint(runs[0]))

    on_cpu = flags + OTHER_FLAGS
    for words in harness.rng.sample(on_cpu, 4) if harness.cfg.fast else on_cpu:
        yield attempt("the same command twice, on a CPU: bit-exact", trial, words, False)
    if torch.cuda.is_available() and not harness.cfg.fast:
        for words in flags:
            yield attempt("the same command twice, on a GPU: bit-exact", trial, words, True)
