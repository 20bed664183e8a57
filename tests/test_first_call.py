"""kernels/first_call.py on a fake device: its "kernels" are plain PyTorch, or break it.

tests/interpreted/test_self_check.py does the same with the real kernels.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, assert_success
from kernel_cases import bias_arguments, bias_leaves

import kernels
from kernels import definition, eager, first_call
from kernels.self_check import Case, find_fault

CPU = torch.device("cpu")


class FakeDevice:
    """A device whose kernels compute what eager.py does, until a test breaks one."""

    def __init__(self, monkeypatch, cache):
        self.cache = cache / "nanolong" / "kernels"
        self.environment = {"device": "a fake card", "driver": "1", "torch": "2", "triton": "3"}
        self.calls = []  # the kernels called so far
        self.broken = {}  # kernel -> what is called in its place
        monkeypatch.setenv("NANOLONG_CHECK", "1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setitem(kernels._answers, ("cpu", None), True)
        monkeypatch.setattr(first_call, "_faults", {})
        monkeypatch.setattr(first_call, "environment", lambda device: self.environment)
        for name, operator in (("flash", "attention"), ("decode", "attention"), ("rotary", "rope")):
            module = types.ModuleType(f"kernels.{name}")
            setattr(module, operator, self.make_kernel(name, getattr(eager, operator)))
            monkeypatch.setitem(sys.modules, f"kernels.{name}", module)
            monkeypatch.setattr(kernels, name, module, raising=False)
        self.restart()

    def make_kernel(self, name, healthy):
        def kernel(*args, **options):
            self.calls.append(name)
            return self.broken.get(name, healthy)(*args, **options)

        return kernel

    def restart(self, **environment):
        """Forget what a process keeps in memory; perhaps with another driver."""
        first_call._faults.clear()
        first_call._print_once.cache_clear()
        self.calls.clear()
        self.environment.update(environment)


@pytest.fixture
def device(monkeypatch, tmp_path):
    return FakeDevice(monkeypatch, tmp_path / "cache")


def random_inputs(T=20, D=16, term="table"):
    """Queries, keys, values and a score term, each with gradient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, T, D, requires_grad=True) for _ in range(3))
    leaves = [x.requires_grad_() for x in bias_leaves(term, 2, 5, D, torch.float32)]
    return q, k, v, bias_arguments(term, leaves)


def assert_serves_eager(term="table", **changes):
    """The dispatch computes eager.py's bits, forward and backward."""
    q, k, v, options = random_inputs(term=term, **changes)
    results = []
    for module in (kernels, eager):
        y = module.attention(q, k, v, **options)
        results.append((y, *torch.autograd.grad(y.square().sum(), (q, k, v))))
    for x, expected in zip(*results, strict=True):
        assert torch.equal(x, expected)


def wrong_scale(q, k, v, **options):
    return eager.attention(1.1 * q, k, v, **options)


def wrong_mask(q, k, v, *, window=0, **options):
    """The farthest keys are hidden."""
    return eager.attention(q, k, v, window=window or k.shape[2] - 2, **options)


def no_table_gradient(q, k, v, *, bias=None, **options):
    return eager.attention(q, k, v, bias=bias.detach() + 0 * bias, **options)


def not_a_number(q, k, v, **options):
    return eager.attention(q, k, v, **options) * float("nan")


def too_large(*args, **options):
    raise RuntimeError("out of resource: shared memory\nRequired: 1, limit: 0")


@pytest.mark.parametrize(
    "fault,words",
    [
        (wrong_scale, "the output has a relative error of"),
        (wrong_mask, "the output has a relative error of"),
        (no_table_gradient, "the gradient of table has a relative error of 1, "),
        (not_a_number, "the output has a relative error of nan"),
        (too_large, "RuntimeError: out of resource: shared memory;"),
    ],
)
def test_broken_kernel_is_named_and_replaced(fault, words, device, capfd):
    device.broken["flash"] = fault
    assert_serves_eager()
    message = capfd.readouterr().err
    assert message.count("\n") == 1 and words in message
    assert message.startswith("attention (float32, head dimension 16, table) is off on a fake card")
    device.calls.clear()
    assert_serves_eager()
    assert not device.calls and not capfd.readouterr().err
    assert first_call.has_replaced("attention") and not first_call.has_replaced("decoding")


