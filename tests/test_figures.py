"""The picture of the schemes, at a small size, and its refusals."""


def test_figures(call, tmp_path):
    done = call("experiments/figures.py", "--length=32", "--n_head=4", "--head_dim=8", f"--out={tmp_path}/deep/a.png", cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "deep/a.png").read_bytes()[:4] == b"\x89PNG" and (tmp_path / "deep/a.png").stat().st_size > 10_000
    for words, say in ((["--out=a.jpg"], ".png"), (["--head_dim=7"], "even"), (["--length=1"], "length")):
        done = call("experiments/figures.py", *words, cwd=tmp_path)
        assert done.returncode == 2 and say in done.stderr and len(done.stderr.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["deep"]
