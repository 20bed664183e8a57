"""What an experiment has measured: values, intervals over seeds, claims, tables, and a figure."""

import collections
import math
import re
from itertools import pairwise
from types import SimpleNamespace

from nanolong.errors import UserError, require
from nanolong.evaluation import figures, intervals
from nanolong.evaluation.tables import Table

ABOUT = (
    "The mean over the seeds and its 95 % interval (Student's t). Fractions whose interval "
    "would leave 0 to 1 have the seeds' values. Losses are in nats per token; claims are judged on "
    "differences between runs of the same seed."
)
NO_SIZES = ("budget", "dataset", "data")  # what run.py adds to the numbers of a budget
RULE = (
    "pass: the 95 % interval is on the claimed side. undecided: it includes the bound. smaller: "
    "bound not reached. contradicted: wrong sign."
)

# colours of figures
RED, BLUE, GREEN, ORANGE, VIOLET = "#c8413b", "#2a6fb5", "#1d8a5f", "#d98a1f", "#6b4fa0"
COLORS = ("#22262b", BLUE, GREEN, ORANGE, VIOLET, "#8a5a2b")
UNCHANGED_ROPE = ("rope", "none", "none+0", "untouched")  # red in every figure

# in the order in which they are counted
VERDICTS = ("pass", "undecided", "smaller", "contradicted", "not judged")
VERDICT = re.compile(f": ({'|'.join(VERDICTS)})")


def interval(values):
    """Return the mean and the half-width of its 95 % interval (nan for a single value)."""
    found = intervals.mean_interval(values, intervals.MIN_SEEDS)
    if found["low"] is None:
        return found["mean"], math.nan
    return found["mean"], (found["high"] - found["low"]) / 2


def format_interval(values, sign=""):
    mean, half_width = interval(values)
    text = f"{mean:{sign}z.3f}"
    return text if math.isnan(half_width) else f"{text} ± {half_width:.3f}"


def format_values(values):
    """Return the mean and its interval, or the values: see ABOUT."""
    mean, half_width = interval(values)
    is_outside = not 0 <= mean - half_width <= mean + half_width <= 1
    if half_width > 0.1 and is_outside and all(0 <= x <= 1 for x in values):
        return ", ".join(f"{x:.2f}" for x in values)
    return format_interval(values)


def count_tokens(length, b):
    """Return the number of a length such as 4L, L+20 or 84; L is the budget's, b.L."""
    parts = re.fullmatch(r"(\d*)(L?)(?:\+(\d+))?", length)
    if not parts:
        raise UserError(f"{length!r} is no length: give one such as 84, L, 4L or L+20")
    times, is_relative, more = parts.groups()
    if is_relative and not hasattr(b, "L"):
        raise UserError(f"{length} counts training lengths L: state BUDGETS = {{'mine': 'L=64'}}")
    unit = b.L if is_relative else 1
    return int(times or 1) * unit + int(more or 0)