def test_only_the_case_that_failed_is_replaced(device, capfd):
    def broken_at_16(q, k, v, **options):
        return (wrong_scale if q.shape[3] == 16 else eager.attention)(q, k, v, **options)

    device.broken["flash"] = broken_at_16
    assert_serves_eager(D=16)
    device.calls.clear()
    assert_serves_eager(D=32)
    assert device.calls == ["flash", "flash"]  # the check and the call
    assert_serves_eager(D=32)
    assert device.calls == ["flash"] * 3
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("term", ["none", "slopes", "table", "shaw", "xl"])
def test_every_term_is_checked_once(term, device, capfd):
    """With gradient, and for decoding without."""
    assert_serves_eager(term)
    with torch.no_grad():
        q, k, v, options = random_inputs(term=term)
        for _ in range(2):
            kernels.attention(q, k, v, **options)
            kernels.attention(q[:, :, -1:], k, v, **options)
    # a check and three calls; a check and two
    assert (device.calls.count("flash"), device.calls.count("decode")) == (4, 3)
    assert len(list(device.cache.iterdir())) == 2
    assert not capfd.readouterr().err


def test_evaluation_follows_training(device):
    """A kernel whose backward alone is broken serves nothing, also without gradient."""
    device.broken["flash"] = no_table_gradient
    assert_serves_eager()
    device.calls.clear()
    with torch.no_grad():
        q, k, v, options = random_inputs()
        kernels.attention(q, k, v, **options)
    assert not device.calls


def test_masks_and_broken_rope(device, capfd):
    q, k, v, _ = random_inputs()
    docs = torch.arange(20)[None] // 7
    positions = torch.arange(20) * 2
    for options in (
        {"window": 5, "sinks": 1},
        {"window": 5, "positions": positions, "docs": docs},
        {"causal": False},
        {"length": torch.tensor([15])},
    ):
        kernels.attention(q.detach(), k.detach(), v.detach(), **options)
    names = {json.loads(file.read_text())["key"]["mask"] for file in device.cache.iterdir()}
    assert names == {"window", "window over positions, documents", "all keys", "length"}

    def no_gradient(q, k, cos, sin):
        rotated_q, rotated_k = eager.rope(q, k, cos, sin)
        return rotated_q, rotated_k.detach() + 0 * k

    device.broken["rotary"] = no_gradient
    cos, sin = torch.rand(2, 20, 4)
    y = kernels.rope(q, k, cos, sin)
    (grad,) = torch.autograd.grad(y[1].sum(), k)
    assert grad.abs().max() > 0.5
    words = "rope (float32, head dimension 16, 8 channels rotated) is off on a fake card: the "
    assert capfd.readouterr().err.startswith(words + "gradient of keys has a relative error of 1,")


