"""RoPE in linear attention (Su et al. 2021, section 3.3): a scheme that replaces attention.

    python train.py --entry=examples/schemes/linear_attention.py
    python train.py --entry=examples/schemes/linear_attention.py --rope_fraction=0

The second is without positions. extend.py, evaluate.py and sample.py take --entry, too, and all
methods of RoPE that scale frequencies. With phi(x) = elu(x) + 1:

    o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_{n <= m} phi(q_m)^T phi(k_n)

Features are rotated after phi, in the numerator only: the denominator is then a sum of positive
numbers. Queries are not scaled by 1 / sqrt(head_dim): outside phi the factor would cancel.
python experiments/run.py linear_attention measures what it does.
"""

import torch
import torch.nn.functional as F

from model import KVCache, RoPE
from nanolong.errors import require
from rope_scaling import ATTENTION, OPTIONS

CHUNK = 32  # tokens whose products are a masked matrix; earlier ones are summed into a state


# -----------------------------------------------------------------------------
# The sums. A query head h uses key head h // (H / Hk), as in grouped-query attention.


def feature_map(x):
    """
    Map x to phi(x) = elu(x) + 1 (Katharopoulos et al. 2020), positive for every x above -87.

    Written with exp: in float32, elu(x) + 1 is exactly zero from about -17.4 down.
    """
    return x.clamp(max=0).exp() + x.relu()


def chunked_product(q, k, v, state=None, chunk=CHUNK):
    """
    Compute sum_{n <= m} (q_m . k_n) v_n, chunk by chunk.

    q (B, H, T, D), k (B, Hk, T, D), v (B, Hk, T, E); state: sum_n k_n v_n^T of what came before,
    (B, Hk, D, E), or None. Returns (B, H, T, E), and the state after these tokens.
    """
    T = q.shape[2]
    chunk = min(chunk, T)
    # Cut into chunks; tokens of zeros at the end add nothing.
    padding = (0, 0, 0, -T % chunk)
    q = F.pad(q, padding).unflatten(2, (-1, chunk))  # (B, H, N, C, D)
    k = F.pad(k, padding).unflatten(2, (-1, chunk))  # (B, Hk, N, C, D)
    v = F.pad(v, padding).unflatten(2, (-1, chunk))
    q = q.unflatten(1, (k.shape[1], -1))  # (B, Hk, H / Hk, N, C, D)
    # Between chunks: the state before each of them.
    states = (k.mT @ v).cumsum(2)  # (B, Hk, N, D, E)
    first = torch.zeros_like(states[:, :, :1]) if state is None else state[:, :, None]
    states = torch.cat((first, first + states), 2)
    y = q @ states[:, :, None, :-1]
    # Within a chunk: the masked product.
    y = y + (q @ k[:, :, None].mT).tril() @ v[:, :, None]
    return y.flatten(1, 2).flatten(2, 3)[:, :, :T], states[:, :, -1]


def recurrent_product(q, k, v, state):
    """Do what chunked_product() does, for one token: T = 1."""
    state = state + k.mT @ v  # (B, Hk, D, E)
    y = q.unflatten(1, (k.shape[1], -1)) @ state[:, :, None]  # (B, Hk, H / Hk, 1, E)
    return y.flatten(1, 2), state


def running_dot(q, k, key_sum=None):
    """
    Compute sum_{n <= m} q_m . k_n: (B, H, T).

    key_sum: the sum of the keys before, (B, Hk, 1, D), or None. Returns it after these keys, too.
    """
    sums = k.cumsum(2) if key_sum is None else key_sum + k.cumsum(2)
    y = (q.unflatten(1, (k.shape[1], -1)) * sums[:, :, None]).sum(-1)
    return y.flatten(1, 2), sums[:, :, -1:]


# -----------------------------------------------------------------------------
# The scheme


class LinearAttention(RoPE):
    """
    Linear attention with RoPE in the numerator; with rope_fraction=0 it has no positions.

    All layers share it. Generation is recurrent: what a cache holds is a state of fixed size.
    """

    methods = {name: OPTIONS[name] for name in OPTIONS if name not in ATTENTION}
    rotate_denominator = False  # True: as in the numerator, to show that it fails
    observe = None  # called with (q, k) features, and the rotated ones: to measure denominators

    def __init__(self, config):
        require(
            not config.window,
            f"window={config.window} cannot be used in linear attention, whose state holds no "
            "single tokens: leave out --window",
        )
        require(
            set(config.layer_pattern) == {"F"},
            f"layer_pattern={config.layer_pattern} has layers without positions, which would have "
            "softmax attention: leave it out, and give --rope_fraction=0 for no positions",
        )
        require(
            config.attn_scale == 1,
            f"attn_scale={config.attn_scale} has no effect in linear attention, where a factor of "
            "all scores cancels: leave it out",
        )
        super().__init__(config)

    def rotate(self, q, k, x, layer, context):
        return q, k  # attend() rotates their features

    def attend(self, q, k, v, bias, layer, context, **options):
        """
        Attend from queries (B, H, T, D) to keys (B, Hk, T, D) and, with a cache, to those before.

        Computes in float32, or float64. options["scale"] is not used: see the top of the file.
        """
        self.check_call(context)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(v.device.type, enabled=False):
            # Map to positive features, and rotate these.
            q = feature_map(q.to(dtype))
            k = feature_map(k.to(dtype))
            rotated = super().rotate(q, k, None, layer, context)
            if self.observe is not None:
                self.observe((q, k), rotated)
            # A cache stores the state and the sum of the keys. When the tables change it drops
            # both, and the whole text is computed again.
            last = context.last if isinstance(context, KVCache) else {}
            state, key_sum = last.get((layer, "state")), last.get((layer, "key_sum"))
            # Sum over the keys.
            is_one_token = state is not None and q.shape[2] == 1
            product = recurrent_product if is_one_token else chunked_product
            numerator, state = product(*rotated, v.to(dtype), state)
            summed = rotated if self.rotate_denominator else (q, k)
            denominator, key_sum = running_dot(*summed, key_sum)
            last[layer, "state"], last[layer, "key_sum"] = state, key_sum
            return (numerator / denominator[..., None]).to(v.dtype)

    def check_call(self, context):
        """Raise UserError for what a state cannot do."""
        require(
            context.docs is None,
            "linear attention has one state for the whole text, so documents cannot be kept "
            "separate: give --separate_docs=false",
        )
        if context.write_index is not None:
            # no UserError: on a GPU, where nobody has asked for it, sampling goes on without it
            raise RuntimeError("linear attention has no decoding step of fixed shape")
