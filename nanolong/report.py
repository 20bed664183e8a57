"""The report of evaluate.py: one HTML file with settings, curves, tables and the text itself.

The file makes no request and is readable without JavaScript: tables are HTML and figures are SVG.
The script in report.html only shows values at the pointer, copies tables and colours the text.
Names and texts enter the page by escape() or inline_json() of page.py, and by nothing else.
"""

from pathlib import Path
from string import Template

from nanolong import intervals, page, plots
from nanolong.errors import UserError

MAX_CHECKPOINTS = page.GRAY  # as many styles of curves as can be told apart
PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))

# -----------------------------------------------------------------------------
# Loss


def separation(record):
    """Return ▲ or ▼ if the interval of the difference from the first excludes 0, else ""."""
    difference = record.get("difference", {"low": None})
    if difference["low"] is None:
        return ""
    if difference["low"] > 0:
        return " ▲"
    return " ▼" if difference["high"] < 0 else ""


def format_loss(record):
    """Return a record's loss with its interval, or why there is none. record: may be None."""
    if record is None:
        return "not measured"
    if "refused" in record:
        return "refused"
    return intervals.format_interval({**record, "mean": record["loss"]})


def x_of(record):
    """Return the length of a record, or the end of its part of the positions."""
    return record["position"][1] if "position" in record else record["length"]


def loss_curves(measured, names):
    """Return a Curve for each checkpoint, with the losses that are finite."""
    curves = [page.Curve(i, name, []) for i, name in enumerate(names)]
    for record in sorted(measured, key=x_of):
        if not page.is_finite(record.get("loss")):
            continue
        text = f"{record['checkpoint']}, {x_of(record):,} tokens: {format_loss(record)} nats"
        if "difference" in record:
            difference = intervals.format_interval(record["difference"], sign="+")
            text += f"; {difference} from {names[0]}{separation(record)}"
        point = (x_of(record), record["loss"], record["low"], record["high"], text)
        curves[names.index(record["checkpoint"])].points.append(point)
    return curves


def loss_figure(caption, x_label, measured, checkpoints):
    """Return the curves of one protocol, with the original lengths marked."""
    curves = loss_curves(measured, [checkpoint["name"] for checkpoint in checkpoints])
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
    cells = {(x_of(record), record["checkpoint"]): record for record in measured}
    # One refusal stands for all positions.
    by_position = measured[0]["protocol"] == "position"
    refused = {r["checkpoint"]: r for r in measured if by_position and "refused" in r}
    rows = []
    for x in sorted({x for x, _ in cells}):
        found = [refused.get(name) or cells.get((x, name)) for name in names]
        scored = [record for record in found if record and "refused" not in record]
        row = [format_loss(r) + (separation(r) if r else "") for r in found]
        for field in ("n", "tokens"):
            row.append(" or ".join(f"{n:,}" for n in sorted({r[field] for r in scored})))
        rows.append([f"{x:,}", *row])
    text = page.table(caption, [x_label, *names, "sequences", "tokens"], rows)
    if any(map(separation, measured)):
        text += (
            f'<p class="note">▲ higher, ▼ lower than {page.escape(names[0])}: the 95 % interval of '
            "the difference on the same sequences excludes 0.</p>"
        )
    # Key tokens are those of the judge, so they are the same for all checkpoints.
    for length, record in {r["length"]: r for r in measured if "key_fraction" in r}.items():
        key_tokens = f"{record['tokens']:,} are key tokens, {record['key_fraction']:.2%}"
        text += f'<p class="note">At {length:,} tokens {key_tokens}.</p>'
    return text


def lengths_section(losses, checkpoints):
    """Return the loss by context length: a figure and a table for each protocol."""
    text = ""
    for protocol, scored in plots.SCORED_TOKENS.items():
        measured = [record for record in losses if record["protocol"] == protocol]
        if not measured:
            continue
        caption = f"Loss by context length in nats per token, {protocol}"
        text += f"<h3>{protocol}</h3>\n<p>Scored: {scored}.</p>\n"
        text += loss_figure(caption, "context length (tokens)", measured, checkpoints)
        text += loss_table(caption, "length", measured, checkpoints)
    return text


def positions_section(losses, checkpoints):
    """Return the loss by position in sequences of the greatest length."""
    measured = [record for record in losses if record["protocol"] == "position"]
    if not measured:
        return ""
    longest = max(record["length"] for record in measured)
    measured = [record for record in measured if record["length"] == longest]
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
            difference = intervals.format_interval(record["difference"], sign="+") + separation(
                record
            )
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


