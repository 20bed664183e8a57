"""experiments/bench.py from the shell: it runs end to end on a CPU, and what it writes is what it measured."""
import json


def test_bench(run, tmp_path):
    done = run("experiments/bench.py", "--only=rope,attention,decode", "--lengths=65", f"--out_dir={tmp_path}", "--device=cpu")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {r["section"] for r in rows} == {"rope", "attention", "decode"} and all(r["ms"] > 0 and r["rate"] > 0 for r in rows)
    for r in rows:
        first = next(x for x in rows if x["case"] == r["case"])
        assert abs(r["beside"] - first["ms"] / r["ms"]) < 1e-9 and f"{r['ms']:.3f}" in (tmp_path / "bench.md").read_text()
    one = next(r for r in rows if r["case"].startswith("forward D64 T65"))
    assert abs(one["rate"] - 4 * 12 * 65 * 65 * 64 / 2 / one["ms"] / 1e6) < 1e-6 * one["rate"] and one["unit"] == "GFLOP/s"
    assert (tmp_path / "bench.png").stat().st_size > 10_000


def test_refused(call):
    for words, flags in (("no section", ["--only=speed"]), ("above 0", ["--lengths=0"])):
        done = call("experiments/bench.py", *flags)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
