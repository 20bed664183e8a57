"""nanolong/parallel/sequence.py: processes that share a text compute what one process computes."""

import json
import math

import pytest
import torch
from conftest import TINY, assert_refused, assert_success, logged
from parallel_cases import cases

from model import GPT, GPTConfig
from nanolong.errors import UserError
from nanolong.parallel import sequence


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_process(processes, run):
    """In float64: every scheme, mask and extension method, at an input beyond the context."""
    done = assert_success(run("tests/parallel_cases.py", processes=processes))
    errors = json.loads(done.stdout)
    assert errors.keys() == {name for name, *_ in cases()}
    for name, (loss_error, gradient_error) in errors.items():
        assert loss_error < 1e-12, name
        assert gradient_error < 1e-9, name


def test_values_do_not_keep_the_memory_of_queries_and_keys(monkeypatch):
    """RoPE makes new queries and keys: the old ones are then freed."""
    monkeypatch.setattr(sequence, "sequence_rank_and_size", lambda: (0, 2))
    monkeypatch.setattr(sequence, "all_to_all", lambda x: x)
    q, k = torch.randn(1, 4, 8, 6), torch.randn(1, 2, 8, 6)
    for x in sequence.Exchange().tokens_to_heads(q, k, k):
        assert x.shape[2] == 16
        assert x.untyped_storage().nbytes() == x.nbytes


def test_tokens_are_exchanged_between_compiled_graphs(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(sequence, "exchange", lambda x: x.flip(0))
    operators = []

    def backend(graph, inputs):
        parts = [part for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        operators.append({node.name for part in parts for node in part.graph.nodes})
        return graph.forward

    def attend(x):
        return sequence.all_to_all(x * 2) + 1

    x = torch.randn(2, 3, requires_grad=True)
    y = torch.compile(attend, backend=backend)(x)
    assert torch.equal(y, x.flip(0) * 2 + 1)
    assert [names & {"mul", "flip", "add"} for names in operators] == [{"mul"}, {"add"}]


def count_sent_bytes(config, B, T, checkpointing, processes, parts, parallel):
    """Count the bytes that a process sends in a training step in float32: (gradients, tokens).

    B sequences of T tokens in the only micro-batch; processes: all of them; parts: those that share
    a sequence. The first number is what ddp or fsdp sends for weights and gradients; the second
    what attention exchanges. Of n processes each sends (n - 1) / n of a tensor that is gathered or
    scattered, and twice that to sum one.
    """
    weights = 4 * sum(p.numel() for p in GPT(config).parameters())
    # ddp sums gradients; fsdp gathers weights forward and backward, and scatters gradients
    times = 2 if parallel == "ddp" else 3
    of_weights = times * weights * (processes - 1) / processes

    # q, k and v to other heads, the output back; keys and values repeated to divide the heads
    repeated = math.lcm(config.n_kv_head, parts)
    channels = (2 * config.n_head + 2 * repeated) * config.head_dim
    passes = 3 if checkpointing else 2  # forward, backward, and forward again
    exchanged = passes * config.n_layer * B * T // parts * channels * 4
    return of_weights, exchanged * (parts - 1) / parts


@pytest.fixture
def words(text_data):
    return [
        *TINY,
        *("--n_head=4", "--n_kv_head=2", "--max_iters=20", "--eval_interval=10"),
        *("--gradient_accumulation_steps=2", f"--dataset={text_data}"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("method", [["--method=yarn"], ["--method=dynamic-yarn"], ["--pose=true"]])
def test_extension_is_that_of_one_process(method, words, run, tmp_path):
    source = tmp_path / "source"
    assert_success(run("train.py", *words, "--max_iters=4", f"--out_dir={source}"))
    command = ["extend.py", source, *method, "--max_iters=10", "--max_tokens=512"]
    command += ["--dtype=float32", "--log_interval=1", "--compile=false"]
    one, shared = tmp_path / "one", tmp_path / "shared"
    assert_success(run(*command, f"--out_dir={one}"))
    done = run(*command, f"--out_dir={shared}", "--sequence_parallel=2", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(logged(one, "loss")) == 10
    assert logged(one, "loss") == pytest.approx(logged(shared, "loss"), abs=1e-5, rel=0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--sequence_parallel=2", "or give --sequence_parallel=1"),
        ("--sequence_parallel=0", "out of range"),
    ],
)
def test_one_process_shares_nothing(setting, message, words, call, tmp_path):
    assert_refused(call("train.py", *words, setting, f"--out_dir={tmp_path}/run"), message)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 0.1}, "--dropout=0"),
        ({"n_head": 1, "n_kv_head": 1}, "1 head:"),
        ({"block_size": 31}, "31 tokens"),
    ],
)
def test_what_cannot_be_shared_is_refused(settings, message, make):
    with pytest.raises(UserError, match=message):
        sequence.check_model(make(**settings), (0, 0), 2)


