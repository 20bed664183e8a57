"""SSMax, Scalable-Softmax (Nakanishi 2025), with RoPE: attention that stays sharp as text grows.

    python train.py --entry=examples/schemes/ssmax.py config/debug.toml

The probability of a key whose score is z, among the n keys that the query sees, is

    n^(s z) / sum of n^(s z) over them  =  softmax((s log n) z)

with s learned for each layer and head, so queries are multiplied by s log n. n is the position of
the query plus 1, at most the window with its sinks. This is the number of visible keys where
positions count from 0 in each text, and more than that with --separate_docs and --pose.

It takes RoPE's settings and extension methods.

Source: Nakanishi, Scalable-Softmax Is Superior for Attention, 2025.
"""

import torch
from torch import nn

from model import RoPE


class SSMax(RoPE):
    initial_s = 0.2  # s log n is then 1 at 148 keys

    def __init__(self, config):
        super().__init__(config)
        self.s = nn.Parameter(torch.full((config.n_layer, config.n_head), self.initial_s))

    def rotate(self, q, k, x, layer, context):
        n = context.pos + 1  # (T,) or (B, T)
        if self.config.uses_window(layer):
            n = n.clamp(max=self.config.window + self.config.sinks)
        # (H, T, 1) or (B, H, T, 1)
        scale = self.s[layer][:, None, None] * n.log()[..., None, :, None]
        return super().rotate((q * scale).to(q.dtype), k, x, layer, context)
