"""Linear attention with RoPE in the denominator, too: an arm of linear_attention.py.

Rotated features have both signs, so the denominator may come near zero, or below it.
"""

from examples.schemes.linear_attention import LinearAttention


class RotatesBoth(LinearAttention):
    rotate_denominator = True
