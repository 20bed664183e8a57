"""The report of evaluate.py: one HTML file with settings, curves, tables and the text itself.

The file makes no request and is readable without JavaScript: tables are HTML and figures are SVG.
The script in report.html only shows values at the pointer, copies tables and colours the text.
Names and texts enter the page by escape() or inline_json() of page.py, and by nothing else.
"""

from pathlib import Path
from string import Template

from nanolong import intervals, page, plots

MAX_CHECKPOINTS = page.GRAY  # as many styles of curves as can be told apart
PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))

# -----------------------------------------------------------------------------
# Loss


MARKS = {1: " ▲", 0: "", -1: " ▼"}  # of intervals.separation()


def format_loss(record):
    """Return a record's loss with its interval, or why there is none. record: may be None."""
    if record is None:
        return "not measured"
    if "refused" in record:
        return "refused"
    return intervals.format_interval(record, key="loss")


def mark(record):
    """Return ▲ or ▼ if the interval of the difference from the first excludes 0, else ""."""
    if record is None or "difference" not in record:
        return ""
    return MARKS[intervals.separation(record["difference"])]


def format_difference(record):
    """Return the difference from the first checkpoint, with its interval."""
    return intervals.format_interval(record["difference"], sign="+")


def describe_loss(record, x, first):
    """Return what the point of a loss says; first: the name of the first checkpoint."""
    text = f"{record['checkpoint']}, {x:,} tokens: {format_loss(record)} nats"
    if "difference" in record:
        text += f"; {format_difference(record)} from {first}{mark(record)}"
    return text


def loss_figure(caption, x_label, measured, checkpoints):
    """Return the curves of one protocol, with the original lengths marked."""
    names = [checkpoint["name"] for checkpoint in checkpoints]
    curves = []
    for name, points in plots.loss_curves(measured, measured[0]["protocol"]).items():
        points.sort(key=lambda point: point[0])
        shown = [
            (x, loss, low, high, describe_loss(record, x, names[0]))
            for x, loss, low, high, record in points
            if page.is_finite(loss)
        ]
        curves.append(page.Curve(names.index(name), name, shown))
    points = [point for curve in curves for point in curve.points]
    if not points:
        return "<p>There is no finite loss to plot.</p>"
    xs = {point[0] for point in points}
    ys = [value for point in points for value in point[1:4] if value is not None]
    if measured[0]["protocol"] == "position":
        x = page.linear_axis(x_label, xs, page.X)
    else:
        x = page.log_axis(x_label, xs, page.X, xs)
    y = page.linear_axis("loss (nats per token)", ys, page.Y)
    lengths = sorted({checkpoint["original_length"] for checkpoint in checkpoints})
    rules = [(x, n, f"original length {n:,}") for n in lengths if x.low <= n <= x.high]
    return page.figure(caption, curves, x, y, rules)


def loss_table(caption, x_label, measured, checkpoints):
    """Return a row for each length or position, and below it what the marks mean."""
    names = [checkpoint["name"] for checkpoint in checkpoints]
    cells = {(plots.x_of(record), record["checkpoint"]): record for record in measured}
    # One refusal stands for all positions.
    by_position = measured[0]["protocol"] == "position"
    refused = {r["checkpoint"]: r for r in measured if by_position and "refused" in r}
    rows = []
    for x in sorted({x for x, _ in cells}):
        found = [refused.get(name) or cells.get((x, name)) for name in names]
        scored = [record for record in found if record and "refused" not in record]
        row = [f"{x:,}", *(format_loss(record) + mark(record) for record in found)]
        for field in ("n", "tokens"):
            row.append(" or ".join(f"{n:,}" for n in sorted({r[field] for r in scored})))
        rows.append(row)
    text = page.table(caption, [x_label, *names, "sequences", "tokens"], rows)
    notes = []
    if any(map(mark, measured)):
        notes.append(
            f"▲ higher, ▼ lower than {names[0]}: the 95 % interval of the difference on the same "
            "sequences excludes 0."
        )
    # Key tokens are those of the judge, so they are the same for all checkpoints.
    for length, record in {r["length"]: r for r in measured if "key_fraction" in r}.items():
        key_tokens = f"{record['tokens']:,} are key tokens, {record['key_fraction']:.2%}"
        notes.append(f"At {length:,} tokens {key_tokens}.")
    return text + "".join(f'<p class="note">{page.escape(sentence)}</p>' for sentence in notes)


def lengths_section(losses, checkpoints):
    """Return the loss by context length: a figure and a table for each protocol."""
    text = ""
    for protocol, scored in plots.SCORED_TOKENS.items():
        measured = [record for record in losses if record["protocol"] == protocol]
        if measured:
            caption = f"Loss by context length in nats per token, {protocol}"
            text += f"<h3>{protocol}</h3>\n<p>Scored: {scored}.</p>\n"
            text += loss_figure(caption, "context length (tokens)", measured, checkpoints)
            text += loss_table(caption, "length", measured, checkpoints)
    return text


