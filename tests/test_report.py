"""Tables, figures and the report of records that are written out here; training curves."""

import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest
from conftest import assert_refused, assert_success
from matplotlib.figure import Figure

from nanolong.evaluation import figures, report
from nanolong.evaluation.tables import Table, refusals, tables_of

HOSTILE = "</script><img src=x onerror=alert(1)>\" onfocus=alert(2) y='$x$&\u2028"
VOID = {"meta", "input"}


def loss(checkpoint, length, value, protocol="chunked", half=0.02, **fields):
    """A record as evaluate.py makes it; a text in place of a loss is the reason of a refusal."""
    record = {"checkpoint": checkpoint, "task": "loss", "protocol": protocol, "length": length}
    if isinstance(value, str):
        return {**record, "refused": value, **fields}
    low, high = (None, None) if value is None else (value - half, value + half)
    return {**record, "loss": value, "low": low, "high": high, "n": 40, "tokens": 9, **fields}


def interval(mean, half=0.1, n=20):
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": n}


def asked(checkpoint, length, accuracy, task="ruler", kind="niah", depth=None, **fields):
    """A record of retrieval; None in place of an accuracy is a refusal."""
    record = {"checkpoint": checkpoint, "task": task, "kind": kind, "depth": depth}
    record.update(length=length, trials=20, seed=1, chance=1 / 900)
    if accuracy is None:
        return {**record, "refused": "too short"}
    found = {"accuracy": interval(accuracy), "nats": interval(0.5), "gain": interval(1.5)}
    return {**record, **found, "control": interval(0.05), **fields}


def cost(checkpoint, seconds, rate):
    record = {"checkpoint": checkpoint, "task": "cost", "length": 64, "prefill_seconds": seconds}
    return {**record, "tokens_per_second": rate, "cache_megabytes": 2.0}


APART = {"difference": interval(0.3)}
NEAR = {"difference": interval(0.05)}

# -----------------------------------------------------------------------------
# Tables


def test_a_table_is_text_markdown_and_html():
    table = Table("Title", ["", "1,024", 2048], [["a", "1.5", "2*"], ["<b>", "10", 3]], ["* note"])
    assert table.text().splitlines() == [
        *("Title", "      1,024   2048", "a       1.5      2*", "<b>      10      3", "* note"),
    ]
    assert table.markdown().splitlines() == [
        *("|  | 1,024 | 2048 |", "| --- | --- | --- |", "| a | 1.5 | 2* |", "| <b> | 10 | 3 |"),
    ]
    html = table.html()
    assert html.count("<td>") == 4 and "<b>" not in html and "&lt;b&gt;" in html
    assert "<caption>Title</caption>" in html and "* note" in html


def test_losses_have_a_row_for_each_checkpoint_and_a_column_for_each_length():
    records = [loss("rope", 64, 1.25), loss("rope", 128, 2.5), loss("learned", 64, 1.5, **APART)]
    records += [loss("learned", 128, "no such position"), loss("near", 64, 1.25, **NEAR)]
    records += [loss("near", 128, None)]
    (table,) = tables_of(records, ["unequal steps: 1; 2"])
    assert table.title == "chunked (every token), nats per token, by context length"
    assert table.header == ["", "64", "128"]
    assert table.rows == [
        ["rope", "1.250 ± 0.020", "2.500 ± 0.020"],
        ["learned", "1.500 ± 0.020*", "refused"],
        ["near", "1.250 ± 0.020", "not finite"],
        ["sequences", "40", "40"],
    ]
    star, unequal, not_finite = table.notes
    assert star.startswith("* differs from the first checkpoint: 95 % interval over the same texts")
    assert unequal == "unequal steps: 1; 2" and "--dtype=float32" in not_finite
    assert tables_of(records[:2], ["unequal"])[0].notes == []  # no star, nothing to explain
    assert refusals(records) == ["refused: learned at 128: no such position"]


