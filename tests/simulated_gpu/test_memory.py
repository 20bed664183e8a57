"""The memory of a training step: what train.py prints, and what torch's allocator really takes.

A preset takes 15 seconds, compiled 1 to 5 minutes. NANOLONG_MEMORY=FOLDER keeps what was measured
there, and takes what it has.
"""

import json
import os
from pathlib import Path

import pytest
from conftest import json_lines
from preset_memory import PRESETS

ALONE = {"SIMULATED_GPU_ALONE": "1"}


def measure(simulate, preset, compiles):
    """What preset_memory.py measures of a preset, in a process of its own."""
    kept = None
    if "NANOLONG_MEMORY" in os.environ:
        mode = "compiled" if compiles else "eager"
        kept = Path(os.environ["NANOLONG_MEMORY"]) / f"{preset}-{mode}.json"
        if kept.exists():
            return json.loads(kept.read_text())
    words = ["tests/simulated_gpu/preset_memory.py", preset, f"--compile={str(compiles).lower()}"]
    row = json_lines(simulate(*words, values=False, env=ALONE))[-1]
    assert row["compiled"] == compiles
    if kept:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(json.dumps(row, indent=1) + "\n")
    return row


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_printed_memory_is_the_allocators(preset, compiles, simulate):
    row = measure(simulate, preset, compiles)
    # the first step has no moments yet; after it, all are alike
    _, second, third = row["peaks_of_steps"]
    assert second == pytest.approx(third, rel=0.001)
    assert row["printed"] == pytest.approx(third, rel=0.01)
    assert third < row["printed_reserved"] < 1.01 * row["reserved"]
    # the estimate is of the model that is not compiled
    tolerance = 0.5 if compiles else 0.1
    assert row["estimate"] == pytest.approx(third, rel=tolerance)
