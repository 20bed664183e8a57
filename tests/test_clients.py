"""experiments/clients.py, as far as it goes without the clients."""

import math
import sys

import pytest
import torch

from experiments import clients, interchange
from experiments.report import CLIENTS_SECTION, read_section, replace_section
from nanolong.errors import UserError

TEXT = "Ab cd. " * 20


@pytest.fixture
def inputs():
    return clients.Inputs("ab", [1, 2, 3, 0, 1, 2], [3, 6], 2)


def make_record(inputs, **changes):
    """A record of a client that computes the same as we do."""
    logits = {"3": torch.eye(4)[:2], "6": torch.eye(4)[2:]}
    record = {"method": "yarn", "factor": 2.0, "client": "mlx-lm", "rope": "yarn"}
    found = {"version": "mlx-lm 1.0", "seconds": 1.0, "same_ids": True}
    lengths = clients.compare(logits, logits, inputs)
    return {**record, "obstacle": None, **found, "lengths": lengths, **changes}


def test_two_scripts_keep_each_others_section(tmp_path):
    file = tmp_path / "report.md"
    file.write_text("# Title\n\ntext\n")
    replace_section(file, CLIENTS_SECTION, ["first"])
    assert file.read_text() == "# Title\n\ntext\n\n## Clients\n\nfirst\n"
    replace_section(file, CLIENTS_SECTION, ["second", "", "### Part"])
    assert file.read_text() == "# Title\n\ntext\n\n## Clients\n\nsecond\n\n### Part\n"
    assert read_section(file, CLIENTS_SECTION) == "\n## Clients\n\nsecond\n\n### Part\n"
    assert read_section(tmp_path / "other.md", CLIENTS_SECTION) == ""
    replace_section(tmp_path / "new" / "report.md", CLIENTS_SECTION, ["first"])
    assert (tmp_path / "new" / "report.md").read_text() == "## Clients\n\nfirst\n"
    replace_section(tmp_path / "new" / "report.md", CLIENTS_SECTION, ["second"])
    assert (tmp_path / "new" / "report.md").read_text() == "## Clients\n\nsecond\n"


def test_interchange_keeps_the_section_of_the_clients(tmp_path, monkeypatch):
    file = tmp_path / "interchange.md"
    file.write_text("# Old\n\n## Clients\n\nkept\n")
    for name in ("make_cases", "run_transformers", "compare_exports"):
        monkeypatch.setattr(interchange, name, lambda *arguments: [])
    monkeypatch.setattr(interchange, "compare_imports", lambda *arguments: ([], []))
    monkeypatch.setattr(interchange, "export_ours", lambda *arguments: ([], []))
    monkeypatch.setattr(interchange, "list_refusals", lambda folder: [])
    monkeypatch.setattr(interchange, "format_report", lambda *arguments: ["# New"])
    monkeypatch.setattr(sys, "argv", ["interchange.py", f"--out={file}"])
    interchange.main()
    assert file.read_text() == "# New\n\n## Clients\n\nkept\n"


def test_a_comparison_has_the_largest_difference_and_both_perplexities(inputs):
    ours = {"3": torch.zeros(2, 4), "6": torch.zeros(2, 4)}
    theirs = {"3": torch.zeros(2, 4), "6": torch.tensor([[0.0, 0, 3, 0], [0, -0.5, 0, 0]])}
    found = clients.compare(ours, theirs, inputs)
    assert found["3"]["difference"] == 0
    assert found["3"]["perplexity"] == pytest.approx(4)
    assert found["6"]["difference"] == 3
    assert found["6"]["same_argmax"] == 0.5
    assert found["6"]["our_perplexity"] == pytest.approx(4)
    # the last logits have no target; those before them predict token 2
    assert found["6"]["perplexity"] == pytest.approx((3 + math.exp(3)) / math.exp(3))


def test_the_table_names_what_was_not_run(inputs):
    records = [
        make_record(inputs, client="transformers", obstacle="not installed", lengths={}),
        make_record(inputs),
        make_record(inputs, client="llama.cpp", error="ValueError: it fails", lengths={}),
    ]
    header, _, within, beyond = clients.client_table(records, inputs)
    assert "transformers | mlx-lm | llama.cpp" in header
    assert "not run: not installed" in within
    assert "0.0e+00, 100 %" in beyond
    assert "fails: ValueError: it fails" in beyond


def test_other_token_ids_are_named(inputs):
    records = [make_record(inputs), make_record(inputs, client="llama.cpp", same_ids=False)]
    assert "other token ids in llama.cpp" in clients.tokenizer_summary(records)
    assert "to the same token ids" in clients.tokenizer_summary(records[:1])