def soft_capped(q, k, v, *, bias=None, **options):
    """Attention whose scores are 30 tanh(score / 30) before the bias."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    score = 30 * torch.tanh(q.float() @ k.float().mT / q.shape[3] ** 0.5 / 30)
    Tq, Tk = score.shape[2:]
    distance = torch.arange(Tk - Tq, Tk)[:, None] - torch.arange(Tk)
    if bias is not None:
        table = bias if bias.dim() == 2 else -bias[:, None] * torch.arange(Tk)
        score = score + table[:, distance.clamp(0, table.shape[1] - 1)]
    return (score.masked_fill(distance < 0, -torch.inf).softmax(-1) @ v.float()).to(v.dtype)


@pytest.mark.parametrize("D", [16, 64, 256])
@pytest.mark.parametrize("term", ["no term", "slopes", "table"])
@pytest.mark.parametrize("kernel", ["attention", "attention without gradient", "decoding"])
def test_a_soft_cap_is_seen_in_bfloat16(kernel, term, D, device):
    case = Case(kernel, torch.bfloat16, D, 1, term)
    assert find_fault(case, CPU) == ""
    device.broken = {"flash": soft_capped, "decode": soft_capped}
    assert "has a relative error of" in find_fault(case, CPU)


# -----------------------------------------------------------------------------
# Whether eager.py still computes what the kernels do


@pytest.mark.parametrize("operator", ["rope", "attention"])
def test_the_kernels_were_tested_against_this_definition(operator):
    found = definition.hash_definition(operator)
    assert found == definition.TESTED[operator], f"kernels/README.md says what to do with {found}"


@pytest.mark.parametrize(
    "old, new, changed",
    [
        ("    H, Tq, D = q.shape[1:]\n", "    # a comment\n    H, Tq, D = (q.shape[1:])\n\n", []),
        ('"""Compute reference.rope();', '"""Rotate pairs of channels;', []),
        ("p = F.log_softmax(", "p = F.softmax(", []),
        ("k, v = k[:, :, :n], v[:, :, :n]", "k, v = k[:, :, n:], v[:, :, n:]", ["attention"]),
        ("scores = -bias[:, None, None]", "scores = bias[:, None, None]", ["attention"]),
        ("part += _keys_to_distances(p)", "part -= _keys_to_distances(p)", ["attention"]),
        ("MAX_SCORES = 1 << 24", "MAX_SCORES = 1 << 25", ["attention"]),
        ("rotated.roll(half, -1) * sin", "rotated.roll(-half, -1) * sin", ["rope"]),
    ],
)
def test_the_hash_of_a_definition_is_that_of_its_code(old, new, changed, tmp_path, monkeypatch):
    source = (ROOT / "kernels" / "eager.py").read_text()
    assert source.count(old) == 1
    before = {operator: definition.hash_definition(operator) for operator in definition.TESTED}
    (tmp_path / "eager.py").write_text(source.replace(old, new))
    monkeypatch.setattr(definition, "__file__", str(tmp_path / "definition.py"))
    after = {name: definition.hash_definition.__wrapped__(name) for name in before}
    assert [name for name in before if after[name] != before[name]] == sorted(changed)


def test_a_kernel_of_another_definition_is_not_used(device, monkeypatch, capfd):
    """One line for all of its cases; the other operators keep their kernels."""
    monkeypatch.setitem(definition.TESTED, "attention", "another")
    for term in ("table", "slopes"):
        assert_serves_eager(term)
    with torch.no_grad():
        q, k, v, options = random_inputs()
        kernels.attention(q[:, :, -1:], k, v, **options)
        kernels.rope(q, k, *torch.rand(2, 20, 8))
    message = "eager.attention() has changed since its kernels were tested: using plain PyTorch"
    assert capfd.readouterr().err == f"{message}, see kernels/README.md\n"
    assert set(device.calls) == {"rotary"}
    assert "plain PyTorch for attention (float32" in first_call.describe(CPU)
    device.restart()
    monkeypatch.setenv("NANOLONG_CHECK", "0")
    kernels.attention(q, k, v, **options)
    assert device.calls == ["flash"]


# -----------------------------------------------------------------------------
# What is remembered


def test_verdict_is_remembered(device, capfd):
    device.broken["flash"] = wrong_scale
    assert_serves_eager()
    line = capfd.readouterr().err
    device.restart()
    device.broken.clear()
    assert_serves_eager()
    assert not device.calls and capfd.readouterr().err == line


@pytest.mark.parametrize("part", ["device", "driver", "torch", "triton", "sources"])
def test_other_versions_are_checked_again(part, device, monkeypatch):
    assert_serves_eager()
    device.restart()
    assert_serves_eager()
    assert device.calls == ["flash"]
    device.restart(**{part: "another"})
    if part == "sources":
        monkeypatch.setattr(first_call, "_sources", lambda kernel: {"sources": "changed"})
    assert_serves_eager()
    assert device.calls == ["flash", "flash"]


def test_sources_of_the_kernel_and_of_the_check_are_hashed(tmp_path, monkeypatch):
    names = ("flash", "decode", "rotary", "eager", "self_check", "first_call")
    for name in names:
        (tmp_path / f"{name}.py").write_bytes((ROOT / f"kernels/{name}.py").read_bytes())
    monkeypatch.setattr(first_call, "__file__", str(tmp_path / "first_call.py"))

    def hashes():
        first_call._sources.cache_clear()
        return [first_call._sources(kernel)["sources"] for kernel in ("attention", "rope")]

    before = hashes()
    for name, changed in (("flash", [True, False]), ("eager", [True, True])):
        with open(tmp_path / f"{name}.py", "a") as file:
            file.write("# changed\n")
        after = hashes()
        assert [a != b for a, b in zip(before, after, strict=True)] == changed
        before = after
    first_call._sources.cache_clear()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"fault": ""}', b'{"fault": "", "key": {}}'],
)
def test_damaged_verdict_is_checked_again(content, device, capfd):
    assert_serves_eager()
    (file,) = device.cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    device.restart()
    assert_serves_eager()
    message = capfd.readouterr().err
    assert message.count("\n") == 1 and f"{file} is damaged" in message
    assert device.calls == ["flash", "flash"] and file.read_bytes() == good


@pytest.mark.parametrize("cache", ["a file", "no home"])
def test_cache_that_cannot_be_written(cache, device, monkeypatch, capfd):
    """It is said once, and the kernels are checked by every process."""
    if cache == "a file":
        device.cache.parent.parent.write_text("in the way")
    else:

        def expanduser(self):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "expanduser", expanduser)
    for _ in range(2):
        device.restart()
        assert_serves_eager()
        assert_serves_eager(D=32)
        message = capfd.readouterr().err
        assert message.count("\n") == 1 and "checked again at every start" in message
        assert device.calls.count("flash") == 4


def test_nothing_is_checked_with_nanolong_check_0(device, monkeypatch, capfd):
    monkeypatch.setenv("NANOLONG_CHECK", "0")
    device.broken["flash"] = wrong_scale
    q, k, v, options = random_inputs()
    y = kernels.attention(q, k, v, **options)
    assert torch.equal(y, wrong_scale(q, k, v, **options))
    assert not device.cache.exists() and not capfd.readouterr().err
    assert first_call.describe(CPU) == "triton, not checked"


def test_an_error_is_not_remembered(device, capfd):
    """It may be one of the machine: a full disk, too little memory, a compiler that was stopped."""
    device.broken["flash"] = too_large
    assert_serves_eager()
    assert "RuntimeError: out of resource" in capfd.readouterr().err
    assert not device.cache.exists()
    device.restart()
    device.broken.clear()
    assert_serves_eager()
    assert device.calls == ["flash", "flash"] and not capfd.readouterr().err


def test_a_gpu_that_no_longer_works_is_said(device, monkeypatch, capfd):
    """An illegal access leaves the process without GPU; the next one knows the verdict."""

    def is_lost(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def find_fault(case, device):
        is_lost(device)

    monkeypatch.setattr(first_call, "find_fault", find_fault)
    monkeypatch.setattr(torch.cuda, "synchronize", is_lost)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    case = ("attention", torch.float32, 16, 1, "no term", "")
    with pytest.raises(RuntimeError, match="start again, and plain PyTorch replaces it"):
        first_call._passes("cuda", 0, *case)
    assert "an illegal memory access was encountered; using plain" in capfd.readouterr().err
    device.restart()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not first_call._passes("cuda", 0, *case)


# -----------------------------------------------------------------------------
# Where it happens


def test_nothing_is_checked_while_a_graph_is_captured(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    case = ("decoding", torch.float32, 16, 1, "no term", "length")
    assert first_call._passes("cuda", 0, *case)
    assert not first_call._faults


@pytest.mark.parametrize("fault", [None, wrong_scale])
def test_check_is_no_part_of_a_compiled_graph(fault, device, monkeypatch, capfd):
    """It runs once, while the graph is traced, in a thread that sees neither that nor autocast."""
    monkeypatch.setattr(kernels.flash, "attention", fault or eager.attention)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(kernels.attention, fullgraph=True, backend=backend)
    q, k, v, options = random_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(q, k, v, **options)
        compiled(q, k, v, **options)
    assert torch.allclose(y, eager.attention(q, k, v, **options), atol=1e-6)
    assert len(graphs) == 1 and len(list(device.cache.iterdir())) == 1
    assert bool(fault) == ("is off on a fake card" in capfd.readouterr().err)


def test_sizes_may_be_symbols_in_a_compiled_graph(device, monkeypatch):
    monkeypatch.setattr(kernels.rotary, "rope", eager.rope)
    torch._dynamo.reset()
    compiled = torch.compile(kernels.rope, fullgraph=True, backend="eager", dynamic=True)
    q, k, _, _ = random_inputs()
    cos, sin = torch.rand(2, 20, 8)
    rotated = compiled(q, k, cos, sin)
    for x, expected in zip(rotated, eager.rope(q, k, cos, sin), strict=True):
        assert torch.allclose(x, expected, atol=1e-6)
    assert len(first_call._faults) == 1


TWO_RANKS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
import kernels
from kernels import first_call
import pytest
from test_first_call import CPU, FakeDevice, assert_serves_eager, wrong_scale

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
device = FakeDevice(pytest.MonkeyPatch(), folder)
for T in range(20):
    first_call._write({{"T": T}}, "")  # both write the same file at the same time
dist.barrier()
device.environment["device"] = f"card {{rank}}"
if rank == 1:
    device.broken["flash"] = wrong_scale
assert_serves_eager()
assert_serves_eager(D=32)
assert first_call.describe(CPU) == "triton" or rank == 1
first_call.share_faults(CPU)
device.calls.clear()
assert_serves_eager()
assert not device.calls
print(first_call.describe(CPU))
print(sum(first_call._read({{"T": T}}) == "" for T in range(20)))
dist.destroy_process_group()
"""


