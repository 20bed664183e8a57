"""Records: made of a file by the leaderboard's runs, refused when they are not what they say."""

import json
from dataclasses import replace

import pytest
from conftest import ROOT

from experiments import leaderboard, records
from model import POSITIONS
from nanolong.errors import UserError

SCHEME = """
from model import RoPE


class Slow(RoPE):
    def frequencies(self, method, factor, options):
        inv_freq, attention_factor = super().frequencies(method, factor, options)
        return inv_freq / 2, attention_factor
"""


@pytest.fixture
def project(tmp_path, monkeypatch, text_data):
    """A folder of records, and budgets that take a second."""
    small = {**leaderboard.BUDGETS["try"], "training": {"max_iters": 4, "compile": False}}
    for budget in ("try", "cpu"):
        monkeypatch.setitem(leaderboard.BUDGETS, budget, small)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(leaderboard, "measure_throughput", lambda *args: {})
    measure = leaderboard.measure
    on_text = {"dataset": str(text_data), "max_tokens": 1024}
    monkeypatch.setattr(records, "measure", lambda cfg: measure(replace(cfg, **on_text)))
    for name in set(POSITIONS) & {"slow"}:
        monkeypatch.delitem(POSITIONS, name)
    (tmp_path / "records").mkdir()
    (tmp_path / "records/slow.py").write_text(SCHEME)
    yield tmp_path
    POSITIONS.pop("slow", None)


def test_a_record_is_made_checked_and_refused_when_it_was_edited(project):
    file = project / "records/slow.py"
    full = records.RecordsConfig(budget="cpu", runs=str(project / "runs"))
    made = records.make_record(file, full)
    record = json.loads(made.read_text())
    assert made.name == "slow.json" and record["file"] == "records/slow.py"
    found = records.differences(record, "slow")
    assert list(found) == [1, 4, 8, 32] and all(len(values) == 3 for values in found.values())
    assert any(value for value in found[1])
    # the differences are those of the losses, by seed
    losses = {}
    for row in record["records"]:
        if row["protocol"] == "last-quarter" and row["length"] == 16:
            losses[row["checkpoint"], row["seed"]] = row["loss"]
    expected = [losses["slow", seed] - losses["rope", seed] for seed in (1, 2, 3)]
    assert found[1] == pytest.approx(expected)

    quick = replace(full, budget="try")
    line = records.check_record(made, quick)
    assert line[0] == "[slow](../records/slow.py)" and len(line) == 5
    with pytest.raises(UserError, match="exists already"):
        records.make_record(file, full)

    # another number is found when it is measured again
    for row in record["records"]:
        if row["checkpoint"] == "slow" and "loss" in row:
            row["loss"] += 0.5
    made.write_text(json.dumps(record))
    records.check_record(made, quick)
    with pytest.raises(UserError, match="slow at 1x differs from rope"):
        records.check_record(made, full)

    made.write_text(json.dumps({**record, "training": {}}))
    with pytest.raises(UserError, match="other settings"):
        records.check_record(made, quick)
    made.write_text(json.dumps({**record, "code": "0" * 16}))
    with pytest.raises(UserError, match="has been edited"):
        records.check_record(made, quick)


def test_a_record_needs_the_full_budget_and_a_file_of_the_project(project, tmp_path_factory):
    file = project / "records/slow.py"
    with pytest.raises(UserError, match="--budget=cpu"):
        records.make_record(file, records.RecordsConfig())
    other = tmp_path_factory.mktemp("other") / "slow.py"
    other.write_text(SCHEME)
    with pytest.raises(UserError, match="outside of the project"):
        records.make_record(other, records.RecordsConfig(budget="cpu"))


def test_the_table_shows_the_records():
    """records/README.md has the line that the script prints for each file."""
    text = (ROOT / "records/README.md").read_text()
    for file in sorted((ROOT / "records").glob("*.json")):
        row = records.table_row(json.loads(file.read_text()), file.stem)
        assert "| " + " | ".join(row) + " |" in text
