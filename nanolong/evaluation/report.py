"""The report of evaluate.py: one HTML file with settings, figures, tables and the text itself.

The file makes no request and is readable without JavaScript, which only colours the text. Names and
texts enter the page by tables.escape(), figures or inline_json(), and by nothing else.
"""

import json
from pathlib import Path
from string import Template

from nanolong.evaluation import figures, tables
from nanolong.strict_json import without_infinities

PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
# In a script element "<" may end it.
JSON_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def inline_json(value):
    """Return a value as JSON for a script element; a number that is not finite becomes null."""
    text = json.dumps(without_infinities(value), ensure_ascii=False, separators=(",", ":"))
    return text.translate(JSON_ESCAPES)


def paragraphs(sentences):
    return "".join(f'<p class="note">{tables.escape(sentence)}</p>\n' for sentence in sentences)


def draw(function, *args, **options):
    """Return a figure of figures.py as SVG; without matplotlib there are only the tables."""
    figure = function("the figures of the report", *args, **options)
    return "" if figure is None else f"<figure>{figures.to_svg(figure)}</figure>\n"


def checkpoints_table(facts):
    """Return the settings and provenance: a row for each fact, a column for each checkpoint.

    facts: checkpoint -> what describe_checkpoint() returns.
    """
    labels = next(iter(facts.values()))
    rows = [[label, *(of_one[label] for of_one in facts.values())] for label in labels]
    return tables.Table("Settings and provenance", ["", *facts], rows)


def text_section(texts):
    """Return a text of which a script shows the loss of each token, or differences of two.

    texts: checkpoint -> what loss.text_losses() returns. Tokens that several share are written
    once; as plain text those of the first are there without the script.
    """
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        return ""
    data = {"tokens": [], "texts": []}
    for text in texts.values():
        tokens = [tables.visible(token) for token in text["tokens"]]
        if tokens not in data["tokens"]:
            data["tokens"].append(tokens)
        losses = [round(loss, 2) for loss in text["losses"]]
        about = f"{len(tokens):,} tokens of a context of {text['length']:,}, from {text['start']}"
        which = data["tokens"].index(tokens)
        data["texts"].append({"about": tables.visible(about), "tokens": which, "losses": losses})
    options = "".join(f"<option>{tables.escape(name)}</option>" for name in texts)
    return (
        f'<p id="controls" hidden>Loss of <select id="shown">{options}</select> minus that of '
        f'<select id="other"><option>nothing</option>{options}</select> '
        f'<span id="scale"></span></p>\n'
        f'<p class="note" id="about">The colours need JavaScript.</p>\n'
        f'<div id="text" translate="no">{tables.escape("".join(data["tokens"][0]))}</div>\n'
        f'<script type="application/json" id="data">{inline_json(data)}</script>\n'
    )


def write_report(file, facts, lengths, records, texts, unequal, omitted, source):
    """Write the report, one HTML file.

    facts: checkpoint -> what describe_checkpoint() returns. lengths: the original context lengths.
    texts: checkpoint -> what scoring.text_losses() returns; {} for none. unequal: sentences that
    say what differs between checkpoints. omitted: sentences that say what was not measured. source:
    what was measured with which code, where.
    """
    losses = tables.select(records, task="loss")
    retrieved = [r for r in records if "kind" in r]
    longest = max((r["length"] for r in losses), default=0)
    losses = [r for r in losses if r["protocol"] != "position" or r["length"] == longest]
    html = {}
    for name, part in (("loss", losses), ("kind", retrieved)):
        html[name] = "".join(table.html() for table in tables.tables_of(part, unequal))
    if any("loss" in r for r in losses):
        html["loss"] = draw(figures.loss_figure, losses, lengths) + html["loss"]
    if any("accuracy" in r for r in retrieved):
        html["kind"] = draw(figures.heatmap_figure, retrieved) + html["kind"]
    costs = tables.tables_of(tables.select(records, task="cost"))
    sections = {
        "Checkpoints": checkpoints_table(facts).html() + paragraphs(unequal),
        "Loss by context length and position": html["loss"],
        "Retrieval": html["kind"],
        "Cost": "".join(table.html() for table in costs),
        "The text, coloured by loss": text_section(texts),
        "Left out": paragraphs([*omitted, *tables.refusals(records)]),
    }
    links = body = ""
    for i, (heading, content) in enumerate(sections.items()):
        if content:
            links += f'<a href="#section{i}">{heading}</a>\n'
            body += f'<section id="section{i}"><h2>{heading}</h2>\n{content}</section>\n'
    title = tables.escape(", ".join(tables.unique(records, "checkpoint")))
    source = tables.escape(source)
    page = PAGE.substitute(title=title, source=source, links=links, sections=body)
    Path(file).write_text(page, encoding="utf-8")
