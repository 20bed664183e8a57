"""What do the position schemes compute? Two figures from their formulas: nothing is trained.

    python experiments/figures.py --out_dir=out/figures

positions.png shows the sinusoidal embeddings; the cosines of RoPE's angles, with a line where the
pairs begin that complete no period within the length; NEZHA's vectors; T5's bucket of a distance;
and the bias of each head of ALiBi, Sandwich and KERPLE (with its initial parameters).
yarn.png shows the wavelengths of RoPE's pairs before and after YaRN extends the context four times.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from nanolong import settings  # isort: skip (first: it refuses an old Python)
import math
from dataclasses import dataclass

import torch

from model import POSITIONS, GPTConfig
from nanolong.errors import run_main
from nanolong.evaluation.figures import import_pyplot, save
from rope_scaling import METHODS

LENGTH = 256  # tokens
CONFIG = GPTConfig(n_head=8, n_embd=512, block_size=LENGTH)


@dataclass
class FiguresConfig:
    out_dir: str = "out/figures"  # folder of positions.png and yarn.png


def draw_heatmap(axis, values, title, x, y):
    style = {"aspect": "auto", "cmap": "RdBu", "origin": "lower", "interpolation": "nearest"}
    axis.figure.colorbar(axis.imshow(values.numpy(), vmin=-1, vmax=1, **style), ax=axis)
    axis.set(title=title, xlabel=x, ylabel=y)


@torch.no_grad()
def plot_positions(axes):
    position = torch.arange(LENGTH)
    # what is added to embeddings, and what RoPE multiplies by
    scheme = POSITIONS["sinusoidal"](CONFIG)
    added = scheme.embed(torch.zeros(1, LENGTH, CONFIG.n_embd), position)[0] / scheme.scale
    title = f"sinusoidal: added to embeddings, / {scheme.scale:.3f}"
    draw_heatmap(axes[0], added, title, "channel", "position, tokens")

    inv_freq = POSITIONS["rope"](CONFIG).inv_freq
    cosines = (position[:, None] * inv_freq).cos()
    title = "rope: cosine of the angle"
    draw_heatmap(axes[1], cosines, title, "pair, fastest first", "position, tokens")
    n_whole = (2 * math.pi / inv_freq <= LENGTH).sum()
    axes[1].axvline(n_whole - 0.5, color="black", linestyle="--")

    keys, _, _ = POSITIONS["nezha"](CONFIG).vectors(1000, 0)  # (1, m, D): the last for all farther
    draw_heatmap(axes[2], keys[0], "nezha: added to keys and values", "channel", "distance, tokens")

    # what depends on the distance alone: buckets, and biases by head
    bucket = POSITIONS["t5"](CONFIG).bucket
    axes[3].step(position[1:], bucket[position[1:].clamp(max=len(bucket) - 1)], where="post")
    axes[3].set(title="t5: bucket of a distance", xscale="log", ylabel="bucket")
    axes[3].set_xlabel("distance, tokens")

    for axis, pos in zip(axes[4:], ("alibi", "sandwich", "kerple", "kerple-power"), strict=True):
        bias = POSITIONS[pos](CONFIG).bias(LENGTH, 0)
        if bias.dim() == 1:  # slopes
            bias = -bias[:, None] * position
        bias = bias[:, position.clamp(max=bias.shape[1] - 1)]
        axis.plot(bias.T, label=[f"head {head}" for head in range(CONFIG.n_head)])
        lowest = max(-40, bias.min().item())  # with a lower score a key gets no attention
        axis.set(title=pos, ylim=(1.03 * lowest, 0))
        axis.set(xlabel="distance, tokens", ylabel="bias of the score, nats")
    axes[4].legend(fontsize=7)


def plot_yarn(axis):
    for method, label in (("none", "before"), ("yarn", "after")):
        inv_freq, _ = METHODS[method](CONFIG.rope_base, CONFIG.head_dim, LENGTH, 4)
        axis.plot(range(1, len(inv_freq) + 1), 2 * math.pi / inv_freq, "o-", label=label)
    for length, style in ((LENGTH, "--"), (4 * LENGTH, ":")):
        axis.axhline(length, color="gray", linestyle=style, label=f"{length:,} tokens")
    axis.set(title="YaRN, 4 times", yscale="log")
    axis.set(xlabel="pair, fastest first", ylabel="wavelength, tokens")
    axis.legend()


def main(argv=None):
    folder = Path(settings.parse(cfg=FiguresConfig, argv=argv).cfg.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    pyplot = import_pyplot(folder / "positions.png")
    if pyplot is None:
        return 1
    torch.manual_seed(0)  # of KERPLE's initial parameters
    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7.6), layout="constrained")
    plot_positions(axes.flat)
    save(figure, folder / "positions.png")
    figure, axis = pyplot.subplots(layout="constrained")
    plot_yarn(axis)
    save(figure, folder / "yarn.png")
    return 0


if __name__ == "__main__":
    run_main(main)