def test_processes_agree_on_the_worst_verdict(tmp_path):
    """And write to one cache at the same time."""
    script = tmp_path / "script.py"
    script.write_text(TWO_RANKS.format(root=str(ROOT)))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), tmp_path],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=120) for process in processes]
    names = [f"attention (float32, head dimension {D}, table)" for D in (16, 32)]
    expected = f"triton, but plain PyTorch for {' and '.join(names)}\n20\n"
    assert [out for out, _ in results] == [expected] * 2, results
    assert "is off on card 1" in results[1][1] and "is off" not in results[0][1]
    assert not list(tmp_path.glob("nanolong/kernels/tmp*"))


def test_a_run_records_its_verdict(device, call, text_data, tmp_path):
    """In meta.json, where a resumed run has its own."""
    words = [*TINY, f"--dataset={text_data}", f"--out_dir={tmp_path / 'run'}", "--pos=t5"]
    assert_success(call("train.py", *words, "--max_iters=4"))

    def verdict(step):
        meta = json.loads((tmp_path / f"run/step-{step:06d}/meta.json").read_text())
        return meta["kernels"]

    assert verdict(4) == "triton" and device.calls
    resumed = call("train.py", *words, "--max_iters=6", "--init_from=resume")
    assert resumed.returncode == 0 and verdict(6) == "triton"
    device.restart(driver="2")
    device.broken["flash"] = wrong_scale
    resumed = call("train.py", *words, "--max_iters=8", "--init_from=resume")
    expected = "triton, but plain PyTorch for attention (float32, head dimension 16, table)"
    assert resumed.returncode == 0, resumed.stderr
    assert verdict(8) == expected


