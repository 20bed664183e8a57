"""Every scheme, option and extension method: the numbers of the CUDA path are those of the CPU."""

import pytest
from conftest import json_lines

from model import POSITIONS

# Methods whose decoding step cannot be captured: their tables change as the text grows, or they
# need the queries of the whole text.
NOT_CAPTURED = {
    "dynamic-pi",
    "dynamic-ntk",
    "dynamic-yarn",
    "ntk-frozen",
    "ntk-lceg",
    "longrope",
    "lm-infinite",
    "self-extend",
}


@pytest.mark.parametrize("pos", POSITIONS)
def test_losses_gradients_and_text_are_those_of_the_cpu(simulate, pos):
    rows = json_lines(simulate("tests/simulated_gpu/cases.py", pos, "float32"))
    assert len(rows) == 10 * len(POSITIONS[pos].methods)
    computed = [row for row in rows if "refused" not in row]
    assert all(row["same"] for row in rows if "refused" in row)
    assert len(computed) >= len(rows) * 0.7
    for row in computed:
        assert row["loss"] == pytest.approx(row["loss of the CPU"], rel=1e-6), row
        assert row["gradients"] < 1e-5, row
        assert row["tokens equal"], row
        assert row["illegal"] == 0, row
        # the first of twelve tokens comes from the prefill
        assert row["graph launches"] == (0 if row["method"] in NOT_CAPTURED else 11), row


@pytest.mark.parametrize("dtype, bound", [("bfloat16", 0.05), ("float16", 0.01)])
@pytest.mark.parametrize("pos", ["nope", "rope", "alibi", "t5", "shaw", "xl"])
def test_16_bit_numbers_differ_by_rounding(simulate, pos, dtype, bound):
    rows = json_lines(simulate("tests/simulated_gpu/cases.py", pos, dtype, "plain"))
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss of the CPU"], rel=bound / 10), row
        assert row["gradients"] < bound, row
