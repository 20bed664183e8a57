"""Two GPUs in one process: kernels, streams and captures follow the tensors."""

import pytest
from conftest import json_lines


@pytest.mark.parametrize("pos", ["rope", "alibi", "t5", "xl"])
def test_a_model_on_another_device_than_the_current_one(simulate, pos):
    row = json_lines(simulate("tests/simulated_gpu/second_device.py", pos, devices=2))[0]
    illegal = {name: n for name, n in row["counts"].items() if name.startswith("illegal")}
    assert not illegal
    assert row["found"]["tokens"] == row["expected"]["tokens"]
    assert row["found"]["loss"] == pytest.approx(row["expected"]["loss"], rel=1e-6)
    assert row["found"]["grad"] == pytest.approx(row["expected"]["grad"], rel=1e-5)
    assert row["counts"]["graph launches"] == 7
    assert row["current device"] == 0
