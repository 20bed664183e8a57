"""What stands in for names that torch does not promise: the same numbers without any of them."""

import sys

import torch

from kernels import torch_private


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


def test_muon_in_float32_computes_what_torch_does_in_bfloat16():
    grad = torch.randn(12, 7, generator=torch.Generator().manual_seed(0))
    words = ((3.4445, -4.775, 2.0315), 5, 1e-7)
    theirs = torch_private.muon_step(grad, *words).float()
    for x, right in ((grad, theirs), (grad.T, theirs.T)):
        ours = torch_private.orthogonalize(x, *words)
        assert ours.dtype == torch.float32 and ours.shape == x.shape
        assert (ours - right).norm() < 0.03 * right.norm()
