"""What the position schemes do, drawn from their own tables: nothing is trained.

    python experiments/figures.py                          writes results/figures/positions.png
    python experiments/figures.py --length=1024 --out=out/positions.png

Panels: the sinusoidal embeddings and the rotary angles' cosines as heat maps (a line marks where pairs no longer complete a turn within the length),
nezha's vectors; and, over distance, T5's bucket and the scores that ALiBi, sandwich and kerple (as it is initialised) add for each head.
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import config  # first: it says in one sentence that a Python is too old
import math
from dataclasses import dataclass

import torch

from config import UserError
from evaluate import pyplot
from model import POSITIONS, GPTConfig, Refused


@dataclass
class FiguresConfig:
    out: str = "results/figures/positions.png"  # the PNG to write
    length: int = 256   # tokens that are drawn, and the trained length
    n_head: int = 8     # heads
    head_dim: int = 64  # width of a head; the model's is n_head times that

    def __post_init__(self):
        if not self.out.endswith(".png"):
            raise UserError(f"--out={self.out} must end in .png")
        if min(self.length - 1, self.n_head, self.head_dim) < 1 or max(self.length, self.n_head, self.head_dim) > 8192:
            raise UserError("length must be at least 2, n_head and head_dim at least 1, and each at most 8192")


def main():
    cfg, *_ = config.parse(FiguresConfig, about=__doc__)
    if not (plt := pyplot(cfg.out)):
        return 1
    torch.manual_seed(0)
    n, scheme = cfg.length, {}
    for pos in ("sinusoidal", "rope", "nezha", "t5", "alibi", "sandwich", "kerple", "kerple-power"):
        scheme[pos] = POSITIONS[pos](GPTConfig(pos=pos, n_head=cfg.n_head, head_dim=cfg.head_dim, n_embd=cfg.n_head * cfg.head_dim, block_size=n))
    figure, axes = plt.subplots(2, 4, figsize=(17, 7.6), layout="constrained")

    def heat(panel, image, title, x, y="position"):
        drawn = panel.imshow(image.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest", origin="lower")
        panel.set(title=title, xlabel=x, ylabel=y)
        figure.colorbar(drawn, ax=panel, shrink=0.8)

    where = torch.arange(n)
    with torch.no_grad():
        sinusoids = scheme["sinusoidal"].embed(torch.zeros(1, n, cfg.n_head * cfg.head_dim), where)[0] / scheme["sinusoidal"].scale
        heat(axes[0][0], sinusoids, "sinusoidal: added to the embeddings", "channel")
        rope = scheme["rope"]
        heat(axes[0][1], (where[:, None] * rope.inv_freq).cos(), "rope: cosine of each pair's angle", "pair, fastest first")
        turning = int((2 * math.pi / rope.inv_freq <= n).sum())
        axes[0][1].axvline(turning - 0.5, color="black", linestyle="--", linewidth=1)
        axes[0][1].text(turning, n * 0.96, f"no full turn in {n} tokens", fontsize=8, va="top", backgroundcolor="white")
        heat(axes[0][2], scheme["nezha"].relative(1000, 0)[0][0], "nezha: added to keys and values", "channel", f"distance, from {scheme['nezha'].clip} on the same")
        bucket = scheme["t5"].bucket
        axes[0][3].step(range(1, n), bucket[torch.arange(1, n).clamp(max=len(bucket) - 1)].tolist(), where="post")
        axes[0][3].set(title="t5: bucket of a distance", xscale="log", xlabel="distance", ylabel="bucket")
        for panel, pos, title in zip(axes[1], ("alibi", "sandwich", "kerple", "kerple-power"), ("alibi", "sandwich", "kerple, as initialised", "kerple-power, as initialised")):
            bias = scheme[pos].bias(n, 0)
            bias = -bias[:, None] * where if bias.dim() == 1 else bias[:, where.clamp(max=bias.shape[1] - 1)]  # (H, n)
            for head, line in enumerate(bias):
                panel.plot(where.numpy(), line.numpy(), color=plt.get_cmap("viridis")(head / max(1, cfg.n_head - 1)), label=f"head {head}")
            floor = max(-40.0, bias.min().item())
            panel.set(title=title, xlabel="distance", ylabel="added to the scores", ylim=(floor * 1.03 - 0.01, 0.03 * -floor + 0.01))
        if cfg.n_head <= 12:
            axes[1][0].legend(fontsize=7, ncols=2, loc="lower right")
    for panel in (axes[0][3], *axes[1]):
        panel.grid(alpha=0.3)
    figure.suptitle(f"{cfg.n_head} heads of {cfg.head_dim} channels, {n} tokens; scores below -40 are cut off", fontsize=9, color="gray")
    Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(cfg.out, dpi=100)
    plt.close(figure)
    print(f"{cfg.out} is drawn")
    return 0


if __name__ == "__main__":
    config.main(main, Refused)