def test_an_absent_client_is_an_obstacle(monkeypatch):
    cfg = clients.ClientsConfig(text="text.txt")
    monkeypatch.setitem(clients.PACKAGES, "mlx-lm", "no_such_package")
    assert clients.obstacle("mlx-lm", cfg) == "not installed"
    monkeypatch.setitem(clients.PACKAGES, "llama.cpp", "json")
    assert clients.obstacle("llama.cpp", cfg) == "no --converter"


@pytest.mark.parametrize(
    "words, message",
    [
        (["run"], "give --text=FILE"),
        (["--text=a.txt"], "name its folder"),
        (["--text=a.txt", "--compared=1", "run"], "give at least 2"),
        (["--text=a.txt", "--long_layers=-1", "run"], "give 0 for all layers"),
        (["--text=a.txt", "run"], "error: there is no"),
    ],
)
def test_wrong_calls_are_refused_in_one_sentence(words, message, call, tmp_path):
    done = call("experiments/clients.py", *words, f"--work={tmp_path}/work", cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_short_text_is_refused(tmp_path, make):
    model = make(block_size=32)
    model.folder = tmp_path
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    cfg = clients.ClientsConfig(text=str(file), beyond=1000)
    with pytest.raises(UserError, match="tokenizer .* is unknown"):
        clients.make_inputs(model, cfg)
    model.meta["tokenizer"] = {"kind": "bytes"}
    with pytest.raises(UserError, match="give a longer text"):
        clients.make_inputs(model, cfg)


@pytest.fixture
def arguments(tmp_path, make, monkeypatch):
    """The command line for a small run with a tokenizer, and short sequences."""
    monkeypatch.setattr(clients, "SHORT", 12)
    model = make(vocab_size=257)
    model.meta["tokenizer"] = {"kind": "bytes"}
    model.save(tmp_path / "run" / "step-000000")
    (tmp_path / "text.txt").write_text(TEXT)
    words = [f"--text={tmp_path}/text.txt", f"--work={tmp_path}/work", f"--out={tmp_path}/r.md"]
    methods = ["--methods=yarn,ntk-parts", "--beyond=9", "--compared=8", "--long_layers=1"]
    return ["clients.py", str(tmp_path / "run"), *words, *methods]


def test_a_report_without_any_client_says_so(tmp_path, arguments, monkeypatch):
    monkeypatch.setattr(clients, "PACKAGES", dict.fromkeys(clients.PACKAGES, "no_such_package"))
    monkeypatch.setattr(sys, "argv", arguments)
    clients.main()
    report = (tmp_path / "r.md").read_text()
    assert "transformers: not run, mlx-lm: not run, llama.cpp: not run" in report
    assert report.count("not run: not installed") == 2 * 2 * 2 * 3
    assert "vLLM: not run" in report


def test_comparisons_are_saved_and_drawn_again(tmp_path, arguments, monkeypatch):
    """The client is our own import of the export."""
    calls = []

    def read_export(client, checkpoint, inputs, place):
        calls.append(client)
        run = place / "imported"
        interchange.import_quietly(checkpoint, run)
        model = clients.GPT.load(run)
        return {"ids": torch.tensor(inputs.ids), **clients.our_logits(model, inputs)}, "ours 1.0"

    packages = {**dict.fromkeys(clients.PACKAGES, "no_such_package"), "mlx-lm": "json"}
    monkeypatch.setattr(clients, "PACKAGES", packages)
    monkeypatch.setattr(clients, "client_logits", read_export)
    monkeypatch.setattr(clients, "continue_prompt", lambda *arguments: {})
    monkeypatch.setattr(sys, "argv", arguments)
    clients.main()
    report = (tmp_path / "r.md").read_text()
    assert calls == ["mlx-lm"] * 2 * 2 * 2
    assert "the last 8 of 33 tokens, through the first 1 layer of the model" in report
    assert clients.GPT.load(tmp_path / "work" / "run-1-layers").config.n_layer == 1
    rows = [line for line in report.splitlines() if line.startswith(("| yarn", "| ntk-parts"))]
    assert len(rows) == 2 * 2 * 2
    for row in rows:
        assert "not run: not installed" in row
        assert float(row.split("|")[7].split(",")[0]) < 1e-4
        assert ", 100 %, " in row

    monkeypatch.setattr(sys, "argv", [*arguments, "--redraw"])
    clients.main()
    assert len(calls) == 2 * 2 * 2
    assert (tmp_path / "r.md").read_text().count(", 100 %, ") == 2 * 2 * 2