def test_retrieval_and_costs_have_a_row_for_each_measure():
    records = [asked("a", 64, 0.25), asked("a", 128, None), asked("b", 64, 0.5, **APART)]
    records += [asked("b", 128, 1.0, **NEAR)]
    for depth, accuracy in ((0.0, 0.75), (0.5, None)):
        records.append(asked("a", 64, accuracy, "needle", depth=depth))
    records.append(cost("a", 0.123456, 12345.6))
    ruler, needle, costs = tables_of(records)
    title = "ruler, niah, 20 prompts a cell, chance 0.0011 right and 6.80 nats, by context length"
    assert ruler.title == title
    assert ruler.rows == [
        ["a: all answers right", "0.25 ± 0.10", "refused"],
        ["a: nats of the answer", "0.50 ± 0.10", "refused"],
        ["a: nats gained by the needles", "1.50 ± 0.10", "refused"],
        ["b: all answers right", "0.50 ± 0.10", "1.00 ± 0.10"],
        ["b: nats of the answer", "0.50 ± 0.10*", "0.50 ± 0.10"],
        ["b: nats gained by the needles", "1.50 ± 0.10", "1.50 ± 0.10"],
    ]
    assert ruler.notes[0] == "without the needles at most 0.05 of the answers are right"
    assert needle.rows == [["a: depth 0", "0.75 ± 0.10"], ["a: depth 0.5", "refused"]]
    assert costs.rows == [
        ["a: seconds of prefill", "0.123"],
        ["a: tokens/s of decoding", "1.23e+04"],
        ["a: MB of cache", "2"],
    ]


# -----------------------------------------------------------------------------
# Figures


def test_the_curves_of_a_figure_are_the_losses():
    """By length, or by position in the longest sequences; what is missing leaves a gap."""
    records = [loss("a", 128, 2.0), loss("a", 64, 1.0), loss("b", 64, "no"), loss("b", 128, None)]
    for start in (0, 64):
        records.append(loss("a", 128, 3.0, "position", position=[start, start + 64]))
    figure = figures.loss_figure("a.png", records, [64], unit="bits per byte")
    by_length, by_position = figure.axes[:2]
    assert by_length.get_ylabel() == "loss, bits per byte"
    a, b, original = by_length.lines
    assert (list(a.get_xdata()), list(a.get_ydata())) == ([64, 128], [1.0, 2.0])
    assert list(b.get_xdata()) == [128] and math.isnan(b.get_ydata()[0])
    assert set(original.get_xdata()) == {64}
    assert list(by_position.lines[0].get_xdata()) == [64, 128]
    band = by_length.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == pytest.approx((0.98, 2.02))


@pytest.mark.parametrize(
    "records, sentence",
    [
        ([loss("a", 64, "no")], ""),
        ([loss("a", 64, 1.0), loss("a", 128, 2.0)], "a has a loss of 2.00"),
        ([loss("a", 128, "no"), loss("b", 128, 1.0)], "b has a loss of 1.00"),
        ([loss("a", 128, 3.0, "last-quarter"), loss("a", 128, 1.0)], "a has a loss of 3.00"),
        ([loss("a", 128, 1.0), loss("b", 128, 2.0)], "a has a loss of 1.00, and none is lower"),
        ([loss("a", 128, 2.0), loss("b", 128, 1.0, **APART)], "b has a loss of 1.00, a has 2.00"),
        (
            [loss("a", 128, 2.0), loss("b", 128, 1.0, **NEAR)],
            "b has a loss of 1.00, no clear difference: a has 2.00",
        ),
    ],
)
def test_the_title_of_a_figure_says_what_the_losses_show(records, sentence):
    """The longest sequences, and of them the last quarter, decide."""
    found = figures.finding(records, ["a", "b"])
    assert found.removeprefix("128 tokens: ") == sentence and bool(found) == bool(sentence)


# -----------------------------------------------------------------------------
# The report


