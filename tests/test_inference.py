"""What makes the whole fast and frugal changes no result: checkpointed blocks, batches prepared ahead, prompts read together, steps of fixed shape; and memory is what the count says."""
import contextlib
import gc
import json
import subprocess
import sys
import threading
import warnings
import weakref

import pytest
import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import config
import evaluate
from nanolong import inference
import kernels
import train
from conftest import ROOT, TINY
from model import GPT, POSITIONS, KVCache, GPTConfig, UserError

sys.path.insert(0, str(ROOT / "experiments"))
import bench_memory  # noqa: E402
import bench_train  # noqa: E402


class Seen(TorchDispatchMode):
    """The names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def gradients(model, tokens, checkpointed, forward=None):
    model.checkpoint_activations = checkpointed
    model.zero_grad()
    torch.manual_seed(5)  # of dropout
    loss = (model if forward is None else forward)(tokens, tokens, reduction="sum")
    seen = Seen()
    with seen if forward is None else contextlib.nullcontext():
        loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())], seen.names


@pytest.mark.parametrize("pos", POSITIONS)
def test_checkpointed_blocks_have_the_same_gradients(pos, make):
    """To the bit, with dropout; attention without relative vectors or a trained bias is not computed again, everything else is."""
    model, tokens = make(pos=pos, n_kv_head=2, qk_norm=True, dropout=0.2).train(), torch.randint(0, 50, (2, 24))
    plain, before = gradients(model, tokens, False)
    kept, again = gradients(model, tokens, True)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    assert sum("silu" in name and "backward" not in name for name in again) == 2 and not any("silu" in name and "backward" not in name for name in before)
    if pos in ("rope", "learned", "sinusoidal", "nope", "alibi"):
        assert not [name for name in again if name.endswith("attention_for_cpu")]
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(tokens), model(tokens))


def test_checkpointed_blocks_compile(make):
    model, tokens = make(pos="rope", dropout=0.2).train(), torch.randint(0, 50, (2, 24))
    results = []
    for checkpointed in (False, True):
        torch._dynamo.reset()
        results.append(gradients(model, tokens, checkpointed, torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition"))[0])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results))


def test_checkpointed_blocks_from_the_shell(run, text_data, tmp_path):
    """Two processes with the setting log what one without it does."""
    words = ["train.py", *TINY, f"--dataset={text_data}", "--gradient_accumulation_steps=2", "--dropout=0.1"]
    logs = []
    for name, more, processes in (("plain", [], 0), ("kept", ["--checkpoint_activations=true"], 2)):
        done = run(*words, *more, f"--out_dir={tmp_path / name}", processes=processes, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        logs.append([json.loads(line) for line in (tmp_path / name / "log.jsonl").read_text().splitlines()])
    for a, b in zip(*logs, strict=True):
        assert a["step"] == b["step"] and a.get("loss", a.get("val_loss")) == pytest.approx(b.get("loss", b.get("val_loss")), rel=1e-5)


@pytest.fixture
def cfg(text_data, tmp_path):
    def cfg(name, **settings):
        return train.TrainConfig(**{"dataset": str(text_data), "out_dir": str(tmp_path / name), "batch_size": 2, "warmup_iters": 1, "eval_interval": 1000, "eval_iters": 1, "log_interval": 1, "device": "cpu",
                                    "dtype": "float32", "compile": False, "gradient_accumulation_steps": 2, **settings})
    return cfg


def small():
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=16))


def test_one_read_an_iteration(cfg, monkeypatch):
    """Six iterations more are six reads more of a tensor's value, whatever the micro-batches."""
    reads = []
    for name in ("item", "tolist", "__bool__", "__int__", "__float__"):
        was = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, was=was, name=name: reads.append(name) or was(self))
    counts = []
    for iterations in (3, 9):
        reads.clear()
        train.train(small(), cfg(f"run{iterations}", max_iters=iterations))
        counts.append(len(reads))
    assert counts[1] - counts[0] == 6


def test_what_a_batch_raises_is_raised_in_its_turn(cfg, monkeypatch):
    """Not when it is prepared, one micro-batch early; and no thread is left."""
    whole = train.data.Dataset.batch

    def batch(self, number, *rest):
        if number == 5:  # the second micro-batch of iteration 3
            raise config.LocalError("token 7 is bad")
        return whole(self, number, *rest)
    monkeypatch.setattr(train.data.Dataset, "batch", batch)
    before, c = threading.active_count(), cfg("run", max_iters=4)
    with pytest.raises(config.UserError, match="token 7"):
        train.train(small(), c)
    rows = [json.loads(line) for line in open(f"{c.out_dir}/log.jsonl")]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2] and threading.active_count() == before
    assert train.train(small(), cfg("short", max_iters=2))["step"] == 2  # number 4 was prepared in vain, 5 never


