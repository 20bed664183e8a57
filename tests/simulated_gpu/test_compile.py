"""torch.compile for CUDA: one graph, no breaks, fewer launches."""

import pytest
from conftest import json_lines

CASES = [
    ("rope", "plain", "none"),
    ("rope", "checkpointing", "yarn"),
    ("rope", "positions", "none"),
    ("rope", "grouped queries", "none"),
    ("alibi", "window and sinks", "none"),
    ("learned", "GPT-2's shape", "none"),
    ("t5", "documents", "pi"),
    ("shaw", "plain", "pi"),
    ("xl", "plain", "none"),
    ("rope", "plain", "dynamic-ntk"),
]


@pytest.mark.slow
@pytest.mark.parametrize("pos, option, method", CASES, ids=lambda word: word)
def test_a_compiled_step_is_one_graph(simulate, pos, option, method):
    words = ("tests/simulated_gpu/compiled.py", pos, option, method)
    row = json_lines(simulate(*words, values=False))[0]
    assert row["graphs"] == 1
    assert row["breaks"] == {}
    assert sum(row["compiled launches"]) < sum(row["eager launches"])
    assert row["synchronisations"] == row["illegal"] == 0, row["lines"]


@pytest.mark.slow
@pytest.mark.parametrize("pos", ["rope", "alibi", "t5"])
def test_a_compiled_decoding_step_is_captured(simulate, pos):
    words = ("tests/simulated_gpu/counted.py", "token", pos, "compiled")
    rows = json_lines(simulate(*words, values=False))
    for row in rows[2:]:
        assert row["counts"]["graph launches"] == 1
        assert row["counts"].get("illegal", 0) == 0