class Page(HTMLParser):
    """The elements and texts of an HTML file, whose tags are all closed."""

    def __init__(self, file):
        super().__init__()
        self.open, self.elements, self.scripts, self.cells, self.text = [], [], [], [], ""
        self.drawn = []  # texts of figures
        self.feed(file.read_bytes().decode("utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            self.scripts[-1] += data
        elif inside in ("td", "th"):
            self.cells.append(data)
        elif "svg" in self.open:
            self.drawn.append(data)
        elif inside != "style":
            self.text += data


def all_records(names):
    """A record of each kind for each checkpoint."""
    records = []
    for name in names:
        records += [loss(name, 64, 1.0, **APART), loss(name, 128, HOSTILE)]
        records += [loss(name, 64, 1.0, "position", position=[0, 64])]
        records += [asked(name, 64, 0.5), asked(name, 64, 0.5, "needle", depth=0.5)]
        records.append(cost(name, 1.0, 1.0))
    return records


@pytest.mark.parametrize("n", [1, 9])
def test_hostile_names_texts_and_tokens_are_shown_and_do_nothing(tmp_path, n):
    names = [f"{HOSTILE}{i}" for i in range(n)]
    text = {"about": HOSTILE, "tokens": [HOSTILE, "\x00\ud800"], "losses": [0.5, math.nan]}
    texts = dict.fromkeys(names, text)
    facts = {name: {"scheme": name, "folder": "out"} for name in names}
    file, unequal = tmp_path / "report.html", [f"unequal steps {HOSTILE}"]
    report.write_report(file, facts, [64], all_records(names), texts, unequal, "commit abc")
    page = Page(file)
    tags = {tag for tag, _ in page.elements}
    assert "img" not in tags and "image" not in tags and len(page.scripts) == 2
    attributes = {name for _, found in page.elements for name in found}
    assert not [name for name in attributes if name.startswith("on") or name == "src"]
    for _, found in page.elements:
        for name in ("href", "xlink:href"):
            assert found.get(name, "#").startswith("#")
    named = set(re.findall(r'element\("([\w-]+)"\)', page.scripts[-1]))
    assert named <= {found["id"] for _, found in page.elements if "id" in found}
    assert f"{HOSTILE}0" in page.cells and f"{HOSTILE}\x00?" in page.text
    assert f"{HOSTILE}0" in page.drawn
    assert json.loads(page.scripts[0]) == [{**text, "losses": [0.5, None]}] * n
    assert page.cells.count("1.000 ± 0.020*") == n and page.text.count("unequal steps") == 2
    policy = next(found["content"] for _, found in page.elements if "http-equiv" in found)
    assert policy == ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'")


def test_the_report_shows_what_was_measured(runs, call, tmp_path, monkeypatch):
    """Every loss and gain of the JSON, with its interval; without matplotlib there are tables."""
    monkeypatch.setattr(Figure, "savefig", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    words = [runs[0], f"table={runs[1]}", "--max_tokens=960", "--trials=5", "--lengths=24,96"]
    words += ["--report=a/r.html", "--json=a/r.json", "--task=loss,ruler"]
    done = assert_success(call("evaluate.py", *words, cwd=tmp_path))
    assert "install matplotlib" in done.stdout
    page = Page(tmp_path / "a/r.html")
    records = json.loads((tmp_path / "a/r.json").read_text())
    assert {record["task"] for record in records} == {"loss", "ruler"}
    for record in records:
        if "refused" in record:
            assert record["refused"] in page.text
        elif record["task"] == "ruler":
            assert any(f"{record['gain']['mean']:.2f} ± " in text for text in page.cells)
        elif record["protocol"] != "position" or record["length"] == 96:
            assert any(text.startswith(f"{record['loss']:.3f} ± ") for text in page.cells)
    assert len(json.loads(page.scripts[0])) == 2


# -----------------------------------------------------------------------------
# Training curves.


@pytest.fixture
def saved_axes(monkeypatch):
    """The axes that are written, by the name of their file; they are written, too."""
    saved = {}
    save = Figure.savefig

    def keep(figure, file, **options):
        saved[str(file)] = figure.axes[0]
        save(figure, file, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return saved


def lines_of(axis):
    """Label -> (x, y) of the lines of an axis."""
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axis.lines}


def test_the_curves_are_the_losses_of_the_logs(call, saved_axes, tmp_path):
    """Of several rows of a step the last one counts, and damaged lines do not."""
    rows = ['{"step": 0, "val_loss": 5.0}', "{", '{"step": 5, "loss": null}']
    rows += ['{"step": 10, "loss": 4.5}', '{"step": 10, "loss": 4.0}']
    rows += ['{"step": 10, "val_loss": 3.5}']
    first, second = tmp_path / "a", tmp_path / "b"
    for folder, lines in ((first, rows), (second, ['{"step": 5, "loss": 6.0}'])):
        folder.mkdir()
        (folder / "log.jsonl").write_text("\n".join(lines))
    file = tmp_path / "deep/curves.png"
    done = assert_success(call("evaluate.py", f"A={first}", second, f"--curves={file}"))
    assert done.stdout == f"wrote {file}, and the same as .svg and .pdf\n"
    content = [file.with_suffix(suffix).read_bytes() for suffix in (".png", ".svg", ".pdf")]
    assert int.from_bytes(content[0][16:20]) == 7 * 200  # pixels of the width, of inches
    assert b"<svg" in content[1] and content[2][:5] == b"%PDF-"
    assert lines_of(saved_axes[str(file)]) == {
        "A": ([10], [4.0]),
        "A, validation": ([0, 10], [5.0, 3.5]),
        str(second): ([5], [6.0]),
        f"{second}, validation": ([], []),
    }


def test_curves_of_other_vocabularies_are_in_bits_per_byte(call, save_run, saved_axes, tmp_path):
    """A token of two bytes at 2 nats is 2 / (2 ln 2) bits per byte, above a byte at 1 nat."""
    rows = ['{"step": 5, "loss": 9.0}', '{"step": 9, "val_loss": %s, "val_bits_per_byte": %s}']
    runs, kinds = [], ({"kind": "bytes"}, {"kind": "char", "characters": "ab"})
    for name, tokenizer, (nats, n_bytes) in zip("ab", kinds, ((1.0, 1), (2.0, 2)), strict=True):
        runs.append(save_run(name, {"tokenizer": tokenizer}))
        log = "\n".join(rows) % (nats, nats / n_bytes / math.log(2))
        (runs[-1] / "log.jsonl").write_text(log)
    file = tmp_path / "curves.png"
    done = assert_success(call("evaluate.py", *runs, f"--curves={file}"))
    assert "only validation is drawn, in bits per byte" in done.stderr + done.stdout
    axis = saved_axes[str(file)]
    assert axis.get_ylabel() == "validation loss, bits per byte"
    bits = pytest.approx(1 / math.log(2))
    assert lines_of(axis) == {f"{run}, validation": ([9], [bits]) for run in runs}
    (runs[1] / "log.jsonl").write_text(rows[0])
    assert_refused(call("evaluate.py", *runs, f"--curves={file}"), "has logged no bits per byte")
    assert_success(call("evaluate.py", f"x={runs[1]}", f"y={runs[1]}", f"--curves={file}"))


def test_a_heatmap_has_a_scale_and_no_image():
    figure = figures.heatmap_figure("a.png", [asked("a", 64, 0.25), asked("b", 128, 0.5)])
    scale = figure.axes[-1]
    assert scale.get_ylabel() == "fraction of prompts answered right"
    assert scale.get_ylim() == (0.0, 1.0)
    assert "<image" not in figures.to_svg(figure)


def test_the_report_explains_what_it_shows(tmp_path):
    kinds = ("multikey", "nth", "last")
    records = [asked("a", 64, 0.5, kind=kind) for kind in kinds]
    facts = {"a": {"scheme": "rope"}}
    for shown, others in ((records[:2], kinds[2:]), (records, ())):
        file = tmp_path / "report.html"
        report.write_report(file, facts, [64], shown, {}, [], "commit abc")
        text = Page(file).text
        for record in shown:
            assert text.count(f"{record['kind']} ") >= 1
        assert not [kind for kind in others if f"{kind} gives" in text or f"{kind} is a" in text]
    aligned = report.explain([loss("a", 64, 1.0, "token-aligned")])
    assert len(aligned) == 1 and "the same tokens at every length" in aligned[0]
