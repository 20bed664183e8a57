"""When to extend, and on which data: the two sources of text, the claims, and the script."""

import json

import pytest
from try_budget import try_words

import data
from data.prepare import write_dataset
from experiments import recipes
from experiments.recipes import BUDGETS, DROPE_VARIANTS, STAGE_VARIANTS, WINDOW_VARIANTS


def texts_of(folder, split):
    """The documents of a dataset as bytes."""
    dataset = data.open_dataset(str(folder))
    part = getattr(dataset, split)
    documents = part.documents(dataset.separator)
    return [
        bytes(tokens[start:stop].tolist())
        for tokens, edges in zip(part.tokens, documents, strict=True)
        for start, stop in edges
    ]


def test_long_and_short_documents_are_of_different_texts(rng, tmp_path):
    lengths = (400, 300, 100, 50, 500, 40)
    documents = [rng.integers(0, 256, n).astype("uint8").tobytes() for n in lengths]
    splits = {"train": documents, "val": documents[::-1]}
    write_dataset(tmp_path / "text", data.ByteTokenizer(), splits, {}, raw=False)
    dataset = data.open_dataset(str(tmp_path / "text"))
    folders = recipes.write_sources(dataset, tmp_path, 16, 200)
    for split in ("train", "val"):
        whole = splits[split]
        long, short = texts_of(folders["long"], split), texts_of(folders["short"], split)
        assert long == [text for text in whole[::2] if len(text) >= 200]
        assert max(map(len, short)) == 15
        assert sum(map(len, short)) == sum(map(len, whole[1::2]))
        assert all(any(piece in text for text in whole[1::2]) for piece in short)
        assert b"".join(short) != b"".join(whole[1::2])  # they are shuffled


def make_board(value):
    """A board of three seeds; value(part, variant, measure) is the mean of each number."""
    variants = {
        "mixtures": (
            ["0 % long", "34 % long", "66 % long", "100 % long"],
            ["short", "long"],
        ),
        "stages": (STAGE_VARIANTS, ["1", "4", "16", "seconds"]),
        "windows": (WINDOW_VARIANTS, ["1", "8", "seconds"]),
        "drope": (DROPE_VARIANTS, ["1", "2", "4", "8"]),
    }
    records = []
    for part, (names, measures) in variants.items():
        for name in names:
            for seed in (1, 2, 3):
                # exact in float64, and the same in each variant of a seed
                values = {m: value(part, name, m) + seed / 1024 for m in measures}
                records.append({"part": part, "seed": seed, "variant": name, **values})
    return {"command": "python x", "note": "note", "budget": BUDGETS["cpu"], "records": records}


LITERATURE = {
    ("mixtures", "100 % long", "short"): 1.5,
    ("mixtures", "100 % long", "long"): 1.25,
    ("stages", "one late jump", "16"): 1.25,
    ("stages", "target length", "16"): 1.5,
    ("stages", "target length", "1"): 1.5,
    ("windows", "full attention", "8"): 1.25,
    ("drope", "YaRN, zero-shot", "8"): 2.0,
    ("drope", "DroPE 0.5 %", "8"): 1.75,
    ("drope", "DroPE 8 %", "1"): 1.125,
}


@pytest.mark.parametrize("sign, verdict", [(1, "pass"), (-1, "FAIL (contradicted)")])
def test_claims_are_judged_by_paired_differences(sign, verdict):
    board = make_board(lambda *key: 1 + sign * (LITERATURE.get(key, 1.0) - 1))
    for part in ("mixtures", "stages", "windows", "drope"):
        claims = recipes.judge(board, part)
        assert {claim.verdict() for claim in claims} == {verdict}
        assert {claim.half_width for claim in claims} == {0}
    means = [claim.mean for claim in recipes.judge(board, "mixtures")]
    assert means == [sign * 0.5, sign * 0.5, sign * 0.25]
    assert "| one late jump | 1.002 ± 0.002" in "\n".join(recipes.report(board))


@pytest.mark.slow
def test_a_run_goes_on_where_it_stopped(call, text_data, tmp_path):
    """Parts that are measured apart are collected, and not measured again."""
    words = try_words("recipes", tmp_path, "--seeds=1", text=text_data)
    for part in ("drope", "stages"):
        assert call(*words, f"--part={part}").returncode == 0
    done = call(*words, "--part=drope,stages")
    assert done.returncode == 0 and "step" not in done.stdout.split("#")[0]
    board = json.loads((tmp_path / "results/recipes.json").read_text())
    assert {record["part"] for record in board["records"]} == {"drope", "stages"}
    assert call(*words, "--part=mistures").returncode == 2