@pytest.mark.parametrize("pos", POSITIONS)
def test_prompts_of_unequal_length(pos, make):
    """Read together each is continued as if it were alone."""
    for settings in ({}, dict(window=9, sinks=2), *((dict(random_positions=90),) if pos in ("rope", "learned", "sinusoidal") else ())):
        model = make(pos=pos, n_kv_head=2, block_size=64, **settings).double()
        prompts = [torch.randint(0, 50, (n,)) for n in (5, 17, 1, 30)]
        together = torch.cat(list(model.generate(prompts, 12, temperature=0)), 1)
        alone = torch.cat([torch.cat(list(model.generate(p[None], 12, temperature=0)), 1) for p in prompts])
        assert torch.equal(together, alone), settings
    seeds = lambda: [torch.Generator().manual_seed(i) for i in range(4)]  # noqa: E731
    drawn = torch.cat(list(model.generate(prompts, 6, top_k=20, generator=seeds())), 1)
    assert torch.equal(drawn, torch.cat([torch.cat(list(model.generate(p[None], 6, top_k=20, generator=g)), 1) for p, g in zip(prompts, seeds())]))


def test_prompts_that_cannot_be_read_together(make):
    model = make(pos="rope")
    for prompts in ([], [torch.tensor([1]), torch.tensor([], dtype=torch.long)]):
        with pytest.raises(UserError, match="at least one token"):
            list(model.generate(prompts, 2))
    for method, words in (("dynamic-ntk", "one at a time"), ("self-extend", "documents")):
        model = make(pos="rope")
        model.extend(method, 2)
        with pytest.raises(UserError, match=words):
            list(model.generate([torch.tensor([1, 2]), torch.tensor([1])], 2))
        assert len(list(model.generate([torch.tensor([1, 2]), torch.tensor([3, 1])], 2))) == 2  # of one length they can


@pytest.mark.parametrize("pos", POSITIONS)
def test_steps_of_fixed_shape(pos, make):
    """What a CUDA graph holds, run without one: the logits of reading everything at once, also after a rewind, for padded prompts, and under autocast; the cache stays where it is."""
    for settings in ({}, dict(window=9, sinks=2)):
        model, tokens = make(pos=pos, n_kv_head=2, block_size=64, **settings), torch.randint(0, 50, (2, 40))
        docs = torch.zeros(2, 40, dtype=torch.long)
        docs[0, :7] = torch.arange(7, 0, -1)
        positions = torch.stack(((torch.arange(40) - 7).clamp(min=0), torch.arange(40)))
        for how in ({}, dict(positions=positions, docs=docs)):
            with torch.no_grad():
                whole, cache = model(tokens, **how), KVCache(40)
                model.hidden_states(tokens[:, :25], **{name: part[:, :25] for name, part in how.items()}, cache=cache)
                where = cache.k[0].data_ptr()
                read, rewind = inference.fixed_step(model, cache, **how)
                read(torch.zeros(2, 1, dtype=torch.long))
                rewind()
                steps = torch.stack([read(tokens[:, i:i + 1]) for i in range(25, 40)], 1)
            assert torch.allclose(steps, whole[:, 25:], atol=1e-4) and cache.k[0].data_ptr() == where
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole, cache = model(tokens).float(), KVCache(40)
        model.hidden_states(tokens[:, :39], cache=cache)
        assert (inference.fixed_step(model, cache)[0](tokens[:, 39:]) - whole[:, 39]).norm() < 0.05 * whole[:, 39].norm()


class NoGraph:
    """What graph_of() asks of torch.cuda, without a GPU: a capture computes, and a replay computes nothing."""
    def __init__(self, *graph):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def wait_stream(self, other):
        pass

    replay = __enter__


