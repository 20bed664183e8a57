"""The report of evaluate.py: one HTML file with figures, tables, the text itself and settings.

The file makes no request and is readable without JavaScript, which only colours the text. Names and
texts enter the page escaped, as text of a figure, or as JSON, and by nothing else.
"""

from html import escape
from pathlib import Path
from string import Template

from nanolong.evaluation import figures, intervals, tables
from nanolong.strict_json import to_json

PAGE = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))


# What a table of a protocol or of a kind of prompt measures.
EXPLAINED = {
    "token-aligned": "token-aligned scores the same tokens at every length, at the ends of "
    "sequences: a lower loss at a longer length means that more context helps.",
    "repeats": "repeats says what a longer context gains over the shortest, by where a token and "
    "the two before it stood last: a gain on far repeats shows that the longer context is used.",
    "multikey": "multikey hides several keys with a value each and asks for the value of one.",
    "nth": "nth gives several values to one key and asks for the n-th of them.",
    "last": "last gives several values to one key and asks for the last of them.",
}


def explain(records):
    """Return the sentences of EXPLAINED that belong to records."""
    shown = {record.get("protocol") for record in records}
    shown |= {record.get("kind") for record in records}
    return [sentence for name, sentence in EXPLAINED.items() if name in shown]


def sentences_of(records):
    """Return a sentence for each checkpoint: its loss in the longest sequences, and the change."""
    sentences = []
    for record in figures.longest_losses(records):
        loss = intervals.format_interval(record, key="loss")
        panel = figures.PANELS[record["protocol"]]
        sentence = f"{record['checkpoint']}: {panel} at {record['length']:,} tokens {loss}"
        if "difference" in record:
            difference = intervals.format_interval(record["difference"], sign="+")
            sentence += f"; {difference} compared with {records[0]['checkpoint']}"
            if not intervals.excludes_zero(record["difference"]):
                sentence += ", no clear difference"
        sentences.append(sentence)
    return sentences


def draw(function, *args):
    """Return a figure of figures.py as SVG; without matplotlib there are only the tables."""
    figure = function("the figure of the report", *args)
    return "" if figure is None else f"<figure>{figures.to_svg(figure)}</figure>\n"


def text_section(texts):
    """Return a text of which a script shows the loss of each token, or differences of two.

    texts: checkpoint -> what scoring.text_losses() returns. Without the script there is the plain
    text of the first.
    """
    texts = {name: text for name, text in texts.items() if text}
    if not texts:
        return ""
    first = next(iter(texts.values()))
    options = "".join(f"<option>{escape(name)}</option>" for name in texts)
    # "<" might end the script element
    data = to_json(list(texts.values())).replace("<", "\\u003c")
    return (
        f'<p id="controls" hidden>Loss of <select id="shown">{options}</select> minus the loss of '
        f'<select id="other"><option>nothing</option>{options}</select> '
        f'<span id="scale"></span></p>\n'
        f'<p class="note" id="about">The colours need JavaScript.</p>\n'
        f'<div id="text" translate="no">{escape("".join(first["tokens"]))}</div>\n'
        f'<script type="application/json" id="data">{data}</script>\n'
    )


def write_report(file, facts, lengths, records, texts, unequal, source):
    """Write the report, one HTML file.

    facts: checkpoint -> what describe_checkpoint() returns. lengths: the original context lengths.
    texts: checkpoint -> what scoring.text_losses() returns; {} for none. unequal: sentences that
    say how checkpoints differ. source: data, code and machine of the measurements.
    """
    labels = next(iter(facts.values()))
    rows = [[label, *(of_one[label] for of_one in facts.values())] for label in labels]
    settings = tables.Table("Checkpoints", ["", *facts], rows)
    losses = tables.select(records, task="loss")
    retrieved = [record for record in records if "kind" in record]
    loss_html, retrieval_html, cost_html = (
        "".join(table.html() for table in tables.tables_of(part, unequal))
        for part in (losses, retrieved, tables.select(records, task="cost"))
    )
    if any("loss" in record for record in losses):
        found = "".join(f"<p>{escape(sentence)}</p>\n" for sentence in sentences_of(losses))
        loss_html = draw(figures.loss_figure, losses, lengths) + found + loss_html
    loss_html += tables.paragraphs(explain(losses))
    if any("accuracy" in record for record in retrieved):
        retrieval_html = draw(figures.heatmap_figure, retrieved) + retrieval_html
    retrieval_html += tables.paragraphs(explain(retrieved))
    sections = {
        "Loss by context length and position": loss_html,
        "Retrieval": retrieval_html,
        "Cost": cost_html,
        "The text, coloured by loss": text_section(texts),
        "Left out": tables.paragraphs(tables.refusals(records)),
        "Settings and provenance": settings.html() + tables.paragraphs([*unequal, source]),
    }
    links = body = ""
    for i, (heading, content) in enumerate(sections.items()):
        if content:
            links += f'<a href="#section{i}">{heading}</a>\n'
            body += f'<section id="section{i}"><h2>{heading}</h2>\n{content}</section>\n'
    title = escape(", ".join(tables.unique(records, "checkpoint")))
    page = PAGE.substitute(title=title, links=links, sections=body)
    # names of files may hold bytes that UTF-8 cannot
    Path(file).write_text(page, encoding="utf-8", errors="replace")
