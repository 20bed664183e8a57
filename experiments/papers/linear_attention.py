"""RoPE in linear attention (RoFormer, section 3.3): a scheme to use, and its experiment.

    python experiments/papers/linear_attention.py               about 25 minutes of 2 cores
    python experiments/papers/linear_attention.py --seeds=1     one seed: processes may share them
    python experiments/papers/linear_attention.py --budget=try  seconds, a test without meaning
    python train.py --entry=experiments/papers/linear_attention.py
    python train.py --entry=experiments/papers/linear_attention.py --rope_fraction=0

The last two train one model, with RoPE and without. extend.py, evaluate.py and sample.py take
--entry, too, and all methods of RoPE that scale frequencies. With phi(x) = elu(x) + 1:

    o_m = sum_{n <= m} (R_m phi(q_m))^T (R_n phi(k_n)) v_n / sum_{n <= m} phi(q_m)^T phi(k_n)

Features are rotated after phi, in the numerator only: the denominator is then a sum of positive
numbers. Queries are not scaled by 1 / sqrt(head_dim): outside phi the factor would cancel.

The experiment trains softmax and linear attention, each without positions and with RoPE, and linear
attention with a rotated denominator, and evaluates them at up to 8 times the training length. Stop
at any time: the same command continues after the last finished run. Runs are kept in
out/linear_attention; the results go to linear_attention.md, .json and .png in --out_dir.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanolong import python_version  # noqa: F401  # isort: skip

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from model import POSITIONS, RoPE
from nanolong import cli
from nanolong.errors import UserError
from nanolong.validate import require
from rope_scaling import EVALUATION_ONLY, OPTIONS

CHUNK = 32  # tokens whose products are a masked matrix; earlier ones are summed into a state


# -----------------------------------------------------------------------------
# The schemes of model.py that are refused, and why


NO_CHANGE = "it adds to the embeddings, and attention is that of nope"
REFUSED = {
    "learned": NO_CHANGE,
    "sinusoidal": NO_CHANGE,
    "shaw": "it has a vector for each distance, and a sum over keys does not know distances",
    "nezha": "it has a vector for each distance, and a sum over keys does not know distances",
    "xl": "its term by distance has both signs, and the denominator could cross zero",
    "t5": "its score by bucket of distances cannot be a product of a query's and a key's features",
    "alibi": "it subtracts from each score, whose sum, the denominator, could cross zero",
    "kerple": "its logarithm of the distance is no product of a query's and a key's features",
    "kerple-power": "its power of the distance is no product of a query's and a key's features",
    "sandwich": "it subtracts from each score, whose sum, the denominator, could cross zero",
}


def refusal(pos):
    """Return why a scheme of model.py is refused in linear attention; None for nope and rope."""
    require(
        pos in ("nope", "rope", *REFUSED),
        f"there is no position scheme {pos!r}: choose from {', '.join(POSITIONS)}",
    )
    return REFUSED.get(pos)


def check_pos(pos):
    """Raise UserError unless a scheme of model.py works in linear attention."""
    reason = refusal(pos)
    if reason:
        raise UserError(f"{pos} is not used in linear attention, since {reason}: use nope or rope")


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
# The scheme. nanolong/entry.py takes it from this file, which therefore has no other.


class LinearAttention(RoPE):
    """
    Linear attention with RoPE in the numerator; with rope_fraction=0 it has no positions.

    All layers share it. Generation is recurrent: what a cache holds is a state of fixed size.
    """

    methods = {name: OPTIONS[name] for name in OPTIONS if name not in EVALUATION_ONLY}
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

    def attend(self, q, k, v, pos, layer, cache, **mask):
        """
        Attend from queries (B, H, T, D) to keys (B, Hk, T, D) and, with a cache, to those before.

        Computes in float32, or float64. mask["scale"] is not used: see the top of the file.
        """
        self.check_call(cache, mask)
        dtype = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(v.device.type, enabled=False):
            # Map to positive features, and rotate these.
            q = feature_map(q.to(dtype))
            k = feature_map(k.to(dtype))
            rotated = self.rotate(q, k, pos, layer)
            if self.observe is not None:
                self.observe((q, k), rotated)
            # A cache stores the state as its keys, and the sum of the keys as its values. When the
            # tables change it drops both, and the whole text is computed again.
            state = None if cache is None else cache.keys.get(layer)
            key_sum = None if cache is None else cache.values.get(layer)
            # Sum over the keys.
            is_one_token = state is not None and q.shape[2] == 1
            product = recurrent_product if is_one_token else chunked_product
            numerator, state = product(*rotated, v.to(dtype), state)
            summed = rotated if self.rotate_denominator else (q, k)
            denominator, key_sum = running_dot(*summed, key_sum)
            if cache is not None:
                cache.keys[layer] = state
                cache.values[layer] = key_sum
            return (numerator / denominator[..., None]).to(v.dtype)

    def check_call(self, cache, mask):
        """Raise UserError for what a state cannot do."""
        require(
            mask.get("docs") is None,
            "linear attention has one state for the whole text, so documents cannot be kept "
            "separate, nor prompts of unequal length be one batch: leave out --separate_docs, or "
            "give prompts one at a time",
        )
        if cache is not None and cache.fixed_shape:
            # no UserError: on a GPU, where nobody has asked for it, sampling goes on without it
            raise RuntimeError("linear attention has no decoding step of fixed shape")


# -----------------------------------------------------------------------------
# The experiment: linear_attention_runs.py measures, linear_attention_report.py reports.


@dataclass
class LinearConfig:
    pos: tuple[str, ...] = ("nope", "rope")  # schemes, in softmax and in linear attention
    budget: Literal["cpu", "try"] = "cpu"  # cpu: 0.5 M parameters, 64 tokens; try: seconds, a test
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds of the runs of each model
    dataset: str = "python"  # text for training and evaluation
    max_tokens: int = 65536  # tokens of validation text that are scored
    runs: str = "out/linear_attention"  # folder for the models and for finished measurements
    out_dir: str = ""  # folder of the report; default: that of the runs
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    # dtype of matrix products outside attention
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    def __post_init__(self):
        require(self.pos, "pos is empty: give schemes, as in --pos=nope,rope")
        for pos in self.pos:
            check_pos(pos)
        require(self.seeds, "seeds is empty: give seeds, as in --seeds=1,2,3")
        for seed in self.seeds:
            require(seed >= 1, f"seed {seed} is too small: give at least 1")


def main():
    from experiments.papers.linear_attention_report import write_report
    from experiments.papers.linear_attention_runs import measure

    cfg, *_ = cli.parse(LinearConfig, about=__doc__)
    write_report(measure(cfg), Path(cfg.out_dir or cfg.runs))
    return 0


if __name__ == "__main__":
    cli.run_main(main)
