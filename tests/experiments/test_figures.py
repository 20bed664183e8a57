"""The figures of README, and the numbers of its findings, follow from the committed results."""

import pytest
from conftest import ROOT

pytest.importorskip("matplotlib")
from experiments import figures

README = (ROOT / "README.md").read_text(encoding="utf-8")
FLAT = ["xl", "fox-rope", "rope-window", "kerple-power", "fox", "kerple", "sandwich", "alibi"]
mean = figures.mean


@pytest.mark.parametrize("name", ["hero", "smollm2", "probes"])
def test_a_figure_is_drawn_from_the_results(name, tmp_path):
    figure = getattr(figures, f"draw_{name}")()
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    assert f"]({name}.png)" in (figures.RESULTS / "README.md").read_text(encoding="utf-8")
    assert name == "probes" or f"experiments/results/{name}.png" in README


def gap_closed(arm):
    """The mean over seeds, in %, of the gap in loss to a model trained at the target."""
    found = figures.load("reproduce.json")
    seeds = [found[name, "last-quarter", 256] for name in ("none+0", arm, "native")]
    return 100 * mean([(a - b) / (a - c) for a, b, c in zip(*seeds, strict=True)])


def test_the_numbers_of_the_findings_are_those_of_the_results():
    board, hero = figures.load("leaderboard.json"), figures.load("hero.json")
    ends = [[mean(board[a, "last-quarter", n]) for n in (64, 2048)] for a in FLAT]
    found = {
        arm: 100 * mean([mean(hero[arm, f"needle {place}", 384]) for place in figures.PLACES])
        for arm in ("window", "self-extend")
    }
    public = {arm: sum(prompts) for arm, (_, _, prompts) in figures.read_public().items()}
    for text in (
        f"at most {max(end - start for start, end in ends):.2f} nats higher",
        f"finds {found['window']:.0f} % of the passkeys",
        f"Self-Extend finds {found['self-extend']:.0f} %",
        f"closes {gap_closed('self-extend+0'):.0f} % of the gap",
        f"YaRN closes {gap_closed('yarn+0'):.0f} %",
        f"in {public['jet-long']} and {public['self-extend']} of 8 prompts",
        f"found {public['yarn']} of 8",
    ):
        assert text in README, text
    losses = {arm: mean(hero[arm, "last-quarter", 384]) for arm, *_ in figures.METHODS}
    assert min(losses, key=losses.get) == "window"
