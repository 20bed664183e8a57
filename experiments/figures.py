"""Plot what the position schemes compute, from their formulas: nothing is trained.

    python experiments/figures.py
    python experiments/figures.py --length=1024 --out=out/positions.png --yarn_out=out/yarn.png

positions.png has a panel for each of these: the sinusoidal embeddings; the cosines of RoPE's
angles, with a line where the pairs begin that complete no period within the length; NEZHA's
relative vectors; T5's bucket of each distance; and the bias that ALiBi, Sandwich and KERPLE (with
its initial parameters) add to the attention scores of each head.

yarn.png has the wavelengths of RoPE's pairs before and after YaRN extends the context four times.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import python_version  # noqa: F401  # isort: skip
import math
from dataclasses import dataclass

import torch

from experiments.report import save_figure
from model import POSITIONS, GPTConfig
from nanolong import cli, plots, validate
from rope_scaling import METHODS

LOWEST_BIAS = -40.0  # the axis ends here: a score this much lower gets no attention
YARN_FACTOR = 4.0


@dataclass
class FiguresConfig:
    out: str = "out/figures/positions.png"  # the PNG file of the position schemes
    yarn_out: str = "out/figures/yarn.png"  # the PNG file of YaRN's wavelengths
    length: int = 256  # tokens plotted, and the context length of the schemes
    n_head: int = 8  # attention heads
    head_dim: int = 64  # channels of a head; the model has n_head times that

    def __post_init__(self):
        validate.check_png("out", self.out)
        validate.check_png("yarn_out", self.yarn_out)
        for name, least in (("length", 2), ("n_head", 1), ("head_dim", 2)):
            given = getattr(self, name)
            in_range = least <= given <= 8192
            validate.require(in_range, f"{name}={given} is out of range: give {least} to 8,192")
        validate.require(
            self.head_dim % 2 == 0, f"head_dim={self.head_dim} is odd: give an even number"
        )


def make_scheme(pos, cfg):
    """Make a position scheme with its initial parameters."""
    n_embd = cfg.n_head * cfg.head_dim
    config = GPTConfig(
        pos=pos, n_head=cfg.n_head, head_dim=cfg.head_dim, n_embd=n_embd, block_size=cfg.length
    )
    return POSITIONS[pos](config)


def draw_heatmap(axis, values, title, x_label, y_label):
    """Draw values between -1 and 1, (rows, columns), the first row at the bottom."""
    style = {"aspect": "auto", "cmap": "RdBu", "interpolation": "nearest", "origin": "lower"}
    image = axis.imshow(values.numpy(), vmin=-1, vmax=1, **style)
    axis.set(title=title, xlabel=x_label, ylabel=y_label)
    axis.grid(False)
    axis.figure.colorbar(image, ax=axis, shrink=0.8)


def draw_sinusoidal(axis, cfg):
    scheme = make_scheme("sinusoidal", cfg)
    no_embeddings = torch.zeros(1, cfg.length, cfg.n_head * cfg.head_dim)
    sinusoids = scheme.embed(no_embeddings, torch.arange(cfg.length))[0] / scheme.scale
    title = "sinusoidal: added to the token embeddings"
    draw_heatmap(axis, sinusoids, title, "channel", "position")


def draw_rope(axis, cfg):
    scheme = make_scheme("rope", cfg)
    angle = torch.arange(cfg.length)[:, None] * scheme.inv_freq
    title = "rope: cosine of the rotation angle"
    draw_heatmap(axis, angle.cos(), title, "frequency pair (fastest first)", "position")
    n_complete = int((2 * math.pi / scheme.inv_freq <= cfg.length).sum())
    axis.axvline(n_complete - 0.5, color="black", linestyle="--", linewidth=1)
    text = f"no full period\nin {cfg.length} tokens"
    top = cfg.length * 0.96
    axis.text(n_complete, top, text, fontsize=8, verticalalignment="top", backgroundcolor="white")


def draw_nezha(axis, cfg):
    scheme = make_scheme("nezha", cfg)
    keys, _, _ = scheme.relative(1000, 0)  # (1, m, D), up to the distance where they are clipped
    clipped_at = keys.shape[1] - 1
    title = "nezha: added to keys and values"
    draw_heatmap(axis, keys[0], title, "channel", f"distance (clipped at {clipped_at})")


def draw_t5(axis, cfg):
    scheme = make_scheme("t5", cfg)
    distance = torch.arange(1, cfg.length)
    bucket = scheme.bucket[distance.clamp(max=len(scheme.bucket) - 1)]
    axis.step(distance.tolist(), bucket.tolist(), where="post")
    axis.set(title="t5: bucket of a distance", xscale="log")
    axis.set(xlabel="distance (tokens)", ylabel="bucket")


def draw_bias(axis, cfg, pos, title):
    """Draw the bias over distance of every head."""
    from matplotlib import colormaps

    scheme = make_scheme(pos, cfg)
    distance = torch.arange(cfg.length)
    bias = scheme.bias(cfg.length, 0)
    if bias.dim() == 1:  # slopes (H,)
        bias = -bias[:, None] * distance
    else:  # a table over distances (H, m), constant from its last column on
        bias = bias[:, distance.clamp(max=bias.shape[1] - 1)]
    for head, line in enumerate(bias):
        colour = colormaps["viridis"](head / max(1, cfg.n_head - 1))
        axis.plot(distance.numpy(), line.numpy(), color=colour, label=f"head {head}")
    lowest = max(LOWEST_BIAS, bias.min().item())
    axis.set(title=title, xlabel="distance (tokens)", ylabel="attention bias")
    axis.set_ylim(lowest * 1.03 - 0.01, 0.03 * -lowest + 0.01)


BIASES = {
    "alibi": "alibi",
    "sandwich": "sandwich",
    "kerple": "kerple, at initialisation",
    "kerple-power": "kerple-power, at initialisation",
}


@torch.no_grad()
def plot_positions(cfg):
    """Write the figure of the position schemes. Returns whether there is matplotlib for it."""

    def draw(figure, *axes):
        first_row = (draw_sinusoidal, draw_rope, draw_nezha, draw_t5)
        for axis, draw_scheme in zip(axes[:4], first_row, strict=True):
            draw_scheme(axis, cfg)
        for axis, (pos, title) in zip(axes[4:], BIASES.items(), strict=True):
            draw_bias(axis, cfg, pos, title)
        if cfg.n_head <= 12:
            lines, labels = axes[4].get_legend_handles_labels()
            figure.legend(lines, labels, fontsize=9, ncols=cfg.n_head, loc="outside lower center")

    note = (
        f"{cfg.n_head} heads of {cfg.head_dim} channels, {cfg.length} tokens; "
        f"biases below {LOWEST_BIAS:.0f} are cut off"
    )
    return save_figure(cfg.out, draw, (17, 7.6), note, panels=(2, 4), dpi=100)


def plot_yarn(cfg):
    """Write the figure of YaRN's wavelengths."""
    base = GPTConfig.rope_base
    before, _ = METHODS["none"](base, cfg.head_dim, cfg.length, 1.0)
    after, _ = METHODS["yarn"](base, cfg.head_dim, cfg.length, YARN_FACTOR)
    target_length = round(cfg.length * YARN_FACTOR)
    title = f"YaRN, {cfg.length:,} to {target_length:,} tokens"
    plots.plot_wavelengths(before, after, cfg.length, target_length, cfg.yarn_out, title)


def main():
    cfg = cli.parse(cfg=FiguresConfig, about=__doc__).cfg
    torch.manual_seed(0)
    for file in (cfg.out, cfg.yarn_out):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    if not plot_positions(cfg):
        return 1
    plot_yarn(cfg)
    return 0


if __name__ == "__main__":
    cli.run_main(main)
