"""p-RoPE (Barbero et al. 2024): RoPE that rotates only the pairs of the highest frequencies.

    python train.py --entry=examples/schemes/p_rope.py config/debug.toml

Of the R/2 pairs of channels, c = 0, 1, ..., pair c of queries and keys is rotated at position i by

    i base^(-2c/R)  for c < p R/2, rounded down
    0               from there on

so p = 1 is RoPE and p = 0 is no position information. The slow pairs then compare content at any
distance. It takes RoPE's settings, --rope_base and --rope_fraction, and its extension methods.

Source: Barbero et al., Round and Round We Go! What makes Rotary Positional Encodings useful?, 2024.
"""

from model import RoPE


class PRoPE(RoPE):
    p = 0.75  # fraction of the pairs that is rotated

    def frequencies(self, method, factor, options):
        inv_freq, attention_factor = super().frequencies(method, factor, options)
        inv_freq[int(self.p * len(inv_freq)) :] = 0
        return inv_freq, attention_factor