class Board:
    """The values of arms by measure, length and seed.

    saved: content of NAME.json; derive: function that returns rows computed from a Board; units:
    measure -> its unit, of measures that are not evaluate.py's.
    """

    def __init__(self, saved, derive=None, units=()):
        self.command = saved["command"]
        self.note = saved["note"]
        self.b = SimpleNamespace(**saved["budget"])
        self.arms = list(saved["arms"])
        self.failed = saved["failed"]
        # sentences: how the training of arms differs
        self.unequal = [*saved.get("unequal", [])]
        self.weights = {(arm, seed): digest for arm, seed, digest in saved.get("weights", [])}
        for arm in self.arms:
            seeds = [seed for name, seed in self.weights if name == arm]
            n_runs = len(self.different(seeds, [arm]))
            if n_runs < len(seeds):
                counted = f"{len(seeds)} seeds of {arm} count as {n_runs}"
                self.unequal.append(f"{counted}: the others have equal weights")
        self.original_lengths = saved.get("original_lengths", [])
        if hasattr(self.b, "L"):  # some arms train at multiples of it
            self.original_lengths = [self.b.L]
        self.units = dict(units)
        self.seeds = {row[1] for row in saved["rows"]}
        self.values = {}  # (arm, measure, length) -> {seed: number}
        self.texts = {}  # (arm, measure, length) -> such as "refused", in place of a number
        self.tokens = {}  # arm -> (measure, length) -> hash of the token ids that were scored
        self.add(saved["rows"])
        if derive:
            self.add(list(derive(self)))

    def add(self, rows):
        for arm, seed, measure, length, value, *ids in rows:
            cell = (arm, measure, length)
            if isinstance(value, str):
                self.texts[cell] = value
            elif value is not None and math.isfinite(value):
                self.values.setdefault(cell, {})[seed] = value
                if ids:
                    self.tokens.setdefault(arm, {})[measure, length] = ids[0]
            else:
                self.texts[cell] = "not finite"

    def of(self, arm, measure, length=0):
        """Return seed -> value. length: a number, or text such as 4L."""
        if isinstance(length, str):
            length = count_tokens(length, self.b)
        return self.values.get((arm, measure, length), {})

    def different(self, seeds, arms):
        """Return the first seed of each combination of these arms' weights: equal ones are one run.

        The weights of an arm without commands are not known, and each of its seeds is a run.
        """
        found = {}
        for seed in sorted(seeds):
            weights = tuple(self.weights.get((arm, seed), seed) for arm in arms)
            found.setdefault(weights, seed)
        return list(found.values())

    def runs_of(self, arm, measure, length):
        """Return the values of the different runs of an arm."""
        values = self.of(arm, measure, length)
        return [values[seed] for seed in self.different(values, [arm])]

    def points(self, arm, measure, lengths):
        """Return (length, mean, half-width) where there are values."""
        points = []
        for length in lengths:
            values = self.runs_of(arm, measure, length)
            if values:
                points.append((count_tokens(length, self.b), *interval(values)))
        return points

    def scored_alike(self, arms, measure):
        """Return whether arms were scored on the same token ids, at all lengths that they share.

        The values of derive() and measure() follow from all that evaluate.py measured.
        """
        if measure == "seconds":  # it has no tokens
            return True
        found = {}
        for arm in arms:
            own = self.tokens.get(arm, {})
            scored = [place for place in own if place[0] == measure] or own
            if any(found.setdefault(place, own[place]) != own[place] for place in scored):
                return False
        return True

    def other_tokens(self, measure):
        """Return a sentence if not all arms were scored on the same token ids, in a list."""
        groups = []
        for arm in self.arms:
            if measure not in {name for name, _ in self.tokens.get(arm, ())}:
                continue
            alike = (group for group in groups if self.scored_alike([*group, arm], measure))
            group = next(alike, [])
            if not group:
                groups.append(group)
            group.append(arm)
        if len(groups) < 2:
            return []
        sides = "; ".join(", ".join(group) for group in groups)
        return [f"unequal token ids: {measure} compares arms within a group only: {sides}"]

    def cell(self, arm, measure, length):
        """Return a cell of a table: mean and interval, or why there is none."""
        values = self.runs_of(arm, measure, length)
        if values:
            return format_values(values)
        return self.texts.get((arm, measure, count_tokens(length, self.b)), "–")

    def default_tables(self):
        """Return a table for each measure, with all its lengths."""
        lengths = {}
        for _, measure, length in [*self.values, *self.texts]:
            lengths.setdefault(measure, set()).add(length)
        return [(name, name, list(map(str, sorted(found)))) for name, found in lengths.items()]


# -----------------------------------------------------------------------------
# Claims

NUMBER = re.compile(r"(ln )?(-?\d*\.?\d+)")
VALUE = re.compile(r"([^@]+)(?:@([^\s@]+))?")