def test_a_graph_keeps_what_it_reads(make, monkeypatch):
    """The 16-bit copies of the weights are the graph's inputs, and must live as long as it; where it cannot be made, the stream and the cache are as before."""
    for name in ("CUDAGraph", "Stream", "graph", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, NoGraph)
    left, copies, call = [], [], torch.func.functional_call
    monkeypatch.setattr(torch.cuda, "set_stream", left.append)
    monkeypatch.setattr(torch.func, "functional_call", lambda model, cast, *more, **how: (copies.append([weakref.ref(w) for w in cast.values()]), call(model, cast, *more, **how))[1])
    model, tokens = make(pos="rope"), torch.randint(0, 50, (1, 9))
    for runs in (True, False):
        monkeypatch.setattr(kernels, "triton_runs", lambda device, runs=runs: runs)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            cache = KVCache(20)
            model.hidden_states(tokens, cache=cache)
            where = cache.pos
            if runs:
                step = generate.graph_of(model, cache, None, None, False)
                gc.collect()
                assert len(copies[-1]) == 15 and all(copy() is not None for copy in copies[-1]) and step(tokens[:, :1]).shape == (1, 50) and not left
            else:
                with pytest.warns(UserWarning, match="plain PyTorch"):
                    assert generate.graph_of(model, cache, None, None, False) is None
                assert left and cache.at is None and cache.pos is where


def test_many_models_are_compiled_in_one_process(make):
    """Dynamo gives up on a function after eight kinds of it: config.compiled() begins anew."""
    counts = []
    for pos in POSITIONS:
        seen, model = [], make(pos=pos, n_layer=1)
        compiler, torch.compile = torch.compile, lambda f, compiler=torch.compile, seen=seen: compiler(f, backend=lambda graph, inputs: seen.append(1) or graph.forward)
        try:
            config.compiled(model)(torch.randint(0, 50, (1, 8)), torch.randint(0, 50, (1, 8)))
        finally:
            torch.compile = compiler
        counts.append(len(seen))
    assert min(counts) == 1, counts


@pytest.mark.parametrize("pos", POSITIONS)
def test_compiled_steps_draw_the_same(pos, make, monkeypatch):
    """One graph for the whole text and the next ones of about its length, without breaks; windows, prompts of unequal length, drawn positions; the memory beyond the text holds no harm."""
    graphs, compiler = [], torch.compile

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward
    monkeypatch.setattr(torch, "compile", lambda f, **how: compiler(f, backend=backend, **how))
    random = dict(random_positions=70) if pos in ("rope", "sinusoidal") else {}
    hybrid = dict(window=9, sinks=2) | (dict(layer_pattern="FN") if pos not in ("nope", "learned", "sinusoidal") else {})
    for settings in (hybrid, *([random] if random else [])):
        torch._dynamo.reset()
        graphs.clear()
        model = make(pos=pos, n_layer=2, n_kv_head=2, block_size=64, **settings)
        prompts = [torch.randint(0, 50, (n,)) for n in (7, 3, 12)]
        for start in (prompts, prompts[:1], torch.randint(0, 50, (1, 9))):
            want, got = (torch.cat(list(model.generate(start, 11, temperature=0.9, generator=[torch.Generator().manual_seed(i) for i in range(len(start))], compiled=compiled)), 1) for compiled in (False, True))
            assert torch.equal(want, got)
        assert len(graphs) == 2  # three rows, and one


def test_what_is_not_compiled(make):
    for method in ("dynamic-yarn", "ntk-frozen", "self-extend"):
        model = make(pos="rope")
        model.extend(method, 2)
        with pytest.raises(UserError, match="leave out --compile"):
            list(model.generate(torch.tensor([[1]]), 2, compiled=True))


def test_compiled_sampling_from_the_shell(run, text_data, tmp_path):
    assert run("train.py", *TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}").returncode == 0
    plain, fast = (run("sample.py", str(tmp_path / "run"), "--start=the ", "--max_new_tokens=24", "--temperature=0", "--dtype=float32", f"--compile={compiled}") for compiled in ("false", "true"))
    assert fast.returncode == 0 and fast.stdout == plain.stdout and not fast.stderr.startswith("Traceback"), fast.stderr


def test_a_known_room_is_taken_once(make):
    """generate() reads into the memory that the prompt was read into, and what distance adds is tabulated once."""
    model, calls = make(pos="kerple"), []
    bias = model.pos.bias
    model.pos.bias = lambda n, layer: calls.append(n) or bias(n, layer)
    list(model.generate(torch.randint(0, 50, (1, 5)), 15))
    assert calls == [19, 19]


