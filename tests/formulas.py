"""The schemes' terms by distance, written from their papers: float64, one distance at a time.

A distance may be a fraction, as position interpolation makes it. The weights are those of the
scheme that is given.
"""

import math

import torch


def alibi_bias(scheme, distance):
    """ALiBi (Press et al. 2022), for a number of heads that is a power of two: (H,)."""
    n = scheme.config.n_head
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / n) for head in range(n)]).double()
    return -slopes * distance


def t5_bias(scheme, distance):
    """
    T5 (Raffel et al. 2020), one-sided, with 32 buckets: (H,).

    Distances that no training sequence has are in the bucket of the greatest that one has.
    """
    max_distance = min(128, scheme.config.original_length)
    bucket = min(int(distance), max_distance - 1)
    if bucket >= 16:
        log_ratio = math.log(bucket / 16) / math.log(max_distance / 16)
        bucket = min(31, 16 + int(log_ratio * 16))
    return scheme.weight[:, bucket].double()


def kerple_bias(scheme, distance):
    """KERPLE, logarithmic (Chi et al. 2022): (H,)."""
    r1 = scheme.r1.double().exp().log1p()  # softplus
    r2 = scheme.r2.double().exp().log1p()
    return -r1 * (1 + r2 * distance).log()


def kerple_power_bias(scheme, distance):
    """KERPLE, power (Chi et al. 2022): (H,)."""
    r1 = scheme.r1.double().exp().log1p()
    r2 = 2 / (1 + (-scheme.r2.double()).exp())
    return -r1 * distance**r2


def sandwich_bias(scheme, distance):
    """Sandwich (Chi et al. 2023), with sinusoids of 128 channels, less its value at 0: (H,)."""
    cosines = [math.cos(distance / 10000 ** (2 * k / 128)) for k in range(1, 65)]
    head = torch.arange(1, scheme.config.n_head + 1).double()
    return scheme.config.n_head / (8 * head) * (sum(cosines) - 64)


BIASES = {
    "alibi": alibi_bias,
    "t5": t5_bias,
    "kerple": kerple_bias,
    "kerple-power": kerple_power_bias,
    "sandwich": sandwich_bias,
}


def sinusoid(position, dim):
    """The embedding of Vaswani et al. (2017), sin, cos, sin, cos, ...: (dim,)."""
    channels = []
    for k in range(dim // 2):
        angle = position / 10000 ** (2 * k / dim)
        channels += [math.sin(angle), math.cos(angle)]
    return torch.tensor(channels, dtype=torch.float64)


def shaw_vectors(scheme, distance, layer, max_distance):
    """The key and value vectors of Shaw et al. (2018), each (D,)."""
    index = min(int(distance), max_distance)
    return scheme.keys[layer, index].double(), scheme.values[layer, index].double()


def nezha_vector(scheme, distance, max_distance):
    """NEZHA's vector of a distance (Wei et al. 2019), for keys and values: (D,)."""
    return sinusoid(min(distance, max_distance), scheme.config.head_dim)


def transformer_xl_keys(scheme, distance, layer):
    """W_R R(distance), where R holds all sines, then all cosines (Dai et al. 2019): (H, D)."""
    R = sinusoid(distance, scheme.config.n_embd)
    R = torch.cat((R[0::2], R[1::2]))
    return (scheme.project[layer].double() @ R).view(scheme.u.shape)
