"""Tables of measurements, as text for the terminal, as Markdown, and as HTML for the report.

Records are the dicts that evaluate.py measures and writes to its JSON file.
"""

import math
from dataclasses import dataclass, field
from html import escape

from nanolong.evaluation import intervals


@dataclass
class Table:
    """Rows of texts, each a label and a cell for each other column of the header.

    A cell that ends in an asterisk is explained by the notes, sentences below the table.
    """

    title: str
    header: list
    rows: list
    notes: list = field(default_factory=list)
    units: str = ""  # what the intervals are over

    def text(self):
        """Labels are aligned on the left and cells on the right, with asterisks beyond it."""
        lines = [[str(cell) for cell in row] for row in (self.header, *self.rows)]
        columns = [list(column) for column in zip(*lines, strict=True)]
        for column in columns[1:]:
            if any(cell.endswith("*") for cell in column):
                column[:] = [cell if cell.endswith("*") else f"{cell} " for cell in column]
        widths = [max(map(len, column)) for column in columns]
        text = []
        for label, *cells in zip(*columns, strict=True):
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            text.append("   ".join([label.ljust(widths[0]), *aligned]).rstrip())
        return "\n".join([self.title, *text, *self.notes])

    def markdown(self):
        """The table alone, without a heading or notes."""
        rows = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)

    def html(self):
        header, *rows = ([escape(str(x)) for x in row] for row in (self.header, *self.rows))
        units = self.units and f"; 95 % intervals over {self.units}"
        lines = [f"<caption>{escape(self.title + units)}</caption>"]
        lines += [f"<tr><th>{'</th><th>'.join(header)}</th></tr>"]
        lines += [f"<tr><th>{row[0]}</th><td>{'</td><td>'.join(row[1:])}</td></tr>" for row in rows]
        table = "\n".join(lines)
        return f'<div class="table"><table>{table}</table></div>\n{paragraphs(self.notes)}'


def paragraphs(sentences):
    """Return sentences as HTML, in small print."""
    return "".join(f'<p class="note">{escape(sentence)}</p>\n' for sentence in sentences)


# -----------------------------------------------------------------------------
# Tables of records


SCORED_TOKENS = {
    "chunked": "every token",
    "last-quarter": "the last quarter of each sequence",
    "sliding": "the last tokens of overlapping sequences",
    "token-aligned": "the same tokens at every length",
}
RETRIEVED = {
    "accuracy": "all answers right",
    "nats": "nats of the answer",
    "gain": "nats gained by the needles",
}
COSTS = {
    "prefill_seconds": "seconds of prefill",
    "tokens_per_second": "tokens/s of decoding",
    "cache_megabytes": "MB of cache",
}


def unique(records, key):
    """Return the different values of a key, in the order of the records."""
    return list(dict.fromkeys(record[key] for record in records))


def select(records, **fields):
    return [r for r in records if all(r.get(name) == value for name, value in fields.items())]


def refusals(records):
    """Return a line for each different reason why something could not be measured."""
    places = {}
    for record in records:
        if "refused" in record:
            place = f"{record['checkpoint']} at {record['length']}"
            places.setdefault(record["refused"], {})[place] = None
    return [f"refused: {', '.join(found)}: {reason}" for reason, found in places.items()]


def cell(record, measure):
    """Return a measure of a record as text, with an asterisk if it differs from the first's."""
    if "refused" in record:
        return "refused"
    if measure in COSTS:
        return f"{record[measure]:,.3g}"
    if measure == "loss":
        text = intervals.format_interval(record, key="loss")
    else:
        text = intervals.format_interval(record[measure], 2)
    # an asterisk stands at the measured difference, and not at numbers derived from it
    is_compared = measure in ("loss", "nats") and "difference" in record
    return text + ("*" if is_compared and intervals.excludes_zero(record["difference"]) else "")


def pivot(title, cells):
    """Return a table of cells, (row, column) -> text, in the order in which they come."""
    rows = list(dict.fromkeys(row for row, _ in cells))
    columns = list(dict.fromkeys(column for _, column in cells))
    lines = [[row, *(cells.get((row, column), "") for column in columns)] for row in rows]
    return Table(title, ["", *columns], lines)