def test_drawing(rng):
    """top_k and top_p against the distribution written out: what may be drawn, and how often."""
    logits, n = torch.randn(1, 30) * 2, 20000
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.7, 5, 1.0), (1.0, 0, 0.6), (1.3, 7, 0.5), (1.0, 99, 1.0)):
        p = (logits[0].double() / temperature).softmax(-1)
        order = p.argsort(descending=True)
        mass = p[order].cumsum(0) - p[order]
        keep = order[[i for i in range(30) if (not top_k or i < top_k) and mass[i] < top_p]]
        want = torch.zeros(30, dtype=torch.float64).index_copy(0, keep, p[keep] / p[keep].sum())
        got = torch.bincount(inference.draw(logits.expand(n, -1), temperature, top_k, top_p, None)[:, 0], minlength=30) / n
        assert not got[want == 0].any() and (got - want).abs().max() < 6 * 0.5 / n ** 0.5


def test_a_single_row_is_a_product_with_a_vector(rng):
    for bias in (False, True):
        ours, x = generate.Linear(70, 33, bias=bias), torch.randn(1, 1, 70)
        plain = nn.Linear(70, 33, bias=bias)
        plain.load_state_dict(ours.state_dict())
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            with Seen() as seen:
                y = ours(x)
            assert "aten::mv" in seen.names and y.dtype == torch.bfloat16 and y.shape == (1, 1, 33) and torch.allclose(y.float(), plain(x).float(), atol=0.03)
            assert torch.equal(ours(x.expand(1, 2, 70)), plain(x.expand(1, 2, 70)))
        assert torch.equal(ours(x), plain(x)) and ours(x).requires_grad


def test_attention_of_a_room_partly_filled(rng):
    """length: the reference sees so many keys."""
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 30, 8)
    docs, positions = torch.arange(30).expand(2, 30) // 7, torch.arange(30) * 2
    for n in (1, 8, 30):
        some = dict(window=9, positions=positions[:n], docs=docs[:, :n])
        assert torch.equal(kernels.attention(q, k, k, window=9, positions=positions, docs=docs, length=torch.tensor([n])), kernels.attention(q, k[:, :, :n], k[:, :, :n], **some))


@pytest.mark.parametrize("pos", POSITIONS)
def test_scores_exist_piece_by_piece(pos, make, monkeypatch):
    """In training too: of many pieces nothing as large as (T, T) is kept for the backward pass, which has the same gradients, in a checkpointed block as well."""
    tokens, results = torch.randint(0, 50, (1, 120)), []
    for piece, checkpointed in ((1 << 24, False), (2000, False), (2000, True)):
        monkeypatch.setattr(kernels.reference, "PIECE", piece)
        model, kept = make(pos=pos, window=20, block_size=120), []
        model.checkpoint_activations = checkpointed
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            loss = model(tokens, tokens)
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert (max(kept) < 120 * 120) == (piece == 2000)
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for other in results[1:] for a, b in zip(results[0], other))


@pytest.mark.parametrize("settings,B,dtype,checkpointed", [
    (dict(n_layer=2, n_head=2, n_embd=64, block_size=4096, vocab_size=60), 1, "float32", True),  # no (T, T), nor (T, vocabulary)
    (dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=128, block_size=128, vocab_size=300, dropout=0.1), 8, "bfloat16", False),
    (dict(pos="learned", n_layer=2, n_head=2, n_embd=64, block_size=256, vocab_size=20000), 4, "float32", False),
], ids=["checkpointed", "dropout", "vocabulary"])
def test_memory_is_what_the_count_says(settings, B, dtype, checkpointed):
    done = subprocess.run([sys.executable, bench_memory.__file__, json.dumps([settings, B, dtype, checkpointed, "cpu"])], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    paper, measured = bench_memory.count(GPTConfig(**settings), B, settings["block_size"], dtype, checkpointed, device="cpu"), int(done.stdout.split("RESULT")[1])
    assert abs(paper["peak"] / measured - 1) < 0.15, (paper, measured)


def test_the_count_counts_the_model():
    """Parameters and FLOPs are the model's own; the longest context fits and the next does not."""
    settings = dict(pos="learned", n_layer=3, n_head=4, n_kv_head=2, n_embd=64, block_size=128, vocab_size=300, tie_embeddings=False)
    model, paper = GPT(GPTConfig(**settings)), bench_memory.count(GPTConfig(**settings), 2, 128)
    assert paper["parameters"] == 4 * sum(p.numel() for p in model.parameters()) and paper["optimizer"] == 2 * paper["parameters"]
    assert paper["flops"] == 2 * 128 * (model.flops_per_token(128) - 6 * 3 * 64 * 128)  # causal: half of attention
    T = bench_memory.longest(bench_memory.GPT2, 24e9)
    peak = lambda T: bench_memory.count(GPTConfig(**bench_memory.GPT2, block_size=T), 1, T)["peak"]  # noqa: E731
    assert peak(T) <= 24e9 < peak(T + 1024) and bench_memory.longest(bench_memory.GPT2, 24e9, checkpointed=True) > 3 * T


def test_training_runs_are_timed_as_they_log(text_data, tmp_path):
    """A stand-in for nanoGPT's loop, whose times are known; and our own, whose log they are taken from."""
    (tmp_path / "train.py").write_text("for i in range(12):\n    print(f'iter {i}: loss 1.0, time {1000 if i < 5 else 20 + i:.2f}ms, mfu -100.00%')\n")
    seconds, first, memory = bench_train.nanogpt(tmp_path, dict(n_layer=1), False, 64, 12, tmp_path)
    assert seconds == pytest.approx(0.028) and 0 < first < 30 and memory > 1
    seconds, first, memory = bench_train.ours(["config/debug.toml"], text_data, 128, 12, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "ours/log.jsonl").read_text().splitlines()]
    assert min(128 / r["tokens_per_second"] for r in rows if "loss" in r) <= seconds < 5 and first > 0.5 and memory > 100


