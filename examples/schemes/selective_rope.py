"""Selective RoPE (Movahedi et al., ICLR 2026): RoPE by angles that are summed along the text.

    python train.py --entry=examples/schemes/selective_rope.py config/debug.toml

With u the hidden states before attention, each key head's part of them divided by its norm:

    phi_t   = W2 W1 u_t                                    D/2 numbers for each key head, rank 32
    step_t  = a_0 phi_t + a_1 phi_(t-1) + ... + a_3 phi_(t-3)     four taps for each of them
    angle_t = base^(-2c/D) (step_1 + ... + step_t)                of pair c

There are no fixed frequencies. The first weights are of size 1 / sqrt(inputs); the paper's are of
size 0.02, so that its first angles are nearly 0.

Source: Movahedi et al., Selective Rotary Position Embedding, 2025 (arXiv 2511.17388).
"""

import torch
import torch.nn.functional as F
from torch import nn

import kernels
from model import NoPE
from nanolong.errors import require


class SelectiveRoPE(NoPE):
    pairs = "head_dim"
    methods = {"none": (), "pi": ()}
    rank, n_taps, base = 32, 4, 500_000.0

    def __init__(self, config):
        super().__init__(config)
        L, C, Hk, half = config.n_layer, config.n_embd, config.n_kv_head, config.head_dim // 2
        require(C % Hk == 0, f"n_embd={C} is not divisible by n_kv_head={Hk}: give a divisor")
        self.down = nn.Parameter(torch.randn(L, self.rank, C) * C**-0.5)
        self.up = nn.Parameter(torch.randn(L, Hk * half, self.rank) * self.rank**-0.5)
        self.taps = nn.Parameter(torch.randn(L, self.n_taps, Hk, 1, half) * self.n_taps**-0.5)
        pair = torch.arange(half, dtype=torch.float64)
        self.register_constant("inv_freq", self.base ** -(pair / half))

    def rotate(self, q, k, x, layer, context):
        wide = torch.promote_types(x.dtype, torch.float32)
        down, up, taps = (w[layer].to(wide) for w in (self.down, self.up, self.taps))
        with torch.autocast(x.device.type, enabled=False):  # a sum adds up what bfloat16 rounds
            u = x.to(wide).unflatten(-1, (self.config.n_kv_head, -1))
            u = F.normalize(u, dim=-1).flatten(-2)
            phi = F.linear(F.linear(u, down), up)
        phi = phi.unflatten(-1, (self.config.n_kv_head, -1)).transpose(1, 2)  # (B, Hk, T, D/2)
        inputs = delayed(phi, self.n_taps - 1, layer, context)
        step = sum(a * y for a, y in zip(taps, inputs, strict=True))
        angles = context.sum(layer, step) * (self.inv_freq / self.position_scale)
        return kernels.rotate_by(q, k, angles)


def delayed(x, n, layer, context):
    """x (B, H, T, c), and x delayed by 1 to n tokens: 0 before its document begins."""
    T = x.shape[2]
    docs = x.new_zeros(1, T) if context.docs is None else context.docs[:, -T:]
    docs = docs[:, None, :, None].to(x.dtype)
    x = torch.cat((x, docs.expand(*x.shape[:3], 1)), -1)  # the number of the document goes along
    x = F.pad(torch.cat((context.before(layer, x, n), x), 2), (0, 0, n, 0))
    parts = [x[:, :, x.shape[2] - d - T : x.shape[2] - d] for d in range(n + 1)]
    return [part[..., :-1] * (part[..., -1:] == docs) for part in parts]
