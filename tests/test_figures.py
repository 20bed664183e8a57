"""The figures of the position schemes, at a small size."""

import pytest

SMALL = ["--length=32", "--n_head=4", "--head_dim=8"]


def test_both_figures_are_written(call, tmp_path):
    words = [*SMALL, "--out=deep/a.png", "--yarn_out=deep/b.png"]
    done = call("experiments/figures.py", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("a.png", "b.png"):
        file = tmp_path / "deep" / name
        assert file.read_bytes()[:4] == b"\x89PNG"
        assert file.stat().st_size > 10_000
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


@pytest.mark.parametrize(
    ("word", "phrase"),
    [
        ("--out=a.jpg", ".png"),
        ("--yarn_out=a", ".png"),
        ("--head_dim=7", "even"),
        ("--length=1", "length"),
        ("--n_head=0", "n_head"),
    ],
)
def test_impossible_settings_are_refused(call, tmp_path, word, phrase):
    done = call("experiments/figures.py", word, cwd=tmp_path)
    assert done.returncode == 2
    assert phrase in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