def parse_claim(line):
    """Read a claim, "measure: a@4L - a@L < b@4L + ln 1.1", as a sum of values and its bound.

    Returns its measure, terms (factor, arm, length) of the sum, its sign, and the bound, into
    which all numbers go.
    """
    advice = f"{line!r} is no claim: write one as in 'chunked: a@4L - a@L < b@4L + ln 1.1'"
    measure, _, rest = line.partition(": ")
    sides = re.split(" ([<>]) ", rest)
    require(len(sides) == 3, advice)
    terms, bound = [], 0.0
    for side, text in ((1, sides[0]), (-1, sides[2])):
        words = ["+", *re.split(" ([+-]) ", text)]
        for sign, term in zip(words[::2], words[1::2], strict=True):
            factor = side if sign == "+" else -side
            if number := NUMBER.fullmatch(term):
                is_ln, value = number.groups()
                bound -= factor * (math.log(float(value)) if is_ln else float(value))
            else:
                value = VALUE.fullmatch(term)
                require(value, advice)
                terms.append((factor, value[1], value[2] or "0"))
    require(terms, advice)
    return SimpleNamespace(measure=measure, terms=terms, sign=sides[1], bound=bound)


def check_name(arm):
    """Raise UserError for a name of an arm that claims and --arms could not read."""
    is_plain = not re.search("[,@]| [<>+-] ", arm) and not NUMBER.fullmatch(arm)
    problem = f"arm {arm!r} is a number, or has a comma, an @, or a <, >, + or - between spaces"
    require(is_plain, f"{problem}, which claims or --arms would misread: rename it")


def judge(line, board):
    """Judge a claim on sums of the same seeds. Returns a line; None if a value is not measured."""
    claim = parse_claim(line)
    found = [(factor, board.of(arm, claim.measure, n)) for factor, arm, n in claim.terms]
    arms = [arm for _, arm, _ in claim.terms]
    # only seeds that all of them have are compared
    seeds = board.different(set.intersection(*(set(values) for _, values in found)), arms)
    if not seeds:
        failed = [arm for arm in arms if arm in board.failed]
        return f"- {line}: not judged, for {failed[0]} failed" if failed else None
    if not board.scored_alike(arms, claim.measure):
        return f"- {line}: not judged, for the arms were scored on other token ids"
    sums = [sum(factor * values[seed] for factor, values in found) for seed in seeds]
    verdict = find_verdict(sums, claim.sign, claim.bound)
    measured = format_interval(sums, "+")
    if len(seeds) < len(board.seeds):  # a run has failed, or is the same as another
        verdict += f", on {len(seeds)} of {len(board.seeds)} seeds"
    return f"- {line}: {measured}, {claim.sign} {claim.bound:.4g}: {verdict}"


def find_verdict(differences, sign, bound):
    """Return the verdict, in the words of RULE."""
    mean, half_width = interval(differences)
    side = 1 if sign == ">" else -1
    margin = side * (mean - bound)
    if math.isnan(half_width):
        return "not judged (a single seed has no interval)"
    if margin > half_width:
        return "pass"
    if margin >= -half_width:
        return "undecided"
    return "contradicted" if side * mean < -half_width else "smaller"


def claim_lines(experiment, board):
    """Return the lines of the claims that were measured, below their headings; none if the numbers
    mean nothing.
    """
    lines, heading = [], []
    for claim in experiment.claims if board.b.budget != "try" else ():
        if claim.startswith("#"):
            heading = ["", f"##{claim}", ""]
            continue
        judged = judge(claim, board)
        if judged:
            lines += [*heading, judged]
            heading = []
    return lines


def count_verdicts(lines):
    """Return how many of the lines of claims have each verdict, in words."""
    claims = [line for line in lines if line.startswith("- ")]
    found = collections.Counter(VERDICT.search(line)[1] for line in claims)
    return f"Claims: {', '.join(f'{found[name]} {name}' for name in VERDICTS if found[name])}."


# -----------------------------------------------------------------------------
# Tables and the figure. A table is (heading, measures, lengths).