def grid(title, records, measures):
    """Return a table of records by length, with rows for each checkpoint (and depth).

    measures: field of a record -> what the label of its row says after the checkpoint.
    """
    cells = {}
    for record in records:
        depth = record.get("depth")
        at_depth = "" if depth is None else f"depth {depth:g}"
        for measure, words in measures.items():
            label = ": ".join(filter(None, (record["checkpoint"], at_depth, words)))
            cells[label, f"{record['length']:,}"] = cell(record, measure)
    return pivot(f"{title}, by context length", cells)


def tables_of(records, unequal=()):
    """Return the tables of all records; for `position`, one of the longest sequences.

    unequal: sentences that say how checkpoints differ, besides in what is compared. They
    stand below each table in which an asterisk says that checkpoints differ.
    """
    tables = []
    special = {"position": position_table, "repeats": repeats_table}
    for protocol in unique(select(records, task="loss"), "protocol"):
        measured = select(records, protocol=protocol)
        tables.append(special.get(protocol, loss_table)(measured))
    for task, kind in dict.fromkeys((r["task"], r["kind"]) for r in records if "kind" in r):
        tables.append(retrieval_table(select(records, task=task, kind=kind)))
    costs = select(records, task="cost")
    if costs:
        tables.append(grid("cost of one text", costs, COSTS))
    is_over_runs = any("seeds" in record for record in records)
    # an asterisk and its reservations are never apart
    for table in tables:
        table.units = "runs" if table.units and is_over_runs else table.units
        cells = [str(cell) for row in table.rows for cell in row[1:]]
        if any(cell.endswith("*") for cell in cells):
            compared = "the runs of an arm" if is_over_runs else "the same texts"
            note = f"* differs from the first checkpoint: 95 % interval over {compared}"
            table.notes += [note, *unequal]
        if "not finite" in cells:
            table.notes.append("not finite: the logits are no numbers: try --dtype=float32")
    return tables


def loss_table(records, unit="nats per token"):
    """Return the losses of one protocol, and how many sequences they are of."""
    protocol = records[0]["protocol"]
    title = f"{protocol} ({SCORED_TOKENS[protocol]})"
    if "stride" in records[0]:
        title += f", stride {records[0]['stride']}"
    table = grid(f"{title}, {unit}", records, {"loss": ""})
    counts = {length: set() for length in unique(records, "length")}
    for record in records:
        counts[record["length"]] |= {record["n"]} if "n" in record else set()
    is_over_runs = any("seeds" in record for record in records)
    samples = "runs" if is_over_runs else "sequences"
    table.units = samples
    table.rows.append([samples, *(" or ".join(map(str, sorted(n))) for n in counts.values())])
    few = [str(length) for length, n in counts.items() if min(n, default=8) < 8]
    # the choice of the text then decides how two lengths compare; others score the same at all
    if few and len(counts) > 1 and protocol == "last-quarter" and not is_over_runs:
        table.notes.append(
            f"few sequences at {', '.join(few)} tokens, and each length scores other "
            "tokens: compare lengths by token-aligned, or raise --max_tokens"
        )
    return table


def repeats_table(records):
    """Return the gains of longer contexts by bucket, and how many targets are in each."""
    context = records[0]["context"]
    cells = {}
    for record in records:
        label = f"{record['checkpoint']}: {record['bucket']}"
        text = "refused" if "refused" in record else "no target"
        if "gain" in record:
            n_tokens = f" of {record['tokens']:,}" if "tokens" in record else ""
            units = describe_units(record)
            text = intervals.format_interval(record["gain"], sign="+", units=units) + n_tokens
        cells[label, f"{record['length']:,}"] = text
    title = f"repeats, nats per token that a longer context gains over {context:,} tokens, and of"
    table = pivot(f"{title} how many targets, by context length", cells)
    table.notes.append(
        "by where a target and the two tokens before it stood last: near, in the shorter context; "
        "far, in the longer one alone; beyond, farther back; new, nowhere. pair far: the two "
        "before it stood in the longer one alone"
    )
    scored = {}
    for record in select(records, bucket="all"):
        if "gain" in record:
            about = f"at {record['length']:,} tokens intervals are over {describe_units(record)}"
            if "tokens" in record:
                about += f", with {record['tokens']:,} targets, {record['stride']:,} a sequence"
            scored[about] = None
    table.notes += scored
    table.notes.append(
        "a larger --max_tokens, a longer text or shorter --lengths raise the number of targets"
    )
    used = [describe_use(name, records) for name in unique(records, "checkpoint")]
    table.notes += filter(None, used)
    return table