def test_bench_wants_a_checkout(call, tmp_path):
    for words, say in ((["train"], "--nanogpt=PATH"), (["trains"], "'trains'"), (["train", "--iterations=3"], "at least 8")):
        done = call("experiments/bench.py", *words, "--device=cpu", f"--out_dir={tmp_path}")
        assert done.returncode == 2 and say in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("pos", POSITIONS)
def test_long_windows_are_read_in_pieces(pos, make, monkeypatch):
    """To the same loss of every token, past the trained length and with positions by hand; a dynamic method reads at once."""
    x, y = torch.randint(0, 50, (2, 45)), torch.randint(0, 50, (2, 45))
    for settings, method in (({}, None), (dict(window=9, sinks=2, n_kv_head=2), None), *(((dict(random_positions=90), None), ({}, "dynamic-ntk"), ({}, "self-extend")) if pos == "rope" else ())):
        model, lengths = make(pos=pos, **{"block_size": 48 if pos == "learned" else 24, **settings}), []
        if method:
            model.extend(method, 2)
        hidden = model.hidden
        model.hidden = lambda tokens, *rest: lengths.append(tokens.shape[1]) or hidden(tokens, *rest)
        drawn = model.sample_positions(2, 45, 3)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = evaluate.read(model, x, y, drawn)
            monkeypatch.setattr(evaluate, "CHUNK", 16)
            pieces = evaluate.read(model, x, y, drawn)
            monkeypatch.undo()
        assert torch.allclose(whole, pieces, atol=1e-4) and lengths == [45, *((45,) if method else (16, 16, 13))]


def test_settings_read_their_source_once(capsys):
    """--help, and every start, within 0.3 s of `import torch`: a class's source is looked up once, not for every setting."""
    config._source.cache_clear()
    with pytest.raises(SystemExit):
        config.parse(GPTConfig, train.TrainConfig, presets=True, argv=["--help"])
    assert config._source.cache_info().misses == 2 and "--checkpoint_activations=false" in capsys.readouterr().out


def test_norms_of_a_single_row(rng):
    """A dot product and a scale, beside float64, of large and small rows and of zeros; more rows, and gradients, go the general way."""
    torch.manual_seed(int(rng.integers(1 << 30)))
    for width in (1, 7, 192, 768):
        norm = generate.RMSNorm(width, 1e-5)
        torch.nn.init.normal_(norm.weight)
        for scale in (0.0, 1e-4, 1.0, 1e4):
            x = torch.randn(1, 1, width) * scale
            right = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
            with torch.no_grad():
                assert norm(x).shape == x.shape and (norm(x) - right).abs().max() <= 1e-6 * (right.abs().max() + 1e-9)
                assert torch.allclose(norm(x.expand(1, 3, width)), norm(x).expand(1, 3, width), rtol=1e-5, atol=1e-7)
            assert torch.allclose(norm(x), right.float(), rtol=1e-5, atol=1e-7) and norm(x).requires_grad
