"""nanolong/parallel/sequence.py: processes that share a text compute what one process computes."""

import json

import pytest
import torch
from conftest import TINY

from experiments.bench_memory import count_sent_bytes
from model import GPT, POSITIONS, GPTConfig
from nanolong.errors import UserError
from nanolong.parallel import sequence
from nanolong.run.checkpoint import find_checkpoint, read_meta
from rope_scaling import METHODS

N_CASES = 2 * len(POSITIONS) + 9 + 4 + 6 + len(METHODS) + 5


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_one_process(processes, run):
    """In float64: every scheme, mask and extension method, at an input beyond the context."""
    done = run("tests/parallel_cases.py", processes=processes)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout)
    assert len(errors) == N_CASES
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


def without(words, *names):
    return [word for word in words if not word.startswith(tuple(f"--{name}=" for name in names))]


@pytest.fixture
def words(text_data):
    return [
        *without(TINY, "max_iters", "eval_interval", "n_head"),
        *("--n_head=4", "--n_kv_head=2", "--max_iters=20", "--eval_interval=10"),
        *("--gradient_accumulation_steps=2", f"--dataset={text_data}"),
    ]


def records(run):
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def numbers(run, name):
    return [record[name] for record in records(run) if name in record]


@pytest.mark.parametrize(
    ("processes", "size", "settings", "limit"),
    [
        pytest.param(2, 2, ["--pos=alibi"], 1e-5, marks=pytest.mark.slow),
        pytest.param(4, 2, ["--pos=rope", "--separate_docs=true"], 1e-5, marks=pytest.mark.slow),
        pytest.param(4, 4, ["--pos=xl"], 1e-5, marks=pytest.mark.slow),
        pytest.param(2, 2, ["--pos=t5", "--optimizer=muon"], 1e-3, marks=pytest.mark.slow),
        pytest.param(
            2, 2, ["--pos=rope", "--window=9", "--sinks=2", "--checkpoint_activations=true"], 1e-5,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, 2, ["--pos=rope", "--random_positions=99"], 1e-5, marks=pytest.mark.slow
        ),
        pytest.param(2, 2, ["--pos=alibi", "--compile=true"], 1e-4, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_training_is_that_of_one_process(processes, size, settings, limit, words, run, tmp_path):
    one, shared = tmp_path / "one", tmp_path / "shared"
    command = ["train.py", *words, *settings]
    assert run(*command, f"--out_dir={one}").returncode == 0
    done = run(*command, f"--out_dir={shared}", f"--sequence_parallel={size}", processes=processes)
    assert done.returncode == 0, done.stderr[-2000:]
    assert numbers(one, "loss") == pytest.approx(numbers(shared, "loss"), abs=limit, rel=0)
    assert len(numbers(one, "loss")) == 20
    for name in ("val_loss", "val_bits_per_byte"):
        assert numbers(one, name) == pytest.approx(numbers(shared, name), abs=10 * limit)
        assert len(numbers(one, name)) == 3
    assert numbers(one, "tokens") == numbers(shared, "tokens")


@pytest.mark.slow
@pytest.mark.parametrize("method", [["--method=yarn"], ["--method=dynamic-yarn"], ["--pose=true"]])
def test_extension_is_that_of_one_process(method, words, run, tmp_path):
    source = tmp_path / "source"
    assert run("train.py", *words, "--max_iters=4", f"--out_dir={source}").returncode == 0
    command = ["extend.py", source, *method, "--max_iters=10", "--max_tokens=512"]
    command += ["--dtype=float32", "--log_interval=1", "--compile=false"]
    one, shared = tmp_path / "one", tmp_path / "shared"
    assert run(*command, f"--out_dir={one}").returncode == 0
    done = run(*command, f"--out_dir={shared}", "--sequence_parallel=2", processes=2)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(numbers(one, "loss")) == 10
    assert numbers(one, "loss") == pytest.approx(numbers(shared, "loss"), abs=1e-5, rel=0)


@pytest.mark.slow
def test_a_shared_run_goes_on_with_one_process(words, run, tmp_path):
    """And the other way round: a checkpoint does not know how it was computed."""
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    # constant: else the learning rate would fall towards the end of the run that is asked for
    words = ["train.py", *words, "--lr_schedule=constant"]
    assert run(*words, f"--out_dir={straight}").returncode == 0
    shared = ["--sequence_parallel=2"]
    first = run(*words, f"--out_dir={changed}", "--max_iters=10", *shared, processes=2)
    assert first.returncode == 0, first.stderr[-2000:]
    resume = [f"--out_dir={changed}", "--max_iters=20", "--init_from=resume"]
    second = run(*words, *resume, "--sequence_parallel=1")
    assert second.returncode == 0, second.stderr[-2000:]
    assert len(numbers(changed, "loss")) == 20
    assert numbers(changed, "loss") == pytest.approx(numbers(straight, "loss"), abs=1e-5)
    assert read_meta(find_checkpoint(changed))["step"] == 20


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--sequence_parallel=2", "or give --sequence_parallel=1"),
        ("--sequence_parallel=0", "out of range"),
    ],
)
def test_one_process_shares_nothing(setting, message, words, call, tmp_path):
    done = call("train.py", *words, setting, f"--out_dir={tmp_path}/run")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("error: ") == 1
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


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A checkpoint with random weights and the tokenizer of bytes."""
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 128, "vocab_size": 257}
    model = GPT(GPTConfig(**shape))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.2)
    model.meta = {"tokenizer": {"kind": "bytes"}, "bos": 256}
    folder = tmp_path_factory.mktemp("model")
    model.save(folder / "rope" / "step-000000")
    return folder / "rope"


def without_progress(text):
    """What evaluate.py printed, without the lines that say how long a measurement took."""
    return [line for line in text.splitlines() if not line.startswith("measured ")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--protocol=chunked,position,sliding", "--lengths=128,512"], ("loss",)),
        (["--task=needle", "--lengths=128,256", "--depths=2", "--trials=2"], ("nll", "accuracy")),
    ],
)
def test_evaluation_is_that_of_one_process(words, numbers, model_folder, run, tmp_path):
    text = ["--text=tests/test_model.py", "--max_tokens=1024"] if "needle" not in words[0] else []
    command = ["evaluate.py", model_folder, *words, *text, "--dtype=float32"]
    one = run(*command, f"--json={tmp_path}/one.json")
    assert one.returncode == 0, one.stderr
    two = run(*command, f"--json={tmp_path}/two.json", "--sequence_parallel=2", processes=2)
    assert two.returncode == 0, two.stderr[-2000:]
    expected, found = (json.loads((tmp_path / f"{n}.json").read_text()) for n in ("one", "two"))
    assert len(expected) == len(found) > 2
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys():
            if name in numbers:
                assert a[name] == pytest.approx(b[name], abs=1e-5)
            elif name != "key" and not isinstance(a[name], float | list):
                assert a[name] == b[name]
    # the first process alone prints
    assert without_progress(two.stdout) == without_progress(one.stdout)

    if "--task=needle" in words:
        return
    # after a stop all processes skip what the first one finds in its file
    (tmp_path / "two.json").write_text(json.dumps([row for row in found if row["length"] == 128]))
    again = run(*command, f"--json={tmp_path}/two.json", "--sequence_parallel=2", processes=2)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "reused: " in again.stdout
    assert 2 * again.stdout.count("measured ") == two.stdout.count("measured ")
    assert json.loads((tmp_path / "two.json").read_text()) == found


@pytest.mark.slow
def test_processes_of_an_evaluation_share_sequences_or_are_refused(model_folder, run):
    text = ["--text=tests/test_model.py", "--max_tokens=256", "--lengths=128"]
    done = run("evaluate.py", model_folder, *text, processes=2)
    assert done.returncode
    assert "give --sequence_parallel=2" in done.stderr
    odd = ["--lengths=129", "--sequence_parallel=2"]
    done = run("evaluate.py", model_folder, *text[:2], *odd, processes=2)
    assert done.returncode
    assert "a sequence of 129 tokens" in done.stderr
    assert done.stderr.count("error: ") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "parts", "checkpointing"),
    [
        ("fsdp", 2, False),
        ("fsdp", 1, True),
        ("ddp", 2, True),
        ("ddp", 4, False),
    ],
)
def test_sent_bytes_are_those_of_the_count(parallel, parts, checkpointing, run):
    """What ddp sends for gradients, its own code in C++ sends: it is not measured."""
    config = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "block_size": 64}
    settings = {"config": config, "parts": parts, "parallel": parallel}
    settings["checkpointing"] = checkpointing
    processes = max(2, parts)
    done = run("tests/sent_bytes.py", json.dumps(settings), processes=processes)
    assert done.returncode == 0, done.stderr[-2000:]
    sent = json.loads(done.stdout)
    of_weights, of_tokens = count_sent_bytes(
        GPTConfig(**config), 2, 64, "float32", checkpointing, processes, parts, parallel
    )
    assert sent["tokens"] == pytest.approx(of_tokens, rel=0.01)
    if parallel == "fsdp":
        assert sent["weights"] == pytest.approx(of_weights, rel=0.1)