def retrieval_section(records, names):
    """Return a heatmap for each checkpoint and task, and all numbers with their intervals."""
    text = ""
    columns = ("accuracy", "nats", "gain", "recovery")
    for task, title in (("needle", "Passkey"), ("ruler", "RULER")):
        of_task = [record for record in records if record["task"] == task]
        measured = [as_summary(r) for r in of_task if task == "needle" or "summary" in r]
        if not measured:
            continue
        rows = []
        for record in measured:
            missing = "refused" if "refused" in record else ""
            estimates = [record.get(column) for column in columns]
            numbers = [
                intervals.format_interval(found) if found else missing for found in estimates
            ]
            numbers[1] += separation(record)
            rows.append([record["checkpoint"], record["kind"], f"{record['length']:,}", *numbers])
        header = ["checkpoint", "prompt", "length", *columns]
        maps = "".join(heatmap(measured, name) for name in names)
        text += (
            f"<h3>{title}</h3>\n<p>Fraction of prompts with the right answer, by length; below it "
            "the gain: the nats that the needles in a prompt save on its answer. Recovery is the "
            "gain among distractors as a fraction of the gain without them.</p>\n"
            f'<div class="maps">{maps}</div>\n'
            "<details><summary>All numbers, with intervals</summary>"
            f"{page.table(f'{title}, with 95 % intervals', header, rows)}</details>\n"
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


def wavelength_curve(style, when, wavelengths):
    """Return the Curve of wavelengths (R/2,); a pair that is not rotated has None, and no point."""
    points = []
    for pair, value in enumerate(wavelengths, 1):
        if value is not None:
            points.append((pair, value, None, None, f"{when}, pair {pair}: {value:,.1f} tokens"))
    return page.Curve(style, when, points)


def wavelengths_section(checkpoints):
    """Return the wavelengths before and after of each checkpoint that has them."""
    text = ""
    for style, checkpoint in enumerate(checkpoints):
        if not checkpoint["wavelengths"]:
            continue
        original = checkpoint["original_length"]
        before, after = checkpoint["wavelengths"]["before"], checkpoint["wavelengths"]["after"]
        curves = [wavelength_curve(page.GRAY, "before", before)]
        curves.append(wavelength_curve(style, "after", after))
        values = [original, *(value for value in before + after if value is not None)]
        x = page.linear_axis("pair of channels, fastest first", range(1, len(before) + 1), page.X)
        y = page.log_axis("wavelength (tokens)", values, page.Y, [10**k for k in range(16)])
        rules = [(y, original, f"original length {original:,}")]
        caption = f"Wavelengths of {checkpoint['name']} in tokens"
        text += page.figure(caption, curves, x, y, rules)
        rows = []
        for pair, values in enumerate(zip(before, after, strict=True), 1):
            rows.append([pair, *("not rotated" if v is None else f"{v:,.1f}" for v in values)])
        numbers = page.table(caption, ["pair", "before", "after"], rows)
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


def text_data(texts, names):
    """Return what the script needs to show any two texts; those with the same tokens share them."""
    data = {"tokens": [], "texts": []}
    for name in names:
        text = texts[name]
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


def text_section(texts, names):
    """Return the texts of the first two checkpoints, and the data to colour any two."""
    names = [name for name in names if name in texts]
    if not names:
        return ""
    data = text_data(texts, names)
    options = "".join(f"<option>{page.escape(name)}</option>" for name in names)
    choices = panes = ""
    for i, which in enumerate(("first", "second")[: len(names)]):
        choices += f'<label>{which} <select id="choice{i}">{options}</select></label>\n'
        plain = page.escape("".join(data["tokens"][data["texts"][i]["tokens"]]))
        panes += (
            f'<div><p id="about{i}">{page.escape(data["texts"][i]["about"])}</p><div class="text" '
            f'role="group" aria-label="{which} text" translate="no">{plain}</div></div>\n'
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

    checkpoints: of describe_checkpoint(), at most six. records: of evaluate.py. texts: name ->
    {"length", "start", "tokens", "losses"}, tokens as text and losses in nats; {} for none.
    omitted: sentences that say what was not measured. Raises UserError.
    """
    if len(checkpoints) > MAX_CHECKPOINTS:
        raise UserError(f"a report compares at most {MAX_CHECKPOINTS} checkpoints: name fewer")
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
        "The text, coloured by loss": text_section(texts, names),
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
        switches=page.switches(),
    )
    Path(file).write_text(text, encoding="utf-8")
