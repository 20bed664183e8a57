"""What stands in for names that torch does not promise: the same numbers without any of them."""

import sys

import torch
from conftest import assert_success, newest, run_python
from safetensors.torch import load_file

from kernels import torch_private

# Hides private names before nanoLong asks for them, and then runs a script.
WITHOUT = """
import runpy, sys
import torch

hidden = ("_fused_rms_norm", "_scaled_dot_product_flash_attention_for_cpu")
hidden += (hidden[1] + "_backward",)
namespace = type(torch.ops.aten)
find_operator = namespace.__getattr__

def find(self, name):
    if name in hidden:
        raise AttributeError(name)
    return find_operator(self, name)

for name in hidden:
    vars(torch.ops.aten).pop(name, None)
namespace.__getattr__ = find
from kernels import eager, torch_private
namespace.__getattr__ = find_operator
assert eager.FLASH_DEVICES == () and torch_private.fused_rms_norm is None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_training_without_private_names_gives_the_same_weights(call, tmp_path, text_data):
    """Gates in bands and RMSNorm."""
    words = f"train.py --pos=fox --checkpoint_activations=true --dataset={text_data} --n_layer=2"
    words += " --n_head=2 --n_embd=32 --block_size=300 --batch_size=2 --max_iters=3 --eval_iters=1"
    words += " --warmup_iters=0 --device=cpu --dtype=float32 --compile=false"
    without, control = tmp_path / "without", tmp_path / "control"
    assert_success(run_python(WITHOUT, *words.split(), f"--out_dir={without}"))
    assert_success(call(*words.split(), f"--out_dir={control}"))
    weights = load_file(newest(without) / "model.safetensors")
    for name, x in load_file(newest(control) / "model.safetensors").items():
        torch.testing.assert_close(weights[name], x, rtol=1e-4, atol=2e-6)


def test_attribute_of_constants_is_the_one_that_torch_compile_reads():
    def ours():
        return 1

    def theirs():
        return 1

    torch_private.constant_in_graphs(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs)


def test_lists_of_tensors_are_scaled_without_the_operators_of_lists(monkeypatch):
    results = []
    for _ in range(2):
        x = [torch.arange(3.0), torch.ones(2, 2)]
        torch_private.multiply_each(x, 0.5)
        results.append(x)
        monkeypatch.delattr(torch, "_foreach_mul_", raising=False)
    assert results[0][0].tolist() == [0, 0.5, 1] and results[0][1].tolist() == [[0.5] * 2] * 2
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_compiler_without_its_private_names_is_used_with_its_defaults(monkeypatch):
    monkeypatch.setattr(torch, "_dynamo", type(sys)("empty"))
    torch._dynamo.config = torch._dynamo.exc = object()
    torch_private.keep_address(torch.ones(1))
    assert torch_private.graph_errors() == ()  # catches nothing
    # without a count of writes, tables are never taken for the same
    assert torch_private.n_writes(object()) != torch_private.n_writes(object())
