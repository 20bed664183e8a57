"""Which layers to extend: the claims on what is published, and the arms."""

import json
import re

import pytest
from published import judge_all, read
from test_extensibility import assert_judged_as_published, published_rows


def test_published_results_give_the_published_verdicts():
    saved = read("layers")
    rows = published_rows(saved, {name: re.sub("[ =+]", "-", name) for name in saved["models"]})
    assert_judged_as_published("layers", rows)
    judged = judge_all("layers", rows)
    # with a mean of 0.4 nats before the extension they have learned nothing
    for row in rows:
        row[4] -= 5 if row[0].startswith("WWWF") and row[2:4] == ["niah gain", 64] else 0
    left_out = judged.keys() - judge_all("layers", rows).keys()
    assert len(left_out) == 2 + 3 and all("gain: WWWF" in claim for claim in left_out)


@pytest.mark.slow
def test_all_models_are_extended_and_differ_where_they_should(call, text_data, tmp_path):
    names = "FFFF FFFF-logn WWWF-full WWWF-all WWWN-none WWWN-all WWWN-logn-none".split()
    words = ["layers", "--budget=try", "--seeds=1", "--device=cpu", f"--dataset={text_data}"]
    arms = ",".join(f"{name}/zero-shot" for name in names)
    done = call("experiments/run.py", *words, f"--arms={arms}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "out/experiments/layers.json").read_text())
    loss = {(row[0].split("/")[0], row[3]): row[4] for row in saved["rows"] if "last" in row[2]}
    # logn changes no weights, and nothing within the training length
    assert loss["FFFF-logn", 48] == loss["FFFF", 48]
    assert loss["FFFF-logn", 384] != loss["FFFF", 384]
    assert loss["WWWN-logn-none", 48] == loss["WWWN-none", 48] != loss["WWWN-all", 48]
    assert loss["WWWF-full", 48] != loss["WWWF-all", 48]