def positions_section(losses, checkpoints):
    """Return the loss by position in sequences of the greatest length."""
    longest = max((record["length"] for record in losses), default=0)
    measured = [r for r in losses if (r["protocol"], r["length"]) == ("position", longest)]
    if not measured:
        return ""
    caption = f"Loss by position in sequences of {longest:,} tokens, in nats per token"
    text = loss_figure(caption, "position (tokens)", measured, checkpoints)
    return text + loss_table(caption, "up to", measured, checkpoints)


def cost_section(losses, checkpoints):
    """Return the loss of each checkpoint at its original length, and its difference."""
    first = checkpoints[0]["name"]
    found = {(r["checkpoint"], r["length"]): r for r in losses if r["protocol"] == "chunked"}
    rows = []
    for checkpoint in checkpoints:
        name, length = checkpoint["name"], checkpoint["original_length"]
        record = found.get((name, length))
        difference = "" if name == first else "not measured"
        if record and "difference" in record:
            difference = format_difference(record) + mark(record)
        rows.append([name, f"{length:,}", format_loss(record), difference])
    header = ["checkpoint", "original length", "loss", f"difference from {first}"]
    return page.table("Loss at the original length in nats per token, chunked", header, rows)


# -----------------------------------------------------------------------------
# Retrieval


def as_summary(record):
    """Return a record of either task with its kind of prompt, and estimates as dicts."""
    if record["task"] == "ruler":
        return record
    kind = "no passkey" if record["depth"] is None else f"depth {record['depth']:g}"
    summary = {**record, "kind": kind}
    if "refused" not in record:
        summary["accuracy"] = {**record, "mean": record["accuracy"]}
        interval = {"low": record["nll_low"], "high": record["nll_high"], "n": record["n"]}
        summary["nats"] = {"mean": record["nll"], **interval}
    return summary


def heatmap(measured, name):
    """Return the accuracy of one checkpoint by kind of prompt and length, as a coloured table."""
    cells = {(r["kind"], r["length"]): r for r in measured if r["checkpoint"] == name}
    lengths = sorted({length for _, length in cells})
    rows = []
    shades = {}
    for i, kind in enumerate(dict.fromkeys(kind for kind, _ in cells)):
        row = [kind]
        for j, length in enumerate(lengths):
            record = cells.get((kind, length), {})
            text = "refused" if "refused" in record else ""
            if "accuracy" in record:
                shades[i, j] = record["accuracy"]["mean"]
                text = f"{shades[i, j]:.2f}"
            if record.get("gain") and page.is_finite(record["gain"]["mean"]):
                text += f"\n{record['gain']['mean']:+.2f} nats"
            row.append(text)
        rows.append(row)
    return page.table(name, ["length", *(f"{length:,}" for length in lengths)], rows, shades=shades)


RETRIEVAL = Template("""<h3>$title</h3>
<p>Fraction of prompts with the right answer, by length; below it the gain: the nats that the
needles in a prompt save on its answer. Recovery is the gain among distractors as a fraction of the
gain without them.</p>
<div class="maps">$maps</div>
<details><summary>All numbers, with intervals</summary>$numbers</details>
""")


def retrieval_section(records, names):
    """Return a heatmap for each checkpoint and task, and all numbers with their intervals."""
    text = ""
    header = ["checkpoint", "prompt", "length", "accuracy", "nats", "gain", "recovery"]
    for task, title in (("needle", "Passkey"), ("ruler", "RULER")):
        of_task = [record for record in records if record["task"] == task]
        measured = [as_summary(r) for r in of_task if task == "needle" or "summary" in r]
        if not measured:
            continue
        rows = []
        for record in measured:
            row = [record["checkpoint"], record["kind"], f"{record['length']:,}"]
            for estimate in map(record.get, header[3:]):
                missing = "refused" if "refused" in record else ""
                row.append(intervals.format_interval(estimate) if estimate else missing)
            row[header.index("nats")] += mark(record)
            rows.append(row)
        text += RETRIEVAL.substitute(
            title=title,
            maps="".join(heatmap(measured, name) for name in names),
            numbers=page.table(f"{title}, with 95 % intervals", header, rows),
        )
    return text


# -----------------------------------------------------------------------------
# Checkpoints and the text


def checkpoints_section(checkpoints):
    """Return the settings and provenance: a row for each fact, a column for each checkpoint."""
    facts = [{"folder": checkpoint["folder"], **checkpoint["facts"]} for checkpoint in checkpoints]
    labels = dict.fromkeys(label for fact in facts for label in fact)
    rows = [[label, *(fact.get(label, "") for fact in facts)] for label in labels]
    header = ["", *(checkpoint["name"] for checkpoint in checkpoints)]
    return page.table("Settings and provenance", header, rows, kind="wrapped")


