"""RoPE with two bases (Gemma 3): one for window layers, a larger one for layers of full attention.

    python train.py --entry=examples/schemes/two_bases.py config/debug.toml --n_layer=6 \
        --layer_pattern=WWWWWF --window=32

Pair c of the R/2 pairs of channels is rotated at position i by

    i local_base^(-2c/R)   in layers with a window
    i global_base^(-2c/R)  in layers of full attention

Window layers never see distances beyond the window, so to extend the context only the frequencies
of the full layers change, as Gemma 3 does by position interpolation. The bases replace --rope_base;
--rope_fraction and the extension methods are RoPE's.

Source: Gemma Team, Gemma 3 Technical Report, 2025.
"""

import dataclasses

import rope_scaling
from model import RoPE


class TwoBases(RoPE):
    local_base = 10_000.0
    global_base = 1_000_000.0
    settings = ("rope_fraction",)  # neither rope_base nor p_rope

    def __init__(self, config):
        super().__init__(config)
        self.window_rope = RoPE(dataclasses.replace(config, rope_base=self.local_base))

    def frequencies(self, method, factor, options):
        """Those of the full layers, which alone are extended."""
        length = self.config.original_length
        return rope_scaling.frequencies(
            method, self.global_base, self.rotary_dim, length, factor, **options
        )

    def tables(self, context):
        """Compute cos and sin for layers of full attention, window layers, and far keys."""
        full, _, far = super().tables(context)
        return full, self.window_rope.tables(context)[0], far
