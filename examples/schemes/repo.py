"""RePo (Li et al. 2025, arXiv 2512.14391): RoPE at positions that a network reads off each token.

    python train.py --entry=examples/schemes/repo.py config/debug.toml

In all layers but the lowest third, for each key head, with x what attention is computed from:

    z_t = W_z (silu(W_g x_t) * (W_c x_t))     real, of any size, not summed; C/8 hidden channels

Queries and keys are rotated by z_t times RoPE's frequencies. Lower layers are RoPE's: in the first
one z depends on the token alone, so it holds no order. Extension methods are RoPE's.
"""

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from model import RoPE
from rope_scaling import ATTENTION, OPTIONS


class RePo(RoPE):
    methods = {name: OPTIONS[name] for name in OPTIONS if name not in ATTENTION}

    def __init__(self, config):
        super().__init__(config)
        L, C, n = config.n_layer, config.n_embd, config.n_embd // 8
        self.first_layer = max(1, L // 3)  # 5 of 16 in the paper
        std = 0.02 * (2048 / C) ** 0.5  # 0.02 at the paper's 2,048 channels
        shapes = (n, C), (n, C), (config.n_kv_head, n)
        self.gate, self.value, self.out = (nn.Parameter(torch.randn(L, *s) * std) for s in shapes)

    @classmethod
    def counts_indices(cls):
        return True  # upper layers do not read position ids

    def rotate(self, q, k, x, layer, context):
        if layer < self.first_layer:
            return super().rotate(q, k, x, layer, context)
        wide = torch.promote_types(x.dtype, torch.float32)
        gate, value, out = (w[layer].to(wide) for w in (self.gate, self.value, self.out))
        with torch.autocast(x.device.type, enabled=False):  # angles need digits
            x = x.to(wide)
            z = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, value), out)  # (B, T, Hk)
        q, k = q * self.attention_factor, k * self.attention_factor
        return kernels.rotate_by(q, k, z.mT[..., None] * self.inv_freq)
