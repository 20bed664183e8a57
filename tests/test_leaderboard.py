"""The leaderboard: entries from files, continuing after a stop, redrawing, and its claims."""

import functools
import json
import math

import pytest
from try_budget import try_words

from experiments import leaderboard, report
from experiments.report import Claim, confidence_interval, format_interval
from model import POSITIONS

OWN_SCHEME = '''
import torch
from model import NoPE

class Decay(NoPE):
    """Scores fall with the square root of the distance."""

    def bias(self, n, layer):
        return -torch.arange(n).sqrt().expand(self.config.n_head, n)
'''


pytestmark = pytest.mark.usefixtures("entries_do_not_stay")


@pytest.fixture
def words(text_data, tmp_path, monkeypatch):
    """A command line that takes seconds: two schemes, and one of our own from a file."""
    (tmp_path / "my_decay.py").write_text(OWN_SCHEME)
    measure_throughput = functools.partial(leaderboard.measure_throughput, rounds=1, steps=1)
    monkeypatch.setattr(leaderboard, "measure_throughput", measure_throughput)
    entries = ["--entries=rope,learned", f"--entry={tmp_path}/my_decay.py", "--max_tokens=2000"]
    return try_words("leaderboard", tmp_path, *entries, text=text_data)


def read_board(tmp_path):
    return json.loads((tmp_path / "results/leaderboard.json").read_text())


# -----------------------------------------------------------------------------
# The script.


