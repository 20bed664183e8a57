"""The report of public.py, from its cells alone: tables, what they say, and a figure."""

import itertools

from nanolong.evaluation import figures, intervals
from nanolong.evaluation.intervals import excludes_zero
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
tokens. A **gain** is the loss in a shorter context less the loss in a longer one, in nats per
token. Tokens are told apart by where they and the two tokens before them stood last: **near**,
also visible in the shorter context; **far**, in the longer one alone; **new**, nowhere. **Pair
far** are tokens whose two preceding tokens stood only far, whatever followed there. A model that
uses distant text gains on far repeats; few tokens are, so that the mean loss hides it. Intervals
are of 95 %, over documents (Student's t), with differences taken document by document; of fewer
than five documents there are none. LM-Infinite sees the last {original:,} tokens and the first
ten: an arm whose loss is not below it might forget as well.
"""
DOCUMENTS = """\
Documents are never committed: modules of Python's standard library, and sequences of the texts of
help() (pydoc_data/topics.py) and of the help, news and change log of IDLE. Sequences of one such
book count as documents of their own here, though they have an author and a subject in common. The
checkpoint may have seen these texts in training: compare arms, not texts. Fine-tuning is on the
other modules, so prose is new to it in kind.
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

    def difference(self, one, other, buckets, kind=""):
        """Return the interval of a difference in loss, paired by document.

        one, other: (arm, length). kind: only documents of code, or of prose.
        """
        one, other = (self.sums(*place, buckets) for place in (one, other))
        both = [d for d in one if d in other and kind in ("", self.kind_of(d))]
        rows = [(one[d][0] - other[d][0], one[d][1]) for d in both]
        return intervals.ratio_interval(*columns(rows))

    def kind_of(self, document):
        texts = {key.document: cell["text"] for key, cell in self.cells.items()}
        return "prose" if " from token " in texts[document] else "code"

    def gain_alike(self, arm, short, long, group):
        """Return the interval of the mean over documents of their own gain()."""
        one, other = (self.sums(arm, n, self.buckets(short, long, group)) for n in (short, long))
        found = [(one[d][0] - other[d][0]) / one[d][1] for d in one if d in other and one[d][1]]
        return intervals.mean_interval(found)

    def gain(self, arm, short, long, group, kind=""):
        """Return the interval of what a longer context gains on a group of targets."""
        buckets = self.buckets(short, long, group)
        return self.difference((arm, short), (arm, long), buckets, kind)

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
        return method
    return f"{method} + {n_tokens(arm) // 1024} k tokens" + f" (seed {seed})" * (seed > 1)


def format_found(found, sign=""):
    """Return an interval as text; "–" if nothing was measured."""
    return intervals.format_interval(found, sign=sign) if found["n"] else "–"


# -----------------------------------------------------------------------------
# Tables and what they say


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
        found += [cells.gain(arm, short, long, "far", kind) for kind in ("code", "prose")]
        if found[0]["n"]:
            rows.append([label_of(arm), *(format_found(x, "+") for x in found), found[0]["n"]])
    counts = [cells.n_targets(cells.buckets(short, long, group)) for group in GROUPS]
    names = [f"{group} ({n:,})" for group, n in zip(GROUPS, counts, strict=True)]
    return Table("", ["", *names, "far, code", "far, prose", "documents"], rows)


def against_window(cells):
    """Compare the arms with LM-Infinite in the longest context: group -> {arm: interval}."""
    longest = cells.lengths[-1]
    window = (WINDOW, 0)
    found = {}
    for group, short in (("all", 0), *(("far", n) for n in cells.lengths[:-1])):
        buckets = cells.buckets(short, longest, group)
        name = group if group == "all" else f"more than {short:,} back"
        found[name] = {
            arm: cells.difference((arm, longest), (window, longest), buckets)
            for arm in cells.arms
            if arm != window
        }
    return found


def window_table(cells):
    found = against_window(cells)
    rows = [
        [
            label_of(arm),
            *(format_found(column[arm], "+") for column in found.values()),
            found["all"][arm]["n"],
        ]
        for arm in cells.arms
        if arm[0] != WINDOW and found["all"][arm]["n"]
    ]
    return Table("", ["", *found, "documents"], rows)


def below(found):
    """Return the labels of the arms whose whole interval is below 0, as text."""
    known = {arm: x for arm, x in found.items() if x["high"] is not None}
    names = [label_of(arm) for arm, x in known.items() if x["high"] < 0]
    return ", ".join(names) or ("none" if known else "not known before five documents")


def read_use(cells):
    """Say what (a) found and what to do, by the intervals."""
    short, *_, original, longest = cells.lengths
    control = cells.gain(("untouched", 0), short, original, "far")
    lines = [
        f"Control: from {short:,} to {original:,} tokens, within its training, the untouched "
        f"checkpoint gains {format_found(control, '+')} on far repeats."
    ]
    gains = {
        arm: cells.gain(arm, original, longest, "far")
        for arm in cells.arms
        if arm[0] not in (WINDOW, "untouched")
    }
    gaining = [label_of(a) for a, x in gains.items() if x["low"] is not None and x["low"] > 0]
    lines.append(
        f"From {original:,} to {longest:,} tokens these gain on far repeats (interval above 0): "
        f"{', '.join(gaining) or 'none'}."
    )
    alike = {arm: cells.gain_alike(arm, original, longest, "far") for arm in gains}
    texts = [f"{label_of(arm)} {format_found(x, '+')}" for arm, x in alike.items() if x["n"]]
    lines.append(
        "There a document with many repeats weighs more; with all documents weighted alike the "
        f"gains are: {'; '.join(texts)}."
    )
    found = against_window(cells)
    far = found[f"more than {original:,} back"]
    lines.append(
        f"In {longest:,} tokens these are below LM-Infinite, which forgets: of all tokens "
        f"{below(found['all'])}; of repeats more than {original:,} tokens back {below(far)}."
    )
    better = [x for x in far.values() if x["high"] is not None and x["high"] < 0]
    if better:
        lines.append("So extend if a text refers back that far; for the mean loss a window does.")
    elif any(x["high"] is not None for x in far.values()):
        use = (
            "distant text is used, but"
            if gaining
            else "that distant text is used is not shown, and"
        )
        lines.append(f"So {use} a window, which costs less, is not worse by these documents.")
    return " ".join(lines)


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
        row = [f"{task}, {length:,}", arm, counts[0], interval, counts[1]]
        rows.append([*row, *(intervals.format_interval(x, 1) for x in (nats, gain))])
    header = ["task, tokens", "arm", "right", "fraction", "right without needles", "nats", "gain"]
    return Table("", header, rows)


def read_find(cells, cfg):
    """Say what (b) found and what to do, by the answers to all tasks together."""
    original, *others = sorted({key.length for key in cells.prompts})
    dropped = [task for task in cfg.find if is_dropped(cells, cfg, task, original)]
    lines = [
        f"Dropped, as the untouched checkpoint answers under half of it at {original:,} tokens: "
        f"{', '.join(dropped) or 'no task'}."
    ]
    if not others:
        return f"{lines[0]} Beyond {original:,} tokens nothing is measured yet."
    right = {arm: [] for arm in cfg.finders}
    for key, cell in cells.prompts.items():
        if key.length == others[-1]:
            right.setdefault(key.arm, []).append(cell["values"]["right"])
    right = {arm: found for arm, found in right.items() if found}
    counts = [f"{arm} {sum(found)} of {len(found)}" for arm, found in right.items()]
    lines.append(f"At {others[-1]:,} tokens, the other tasks together: {', '.join(counts)}.")
    found = {arm: intervals.fraction_interval(answers) for arm, answers in right.items()}
    highest = found.get("untouched", {"high": None})["high"]
    if highest is None:
        return " ".join(lines)
    better = [arm for arm, x in found.items() if x["low"] is not None and x["low"] > highest]
    advice = "So whether an arm finds more than the untouched checkpoint is undecided."
    if better:
        advice = (
            f"So to find something beyond {original:,} tokens, extend by {' or '.join(better)}."
        )
    return " ".join([*lines, advice])


def is_dropped(cells, cfg, task, original):
    keys = [k for k in cells.prompts if k[:2] == (task, "untouched") and k.length == original]
    right = sum(cells.prompts[key]["values"]["right"] for key in keys)
    return len(keys) >= cfg.prompts and right < cfg.prompts / 2


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
    names = [f"less {name}, {length:,}" for name, length in places]
    return Table("", ["loss", *names, "documents"], rows)


def read_tokens(cells):
    """Say what (c) found and what to do, by differences in the longest context."""
    longest = cells.lengths[-1]
    tuned = [arm for arm in cells.arms if "+" in arm[0]]
    if not tuned:
        return "Not measured yet."
    change = {
        arm: cells.difference((arm, longest), (("yarn", 0), longest), ["all"]) for arm in tuned
    }
    texts = [f"{label_of(arm)} {format_found(x, '+')}" for arm, x in change.items()]
    lines = [
        f"Loss of all tokens in {longest:,} tokens of context, less YaRN's without fine-tuning: "
        f"{'; '.join(texts)}. Below it with the whole interval: {below(change)}."
    ]
    matters = [
        label_of(one).removeprefix("none + ")
        for one, other, found in tuned_pairs(cells)
        if one[0].startswith("none") and other[0].startswith("yarn") and excludes_zero(found)
    ]
    if matters:
        lines.append(f"So the method still matters after {'; '.join(matters)}.")
    return " ".join(lines)


def tuned_pairs(cells):
    """Yield (arm, arm, interval of their difference in loss in the longest context).

    They are fine-tuned, and differ in one thing: in the method, the second's being YaRN, or in the
    number of tokens or the seed, the second's being lower.
    """
    tuned = {
        (arm[0].partition("+")[0], n_tokens(arm), arm[1]): arm
        for arm in cells.arms
        if n_tokens(arm)
    }
    longest = cells.lengths[-1]
    for (method, tokens, seed), arm in tuned.items():
        others = [("yarn", tokens, seed)] if method != "yarn" else []
        others += [key for key in tuned if key[::2] == (method, seed) and key[1] < tokens]
        others += [key for key in tuned if key[:2] == (method, tokens) and key[2] < seed]
        for key in others:
            if key in tuned:
                pair = (arm, longest), (tuned[key], longest)
                yield arm, tuned[key], cells.difference(*pair, ["all"])


def pairs_table(cells):
    """Compare fine-tuned arms with each other."""
    rows = [
        [label_of(one), label_of(other), format_found(found, "+"), found["n"]]
        for one, other, found in tuned_pairs(cells)
    ]
    longest = f"difference in loss, {cells.lengths[-1]:,}"
    return Table("", ["fine-tuned", "less", longest, "documents"], rows)


def hours(cells):
    """Say how many hours each part took, on which hardware: a list of lines."""
    found = {}
    for cell in cells.values():
        key = cell["part"], cell["hardware"]
        found[key] = found.get(key, 0) + cell["seconds"]
    return [f"- ({part}) {s / 3600:.2f} hours of {what}" for (part, what), s in found.items()]


def left_out(cells, cfg):
    """Say what is not measured: a list of lines."""
    lines = []
    for arm in cells.arms:
        n = len(cells.sums(arm, cells.lengths[-1], ["all"]))
        if n < cfg.documents:
            lines.append(f"- {label_of(arm)}: {n} of {cfg.documents} documents")
    known = {arm for arm, _ in cells.arms}
    wanted = [f"{method}+{n}" for n in cfg.tokens for method in ("yarn", "none", "abf")]
    missing = [label_of((arm, 1)) for arm in (*cfg.arms, *wanted) if arm not in known]
    lines += [f"- not measured: {', '.join(missing)}"] if missing else []
    n_prompts = {}
    for key in cells.prompts:
        place = f"{key.task}, {key.arm} at {key.length:,}"
        n_prompts[place] = n_prompts.get(place, 0) + 1
    few = [f"{place} ({n})" for place, n in n_prompts.items() if n < cfg.prompts]
    lines += [f"- fewer than {cfg.prompts} prompts: {'; '.join(few)}"] if few else []
    lines += [] if cells.prompts else ["- not measured: any prompt of (b)"]
    return lines or ["- nothing"]


# -----------------------------------------------------------------------------
# The report


def write(cfg, found, file):
    """Write the report and its figure next to the cells."""
    cells = Cells(found)
    short, *_, original, longest = cells.lengths
    names = "commit", "hardware", "date"
    facts = {name: sorted({cell[name] for cell in found.values()}) for name in names}
    # one date where all cells are of one day
    dates = " to ".join(dict.fromkeys((facts["date"][0], facts["date"][-1])))
    some = next(iter(found.values()))
    documents = {key.document: cell["text"] for key, cell in cells.cells.items()}
    about = ABOUT.format(
        original=original,
        longest=longest,
        n_targets=cfg.targets,
        lengths=", ".join(f"{n:,}" for n in cells.lengths),
    )
    lines = [
        "# Does a public checkpoint use a longer context?",
        "",
        f"`python experiments/public.py FILE.gguf a b c`, commits {', '.join(facts['commit'])}, "
        f"{'; '.join(facts['hardware'])}, {dates}; checkpoint "
        f"{some['checkpoint']}. Cells: [{file.stem}.jsonl]({file.stem}.jsonl).",
        "",
        about,
        f"![gains, and losses against a window]({file.stem}.png)",
        "",
        "## (a) Does it use distant text?",
        "",
        read_use(cells),
        "",
        "Loss of all targets, by context:",
        "",
        loss_table(cells).markdown(),
    ]
    for pair in itertools.combinations(cells.lengths, 2):
        heading = f"What {pair[1]:,} tokens gain over {pair[0]:,}, with the numbers of targets:"
        lines += ["", heading, "", gain_table(cells, *pair).markdown()]
    heading = (
        f"Loss less the loss of LM-Infinite, in {longest:,} tokens; repeats by their distance:"
    )
    lines += ["", heading, "", window_table(cells).markdown()]
    if cells.prompts:
        lines += ["", "## (b) Does it find?", "", read_find(cells, cfg), ""]
        lines += [prompt_table(cells).markdown()]
    lines += ["", "## (c) After how many tokens of fine-tuning?", "", read_tokens(cells)]
    tuned = tokens_table(cells)
    lines += ["", tuned.markdown()] if tuned.rows else []
    pairs = pairs_table(cells)
    lines += ["", pairs.markdown()] if pairs.rows else []
    lines += ["", "## What was not measured", "", *left_out(cells, cfg)]
    lines += ["", "## Documents and hours", "", DOCUMENTS]
    lines += [f"- {number}: {name}" for number, name in sorted(documents.items())]
    lines += ["", *hours(found)]
    file.write_text("\n".join(lines) + "\n")
    print(f"wrote {file}")
    plot(cells, file.with_suffix(".png"))


def plot(cells, file):
    """Plot the gains of the longest context over the next, and losses against LM-Infinite."""
    pyplot = figures.import_pyplot(file)
    if pyplot is None:
        return
    short, longest = cells.lengths[-2:]
    arms = [arm for arm in cells.arms if arm[1] < 2]  # a second seed is in the tables
    size = 11, 1.5 + 0.35 * len(arms)
    figure, axes = pyplot.subplots(1, 2, figsize=size, sharey=True, layout="constrained")
    gains = {
        group: {arm: cells.gain(arm, short, longest, group) for arm in arms}
        for group in ("all", "new", "far")
    }
    counts = {group: cells.n_targets(cells.buckets(short, longest, group)) for group in gains}
    axes[0].set_title(f"gain of {longest:,} tokens over {short:,}, nats per token")
    axes[1].set_title(f"loss less LM-Infinite's, in {longest:,} tokens")
    for axis, columns_ in zip(axes, (gains, against_window(cells)), strict=True):
        for number, (name, column) in enumerate(columns_.items()):
            points = [(arm, x) for arm, x in column.items() if arm in arms and abs(x["mean"]) < 2]
            places = [arms.index(arm) + 0.2 * (number - 1) for arm, _ in points]
            means = [x["mean"] for _, x in points]
            widths = [x["mean"] - x["low"] if x["low"] is not None else 0 for _, x in points]
            style = {"fmt": figures.MARKERS[number], "color": f"C{number}", "capsize": 3}
            label = f"{name} ({counts[name]:,})" if columns_ is gains else name
            axis.errorbar(means, places, xerr=widths, label=label, **style)
        for arm, x in columns_["all"].items():
            if arm in arms and abs(x["mean"]) >= 2:  # off the scale
                place = {"x": 0.98, "y": arms.index(arm), "transform": axis.get_yaxis_transform()}
                axis.text(**place, s=f"all: {x['mean']:+.1f}", ha="right", va="center", fontsize=8)
        axis.axvline(0, color="gray", linewidth=1)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=3)
    axes[0].set_yticks(range(len(arms)), [label_of(arm) for arm in arms])
    axes[0].set_ylim(len(arms) - 0.5, -0.5)
    n = len(cells.sums(cells.arms[0], longest, ["all"]))
    note = f"{n} documents at most; of fewer than five no interval. A number stands for an arm "
    note += "beyond 2 nats, which breaks. Second seeds are left out."
    figure.supxlabel(note, fontsize=8)
    figures.save(figure, file)
    pyplot.close(figure)