def format_table(board, names, measures, lengths):
    """Return a Markdown table: a line for each arm, a column for each measure and length."""
    columns = [(measure, length) for measure in measures for length in lengths]
    header = [""]
    for measure, length in columns:
        words = [measure] if len(measures) > 1 or length == "0" else []
        if length != "0":
            words.append(f"{count_tokens(length, board.b):,}")
        if "L" in length:
            words.append(f"({length})")
        header.append(" ".join(words))
    rows = []
    for name in names:
        cells = [board.cell(name, *column) for column in columns]
        if name in board.failed and set(cells) == {"–"}:
            cells[0] = f"failed: {board.failed[name]}"
        if set(cells) != {"–"}:  # this arm has none of these measures
            rows.append([name, *cells])
    return Table("", header, rows).markdown().splitlines()


def rank(board, measures, lengths):
    """Sort the arms by their mean loss; those that lack a length come last.

    Of a first measure that is no loss, they stay in the order of the file.
    """
    if not re.search("loss|chunked|last-quarter|aligned|sliding", measures[0]):
        return board.arms

    def mean(name):
        points = board.points(name, measures[0], lengths)
        total = sum(point[1] for point in points)
        return len(points) < len(lengths), total / max(1, len(points))

    return sorted(board.arms, key=mean)


def format_report(experiment, board):
    """Return the lines of NAME.md."""
    lines = [f"# {experiment.title or experiment.name}", "", f"`{board.command}`: {board.note}."]
    sizes = [f"{name}={size}" for name, size in vars(board.b).items() if name not in NO_SIZES]
    if sizes:
        lines += ["", f"Budget {board.b.budget}: `{' '.join(sizes)}`."]
    is_try = board.b.budget == "try"
    if is_try:
        lines += ["", "The budget `try` shows that the commands work: its numbers mean nothing."]
    lines += ["", experiment.about or ABOUT]
    file = f"{experiment.name}.json"
    lines += ["", f"Commands, flags and run folders of each row: [{file}]({file})."]
    if board.failed:
        lines += ["", "## Failed", "", *(f"- {name}, {why}" for name, why in board.failed.items())]
    tables = board.default_tables() if experiment.tables is None else experiment.tables
    tables = [(heading, as_list(measures), lengths) for heading, measures, lengths in tables]
    names = rank(board, *tables[0][1:]) if tables else []
    for heading, measures, lengths in tables:
        lines += ["", f"## {heading}", "", *format_table(board, names, measures, lengths)]
        for measure in measures:
            for sentence in board.other_tokens(measure):
                lines += ["", sentence]
    if experiment.plot or any(len(lengths) > 1 for _, _, lengths in tables):
        lines += ["", f"![figure]({experiment.name}.png)"]
    if experiment.notes:
        lines += ["", *experiment.notes(board)]
    if board.unequal:
        lines += ["", "## Unequal in training", "", *(f"- {line}" for line in board.unequal)]
    claims = claim_lines(experiment, board)
    if claims:
        blank = [""] * bool(claims[0])  # before a heading there is one already
        lines += ["", "## Claims", "", f"{count_verdicts(claims)} ({RULE})", *blank, *claims]
    return lines


def as_list(value):
    return [value] if isinstance(value, str) else list(value)


def plot_tables(tables, board, file, title="", shown=()):
    """Plot each table with several lengths, as curves.

    title: the finding, of budgets but try and gpu. shown: arm -> label. Six arms have a colour,
    first of shown, then in the order of the table; the others are gray.
    """
    tables = [(heading, as_list(m), n) for heading, m, n in tables or board.default_tables()]
    tables = [table for table in tables if len(table[2]) > 1]
    pyplot = figures.import_pyplot(file) if tables else None
    if pyplot is None:
        return
    names = rank(board, *tables[0][1:])
    names = [name for name in names if any(board.points(name, m[0], n) for _, m, n in tables)]
    labels = {x: dict(shown).get(x, x) for x in (*shown, *names) if x in names}
    labels = dict(list(labels.items())[:6])
    n_columns = 2 - len(tables) % 2
    n_rows = len(tables) // n_columns
    figure = pyplot.figure(figsize=(9, 4.5 * n_rows), layout="constrained")  # 1,800 pixels wide
    axes = figure.subplots(n_rows, n_columns, squeeze=False)
    for axis, table in zip(axes.flat, tables, strict=True):
        plot_table(axis, table, board, names, labels)
    if board.b.budget not in ("try", "gpu"):
        figure.suptitle(title, fontsize=13, fontweight="bold", wrap=True)
    figures.save(figure, file)
    pyplot.close(figure)


