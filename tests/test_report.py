"""The report of records that are written out here, read back by a parser of HTML."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from model import GPT
from nanolong import provenance, report

HOSTILE = "</script><img src=x onerror=alert(1)>\" onfocus=alert(2) y='&\u2028\x00\ud800"
VOID = {"meta", "input"}
CHUNKED = "context length in nats per token, chunked"


class Page(HTMLParser):
    """The tables (caption -> rows of texts), elements and scripts of an HTML file."""

    def __init__(self, file):
        super().__init__()
        self.open = []
        self.elements = []  # (tag, attributes)
        self.tables = {}
        self.scripts = []
        self.options = []
        self.text = ""
        self.labels_of_axes = []  # (attributes, text)
        self.feed(file.read_bytes().decode("utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        elif tag == "caption":
            self.caption = ""
            self.rows = []
        elif tag == "script":
            self.scripts.append("")
        elif tag == "option":
            self.options.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data):
        inside = self.open[-1] if self.open else ""
        if inside in ("th", "td"):
            self.rows[-1][-1] += data
        elif inside == "caption":
            self.caption += data
        elif inside == "script":
            self.scripts[-1] += data
        elif inside == "option":
            self.options[-1] += data
        elif inside == "text":
            self.labels_of_axes.append((self.elements[-1][1], data))
            self.text += data
        elif inside != "style":
            self.text += data

    def table(self, words):
        """The rows of the one table whose caption has these words, as dicts by column."""
        captions = [caption for caption in self.tables if words in caption]
        assert len(captions) == 1, (words, list(self.tables))
        header, *rows = self.tables[captions[0]]
        return [dict(zip(header, row, strict=True)) for row in rows]

    def labels(self):
        """The values that the points of the figures show."""
        points = [a for _, a in self.elements if a.get("class") == "point"]
        return [a["aria-label"] for a in points if "aria-label" in a]

    def ticks(self, place):
        """The labels of ticks, (attributes, text): of the x axis (middle) or the y axis (end)."""
        return [label for label in self.labels_of_axes if label[0].get("class") == place]

    def data(self):
        """The texts of the script."""
        return json.loads(self.scripts[0])


def checkpoint(name, **fields):
    facts = {"scheme": "rope", "commit": "abc1234"}
    given = {"name": name, "folder": f"out/{name}", "facts": facts, "original_length": 64}
    return {**given, "wavelengths": None, **fields}


def loss(name, length, mean, half=0.02, protocol="chunked", n=20, **fields):
    """A record of evaluate.py; half: of its interval, None for none."""
    low = None if half is None else mean - half
    high = None if half is None else mean + half
    numbers = {"loss": mean, "low": low, "high": high, "n": n, "tokens": 100 * n}
    record = {"checkpoint": name, "task": "loss", "protocol": protocol, "length": length}
    return {**record, **numbers, "commit": "abc1234", **fields}


def difference(mean, half):
    return {"mean": mean, "low": mean - half, "high": mean + half, "n": 20}


def needle(name, length, depth, accuracy):
    record = {"checkpoint": name, "task": "needle", "length": length, "depth": depth}
    record.update(accuracy=accuracy, low=accuracy / 2, high=(1 + accuracy) / 2, n=16, trials=16)
    return {**record, "nll": 1.25, "nll_low": 1.2, "nll_high": 1.3}


@pytest.fixture
def write(tmp_path):
    """Write a report of checkpoints, by default a and b, and return it as a Page."""

    def write(records, checkpoints=None, texts=None, omitted=(), title="A title"):
        file = tmp_path / "report.html"
        checkpoints = checkpoints or [checkpoint("a"), checkpoint("b")]
        report.write_report(file, checkpoints, records, texts or {}, omitted, title)
        return Page(file)

    return write


# -----------------------------------------------------------------------------
# Numbers


def test_the_numbers_of_a_table_are_those_of_the_records(write, rng):
    records = []
    for protocol in ("chunked", "last-quarter", "sliding", "token-aligned", "last-tokens"):
        for name in ("a", "b"):
            for length in (64, 128, 4096):
                mean, half = rng.uniform(0.5, 9, 2)
                records.append(loss(name, length, mean, half / 10, protocol))
    page = write(records)
    for record in records:
        rows = page.table(f"context length in nats per token, {record['protocol']}")
        row = next(row for row in rows if row["length"] == f"{record['length']:,}")
        mean, half = map(float, row[record["checkpoint"]].split(" ± "))
        assert abs(mean - record["loss"]) <= 0.00051
        assert abs(mean + half - record["high"]) <= 0.0011
        assert row["sequences"] == "20" and row["tokens"] == "2,000"


@pytest.mark.parametrize(
    "mean, half, mark", [(0.1, 0.05, " ▲"), (-0.1, 0.05, " ▼"), (0.1, 0.2, ""), (-0.1, 0.2, "")]
)
def test_a_mark_says_whether_the_difference_excludes_zero(write, mean, half, mark):
    records = [loss("a", 64, 2.0), loss("b", 64, 2 + mean, difference=difference(mean, half))]
    page = write(records)
    assert page.table(CHUNKED)[0]["b"] == f"{2 + mean:.3f} ± 0.020{mark}"
    assert ("excludes 0" in page.text) == bool(mark)
    cost = page.table("Loss at the original length")
    assert [row["difference from a"] for row in cost] == ["", f"{mean:+.3f} ± {half:.3f}{mark}"]
    assert [row["loss"] for row in cost] == ["2.000 ± 0.020", f"{2 + mean:.3f} ± 0.020"]


def test_the_cost_is_measured_at_each_original_length(write):
    given = [checkpoint("a"), checkpoint("b", original_length=128), checkpoint("c")]
    records = [loss("a", 64, 1.0), loss("b", 64, 2.0), loss("b", 128, 3.0), loss("c", 32, 4.0)]
    records += [loss(name, 64, 5.0, protocol="last-quarter") for name in "abc"]
    cost = write(records, given).table("Loss at the original length")
    assert [row["loss"] for row in cost] == ["1.000 ± 0.020", "3.000 ± 0.020", "not measured"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_said_to_be(write, value):
    bad = {**loss("a", 64, 1.0), "loss": value, "low": None, "high": None}
    page = write([bad, loss("b", 64, 1.0)])
    assert page.table(CHUNKED)[0]["a"] == "not finite"
    assert page.labels() == ["b, 64 tokens: 1.000 ± 0.020 nats"]
    assert "no finite loss" in write([bad]).text


def test_refused_and_missing_losses_are_named(write):
    refused = {"checkpoint": "b", "task": "loss", "length": 128, "refused": "too long"}
    records = [loss("a", 64, 1.0), loss("a", 128, 1.0), {**refused, "protocol": "chunked"}]
    rows = write(records).table(CHUNKED)
    assert [row["b"] for row in rows] == ["not measured", "refused"]
    assert "refused: b at 128: too long" in write(records).text

    parts = [loss("a", 128, 1.0, protocol="position", position=[i, i + 64]) for i in (0, 64)]
    rows = write([*parts, {**refused, "protocol": "position"}]).table("Loss by position")
    assert [row["b"] for row in rows] == ["refused", "refused"]


def test_positions_are_those_of_the_longest_sequences(write):
    records = []
    for length in (64, 128):
        for start in (0, length // 2):
            part = [start, start + length // 2]
            records.append(loss("a", length, length / 64, protocol="position", position=part))
    rows = write(records).table("Loss by position in sequences of 128 tokens")
    loss_of_128 = "2.000 ± 0.020"
    found = [(row["up to"], row["a"]) for row in rows]
    assert found == [("64", loss_of_128), ("128", loss_of_128)]


def test_key_tokens_have_their_number_and_fraction(write):
    record = loss("a", 4096, 2.0, protocol="key-tokens", tokens=1234, key_fraction=0.0062)
    page = write([record])
    assert page.table("context length in nats per token, key-tokens")[0]["a"] == "2.000 ± 0.020"
    assert "At 4,096 tokens 1,234 are key tokens, 0.62%." in page.text


def test_retrieval_has_a_heatmap_and_all_numbers(write):
    estimates = {"nats": difference(0.5, 0.1), "gain": difference(1.5, 0.1), "recovery": None}
    ruler = {"checkpoint": "a", "task": "ruler", "kind": "niah", "length": 512, "n": 20}
    summary = {**ruler, "summary": True, "accuracy": difference(0.75, 0.125), **estimates}
    refused = {"checkpoint": "b", "task": "needle", "length": 64, "depth": 0.5, "refused": "short"}
    needles = [needle("a", 64, 0.5, 0.25), needle("a", 64, None, 0.0), refused]
    page = write([*needles, {**ruler, "answer": "1"}, summary])

    found = page.table("Passkey")
    accuracies = ["0.250 (0.125 to 0.625)", "0.000 (0.000 to 0.500)", "refused"]
    assert [row["accuracy"] for row in found] == accuracies
    assert [row["prompt"] for row in found] == ["depth 0.5", "no passkey", "depth 0.5"]
    assert found[0]["nats"] == "1.250 ± 0.050"
    (row,) = page.table("RULER")
    assert row == {
        **{"checkpoint": "a", "prompt": "niah", "length": "512", "recovery": ""},
        **{"accuracy": "0.750 ± 0.125", "nats": "0.500 ± 0.100", "gain": "1.500 ± 0.100"},
    }
    shades = [a["style"] for tag, a in page.elements if tag == "td" and a.get("class") == "shade"]
    assert shades == ["--level:25%", "--level:0%", "--level:75%"]


def value_at(place, ticks, log=False):
    """The value at a place of an axis, from the places and values of two of its ticks."""
    (start, low), (end, high) = ticks[0], ticks[-1]
    if log:
        low, high = math.log(low), math.log(high)
    value = low + (place - start) / (end - start) * (high - low)
    return math.exp(value) if log else value


def test_points_and_bars_stand_at_their_values(write):
    losses = {64: 1.0, 512: 3.5, 4096: 1.75}
    page = write([loss("a", length, y, half=y / 8) for length, y in losses.items()])
    xs = [(float(a["x"]), float(d.replace(",", ""))) for a, d in page.ticks("middle")[:-1]]
    ys = [(float(a["y"]), float(d)) for a, d in page.ticks("end")]
    places = [a["transform"] for tag, a in page.elements if tag == "g" and "transform" in a]
    bars = [a["d"] for _, a in page.elements if a.get("class") == "bar"]
    assert len(places) == len(bars) == 3
    for (length, y), place, bar in zip(losses.items(), places, bars, strict=True):
        across, down = map(float, re.findall(r"[\d.]+", place))
        assert value_at(across, xs, log=True) == pytest.approx(length, rel=0.01)
        assert value_at(down, ys) == pytest.approx(y, abs=0.01)
        _, bottom, top = map(float, re.findall(r"[\d.]+", bar))
        assert value_at(bottom, ys) == pytest.approx(y * 7 / 8, abs=0.01)
        assert value_at(top, ys) == pytest.approx(y * 9 / 8, abs=0.01)


def test_wavelengths_leave_out_pairs_that_are_not_rotated(write):
    wavelengths = {"before": [6.25, 62.5, 625.0], "after": [6.25, 250.0, None]}
    page = write([], [checkpoint("a"), checkpoint("b", wavelengths=wavelengths)])
    rows = page.table("Wavelengths of b in tokens")
    assert [row["before"] for row in rows] == ["6.2", "62.5", "625.0"]
    assert [row["after"] for row in rows] == ["6.2", "250.0", "not rotated"]
    assert page.labels()[-1] == "after, pair 2: 250.0 tokens" and len(page.labels()) == 5
    assert "original length 64" in page.text


# -----------------------------------------------------------------------------
# The page


def all_records(names):
    """A record of each kind for each checkpoint."""
    records = []
    for name in names:
        for protocol in ("chunked", "key-tokens"):
            fields = {"commit": HOSTILE, "difference": difference(0.1, 0.01)}
            records.append(loss(name, 64, 1.0, protocol=protocol, **fields))
        records.append(loss(name, 64, 1.0, protocol="position", position=[0, 64]))
        records.append(needle(name, 64, 0.5, 0.5))
        refused = {"task": "loss", "protocol": "chunked", "length": 128, "refused": HOSTILE}
        records.append({"checkpoint": name, **refused})
        ruler = {"checkpoint": name, "task": "ruler", "kind": HOSTILE, "length": 64, "n": 20}
        estimates = dict.fromkeys(("accuracy", "nats", "gain", "recovery"), difference(0.5, 0.1))
        records.append({**ruler, "summary": True, **estimates})
    return records


def assert_inert(page):
    """The page has no other element, script or address than its own."""
    tags = {tag for tag, _ in page.elements}
    assert tags <= {
        *("html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "nav"),
        *("a", "main", "section", "div", "button", "table", "caption", "thead", "tbody", "tr"),
        *("th", "td", "figure", "figcaption", "label", "input", "svg", "path", "g", "text"),
        *("details", "summary", "noscript", "select", "option", "span", "script"),
    }
    assert len(page.scripts) <= 2
    for _, attributes in page.elements:
        assert attributes.keys() <= {
            *("lang", "charset", "http-equiv", "content", "name", "class", "href", "id", "role"),
            *("aria-label", "aria-hidden", "translate", "hidden", "scope", "style", "type"),
            *("checked", "tabindex", "viewbox", "transform", "d", "stroke-dasharray"),
            *("x", "y", "dx"),
        }
        assert attributes.get("href", "#").startswith("#")
        assert re.fullmatch(r"(--level:\d+%)?", attributes.get("style", ""))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for tag, a in page.elements if tag == "a"} <= set(ids)
    # the elements that the script looks for; the others have a number at their end
    named = re.findall(r'getElementById\("([\w-]+)"\)', page.scripts[-1])
    assert set(named) - {"text-data", "by-difference", "scale"} <= set(ids)


@pytest.mark.parametrize("n", [1, 6])
def test_hostile_names_texts_and_tokens_are_shown_and_do_nothing(write, n):
    names = [f"{HOSTILE}{i}" for i in range(n)]
    wavelengths = {"before": [6.0], "after": [9.0]}
    given = []
    for name in names:
        facts = {HOSTILE: HOSTILE}
        given.append(checkpoint(name, facts=facts, folder=HOSTILE, wavelengths=wavelengths))
    text = {"length": 64, "start": HOSTILE, "tokens": [HOSTILE, "b"], "losses": [0.5, 1.0]}
    texts = dict.fromkeys(names, text)
    page = write(all_records(names), given, texts, [HOSTILE], HOSTILE)
    assert_inert(page)
    shown = HOSTILE.replace("\x00", "\u2400").replace("\ud800", "\ufffd")
    assert page.tables["Settings and provenance"][2] == [shown] * (n + 1)
    assert page.options == [f"{shown}{i}" for i in range(n)] * min(2, n)
    assert page.data()["tokens"] == [[shown, "b"]]
    assert page.data()["texts"][0]["about"].startswith(f"{shown}0: 2 tokens")
    assert page.text.count(f"{shown}b") == min(2, n)
    assert f"refused: {shown}0 at 128: {shown}" in page.text


def test_nothing_leaves_the_file(write, tmp_path):
    text = {"length": 64, "start": "val.bin", "tokens": ["a"], "losses": [1.0]}
    page = write(all_records(["a"]), [checkpoint("a")], {"a": text})
    assert_inert(page)
    source = (tmp_path / "report.html").read_text(encoding="utf-8")
    for word in ("http:", "https:", "url(", "@import", "fetch", "import(", "innerHTML", "eval("):
        assert word not in source, word
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    allowed = "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    assert policy == f"default-src 'none'; {allowed}"
    assert ("html", {"lang": "en"}) in page.elements
    assert any(attributes.get("name") == "viewport" for _, attributes in page.elements)
    assert "The colours need JavaScript." in page.text


def test_six_checkpoints_with_their_own_tokens_stay_below_a_megabyte(write, tmp_path, rng):
    names = list("abcdef")
    records = [record for record in all_records(names) if record["task"] == "loss"]
    texts = {}
    for name in names:
        tokens = [f"{name}\u6f22{number:04d}" for number in rng.integers(0, 9999, 4096)]
        losses = rng.uniform(0, 12, 4096).tolist()
        texts[name] = {"length": 4096, "start": "val.bin", "tokens": tokens, "losses": losses}
    page = write(records, [checkpoint(name) for name in names], texts)
    assert (tmp_path / "report.html").stat().st_size < 1e6
    for name, text in zip(names, page.data()["texts"], strict=True):
        assert page.data()["tokens"][text["tokens"]] == texts[name]["tokens"]
        assert text["losses"] == pytest.approx(texts[name]["losses"], abs=0.00051)


def test_equal_tokens_are_written_once_and_bad_losses_as_null(write):
    text = {"length": 64, "start": "val.bin", "tokens": ["x", "y"], "losses": [1.5, math.nan]}
    other = {**text, "tokens": ["xy"], "losses": [None]}
    data = write([], texts={"a": text, "b": text}).data()
    assert [entry["tokens"] for entry in data["texts"]] == [0, 0]
    assert data["texts"][0]["losses"] == [1.5, None] and "mean loss 1.500" in str(data)
    data = write([], texts={"a": text, "b": other}).data()
    assert data["tokens"] == [["x", "y"], ["xy"]] and "mean loss not finite" in str(data)


def test_a_section_without_measurements_is_not_there(write):
    page = write([loss("a", 64, 1.0)], [checkpoint("a")], omitted=["Needles were left out."])
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    headings = [tag for tag, _ in page.elements if tag == "h2"]
    assert len(links) == len(headings) == 4  # checkpoints, loss by length, cost, left out
    assert "Needles were left out." in page.text and len(page.scripts) == 1


# -----------------------------------------------------------------------------
# Checkpoints


def test_a_checkpoint_is_described_by_its_settings(save_run):
    folder = save_run(meta={"tokens": 12345, "dataset": "python"}, window=7, sinks=2)
    model = GPT.load(folder)
    described = provenance.describe_checkpoint("name", model)
    facts = described["facts"]
    n_parameters = sum(p.numel() for p in model.parameters())
    assert facts["parameters"] == f"{n_parameters:,}" and facts["trained tokens"] == "12,345"
    assert "window 7, sinks 2" in facts["other settings"]
    assert facts["weights"] == model.meta["checksums"]["model.safetensors"][:16]
    assert described["original_length"] == 24 and described["wavelengths"] is None


def test_wavelengths_of_an_extended_checkpoint(save_run):
    model = GPT.load(save_run())
    before = [2 * math.pi * 10000 ** (2 * i / 8) for i in range(4)]
    model.extend("pi", 4.0)
    described = provenance.describe_checkpoint("name", model)
    assert described["facts"]["extension"] == "pi, factor 4"
    assert described["wavelengths"]["before"] == pytest.approx(before)
    assert described["wavelengths"]["after"] == pytest.approx([4 * value for value in before])

    model.extend("drope", 4.0)
    described = provenance.describe_checkpoint("name", model)
    assert described["wavelengths"]["after"] == [None] * 4

    model = GPT.load(save_run("alibi", pos="alibi"))
    model.extend("pi", 4.0)
    assert provenance.describe_checkpoint("name", model)["wavelengths"] is None


def test_a_dynamic_method_is_shown_as_for_the_longest_input(save_run):
    model = GPT.load(save_run())
    model.extend("dynamic-pi", 4.0)
    found = provenance.describe_checkpoint("name", model)["wavelengths"]
    assert found["after"] == pytest.approx([4 * value for value in found["before"]])
