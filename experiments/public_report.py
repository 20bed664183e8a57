"""The tables of public.py, from its cells alone."""

import itertools

from nanolong.evaluation import intervals
from nanolong.evaluation.tables import Table

# Up to this fraction of the original length, for Self-Extend its window, they compute what the
# untouched checkpoint does: that is not repeated.
SAME_UP_TO = {"lm-infinite": 1, "jet-long": 1, "self-extend": 0.25}
WINDOW = "lm-infinite"  # the arm that forgets: whoever is not below it might forget, too
UNTRAINED = ("yarn", "self-extend", "jet-long")  # what fine-tuned arms are compared with
# Where a target's trigram stood last, for a shorter and a longer context.
GROUPS = ("all", "near", "far", "pair far", "new")

ABOUT = """\
Does SmolLM2-135M-Instruct, trained for {original:,} tokens, use {longest:,} tokens of context
(a), does it find something in a longer context (b), and after how many tokens of fine-tuning (c)?

The same tokens, the last {n_targets:,} of each document, are scored in contexts of {lengths}
tokens. A **gain** is the loss in a shorter context minus the loss in a longer one, in nats per
token. Tokens are told apart by the previous occurrence of the phrase of three tokens that ends with
them: **near**, also visible in the shorter context; **far** (a distant repeat), visible only in the
longer one; **new**, nowhere. **Pair far**: the two tokens before stood only far, whatever followed
there. A model that uses distant text gains on distant repeats, which are few, so the mean loss
hides it. Intervals are 95 % over documents (Student's t), and differences are taken document by
document; fewer than five documents have none. LM-Infinite sees the last {original:,} tokens and the
first ten: a method whose loss is not lower may forget as well. Documents are modules of Python's
standard library and English prose that Python brings. The checkpoint may have seen them in
training: compare methods, not texts.
"""


class Cells:
    """Cells by their keys, as intervals over documents.

    The original length of the checkpoint is the last but one of the lengths.
    """

    def __init__(self, cells):
        self.cells = {key: cell for key, cell in cells.items() if key.task == "repeats"}
        self.prompts = {k: c for k, c in cells.items() if k.task not in ("repeats", "train")}
        self.lengths = sorted({key.length for key in self.cells})
        self.original_length = self.lengths[-2]
        # in the order of the cells, but after more tokens of fine-tuning, and other seeds, later
        found = dict.fromkeys((key.arm, key.seed) for key in self.cells)
        self.arms = sorted(found, key=lambda arm: (n_tokens(arm), arm[1]))

    def sums(self, arm, length, buckets):
        """Return {document: (nats, targets)} of the buckets in a context length."""
        name, seed = arm
        if length <= self.original_length * SAME_UP_TO.get(name, 0):
            name = "untouched"
        found = {}
        for key, cell in self.cells.items():
            if key[1:4] == (name, seed, length):
                values = [cell["values"][bucket] for bucket in buckets]
                targets, nats = map(sum, zip(*values, strict=True))
                found[key.document] = nats, targets
        return found

    def loss(self, arm, length):
        """Return the interval of the loss of all targets."""
        return intervals.ratio_interval(*columns(self.sums(arm, length, ["all"]).values()))

    def difference(self, one, other, buckets):
        """Return the interval of a difference in loss, paired by document.

        one, other: (arm, length).
        """
        one, other = (self.sums(*place, buckets) for place in (one, other))
        rows = [(one[d][0] - other[d][0], one[d][1]) for d in one if d in other]
        return intervals.ratio_interval(*columns(rows))

    def gain(self, arm, short, long, group):
        """Return the interval of what a longer context gains on a group of targets."""
        buckets = self.buckets(short, long, group)
        return self.difference((arm, short), (arm, long), buckets)

    def buckets(self, short, long, group):
        """Return the buckets of public.py that make up a group for two context lengths."""
        if group in ("all", "new"):
            return [group]
        if group == "near":
            return ["near", *(f"far {n}" for n in self.lengths[1:] if n <= short)]
        return [f"{group} {n}" for n in self.lengths if short < n <= long]

    def n_targets(self, buckets):
        """Count the targets of buckets in all documents."""
        first = self.arms[0]
        found = self.sums(first, self.lengths[0], buckets).values()
        return round(sum(targets for _, targets in found))


def n_tokens(arm):
    """Return the tokens of fine-tuning of an arm."""
    return int(arm[0].partition("+")[2] or 0)


def columns(rows):
    """Return the columns of pairs, also of none."""
    rows = list(rows)
    return [row[0] for row in rows], [row[1] for row in rows]


def label_of(arm):
    """Return the name of an arm: yarn + 64 k tokens."""
    name, seed = arm
    method, _, tokens = name.partition("+")
    if not tokens:
        return {"untouched": "original model"}.get(method, method)
    return f"{method} + {n_tokens(arm) // 1024} k tokens" + f" (seed {seed})" * (seed > 1)


def format_found(found, sign=""):
    """Return an interval as text; "–" if nothing was measured."""
    return intervals.format_interval(found, sign=sign) if found["n"] else "–"