def plot_table(axis, table, board, names, shown):
    """Plot the first measure of a table: curves of shown, and the other names in gray."""
    heading, measures, lengths = table
    unit = "byte" if board.b.dataset == "python" else "token"
    label = label_of(measures[0], board.units).replace("token", unit)
    axis.set(title=heading, xscale="log", xlabel=f"length of the text, {unit}s", ylabel=label)
    ends = []
    for number, (name, text) in enumerate(shown.items()):
        points = board.points(name, measures[0], lengths)
        if not points:
            continue
        x, mean, half_width = map(list, zip(*points, strict=True))
        color = RED if name in UNCHANGED_ROPE else COLORS[number % len(COLORS)]
        style = {**figures.curve_style(number), "color": color}
        if "fraction" in label:  # whiskers would leave 0 to 1
            axis.plot(x, mean, **style)
            for length in lengths:
                values = board.runs_of(name, measures[0], length)
                axis.plot([count_tokens(length, board.b)] * len(values), values, ".", color=color)
            axis.set_ylim(-0.03, 1.03)
        else:
            axis.errorbar(x, mean, half_width, capsize=2, elinewidth=1, **style)
        ends.append((text, x[-1], mean[-1], color))
    axis.set(xlim=axis.get_xlim(), ylim=axis.get_ylim())  # limits of the curves with a colour
    for name in names:
        points = board.points(name, measures[0], lengths)
        if name not in shown and points:
            x, mean, _ = zip(*points, strict=True)
            axis.plot(x, mean, color="lightgray", linewidth=1, zorder=0)
    ticks = sorted({count_tokens(length, board.b) for length in lengths})
    figures.mark_lengths(axis, [n for n in board.original_lengths if ticks[0] <= n <= ticks[-1]])
    # Labels of lengths next to each other would overlap.
    apart = (ticks[-1] / ticks[0]) ** 0.1
    is_free = [True, *(b > apart * a for a, b in pairwise(ticks))]
    labels = [f"{n:,}" if free else "" for n, free in zip(ticks, is_free, strict=True)]
    for length in {*ticks} & {*board.original_lengths}:
        labels[ticks.index(length)] += "\ntrained"
    axis.set_xticks(ticks, labels)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    label_ends(axis, ends)


def label_ends(axis, ends):
    """Write names at the right ends of curves, one above the other: (name, x, y, color)."""
    low, high = axis.get_ylim()
    place = -math.inf
    for name, x, y, color in sorted(ends, key=lambda end: end[2]):
        place = max(min(y, high), place + (high - low) / 18)
        style = {"color": color, "va": "center", "fontsize": 9}
        axis.annotate(name, (x, y), (1.02, place), textcoords=("axes fraction", "data"), **style)


# Words in the names of what evaluate.py measures -> unit.
UNITS = dict.fromkeys(("chunked", "last-quarter", "sliding", "token-aligned"), "nats per token")
UNITS |= {"position": "nats per token", "nats": "nats per answer", "gain": "nats per answer"}
UNITS |= dict.fromkeys(("needle", "accuracy"), "fraction of prompts")


def label_of(measure, units):
    """Return the label of an axis: what is measured, and its unit if it is known.

    units: measure -> unit, of measures that are not evaluate.py's.
    """
    found = [units.get(measure), *(UNITS.get(word) for word in measure.split())]
    unit = next(filter(None, found), "")
    if unit == "nats per token" and "loss" not in measure:
        measure = f"loss ({measure})"
    return f"{measure}, {unit}" if unit else measure
