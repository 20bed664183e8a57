"""sources.md of the results: a row for each claim, a verdict, and nothing that does not exist."""

import re

import pytest
from conftest import ROOT

PAGE = ROOT / "experiments" / "results" / "sources.md"
TEXT = PAGE.read_text(encoding="utf-8")
VERDICTS = {
    "holds",
    "holds in part",
    "does not hold here",
    "not measured",
    "cannot be tested here",
}


def rows():
    """The cells of every row of the table: number, claim, paper, measured, where, verdict."""
    lines = [line for line in TEXT.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_each_of_the_33_claims_has_its_row():
    assert [row[0] for row in rows()] == [str(number) for number in range(1, 34)]
    assert all(len(row) == 6 and all(row) for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_a_row_has_a_verdict_and_says_where(row):
    verdict, where = row[5], row[4]
    assert verdict in VERDICTS
    assert "](" in where or "`" in where


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert len(links) > 33 / 2
    for link in links:
        assert "://" in link or (PAGE.parent / link).exists(), link


def test_named_tests_and_experiments_exist():
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert tests
    for file, name in tests:
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), (file, name)
    for name in re.findall(r"(?<!tests/)(experiments/[\w/]+\.py)", TEXT):
        assert (ROOT / name).is_file(), name


def test_the_counts_in_the_introduction_are_those_of_the_table():
    verdicts = [row[5] for row in rows()]
    for verdict in VERDICTS:
        number = verdicts.count(verdict)
        assert f"{verdict}: {number}" in TEXT, (verdict, number)
