"""Differential attention (Ye et al. 2024, arXiv 2410.05258) with RoPE: one softmax minus another.

    python train.py --entry=examples/schemes/differential.py config/debug.toml

The queries and keys of a head are cut into two halves of d = D / 2 channels, and RoPE rotates each
half. In layer l = 0, 1, ...

    y = (softmax(q_1 k_1^T / sqrt(d)) - lambda softmax(q_2 k_2^T / sqrt(d))) v
    lambda = exp(a_1 . b_1) - exp(a_2 . b_2) + lambda_0,  lambda_0 = 0.8 - 0.6 exp(-0.3 l)

The heads' outputs are (1 - lambda_0) RMSNorm(y). a and b (d,) and the norm's weight (D,) are
learned for each layer. The paper's models have half as many heads, each twice as wide.
Extension methods are RoPE's, as of a head of d channels.
"""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from model import RoPE
from nanolong.errors import require
from rope_scaling import ATTENTION, OPTIONS


class Differential(RoPE):
    methods = {name: OPTIONS[name] for name in OPTIONS if name not in ATTENTION}

    def __init__(self, config):
        L, D = config.n_layer, config.head_dim
        super().__init__(replace(config, head_dim=D // 2))  # a half is a head to RoPE
        self.a, self.b = (nn.Parameter(torch.randn(L, 2, D // 2) * 0.1) for _ in range(2))
        self.norm_weight = nn.Parameter(torch.ones(L, D))

    @classmethod
    def check_config(cls, config):
        D = config.head_dim
        require(D % 4 == 0, f"head_dim={D} has no two halves of pairs: give a multiple of 4")
        require(not config.sink_scores, "sink_scores is for one softmax, not two: leave it out")
        super().check_config(replace(config, head_dim=D // 2))

    def rotate(self, q, k, x, layer, context):
        q, k = (y.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for y in (q, k))
        q, k = super().rotate(q, k, x, layer, context)  # (B, 2 H, T, d) and (B, 2 Hk, T, d)
        return [y.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3) for y in (q, k)]

    def attend(self, q, k, v, bias, layer, context, **options):
        d = self.config.head_dim
        # Stack the two queries of a head as neighbours, so that both find the keys of its group.
        # Zeros take the place of the other half, because keys stay whole.
        first, second = F.pad(q[..., :d], (0, d)), F.pad(q[..., d:], (d, 0))
        q = torch.stack((first, second), 2).flatten(1, 2)  # (B, 2 H, T, D)
        options["scale"] *= math.sqrt(2)  # 1 / sqrt(d) instead of 1 / sqrt(D)
        y = super().attend(q, k, v, bias, layer, context, **options)
        # Subtract the second softmax, and norm each head, in float32 or float64.
        y = y.to(torch.promote_types(y.dtype, torch.float32))
        first, second = y.unflatten(1, (-1, 2)).unbind(2)  # (B, H, T, D)
        start = 0.8 - 0.6 * math.exp(-0.3 * layer)
        gains = (self.a[layer] * self.b[layer]).sum(-1).exp()
        y = first - (gains[0] - gains[1] + start) * second
        y = F.rms_norm(y, y.shape[-1:], self.norm_weight[layer].to(y.dtype), 1e-5)
        return ((1 - start) * y).to(v.dtype)