# What the gain on distant repeats says of a longer context, with the numbers that say so.
USES = {
    "used": "distant repeats gain {}: the longer context is used",
    "harmful": "distant repeats gain {}: the longer context does harm",
    "unclear": "no clear gain of distant repeats, {}: use of the longer context is not shown",
    "few": "too few distant repeats, {}: raise --max_tokens, or give a longer text, or code",
}
LEAST_GAIN = 0.005  # nats: a gain that is printed as 0.00 may be rounding


def describe_use(name, records):
    """Say in a sentence whether a checkpoint uses its longer contexts; "" if none was measured."""
    numbers = {}
    for record in select(records, checkpoint=name, bucket="far"):
        if "refused" in record:
            continue
        use = judge_use(record)
        at_length = f"at {record['length']:,} tokens"
        text = f"{record.get('tokens', 0):,} targets {at_length}"
        if use != "few":
            units = describe_units(record)
            gained = intervals.format_interval(record["gain"], 2, units=units)
            text = f"{gained} {at_length} ({units})"
        numbers.setdefault(use, []).append(text)
    sentences = [USES[use].format(", ".join(found)) for use, found in numbers.items()]
    return f"{name}: {'; '.join(sentences)}" if sentences else ""


def judge_use(record):
    """Return the key of USES that the gain of a record of distant repeats has."""
    gain = record.get("gain")
    if gain is None or (gain["low"] is None and "seeds" not in record):
        return "few"
    if gain["low"] is None:  # runs of equal gains, as 0 beyond a window
        return "unclear"
    if gain["low"] > LEAST_GAIN:
        return "used"
    return "harmful" if gain["high"] < -LEAST_GAIN else "unclear"


def describe_units(record):
    """Return what the interval of a gain is over, in words: "one text, 12 places"."""
    n = record["gain"]["n"]
    if "seeds" in record:
        return f"{n} runs"
    s = "s" if n > 1 else ""
    if "texts" not in record:
        return f"{n} document{s}"
    texts = "one text" if record["texts"] == 1 else f"{record['texts']} texts"
    return f"{texts}, {n} place{s}"


def position_table(records):
    """Return the losses by position: a row for each part, a column for each checkpoint."""
    longest = max(record["length"] for record in records)
    measured = select(records, length=longest)
    ends = sorted({record["position"][1] for record in measured if "position" in record})
    cells = {}
    for record in measured:
        # one refusal stands for all positions
        for end in [record["position"][1]] if "position" in record else ends:
            cells[f"up to {end:,}", record["checkpoint"]] = cell(record, "loss")
    table = pivot(f"position, nats per token, in sequences of {longest} tokens", cells)
    table.units = "sequences"
    return table


def retrieval_table(records):
    """Return the answers to prompts of one kind, of needle at each depth."""
    first = records[0]
    title = f"{first['task']}, {first['kind']}, {first['trials']} prompts a cell"
    # Vocabularies of two sizes have different documents, and so two chances.
    for guess in unique(records, "chance"):
        title += f", chance {guess:.2g} right and {-math.log(guess):.2f} nats"
    if first["task"] == "needle":
        table = grid(f"{title}: all answers right", records, {"accuracy": ""})
    else:
        table = grid(title, records, RETRIEVED)
    table.units = "prompts"
    guessed = [record["control"]["mean"] for record in records if "control" in record]
    note = f"without the needles at most {max(guessed, default=0):.2f} of the answers are right"
    table.notes += [note] if guessed else []
    return table