def wavelengths_section(checkpoints):
    """Return the wavelengths before and after of each checkpoint that has them.

    A pair that is not rotated has None.
    """
    text = ""
    for style, checkpoint in enumerate(checkpoints):
        if not checkpoint["wavelengths"]:
            continue
        original = checkpoint["original_length"]
        curves, values, cells = [], [original], []
        for when, style_of in (("before", page.GRAY), ("after", style)):
            wavelengths = checkpoint["wavelengths"][when]
            cells.append(["not rotated" if w is None else f"{w:,.1f}" for w in wavelengths])
            points = [
                (pair, value, None, None, f"{when}, pair {pair}: {value:,.1f} tokens")
                for pair, value in enumerate(wavelengths, 1)
                if value is not None
            ]
            values += [point[1] for point in points]
            curves.append(page.Curve(style_of, when, points))
        rows = [[pair, *row] for pair, row in enumerate(zip(*cells, strict=True), 1)]
        x = page.linear_axis("pair of channels, fastest first", range(1, len(rows) + 1), page.X)
        y = page.log_axis("wavelength (tokens)", values, page.Y, [10**k for k in range(16)])
        caption = f"Wavelengths of {checkpoint['name']} in tokens"
        rules = [(y, original, f"original length {original:,}")]
        numbers = page.table(caption, ["pair", "before", "after"], rows)
        text += page.figure(caption, curves, x, y, rules)
        text += f"<details><summary>All wavelengths</summary>{numbers}</details>\n"
    return text


TEXT = Template("""<noscript><p>The colours need JavaScript.</p></noscript>
<div class="controls" hidden>$choices
<label><input type="checkbox" id="by-difference"> colour the difference, second minus first</label>
</div>
<p class="note" hidden>Colours: <span id="scale"></span></p>
<div class="texts">$panes</div>
<script type="application/json" id="text-data">$data</script>
""")


def text_data(texts):
    """Return what the script needs to show any two texts; those with the same tokens share them."""
    data = {"tokens": [], "texts": []}
    for name, text in texts.items():
        tokens = [page.visible(token) for token in text["tokens"]]
        if tokens not in data["tokens"]:
            data["tokens"].append(tokens)
        losses = [round(loss, 3) if page.is_finite(loss) else None for loss in text["losses"]]
        known = [loss for loss in losses if loss is not None]
        mean = f"{sum(known) / len(known):.3f}" if known else "not finite"
        about = (
            f"{name}: {len(losses):,} tokens of a context of {text['length']:,}, from "
            f"{text['start']}; mean loss {mean} nats"
        )
        which = data["tokens"].index(tokens)
        data["texts"].append({"about": page.visible(about), "tokens": which, "losses": losses})
    return data


def text_section(texts):
    """Return the texts of the first two checkpoints, and the data to colour any two."""
    if not texts:
        return ""
    data = text_data(texts)
    options = "".join(f"<option>{page.escape(name)}</option>" for name in texts)
    choices = panes = ""
    for i, (which, shown) in enumerate(zip(("first", "second"), data["texts"], strict=False)):
        choices += f'<label>{which} <select id="choice{i}">{options}</select></label>\n'
        about = page.escape(shown["about"])
        plain = page.escape("".join(data["tokens"][shown["tokens"]]))
        panes += (
            f'<div><p id="about{i}">{about}</p><div class="text" role="group" '
            f'aria-label="{which} text" translate="no">{plain}</div></div>\n'
        )
    return TEXT.substitute(choices=choices, panes=panes, data=page.inline_json(data))


# -----------------------------------------------------------------------------
# The page


def describe_source(records):
    """Return with which code, dtype, device and data the records were measured."""
    parts = []
    for field in ("commit", "dtype", "device", "data_hash"):
        values = dict.fromkeys(str(record[field]) for record in records if field in record)
        if values:
            parts.append(f"{field.replace('_', ' ')} {', '.join(values)}")
    return "; ".join(parts)


def write_report(file, checkpoints, records, texts, omitted, title):
    """Write the report, one HTML file.

    checkpoints: of describe_checkpoint(), at most six. texts: name -> what loss.text_losses()
    returns; {} for none. omitted: sentences that say what was not measured.
    """
    names = [checkpoint["name"] for checkpoint in checkpoints]
    losses = [record for record in records if record["task"] == "loss"]
    left_out = [*omitted, *plots.format_refusals(records)]
    sections = {
        "Checkpoints": checkpoints_section(checkpoints),
        "Loss by context length": lengths_section(losses, checkpoints),
        "Loss by position": positions_section(losses, checkpoints),
        "Cost at the original length": losses and cost_section(losses, checkpoints),
        "Retrieval": retrieval_section(records, names),
        "Wavelengths": wavelengths_section(checkpoints),
        "The text, coloured by loss": text_section(texts),
        "Left out": "".join(f"<p>{page.escape(sentence)}</p>\n" for sentence in left_out),
    }
    links = body = ""
    for i, (heading, content) in enumerate(sections.items()):
        if content:
            links += f'<a href="#section{i}">{heading}</a>\n'
            body += f'<section id="section{i}"><h2>{heading}</h2>\n{content}</section>\n'
    text = PAGE.substitute(
        title=page.escape(title),
        source=page.escape(describe_source(records)),
        links=links,
        sections=body,
    )
    Path(file).write_text(text, encoding="utf-8")
