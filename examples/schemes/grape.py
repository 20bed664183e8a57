"""GRAPE, multiplicative with context (Zhang et al., ICLR 2026): RoPE at a pace that tokens set.

    python train.py --entry=examples/schemes/grape.py config/debug.toml

With x what attention is computed from, one number for all heads of a layer, and rates theta_c of
the pairs c, which are RoPE's of base 10,000 at first and trained:

    omega_t = sigmoid((w . x_t + b) / 16)      angle_t = theta_c (omega_1 + ... + omega_(t-1))

w = 0 and b = -6.9 at first, as in the published code, so omega is 0.39.

Source: Zhang et al., Group Representational Position Encoding, 2025 (arXiv 2512.07805).
"""

import torch
from torch import nn

import kernels
from model import NoPE


class GRAPE(NoPE):
    pairs = "head_dim"

    def __init__(self, config):
        super().__init__(config)
        L, half = config.n_layer, config.head_dim // 2
        self.weight = nn.Parameter(torch.zeros(L, config.n_embd))
        self.shift = nn.Parameter(torch.full((L,), -6.9))
        theta = 10_000.0 ** -(torch.arange(half) / half)
        self.log_theta = nn.Parameter(theta.log().expand(L, half).clone())

    def rotate(self, q, k, x, layer, context):
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = (x.to(wide) * self.weight[layer].to(wide)).sum(-1) + self.shift[layer]
        omega = torch.sigmoid(logits / 16)[:, None, :, None]  # (B, 1, T, 1): of all heads
        before = context.sum(layer, omega) - omega
        return kernels.rotate_by(q, k, before * self.log_theta[layer].exp())