def without_progress(text):
    """What evaluate.py printed, without the lines that say how long a measurement took."""
    return [line for line in text.splitlines() if not line.startswith("measured ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--protocol=chunked,position,sliding", "--lengths=128,512"], ("loss",)),
        (["--task=needle", "--lengths=128,256", "--depths=2", "--trials=2"], ("nll", "accuracy")),
        (["--task=ruler", "--lengths=110,256", "--ruler=multikey", "--trials=3"], ("nats", "gain")),
    ],
)
def test_evaluation_is_that_of_one_process(words, numbers, save_run, run, tmp_path):
    text = ["--text=tests/test_model.py", "--max_tokens=1024"] if "task" not in words[0] else []
    command = ["evaluate.py", save_run(block_size=128), *words, *text, "--dtype=float32"]
    one = assert_success(run(*command, f"--json={tmp_path}/one.json"))
    two = run(*command, f"--json={tmp_path}/two.json", "--sequence_parallel=2", processes=2)
    assert two.returncode == 0, two.stderr[-2000:]
    expected, found = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert len(expected) == len(found) > 2
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys():
            if name in numbers and "summary" not in a:
                assert a[name] == pytest.approx(b[name], abs=1e-5)
            elif name != "key" and not isinstance(a[name], float | list | dict):
                assert a[name] == b[name]
    # the first process alone prints
    printed = two.stdout.replace("two.json", "one.json")
    assert without_progress(printed) == without_progress(one.stdout)

    if "task" in words[0]:
        return
    # after a stop all processes skip what the first one finds in its file
    (tmp_path / "two.json").write_text(json.dumps([row for row in found if row["length"] == 128]))
    again = run(*command, f"--json={tmp_path}/two.json", "--sequence_parallel=2", processes=2)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "reused: " in again.stdout
    assert 2 * again.stdout.count("measured ") == two.stdout.count("measured ")
    assert json.loads((tmp_path / "two.json").read_text()) == found


@pytest.mark.slow
def test_processes_of_an_evaluation_share_sequences_or_are_refused(save_run, run):
    text = ["--text=tests/test_model.py", "--max_tokens=256", "--lengths=128"]
    folder = save_run(block_size=128)
    done = run("evaluate.py", folder, *text, processes=2)
    assert done.returncode
    assert "give --sequence_parallel=2" in done.stderr
    odd = ["--lengths=129", "--sequence_parallel=2"]
    done = run("evaluate.py", folder, *text[:2], *odd, processes=2)
    assert done.returncode
    assert "does not divide 129 tokens" in done.stderr
    assert done.stderr.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "parts", "checkpointing"),
    [("fsdp", 2, False), ("fsdp", 1, True), ("ddp", 2, True), ("ddp", 4, False)],
)
def test_sent_bytes_are_those_of_the_count(parallel, parts, checkpointing, run):
    """What ddp sends for gradients, its own code in C++ sends: it is not measured."""
    config = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "block_size": 64}
    settings = {"config": config, "parts": parts, "parallel": parallel}
    settings["checkpointing"] = checkpointing
    processes = max(2, parts)
    done = assert_success(run("tests/sent_bytes.py", json.dumps(settings), processes=processes))
    sent = json.loads(done.stdout)
    of_weights, of_tokens = count_sent_bytes(
        GPTConfig(**config), 2, 64, checkpointing, processes, parts, parallel
    )
    assert sent["tokens"] == pytest.approx(of_tokens, rel=0.01)
    if parallel == "fsdp":
        assert sent["weights"] == pytest.approx(of_weights, rel=0.1)