# A scheme of the user's own, whose file makes every process a fake device, that of rank 1 broken.
ENTRY = """
import os
import sys
from pathlib import Path

import pytest

sys.path.append({tests!r})
from test_first_call import FakeDevice, wrong_scale

from model import T5

device = FakeDevice(pytest.MonkeyPatch(), Path({cache!r}))
device.environment["device"] = "card " + os.environ["RANK"]
if os.environ["RANK"] == "1":
    device.broken["flash"] = wrong_scale


class Mine(T5):
    pass
"""


@pytest.mark.slow
def test_two_ranks_train_on_the_worst_verdict(run, text_data, tmp_path):
    entry = tmp_path / "mine.py"
    entry.write_text(ENTRY.format(tests=str(ROOT / "tests"), cache=str(tmp_path / "cache")))
    words = [*TINY, f"--dataset={text_data}", f"--entry={entry}", "--gradient_accumulation_steps=2"]
    done = assert_success(run("train.py", *words, f"--out_dir={tmp_path / 'run'}", processes=2))
    assert "attention (float32, head dimension 16, table) is off on card 1" in done.stderr
    assert "is off on card 0" not in done.stderr
    meta = json.loads((tmp_path / "run/step-000008/meta.json").read_text())
    assert meta["kernels"].endswith(
        "plain PyTorch for attention (float32, head dimension 16, table)"
    )