# -----------------------------------------------------------------------------
# Tables


def loss_table(cells):
    rows = []
    for arm in cells.arms:
        losses = [format_found(cells.loss(arm, length)) for length in cells.lengths]
        n = len(cells.sums(arm, cells.lengths[-1], ["all"]))
        rows.append([label_of(arm), *losses, n])
    return Table("", ["", *(f"{n:,}" for n in cells.lengths), "documents"], rows)


def gain_table(cells, short, long):
    rows = []
    for arm in cells.arms:
        found = [cells.gain(arm, short, long, group) for group in GROUPS]
        if found[0]["n"]:
            rows.append([label_of(arm), *(format_found(x, "+") for x in found), found[0]["n"]])
    counts = [cells.n_targets(cells.buckets(short, long, group)) for group in GROUPS]
    names = [f"{group} ({n:,})" for group, n in zip(GROUPS, counts, strict=True)]
    return Table("", ["", *names, "documents"], rows)


def window_table(cells):
    """Compare the methods with LM-Infinite in the longest context."""
    *shorter, longest = cells.lengths
    columns = {"all": ["all"]}
    for n in shorter:
        columns[f"repeats from over {n:,} tokens back"] = cells.buckets(n, longest, "far")
    rows = []
    for arm in cells.arms:
        places = (arm, longest), ((WINDOW, 0), longest)
        found = [cells.difference(*places, buckets) for buckets in columns.values()]
        if arm[0] != WINDOW and found[0]["n"]:
            rows.append([label_of(arm), *(format_found(x, "+") for x in found), found[0]["n"]])
    return Table("", ["", *columns, "documents"], rows)


def prompt_table(cells):
    places = dict.fromkeys((k.task, k.arm, k.length) for k in cells.prompts)
    rows = []
    for task, arm, length in sorted(places, key=lambda place: (place[2], place[0])):
        keys = [k for k in cells.prompts if (k.task, k.arm, k.length) == (task, arm, length)]
        found = [cells.prompts[key]["values"] for key in keys]
        right = [x["right"] for x in found]
        guessed = [x["right without"] for x in found]
        nats = intervals.mean_interval([x["nats"] for x in found])
        gain = intervals.mean_interval([x["nats without"] - x["nats"] for x in found])
        interval = intervals.format_interval(intervals.fraction_interval(right), 2)
        counts = f"{sum(right)} of {len(right)}", f"{sum(guessed)} of {len(guessed)}"
        row = [f"{task}, {length:,}", label_of((arm, 0)), counts[0], interval, counts[1]]
        rows.append([*row, *(intervals.format_interval(x, 1) for x in (nats, gain))])
    header = [
        "task, tokens",
        "method",
        "right",
        "fraction",
        "right without needles",
        "nats",
        "gain",
    ]
    return Table("", header, rows)


def tokens_table(cells):
    """Compare fine-tuned arms with some that are not, document by document."""
    short, *_, longest = cells.lengths
    places = [("untouched", short), *((name, longest) for name in UNTRAINED)]
    rows = []
    for arm in cells.arms:
        pairs = [((arm, length), ((name, 0), length)) for name, length in places]
        found = [cells.difference(*pair, ["all"]) for pair in pairs]
        if arm[0] == "abf" or "+" in arm[0]:
            n = len(cells.sums(arm, longest, ["all"]))
            rows.append([label_of(arm), *(format_found(x, "+") for x in found), n])
    names = [f"from {label_of((name, 0))}, {length:,}" for name, length in places]
    return Table("", ["difference in loss", *names, "documents"], rows)


# -----------------------------------------------------------------------------
# The report


def write(cfg, found, file):
    """Write the report next to the cells."""
    cells = Cells(found)
    *_, original, longest = cells.lengths
    names = "commit", "hardware", "date", "checkpoint"
    facts = [", ".join(sorted({cell[name] for cell in found.values()})) for name in names]
    about = ABOUT.format(
        original=original,
        longest=longest,
        n_targets=cfg.targets,
        lengths=", ".join(f"{n:,}" for n in cells.lengths),
    )
    tables = {"Loss of all targets, by context": loss_table(cells)}
    for short, long in itertools.pairwise(cells.lengths):
        heading = f"What {long:,} tokens gain over {short:,}, with the numbers of targets"
        tables[heading] = gain_table(cells, short, long)
    tables[f"Difference in loss from LM-Infinite, in {longest:,} tokens"] = window_table(cells)
    if cells.prompts:
        tables["(b) Does it find?"] = prompt_table(cells)
    tables["(c) After how many tokens of fine-tuning?"] = tokens_table(cells)
    lines = ["# Does a public checkpoint use a longer context?", ""]
    lines += [f"`python experiments/public.py FILE.gguf a b c`: {'; '.join(facts)}.", "", about]
    for heading, table in tables.items():
        if table.rows:
            lines += ["", f"## {heading}", "", table.markdown()]
    file.write_text("\n".join(lines) + "\n")
    print(f"wrote {file}")
