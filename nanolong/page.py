"""Parts of an HTML page: escaped text, tables, and figures of curves as SVG.

nanolong/report.html has the style sheet for their classes, which gives the curves their colours,
and the script that shows the values of their points.
"""

import html
import json
import math
from dataclasses import dataclass

from nanolong.plots import spread
from nanolong.strict_json import without_infinities

# -----------------------------------------------------------------------------
# Text

# Characters without a glyph: control characters become their symbols. UTF-8 has no surrogates.
INVISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
INVISIBLE.update(dict.fromkeys((*range(0x7F, 0xA0), *range(0xD800, 0xE000)), 0xFFFD))
# In a script element "<" may end it.
JSON_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def visible(text):
    """Return text with a symbol for each character that a page cannot show."""
    return str(text).translate(INVISIBLE)


def escape(text):
    """Return text as HTML, for the content of an element or a quoted attribute."""
    return html.escape(visible(text))


def inline_json(value):
    """Return a value as JSON for a script element; a number that is not finite becomes null."""
    text = json.dumps(
        without_infinities(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    return text.translate(JSON_ESCAPES)


def is_finite(value):
    return value is not None and math.isfinite(value)


# -----------------------------------------------------------------------------
# Tables


def table(caption, header, rows, kind="", shades=None):
    """Return a table of texts. shades: (row, column) -> fraction of the full colour."""
    lines = []
    for i, (label, *cells) in enumerate(rows):
        line = f'<tr><th scope="row">{escape(label)}</th>'
        for j, cell in enumerate(cells):
            style = ""
            if shades and (i, j) in shades:
                style = f' class="shade" style="--level:{100 * shades[i, j]:.0f}%"'
            line += f"<td{style}>{escape(cell)}</td>"
        lines.append(f"{line}</tr>\n")
    columns = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    return (
        f'<div class="table {kind}"><button type="button" hidden>Copy</button><table>'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{columns}</tr></thead>\n"
        f"<tbody>\n{''.join(lines)}</tbody></table></div>\n"
    )


# -----------------------------------------------------------------------------
# Figures

# A figure has 720 by 330 units; its curves lie between these.
LEFT, RIGHT, TOP, BOTTOM = 70, 704, 30, 274
X = (LEFT, RIGHT)
Y = (BOTTOM, TOP)

# Colours alone do not separate six curves: each style has a dash pattern and a marker, too. The
# last one is gray, for what belongs to no checkpoint.
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 4", "4 2", "3 3")
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-4 -4h8v8h-8z",
    "M0 -5L5 4H-5z",
    "M0 -5.5L5.5 0L0 5.5L-5.5 0z",
    "M0 5L5 -4H-5z",
    "M-5 -1.5h3.5v-3.5h3v3.5h3.5v3h-3.5v3.5h-3v-3.5h-3.5z",
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",
)
GRAY = len(MARKERS) - 1


@dataclass
class Curve:
    """Points (x, y, low, high, text) of a figure; low and high are None without an interval."""

    style: int  # which of MARKERS
    name: str
    points: list


@dataclass
class Axis:
    """Maps values from `low` to `high` to units from `start` to `end`, and marks the ticks."""

    label: str
    low: float
    high: float
    start: float
    end: float
    log: bool
    ticks: list

    def at(self, value):
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def linear_axis(label, values, ends):
    """Return an Axis with three to seven ticks at round numbers. ends: X or Y."""
    margin = 0.06 * (max(values) - min(values)) or 0.5
    low, high = min(values) - margin, max(values) + margin
    power = 10.0 ** math.floor(math.log10((high - low) / 7))
    step = next(power * k for k in (1, 2, 5, 10) if (high - low) / (power * k) <= 7)
    ticks = [round(i * step, 9) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(label, low, high, *ends, False, ticks)


def log_axis(label, values, ends, ticks):
    """Return an Axis on a log scale, with those of the ticks whose labels do not touch."""
    low, high = min(values) / 1.2, max(values) * 1.2
    label_size = 80 if ends == X else 24
    gap = label_size / abs(ends[1] - ends[0]) * math.log(high / low)
    ticks = spread([tick for tick in ticks if low <= tick <= high], gap)
    return Axis(label, low, high, *ends, True, ticks)


def draw_axes(x, y):
    """Return the grid, the ticks and their labels."""
    lines = [f'<text x="{LEFT}" y="12">{escape(y.label)}</text>']
    for tick in y.ticks:
        lines.append(f'<path class="grid" d="M{LEFT} {y.at(tick):.1f}H{RIGHT}"/>')
        lines.append(f'<text class="end" x="{LEFT - 8}" y="{y.at(tick):.1f}">{tick:,g}</text>')
    for tick in x.ticks:
        place = f"{x.at(tick):.1f}"
        lines.append(f'<path class="grid" d="M{place} {BOTTOM}v6"/>')
        lines.append(f'<text class="middle" x="{place}" y="{BOTTOM + 20}">{tick:,.0f}</text>')
    middle = (LEFT + RIGHT) / 2
    label = escape(x.label)
    lines.append(f'<text class="middle" x="{middle}" y="{BOTTOM + 46}">{label}</text>')
    return "".join(lines)


def draw_rule(x, y, axis, value, label):
    """Return a dashed line across the figure at a value of one of its axes."""
    place = f"{axis.at(value):.1f}"
    path = f"M{place} {TOP}V{BOTTOM}"
    at = f'x="{place}" dx="6" y="{TOP + 4}"'
    if axis is y:
        path = f"M{LEFT} {place}H{RIGHT}"
        at = f'class="end" x="{RIGHT}" y="{axis.at(value) - 12:.1f}"'
    elif axis.at(value) >= (LEFT + RIGHT) / 2:
        at = f'class="end" x="{place}" dx="-6" y="{TOP + 4}"'
    return f'<path class="rule" d="{path}"/><text {at}>{escape(label)}</text>'


def draw_curve(curve, x, y, shift, tab_stop):
    """Return a curve: its line, interval bars and points, of which the first may be a tab stop.

    shift: to the right, so that the bars of several curves do not hide each other.
    """
    places = [(x.at(point[0]) + shift, y.at(point[1])) for point in curve.points]
    line = "L".join(f"{px:.1f} {py:.1f}" for px, py in places)
    parts = [f'<path class="line" stroke-dasharray="{DASHES[curve.style]}" d="M{line}"/>']
    for (px, py), (_, _, low, high, text) in zip(places, curve.points, strict=True):
        if low is not None:
            parts.append(f'<path class="bar" d="M{px:.1f} {y.at(low):.1f}V{y.at(high):.1f}"/>')
        parts.append(
            f'<g transform="translate({px:.1f} {py:.1f})"><path class="point" role="img" '
            f'tabindex="{tab_stop}" aria-label="{escape(text)}" '
            f'd="{MARKERS[curve.style]}"/></g>'
        )
        tab_stop = -1
    return f'<g class="curve style{curve.style}">{"".join(parts)}</g>'


def draw_key(curve):
    """Return the checkbox of a curve, with a sample of it."""
    style = curve.style
    return (
        f'<label class="style{style}"><input type="checkbox" checked>'
        '<svg class="key" viewBox="-18 -7 36 14" aria-hidden="true">'
        f'<path class="line" stroke-dasharray="{DASHES[style]}" d="M-16 0H16"/>'
        f'<path class="point" d="{MARKERS[style]}"/></svg>{escape(curve.name)}</label>'
    )


def figure(caption, curves, x, y, rules=()):
    """Return a figure with a checkbox for each curve. rules: (Axis, value, label) to mark.

    Only the first point is a tab stop: the page's script moves it with the arrow keys.
    """
    shapes = [draw_rule(x, y, *rule) for rule in rules]
    curves = [curve for curve in curves if curve.points]
    for i, curve in enumerate(curves):
        shift = 0 if GRAY in (c.style for c in curves) else 3 * i - 1.5 * (len(curves) - 1)
        shapes.append(draw_curve(curve, x, y, shift, -1 if i else 0))
    caption = escape(caption)
    return (
        f"<figure><figcaption>{caption}</figcaption>"
        f'<div class="keys">{"".join(map(draw_key, curves))}</div>'
        f'<svg class="chart" viewBox="0 0 720 330" role="group" aria-label="{caption}">'
        f"{draw_axes(x, y)}{''.join(shapes)}</svg></figure>\n"
    )