def test_an_entry_from_a_file_is_ranked_and_finished_runs_are_not_repeated(
    call, words, tmp_path, monkeypatch
):
    done = call(*words, "--seeds=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    board = read_board(tmp_path)
    assert set(board["throughput"]) == {"rope", "learned", "my_decay"}
    assert board["throughput"]["rope"]["relative"] == 1.0
    for name in board["throughput"]:
        records = report.select(board["records"], checkpoint=name, protocol="last-quarter")
        assert {record["length"] for record in records} == {16, 32, 36, 64, 128, 512}
        for record in records:
            is_refused = name == "learned" and record["length"] > 16
            assert ("refused" in record) == is_refused and ("loss" in record) != is_refused
    text = (tmp_path / "results/leaderboard.md").read_text()
    assert "my_decay" in text and "refused" in text and "commit" in text
    assert (tmp_path / "results/leaderboard.png").read_bytes()[:4] == b"\x89PNG"

    # The same command with one more seed adds runs. A run without its scores, or with those of
    # another rule, is not trained again, and its checkpoint is scored to the same bits.
    checkpoints = list((tmp_path / "runs").rglob("*.safetensors"))
    assert len(checkpoints) >= 6
    times = {file: file.stat().st_mtime_ns for file in checkpoints}
    (scores,) = (tmp_path / "runs").rglob("rope-1/scores.json")
    scores.unlink()
    (scores,) = (tmp_path / "runs").rglob("learned-1/scores.json")
    scored = json.loads(scores.read_text())
    scores.write_text(json.dumps({**scored, "scored": "another rule", "records": []}))
    del POSITIONS["my_decay"]
    done = call(*words, "--seeds=2")
    assert done.returncode == 0, done.stderr
    records = read_board(tmp_path)["records"]
    assert [record for record in records if record["seed"] == 1] == board["records"]
    assert {record["seed"] for record in records} == {1, 2}
    assert {file: file.stat().st_mtime_ns for file in checkpoints} == times
    assert "± " in (tmp_path / "results/leaderboard.md").read_text()

    # With another measure the same checkpoints are scored again.
    del POSITIONS["my_decay"]
    done = call(*words, "--seeds=1", "--max_tokens=1000")
    assert done.returncode == 0, done.stderr
    fewer = read_board(tmp_path)["records"]
    assert {file: file.stat().st_mtime_ns for file in checkpoints} == times
    assert len(fewer) == len(board["records"]) and fewer != board["records"]


def test_what_has_changed_is_trained_anew_and_nothing_else(call, words, tmp_path, monkeypatch):
    """The hacker's loop: edit the class or a default, and run the same command again."""
    words = [word for word in words if "--entries" not in word] + [
        "--entries=my_decay",
        "--seeds=1",
    ]
    runs = tmp_path / "runs"

    def rank(text=OWN_SCHEME):
        POSITIONS.pop("my_decay", None)
        (tmp_path / "my_decay.py").write_text(text)
        done = call(*words)
        assert done.returncode == 0, done.stderr
        losses = [record["loss"] for record in read_board(tmp_path)["records"]]
        return losses, done.stdout, sorted(run.name for run in next(runs.iterdir()).iterdir())

    losses, text, names = rank()
    assert names == ["my_decay-1"] and "taken from" not in text
    again, text, names = rank(OWN_SCHEME.replace("    def bias", "    # a comment\n    def bias"))
    assert again == losses and names == ["my_decay-1"] and "taken from" in text

    edited, text, names = rank(OWN_SCHEME.replace(".sqrt()", ".log1p()"))
    assert edited != losses and names == ["my_decay-1", "my_decay-1.2"]
    assert "has changed: training again" in text
    assert rank()[0] == losses  # the old class again, and its old run

    monkeypatch.setitem(leaderboard.BUDGETS["try"]["training"], "learning_rate", 1e-3)
    slower, text, names = rank()
    assert slower != losses and names[-1] == "my_decay-1.3"
    assert "Not judged: models trained for 20 steps" in text


def test_a_run_that_was_stopped_goes_on_unless_its_scheme_was_edited(
    call, words, tmp_path, monkeypatch
):
    words = [word for word in words if "--entries" not in word] + [
        "--entries=my_decay",
        "--seeds=1",
    ]
    real = report.train

    def stopped(model, config):
        config.max_iters = 10
        real(model, config)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(report, "train", stopped)
        assert call(*words).returncode == 130
    first = []

    def noted(model, config):
        first.append(model.meta.get("step", 0))
        return real(model, config)

    monkeypatch.setattr(report, "train", noted)
    for text, step in ((OWN_SCHEME.replace("sqrt", "log1p"), 0), (OWN_SCHEME, 10)):
        del POSITIONS["my_decay"]
        (tmp_path / "my_decay.py").write_text(text)
        assert call(*words).returncode == 0
        assert first.pop() == step


def test_a_new_setting_at_its_default_changes_no_identity():
    old = {
        "model": {"n_layer": 2, "swing": 1},
        "model_defaults": ["swing"],
        "training": {"seed": 1, "out_dir": "a"},
        "training_defaults": [],
        "data": "d",
        "code": "c",
    }

    def changed(**settings):
        return {**old, **settings}

    same = leaderboard.same_identity
    assert same(old, changed(training={"seed": 1, "out_dir": "b", "overwrite": True}))
    assert not same(old, changed(code="e")) and not same(old, changed(data="e"))
    assert not same(old, changed(training={"seed": 2}))
    new = changed(model={"n_layer": 2, "p": 1.0}, model_defaults=["p"])
    assert same(old, new) and same(new, old)  # swing has gone, and p has come
    assert not same(old, changed(model={"n_layer": 2, "p": 0.5}, model_defaults=[]))
    assert not same(changed(model_defaults=[]), new)
    # an edited default is another value
    assert not same(old, changed(model={"n_layer": 2, "swing": 2}))


# -----------------------------------------------------------------------------
# Entries, ranks and tables.


def test_hybrids_are_rope_with_one_change():
    budget = leaderboard.BUDGETS["try"]  # 16 tokens, 4 layers
    config = leaderboard.make_model("rope-window", budget, 50).config
    assert (config.pos, config.window, config.layer_pattern) == ("rope", 8, "W")
    config = leaderboard.make_model("rope-nope-every-4th", budget, 50).config
    assert [config.layer_kind(layer) for layer in range(4)] == ["F", "F", "F", "N"]
    config = leaderboard.make_model("rope-random-positions", budget, 50).config
    assert (config.pos, config.random_positions, config.layer_pattern) == ("rope", 512, "F")
    config = leaderboard.make_model("rope-p-0.25", budget, 50).config
    assert (config.pos, config.p_rope, config.score_scale) == ("rope", 0.25, "none")
    config = leaderboard.make_model("rope-logn", budget, 50).config
    assert (config.pos, config.p_rope, config.score_scale) == ("rope", 1, "logn")
    assert leaderboard.make_model("alibi", budget, 50).config.pos == "alibi"
    assert set(leaderboard.HYBRIDS) == set(leaderboard.HYBRID_NOTES)


def make_records(losses, length=64):
    """Records of made-up runs: (name, protocol, length in training lengths) -> loss by seed."""
    records = []
    for (name, protocol, factor), by_seed in losses.items():
        for seed, loss in enumerate(by_seed, 1):
            key = {"checkpoint": name, "protocol": protocol, "length": factor * length}
            value = {"refused": "no"} if loss is None else {"loss": loss}
            records.append({**key, "seed": seed, **value})
    return records


def test_entries_are_ranked_by_their_mean_and_refused_ones_come_last():
    losses = {}
    by_factor = {
        "flat": [2.0, 2.0, 2.0, 2.0],
        "good at first": [1.0, 2.0, 3.0, 4.0],
        "refused": [1.5, None, None, None],
        "refused and worse": [1.6, None, None, None],
    }
    for name, values in by_factor.items():
        for factor, loss in zip(leaderboard.FACTORS, values, strict=True):
            losses[name, "last-quarter", factor] = [loss]
    records = make_records(losses)
    names = leaderboard.rank_entries(records[::-1], 64)
    assert names == ["flat", "good at first", "refused", "refused and worse"]

    throughput = {name: {"tokens_per_second": 1234.5, "relative": 0.5} for name in names}
    board = {"model": {"block_size": 64}, "throughput": throughput, "records": records}
    header, _, *rows = leaderboard.loss_table(board, names, "last-quarter")
    assert header.startswith("|  | 64 (1x) | 256 (4x) | 512 (8x) | 2,048 (32x) | tokens/s |")
    assert rows[1] == "| 2. good at first | 1.000 | 2.000 | 3.000 | 4.000 | 1,234 | 0.50 |"
    assert rows[2] == "| 3. refused | 1.500 | refused | refused | refused | 1,234 | 0.50 |"


def test_throughput_is_relative_within_a_round():
    """The machine is slower in the second round, for both."""
    summary = leaderboard.summarize(60, [1.0, 10.0, 2.0], [2.0, 30.0, 5.0])
    assert summary == {"tokens_per_second": 60 / 5.0, "relative": 0.4}


# -----------------------------------------------------------------------------
# Intervals and claims.


def test_the_interval_is_students_t():
    """Three values: mean 2, standard deviation 1, half-width 4.303 / sqrt(3)."""
    mean, half_width = confidence_interval([1.0, 2.0, 3.0])
    assert mean == 2 and half_width == pytest.approx(4.303 / math.sqrt(3), rel=1e-4)
    mean, half_width = confidence_interval([1.0])
    assert mean == 1 and math.isnan(half_width)
    assert format_interval([1.0, 2.0, 3.0]) == "2.000 ± 2.484" and format_interval([1]) == "1.000"


@pytest.mark.parametrize(
    "claim, verdict",
    [
        (Claim("a", -0.1, 0.05, below=0), "pass"),
        (Claim("a", -0.1, 0.15, below=0), "FAIL (not separated)"),
        (Claim("a", 0.1, 0.15, below=0), "FAIL (not separated)"),
        (Claim("a", 0.1, 0.05, below=0), "FAIL (contradicted)"),
        (Claim("a", 0.5, 0.05, above=0.4), "pass"),
        (Claim("a", 0.42, 0.05, above=0.4), "FAIL (not separated)"),
        (Claim("a", 0.3, 0.05, above=0.4), "FAIL (too small)"),
        (Claim("a", 0.006, 0.05, above=0.4), "FAIL (too small)"),
        (Claim("a", -0.1, 0.05, above=0.4), "FAIL (contradicted)"),
        (Claim("a", -0.1, 0.05, below=-0.4), "FAIL (too small)"),
        (Claim("a", 0.1, 0.05, below=-0.4), "FAIL (contradicted)"),
        (Claim("within", 0.5, 0.05, below=0.1), "FAIL (contradicted)"),
        (Claim("a", 0.5, math.nan, above=0.4), "FAIL (a single seed has no interval)"),
        (Claim("a", math.inf, math.nan, above=0.4), "FAIL (a single seed has no interval)"),
    ],
)
def test_a_claim_passes_with_its_whole_interval(claim, verdict):
    assert claim.verdict() == verdict and claim.passed == (verdict == "pass")


def test_a_claim_is_printed_with_its_bound():
    assert str(Claim("a", -0.1, 0.05, below=0)) == "a: -0.100 ± 0.050, < 0: pass"
    assert str(Claim("b", 0.2, 0.0, above=math.log(1.1))) == "b: +0.200, > 0.09531: pass"


def test_differences_are_paired_by_seed():
    """What all seeds share does not widen the interval."""
    losses = {}
    for name, loss in (("alibi", 1.0), ("t5", 1.1), ("nope", 1.5)):
        losses[name, "chunked", 1] = [loss, loss + 3.0, loss - 2.0]
    orderings = leaderboard.Orderings(make_records(losses), 64)
    alibi, t5, nope, absent = ((n, "chunked", 64) for n in ("alibi", "t5", "nope", "absent"))
    orderings.compare("topic", "a", alibi, t5, below=0)
    orderings.compare("topic", "b", t5, alibi, below=0)
    orderings.compare("topic", "c", nope, alibi, above=0.45)
    orderings.compare("topic", "d", nope, alibi, above=0.55)
    orderings.compare("topic", "e", nope, absent, above=0.55)
    claims = orderings.claims["topic"]
    assert [claim.passed for claim in claims] == [True, False, True, False]
    assert claims[0].mean == pytest.approx(-0.1) and claims[0].half_width < 1e-9

    losses["alibi", "chunked", 1][0] += 2.0
    orderings = leaderboard.Orderings(make_records(losses), 64)
    orderings.compare("topic", "a", alibi, t5, below=0)
    (claim,) = orderings.claims["topic"]
    assert claim.verdict() == "FAIL (not separated)"


def test_every_prediction_is_judged_where_its_schemes_were_run():
    losses = {}
    for name in ("alibi", "sinusoidal", "rope", "t5", "nope", "learned"):
        for protocol in ("chunked", "last-quarter"):
            for factor in (1, 84 / 64, 2, 4, 8, 32):
                losses[name, protocol, factor] = [1.0, 1.1]
    claims = leaderboard.Orderings(make_records(losses), 64).judge()
    assert [len(claims[topic]) for topic in claims] == [12, 5, 3, 4]
    rope_only = {key: value for key, value in losses.items() if key[0] == "rope"}
    claims = leaderboard.Orderings(make_records(rope_only), 64).judge()
    assert [claim.text[:4] for topic in claims for claim in claims[topic]] == ["rope", "rope"]
